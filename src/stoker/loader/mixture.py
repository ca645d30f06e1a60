"""Serve several caches as one stream of batches; each says which cache its examples are from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, cast

from stoker.errors import ConfigError, arg
from stoker.loader import state as states
from stoker.loader.design import Design, complete_cache
from stoker.loader.loader import Loader, complete, design_of, follow, is_filling, pass_from
from stoker.loader.mixture_batches import MixtureBatches
from stoker.loader.options import check_cache, refuse_unknown, refuse_workers
from stoker.loader.state import VERSION, EpochIterable, EpochPlace
from stoker.loader.turns import (
    Exhausted,
    MemberPass,
    Mode,
    TurnSchedule,
    check_mode,
    make_turns,
    member_seed,
    normalize_shares,
)
from stoker.sources.arguments import format_value
from stoker.store import Cache
from stoker.store.cache import JointCache, same_fields
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.schema import Json


# ----------------------------------------------------------------------------------------------------------
# The loaders that a mixture is put together from: made of caches, or taken as they are.


REFUSED = {
    "indices": "sample indices are of one cache",
    "static": "its batches have the shapes of several caches",
}
"""Settings of a `Loader` that have no meaning for several caches at once, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Loaders and caches of a mixture."""

    names: tuple[str, ...]
    """Of the caches, in the order given."""
    caches: tuple[Cache, ...]
    loaders: Mapping[str, Loader]
    """By name; where batches hold examples of several caches, the one loader of all of them."""
    joint: JointCache | None
    """The caches as one, where batches hold examples of several of them."""

    @property
    def designs(self) -> dict[str, Design]:
        """The design of each loader, by name."""
        return {name: design_of(loader) for name, loader in self.loaders.items()}

    @property
    def passes(self) -> dict[str, MemberPass]:
        """One pass over each loader."""
        return {name: _pass_over(loader) for name, loader in self.loaders.items()}

    @property
    def sequential(self) -> bool:
        """True if every loader serves in sample order."""
        return all(design.order.kind.kind == "sequential" for design in self.designs.values())


def make_members(
    given: Sequence[Cache | Loader],
    names: Sequence[str] | None,
    *,
    in_one_batch: bool | None,
    full_batches: bool,
    seed: int,
    settings: Mapping[str, Any],
) -> Members:
    """Return loaders for what was given.

    Args:
        given: Caches, for which loaders are made, or loaders.
        names: One for each; None: the caches' own.
        in_one_batch: Whether a batch may hold examples of several caches; None: where that can be.
        full_batches: Passes are made of full batches, wherever a cache has one.
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
    whole = [one if isinstance(one, Loader) or one in filling else complete_cache(one) for one in given]
    caches = [_cache_of(one) for one in whole]
    joint = None
    if (not made and same_fields(caches)) if in_one_batch is None else in_one_batch:
        joint = JointCache(caches)
        loaders = {"+".join(called): Loader(joint, seed=seed, **settings)}
    else:
        loaders = _loaders(dict(zip(called, whole, strict=True)), seed, settings, full_batches=full_batches)
    members = Members(names=called, caches=tuple(caches), loaders=loaders, joint=joint)
    _check_together(members)
    return members


def _loaders(
    given: Mapping[str, Cache | Loader], seed: int, settings: Mapping[str, Any], *, full_batches: bool
) -> dict[str, Loader]:
    """Return the loaders by name; each is planned into the memory that those before it leave."""
    loaders: dict[str, Loader] = {}
    for place, (name, one) in enumerate(given.items()):
        if isinstance(one, Loader):
            loaders[name] = one
            continue
        loader = Loader(one, seed=member_seed(seed, place), **settings)
        one_pass = _pass_over(loader)
        short = one_pass.tail > 0 or is_filling(loader)  # samples may still prove to be quarantined
        if full_batches and one_pass.whole and short and settings.get("drop_last") is None:
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
            f"a mixture is of caches or Loaders, got {format_value(given)}. Give a list of them, each as "
            "stoker.open_cache(path) opens it"
        )
    for one in members:
        if isinstance(one, Loader):
            design_of(one)  # which refuses one whose batches cannot be counted
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
    """Return True if a process is filling it; the cache can be served meanwhile."""
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
        ConfigError: They differ in rank, world_size, device, or whether they serve windows.
    """
    designs = members.designs
    first = next(iter(designs))
    for name, design in designs.items():
        if design.cuts is not None:
            raise ConfigError(
                f"the loader of {name!r} cuts windows from fields of points, whose batches no mixture joins. "
                "Iterate over that Loader alone, or mix caches of latents (encoder.kind=mesh)"
            )
        for what, a, b in (
            ("rank", designs[first].share.rank, design.share.rank),
            ("world_size", designs[first].share.world_size, design.share.world_size),
            ("device", str(designs[first].options.device), str(design.options.device)),
            ("windows", designs[first].options.windowed, design.options.windowed),
        ):
            if a != b:
                raise ConfigError(
                    f"the loaders of {first!r} and {name!r} differ in {what}: {a} and {b}. "
                    "Loaders of one mixture agree in rank, world_size, device, and whether they cut windows"
                )


def _pass_over(loader: Loader) -> MemberPass:
    design = design_of(loader)
    share = design.share
    if share.contiguous:  # every rank has steps of its own
        return MemberPass(whole=share.steps(), tail=0, step=share.step)
    # While a cache is filled, all its positions: turns must not depend on when they are laid out.
    positions = design.order.positions if is_filling(loader) else share.positions
    return MemberPass(whole=positions // share.step, tail=positions % share.step, step=share.step)


class Mixture(EpochIterable):
    """Iterable over batches of several caches, like a `Loader`; each says which cache it is of.

    Which cache and which examples come at a step depends on seed, epoch and step alone, so tiers, ranks and
    resuming change nothing. With windows batches are `TaskBatch`es, without `RecordBatch`es that also hold
    `task`, `tasks` and `mask`.
    """

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        members: Sequence[Cache | Loader],
        batch_size: int | None = None,
        *,
        mode: Mode = "concat",
        weights: Sequence[float] | Mapping[str, float] | None = None,
        epoch_examples: int | None = None,
        exhausted: Exhausted | None = None,
        mix: Literal["batch", "example"] | None = None,
        names: Sequence[str] | None = None,
        seed: int = 0,
        meter: StallMeter | None = None,
        **loader: Any,
    ) -> None:
        """Decide whose turn it is at every step; records are read when iteration begins.

        Args:
            members: Caches, or Loaders, whose passes then belong to the mixture alone.
            batch_size: Examples in a batch of this rank, for caches; None: 1.
            mode: `concat` serves every example once in an epoch. `weighted` gives each cache its part of an
                epoch's examples, without replacement within each pass over it. `round_robin` serves a batch
                of each in turn.
            weights: Of mode `weighted`, by place or by name; None: equal ones.
            epoch_examples: Length of an epoch in mode `weighted`, over all ranks; None: all examples of
                the caches.
            exhausted: When an epoch of mode `round_robin` ends: with the `first` cache that has no batch left
                (None), or with the `longest`, while shorter ones begin again in a new order.
            mix: Whether a batch is of one cache (`batch`), or of one set of all examples (`example`: mode
                `concat`, caches with the same fields). None: `example` where that can be.
            names: Of the caches; None: their own.
            seed: Of the turns; each cache gets a seed that is made from it.
            meter: Told how long each batch was waited for.
            loader: Settings of `Loader`, for caches: `windows`, `tier`, `rank`, `world_size`, ...

        Raises:
            ConfigError: A setting does not fit the caches or another one.
            StokerError: As `Loader`.
        """
        refuse_workers()
        check_mode(mode, weights=weights, epoch_examples=epoch_examples, exhausted=exhausted)
        refuse_unknown(loader, "Mixture.__init__", (*_arguments(Loader), *_arguments(Mixture)))
        if mix not in (None, "batch", "example") or (mix == "example" and mode != "concat"):
            raise ConfigError(
                f"mix is {mix!r} in mode {mode!r}. Expected 'batch', or in mode 'concat' also 'example'"
            )
        in_one_batch = False if mode != "concat" else None if mix is None else mix == "example"
        settings = {**loader, **({} if batch_size is None else {"batch_size": batch_size})}
        if meter is not None and not all(isinstance(one, Loader) for one in members):
            settings["meter"] = meter
        self._members = make_members(
            members,
            names,
            in_one_batch=in_one_batch,
            full_batches=mode == "weighted" or (mode == "round_robin" and exhausted != "longest"),
            seed=seed,
            settings=settings,
        )
        self._make_turns = partial(
            make_turns,
            mode=mode,
            seed=seed,
            shares=normalize_shares(weights, self._members.names) if mode == "weighted" else (),
            epoch_examples=epoch_examples,
            exhausted=exhausted,
        )
        self._mode: Mode = mode
        self._turns = self._arranged()
        self._filling_epoch: int | None = None
        """The epoch that is, or was, served while caches were filled."""
        designs = self._members.designs
        if (joint := self._members.joint) is not None:
            designs = dict.fromkeys(self.names, next(iter(designs.values())))
        self._batches = MixtureBatches(designs, self.names, joint)
        self._meter = meter
        self._place = EpochPlace()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the caches, in the order given: what `task` and `tasks` of a batch refer to."""
        return self._members.names

    @property
    def loaders(self) -> Mapping[str, Loader]:
        """The loaders that batches come from, by name; one for all caches if batches mix their examples."""
        return self._members.loaders

    @property
    def dataset(self) -> tuple[Cache, ...]:
        """The caches, under the name that a `DataLoader` has for its data."""
        return self._members.caches

    @property
    def statistics(self) -> dict[str, Mapping[str, Any]]:
        """Per cache what its index keeps of each field: mean, deviation, least, largest."""
        return {name: cache.statistics for name, cache in zip(self.names, self.dataset, strict=True)}

    @property
    def batch_size(self) -> int:
        """Examples in a full batch of this rank; of loaders that differ, in the largest."""
        return max(loader.batch_size for loader in self.loaders.values())

    @property
    def drop_last(self) -> bool:
        """True if short batches are left out."""
        return all(loader.drop_last for loader in self.loaders.values())

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch."""
        turns, total = self._turns, 0
        for count, steps, loader in zip(turns.counts, turns.passes, self.loaders.values(), strict=True):
            passes, rest = divmod(count, steps)
            here = min(steps, len(loader))
            total += passes * here + min(rest, here)
        return total

    def __repr__(self) -> str:
        return (
            f"Mixture({', '.join(self.names)}, {self._mode}, {format_count(len(self))} batches of "
            f"{self.batch_size}, {', '.join(loader.plan.tier for loader in self.loaders.values())} tier)"
        )

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Json]:
        """Return where to resume: after the batches handed out so far, or after the one at `position`."""
        members, at = self._members, self._place.at if position is None else position
        beside = self._filling_epoch if any(map(is_filling, self.loaders.values())) else None
        return {
            "version": VERSION,
            "epoch": at[0],
            "position": at[1],
            "mode": self._mode if members.joint is None else f"{self._mode} of examples",
            "seed": self._turns.seed,
            # In sequential order each rank has steps of its own.
            "counts": [] if members.sequential else [*self._turns.counts],
            "caches": [[n, cache.fingerprint] for n, cache in zip(self.names, self.dataset, strict=True)],
            "loaders": {name: loader.state_dict((0, 0)) for name, loader in self.loaders.items()},
            **({} if beside is None else {"beside": beside}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken, at any tier, world size or number of workers.

        Raises:
            StaleStateError: The state belongs to other caches, or another mode, seed or batch size.
        """
        for name, one in states.loaders_in(state).items():
            if name in self.loaders:
                follow(self.loaders[name], one)
        self._turns = self._arranged()
        self._place.restore(states.restore_mixture(state, self.state_dict(), self._turns.steps))
        self._filling_epoch = state.get("beside")

    def only(self, name: str) -> Iterator[Any]:
        """Return one pass over one of the caches, with batches as in the mixture: for evaluation by task.

        Raises:
            ConfigError: There is no such cache, or batches are of several.
        """
        if name not in self.loaders:
            raise ConfigError(f"{name!r} is none of {', '.join(self.loaders)}. Use mix='batch' for one alone")
        self._complete()
        member, batches = self.names.index(name), pass_from(self.loaders[name], self.epoch, 0)
        return (self._batches.make(batch, member, batch.position) for batch in batches)

    def __iter__(self) -> Iterator[Any]:
        """Return one pass over the rest of the epoch."""
        refuse_workers()
        self._place.rewind()
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        epoch, step = self._place.begin()  # with the first batch, as a Loader: see there
        if self._filling_epoch not in (None, epoch):
            self._complete()
        if any(map(is_filling, self.loaders.values())):
            self._filling_epoch = epoch
        first = [self._turns.place(epoch, member, 0)[0] for member in range(len(self.loaders))]
        streams = [
            MemberStream(one, number) for one, number in zip(self.loaders.values(), first, strict=True)
        ]
        turns = self._served(epoch, step, streams)
        following = next(turns, None)
        if following is None:
            self._place.at = (epoch + 1, 0)
        while following is not None:
            now, member, number, place = following
            batch = streams[member].take(number, place)
            following = next(turns, None)
            self._place.at = (epoch + 1, 0) if following is None else (epoch, now + 1)
            if batch is not None:
                yield self._batches.make(batch, member, self._place.at)
        if self._meter is not None:
            self._meter.ended()

    def _complete(self) -> None:
        """Serve complete caches from now on, and wait for those that are being filled."""
        if any(map(is_filling, self.loaders.values())):
            for loader in self.loaders.values():
                complete(loader)
            self._turns = self._arranged()

    def _served(
        self, epoch: int, step: int, streams: Sequence[MemberStream]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield the steps from `step` on that this rank has a batch for: step, member, its pass and place."""
        turns = self._turns
        had = turns.before(epoch, step)
        here = [len(loader) for loader in self.loaders.values()]
        for piece in turns.members(epoch, step):
            for member in piece.tolist():
                number, place = turns.place(epoch, member, had[member])
                # Else it is a short step, dropped or without a share for this rank, or one too many, since
                # samples were quarantined.
                if place < here[member] and streams[member].ended != number:
                    yield step, member, number, place
                had[member] += 1
                step += 1

    def _arranged(self) -> TurnSchedule:
        """Return the turns; not shuffled where there is nothing to shuffle, or where all serve in order."""
        members, mode = self._members, self._mode
        turns = self._make_turns(members.passes)
        if members.sequential and mode != "concat":
            raise ConfigError(
                f"order 'sequential' serves cache after cache, each once, which mode {mode!r} does not. "
                "Use mode='concat' for evaluation"
            )
        if members.sequential or members.joint is not None:
            return replace(turns, arranged="one after another")
        return turns


def _arguments(of: type) -> list[str]:
    """Return the names of the arguments that objects of a class are made with."""
    return [name for name, one in signature(of).parameters.items() if one.kind is not one.VAR_KEYWORD]


class MemberStream:
    """One loader's batches, in whatever order its passes and their steps are asked for; fastest in order.

    The `first` pass may be served while its cache is filled, any other is over a complete one.
    """

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._first = first
        self._batches: Iterator[Any] = iter(())
        self._next = (-1, -1)
        self.ended: int | None = None
        """The pass whose last batch was taken."""

    def take(self, number: int, place: int) -> Any:
        """Return the batch of step `place` of pass `number`; None: too much was quarantined."""
        if self._next != (number, place):
            if number != self._first and is_filling(self._loader):
                complete(self._loader)
            self._batches = pass_from(self._loader, number, place)
        self._next = (number, place + 1)
        batch = next(self._batches, None)
        if batch is None or batch.position[0] != number:
            self.ended = number
        return batch
