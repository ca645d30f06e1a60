"""Check the arguments of a `Loader`, and those of a PyTorch `DataLoader` that it accepts or refuses."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, SupportsIndex, cast, get_args

import torch
from numpy.typing import NDArray

from stoker.arguments import FLAG, check, finite
from stoker.errors import ConfigError, arg
from stoker.loader.batch import Windows
from stoker.loader.choose import Choices, as_choices
from stoker.loader.order import RankShare, Weights, check_ranks
from stoker.loader.transform import as_transforms
from stoker.plan.resources import resolve_device
from stoker.schema import TIER_ALIASES, dtype_name
from stoker.sources.arguments import format_value
from stoker.store import Cache
from stoker.store.shard import Verify

if TYPE_CHECKING:
    from stoker.loader.assembly import Ragged
    from stoker.loader.order import Order
    from stoker.loader.outputs import Normalization
    from stoker.loader.transform import Transform
    from stoker.monitor.meter import StallMeter

IGNORED = {
    "num_workers": "batches are gathered in this process, without workers",
    "prefetch_factor": "how far to read ahead follows from the tier",
    "persistent_workers": "there are no workers",
    "worker_init_fn": "there are no workers",
    "multiprocessing_context": "there are no workers",
    "pin_memory_device": "device= says where batches go",
    "generator": "seed= decides the order",
    "in_order": "batches always come in order",
}
"""Accepted, without effect, and why."""

REFUSED = {
    "sampler": "Use shuffle=, indices= or weights=",
    "batch_sampler": "Use batch_size=, shuffle=, indices= or weights=",
    "collate_fn": "Records are stored ready to be batched; use transforms= to change a batch",
}
"""Would change which examples are served, so they cannot be taken in silence."""

TAKEN = ("timeout", "pin_memory")
"""Names of a DataLoader's that are honored."""

_said: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments that a loader was given, by their names.

    Raises:
        ConfigError: A value means nothing, whatever the cache is.
        ResourceError: `device` is not there.
    """

    batch_size: int
    windows: Windows | None
    choose: Choices
    """What part of each record is read, by field."""
    tier: str
    device: torch.device
    """Given by name, it is looked up."""
    seed: int
    rank: int
    world_size: int
    order: str
    indices: Sequence[int] | NDArray[Any] | None
    weights: Weights | None
    dtype: str | None
    static: bool
    drop_last: bool | None
    reserve_bytes: int | None
    timeout_s: float | None
    verify: Verify
    normalize: Mapping[str, Normalization] | None
    ragged: Ragged
    batch_by: str | None = None
    batch_tokens: int | None = None
    transforms: tuple[Transform, ...]
    pin_memory: bool
    meter: StallMeter | None
    follow: Order | None = None
    """The order of another loader, of whose examples these are the partners; None: an order of its own."""
    zipped: tuple[str, ...] = ()
    """Says which records of which other caches come with these, and what is read of them, for the state."""

    @property
    def windowed(self) -> bool:
        """True if examples are windows of trajectories, False if they are entire records."""
        return self.windows is not None

    def __post_init__(self) -> None:
        """Check what can be checked without a cache."""
        numbers = ("batch_size", "rank", "world_size", "seed")
        whole = whole_numbers(**{name: getattr(self, name) for name in numbers})
        for name, value in zip(numbers, whole, strict=True):
            object.__setattr__(self, name, value)
        check_ranks(self.batch_size, self.rank, self.world_size)
        check_kinds(self.windows, self.transforms, self.reserve_bytes)
        check({"static": (self.static, FLAG)})
        if self.drop_last is not None:
            check({"drop_last": (self.drop_last, FLAG)})
        if self.meter is not None and not callable(getattr(self.meter, "waited", None)):
            raise ConfigError(f"meter is {self.meter!r}", hint="Expected a stoker.StallMeter, or None")
        check_batching(self)
        if self.verify not in get_args(Verify):
            raise ConfigError(f"verify is {self.verify!r}", hint=f"Expected {', '.join(get_args(Verify))}")
        if self.weights is not None and not isinstance(cast(object, self.weights), Weights):
            object.__setattr__(self, "weights", Weights(cast("Sequence[float]", self.weights)))
        object.__setattr__(self, "choose", as_choices(self.choose))
        object.__setattr__(self, "tier", TIER_ALIASES.get(str(self.tier), self.tier))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "transforms", as_transforms(self.transforms))
        object.__setattr__(self, "device", resolve_device(self.device))


def unknown_argument(name: str, own: Iterable[str]) -> str:
    """Return that an argument is unknown, with the nearest one of `own` and those of a DataLoader.

    >>> unknown_argument("batchsize", ["batch_size"])
    "got an unexpected keyword argument 'batchsize'. Did you mean batch_size?"
    """
    near = get_close_matches(name, [*own, *IGNORED, *TAKEN], n=1)
    return f"got an unexpected keyword argument {name!r}" + (f". Did you mean {near[0]}?" if near else "")


def refuse_unknown(given: Iterable[str], of: str, own: Iterable[str]) -> None:
    """Refuse names that are neither `own` arguments of a function nor a DataLoader's.

    Raises:
        TypeError: As Python does, with the nearest name.
    """
    own = [*own]
    for name in given:
        if name not in (*own, *IGNORED, *REFUSED, *TAKEN):
            raise TypeError(f"{of}() {unknown_argument(name, own)}")


def take_dataloader_arguments(given: Mapping[str, Any], own: Iterable[str] = ()) -> tuple[float | None, bool]:
    """Sort out arguments named as in `torch.utils.data.DataLoader`.

    Args:
        given: What the loader was called with beyond its own arguments.
        own: Names of the caller's arguments, to suggest one.

    Returns:
        A timeout for reads in seconds (None if not given), and `pin_memory`.

    Raises:
        TypeError: A name is neither ours nor DataLoader's.
        ConfigError: A name that cannot be honored.
    """
    refuse_unknown(given, "Loader.__init__", own)
    for name, value in given.items():
        if name in REFUSED:
            if value is not None:
                raise ConfigError(f"{name}= is DataLoader's and cannot be used here", hint=f"{REFUSED[name]}")
        elif name in IGNORED and value and name not in _said:
            _said.add(name)
            logging.getLogger("stoker").warning("%s=%r has no effect: %s", name, value, IGNORED[name])
    timeout, pin_memory = given.get("timeout"), given.get("pin_memory")
    if timeout is not None:
        check({"timeout": (timeout, finite(least=0))})
    if pin_memory is not None:
        check({"pin_memory": (pin_memory, FLAG)})
    return float(timeout) if timeout else None, bool(pin_memory)


def whole_numbers(**given: object) -> tuple[int, ...]:
    """Return the values as plain ints, in order; numpy's count too.

    >>> whole_numbers(batch_size=64, rank=0)
    (64, 0)

    Raises:
        ConfigError: One is no whole number.
    """
    for name, value in given.items():
        if not isinstance(value, SupportsIndex) or isinstance(value, torch.Tensor | bool):
            raise ConfigError(
                f"{name} is {value!r}", hint=f"Expected a whole number, as {name}={_EXAMPLES[name]}"
            )
    return tuple(operator.index(cast("SupportsIndex", value)) for value in given.values())


_EXAMPLES = {"batch_size": 64, "batch_tokens": 4096, "rank": 0, "world_size": 1, "seed": 0, "epoch": 0}


def check_cache(cache: object, what: str = "the cache") -> None:
    """Refuse what is not a cache.

    Raises:
        ConfigError: With what is expected.
    """
    if isinstance(cache, Cache):
        return
    raise ConfigError(
        f"{what} is {format_value(cache)}",
        hint="Expected a stoker.Cache, or its path. For a Dataset use stoker.cached(dataset, ...), which "
        "gives a Loader",
    )


def check_kinds(windows: object, transforms: object, reserve_bytes: object) -> None:
    """Refuse what is not a `Windows`, not functions of batches, or not a number of bytes.

    Raises:
        ConfigError: As said.
    """
    if windows is not None and not isinstance(windows, Windows):
        raise ConfigError(
            f"windows is {windows!r}", hint="Expected stoker.Windows(stride=1, horizon=1), or None"
        )
    if reserve_bytes is not None:
        check({"reserve_bytes": (reserve_bytes, finite(least=0))})
    as_transforms(transforms)


def check_batching(options: Options) -> None:
    """Refuse settings that have no meaning together with batches by shape or by tokens.

    Raises:
        ConfigError: As said.
    """
    tokens = options.batch_tokens
    if options.batch_by is None and tokens is None:
        return
    if options.batch_by is not None and not isinstance(cast(object, options.batch_by), str):
        raise ConfigError(f"batch_by is {options.batch_by!r}", hint="Expected 'shape' or the name of a field")
    if tokens is not None:
        (tokens,) = whole_numbers(batch_tokens=tokens)
        if tokens < 1:
            raise ConfigError(f"batch_tokens is {tokens}", hint="Expected at least 1")
    given = arg("batch_by", options.batch_by) if tokens is None else arg("batch_tokens", tokens)
    both = "do not go together"
    refused = {
        "batch_by": (options.batch_by is not None and tokens is not None, f"{both}: each decides on batches"),
        "batch_size": (tokens is not None and options.batch_size != 1, f"{both}: each decides on the size"),
        "windows": (options.windows is not None, f"{both}: windows have one shape"),
        "weights": (options.weights is not None, f"{both}: drawn records have no fixed groups"),
        "static": (options.static, f"{both}: batches differ in size"),
        "ragged": (
            tokens is not None and options.ragged not in ("list", "pack"),
            f"{both}: the records of a batch are packed one after another",
        ),
    }
    for name, (is_given, why) in refused.items():
        if is_given:
            raise ConfigError(f"{given} and {name}= {why}", hint=f"Leave {name}= out")
    if options.order not in ("full", "sequential"):
        raise ConfigError(
            f"{given} puts examples of the entire set into a batch, and the order is {options.order!r}",
            hint=f"Give {arg('shuffle', True)} or False, and leave partition out",
        )


def check_share(share: RankShare) -> None:
    """Refuse a loader that would drop all there is: each of its passes would end at once, without a word.

    Raises:
        ConfigError: `drop_last` leaves no batch.
    """
    if share.drop_last and share.positions and not share.steps():
        most = share.positions // share.world_size
        ranks = f" on each of {share.world_size} ranks" if share.world_size > 1 else ""
        cure = f"Use a batch_size of {most} or less" if most else f"Use at most {share.positions} ranks"
        raise ConfigError(
            f"drop_last leaves no batch of {share.positions} examples: a whole one takes "
            f"{share.batch_size}{ranks}",
            hint=f"{cure}, or drop_last=False",
        )


def check_static(static: bool, tier: str, share: RankShare, *, ragged: bool) -> None:
    """Refuse batches at fixed addresses where they would not all be of one shape, or not on the device.

    Raises:
        ConfigError: As said.
    """
    if static and tier != "device":
        raise ConfigError(
            f"static=True needs everything on the device, but tier is {tier!r}",
            hint=f"Give {arg('tier', 'device')} as well",
        )
    if static and (not share.drop_last or ragged):
        raise ConfigError(
            "static=True needs batches of one shape: leave drop_last as it is, and no ragged fields"
        )


def refuse_workers() -> None:
    """Raise in a worker of a DataLoader: each would hold a copy and serve every batch again."""
    from torch.utils.data import get_worker_info

    if get_worker_info() is not None:
        raise ConfigError(
            "a Loader inside a DataLoader with workers would serve every batch once per worker",
            hint="Iterate over the Loader itself: it needs no workers and gives whole batches",
        )
