"""The reference of the Python API: each public name is described in full, and is on one page of it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import stoker
from stoker.errors import Interrupted, StokerError
from stoker.schema import JsonResult

PAGES = Path(__file__).parent.parent / "docs" / "reference" / "python"
HOW_TO_PLUGINS = Path(__file__).parent.parent / "docs" / "how-to" / "plugins.md"

MODULES = ("stoker.transforms", "stoker.integrations", "stoker.testing", "stoker.export")
"""Public modules: all names of their `__all__`."""
TAKEN_AND_RETURNED = (
    "stoker.loader.PointBatch", "stoker.loader.RecordBatch", "stoker.loader.TaskBatch",
    "stoker.loader.WindowBatch", "stoker.monitor.StallMeter", "stoker.monitor.StallReport",
    "stoker.plan.Plan", "stoker.precompute.measure_encode_batch", "stoker.profile.result.Profile",
    "stoker.sources.images.Labels", "stoker.sources.sql.query.QueryTimeouts",
    "stoker.store.BadRecord", "stoker.store.Join", "stoker.store.VerifyReport", "stoker.store.access.Column",
    "stoker.store.join_table",
)  # fmt: skip
"""What public functions take and return."""
OF_AUTHORS = (
    "stoker.cli.command.CommandOutput", "stoker.cli.command.command_output",
    "stoker.monitor.trackers.TrackedRun", "stoker.monitor.trackers.Tracker", "stoker.plugins.Plugin",
    "stoker.plugins.find_plugin",
    "stoker.plugins.plugins_of", "stoker.precompute.encode_here", "stoker.precompute.settings.EncodeShare",
    "stoker.precompute.settings.ShareOutcome", "stoker.schema.Field", "stoker.schema.unfolded",
    "stoker.sources.protocol.BatchSource", "stoker.sources.protocol.FileRef",
    "stoker.sources.protocol.IdentityKeysSource",
    "stoker.sources.protocol.LocatableSource", "stoker.sources.protocol.Part",
    "stoker.sources.protocol.RowSource", "stoker.sources.protocol.SelfCheckingSource",
    "stoker.sources.protocol.SourceIdentity", "stoker.sources.protocol.SplittableSource",
    "stoker.sources.splits.SplitOf",
)  # fmt: skip
"""What the author of a source, an encoder or a plugin uses."""
OF_TYPER = ("stoker.cli.command.Debug", "stoker.cli.command.Json")
"""Annotations of two flags, which docs/how-to/plugins.md shows in use."""

PROTOCOLS = (
    "stoker.Source", "stoker.Encoder", "stoker.sources.protocol.BatchSource",
    "stoker.sources.protocol.RowSource", "stoker.sources.protocol.LocatableSource",
    "stoker.sources.protocol.IdentityKeysSource",
    "stoker.sources.protocol.SelfCheckingSource", "stoker.sources.protocol.SplittableSource",
)  # fmt: skip
"""Methods of these mean the same in each class that has them, and are described here."""
MADE_ELSEWHERE = {
    "stoker.Cache": "open_cache and precompute make it",
    "stoker.Zip": "zip makes it",
    "stoker.store.access.Column": "a Cache makes it",
    "stoker.cli.command.CommandOutput": "command_output makes it",
    "stoker.export.ExportWriter": "export_cache makes it",
    "stoker.loader.RecordBatch": "a Loader makes it",
}
"""Classes that users do not make: their constructor is not described."""
INTERNAL = {
    "stoker.loader.RecordBatch": ("take_place_of",),
    "stoker.monitor.StallMeter": ("waited", "spent", "handed", "ended"),
    "stoker.StokerError": ("problem", "of_all", "marked", "parts", "arguments", "to_json"),
    "stoker.ArraySource": ("places",),
    "stoker.Cache": ("shard", "segments", "locate"),
    "stoker.HDF5Source": ("places", "buffer_bytes"),
    "stoker.ImageSource": ("sample_files",),
    "stoker.SQLSource": ("where_it_is",),
    "stoker.sources.splits.SplitOf": ("places",),
    "stoker.transforms.Crop": ("as_cut",),
    "stoker.transforms.Flip": ("as_cut",),
    "stoker.TorchSource": ("structure", "probed_indices", "probe_again", "seconds_per_item"),
    "stoker.plan.Plan": ("holding",),
}
"""Members that other parts of the package use; the pages leave them out."""
NO_EXAMPLE = {
    "stoker.Source": "a protocol: see ArraySource and docs/how-to/plugins.md",
    "stoker.Encoder": "a protocol: see ModuleEncoder",
    "stoker.FeatureEncoder": "needs a model of transformers",
    "stoker.integrations.to_jax": "needs JAX",
    "stoker.TextEncoder": "needs a model of transformers",
    "stoker.HiddenStates": "needs a model of transformers",
    "stoker.TopK": "needs a model of transformers",
    "stoker.Tokenize": "needs a tokenizer of transformers",
    "stoker.VAEEncoder": "needs a model of diffusers",
    "stoker.DatasetsSource": "needs the package datasets",
    "stoker.export.ExportWriter": "see Exporter",
    "stoker.export.ExportReport": "see export_cache",
    "stoker.export.ExportedFile": "see export_cache",
    "stoker.export.ExportTensor": "see tensors_of",
}
"""Public names without an example that runs, and why."""


def public_names() -> dict[str, Any]:
    """Return all names that users and authors may rely on, with the module they are documented under."""
    found = {f"stoker.{name}": getattr(stoker, name) for name in stoker.__all__ if name != "__version__"}
    for module in MODULES:
        found |= {f"{module}.{name}": getattr(import_module(module), name) for name in own_names(module)}
    errors = vars(import_module("stoker.errors"))
    for name, value in errors.items():
        if (
            inspect.isclass(value)
            and issubclass(value, StokerError | Interrupted)
            and value is not StokerError
        ):
            found[f"stoker.errors.{name}"] = value
    for full in (*TAKEN_AND_RETURNED, *OF_AUTHORS):
        module, name = full.rsplit(".", 1)
        found[full] = getattr(import_module(module), name)
    return found


def own_names(module: str) -> list[str]:
    """Return what a public module exports."""
    return list(import_module(module).__all__)


NAMES = public_names()
CLASSES = {name: value for name, value in NAMES.items() if inspect.isclass(value)}
ERRORS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, StokerError | Interrupted)}


def members(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, and its constructor as `__init__`."""
    kind, met = CLASSES[name], {*INTERNAL.get(name, ())}
    if name in ERRORS:
        met |= {*INTERNAL["stoker.StokerError"]}
    for base in [kind] if name in ERRORS else kind.__mro__:  # what errors inherit is at StokerError
        if not base.__module__.startswith("stoker") or base is JsonResult:  # `to_json`, as all results
            continue
        for member, value in vars(base).items():
            if member.startswith("_") or member in met:
                continue
            met.add(member)
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType | property | cached_property):
                yield member, function


def section(doc: str, title: str) -> str:
    """Return a section of a docstring, `Args`, without its title; empty if there is none."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def described(doc: str | None) -> set[str]:
    """Return the names that have an entry in the section `Args` of a docstring."""
    return set(re.findall(r"^\*{0,2}(\w+): \S", section(doc or "", "Args"), re.MULTILINE))


def attributes(kind: type) -> set[str]:
    """Return the fields of a class, and of its bases, that have a docstring of their own."""
    found = set[str]()
    for base in kind.__mro__:
        if not base.__module__.startswith("stoker"):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for first, second in zip(body.body, body.body[1:], strict=False):
            text = isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
            if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name) and text:
                found.add(first.target.id)
    return found


def parameters(function: Any) -> list[str]:
    """Return the names of the parameters that a caller gives."""
    every = [name for name in inspect.signature(function).parameters if not name.startswith("_")]
    return [name for name in every if name not in ("self", "cls")]


def promises_of(name: str, method: str) -> list[str]:
    """Return the docstrings that protocols have for a method of a source or encoder."""
    return [inspect.cleandoc(promised.__doc__ or "") for promised in promised_of(name, method)]


def promised_of(name: str, method: str) -> list[Any]:
    """Return the methods of protocols that a method of a source or encoder is an implementation of."""
    kind = NAMES[name]
    if name in PROTOCOLS or not hasattr(kind, "identity"):
        return []
    followed = [one for one in PROTOCOLS if (one == "stoker.Encoder") == hasattr(kind, "encode")]
    found = (vars(NAMES[protocol]).get(method) for protocol in followed)
    return [promised for promised in found if promised is not None]


def undescribed(name: str) -> list[str]:
    """Return what the docstrings of a public name leave out."""
    value = NAMES[name]
    if not inspect.isclass(value):
        return missing_of(name, value)
    found: list[str] = []
    if not inspect.getdoc(value):
        found.append(f"{name} has no docstring")
    made = getattr(value, "_is_protocol", False) or name in MADE_ELSEWHERE
    known = described(value.__doc__) | described(value.__init__.__doc__) | attributes(value)
    if name not in ERRORS and not made:
        found += [f"{name}: parameter {one!r}" for one in parameters(value) if one not in known]
    if dataclasses.is_dataclass(value) or issubclass(value, tuple):
        fields = getattr(value, "__dataclass_fields__", None) or getattr(value, "_fields", ())
        public = (one for one in fields if not one.startswith("_") and one not in INTERNAL.get(name, ()))
        found += [f"{name}: field {one!r}" for one in public if one not in known]
    for member, function in members(name):
        where = f"{name}.{member}"
        if isinstance(function, property | cached_property):
            found += [] if function.__doc__ else [f"{where} has no docstring"]
            continue
        found += missing_of(where, function, promises_of(name, member))
    return found


def missing_of(name: str, function: Any, promises: Sequence[str] = ()) -> list[str]:
    """Return what the docstring of one function, and those of the protocols it follows, leave out."""
    doc = inspect.getdoc(function)
    if not doc:
        return [f"{name} has no docstring"]
    docs = [doc, *promises]
    told = set[str]().union(*map(described, docs))
    found = [f"{name}: parameter {one!r}" for one in parameters(function) if one not in told]
    returned = inspect.signature(function).return_annotation
    says = any(re.match(r".*\b([Rr]eturn|Yield)\b", one) or section(one, "Returns") for one in docs)
    if returned not in (None, "None", "NoReturn", inspect.Signature.empty) and not says:
        found.append(f"{name}: what it returns")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_described_with_all_that_it_takes_and_returns(name: str) -> None:
    missing = undescribed(name)

    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ERRORS and name not in (*TAKEN_AND_RETURNED, *OF_AUTHORS)]
)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    value = NAMES[name]
    docs = [value.__doc__ or ""]
    if inspect.isclass(value):
        docs += [value.__init__.__doc__ or "", *(function.__doc__ or "" for _, function in members(name))]
    runs = any(">>> " in doc and "+SKIP" not in doc for doc in docs)

    assert runs == (name not in NO_EXAMPLE), f"{name} has an example: {runs}"


@pytest.mark.parametrize("name", [name for name in CLASSES if hasattr(NAMES[name], "identity")])
def test_a_method_of_a_protocol_has_the_same_parameters_in_each_class(name: str) -> None:
    for member, function in members(name):
        for promised in promised_of(name, member):
            if isinstance(promised, FunctionType):
                assert parameters(function) == parameters(promised), f"{name}.{member}"


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_in_a_section_of_their_own(name: str) -> None:
    """Elsewhere the site would show `>>>` as a quotation."""
    docs = [
        NAMES[name].__doc__ or "",
        *(f.__doc__ or "" for _, f in (members(name) if name in CLASSES else ())),
    ]
    if name in CLASSES:
        docs.append(NAMES[name].__init__.__doc__ or "")

    for doc in docs:
        assert doc.count(">>> ") == section(doc, "Examples").count(">>> "), doc


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_when_it_is_raised_and_its_exit_code(name: str) -> None:
    kind = ERRORS[name]

    assert f"Exit code {kind.exit_code}." in " ".join((kind.__doc__ or "").split())


def blocks() -> list[tuple[str, str]]:
    """Return what each block of the pages renders: the name shown, and the object that griffe is given."""
    found: list[tuple[str, str]] = []
    for page in sorted(PAGES.glob("*.md")):
        for block in re.finditer(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text() + "\n", re.MULTILINE):
            heading = re.search(r"heading: (\S+)", block[2])
            found.append((heading[1] if heading else block[1], block[1]))
    return found


def test_each_public_name_is_on_one_page() -> None:
    shown = Counter(name for name, _ in blocks())

    assert {name: count for name, count in shown.items() if count > 1} == {}
    assert sorted(NAMES.keys() - shown.keys()) == [], "not on a page"
    assert sorted(shown.keys() - NAMES.keys()) == [], "not a public name"


def test_each_public_name_is_in_the_table_of_the_first_page() -> None:
    linked = Counter(re.findall(r"\[`([\w.]+)`\]\[([\w.]+)\]", (PAGES / "index.md").read_text()))
    rendered = Counter(blocks())

    assert sorted(rendered - linked) == [], "not in the table"
    assert sorted(linked - rendered) == [], "twice, or without a block"


def test_a_block_renders_the_object_of_its_name() -> None:
    for name, path in blocks():
        module, attribute = path.rsplit(".", 1)
        import_module(module)
        assert getattr(sys.modules[module], attribute) is NAMES[name], path


def test_a_page_leaves_out_no_member_but_internal_ones() -> None:
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text() + "\n"
        for block in re.finditer(r"^::: (\S+)\n((?:    .*\n)*)", text, re.MULTILINE):
            listed = re.search(r" members: \[(.*)\]", block[2])
            if listed is None:
                continue
            shown = set(re.findall(r"\w+", listed[1]))
            public = {member for member, _ in members(block[1]) if not promises_of(block[1], member)}
            assert sorted(public - shown) == [], block[1]


def test_names_that_the_page_on_plugins_imports_are_public() -> None:
    imports = re.findall(
        r"^from (stoker(?:\.[\w.]+)?) import (.+)$", HOW_TO_PLUGINS.read_text(), re.MULTILINE
    )
    named = {f"{module}.{name.strip()}" for module, names in imports for name in names.split(",")}
    own = {f"{kind.__module__}.{kind.__name__}": kind for kind in NAMES.values()}

    assert named
    assert (
        sorted(name for name in named if name not in NAMES and name not in own and name not in OF_TYPER) == []
    )
