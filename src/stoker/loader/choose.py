"""Choose what part of each record is read: some rows, a crop, one of several stored views.

What is chosen is a pure function of seed, epoch and example, as the order is, computed with the same bits
by numpy and by torch. So it is the same on every tier, while a cache is filled, for any number of ranks and
after a resume. Tiers read and gather the chosen rows alone; what is behind the last row of a short record
is set to zero when the batch is put together (`assembly.py`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.arguments import FLAG, check
from stoker.errors import ConfigError, RecordError
from stoker.splitmix import GAMMA, MASK, Salt, keys_of, mix, mix_, remainders, signed, stream

if TYPE_CHECKING:
    from stoker.loader.records import RecordTable
    from stoker.schema import Field, Schema
    from stoker.store import Cache


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of each record along axis 0, without repeats and in ascending order: `(B, count, *row)`.

    A record with fewer rows has zeros at the end, and `<field>.lengths` `(B,)` int64 in the batch says how
    many rows are real.

    Raises:
        ConfigError: `count` is below 1.

    Examples:
        >>> import stoker, torch
        >>> bags = [{"features": torch.randn(rows, 16)} for rows in (50, 3, 20, 90)]
        >>> loader = stoker.cached(bags, batch_size=4, choose={"features": stoker.Rows(8)})
        >>> batch = next(iter(loader))
        >>> batch["features"].shape, batch["features.lengths"].tolist()
        (torch.Size([4, 8, 16]), [8, 3, 8, 8])
    """

    count: int | None
    """Rows of each record; None: all, as without a choice."""
    random: bool = True
    """True: other ones in each epoch, any as likely as another. False: evenly spaced ones, for validation."""

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        check({"Rows: random": (self.random, FLAG)})
        if self.count is not None:
            _check_count(f"Rows({self.count!r})", self.count)


@dataclass(frozen=True, slots=True)
class Span:
    """A crop of each record: `length` consecutive steps along axis 0, `(B, length, *step)`.

    `<field>.start` `(B,)` int64 in the batch says where it begins. A record with fewer steps begins at 0 and
    has zeros at the end; `<field>.lengths` `(B,)` int64 says how many steps are real.

    Raises:
        ConfigError: `length` is below 1.

    Examples:
        >>> import stoker, torch
        >>> sounds = [{"audio": torch.arange(steps)} for steps in (50, 3)]
        >>> loader = stoker.cached(sounds, batch_size=2, choose={"audio": stoker.Span(4, random=False)})
        >>> batch = next(iter(loader))
        >>> batch["audio"].tolist(), batch["audio.start"].tolist(), batch["audio.lengths"].tolist()
        ([[23, 24, 25, 26], [0, 1, 2, 0]], [23, 0], [4, 3])
    """

    length: int
    """Steps."""
    random: bool = True
    """True: another crop in each epoch, any as likely as another. False: the middle, for validation."""

    def __post_init__(self) -> None:
        """Refuse lengths below 1."""
        check({"Span: random": (self.random, FLAG)})
        _check_count(f"Span({self.length!r})", self.length)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the views that axis 0 of a field holds, for each example and epoch: `(B, *view)`.

    Raises:
        ConfigError: `random` is something else than described; later, a record has no view.

    Examples:
        >>> import stoker, torch
        >>> data = [{"latent": torch.tensor([[number, 0], [number, 1]])} for number in range(3)]
        >>> loader = stoker.cached(data, batch_size=3, choose={"latent": stoker.OneOf("rotate")})
        >>> first, second = (next(iter(loader))["latent"] for _ in range(2))
        >>> first.shape, (first + second).tolist()  # the other view in the second epoch
        (torch.Size([3, 2]), [[0, 1], [2, 1], [4, 1]])
    """

    random: bool | Literal["rotate"] = True
    """True: any view, drawn again in each epoch. `"rotate"`: the next view in each epoch, so that an example
    shows each of its k views once in any k epochs. False: view 0, for validation."""

    def __post_init__(self) -> None:
        """Refuse other words."""
        if self.random not in (True, False, "rotate"):
            raise ConfigError(f"OneOf(random={self.random!r})", hint='Expected True, False or "rotate"')


Choice: TypeAlias = "Rows | Span | OneOf"
"""What is read of a field."""


def _check_count(what: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral) or not 1 <= int(count) < 1 << 31:
        raise ConfigError(
            f"{what} takes {count!r} of a record", hint=f"Expected a whole number from 1 to {(1 << 31) - 1}"
        )


# ----------------------------------------------------------------------------------------------------------
# The choices of a loader, checked.


START = ".start"
"""With `LENGTHS_SUFFIX`, ends the names of what comes with a chosen field."""


class Taken(Enum):
    """What an output of a batch takes of a choice."""

    ROWS = "rows"
    """The chosen rows of a field."""
    LENGTHS = "lengths"
    """How many of them are real."""
    START = "start"
    """Where a crop begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldGroup:
    """Fields whose records have one choice in common."""

    fields: tuple[str, ...]
    choice: Choice

    @property
    def name(self) -> str:
        """Its name in tables, and what tells its random numbers from those of other groups."""
        return "+".join(sorted(self.fields))

    @property
    def count(self) -> int:
        """Rows that are taken of each record."""
        choice = self.choice
        if isinstance(choice, OneOf):
            return 1
        return choice.length if isinstance(choice, Span) else cast("int", choice.count)

    @property
    def tells_start(self) -> bool:
        """True if batches say where each record's part begins."""
        return isinstance(self.choice, Span)

    def tells_lengths(self, field: Field) -> bool:
        """Return True if batches say how many rows of a field are real."""
        return not isinstance(self.choice, OneOf) and (field.ragged or field.shape[0] < self.count)

    def tells(self, schema: Schema) -> bool:
        """Return True if batches have more than the fields themselves."""
        return self.tells_start or any(self.tells_lengths(schema[name]) for name in self.fields)


Choices: TypeAlias = tuple[FieldGroup, ...]
"""What is chosen in a loader; empty: every field is read entirely."""


def as_choices(given: object) -> Choices:
    """Return `choose=` of a loader as groups of fields; fields of which all is read have none.

    Raises:
        ConfigError: It is no mapping of fields to choices, or a field has two.
    """
    if given is None:
        return ()
    if isinstance(given, tuple) and all(
        isinstance(one, FieldGroup) for one in cast("tuple[Any, ...]", given)
    ):
        return cast("Choices", given)
    if not isinstance(given, Mapping):
        raise _unreadable(given)
    found: list[FieldGroup] = []
    for fields, choice in cast("Mapping[object, object]", given).items():
        names = cast("tuple[object, ...]", fields if isinstance(fields, tuple) else (fields,))
        if not names or not all(isinstance(name, str) for name in names):
            raise _unreadable(given)
        if not isinstance(choice, Rows | Span | OneOf):
            raise _unreadable(given)
        found.append(FieldGroup(fields=cast("tuple[str, ...]", names), choice=choice))
    counts = Counter(name for group in found for name in group.fields)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"choose names {twice[0]!r} twice", hint="Give each field one choice")
    return tuple(found)


def _unreadable(given: object) -> ConfigError:
    return ConfigError(
        f"choose is {given!r}",
        hint='Expected fields and what is read of them: {"features": stoker.Rows(512)}, or of several the '
        'same rows: {("features", "coords"): stoker.Rows(512)}',
    )


def resolve_choices(given: Choices, cache: Cache, *, windowed: bool) -> Choices:
    """Return the choices for a cache: those that read a part, and stored variants, which rotate.

    Raises:
        ConfigError: A choice does not fit its fields, or examples are windows.
    """
    named = {name for group in given for name in group.fields}
    variants: Mapping[str, int] = cache.variants
    stored = () if windowed else tuple(name for name in variants if name not in named)
    views = tuple(FieldGroup(fields=(name,), choice=OneOf("rotate")) for name in stored)
    found = tuple(g for g in (*given, *views) if not (isinstance(g.choice, Rows) and g.choice.count is None))
    if given and windowed:
        raise ConfigError(
            f"choose={{{given[0].fields[0]!r}: ...}} reads a part of entire records, and windows= cuts "
            "windows from them",
            hint="Give one of the two: windows draw their own start, and with a range their own stride",
        )
    for group in given:
        for name in group.fields:
            _check_field(name, group, cache.schema)
    return found


def _check_field(name: str, group: FieldGroup, schema: Schema) -> None:
    """Refuse fields without rows, and those whose rows do not stand alone."""
    if name not in schema:
        raise ConfigError(f"choose names the field {name!r}", hint=f"Records have {', '.join(schema)}")
    field = schema[name]
    if not field.shape:
        raise ConfigError(
            f"choose names the field {name!r}, which holds one number for each record",
            hint=f"Fields with an axis 0: {', '.join(n for n, f in schema.items() if f.shape) or 'none'}",
        )
    if field.folded or (field.axes and any(other.numbers_points for other in schema.values())):
        raise ConfigError(
            f"choose names the field {name!r} of particles or meshes, whose rows are counted by other fields",
            hint="Choose windows= of steps, or store what is to be chosen from as a field of its own",
        )
    if field.quantized and len(field.shape) == 1:
        raise ConfigError(
            f"choose names the field {name!r}, whose values share one scale along axis 0",
            hint="Store it unquantized, or with the axis to choose from before others",
        )
    if isinstance(group.choice, OneOf) and not field.ragged and not field.shape[0]:
        raise ConfigError(f"choose={{{name!r}: {group.choice!r}}}: the field holds no view")


def describe_choices(choices: Choices) -> str | None:
    """Return what a loader's state keeps of its choices; None where nothing is chosen."""
    return ", ".join(f"{group.name}={group.choice!r}" for group in choices) or None


def check_sizes(choices: Choices, cache: Cache, table: RecordTable) -> None:
    """Refuse records that a choice cannot be made of, before any is read.

    Raises:
        RecordError: Fields that share a choice differ in rows, or a record has no view; names the sample.
    """
    for group in choices:
        if any(cache.schema[name].ragged for name in group.fields):
            sizes = {name: table.of_all(cache.lengths(name)) for name in group.fields}
            check_rows(group, sizes, table.indices)


def check_rows(
    group: FieldGroup, sizes: Mapping[str, NDArray[np.int64]], numbers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of each record in a group of fields, `sizes` by field; `numbers`: their samples.

    Raises:
        RecordError: As `check_sizes`.
    """
    (first, own), *others = sizes.items()
    for name, rows in others:
        if len(different := np.flatnonzero(rows != own)):
            at = int(different[0])
            raise RecordError(
                f"fields {first!r} and {name!r} of sample {int(numbers[at])} have {own[at]} and {rows[at]} "
                "rows, and choose= takes the same rows of both",
                hint="Give each of them a choice of its own",
            )
    if isinstance(group.choice, OneOf) and len(empty := np.flatnonzero(own == 0)):
        raise RecordError(
            f"field {first!r} of sample {int(numbers[empty[0]])} holds no view to choose",
            hint="Leave such samples out with indices=",
        )
    return own


# ----------------------------------------------------------------------------------------------------------
# Draw: which rows, by example.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRows:
    """What is taken of some records, numpy or torch as the examples are."""

    rows: Any
    """Rows of each record, ascending, `(n, count)` int64. Behind the last real one comes the record's last
    row again, or 0 where it has none."""
    lengths: Any
    """How many are real, `(n,)` int64."""

    @property
    def start(self) -> Any:
        """The first of them, `(n,)` int64."""
        return self.rows[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The examples of some batches, and all that their choices depend on."""

    choices: Choices
    seed: int
    epoch: int
    examples: Any
    """Example numbers, `(n,)` int64, numpy or torch."""
    sizes: Mapping[str, Any]
    """By group the rows of each example's record, `(n,)` int64."""

    def of(self, own: Any) -> Draw:
        """Return the same of some of its examples, by a slice or by their places."""
        return self._with(self.examples[own], {name: sizes[own] for name, sizes in self.sizes.items()})

    def standing_in(self, here: NDArray[np.bool_], at: int) -> Draw:
        """Return the same where the record of example `at` stands in for those that are not here."""
        return self._with(
            self.examples, {name: np.where(here, sizes, sizes[at]) for name, sizes in self.sizes.items()}
        )

    def on_host(self) -> Draw:
        """Return the same in numpy."""
        return self._with(_host(self.examples), {name: _host(sizes) for name, sizes in self.sizes.items()})

    def _with(self, examples: Any, sizes: Mapping[str, Any]) -> Draw:
        return Draw(choices=self.choices, seed=self.seed, epoch=self.epoch, examples=examples, sizes=sizes)

    def rows(self) -> dict[str, ChosenRows]:
        """Return what is chosen, by group."""
        return {
            group.name: chosen_rows(group, self.seed, self.epoch, self.examples, self.sizes[group.name])
            for group in self.choices
        }


def _host(values: Any) -> NDArray[np.int64]:
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def chosen_rows(group: FieldGroup, seed: int, epoch: int, examples: Any, sizes: Any) -> ChosenRows:
    """Return which rows are taken of the records of these examples.

    Args:
        group: What to choose.
        seed: Of the loader.
        epoch: Of the pass.
        examples: Example numbers, `(n,)` int64, numpy or torch.
        sizes: Rows of each record, `(n,)` int64.
    """
    choice, count = group.choice, group.count
    rotates = isinstance(choice, OneOf) and choice.random == "rotate"
    places = _arange(count, sizes)[None, :]
    wide = sizes[:, None]
    if isinstance(choice, OneOf):
        rows = wide * 0
        if choice.random:
            keys = _keys(group, seed, 0 if rotates else epoch, examples)
            rows = remainders(keys, sizes)[:, None]
            rows = (rows + epoch) % wide if rotates else rows
    elif isinstance(choice, Span):
        room = _at_least(sizes - count, 0)
        keys = _keys(group, seed, epoch, examples) if choice.random else None
        start = room // 2 if keys is None else remainders(keys, room + 1)
        rows = start[:, None] + places
    elif choice.random:
        larger = _at_least(wide, count + 1)  # what is not larger is taken entirely
        rows = _ascending(distinct(_keys(group, seed, epoch, examples), larger, count))
        rows = _where(wide > count, rows, places + wide * 0)
    else:
        rows = _where(wide > count, (2 * places + 1) * wide // (2 * count), places + wide * 0)
    last = _at_least(wide - 1, 0)
    return ChosenRows(
        rows=_where(rows < last, rows, last), lengths=_where(sizes < count, sizes, sizes * 0 + count)
    )


def _keys(group: FieldGroup, seed: int, epoch: int, examples: Any) -> Any:
    """Return a random word for each example; groups of other fields have others."""
    base = mix(stream(seed, epoch, Salt.CHOICE) ^ (zlib.crc32(group.name.encode()) + 1) * GAMMA & MASK)
    return keys_of(base, examples)


SMALL = 64
"""Of so few numbers or fewer all are sorted by a random word: a network of halves of three bits or less is
not random enough. Part of what is drawn, hence fixed, as is the next."""
ROUNDS = 8
"""Of the network. With fewer, pairs of numbers below 100 were not all as likely."""


def distinct(keys: Any, sizes: Any, count: int) -> Any:
    """Return `count` different numbers below each of `sizes`: `(n, count)` int64, in random order.

    Args:
        keys: Random words, `(n,)`, numpy uint64 or torch int64.
        sizes: `(n, 1)` int64, each at least `count`.
        count: Numbers for each.
    """
    if count >= SMALL:
        return _permuted(keys, _at_least(sizes, SMALL + 1), count)
    few = sizes <= SMALL
    if isinstance(few, np.ndarray) and few.all():
        return _sorted(keys, sizes)[:, :count]
    return _where(few, _sorted(keys, sizes)[:, :count], _permuted(keys, _at_least(sizes, SMALL + 1), count))


def _sorted(keys: Any, sizes: Any) -> Any:
    """Return the numbers below each size, at most `SMALL`, by a random word each: `(n, SMALL)`."""
    numbers = _arange(SMALL, sizes)[None, :]
    words = _mixed(mix_(keys + _word(keys, GAMMA))[:, None], numbers + sizes * 0)
    # Never negative, and each with its number in the low bits, so that no two are equal.
    words = (words >> 1 & (1 << 62) - 1) & ~(SMALL - 1) | numbers
    words = _where(numbers < sizes, words, numbers * 0 + ((1 << 63) - 1))
    return _ascending(words) & (SMALL - 1)


def _permuted(keys: Any, sizes: Any, count: int) -> Any:
    """Return where the first `count` places go in a permutation of the numbers below each size.

    So the work does not grow with the size. The permutation is an alternating Feistel network on just enough
    bits. Each example has its own key. A number is sent through it until it falls below the size (Black and
    Rogaway, CT-RSA 2002).
    """
    bits = _bits(sizes)
    rounds = [mix_(keys + _word(keys, (step + 1) * GAMMA & MASK))[:, None] for step in range(ROUNDS)]
    terms = [bits // 2, bits - bits // 2, *rounds]
    value = _network(_arange(count, sizes)[None, :] + sizes * 0, terms)
    flat, own = value.reshape(-1), sizes[:, 0]
    outside = _nonzero((value >= sizes).reshape(-1))
    while len(outside):
        example = outside // count
        flat[outside] = _network(flat[outside], [term[example, 0] for term in terms])
        outside = outside[flat[outside] >= own[example]]
    return flat.reshape(-1, count)


def _network(value: Any, terms: Sequence[Any]) -> Any:
    """Return where values go in one pass; `terms`: the bits of both halves, then a word for each round."""
    low_bits, high_bits, *rounds = terms
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    low, high = value & low_mask, value >> low_bits
    for step, words in enumerate(rounds):
        if step % 2:
            high = high ^ (_mixed(words, low) & high_mask)
        else:
            low = low ^ (_mixed(words, high) & low_mask)
    return (high << low_bits) | low


def _mixed(words: Any, value: Any) -> Any:
    """Return the word of each value in the sequences of `words`, as int64 of the same bits."""
    if isinstance(words, np.ndarray):
        return mix_((value.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) + words).view(np.int64)
    return mix_((value + 1).mul_(signed(GAMMA)).add_(words))


def _bits(sizes: Any) -> Any:
    """Return how many bits hold every number below each size."""
    return (((sizes - 1) >> _arange(62, sizes)[None, :]) > 0).sum(1)[:, None]


# What numpy and torch spell in different ways.


def _word(like: Any, value: int) -> Any:
    return np.uint64(value) if isinstance(like, np.ndarray) else signed(value)


def _arange(count: int, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.arange(count, dtype=np.int64)
    return torch.arange(count, dtype=torch.int64, device=like.device)


def _at_least(values: Any, least: int) -> Any:
    return np.maximum(values, least) if isinstance(values, np.ndarray) else values.clamp(min=least)


def _where(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return torch.where(condition, one, other)


def _ascending(values: Any) -> Any:
    return np.sort(values, axis=1) if isinstance(values, np.ndarray) else values.sort(dim=1).values


def _nonzero(values: Any) -> Any:
    return np.flatnonzero(values) if isinstance(values, np.ndarray) else values.nonzero().flatten()
