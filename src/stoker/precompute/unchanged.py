"""Whether the files of a sample are still those that were digested: looked at after each read.

A file that changes while it is encoded would put samples of two versions under one fingerprint. After each
read the files of the sample's part are compared, by size, times and inode, with what they were when the
recipe was made; a source whose samples each come from a few files of a large part names these
(`sample_files`). Where that differs the content is digested again: an equal digest is noted and work goes on
(a `touch`, a file put back), another one ends the run, and nothing that was read since is stored. Looking
costs a stat for each file. This module does not import torch unless a file changed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stoker.errors import SourceError
from stoker.schema import Sample
from stoker.sources.files import stamp_of
from stoker.sources.protocol import FileRef, ReadsMany

if TYPE_CHECKING:
    from stoker.store.digests import FileDigest

FEW = 8
"""Up to so many files of a part are all looked at, whatever the source says."""
LOOKED_AT = 64
"""Files looked at after a read; a part of more has its turn of others each time."""


class Reads(Protocol):
    """The part of a `Source` that reads."""

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """As `Source.read`."""
        ...


class ChangedError(SourceError):
    """A file is not what was digested any more."""


class Digested(NamedTuple):
    """One file as the recipe knows it: plain values, quick to send, and taken by a reader without torch."""

    name: str
    path: str
    bytes: int
    digest: str
    sampled: bool
    stamp: tuple[int, ...]


class Unchanged:
    """Reads from a source as long as its files are those of the recipe.

    Args:
        source: What reads.
        files: The files of each part.
        offsets: First number of each part.
    """

    def __init__(self, source: Reads, files: Sequence[Sequence[Digested]], offsets: Sequence[int]) -> None:
        self._source = source
        self._files = [list(own) for own in files]
        self._offsets = list(offsets)
        self._turn = 0
        # Beyond the protocol: without it each read would look at many files, and seldom at its own.
        self._names_of: Callable[[int], Sequence[str]] | None = getattr(source, "sample_files", None)
        self._places: dict[int, dict[str, int]] = {}

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """As `Source.read`.

        Raises:
            ChangedError: A file of the sample's part has other content than when it was digested.
        """
        try:
            whole = start is None and stop is None
            sample = self._source.read(number) if whole else self._source.read(number, start, stop)
        except Exception:
            self._look(number)  # half-written files raise anything; that they changed is the better reason
            raise
        self._look(number)
        return sample

    def read_many(self, numbers: range) -> Sample | None:
        """As `ReadsMany.read_many`; None where the source has no such way, or files to look at."""
        if any(self._files) or not isinstance(self._source, ReadsMany):
            return None
        return self._source.read_many(numbers)

    def _look(self, number: int) -> None:
        part = bisect_right(self._offsets, number) - 1
        files = self._files[part]
        if self._names_of is not None and len(files) > FEW:
            if part not in self._places:
                self._places[part] = {file.name: n for n, file in enumerate(files)}
            known = self._places[part]
            for name in self._names_of(number):
                if name in known:  # what is missing has no digest, and its sample fails by itself
                    self._compare(files, known[name], number)
            return
        first = self._turn if len(files) > LOOKED_AT else 0
        for place in range(first, first + min(len(files), LOOKED_AT)):
            self._compare(files, place % len(files), number)
        self._turn = first + LOOKED_AT

    @staticmethod
    def _compare(files: list[Digested], place: int, number: int) -> None:
        known = files[place]
        path = known.path
        try:
            status = os.stat(path)  # noqa: PTH116 - of each file at each read, where a Path costs as much again
        except OSError:
            return  # gone by name: what was read came from the file that was open, and the next read will say
        if stamp_of(status) == known.stamp:
            return
        from stoker.store.digests import digest_file

        try:
            now = digest_file(FileRef(name=known.name, path=Path(path)), sampled=known.sampled)
        except SourceError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it cannot be read, which says nothing about its content
            raise ChangedError(
                f"{path} is being written while it is encoded, seen when sample {number} was read: {error}. "
                "Nothing read since then is stored"
            ) from error
        if (now.bytes, now.digest) != (known.bytes, known.digest):
            raise ChangedError(
                f"{path} changed while it was encoded: {known.bytes:,} bytes before, {now.bytes:,} now, with "
                f"other content, seen when sample {number} was read. Nothing read since then is stored. Run "
                "again once it is written: changed data gives a cache of its own"
            )
        files[place] = known._replace(stamp=now.stamp)


def digested_files(refs: Sequence[Sequence[FileRef]], known: Sequence[FileDigest]) -> list[list[Digested]]:
    """The files of each part with their digests, which come in the same order."""
    by_name = {digest.name: digest for digest in known}
    return [
        [
            Digested(ref.name, str(ref.path), d.bytes, d.digest, sampled=d.sampled, stamp=d.stamp)
            for ref in own
            if (d := by_name.get(ref.name)) is not None
        ]
        for own in refs
    ]
