"""Decide which loader of a mixture gives the batch of each step, and which batch of its own.

This is arithmetic on counts, a pure function of seed, epoch and step. Every rank computes the same at
any tier, so a step is of one cache on all of them, and a saved place holds at another world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.arguments import check, whole
from stoker.errors import ConfigError
from stoker.loader.order import Ids, Order, OrderKind, apportion
from stoker.splitmix import Salt, stream

Mode: TypeAlias = Literal["concat", "weighted", "round_robin"]
Exhausted: TypeAlias = Literal["first", "longest"]
PIECE = 1 << 16
"""Steps whose turns are made in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPass:
    """One pass over one member of a mixture, in steps over all ranks."""

    whole: int
    """Steps with a full global batch."""
    tail: int
    """Examples of the short step that ends a pass; 0: a pass ends with a full one."""
    step: int
    """Examples of a full step: the global batch."""

    @property
    def steps(self) -> int:
        """Steps of a pass, the short one included."""
        return self.whole + (self.tail > 0)

    @property
    def examples(self) -> int:
        """Examples of a pass."""
        return self.whole * self.step + self.tail

    @property
    def full(self) -> int:
        """Steps of a pass without the short one, or that one if a pass has no other."""
        return self.whole or self.steps


@dataclass(frozen=True, kw_only=True)
class TurnSchedule:
    """Order of turns: the member of a mixture that gives the batch of each step."""

    counts: tuple[int, ...]
    """Steps of each member in one epoch."""
    passes: tuple[int, ...]
    """Steps of one pass over each member."""
    restarts: bool
    """True: each epoch begins new passes over all members. False: a pass continues in the next epoch."""
    arranged: Literal["shuffled", "in turn", "one after another"]
    seed: int

    @cached_property
    def steps(self) -> int:
        """Steps of an epoch."""
        return sum(self.counts)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(np.array(self.counts, dtype=np.int64))

    def members(self, epoch: int, start: int) -> Iterator[NDArray[np.int64]]:
        """Yield, in pieces, which member gives each step from `start` on, by its place among the members."""
        ids = self._ids(epoch)
        for begin in range(start, self.steps, PIECE):
            stop = min(self.steps, begin + PIECE)
            if self.arranged == "in turn":
                yield np.arange(begin, stop, dtype=np.int64) % len(self.counts)
            else:
                yield np.searchsorted(self._ends, ids(begin, stop), side="right")

    def before(self, epoch: int, step: int) -> list[int]:
        """Return how many turns each member has had in `epoch` before `step`."""
        had, left = np.zeros(len(self.counts), dtype=np.int64), step
        for piece in self.members(epoch, 0):
            had += np.bincount(piece[:left], minlength=len(had))
            left -= len(piece)
            if left <= 0:
                break
        return had.tolist()

    def place(self, epoch: int, member: int, turn: int) -> tuple[int, int]:
        """Return which pass over a member, and which step of that pass, is its `turn`-th of `epoch`."""
        count, one = self.counts[member], self.passes[member]
        if self.restarts:
            return epoch * -(-count // one) + turn // one, turn % one
        return divmod(epoch * count + turn, one)

    def _ids(self, epoch: int) -> Ids:
        kind: Literal["full", "sequential"] = "full" if self.arranged == "shuffled" else "sequential"
        order = Order(kind=OrderKind(kind=kind), count=self.steps, seed=self.seed, global_batch=1)
        return order.epoch(epoch)


def member_seed(seed: int, place: int) -> int:
    """Return the seed of the loader at `place` in a mixture: no two shuffle alike."""
    return stream(seed, place, Salt.TURNS)


def make_turns(
    passes: Mapping[str, MemberPass],
    *,
    mode: Mode,
    seed: int,
    shares: Sequence[float],
    epoch_examples: int | None,
    exhausted: Exhausted | None = None,
) -> TurnSchedule:
    """Return the turns of a mode.

    Args:
        shares: Of the examples that each member gives in mode `weighted`; they sum to 1.
        epoch_examples, exhausted: As of `Mixture`.

    Raises:
        ConfigError: A member would get no turn at all.
    """
    own = list(passes.values())
    restarts = mode == "concat" or exhausted == "longest"
    lengths = tuple(one.steps if restarts else one.full for one in own)
    counts = lengths
    if mode == "round_robin":
        counts = ((max if restarts else min)(lengths),) * len(own)
    elif mode == "weighted":
        wanted = epoch_examples or sum(one.examples for one in own)
        quotas = [share * wanted / one.step for share, one in zip(shares, own, strict=True)]
        counts = tuple(apportion(quotas))
        for name, count, quota in zip(passes, counts, quotas, strict=True):
            if not count:
                raise ConfigError(
                    f"weights give {name!r} {quota:.3g} of the batches of an epoch of {wanted} examples, so "
                    "it would never be served",
                    hint="Give a larger epoch_examples=, or leave it out",
                )
    return TurnSchedule(
        counts=counts,
        passes=lengths,
        restarts=restarts,
        arranged="in turn" if mode == "round_robin" else "shuffled",
        seed=seed,
    )


OF_MODE: Mapping[str, Mode] = {
    "weights": "weighted",
    "epoch_examples": "weighted",
    "exhausted": "round_robin",
}
"""Settings that have a meaning in one mode alone."""


def check_mode(mode: str, **settings: object) -> None:
    """Refuse an unknown mode, and settings (None: not given) that mean nothing in it.

    Raises:
        ConfigError: As said.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode is {mode!r}", hint=f"Expected {', '.join(get_args(Mode))}")
    for name, value in settings.items():
        if value is not None and OF_MODE[name] != mode:
            raise ConfigError(
                f"{name}= belongs to mode {OF_MODE[name]!r}, and mode is {mode!r}",
                hint="Leave it out, or give that mode",
            )
    if settings.get("epoch_examples") is not None:
        check({"epoch_examples": (settings["epoch_examples"], whole(least=1))})
    if settings.get("exhausted") not in (None, *get_args(Exhausted)):
        raise ConfigError(
            f"exhausted is {settings['exhausted']!r}", hint=f"Expected {', '.join(get_args(Exhausted))}"
        )


def normalize_shares(weights: object, names: Sequence[str]) -> list[float]:
    """Return the weights as parts of 1, in the order of `names`; None: equal ones.

    >>> normalize_shares({"b": 3, "a": 1}, ["a", "b"])
    [0.25, 0.75]

    Raises:
        ConfigError: A name is unknown or lacks its weight, or a weight is not a number above 0.
    """
    if weights is None:
        return [1 / len(names)] * len(names)
    if isinstance(weights, Mapping):
        _check_named(cast("Mapping[str, object]", weights), names)
        values = [weights[name] for name in names]
    else:
        values = np.asarray(weights, dtype=object).reshape(-1).tolist()
    if len(values) != len(names) or not all(_is_weight(value) for value in values):
        raise ConfigError(
            f"weights are {weights!r}", hint=f"Expected a number above 0 for each of {', '.join(names)}"
        )
    total = sum(map(float, values))
    return [float(value) / total for value in values]


def _check_named(weights: Mapping[str, object], names: Sequence[str]) -> None:
    unknown = [str(name) for name in weights if name not in names]
    lacking = [name for name in names if name not in weights]
    if unknown:
        near = get_close_matches(unknown[0], lacking or names, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Leave it out"
        raise ConfigError(f"weights names {unknown[0]!r}, which is not one of {', '.join(names)}", hint=hint)
    if lacking:
        raise ConfigError(f"weights has no entry for {', '.join(lacking)}", hint="Give each a number above 0")


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value)) and float(value) > 0
