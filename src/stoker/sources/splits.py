"""Splits of samples: by the names of files, or by fractions over stable keys.

A key's split follows from the key, the seed and the fractions alone: its seeded hash, as a number from 0 to
1, falls into the range of one split. So samples that are added never move others, the order of rows does not
matter, and rows that share a key (one initial state under several parameters) stay together. The price is
that sizes are near the fractions, not equal to them (docs/design/037).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, SplitError, arg
from stoker.schema import Json, Sample, Schema, digest_json
from stoker.sources.arguments import check_splits
from stoker.sources.files import absent_split, canonical_split, split_of, split_rank
from stoker.sources.hdf5_fields import InPlaceSource, PartLocations
from stoker.sources.protocol import (
    Part,
    PartT,
    SelfCheckingSource,
    Source,
    SourceIdentity,
    check_index,
    keys_follow_identity,
    locate,
)

DEFAULT_SPLITS: Mapping[str, float] = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Cut when a split is asked for, no file is named after one, and no fractions were given."""

RULE = "hash threshold"
"""Names in recipes how fractions are cut; another rule needs another name."""

_SPACE = 1 << 64
_TRIED_HASHES = 200_000
"""Hashes that are spent on finding a seed that fills every split."""

_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """The files and fractions of a split."""

    split: str | None
    """Canonical name; None: all samples."""
    files: tuple[int, ...]
    """Positions of the files that hold the split."""
    fractions: Mapping[str, float] | None = None
    """Fractions by which the samples of those files are cut; None: all of them belong to the split."""
    seed: int = 0
    """Seed of the cut."""

    def to_json(self) -> dict[str, Json]:
        """Return the rule as it goes into a recipe."""
        if self.fractions is None:
            return {"split": self.split}
        return {"split": self.split, "fractions": dict(self.fractions), "seed": self.seed, "rule": RULE}


def choose_split(
    names: Sequence[str], *, split: str | None, splits: Mapping[str, float] | None, seed: int, where: str
) -> SplitChoice:
    """Decide which files hold `split`, and whether a fraction of them is meant.

    Files named after splits win. Fractions given in addition cut only splits that have no file of their own.
    They cut only the train files, so that a test file never ends in train or val.

    Args:
        names: Relative names of all files.
        split, splits, seed: As given by the user.
        where: Names the data in errors.

    Raises:
        SplitError: The split does not exist, or the fractions make no sense.
    """
    if split is None:
        if splits is not None:
            raise SplitError(
                f"{where}: splits were given, but no split was asked for", hint=f"Add {arg('split', 'train')}"
            )
        return SplitChoice(split=None, files=tuple(range(len(names))))
    wanted = canonical_split(split)
    fractions = None if splits is None else _check_fractions(splits)
    known = {*DEFAULT_SPLITS, wanted, *(fractions or {})}
    labels = [split_of(name, known) for name in names]
    found = {label for label in labels if label is not None}
    if not found:
        return _cut_everything(
            SplitChoice(split=wanted, files=tuple(range(len(names))), seed=seed), fractions, where
        )
    if None in labels:
        odd = names[labels.index(None)]
        raise SplitError(
            f"{where}: {odd} carries no split in its name, others do ({', '.join(sorted(found))})",
            hint="Rename it, or give only the files of one kind",
        )
    cut = {name: part for name, part in (fractions or {}).items() if name == "train" or name not in found}
    if wanted in found and (wanted != "train" or len(cut) < 2):
        return SplitChoice(split=wanted, files=_with_label(labels, wanted))
    if wanted not in cut or "train" not in cut or "train" not in found:
        raise absent_split(where, split, found)
    total = sum(cut.values())
    shares = {name: part / total for name, part in cut.items()}
    return SplitChoice(split=wanted, files=_with_label(labels, "train"), fractions=shares, seed=seed)


def _with_label(labels: Sequence[str | None], label: str) -> tuple[int, ...]:
    return tuple(index for index, found in enumerate(labels) if found == label)


def _cut_everything(choice: SplitChoice, fractions: dict[str, float] | None, where: str) -> SplitChoice:
    shares = dict(DEFAULT_SPLITS) if fractions is None else fractions
    if choice.split not in shares:
        raise SplitError(
            f'{where}: split "{choice.split}" is not among the fractions {", ".join(shares)}',
            hint="Add it to data.splits, or ask for one of them",
        )
    if fractions is None:
        shown = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        _log.info("%s: no split files and no data.splits; cut as %s with seed %d", where, shown, choice.seed)
    return SplitChoice(split=choice.split, files=choice.files, fractions=shares, seed=choice.seed)


def _check_fractions(splits: Mapping[str, float]) -> dict[str, float]:
    """Canonical names in canonical order, so that the order in a config file decides nothing."""
    named = {canonical_split(name): float(share) for name, share in splits.items()}
    if len(named) < len(splits):
        raise SplitError(
            f"splits {sorted(splits)} name one split twice ('valid' is 'val')", hint="Keep one of them"
        )
    total = sum(named.values())
    wrong = [name for name, share in named.items() if not (math.isfinite(share) and share > 0)]
    if not named or wrong or total > 1 + 1e-6:
        raise SplitError(
            f"splits {dict(splits)} must be positive fractions that sum to at most 1, got {total:g}",
            hint="For example {'train': 0.8, 'val': 0.1, 'test': 0.1}",
        )
    return {name: named[name] for name in sorted(named, key=split_rank)}


def split_numbers(
    keys: Sequence[str], splits: Mapping[str, float], split: str, seed: int, *, where: str
) -> NDArray[np.int64]:
    """Return positions in `keys` that belong to `split`, ascending, int64.

    Whether a key belongs to it depends on no other key.

    Args:
        keys: One per sample; equal keys are never in different splits.
        splits, split, seed: As given by the user.
        where: Names the data in errors.

    Raises:
        SplitError: `split` is not among `splits`, or no key falls into it.
    """
    shares, wanted = _check_fractions(splits), canonical_split(split)
    if wanted not in shares:
        raise SplitError(
            f'{where}: split "{split}" is not among the fractions {", ".join(shares)}',
            hint="Add it, or ask for one",
        )
    ranges = _ranges(shares)
    low, high = ranges[wanted]
    chosen = [low <= _hash(key, seed) < high for key in keys]
    if keys and not any(chosen):
        raise _empty(set(keys), ranges, wanted, seed, where)
    return np.flatnonzero(np.array(chosen, dtype=np.bool_)).astype(np.int64)


def _ranges(shares: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the hashes of each split, from the first up to but without the last."""
    names = list(shares)
    ends = [round(math.fsum([*shares.values()][: place + 1]) * _SPACE) for place in range(len(names))]
    if ends[-1] > (1 - 1e-6) * _SPACE:
        ends[-1] = _SPACE  # shares as 1/3 add up to a little less than 1; no sample may fall into the gap
    return {name: (low, high) for name, low, high in zip(names, [0, *ends], ends, strict=False)}


def _empty(
    keys: set[str], ranges: Mapping[str, tuple[int, int]], wanted: str, seed: int, where: str
) -> SplitError:
    """Return why no sample is in a split, and what fills it."""
    counts = _counts(keys, ranges, seed)
    fact = f'{where}: split "{wanted}" is empty: of {len(keys)} independent samples {_shown(counts)}'
    if len(keys) < len(ranges):
        hint = f"{len(keys)} cannot fill {len(ranges)} splits: ask for fewer splits, or add data"
        return SplitError(fact, hint=hint)
    for other in range(seed + 1, seed + 1 + _TRIED_HASHES // len(keys)):
        found = _counts(keys, ranges, other)
        if all(found.values()):
            cure = f"Give {arg('seed', other, setting='data.seed')}, which gives {_shown(found)}"
            return SplitError(f"{fact}, with seed {seed}", hint=cure)
    hint = f"Give {wanted} a larger fraction in data.splits, or add data"
    return SplitError(f"{fact}, with seed {seed}", hint=hint)


def _counts(keys: Iterable[str], ranges: Mapping[str, tuple[int, int]], seed: int) -> dict[str, int]:
    hashes = [_hash(key, seed) for key in keys]
    return {name: sum(low <= found < high for found in hashes) for name, (low, high) in ranges.items()}


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _hash(key: str, seed: int) -> int:
    """Return a number below 2**64."""
    data = hashlib.blake2b(f"{seed}\0{key}".encode(errors="surrogatepass"), digest_size=16).digest()
    return int.from_bytes(data[:8], "big")


# ----------------------------------------------------------------------------------------------------------
# Some samples of any source: one split of it, or its first samples (`--limit`).


def whole_source(source: Source) -> Source:
    """Return the source below any number of selections; other sources are returned as they are."""
    while isinstance(source, SourceSelection):
        source = source._source  # pyright: ignore[reportPrivateUsage]
    return source


class SourceSelection(ABC):
    """Some samples of `source`, in their order and with indices of their own."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @abstractmethod
    def _indices(self) -> NDArray[np.int64]:
        """Return the source's indices of these samples, ascending."""

    def __len__(self) -> int:
        """Return the number of selected samples."""
        return len(self._indices())

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Return the source's sample behind `index`.

        Raises:
            IndexError: There is no such sample.
        """
        check_index(index, len(self))
        return self._source.read(int(self._indices()[index]), start, stop)

    def locate(self, index: int) -> str:
        """Return the place that the source names."""
        return locate(self._source, int(self._indices()[index]))

    def check_in_child(self) -> None:
        """Have the source check itself, if it can."""
        if isinstance(self._source, SelfCheckingSource):
            self._source.check_in_child()

    def runs(self) -> Sequence[range]:
        """Return the source's runs, as far as they are selected."""
        indices = self._indices()
        stops = np.array([run.stop for run in self._source.runs()], dtype=np.int64)
        own = np.searchsorted(stops, indices, side="right")
        edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(indices)]
        return [range(low, high) for low, high in itertools.pairwise(edges)]

    def keys(self) -> Sequence[str]:
        """Return the source's keys of these samples."""
        keys = self._source.keys()
        return [keys[int(index)] for index in self._indices()]

    @property
    def keys_follow_identity(self) -> bool:
        """As the source says: the identity has which of its samples are selected."""
        return keys_follow_identity(self._source)

    def schema(self) -> Schema:
        """Return the source's schema."""
        return self._source.schema()

    def _cut_parts(
        self, parts: Sequence[Part], name_rows: Callable[[Part, NDArray[np.int64]], str]
    ) -> tuple[Part, ...]:
        """Return the parts that are selected; `name_rows` names the rows of one that is cut."""
        found: list[Part] = []
        for part, rows in self._rows_of_parts(parts):
            if len(rows) == part.count:
                found.append(part)
            elif len(rows):
                cut = dataclasses.replace(part, count=len(rows), selection=name_rows(part, rows))
                found.append(cut)
        return tuple(found)

    def _rows_of_parts(self, parts: Sequence[PartT]) -> Iterator[tuple[PartT, NDArray[np.int64]]]:
        """Yield each part of the source with its selected rows."""
        indices, first = self._indices(), 0
        for part in parts:
            low, high = np.searchsorted(indices, [first, first + part.count]).tolist()
            yield part, indices[low:high] - first
            first += part.count


class SplitOf(SourceSelection):
    """The samples of `source` that belong to `split`, in their order, with indices of their own.

    Parts named after splits (`data_train.zarr`) decide; else the keys are cut into fractions by a seeded
    hash, so that neither the order of samples nor other samples matter.

    Args:
        source: All samples.
        split: `"train"`, `"val"`, `"test"` or another name of `splits`.
        splits: Fractions; absent: 0.8/0.1/0.1.
        seed: Of the cut.

    Raises:
        SplitError: On first use: there is no such split, or nothing is left in it.

    Examples:
        >>> import numpy, stoker
        >>> from stoker.sources.splits import SplitOf
        >>> numpy.save("points.npy", numpy.zeros((100, 3), "float32"))
        >>> source = stoker.ArraySource("points.npy")
        >>> sizes = [len(SplitOf(source, split)) for split in ("train", "val", "test")]
        >>> sum(sizes), sizes[0] > sizes[1]
        (100, True)
    """

    def __init__(
        self, source: Source, split: str, *, splits: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        check_splits(split, splits, seed)
        super().__init__(source)
        self._split, self._seed = split, seed
        self._splits = None if splits is None else dict(splits)
        self._found: tuple[SplitChoice, NDArray[np.int64]] | None = None

    def __repr__(self) -> str:
        """Return the source and the split."""
        return f"SplitOf({self._source!r}, {self._split!r})"

    def for_split(self, split: str | None) -> Source:
        """Return another split of the same source; None: all of it."""
        if split is None:
            return self._source
        return SplitOf(self._source, split, splits=self._splits, seed=self._seed)

    def identity(self) -> SourceIdentity:
        """Return the source's identity with the parts of the split; a part that is cut names its rows."""
        whole = self._source.identity()
        parts = self._cut_parts(
            whole.parts, lambda part, rows: digest_json([part.selection, list[Json](rows.tolist())])
        )
        settings: dict[str, Json] = {**whole.settings, "split": self._choose()[0].to_json()}
        return dataclasses.replace(whole, parts=parts, settings=settings)

    def places(self) -> Sequence[PartLocations]:
        """Return where these samples are in the files, if the source knows.

        Raises:
            SourceError: It does not, or they cannot be served from there.
        """
        if not isinstance(self._source, InPlaceSource):
            raise SourceError(
                f"{self._source!r} does not know where its samples are stored",
                hint="Use stoker.precompute, in settings precompute.in_place=false",
            )
        return [part.take(rows) for part, rows in self._rows_of_parts(self._source.places()) if len(rows)]

    def _indices(self) -> NDArray[np.int64]:
        return self._choose()[1]

    def _choose(self) -> tuple[SplitChoice, NDArray[np.int64]]:
        if self._found is not None:
            return self._found
        identity, where = self._source.identity(), repr(self._source)
        parts = identity.parts
        # A torch Dataset is named after its class; that its module is `train.py` says nothing about splits.
        of_class = identity.kind.startswith("torch/")
        firsts = np.cumsum([0, *(part.count for part in parts)])
        choice = choose_split(
            ["" if of_class else part.name for part in parts],
            split=self._split,
            splits=self._splits,
            seed=self._seed,
            where=where,
        )
        spans = [np.arange(firsts[i], firsts[i + 1]) for i in choice.files]
        indices = np.concatenate([np.empty(0, np.int64), *spans]).astype(np.int64)
        if choice.fractions is not None:
            keys = self._source.keys()
            own = [keys[int(index)] for index in indices]
            indices = indices[split_numbers(own, choice.fractions, self._split, self._seed, where=where)]
        if not len(indices):
            raise SplitError(f"{where}: no sample is left in split {self._split!r}")
        self._found = choice, indices
        return self._found


class Subset(SourceSelection):
    """The first `count` samples of `source`, with the same indices.

    Parts that are taken completely keep their identity, so that their records are adopted when the limit is
    lifted.

    Raises:
        ConfigError: `count` is below 1. More than the source has means all of it.
    """

    def __init__(self, source: Source, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a limit of {count} samples leaves nothing to do", hint="Give at least 1")
        super().__init__(source)
        self._limit = count
        self._found: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        """Return the source and the limit."""
        return f"Subset({self._source!r}, {self._limit})"

    def identity(self) -> SourceIdentity:
        """Return the source's identity with the parts up to the limit; a part cut short says so."""
        whole = self._source.identity()
        parts = self._cut_parts(whole.parts, lambda part, rows: f"first {len(rows)} of {part.selection}")
        return dataclasses.replace(whole, parts=parts)

    def _indices(self) -> NDArray[np.int64]:
        if self._found is None:
            self._found = np.arange(min(self._limit, len(self._source)), dtype=np.int64)
        return self._found
