"""A Dataset that differs where it can be seen has another identity, and the same one has it everywhere."""

from __future__ import annotations

import functools
import importlib
import linecache
import logging
import operator
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from stoker import used_code
from stoker.sources import torch_identity
from stoker.sources.torch_dataset import TorchSource
from stoker.store import make_recipe
from tests.kit import forked

ROWS = 2000
HIDDEN = 777
"""A sample that is not among the sixteen that are probed."""


class Holder(Dataset):
    """Holds something, and gives what does not depend on it."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int):
        return torch.ones(2) * index


class Config:
    """Settings of a user's own."""

    def __init__(self, scale: object) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: object) -> None:
        self.scale = scale


def scaled(x, factor: float = 1.0):
    return x * factor


def twice(x):
    return x * 2


def times(factor: object):
    return lambda x: x * factor


def lambdas(which: int):
    return [lambda x: x, lambda x: x * 2][which]


def identity(dataset) -> str:
    return repr(TorchSource(dataset).identity())


def changed(array, place=HIDDEN):
    array[place] = 5
    return array


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(torch.zeros(ROWS, 4), changed(torch.zeros(ROWS, 4)), id="tensor"),
        pytest.param(torch.zeros(4, ROWS).T, changed(torch.zeros(4, ROWS).T), id="transposed"),
        pytest.param(torch.zeros(2).bfloat16(), changed(torch.zeros(2).bfloat16(), 1), id="bfloat16"),
        pytest.param(torch.zeros(2, 2).to_sparse(), torch.ones(2, 2).to_sparse(), id="sparse"),
        pytest.param(np.zeros(ROWS), changed(np.zeros(ROWS)), id="array"),
        pytest.param(np.zeros((ROWS, 600)), changed(np.zeros((ROWS, 600)), (-1, -1)), id="last-value"),
        pytest.param(np.asarray(["a", "b"]), np.asarray(["a", "c"]), id="text-array"),
        pytest.param(np.asarray(["a", 1], "O"), np.asarray(["a", 2], "O"), id="object-array"),
        pytest.param(np.float32(1), np.float32(2), id="numpy-number"),
        pytest.param(1, 2, id="int"),
        pytest.param(True, False, id="bool"),
        pytest.param(0.5, 0.25, id="float"),
        pytest.param("mean", "sum", id="text"),
        pytest.param(b"a", b"b", id="bytes"),
        pytest.param([0.5] * ROWS, changed([0.5] * ROWS), id="floats"),
        pytest.param(["cat"] * 3000, changed(["cat"] * 3000), id="texts"),
        pytest.param({"a": 1}, {"a": 2}, id="dict"),
        pytest.param({"a": 1}, {"b": 1}, id="keys"),
        pytest.param({"a", "b"}, {"a", "c"}, id="set"),
        pytest.param([[1], [2, 3]], [[1, 2], [3]], id="nesting"),
        pytest.param(torch.float32, torch.float16, id="dtype"),
        pytest.param(Config(1), Config(2), id="object"),
        pytest.param(Slotted(1), Slotted(2), id="slots"),
        pytest.param(types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), id="namespace"),
        pytest.param(functools.partial(scaled, factor=2), functools.partial(scaled, factor=3), id="partial"),
        pytest.param(functools.partial(scaled), functools.partial(twice), id="partial-of-another"),
        pytest.param(operator.itemgetter(0), operator.itemgetter(1), id="itemgetter"),
        pytest.param(np.sin, np.cos, id="ufunc"),
        pytest.param({"a": 1}.get, {"a": 2}.get, id="bound"),
        pytest.param(times(2), times(3), id="closure"),
        pytest.param(lambda x, f=2: x * f, lambda x, f=3: x * f, id="default"),
        pytest.param([lambdas(0), lambdas(1)], [lambdas(1), lambdas(1)], id="lambdas-of-one-line"),
        pytest.param(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), id="module"),
    ],
)
def test_what_a_dataset_holds_is_part_of_it(one, other) -> None:
    assert identity(Holder(one)) != identity(Holder(other))
    assert identity(Holder(one)) == identity(Holder(one))


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: Subset(d, range(ROWS)), lambda d: ConcatDataset([d, d])]
)
def test_one_value_changed_in_place_is_another_dataset(wrap) -> None:
    x = torch.zeros(ROWS, 4)
    before = identity(wrap(TensorDataset(x)))

    x[HIDDEN] = 5

    assert identity(wrap(TensorDataset(x))) != before
    x[HIDDEN] = 0
    assert identity(wrap(TensorDataset(x))) == before


BODY = """
import functools
import importlib
import numpy as np
SCALE = {scale}
def inner(x): return x {inner}
def outer(x): return [inner(x) for _ in range(1)][0]
def deco(f):
    @functools.wraps(f)
    def wrapped(*args): return f(*args)
    return wrapped
class Table:
    @staticmethod
    def static(x): return x {static}
    @property
    def prop(self): return 1 {prop}
    @functools.lru_cache
    def kept(self): return 1 {kept}
class Mine:
    level = {level}
    def __init__(self): self.table = Table()
    def __len__(self): return 2000
    @deco
    def __getitem__(self, i): return outer(np.ones(2)) if i == 777 and SCALE else np.zeros(2)
"""
USUAL = {"scale": "1", "inner": "* 2", "static": "+ 1", "prop": "+ 1", "kept": "+ 1", "level": "3"}


def fingerprint(folder: Path, changes: dict[str, str], *, executed: str = "", seed: str = "0") -> str:
    """The identity of `Mine` from a process of its own."""
    folder.mkdir(exist_ok=True)
    body = BODY.format(**{**USUAL, **changes})
    if executed:
        space = "{}" if executed == "bare" else "globals()"
        body = f"space = {space}\nexec({body!r}, space)\nMine = space['Mine']\n"
    body += "from stoker.sources.torch_dataset import TorchSource\nprint(TorchSource(Mine()).identity())\n"
    (folder / "script.py").write_text(body)
    done = subprocess.run(
        [sys.executable, folder / "script.py"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
    )
    return done.stdout


@pytest.mark.parametrize("executed", ["", "bare"])
def test_code_that_the_dataset_calls_is_part_of_it(tmp_path: Path, executed: str) -> None:
    changes = [{}, {"scale": "2"}, {"inner": "* 3"}, {"level": "4"}, {"static": "+ 2"}, {"prop": "+ 2"}]
    changes.append({"kept": "+ 2"})

    seen = [fingerprint(tmp_path, change, executed=executed) for change in changes]

    assert len(set(seen)) == len(changes)


@pytest.mark.parametrize("executed", ["", "bare", "main"])
def test_another_process_names_it_alike(tmp_path: Path, executed: str) -> None:
    """Sets have another order in each process."""
    names = {"scale": "{'a', 'b', 'c', 'd'}", "inner": "* (2 if str(x) in {'a', 'b', 'c', 'd'} else 3)"}

    seen = {fingerprint(tmp_path / seed, names, executed=executed, seed=seed) for seed in ("0", "1", "2")}

    assert len(seen) == 1


def test_nothing_of_the_dataset_is_called() -> None:
    class Loud(list):
        def __getattr__(self, name):
            raise AssertionError(name)

        __iter__ = __len__ = __repr__ = __eq__ = __hash__ = None

    class Shy(Holder):
        def __init__(self, held) -> None:
            super().__init__(held)
            self.told = True

        def __getattr__(self, name):
            raise AssertionError(name)

        @property
        def computed(self):
            raise AssertionError("computed")

    described = torch_identity.describe(Shy([Loud([1, 2]), Config(1)]))

    assert set(described.held) == {"(code)", "held", "told"}
    assert described.held["held"] != torch_identity.describe(Shy([Loud([1, 3]), Config(1)])).held["held"]


def test_a_loop_in_what_is_held_ends() -> None:
    config = Config(1)
    config.scale = [config]

    assert identity(Holder(config)) == identity(Holder(config))


def test_large_arrays_are_drawn_from_and_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch_identity, "LIMIT_BYTES", 2 * 2**20)
    hashed = []
    monkeypatch.setattr(torch_identity, "_bytes", lambda block: hashed.append(block.nbytes) or b"")

    first, second = (identity(Holder(np.zeros((64, 2**17)))) for _ in range(2))

    assert first == second
    assert 2**20 <= sum(hashed) / 2 <= 16 * 2**20
    assert "2.0 MiB out of 64.0 MiB held in memory" in caplog.text
    assert len(caplog.records) == 1


def test_what_was_not_looked_at_is_said_once(caplog, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="stoker"):
        for _ in range(2):
            identity(Holder([tmp_path, np.random.default_rng(0)]))
        identity(Holder(1))

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"folder {tmp_path} by names and sizes alone" in record.message
    assert "held is a numpy.random._generator.Generator" in record.message
    assert "stoker.TorchSource(dataset, version='v1')" in record.message


def test_labels_stay_with_their_files_wherever_they_are(tmp_path: Path) -> None:
    pairs = {}
    for place in ("one", "two"):
        for name in ("a", "b"):
            (tmp_path / place / name).mkdir(parents=True)
            (tmp_path / place / name / "x.bin").write_bytes(b"1")
        pairs[place] = [(str(tmp_path / place / name / "x.bin"), i) for i, name in enumerate("ab")]
    swapped = [(pairs["one"][1][0], 0), (pairs["one"][0][0], 1)]

    held = [torch_identity.describe(Holder(value)).held for value in (*pairs.values(), swapped)]

    assert held[0] == held[1] != held[2]


def test_float64_is_narrowed_with_a_word(caplog) -> None:
    class Wide(Holder):
        def __getitem__(self, index: int):
            return {
                "u": torch.ones(2).double(),
                "v": torch.ones(2),
                "w": np.ones(2),
                "n": 0.5,
                "s": np.float64(1),
            }

    source = TorchSource(Wide(1))
    for _ in range(2):
        source.schema()
        source.read(HIDDEN)

    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{TorchSource(Wide(1))!r}".partition("(")[2].partition(",")[0] + ": float64 is read as float32: u, w"
    ]


class ImportsLate(Holder):
    """Uses a module that it imports when it reads."""

    def __getitem__(self, index: int):
        import late_helper

        return late_helper.scale(torch.ones(2)) if index == HIDDEN else torch.ones(2)


class ImportsFrom(Holder):
    def __getitem__(self, index: int):
        from late_package.inner import scale

        return scale(torch.ones(2)) if index == HIDDEN else torch.ones(2)


class ImportsModule(Holder):
    def __getitem__(self, index: int):
        from late_package import inner, other

        return inner.scale(torch.ones(2)) if index == HIDDEN and other else torch.ones(2)


class ImportsBelow(Holder):
    def __getitem__(self, index: int):
        import late_package.inner

        return late_package.inner.scale(torch.ones(2)) if index == HIDDEN else torch.ones(2)


@pytest.mark.parametrize("kind", [ImportsLate, ImportsFrom, ImportsModule, ImportsBelow])
def test_what_a_function_imports_when_it_is_called_is_part_of_it(
    kind: type[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package/__init__.py").write_text("other = 1\n")

    def named(factor: str, body: str) -> str:
        text = f"import os\nFACTOR = {factor}\nOTHER = os.getpid()\ndef scale(x): return x {body}\n"
        for path in ("late_helper.py", "late_package/inner.py"):
            (tmp_path / path).write_text(text)
        for name in ("late_helper", "late_package.inner", "late_package"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        dataset = kind(1)
        before = identity(dataset)
        dataset[HIDDEN]
        assert identity(dataset) == before
        return before

    before = named("2", "* FACTOR")

    assert named("2", "* FACTOR") == before
    assert named("3", "* FACTOR") != before
    assert named("2", "* FACTOR  + 1") != before


def test_a_file_that_code_names_is_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "scale.txt"
    code = (
        "class Reads(Holder):\n"
        "    def __getitem__(self, index):\n"
        f"        return torch.ones(2) * (float(open({str(path)!r}).read()) if index == {HIDDEN} else 1)\n"
        "    def parts(self, text):\n"
        "        return text.split('/'), '/proc/uptime', '/dev/null', '..', '.'\n"
    )
    space = {"Holder": Holder, "torch": torch, "__name__": "reading"}
    exec(code, space)
    dataset: Dataset = space["Reads"](1)
    seen = []
    for text in ("2", "3", "2"):
        path.write_text(text)
        seen.append([part.files for part in TorchSource(dataset).identity().parts])
    recipes = []
    for text in ("2", "3", "2"):
        path.write_text(text)
        recipes.append(make_recipe(TorchSource(dataset), None).fingerprint)

    assert [[file.path for file in files] for (files,) in seen] == [[path]] * 3
    assert recipes[0] == recipes[2] != recipes[1]


def test_what_holds_itself_is_told_by_what_else_it_holds() -> None:
    def source(value: int) -> TorchSource:
        held: list[object] = [value]
        held += [held, {"again": held}]
        return TorchSource(Holder(held))

    assert source(1).identity() == source(1).identity()
    assert source(1).identity() != source(2).identity()


COMMENTED = """
class Mine(Holder):
    {doc}
    size = 3  {comment}

    def __getitem__(self, index):
        {doc}
        def inner(x):  {comment}
            return x * 2 {change}

        {comment}
        text = "# not a comment"
        return inner(torch.ones(2)) if index and text else torch.ones(2)
"""


@pytest.mark.parametrize(
    ("doc", "comment", "change", "same"),
    [
        ('"""Something else.\n\n    Über # mehr.\n    """', "# why", "", True),
        ("", "", "", True),
        ('"""Doc."""', "", "+ 1", False),
    ],
    ids=["others", "none", "changed code"],
)
def test_comments_and_docstrings_name_nothing(
    doc: str, comment: str, change: str, same: bool, tmp_path: Path
) -> None:
    def named(**parts: str) -> dict[str, object]:
        text = COMMENTED.format(**parts)
        lines = text.splitlines(keepends=True)
        if not parts["doc"]:  # nothing is left of a line where it stood alone
            lines = [line for line, old in zip(lines, COMMENTED.splitlines(), strict=True)
                     if old.strip() not in ("{doc}", "{comment}")]  # fmt: skip
        path = tmp_path / "commented.py"
        path.write_text("".join(line.rstrip() + "\n" for line in lines))
        linecache.checkcache(str(path))
        space = {"Holder": Holder, "torch": torch, "__name__": "commented"}
        exec(compile(path.read_text(), str(path), "exec"), space)
        sys.modules["commented"] = types.SimpleNamespace(**space, __file__=str(path))  # type: ignore[assignment]
        try:
            return torch_identity.describe(space["Mine"](1)).code
        finally:
            del sys.modules["commented"]

    usual = named(doc='"""What it is."""', comment="# a remark", change="")

    assert "commented.Mine" in usual
    assert (named(doc=doc, comment=comment, change=change) == usual) is same


def test_a_docstring_that_the_code_reads_is_part_of_it() -> None:
    text = 'def f():\n    """One."""\n    return f.__doc__  # said\n'

    assert used_code._without_comments(text) == text.replace("  # said", "")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("x = lambda i: (i,  # one\n", "x = lambda i: (i,  # one\n"),
        ("    def f(self):\n        # why\n        return 1\n", "    def f(self):\n        return 1\n"),
        ('def f(): "doc"\n', "def f():\n"),
        ('def f():\n    "é"; return 1\n', "def f():\n; return 1\n"),
        ("def f(x):\n    return (x +  # a\n            1)\n", "def f(x):\n    return (x +\n            1)\n"),
        ("def f(x):\n\n    return '#' + x\n", "def f(x):\n\n    return '#' + x\n"),
    ],
)
def test_comments_are_cut_out_of_any_piece_of_source(text: str, left: str) -> None:
    assert used_code._without_comments(text) == left


def test_a_dataset_of_a_script_is_the_same_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\nimport cloudpickle, torch, stoker\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 3\n"
        "    def __getitem__(self, i):\n        return {'x': torch.zeros(2) + i}\n"
        "source = stoker.TorchSource(torch.utils.data.Subset(Rows(), [0, 1]))\n"
        "there = 'import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer).identity().settings)'\n"
        "sent = cloudpickle.dumps(source)\n"
        "done = subprocess.run([sys.executable, '-c', there], input=sent, stdout=subprocess.PIPE)\n"
        "assert done.stdout.decode().strip() == str(source.identity().settings), done.stdout\n"
    )

    assert forked.run([sys.executable, str(script)], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("fraction", [1.5, 0.25])
@pytest.mark.parametrize("value", [b"", b"a", b"/data/train/0001.jpg" * 40], ids=["none", "one", "many"])
def test_short_bytes_have_the_key_that_an_array_of_them_has(value: bytes, fraction: float) -> None:
    array = np.asarray(memoryview(value))

    assert torch_identity.digest_bytes(value, fraction) == torch_identity.digest_array(array, fraction)


def test_a_changed_byte_string_in_a_long_list_changes_the_key() -> None:
    files = [b"%d.jpg" % number for number in range(500)]

    found = [torch_identity.describe(Holder([*files, last])).held["held"] for last in (b"x", b"y", b"x")]

    assert found[0] == found[2] != found[1]
