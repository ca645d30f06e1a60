"""Several caches as one stream of batches: which cache gives which step, and whose every example is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from stoker.errors import ConfigError, arg
from stoker.loader import mixture_state as states
from stoker.loader.arguments import refuse_unknown, refuse_workers
from stoker.loader.batch import RecordBatch, TaskBatch, WindowBatch
from stoker.loader.conditions import find_conditions
from stoker.loader.loader import Loader, complete, follow, is_beside, pass_from
from stoker.loader.members import make_members
from stoker.loader.place import EpochIterable, Place
from stoker.loader.state import VERSION
from stoker.loader.turns import Exhausted, Mode, Turns, check_mode, make_turns, shares_of
from stoker.schema import Json
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.store import Cache


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
            epoch_examples: Length of an epoch in mode `weighted`, over all ranks; None: as many examples as
                the caches have together.
            exhausted: When an epoch of mode `round_robin` ends: with the `first` cache that has no batch left
                (None), or with the `longest`, while shorter ones begin again in a new order.
            mix: Whether a batch is of one cache (`batch`), or of one set of all examples (`example`: mode
                `concat`, caches with the same fields). None: `example` where that can be.
            names: Of the caches; None: their own.
            seed: Of the turns; each cache gets a seed that is made from it.
            meter: Told how long each batch was waited for.
            loader: Settings of `Loader`, for caches: `windows`, `tier`, `rank`, `world`, ...

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
            shares=shares_of(weights, self._members.names) if mode == "weighted" else (),
            epoch_examples=epoch_examples,
            exhausted=exhausted,
        )
        self._mode: Mode = mode
        self._turns = self._arranged()
        self._beside: int | None = None
        """The epoch that is, or was, served beside the filling of caches."""
        self._conditions = find_conditions(self._per_cache(self._members.designs))
        self._meter = meter
        self._place = Place()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the caches, in the order given: what `task` and `tasks` of a batch refer to."""
        return self._members.names

    @property
    def loaders(self) -> Mapping[str, Loader]:
        """What batches come from, by name; one for all caches where batches hold examples of several."""
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
        """Whether short batches are left out."""
        return all(loader.drop_last for loader in self.loaders.values())

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        turns, total = self._turns, 0
        for count, lap, loader in zip(turns.counts, turns.laps, self.loaders.values(), strict=True):
            passes, rest = divmod(count, lap)
            here = min(lap, len(loader))
            total += passes * here + min(rest, here)
        return total

    def __repr__(self) -> str:
        return (
            f"Mixture({', '.join(self.names)}, {self._mode}, {format_count(len(self))} batches of "
            f"{self.batch_size}, {', '.join(loader.plan.tier for loader in self.loaders.values())} tier)"
        )

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Json]:
        """Where to go on: after the batches handed out so far, or after the one whose `position` is given."""
        members, at = self._members, self._place.at if position is None else position
        beside = self._beside if any(map(is_beside, self.loaders.values())) else None
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
        """Go on where `state` was taken, at any tier, world size or number of readers.

        Raises:
            StaleStateError: The state belongs to other caches, or another mode, seed or batch size.
        """
        for name, one in states.loaders_in(state).items():
            if name in self.loaders:
                follow(self.loaders[name], one)
        self._turns = self._arranged()
        self._place.restore(states.restore(state, self.state_dict(), self._turns.steps))
        self._beside = state.get("beside")

    def only(self, name: str) -> Iterator[Any]:
        """One pass over one of the caches, its batches as they are in the mixture: for evaluation by task.

        Raises:
            ConfigError: There is no such cache, or batches are of several.
        """
        if name not in self.loaders:
            raise ConfigError(f"{name!r} is none of {', '.join(self.loaders)}. Use mix='batch' for one alone")
        self._complete()
        member, batches = self.names.index(name), pass_from(self.loaders[name], self.epoch, 0)
        return (self._named(batch, member, batch.position) for batch in batches)

    def __iter__(self) -> Iterator[Any]:
        """One pass over the rest of the epoch."""
        refuse_workers()
        self._place.rewind()
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        epoch, step = self._place.begin()  # with the first batch, as a Loader: see there
        if self._beside not in (None, epoch):
            self._complete()
        if any(map(is_beside, self.loaders.values())):
            self._beside = epoch
        first = [self._turns.place(epoch, member, 0)[0] for member in range(len(self.loaders))]
        streams = [_Stream(one, lap) for one, lap in zip(self.loaders.values(), first, strict=True)]
        turns = self._served(epoch, step, streams)
        following = next(turns, None)
        if following is None:
            self._place.at = (epoch + 1, 0)
        while following is not None:
            now, member, lap, place = following
            batch = streams[member].take(lap, place)
            following = next(turns, None)
            self._place.at = (epoch + 1, 0) if following is None else (epoch, now + 1)
            if batch is not None:
                yield self._named(batch, member, self._place.at)
        if self._meter is not None:
            self._meter.ended()

    def _complete(self) -> None:
        """Serve complete caches from now on, and wait for those that are being filled."""
        if any(map(is_beside, self.loaders.values())):
            for loader in self.loaders.values():
                complete(loader)
            self._turns = self._arranged()

    def _served(
        self, epoch: int, step: int, streams: Sequence[_Stream]
    ) -> Iterator[tuple[int, int, int, int]]:
        """The steps from `step` on that this rank has a batch for: step, member, its pass and place there."""
        turns = self._turns
        had = turns.before(epoch, step)
        here = [len(loader) for loader in self.loaders.values()]
        for piece in turns.members(epoch, step):
            for member in piece.tolist():
                lap, place = turns.place(epoch, member, had[member])
                # Else it is a short step, dropped or without a share for this rank, or one too many, since
                # samples were quarantined.
                if place < here[member] and streams[member].ended != lap:
                    yield step, member, lap, place
                had[member] += 1
                step += 1

    def _named(self, batch: Any, member: int, position: tuple[int, int]) -> Any:
        """A loader's batch with the conditions of all caches, and whose it is."""
        windowed = isinstance(batch, WindowBatch)
        own = batch.cond if windowed else batch
        task: str | None = None
        try:
            index: Tensor = batch.index if windowed else batch["index"]
            if self._members.joint is None:
                task = self.names[member]
                tasks = self._conditions.tasks(member, index)
            else:
                tasks, index = self._members.whose(index)
            cond, mask = self._conditions.align(member, own, index)
        except KeyError as error:  # loaders give all of them; only transforms leave one out
            raise self._lacking(error.args[0], member, own) from error
        if windowed:
            values = (batch.z0, batch.z1, batch.future)
            return TaskBatch(*values, cond, index, position, task, tasks, mask)
        named = RecordBatch({**batch, **cond, "index": index, "task": task, "tasks": tasks, "mask": mask})
        named.position = position
        return named

    def _lacking(self, name: str, member: int, own: Mapping[str, Any]) -> ConfigError:
        whose = self.names[member] if self._members.joint is None else "+".join(self.names)
        return ConfigError(
            f"what {arg('transforms')} of {whose!r} returned lacks {name!r} and has "
            f"{', '.join(map(str, own))}. A mixture needs `index`, which says whose each example is, and "
            "every condition. Return them too, as in {**batch, ...} of a batch of records"
        )

    def _arranged(self) -> Turns:
        """The turns; not shuffled where there is nothing to shuffle, or where all serve in order."""
        members, mode = self._members, self._mode
        turns = self._make_turns(members.laps)
        if members.sequential and mode != "concat":
            raise ConfigError(
                f"order 'sequential' serves cache after cache, each once, which mode {mode!r} does not. "
                "Use mode='concat' for evaluation"
            )
        if members.sequential or members.joint is not None:
            return replace(turns, arranged="one after another")
        return turns

    def _per_cache(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """By the name of each cache what was decided about its loader."""
        if self._members.joint is None:
            return dict(values)
        (value,) = values.values()
        return dict.fromkeys(self.names, value)


def _arguments(of: type) -> list[str]:
    """Names of the arguments that objects of a class are made with."""
    return [name for name, one in signature(of).parameters.items() if one.kind is not one.VAR_KEYWORD]


class _Stream:
    """One loader's batches, in whatever order its passes and their steps are asked for; fastest in order.

    The `first` pass may be beside the filling of its cache, any other is over a complete one.
    """

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._first = first
        self._batches: Iterator[Any] = iter(())
        self._next = (-1, -1)
        self.ended: int | None = None
        """The pass whose last batch was taken."""

    def take(self, lap: int, place: int) -> Any:
        """The batch of step `place` of pass `lap`; None: it has no such, so much was quarantined."""
        if self._next != (lap, place):
            if lap != self._first and is_beside(self._loader):
                complete(self._loader)
            self._batches = pass_from(self._loader, lap, place)
        self._next = (lap, place + 1)
        batch = next(self._batches, None)
        if batch is None or batch.position[0] != lap:
            self.ended = lap
        return batch
