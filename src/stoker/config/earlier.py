"""Settings of earlier systems: what each means here.

A name that still means something sets what it means; one that means nothing any more is accepted with a note;
one that asks for something this version does not do is refused, never silently dropped. A layer (the file, or
the command line) is translated by itself, so that the command line may override an earlier name in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.config.names import shown
from stoker.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "data.patch_size": "encoder.patch_size",
    "training.num_workers": "precompute.readers",
    "training.learning_rate": "training.lr",
    "training.max_grad_norm": "training.grad_clip",
    "precompute.identity": "identity",
}
"""Earlier name to today's, with the same values."""

SWITCHES: Mapping[str, Mapping[bool, tuple[str, object]]] = {
    "training.force_ram_preload": {True: ("training.tier", "host")},
    "training.force_legacy_loader": {True: ("training.tier", "disk")},
    "training.use_preloaded_cache": {False: ("training.tier", "disk")},
    "training.use_parallel_encoding": {False: ("precompute.readers", 0)},
}
"""Earlier switch to what it sets, per position; the other position leaves things automatic."""

IGNORED: Mapping[str, str] = {
    "training.pin_memory": "memory is pinned where the tier gains from it",
    "training.prefetch_factor": "depth follows the measured latency",
    "training.persistent_workers": "serving uses no worker processes",
}
"""Earlier name to why it has no effect."""

REFUSED: Mapping[str, str] = {
    "training.use_inverse_losses": "inverse losses",
    "training.lambda_inv_enc": "inverse losses",
    "training.lambda_inv_dec": "inverse losses",
}
"""Earlier name to what is not offered; accepted while it is off."""

EARLIER = (*RENAMED, *SWITCHES, *IGNORED, *REFUSED)
"""All earlier names that are known."""


@dataclass(slots=True, kw_only=True)
class Layer:
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


def translate(given: Mapping[str, object], where: str) -> Layer:
    """Settings of one place under today's names.

    Args:
        given: Dotted name, today's or an earlier one, to value.
        where: For messages.

    Raises:
        ConfigError: Two names set the same thing, or an earlier one asks for what is not offered.
    """
    layer = Layer(where=where)
    for name, value in given.items():
        if name not in EARLIER:
            layer.put(name, value, name)
        elif name in RENAMED:
            layer.put(RENAMED[name], value, name)
        elif name in IGNORED:
            layer.notes.append(f"{where}: {name} has no effect any more: {IGNORED[name]}")
        elif name in REFUSED and value:
            raise ConfigError(
                f"{where}: {name} is {shown(value)}, but this version has no {REFUSED[name]}. "
                "Remove it, or set it to false"
            )
    for name in SWITCHES:
        if name in given:
            _switch(layer, name, given[name])
    return layer


def _switch(layer: Layer, name: str, position: object) -> None:
    """Set what a switch means; today's own name for it must not say something else."""
    if not isinstance(position, bool):
        raise ConfigError(f"{layer.where}: {name} is {shown(position)}. Expected true or false")
    if position not in SWITCHES[name]:
        return
    target, value = SWITCHES[name][position]
    present = layer.values.get(target, value)
    spelled = layer.spelled.get(target, name)
    if spelled == "training.num_workers":
        # Earlier files set both: the workers then belonged to a loader that no longer has any.
        layer.notes.append(f"{layer.where}: {spelled} has no effect next to {name}={shown(position)}")
    elif present != value:
        raise ConfigError(
            f"{layer.where}: {name}={shown(position)} means {target}={shown(value)}, "
            f"but {spelled} says {shown(present)}. Give one of them"
        )
    layer.values[target], layer.spelled[target] = value, spelled
