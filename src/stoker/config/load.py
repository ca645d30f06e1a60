"""Read settings from a YAML file and the command line, and say exactly what is wrong with them."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from stoker.config.models import ONLY_IN, OTHER_NAMES, Config, StageConfig, Stages, Steps
from stoker.config.names import all_sections, all_settings, as_name, nearest, schema_of, shown, wrong_fields
from stoker.config.sections import beside_engine, misplaced, misplaced_in_encoder, with_defaults
from stoker.errors import ConfigError, Problem
from stoker.train.config import STAGES

# ----------------------------------------------------------------------------------------------------------
# Settings of earlier systems: what each means here.
#
# A name that still means something sets what it means; one that means nothing any more is accepted with a
# note. A layer (the file, or the command line) is translated separately, so that the command line may
# override an earlier name in the file.
#
# `translate` serves every command. `modernize` goes further, for `stoker compat` and `stoker.compat` alone:
# it gives names that exist today the meaning that they had then, and leaves out what belonged to other
# programs.


RENAMED: Mapping[str, str] = {
    "data.patch_size": "encoder.patch_size",
    "training.num_workers": "precompute.workers",
    "training.learning_rate": "training.lr",
    "training.max_grad_norm": "training.grad_clip",
    "precompute.identity": "identity",
    "data.torch.identity": "data.torch.version",
}
"""Earlier name to today's, with the same values."""

SWITCHES: Mapping[str, Mapping[bool, tuple[str, object]]] = {
    "training.force_ram_preload": {True: ("training.tier", "host")},
    "training.force_legacy_loader": {True: ("training.tier", "disk")},
    "training.use_preloaded_cache": {False: ("training.tier", "disk")},
}
"""Earlier switch to what it sets, per position; the other position leaves things automatic."""

IGNORED: Mapping[str, str] = {
    "training.pin_memory": "memory is pinned where the tier gains from it",
    "training.prefetch_factor": "depth follows the measured latency",
    "training.persistent_workers": "serving uses no worker processes",
    "training.num_gpus": "`torchrun --nproc-per-node N -m stoker train CONFIG` starts one process for each",
    "training.use_parallel_encoding": "workers read, one process encodes",
}
"""Earlier name to why it has no effect."""

EARLIER = (*RENAMED, *SWITCHES, *IGNORED)
"""All earlier names that are known."""

MEANT: Mapping[str, str] = {
    "training.batch_size": "training.batch_trajectories",
    "seed": "training.seed",
    "training.patience": "training.early_stop_patience",
    "optimizer.lr": "training.lr",
    "optimizer.weight_decay": "training.weight_decay",
    "stages.operator.epochs": "training.epochs",
    "stages.operator.patience": "training.early_stop_patience",
    "stages.operator.optimizer.lr": "training.lr",
    "stages.operator.optimizer.weight_decay": "training.weight_decay",
}
"""Today's meaning of names in a file of the earlier latent cache; the more special ones last: they win."""

STAGE_MEANT: Mapping[str, str] = {
    "patience": "early_stop_patience",
    "optimizer.lr": "lr",
    **{name: name for name in StageConfig.model_fields if name != "name"},
}
"""Today's meaning of names in a section of `stages` other than `operator`, which has its own above."""

BATCH_TRAJECTORIES = 16
"""Trajectories in a batch of an earlier file that gives no `training.batch_size`."""

OTHER_SECTIONS = frozenset({
    "stages", "checkpoint", "checkpoints", "logging", "operator", "optimizer", "diffusion", "distillation",
    "evaluation", "ttc", "tracker", "wandb",
})  # fmt: skip
"""Sections of earlier files that belonged to other programs: a file with one of them is an earlier one."""

_Stages: TypeAlias = dict[str, dict[str, object]]

ALIKE = 0.85
"""Names at least this much alike are taken for one name misspelt, which is an error."""


@dataclass(slots=True, kw_only=True)
class SettingsLayer:
    """Settings from one place, by today's dotted name."""

    where: str
    """The file, or `command line`; begins every message."""
    values: dict[str, object] = field(default_factory=dict[str, object])
    spelled: dict[str, str] = field(default_factory=dict[str, str])
    """Today's name to the one that the user wrote."""
    notes: list[str] = field(default_factory=list[str])

    def put(self, name: str, value: object, spelled: str) -> None:
        """Set `name`.

        Raises:
            ConfigError: It is set already, under this or another name.
        """
        if name in self.values:
            first = self.spelled[name]
            again = "is given twice" if first == spelled else f"and {spelled} are the same setting"
            raise ConfigError(f"{self.where}: {first} {again}. Give it once")
        self.values[name], self.spelled[name] = value, spelled


def translate(given: Mapping[str, object], where: str) -> SettingsLayer:
    """Return settings of one place under today's names.

    Args:
        given: Dotted name, today's or an earlier one, to value.
        where: For messages.

    Raises:
        ConfigError: Two names set the same thing.
    """
    layer = SettingsLayer(where=where)
    for name, value in given.items():
        if name not in EARLIER:
            layer.put(name, value, name)
        elif name in RENAMED:
            layer.put(RENAMED[name], value, name)
        elif name in IGNORED:
            layer.notes.append(f"{where}: {name} has no effect any more: {IGNORED[name]}")
    for name in SWITCHES:
        if name in given:
            _switch(layer, name, given[name])
    return layer


def _switch(layer: SettingsLayer, name: str, position: object) -> None:
    """Set what a switch means; today's own name for it must not say something else."""
    if not isinstance(position, bool):
        raise ConfigError(f"{layer.where}: {name} is {shown(position)}. Expected true or false")
    if position not in SWITCHES[name]:
        return
    target, value = SWITCHES[name][position]
    present = layer.values.get(target, value)
    spelled = layer.spelled.get(target, name)
    if present != value:
        raise ConfigError(
            f"{layer.where}: {name}={shown(position)} means {target}={shown(value)}, "
            f"but {spelled} says {shown(present)}. Give one of them"
        )
    layer.values[target], layer.spelled[target] = value, spelled


def modernize(given: Mapping[str, object], where: str) -> tuple[dict[str, object], list[str]]:
    """Return the settings of an earlier file, or of its command line, by the names that mean the same now.

    Args:
        given: Nested, or by dotted name.
        where: Begins every note.

    Returns:
        Settings by dotted name, for `translate`, and notes: a line for what has no effect, one for each
        setting that was given in two places. A name that is nearly a known one stays in, so that reading
        it says which one it resembles.
    """
    kept: dict[str, object] = {}
    spelled: dict[str, str] = {}
    left: dict[str, None] = {}
    notes: list[str] = []
    flat = dict(_leaves(given))
    if stages := _take_stages(flat):
        kept["stages"], spelled["stages"] = stages, "stages"
    order = [*MEANT]
    for name in sorted(flat, key=lambda name: order.index(name) if name in MEANT else -1):
        value, today = flat[name], MEANT.get(name, name)
        if not _is_known(today) and not _resembles(name):
            left[name if _stage_of(name) else _shortest(name)] = None
            continue
        if value is None and today in all_settings() and "null" not in all_settings()[today].expects:
            continue  # unset, as an earlier file says it
        if today in kept and kept[today] != value:
            notes.append(f"{where}: {name} {shown(value)} is used, not {spelled[today]} {shown(kept[today])}")
        kept[today], spelled[today] = value, name
    if left:
        notes.append(f"{where}: no effect here: {', '.join(left)} (docs/migration.md#settings)")
    return kept, notes


def _take_stages(flat: dict[str, object]) -> dict[str, dict[str, object]]:
    """Move stages that `stoker train` has out of `flat`; nothing where `operator` is the only one."""
    found: dict[str, dict[str, object]] = {}
    whole = flat.get("stages")
    if isinstance(whole, Mapping):
        del flat["stages"]
        for key, own in cast("Mapping[str, object]", whole).items():
            name = f"stages.{as_name(key)}"
            if stage := _stage_of(name):
                found[stage] = {}
            if own or stage is None:
                flat |= _leaves({name: own})
    for name in [name for name in flat if name not in MEANT]:
        stage, leaf = _stage_of(name), name.split(".", 2)[-1]
        if stage and leaf in STAGE_MEANT:
            found.setdefault(stage, {})[STAGE_MEANT[leaf]] = flat.pop(name)
    return {"operator": {}} | found if any(name != "operator" or own for name, own in found.items()) else {}


def _stage_of(name: str) -> str | None:
    """Return the stage of today that an earlier name is about; None: none."""
    section, _, rest = name.partition(".")
    stage = rest.partition(".")[0]
    stage = OTHER_NAMES.get(stage, stage)
    return stage if section == "stages" and stage in STAGES else None


def of_then(given: dict[str, object], overrides: dict[str, object], where: str) -> list[str]:
    """Add to the settings of an earlier file what it did not say and meant; notes about it."""
    both = {**given, **overrides}
    stages, more = given.get("stages"), overrides.get("stages")
    if isinstance(stages, dict) and isinstance(more, dict):
        file, command = cast("_Stages", stages), cast("_Stages", more)
        overrides["stages"] = {
            name: file.get(name, {}) | command.get(name, {}) for name in {**file, **command}
        }
    if "training.start_every" not in both:
        given["training.start_every"] = "${training.time_stride}"  # pairs began a stride apart
    if "training.batch_trajectories" in both or "training.batch_size" in both:
        return []
    given["training.batch_trajectories"] = BATCH_TRAJECTORIES
    return [f"{where}: training.batch_size is not given: {BATCH_TRAJECTORIES} trajectories"]


def lift_sequential(file: SettingsLayer, overrides: Mapping[str, object]) -> None:
    """Let `training.use_parallel_encoding=true` on the command line lift the file's `num_workers: 0`."""
    if overrides.get("training.use_parallel_encoding") is True and file.values.get("precompute.workers") == 0:
        del file.values["precompute.workers"]


def is_earlier(given: Mapping[str, object]) -> bool:
    """Return True for the settings of an earlier file: by a section, or a name, that only those had."""
    return any(
        name in EARLIER or name.partition(".")[0] in OTHER_SECTIONS - {*all_sections(), *all_settings()}
        for name, _ in _leaves(given)
    )


def counts_windows_now(flat: Mapping[str, object]) -> bool:
    """Return True for an earlier file whose `training.batch_size` meant trajectories."""
    return "training.batch_size" in flat and not flat.keys().isdisjoint([*SWITCHES, *IGNORED])


def _leaves(given: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield values by dotted name; a setting that is a mapping is one value."""
    for key, value in given.items():
        name = f"{prefix}{as_name(key)}"
        if isinstance(value, Mapping) and not _is_known(name):
            yield from _leaves(cast("Mapping[str, object]", value), f"{name}.")
        elif name not in all_sections() or value is not None:
            yield name, value


def _is_known(name: str) -> bool:
    owner = all_settings().get(name.rpartition(".")[0])
    entry = name.startswith("tasks.") or (owner is not None and owner.mapping)
    return name in all_settings() or name in EARLIER or entry


def _shortest(name: str) -> str:
    """Return the shortest unknown prefix of a name: `logging` for `logging.wandb.on`."""
    known = (*all_settings(), *EARLIER, *MEANT)
    parts = name.split(".")
    heads = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((head for head in heads if not any(k.startswith(f"{head}.") for k in known)), name)


def _resembles(name: str) -> bool:
    """Return True if `name`, in a known section, is nearly a known name: it may be a typing error."""
    section, _, leaf = name.rpartition(".")
    if section not in all_sections():
        return False
    known = (*all_settings(), *EARLIER)
    leaves = [other.rpartition(".")[2] for other in known if other.startswith(f"{section}.")]
    return any(
        SequenceMatcher(None, leaf, other).ratio() >= ALIKE or other.endswith(f"_{leaf}") for other in leaves
    )


# ----------------------------------------------------------------------------------------------------------
# Settings of single tasks: `tasks: {name: {...}}`, over those of all.
#
# A block may set what decides a task's records and the size of its batches. Everything else is one for the
# whole run, since one operator is trained on all tasks.


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
        raise ConfigError(f"{where}: tasks is {given!r}. Expected settings by task, as {_EXAMPLE}")
    blocks: dict[str, dict[str, object]] = {}
    for key, value in cast("Mapping[str, Any]", given).items():
        entry = _ENTRY.fullmatch(str(key))
        task, block = (entry["task"], {entry["setting"]: value}) if entry else (str(key), value)
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: tasks.{task} is {block!r}. Expected settings, as {_EXAMPLE}")
        for name, one in _leaves(cast("Mapping[str, object]", block)):
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
            f"{said} need training.mixture=weighted, and training.mixture is {config.training.mixture}. "
            "Set training.mixture=weighted, or leave task_weights out"
        )
    lacking = [task for task in tasks if task not in weights]
    for name in weights:
        if name not in tasks:
            near = get_close_matches(name, lacking, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Leave it out"
            raise ConfigError(f"{said} has {name}, but data.task is {', '.join(tasks)}. {hint}")
    if lacking:
        raise ConfigError(f"{said} has no entry for {', '.join(lacking)}. Give each task a number above 0")


_EXAMPLE = "tasks: {burgers1d: {data: {preset: pdebench}}}"


def _check_name(name: str, said: str) -> None:
    if name not in all_settings():
        near = nearest(name, all_settings())
        raise ConfigError(
            f"{said} is not a setting ({f'did you mean {near}?' if near else 'see docs/config.md'})"
        )
    if name == "data.task" or (name.partition(".")[0] not in SECTIONS and name not in SINGLE):
        raise ConfigError(
            f"{said}: {name} cannot be set for one task. Set it for all tasks; for one task there are "
            f"{', '.join(f'{section}.*' for section in SECTIONS)}, {', '.join(SINGLE)}"
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
    where = "defaults" if path is None else str(path)
    return _build(given, _parse(overrides), where, earlier=earlier)


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
    unknown: list[Problem] = []
    flat = _flatten(settings, "", where, unknown)
    if unknown:
        unknown += _say_earlier(settings, where, earlier)
    _check_names(overrides, unknown)
    if unknown:
        raise ConfigError.of_all(unknown)
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
        raise ConfigError.of_all(_explain(error, merged, file, command)) from error
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
            f"{path} cannot be read: {error.strerror}. Expected a YAML file with settings"
        ) from error
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" line {error.problem_mark.line + 1}:"
        raise ConfigError(f"{path}:{line} not YAML: {error.problem or error.context}") from error
    except (UnicodeDecodeError, ReaderError) as error:
        raise ConfigError(
            f"{path} is not a text file. Expected a YAML file with settings. If it holds data, `stoker init "
            f"{path}` writes one that reads it"
        ) from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: holds a list. Expected settings, as `training:` with names below it")
    return cast("dict[str, object]", OmegaConf.to_container(content, resolve=False))


def _require_file(path: Path) -> None:
    """Refuse anything but a file before it is opened: opening a pipe would wait for a writer.

    Raises:
        ConfigError: Nothing is there, or something else is.
    """
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
                f"{path} holds caches. `stoker cache show {path}` says which; this takes the settings "
                "that they are made with: a YAML file, as configs/NAME.yaml"
            )
        folder = path if path.is_dir() else path.parent
        others = sorted(str(other) for other in folder.glob("*.yaml") if other.is_file())
    there = f" There are: {', '.join(others)}" if others else ""
    if not others and fact.startswith(" is a folder"):
        there = f" `stoker init {path}` writes one, if the folder holds data"
    raise ConfigError(f"{path}{fact}. Expected a YAML file with settings.{there}")


def holds_caches(folder: Path) -> bool:
    """Return True if a folder is that of one cache, or of several."""
    return any(next(folder.glob(f"{above}recipe.json"), None) for above in ("", "*/", "*/*/"))


def _parse(overrides: Sequence[str]) -> dict[str, object]:
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
                f"{COMMAND_LINE}: {text!r} is not a setting. Expected key=value, as training.lr=1e-4"
            )
        if name in found:
            raise ConfigError(f"{COMMAND_LINE}: {name} is given twice. Give it once")
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
            f"{COMMAND_LINE}: {text!r} is not a value: {fact}. Expected YAML, or ${{section.name}} for "
            "another setting's value"
        ) from error
    return parsed["value"]


def _flatten(
    settings: Mapping[str, object], prefix: str, where: str, unknown: list[Problem]
) -> dict[str, object]:
    """Return nested settings by dotted name; names of no setting go to `unknown` as messages."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        name = f"{prefix}{as_name(key)}"
        if name in all_settings() or name in EARLIER:
            _put(flat, name, value, where)
        elif name not in all_sections():
            unknown.append(_say_unknown(name, where))
        elif isinstance(value, Mapping):
            inner = _flatten(cast("Mapping[str, object]", value), f"{name}.", where, unknown)
            for below, found in inner.items():
                _put(flat, below, found, where)
        elif value is not None:  # a section with nothing below it reads as null
            unknown.append(
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
        raise ConfigError(f"{where}: {name} is given twice, nested and with a dot. Give it once")
    flat[name] = value


def _check_names(overrides: Mapping[str, object], unknown: list[Problem]) -> None:
    for name in overrides:
        if name in all_sections():
            unknown.append(
                Problem(
                    f"{COMMAND_LINE}: {name} is a section", f"Give one of its settings, as {_example(name)}"
                )
            )
        elif name not in all_settings() and name not in EARLIER and _mapping_of(name) is None:
            unknown.append(_say_unknown(name, COMMAND_LINE))


def _mapping_of(name: str) -> str | None:
    """Return the setting whose entry `name` is: `data.splits` for `data.splits.train`."""
    if name.startswith("tasks."):
        return "tasks"
    owner = name.rpartition(".")[0]
    setting = all_settings().get(owner)
    return owner if setting is not None and setting.mapping else None


def _say_unknown(name: str, where: str) -> Problem:
    near = nearest(name, [*all_settings(), *EARLIER, *all_sections()])
    hint = f"did you mean {near}?" if near else "docs/config.md lists them all"
    return Problem(f"{where}: {name} is not a setting ({hint})")


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
        raise ConfigError(f"{at}: {str(error).splitlines()[0]}") from error
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
            "trajectories. Give one of them"
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
