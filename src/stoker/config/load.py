"""Read settings from a YAML file and the command line, and say exactly what is wrong with them."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from stoker.config.earlier import (
    EARLIER,
    RENAMED,
    SWITCHES,
    SettingsLayer,
    counts_windows_now,
    is_earlier,
    leaves,
    lift_sequential,
    modernize,
    of_then,
    translate,
)
from stoker.config.models import ONLY_IN, Config, StageConfig, Stages, Steps
from stoker.config.names import all_sections, all_settings, as_name, nearest, schema_of, shown, wrong_fields
from stoker.config.sections import beside_engine, misplaced, misplaced_in_encoder, with_defaults
from stoker.errors import ConfigError, Problem, docs_url
from stoker.units import format_few

# ----------------------------------------------------------------------------------------------------------
# Settings of single tasks: `tasks: {name: {...}}`, over those of all.
#
# A block may set what decides a task's records and the size of its batches. Everything else is one for the
# whole run, since one operator is trained on all tasks.


_INSTALLED = Path(__file__).parent / "examples"
EXAMPLES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[3] / "configs"
"""Settings for public datasets, `train_NAME.yaml`: those of a wheel, else of the repository."""
SECTIONS = ("data", "latent", "encoder", "precompute")
"""Sections of which a task may have its own settings."""
SINGLE = ("training.batch_size", "training.latent_cache_dtype")
"""Further settings that a task may have of its own."""
_ENTRY = re.compile(rf"(?P<task>.+?)\.(?P<setting>(?:{'|'.join(SECTIONS)}|training)\..+)")


def blocks_of(given: object, where: str) -> dict[str, dict[str, object]]:
    """Return the blocks by task, each by dotted name.

    Args:
        given: `{task: {section: {name: value}}}`, with dots or nested, and `task.section.name` as from the
            command line.

    Raises:
        ConfigError: It is not such a mapping, or a task cannot set one of the names.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: tasks is {given!r}", hint=f"Expected settings by task, as {_EXAMPLE}")
    blocks: dict[str, dict[str, object]] = {}
    for key, value in cast("Mapping[str, Any]", given).items():
        entry = _ENTRY.fullmatch(str(key))
        task, block = (entry["task"], {entry["setting"]: value}) if entry else (str(key), value)
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: tasks.{task} is {block!r}", hint=f"Expected settings, as {_EXAMPLE}")
        for name, one in leaves(cast("Mapping[str, object]", block)):
            _check_name(name, f"{where}: tasks.{task}.{name}")
            blocks.setdefault(task, {})[name] = one
    return blocks


def task_settings(tasks: Sequence[str], merged: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the settings of each task by dotted name: its block, and that it is the task."""
    blocks = cast("Mapping[str, Mapping[str, object]]", merged.get("tasks") or {})
    if len(tasks) == 1 and not blocks.get(tasks[0]):
        return {}
    found: dict[str, dict[str, object]] = {}
    for task in tasks:
        found[task] = {"data.task": task, **blocks.get(task, {})}
        if "training.batch_size" in found[task]:  # which is the other way to say it
            found[task]["training.batch_trajectories"] = None
    return found


def unused_blocks(config: Config, where: str) -> list[str]:
    """Return a note for each block whose task is not one of the run's, with the name it may misspell."""
    blocks, tasks = config.tasks or {}, config.data.tasks
    bare = [task for task in tasks if task not in blocks]
    notes: list[str] = []
    for block in blocks:
        if block not in tasks:
            near = get_close_matches(block, bare, n=1)
            hint = f". Did you mean data.task {block} for {near[0]}, or tasks.{near[0]} here?" if near else ""
            notes.append(f"{where}: tasks.{block} has no effect: data.task is {', '.join(tasks)}{hint}")
    return notes


def check_weights(config: Config, where: str) -> None:
    """Refuse `training.task_weights` that do not fit the tasks, before anything is encoded for them.

    Raises:
        ConfigError: As said.
    """
    weights, tasks = config.training.task_weights, config.data.tasks
    if weights is None or len(tasks) == 1:
        return
    said = f"{where}: training.task_weights"
    if config.training.mixture != "weighted":
        raise ConfigError(
            f"{said} need training.mixture=weighted, and training.mixture is {config.training.mixture}",
            hint="Set training.mixture=weighted, or leave task_weights out",
        )
    lacking = [task for task in tasks if task not in weights]
    for name in weights:
        if name not in tasks:
            near = get_close_matches(name, lacking, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Leave it out"
            raise ConfigError(f"{said} has {name}, but data.task is {', '.join(tasks)}", hint=hint)
    if lacking:
        raise ConfigError(
            f"{said} has no entry for {', '.join(lacking)}", hint="Give each task a number above 0"
        )


_EXAMPLE = "tasks: {burgers1d: {data: {preset: pdebench}}}"


def _check_name(name: str, said: str) -> None:
    if name not in all_settings():
        near = nearest(name, all_settings())
        known = f"did you mean {near}?" if near else f"see {docs_url('reference/config')}"
        raise ConfigError(f"{said} is not a setting ({known})")
    if name == "data.task" or (name.partition(".")[0] not in SECTIONS and name not in SINGLE):
        raise ConfigError(
            f"{said}: {name} cannot be set for one task",
            hint="Set it for all tasks; for one task there are "
            f"{', '.join(f'{section}.*' for section in SECTIONS)}, {', '.join(SINGLE)}",
        )


COMMAND_LINE = "command line"


def load_config(path: Path | str | None, overrides: Sequence[str] = (), *, earlier: bool = False) -> Config:
    """Return the settings of a file, overridden by `key.sub=value`, over the defaults.

    Args:
        path: A YAML file; None: defaults and overrides alone.
        overrides: Values are YAML (`1e-4`, `[a, b]`, `null`); what is not YAML is text (`*.h5`).
        earlier: File and overrides are of the earlier latent cache, and mean what they did there.

    Raises:
        ConfigError: No such file, not YAML (with the line), an unknown name (with the nearest), a wrong
            value (with what was expected), or one setting given twice.
    """
    given = {} if path is None else read_settings(Path(path))
    if path is not None and not given and not overrides:
        raise ConfigError(
            f"{path} is empty: it holds no settings",
            hint=f"Write settings into it, or let `stoker init DATA --out {path} --force` do so",
        )
    where = "defaults" if path is None else str(path)
    return _build(given, parse_overrides(overrides), where, earlier=earlier)


def make_config(settings: Mapping[str, object], *, where: str, earlier: bool = False) -> Config:
    """Return settings from a nested mapping, as `Config.to_dict` gives; `where` begins every message.

    `earlier` as in `load_config`.

    Raises:
        ConfigError: As for `load_config`.
    """
    return _build(settings, {}, where, earlier=earlier)


def _build(
    settings: Mapping[str, object], overrides: Mapping[str, object], where: str, *, earlier: bool = False
) -> Config:
    notes: list[str] = []
    if earlier:
        settings, notes = modernize(settings, where)
        overrides, more = modernize(overrides, COMMAND_LINE)
        notes += [*more, *of_then(settings, overrides, where)]
    unknown = _Unknown()
    flat = _flatten(settings, "", where, unknown)
    if unknown.is_any:
        unknown.others += _say_earlier(settings, where, earlier)
    _check_names(overrides, unknown)
    if unknown.is_any:
        raise unknown.error()
    if not earlier and counts_windows_now(flat):
        notes.append(f"{where}: training.batch_size counts windows; `stoker compat` counts trajectories")
    file, command = translate(flat, where), translate(overrides, COMMAND_LINE)
    lift_sequential(file, overrides)
    for layer in (file, command):
        _check_batch(layer)
    merged = _merge(file, command)
    if blocks := merged.get("tasks"):
        merged["tasks"] = own = blocks_of(blocks, where)
        merged.setdefault("data.task", list(own))
    config = _validated(merged, where, file, command)
    check_weights(config, where)
    notes += [*file.notes, *command.notes, *unused_blocks(config, where)]
    if "precompute.engine" not in {**file.values, **command.values}:
        notes += [
            f"{where}: {name} has no effect: precompute.engine is not given, and local"
            for name, _ in beside_engine("local", file.values)
        ]
    of_task = {
        task: _validated({**merged, "tasks": None, **own}, where, *_of_task(task, file, command))
        for task, own in task_settings(config.data.tasks, merged).items()
    }
    return config.with_tasks(of_task).noted(where, tuple(notes))


def _of_task(task: str, *layers: SettingsLayer) -> list[SettingsLayer]:
    """Return the layers, whose messages name the task."""
    return [replace(layer, where=f"{layer.where}: tasks.{task}") for layer in layers]


def _validated(
    merged: Mapping[str, object], where: str, file: SettingsLayer, command: SettingsLayer
) -> Config:
    merged = with_defaults(merged)
    try:
        config = Config.model_validate(_nest(_resolve(merged, where)))
    except ValidationError as error:
        raise _wrong_values(_explain(error, merged, file, command)) from error
    _check_together(config, file, command)
    return config


def read_settings(path: Path) -> dict[str, object]:
    """Return a file's content, nested, interpolations still as they were written.

    Raises:
        ConfigError: No such file, or not YAML.
    """
    _require_file(path)
    try:
        content = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="Expected a YAML file with settings"
        ) from error
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" line {error.problem_mark.line + 1}:"
        fact = f"{path}:{line} not YAML: {error.problem or error.context}"
        raise ConfigError(fact, hint=_yaml_hint(path, error)) from error
    except (UnicodeDecodeError, ReaderError) as error:
        raise ConfigError(
            f"{path} is not a text file",
            hint=f"Expected a YAML file with settings. If it holds data, `stoker init {path}` writes one "
            "that reads it",
        ) from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path}: not YAML: {str(error).splitlines()[0]}", hint="Correct that, then run this again"
        ) from error
    given = OmegaConf.to_container(content, resolve=False)
    lone_text = isinstance(given, dict) and [*given.values()] == [None] and ":" not in path.read_text()
    if not isinstance(content, DictConfig) or lone_text:
        raise ConfigError(
            f"{path}: holds {'text' if lone_text else 'a list'}",
            hint="Expected settings, as `training:` with names below it",
        )
    return cast("dict[str, object]", given)


def _yaml_hint(path: Path, error: MarkedYAMLError) -> str:
    mark = error.problem_mark
    lines = path.read_text(errors="replace").splitlines()
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "Indent with spaces: the line has a tab"
    if "duplicate key" in str(error.problem):
        return "Give it once"
    return "Correct the line, or the one before it"


def _require_file(path: Path) -> None:
    """Refuse anything but a file before it is opened: opening a pipe would wait for a writer.

    Raises:
        ConfigError: Nothing is there, or something else is.
    """
    if found := re.match(r"([a-z][a-z0-9]*):/", str(path)):
        url = str(path).replace(":/", "://" if found[1] != "file" else ":///", 1)
        raise ConfigError(
            f"{url} is a URL",
            hint=f"`stoker cache show {url}` says what is there; this takes the settings that a cache is "
            "made with: a YAML file, as stoker.yaml",
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        fact = ": a link to a file that is not there" if path.is_symlink() else ": no such file"
    except OSError as error:
        fact = f" cannot be read: {error.strerror}"
    else:
        if stat.S_ISREG(mode):
            return
        fact = f" is a {'folder' if stat.S_ISDIR(mode) else 'pipe' if stat.S_ISFIFO(mode) else 'device'}"
    others: list[str] = []
    with suppress(OSError):  # a folder that may not be looked into
        if holds_caches(path):
            raise ConfigError(
                f"{path} holds caches",
                hint=f"`stoker cache show {path}` says which; this takes the settings that they are made "
                "with: a YAML file, as stoker.yaml",
            )
        folder = path if path.is_dir() else path.parent
        others = sorted(str(other) for other in folder.glob("*.yaml") if other.is_file())
    near = get_close_matches(path.name, [Path(other).name for other in others], n=1, cutoff=0.75)
    hint = "Expected a YAML file with settings."
    if near:
        hint += f" Did you mean {next(other for other in others if Path(other).name == near[0])}?"
    elif others:
        hint += f" There are: {format_few(others, MOST_NAMED)}"
    elif fact.startswith(" is a folder"):
        hint += f" `stoker init {path}` writes one, if the folder holds data"
    else:
        hint += " `stoker init DATA` writes one"
    raise ConfigError(f"{path}{fact}", hint=hint)


MOST_NAMED = 3
"""Names of one kind that a message lists before the rest becomes a count."""


@dataclass(slots=True)
class _Unknown:
    """Names in a file and on a command line that are not settings."""

    names: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By the place that they are in."""
    others: list[Problem] = field(default_factory=list[Problem])
    """About names that are not settings but something else."""

    @property
    def is_any(self) -> bool:
        return bool(self.names or self.others)

    def add(self, name: str, where: str) -> None:
        self.names.setdefault(where, []).append(name)

    def error(self) -> ConfigError:
        """Return one error about all of them; many names become the first few and a count."""
        facts = [f"{where}: {_not_settings(names)}" for where, names in self.names.items()]
        hints = [problem.hint for problem in self.others if problem.hint]
        every = [name for names in self.names.values() for name in names]
        meant = dict.fromkeys(filter(None, map(_meant, every)))
        if meant and len(every) <= MOST_NAMED:
            hints.insert(0, f"Did you mean {' and '.join(meant)}?")
        elif every and not hints:
            hints.append("`stoker init --all` prints all settings")
        return ConfigError(
            "\n".join([*facts, *(problem.fact for problem in self.others)]), hint=" ".join(hints)
        )


def _not_settings(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is not a setting"
    if len(names) <= MOST_NAMED:
        return f"{', '.join(names)} are not settings"
    return f"{len(names)} names are not settings: {format_few(names, MOST_NAMED)}"


def _meant(name: str) -> str | None:
    """Return the setting or section that a name probably meant."""
    near = nearest(name, [*all_settings(), *RENAMED, *SWITCHES, *all_sections()])
    return None if near is not None and name.startswith(f"{near}.") else near


def holds_caches(folder: Path) -> bool:
    """Return True if a folder is that of one cache, or of several."""
    return any(next(folder.glob(f"{above}recipe.json"), None) for above in ("", "*/", "*/*/"))


def parse_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """Return override texts by name.

    Raises:
        ConfigError: One lacks its `=`, or a name comes twice.
    """
    found: dict[str, object] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(
                f"{COMMAND_LINE}: {text!r} is not a setting", hint="Expected key=value, as training.lr=1e-4"
            )
        if name in found:
            raise ConfigError(f"{COMMAND_LINE}: {name} is given twice", hint="Give it once")
        found[name] = parse_value(value)
    return found


def parse_value(text: str) -> object:
    """Return one value as YAML reads it; text where YAML reads nothing.

    >>> parse_value("1e-4"), parse_value("[1, 4]"), parse_value("null"), parse_value("*.h5")
    (0.0001, [1, 4], None, '*.h5')

    Raises:
        ConfigError: A `${` that is not closed, or another slip in a reference.
    """
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except YAMLError:
        return text
    except OmegaConfBaseException as error:
        fact = str(error).splitlines()[0]
        raise ConfigError(
            f"{COMMAND_LINE}: {text!r} is not a value: {fact}",
            hint="Expected YAML, or ${section.name} for another setting's value",
        ) from error
    return parsed["value"]


def _flatten(settings: Mapping[str, object], prefix: str, where: str, unknown: _Unknown) -> dict[str, object]:
    """Return nested settings by dotted name; names of no setting go to `unknown`."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        name = f"{prefix}{as_name(key)}"
        if name in all_settings() or name in EARLIER:
            _put(flat, name, value, where)
        elif name not in all_sections():
            unknown.add(name, where)
        elif isinstance(value, Mapping):
            inner = _flatten(cast("Mapping[str, object]", value), f"{name}.", where, unknown)
            for below, found in inner.items():
                _put(flat, below, found, where)
        elif value is not None:  # a section with nothing below it reads as null
            unknown.others.append(
                Problem(
                    f"{where}: {name} is {shown(value)}", f"Expected settings below it, as {_example(name)}"
                )
            )
    return flat


def _put(flat: dict[str, object], name: str, value: object, where: str) -> None:
    """Set `name`, which `a: {b: 1}` and `a.b: 1` both name.

    Raises:
        ConfigError: It is set already.
    """
    if name in flat:
        raise ConfigError(f"{where}: {name} is given twice, nested and with a dot", hint="Give it once")
    flat[name] = value


def _check_names(overrides: Mapping[str, object], unknown: _Unknown) -> None:
    for name in overrides:
        if name in all_sections():
            unknown.others.append(
                Problem(
                    f"{COMMAND_LINE}: {name} is a section", f"Give one of its settings, as {_example(name)}"
                )
            )
        elif name not in all_settings() and name not in EARLIER and _mapping_of(name) is None:
            unknown.add(name, COMMAND_LINE)


def _mapping_of(name: str) -> str | None:
    """Return the setting whose entry `name` is: `data.splits` for `data.splits.train`."""
    if name.startswith("tasks."):
        return "tasks"
    owner = name.rpartition(".")[0]
    setting = all_settings().get(owner)
    return owner if setting is not None and setting.mapping else None


def _say_earlier(settings: Mapping[str, object], where: str, earlier: bool) -> list[Problem]:
    """Say where to take a file of the earlier latent cache that a command of today cannot read."""
    if earlier or not is_earlier(settings):
        return []
    return [
        Problem(
            f"{where}: this looks like a file of the earlier latent cache",
            f"`stoker compat train --config {where}` reads it as it was meant; so do `stoker compat "
            "precompute` and `stoker compat validate`",
        )
    ]


def _example(section: str) -> str:
    name = next(name for name in all_settings() if name.startswith(f"{section}."))
    return f"{name}={shown(all_settings()[name].default)}"


def _merge(file: SettingsLayer, command: SettingsLayer) -> dict[str, object]:
    """Return the command line over the file; one entry of a mapping leaves the others as they are."""
    merged = dict(file.values)
    batch = ("training.batch_size", "training.batch_trajectories")
    if any(command.values.get(name) is not None for name in batch):
        # Two ways to say one thing: the file's way goes when the command line uses the other.
        for name in batch:
            merged.pop(name, None)
    for name, value in command.values.items():
        owner = _mapping_of(name)
        if owner is None:
            merged[name] = value
        else:
            before = merged.get(owner)
            entries = cast("dict[str, object]", before) if isinstance(before, dict) else {}
            merged[owner] = {**entries, name.removeprefix(f"{owner}."): value}
    return merged


def _resolve(merged: Mapping[str, object], where: str) -> dict[str, object]:
    """Return values with `${data.task}` and the like filled in, from the defaults where nothing was given."""
    known = {name: setting.default for name, setting in all_settings().items()} | dict(merged)
    if isinstance(tasks := known["data.task"], list):
        known["data.task"] = "+".join(map(str, cast("list[object]", tasks)))  # as a part of other values
    try:
        whole = OmegaConf.create(_nest(known))
        plain = cast("dict[str, object]", OmegaConf.to_container(whole, resolve=True, throw_on_missing=True))
    except (OmegaConfBaseException, YAMLError) as error:
        key = getattr(error, "full_key", None)
        at = f"{where}: {key}" if key else where
        raise ConfigError(
            f"{at}: {str(error).splitlines()[0]}", hint="Name a setting that there is, as ${data.task}"
        ) from error
    return {name: merged[name] if name == "data.task" else _at(plain, name) for name in merged}


def _nest(flat: Mapping[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for name, value in flat.items():
        *sections, leaf = name.split(".")
        place = nested
        for section in sections:
            place = cast("dict[str, object]", place.setdefault(section, {}))
        place[leaf] = value
    return nested


def _at(nested: Mapping[str, object], name: str) -> object:
    place: Any = nested
    for key in name.split("."):
        place = place[key]
    return place


def _wrong_values(problems: Sequence[Problem]) -> ConfigError:
    """Return one error about all wrong values; of many, the first few and a count."""
    if len(problems) == 1:
        return ConfigError.of_all(problems)
    lines = [f"{problem.fact} ({problem.hint})" for problem in problems]
    return ConfigError(format_few(lines, MOST_NAMED, "\n"), hint="Correct these settings")


def _explain(
    error: ValidationError, merged: Mapping[str, object], file: SettingsLayer, command: SettingsLayer
) -> list[Problem]:
    """Return one problem for each setting with a wrong value."""
    lines: dict[str, Problem] = {}
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        name = next(
            (name for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in all_settings()),
            ".".join(path),
        )
        from_command = any(key == name or _mapping_of(key) == name for key in command.values)
        layer = command if from_command else file
        detail = _explain_entry(problem, name) if name in _ENTRIES else None
        if detail is None:
            detail = Problem(f"is {shown(merged[name])}", f"Expected {all_settings()[name].expects}")
        lines[name] = detail.within(f"{layer.where}: {layer.spelled.get(name, name)} ")
    return list(lines.values())


def _explain_entry(problem: Mapping[str, Any], name: str) -> Problem | None:
    """Say what is wrong with one entry of a list, from pydantic's error; None: it is the list itself."""
    place = problem["loc"][name.count(".") + 1 :]
    if not place and problem["type"] != "value_error":
        return None
    ((path, detail),) = wrong_fields([{**problem, "loc": place}], schema_of(_ENTRIES[name]))
    entry, _, field = path.partition(".")
    start = ": ".join([f"entry {entry}" if entry else "holds a wrong name", *filter(None, [field]), ""])
    return detail.within(start)


_ENTRIES: Mapping[str, Any] = {"stages": Stages, "training.transforms": Steps}
"""Settings that are lists of mappings, and their types."""


def _check_batch(layer: SettingsLayer) -> None:
    trajectories = layer.values.get("training.batch_trajectories")
    if trajectories is not None and layer.values.get("training.batch_size") is not None:
        raise ConfigError(
            f"{layer.where}: training.batch_size counts windows and training.batch_trajectories whole "
            "trajectories",
            hint="Give one of them",
        )


def _check_together(config: Config, file: SettingsLayer, command: SettingsLayer) -> None:
    """Raise ConfigError for settings that contradict each other."""
    for name, found in _contradictions(config, file, command):
        from_command = any(key == name or key.startswith(f"{name}.") for key in command.values)
        where = (command if from_command else file).where
        raise ConfigError.of_all([found.within(f"{where}: {name} ")])


def _conflicts_with_in_place(config: Config) -> Iterator[tuple[str, Problem]]:
    """Yield what would change samples that are to be served from the files they are in."""
    if not config.precompute.in_place:
        return
    kind, dtype, wanted = config.encoder.kind, config.training.latent_cache_dtype, config.precompute
    dtypes, engine = f"training.latent_cache_dtype={dtype}", f"precompute.engine={wanted.engine}"
    for given, fact, cure in (
        (kind != "identity", f"encoder.kind={kind} encodes them", "encoder.kind=identity"),
        (config.data.normalize, "data.normalize=true changes them", "data.normalize=false"),
        (dtype is not None, f"{dtypes} changes them", "training.latent_cache_dtype=null"),
        (
            wanted.compression != "none",
            f"precompute.compression={wanted.compression} would store them",
            "precompute.compression=none",
        ),
        (wanted.engine != "local", f"{engine} would encode them elsewhere", "precompute.engine=local"),
        (wanted.overwrite, "precompute.overwrite=true would store them again", "precompute.overwrite=false"),
    ):
        if given:
            yield (
                "precompute.in_place",
                Problem(
                    f"is true, which serves samples from the files they are in, but {fact}",
                    f"Give {cure}, or precompute.in_place=false",
                ),
            )


def _contradictions(
    config: Config, file: SettingsLayer, command: SettingsLayer
) -> Iterator[tuple[str, Problem]]:
    """Yield settings that do not fit others, and what is wrong with each."""
    kind = config.data.kind
    for name, kinds in misplaced(config.data, kind):
        fact = f"is given, but data.kind={kind} has no use for it"
        yield f"data.{name}", Problem(fact, f"Leave it out, or give data.kind={' or '.join(kinds)}")
    for name in misplaced_in_encoder(config.encoder, config.encoder.kind):
        fact = f"is given, but encoder.kind={config.encoder.kind} has no use for it"
        yield f"encoder.{name}", Problem(fact, "Leave it out, or give encoder.kind=module")
    engine = config.precompute.engine
    # A file may hold what another engine needs, for the day that one is asked for.
    given = {**file.values, **command.values} if engine == "ray" else command.values
    for name, cure in beside_engine(engine, given):
        fact = f"is {shown(given[name])}, but precompute.engine={engine} has no use for it"
        yield name, Problem(fact, cure)
    yield from _conflicts_with_in_place(config)
    for name, url in (("data.sql.url", config.data.sql.url), ("data.join.table", config.data.join.table)):
        if url and "://" in url and _has_password(url):
            yield (
                name,
                Problem(
                    "holds a password, and settings are copied into every run's folder",
                    "Put it in ~/.pgpass or PGPASSWORD, where PostgreSQL's own library looks for it",
                ),
            )
    if config.training.partition != "global" and config.training.shuffle is not True:
        yield (
            "training.partition",
            Problem(
                f"is {config.training.partition}, which shuffles the part of each rank, but training.shuffle "
                f"is {shown(config.training.shuffle)}",
                "Give training.shuffle=true, or leave training.partition out",
            ),
        )
    yield from _wrong_windows(config)
    yield from _ineffective(config.stages)
    width, heads = config.model.width, config.model.heads
    if width % heads:
        share = "Each head takes an equal part of the width"
        if "model.heads" in command.values:
            fact = f"is {heads}, and model.width {width} is not a multiple of it"
            yield "model.heads", Problem(fact, share)
        yield "model.width", Problem(f"{width} is not a multiple of model.heads {heads}", share)


def _has_password(url: str) -> bool:
    from stoker.sources.sql.query import has_password  # most settings name no database

    return has_password(url)


def _wrong_windows(config: Config) -> Iterator[tuple[str, Problem]]:
    """Return settings by which no loader can cut windows, and what is wrong with them."""
    for name in ("time_stride", "rollout_horizon"):
        value = getattr(config.training, name)
        if isinstance(value, tuple) and value[0] > value[1]:
            low, high = sorted(cast("tuple[int, int]", value))
            hint = f"Expected the smaller number first, as [{low}, {high}]"
            yield f"training.{name}", Problem(f"is {shown(value)}", hint)
    fields = config.training.state_fields
    if fields is not None and (not fields or len({*fields}) < len(fields)):
        hint = "Expected one or more names, each once, or null"
        yield "training.state_fields", Problem(f"is {shown(fields)}", hint)


def _ineffective(stages: Sequence[StageConfig]) -> Iterator[tuple[str, Problem]]:
    """Yield keys that a stage was given without effect, likewise; defaults may be written out."""
    for place, stage in enumerate(stages):
        for key, owner in ONLY_IN.items():
            value = getattr(stage, key)
            if stage.name != owner and value != StageConfig.model_fields[key].default:
                fact = f"entry {place}: {key} is {shown(value)}, and the stage {stage.name} has no use for it"
                yield "stages", Problem(fact, f"Leave it out, or give it to the stage {owner}")
