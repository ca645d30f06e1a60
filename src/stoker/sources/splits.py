"""Which samples belong to which split: by the names of files, or by fractions over stable keys.

Fractions are cut over the *unique keys*, ordered by a seeded hash. So counts are exact, the order of rows
does not matter, rows that share a key (one initial state under several parameters) stay together, and a
file that brings no new key changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SplitError
from stoker.schema import Json
from stoker.sources.files import absent_split, canonical_split, split_of, split_rank

DEFAULT_SPLITS: Mapping[str, float] = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Cut when a split is asked for, no file is named after one, and no fractions were given."""

_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """What a split means for a given list of files."""

    split: str | None
    """Canonical name; None: all samples."""
    files: tuple[int, ...]
    """Positions of the files that hold the split."""
    fractions: Mapping[str, float] | None = None
    """How the samples of those files are cut; None: all of them belong to the split."""
    seed: int = 0
    """Seed of the cut."""

    def to_json(self) -> dict[str, Json]:
        """The rule as it goes into a recipe."""
        if self.fractions is None:
            return {"split": self.split}
        return {"split": self.split, "fractions": dict(self.fractions), "seed": self.seed}


def choose_split(
    names: Sequence[str], *, split: str | None, splits: Mapping[str, float] | None, seed: int, where: str
) -> SplitChoice:
    """Decide which files hold `split`, and whether a fraction of them is meant.

    Files named after splits win. Fractions given beside such files cut only what has no file of its own,
    and only out of the train files, so that a test file never ends in train or val.

    Args:
        names: Relative names of all files.
        split, splits, seed: As given by the user.
        where: Names the data in errors.

    Raises:
        SplitError: The split does not exist, or the fractions make no sense.
    """
    if split is None:
        if splits is not None:
            raise SplitError(f"{where}: splits were given, but no split was asked for. Add split='train'")
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
            f"{where}: {odd} carries no split in its name, others do ({', '.join(sorted(found))}). "
            "Rename it, or give only the files of one kind"
        )
    cut = {name: part for name, part in (fractions or {}).items() if name == "train" or name not in found}
    if wanted in found and (wanted != "train" or len(cut) < 2):
        return SplitChoice(split=wanted, files=_labelled(labels, wanted))
    if wanted not in cut or "train" not in cut or "train" not in found:
        raise absent_split(where, split, found)
    total = sum(cut.values())
    shares = {name: part / total for name, part in cut.items()}
    return SplitChoice(split=wanted, files=_labelled(labels, "train"), fractions=shares, seed=seed)


def _labelled(labels: Sequence[str | None], label: str) -> tuple[int, ...]:
    return tuple(index for index, found in enumerate(labels) if found == label)


def _cut_everything(choice: SplitChoice, fractions: dict[str, float] | None, where: str) -> SplitChoice:
    shares = dict(DEFAULT_SPLITS) if fractions is None else fractions
    if choice.split not in shares:
        raise SplitError(
            f'{where}: split "{choice.split}" is not among the fractions {", ".join(shares)}. '
            f"Add it to data.splits, or ask for one of them"
        )
    if fractions is None:
        shown = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        _log.info("%s: no split files and no data.splits; cut as %s with seed %d", where, shown, choice.seed)
    return SplitChoice(split=choice.split, files=choice.files, fractions=shares, seed=choice.seed)


def _check_fractions(splits: Mapping[str, float]) -> dict[str, float]:
    """Canonical names in canonical order, so that the order in a config file decides nothing."""
    named = {canonical_split(name): float(share) for name, share in splits.items()}
    if len(named) < len(splits):
        raise SplitError(f"splits {sorted(splits)} name one split twice ('valid' is 'val'). Keep one of them")
    total = sum(named.values())
    wrong = [name for name, share in named.items() if not (math.isfinite(share) and share > 0)]
    if not named or wrong or total > 1 + 1e-6:
        raise SplitError(
            f"splits {dict(splits)} must be positive fractions that sum to at most 1, got {total:g}. "
            "For example {'train': 0.8, 'val': 0.1, 'test': 0.1}"
        )
    return {name: named[name] for name in sorted(named, key=split_rank)}


def split_counts(total: int, splits: Mapping[str, float]) -> dict[str, int]:
    """How many of `total` keys each split gets: largest remainders, and at least one each.

    >>> split_counts(10, {"train": 0.8, "val": 0.1, "test": 0.1})
    {'train': 8, 'val': 1, 'test': 1}
    >>> split_counts(3, {"train": 0.98, "val": 0.02})
    {'train': 2, 'val': 1}

    Raises:
        SplitError: Fewer keys than splits, or the fractions make no sense.
    """
    shares = _check_fractions(splits)
    if total < len(shares):
        raise SplitError(
            f"{total} independent samples cannot fill {len(shares)} splits ({', '.join(shares)}) with at "
            "least one each. Ask for fewer splits, or add data"
        )
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: math.floor(value + 1e-9) for name, value in exact.items()}
    left = min(round(sum(exact.values())), total) - sum(counts.values())
    by_remainder = sorted(shares, key=lambda name: (counts[name] - exact[name], split_rank(name)))
    for name in by_remainder[: max(left, 0)]:
        counts[name] += 1
    for name in shares:
        if counts[name] == 0:
            counts[name] = 1
            if sum(counts.values()) > total:
                counts[max(counts, key=lambda other: counts[other])] -= 1
    return counts


def split_numbers(
    keys: Sequence[str], splits: Mapping[str, float], split: str, seed: int
) -> NDArray[np.int64]:
    """Positions in `keys` that belong to `split`, ascending, int64.

    Counts are exact over unique keys (`split_counts`); equal keys are never in different splits.

    Raises:
        SplitError: `split` is not among `splits`, or there are fewer unique keys than splits.
    """
    shares, wanted = _check_fractions(splits), canonical_split(split)
    if wanted not in shares:
        raise SplitError(
            f'split "{split}" is not among the fractions {", ".join(shares)}. Add it, or ask for one'
        )
    order = sorted(set(keys), key=lambda key: (_hash(key, seed), key))
    counts = split_counts(len(order), shares)
    first = 0
    for name, count in counts.items():
        if name == wanted:
            break
        first += count
    chosen = set(order[first : first + counts[wanted]])
    return np.fromiter((index for index, key in enumerate(keys) if key in chosen), dtype=np.int64)


def _hash(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=16).digest()
