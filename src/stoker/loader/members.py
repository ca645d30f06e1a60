"""The loaders that a mixture is put together from: made of caches, or taken as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError, arg
from stoker.loader.arguments import check_cache
from stoker.loader.decide import completed
from stoker.loader.engine import Design
from stoker.loader.loader import Loader, design_of, is_beside
from stoker.loader.turns import Lap, member_seed
from stoker.sources.given import shown
from stoker.store import Cache
from stoker.store.joint import Joint, same_fields

REFUSED = {
    "indices": "sample numbers are of one cache",
    "static": "its batches have the shapes of several caches",
}
"""Settings of a `Loader` that have no meaning for several caches at once, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """What a mixture serves from."""

    names: tuple[str, ...]
    """Of the caches, in the order given."""
    caches: tuple[Cache, ...]
    loaders: Mapping[str, Loader]
    """By name; where batches hold examples of several caches, the one loader of all of them."""
    joint: Joint | None
    """The caches as one, where batches hold examples of several of them."""

    @property
    def designs(self) -> dict[str, Design]:
        """What was decided about each loader."""
        return {name: design_of(loader) for name, loader in self.loaders.items()}

    @property
    def laps(self) -> dict[str, Lap]:
        """One pass over each loader."""
        return {name: _lap_of(loader) for name, loader in self.loaders.items()}

    @property
    def sequential(self) -> bool:
        """Whether every loader serves in sample order."""
        return all(design.order.kind.kind == "sequential" for design in self.designs.values())

    @property
    def windowed(self) -> bool:
        """Whether examples are windows."""
        return next(iter(self.designs.values())).windowed

    def whose(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Place of the cache of each example of a joint batch, and its `index` in that cache."""
        assert self.joint is not None
        offsets = _on(index.device, self.joint.offsets)
        own = index.clone()
        numbers = own.view(len(own), -1)[:, 0]
        tasks = torch.bucketize(numbers.contiguous(), offsets, right=True).sub_(1)
        numbers.sub_(offsets[tasks])
        return tasks, own


def make_members(
    given: Sequence[Cache | Loader],
    names: Sequence[str] | None,
    *,
    in_one_batch: bool | None,
    full_batches: bool,
    seed: int,
    settings: Mapping[str, Any],
) -> Members:
    """Loaders for what was given.

    Args:
        given: Caches, for which loaders are made, or loaders.
        names: One for each; None: the caches' own.
        in_one_batch: Whether a batch may hold examples of several caches; None: where that can be.
        full_batches: Passes are made of full batches, wherever there is one.
        seed: Each loader gets one of its own that is made from it.
        settings: Of the loaders that are made.

    Raises:
        ConfigError: Nothing was given, names repeat, or the loaders do not fit together.
        StokerError: As `Loader`.
    """
    _check_given(given, settings)
    called = _names([_cache_of(one) for one in given], names)
    made = any(isinstance(one, Loader) for one in given)
    if in_one_batch and made:
        raise ConfigError(
            "mix='example' puts examples of several caches into one batch, which takes caches: a Loader "
            "makes batches of its own. Give the caches, or mix='batch'"
        )
    filling = [_cache_of(one) for one in given if isinstance(one, Cache) and _being_filled(one)]
    if in_one_batch and filling:
        raise ConfigError(
            "mix='example' shuffles the examples of all caches together, which takes complete ones, and "
            f"{filling[0].path} is being filled. Leave {arg('wait', False)} out of its "
            "precompute, or give mix='batch'"
        )
    if filling:
        in_one_batch = False
    whole = [one if isinstance(one, Loader) or one in filling else completed(one) for one in given]
    caches = [_cache_of(one) for one in whole]
    joint = None
    if (not made and same_fields(caches)) if in_one_batch is None else in_one_batch:
        joint = Joint(caches)
        loaders = {"+".join(called): Loader(joint, seed=seed, **settings)}
    else:
        loaders = _loaders(dict(zip(called, whole, strict=True)), seed, settings, full_batches=full_batches)
    members = Members(names=called, caches=tuple(caches), loaders=loaders, joint=joint)
    _check_together(members)
    return members


def _loaders(
    given: Mapping[str, Cache | Loader], seed: int, settings: Mapping[str, Any], *, full_batches: bool
) -> dict[str, Loader]:
    """The loaders by name; each is planned into the memory that those before it leave (`plan.ledger`)."""
    loaders: dict[str, Loader] = {}
    for place, (name, one) in enumerate(given.items()):
        if isinstance(one, Loader):
            loaders[name] = one
            continue
        loader = Loader(one, seed=member_seed(seed, place), **settings)
        lap = _lap_of(loader)
        short = lap.tail > 0 or is_beside(loader)  # where samples may yet prove to be quarantined
        if full_batches and lap.whole and short and settings.get("drop_last") is None:
            full: dict[str, Any] = {**settings, "drop_last": True}
            loader = Loader(one, seed=member_seed(seed, place), **full)
        loaders[name] = loader
    return loaders


def _cache_of(one: Cache | Loader) -> Cache:
    return one.dataset if isinstance(one, Loader) else one


def _check_given(given: object, settings: Mapping[str, Any]) -> None:
    if isinstance(given, Cache | Loader):
        raise ConfigError(f"a mixture is of several caches or Loaders, got {given!r}. Give a list of them")
    several = isinstance(given, Collection) and not isinstance(given, str | bytes | bytearray | Mapping)
    members = cast("Collection[object]", given) if several else ()
    if not members:
        raise ConfigError(
            f"a mixture is of caches or Loaders, got {shown(given)}. Give a list of them, each as "
            "stoker.open_cache(path) opens it"
        )
    for one in members:
        if isinstance(one, Loader):
            design_of(one)  # which refuses one whose batches nobody can count
        else:
            check_cache(one, "a member of the mixture")
    if settings and all(isinstance(one, Loader) for one in members):
        raise ConfigError(
            f"{', '.join(settings)}: settings of loaders that are made already. Give them to Loader(...)"
        )
    for name, why in REFUSED.items():
        if settings.get(name) is not None:
            raise ConfigError(f"{name}= means nothing in a mixture: {why}. Give Loaders made with {name}=")


def _being_filled(cache: Cache) -> bool:
    """Whether a process is at it; who takes it from there serves it meanwhile."""
    return not cache.complete and cache.filling is not None and not cache.filling.done()


def _names(caches: Sequence[Cache], names: Sequence[str] | None) -> tuple[str, ...]:
    called = tuple(cache.name for cache in caches) if names is None else tuple(map(str, names))
    if len(called) != len(caches):
        raise ConfigError(f"{len(called)} names for {len(caches)} caches. Give one name for each")
    twice = [name for name, count in Counter(called).items() if count > 1]
    if twice:
        raise ConfigError(f"several caches are called {twice[0]!r}. Give each a name of its own with names=")
    return called


def _check_together(members: Members) -> None:
    """Refuse loaders that cannot take turns.

    Raises:
        ConfigError: They differ in rank, world, device, or whether they serve windows.
    """
    designs = members.designs
    first = next(iter(designs))
    for name, design in designs.items():
        if design.cuts is not None:
            raise ConfigError(
                f"the loader of {name!r} cuts windows from fields of points, whose batches no mixture joins. "
                "Iterate over that Loader by itself, or mix caches of latents (encoder.kind=mesh)"
            )
        for what, a, b in (
            ("rank", designs[first].share.rank, design.share.rank),
            ("world", designs[first].share.world, design.share.world),
            ("device", str(designs[first].device), str(design.device)),
            ("windows", designs[first].windowed, design.windowed),
        ):
            if a != b:
                raise ConfigError(
                    f"the loaders of {first!r} and {name!r} differ in {what}: {a} and {b}. "
                    "Loaders of one mixture agree in rank, world, device, and whether they cut windows"
                )


@cache
def _on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """The numbers as int64 on a device."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _lap_of(loader: Loader) -> Lap:
    design = design_of(loader)
    share = design.share
    if share.contiguous:  # every rank has steps of its own
        return Lap(whole=share.steps(), tail=0, step=share.step)
    # Beside a filling whatever is known of it by now: turns must not depend on when they are laid out.
    positions = design.order.positions if is_beside(loader) else share.positions
    return Lap(whole=positions // share.step, tail=positions % share.step, step=share.step)
