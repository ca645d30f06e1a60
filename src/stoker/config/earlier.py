"""Settings of earlier systems: what each means here.

A name that still means something sets what it means; one that means nothing any more is accepted with a
note. A layer (the file, or the command line) is translated separately, so that the command line may
override an earlier name in the file.

`translate` serves every command. `modernize` goes further, for `stoker compat` and `stoker.compat` alone:
it gives names that exist today the meaning that they had then, and leaves out what belonged to other
programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TypeAlias, cast

from stoker.config.models import OTHER_NAMES, StageConfig
from stoker.config.names import all_sections, all_settings, as_name, shown
from stoker.errors import ConfigError
from stoker.train.config import STAGES

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
            raise ConfigError(f"{self.where}: {first} {again}", hint="Give it once")
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
        raise ConfigError(f"{layer.where}: {name} is {shown(position)}", hint="Expected true or false")
    if position not in SWITCHES[name]:
        return
    target, value = SWITCHES[name][position]
    present = layer.values.get(target, value)
    spelled = layer.spelled.get(target, name)
    if present != value:
        raise ConfigError(
            f"{layer.where}: {name}={shown(position)} means {target}={shown(value)}, but {spelled} says "
            f"{shown(present)}",
            hint="Give one of them",
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
    flat = dict(leaves(given))
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
                flat |= leaves({name: own})
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
        for name, _ in leaves(given)
    )


def counts_windows_now(flat: Mapping[str, object]) -> bool:
    """Return True for an earlier file whose `training.batch_size` meant trajectories."""
    return "training.batch_size" in flat and not flat.keys().isdisjoint([*SWITCHES, *IGNORED])


def leaves(given: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield values by dotted name; a setting that is a mapping is one value."""
    for key, value in given.items():
        name = f"{prefix}{as_name(key)}"
        if isinstance(value, Mapping) and not _is_known(name):
            yield from leaves(cast("Mapping[str, object]", value), f"{name}.")
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
