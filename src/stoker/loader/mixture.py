"""Serve several caches as one stream of batches; each says which cache its examples are from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.errors import ConfigError, arg
from stoker.loader import state as states
from stoker.loader.batch import RecordBatch, Role, TaskBatch, WindowBatch
from stoker.loader.chunks import RECORD
from stoker.loader.design import Design, complete_cache, is_served_while_filling, why_not_mixed
from stoker.loader.loader import Loader, complete, design_of, follow, is_filling, pass_from
from stoker.loader.options import check_cache, refuse_unknown, refuse_workers
from stoker.loader.outputs import OutputSpec
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
from stoker.store.cache import JointCache, open_cache, same_fields, served_schema
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.monitor.meter import StallMeter
    from stoker.schema import Json


# ----------------------------------------------------------------------------------------------------------
# Make batches of a mixture: those of its loaders, with the conditions of all caches under the same names.
#
# Every batch has the same names, widths and dtypes. A name that a cache lacks is given as zeros with a
# mask that says so; a condition that is narrower there is filled up with zeros. Names come sorted, so the
# order of the caches decides nothing.


OURS = ("task", "tasks", "mask")
"""What a mixture adds to a batch of whole records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition as batches of a mixture have it."""

    name: str
    shape: tuple[int, ...]
    """Shape of one example: that of every cache that has it, or the widest one's `(C,)`."""
    dtype: torch.dtype
    """The narrowest that holds the values of all caches."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """Its shape in each cache; None where a cache lacks it."""
    same_dtype: bool
    """True if all caches that have it have it in this dtype."""

    def fit(self, member: int, values: Mapping[str, Tensor], index: Tensor) -> Tensor:
        """Return the values of a cache in the shape and dtype of all; zeros where it has none."""
        shape = self.shapes[member]
        if shape == self.shape and self.same_dtype:
            return values[self.name]
        if shape is None:
            return torch.zeros((len(index), *self.shape), dtype=self.dtype, device=index.device)
        value = values[self.name].to(self.dtype)
        if shape == self.shape:
            return value
        value = value.reshape(len(index), -1)
        return F.pad(value, (0, self.shape[0] - value.shape[1]))

    def mask(self, member: int, index: Tensor) -> Tensor:
        """Return which numbers a cache has, as `(B, *shape)` bool without memory for each example."""
        shape, row = self.shapes[member], torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        if shape == self.shape:
            row.fill_(True)
        elif shape is not None:
            row[: _width(shape)] = True
        return row.to(index.device).expand(len(index), *self.shape)


class MixtureBatches:
    """Makes the batches of a mixture out of those of its loaders."""

    def __init__(self, designs: Mapping[str, Design], names: Sequence[str], joint: JointCache | None) -> None:
        """Find the conditions of the caches.

        With windows these are all fields but the one they are cut from. Of whole records they are the fields
        without time that hold one number or a row of numbers: only these fit next to those of another cache.

        `names` are in the order in which `task` refers to them. `joint` is the caches as one, where batches
        hold examples of several.

        Raises:
            ConfigError: Windows have several state fields, or a field of whole records has a name that
                batches of a mixture give to something else.
        """
        self._names, self._joint = tuple(names), joint
        for name, design in designs.items():
            _check_names(name, design)
        found = [_outputs_of(design) for design in designs.values()]
        self._conditions = [_condition(n, found) for n in sorted({n for outputs in found for n in outputs})]
        # Under these names batches of windows give what is not a condition: kept raw fields, a mask.
        self._raw = [
            [output.name for output in design.outputs if output.role in (Role.RAW, Role.MASK)]
            for design in designs.values()
        ]
        self._kept: dict[tuple[int, int, torch.device], tuple[Tensor, dict[str, Tensor]]] = {}

    def make(self, batch: Any, member: int, position: tuple[int, int]) -> Any:
        """Return a loader's batch with the conditions of all caches, and the cache of each example.

        Masks and tasks are the same for every batch of a size and cache, so they are given without memory of
        their own: writing to one is an error. `member` is the loader's place among those of the mixture, and
        `position` is where the mixture resumes after this batch.

        Raises:
            ConfigError: Transforms left out something that a mixture needs.
        """
        windowed = isinstance(batch, WindowBatch)
        if not windowed and not isinstance(batch, dict):
            raise ConfigError(
                f"{arg('transforms')} of {self._names[member]!r} returned {type(batch).__name__}",
                hint="A mixture needs a dictionary of fields with `index`, as {**batch, ...}",
            )
        values = batch.cond if windowed else batch
        task = self._names[member] if self._joint is None else None
        try:
            index: Tensor = batch.index if windowed else batch["index"]
            tasks, mask = self._tasks_and_masks(member, index)
            if self._joint is not None:
                tasks, index = _split_joint(self._joint, index)
            cond = {one.name: one.fit(member, values, index) for one in self._conditions}
            cond |= {name: values[name] for name in self._raw[member]}
        except KeyError as error:  # loaders give all of them; only transforms leave one out
            raise self._lacking(error.args[0], member, values) from error
        if windowed:
            states = (batch.z0, batch.z1, batch.future)
            return TaskBatch(*states, cond, index, position, task, tasks, mask.copy())
        made = RecordBatch(
            {**batch, **cond, "index": index, "task": task, "tasks": tasks, "mask": mask.copy()}
        )
        made.position = position
        return made

    def _tasks_and_masks(self, member: int, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        key = (member, len(index), index.device)
        if key not in self._kept:
            with torch.inference_mode(False):  # they outlive the caller's mode
                tasks = torch.tensor(member, device=index.device).expand(len(index))
                self._kept[key] = (tasks, {one.name: one.mask(member, index) for one in self._conditions})
        return self._kept[key]

    def _lacking(self, name: str, member: int, values: Mapping[str, Any]) -> ConfigError:
        whose = self._names[member] if self._joint is None else "+".join(self._names)
        return ConfigError(
            f"what {arg('transforms')} of {whose!r} returned lacks {name!r} and has "
            f"{', '.join(map(str, values))}",
            hint="A mixture needs `index`, which says which cache each example is from, and every "
            "condition. Return them too, as in {**batch, ...} of a batch of records",
        )


def _split_joint(joint: JointCache, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of the cache of each example of a joint batch, and its `index` in that cache."""
    offsets = _offsets(index.device, joint.offsets)
    own = index.clone()
    numbers = own.view(len(own), -1)[:, 0]
    tasks = torch.bucketize(numbers.contiguous(), offsets, right=True).sub_(1)
    numbers.sub_(offsets[tasks])
    return tasks, own


@cache
def _offsets(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    """Return the numbers as int64 on a device."""
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def _check_names(name: str, design: Design) -> None:
    windows = design.options.windows
    if windows is not None and isinstance(windows.field, tuple):
        raise ConfigError(
            f"windows of {name!r} have several state fields, {', '.join(windows.field)}, which a mixture "
            "cannot line up with those of other caches",
            hint="Name one field in Windows(field=...)",
        )
    taken = [own for own in OURS if windows is None and own in served_schema(design.cache)]
    if taken:
        raise ConfigError(
            f"records of {name!r} have a field {taken[0]!r}, a name that batches of a mixture give to "
            "something else",
            hint="Give the field another name in its source",
        )


def _outputs_of(design: Design) -> dict[str, OutputSpec]:
    outputs = (*design.outputs, *_column_outputs(design))
    return {output.name: output for output in outputs if output.role in (Role.CONDITION, Role.SIZES)}


def _column_outputs(design: Design) -> list[OutputSpec]:
    """Return the columns of a table as batches have them: with windows as `(B, C)`."""
    joined = design.cache.joined
    found = {} if joined is None else joined.values
    return [
        OutputSpec(
            name=name,
            field=name,
            index=RECORD,
            shape=(int(np.prod(values.shape[1:])),) if design.options.windowed else tuple(values.shape[1:]),
            dtype=values.dtype,
            role=Role.CONDITION if design.options.windowed or values.ndim < 3 else Role.FIELD,
        )
        for name, values in found.items()
    ]


def _condition(name: str, found: Sequence[Mapping[str, OutputSpec]]) -> Condition:
    own = [outputs[name] for outputs in found if name in outputs]
    shapes, dtypes = {output.shape for output in own}, {output.cast or output.dtype for output in own}
    return Condition(
        name=name,
        shape=shapes.pop() if len(shapes) == 1 else (max(map(_width, shapes)),),
        dtype=reduce(torch.promote_types, dtypes),
        shapes=tuple(outputs[name].shape if name in outputs else None for outputs in found),
        same_dtype=len(dtypes) == 1,
    )


def _width(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


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
    given: Sequence[Cache | Loader | str | PathLike[str]],
    names: Sequence[str] | None,
    *,
    in_one_batch: bool | None,
    full_batches: bool,
    seed: int,
    settings: Mapping[str, Any],
) -> Members:
    """Return loaders for what was given.

    Args:
        given, names: As `members` and `names` of `Mixture`.
        in_one_batch: Whether a batch may hold examples of several caches; None: where that can be.
        full_batches: Passes are made of full batches, wherever a cache has one.
        seed, settings: Of the loaders that are made; each gets a seed of its own, made from `seed`.

    Raises:
        ConfigError: Nothing was given, names repeat, or the loaders do not fit together.
        StokerError: As `Loader`.
    """
    if isinstance(given, list | tuple):
        given = [
            open_cache(str(one)) if isinstance(one, str | PathLike) and str(one) else one for one in given
        ]
    _check_given(given, settings)
    members = cast("Sequence[Cache | Loader]", given)
    settings = {"shuffle": True, **settings}
    called = _names([_cache_of(one) for one in members], names)
    made = any(isinstance(one, Loader) for one in members)
    if in_one_batch and made:
        raise ConfigError(
            "mix='example' puts examples of several caches into one batch, which takes caches: a Loader "
            "makes batches of its own",
            hint="Give the caches, or mix='batch'",
        )
    world_size = settings.get("world_size", 1)
    filling = [one for one in members if isinstance(one, Cache) and is_served_while_filling(one, world_size)]
    if in_one_batch and filling:
        raise ConfigError(
            "mix='example' shuffles the examples of all caches together, which takes complete ones, and "
            f"{filling[0].path} is being filled",
            hint=f"Leave {arg('wait', False)} out of its precompute, or give mix='batch'",
        )
    if filling:
        in_one_batch = False
    whole = [one if isinstance(one, Loader) or one in filling else complete_cache(one) for one in members]
    caches = [_cache_of(one) for one in whole]
    joint = None
    if (not made and same_fields(caches)) if in_one_batch is None else in_one_batch:
        joint = JointCache(caches)
        loaders = {"+".join(called): Loader(joint, seed=seed, **settings)}
    else:
        loaders = _loaders(dict(zip(called, whole, strict=True)), seed, settings, full_batches=full_batches)
    made_of = Members(names=called, caches=tuple(caches), loaders=loaders, joint=joint)
    _check_together(made_of)
    return made_of


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
        raise ConfigError(
            f"a mixture is of several caches or Loaders, got {given!r}", hint="Give a list of them"
        )
    several = isinstance(given, Collection) and not isinstance(given, str | bytes | bytearray | Mapping)
    members = cast("Collection[object]", given) if several else ()
    if not members:
        raise ConfigError(
            f"a mixture is of caches or Loaders, got {format_value(given)}",
            hint="Give a list of them, each as stoker.open_cache(path) opens it",
        )
    for one in members:
        if isinstance(one, Loader):
            design_of(one)  # which refuses one whose batches cannot be counted
        else:
            check_cache(one, "a member of the mixture")
    if settings and all(isinstance(one, Loader) for one in members):
        raise ConfigError(
            f"{', '.join(settings)}: settings of loaders that are made already",
            hint="Give them to Loader(...)",
        )
    for name, why in REFUSED.items():
        if settings.get(name) is not None:
            raise ConfigError(
                f"{name}= has no effect in a mixture: {why}", hint=f"Give Loaders made with {name}="
            )


def _names(caches: Sequence[Cache], names: Sequence[str] | None) -> tuple[str, ...]:
    called = tuple(cache.name for cache in caches) if names is None else tuple(map(str, names))
    if len(called) != len(caches):
        raise ConfigError(f"{len(called)} names for {len(caches)} caches", hint="Give one name for each")
    twice = [name for name, count in Counter(called).items() if count > 1]
    if twice:
        raise ConfigError(
            f"several caches are called {twice[0]!r}", hint="Give each a name of its own with names="
        )
    return called


def _check_together(members: Members) -> None:
    """Refuse loaders that cannot take turns.

    Raises:
        ConfigError: They differ in rank, world_size, device, or whether they serve windows.
    """
    designs = members.designs
    first = next(iter(designs))
    for name, design in designs.items():
        if (why := why_not_mixed(design)) is not None:
            raise ConfigError(
                f"the loader of {name!r} {why}",
                hint="Iterate over that Loader alone, or mix caches of latents, with batches of one size",
            )
        for what, a, b in (
            ("rank", designs[first].share.rank, design.share.rank),
            ("world_size", designs[first].share.world_size, design.share.world_size),
            ("device", str(designs[first].options.device), str(design.options.device)),
            ("windows", designs[first].options.windowed, design.options.windowed),
        ):
            if a != b:
                raise ConfigError(
                    f"the loaders of {first!r} and {name!r} differ in {what}: {a} and {b}",
                    hint="Loaders of one mixture agree in rank, world_size, device, and whether they cut "
                    "windows",
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
        members: Sequence[Cache | Loader | str | PathLike[str]],
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
            members: Caches, paths of caches, or Loaders, whose passes then belong to the mixture alone.
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
            **loader: Settings of `Loader`, for caches: `windows`, `tier`, `rank`, `world_size`, ...

        Raises:
            ConfigError: A setting does not fit the caches or another one.
            StokerError: As `Loader`.

        Examples:
            >>> import stoker, torch
            >>> for name, value in (("zeros", 0.0), ("ones", 1.0)):
            ...     cache = stoker.precompute([{"x": torch.tensor(value)}] * 4, None, "caches", name=name)
            >>> mixture = stoker.Mixture(["caches/zeros", "caches/ones"], batch_size=4, mode="round_robin")
            >>> [(batch["task"], batch["x"].sum().item()) for batch in mixture]
            [('zeros', 0.0), ('ones', 4.0)]
        """
        refuse_workers()
        check_mode(mode, weights=weights, epoch_examples=epoch_examples, exhausted=exhausted)
        refuse_unknown(loader, "Mixture.__init__", (*_arguments(Loader), *_arguments(Mixture)))
        if mix not in (None, "batch", "example") or (mix == "example" and mode != "concat"):
            raise ConfigError(
                f"mix is {mix!r} in mode {mode!r}",
                hint="Expected 'batch', or in mode 'concat' also 'example'",
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
        """Return the number of batches of this rank in an entire epoch."""
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
        """Return where to resume: after the batches handed out so far, or after the one at `position`.

        Args:
            position: `batch.position` of a batch, or `mixture.position`; None: after the last batch.
        """
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

        Args:
            state: What `state_dict` returned.

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

        Args:
            name: One of `names`.

        Raises:
            ConfigError: There is no such cache, batches are of several, or ranks serve the epoch in which
                caches are filled, which would end for this rank alone.
        """
        if name not in self.loaders:
            raise ConfigError(
                f"{name!r} is not one of {', '.join(self.loaders)}", hint="Use mix='batch' for one alone"
            )
        if any(is_filling(one) and design_of(one).share.world_size > 1 for one in self.loaders.values()):
            raise ConfigError(
                f"only({name!r}) needs complete caches, and ranks serve the epoch in which they are filled",
                hint="Call it after that epoch, or make a Loader of that cache for evaluation",
            )
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
                f"shuffle=False serves cache after cache, each once, which mode {mode!r} does not",
                hint="Use mode='concat' for evaluation",
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
