"""The keys of a cache's samples: names that stay when indices change, by which caches are joined.

They are kept next to the shards in `keys.jsonl`: a head with the number of samples and a digest, then one
JSON string per sample, by sample index. Where keys are the indices themselves, the file is the head alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import FormatError, MissingRecordError
from stoker.runtime.jsonio import canonical_json, read_strict
from stoker.store.format import KEYS_FILE
from stoker.store.storage import Storage
from stoker.units import GIB, format_few

_CHUNK = 1 << 12
"""Keys that are written as text in one call."""
_NO_KEYS = "Run the same precompute again: it encodes nothing, and writes the keys of the samples"


class SampleKeys(Sequence[str]):
    """One key per sample, by sample index. Keys may repeat: samples that belong together share one.

    Args:
        lines: The keys as JSON strings, one a line; None: the indices as text.
        count: Samples.
    """

    def __init__(self, lines: bytes | None, count: int) -> None:
        self._lines, self._count = lines, count

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Where lines begin, and the end of the last one."""
        data = np.frombuffer(self._lines or b"", np.uint8)
        return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(data == ord("\n")) + 1])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return the key of a sample, or of several."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._count))]
        place = range(self._count)[index]
        return str(place) if self._lines is None else json.loads(self.line(place))

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(self._count))

    @property
    def are_indices(self) -> bool:
        """True if the key of each sample is its index."""
        return self._lines is None

    @cached_property
    def digest(self) -> str:
        """32 hex digits: equal for two caches whose samples have the same keys in the same order."""
        return _digest(self._count, self._lines)

    def line(self, index: int | np.int64) -> bytes:
        """Return the key of a sample as a JSON string."""
        if self._lines is None:
            return b'"%d"' % index
        return self._lines[self._ends[index] : self._ends[index + 1] - 1]

    @property
    def lines(self) -> bytes:
        """The keys as JSON strings, each followed by a newline."""
        return _joined(map(self.line, range(self._count))) if self._lines is None else self._lines

    def select(self, indices: NDArray[np.int64]) -> SampleKeys:
        """Return the keys of some samples, in their order.

        Args:
            indices: Sample indices, `(n,)`.
        """
        return SampleKeys(_joined(map(self.line, indices)), len(indices))

    @cached_property
    def _hashes(self) -> NDArray[np.uint64]:
        return np.fromiter(map(xxhash.xxh3_64_intdigest, map(self.line, range(self._count))), np.uint64)

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        order = np.argsort(self._hashes, kind="stable")
        return self._hashes[order], order

    def find(self, keys: SampleKeys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Look keys up.

        Args:
            keys: Keys of `n` samples, as `text_keys` makes them.

        Returns:
            The first sample with each key, -1 where no sample has it; and how many samples have it. Both
            `(n,)`.
        """
        hashes, order = self._sorted
        begins, ends = (np.searchsorted(hashes, keys._hashes, side=side) for side in ("left", "right"))
        found, counts = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int64)
        for place in np.flatnonzero(begins < ends):
            line = keys.line(place)
            # Hashes may collide.
            equal = [index for index in order[begins[place] : ends[place]] if self.line(index) == line]
            if equal:
                found[place], counts[place] = equal[0], len(equal)
        return found, counts

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the sample index of a key.

        Args:
            value: The key.
            start, stop: Sample indices to look among.

        Raises:
            MissingRecordError: None has it, or several have.
        """
        found, counts = self.find(text_keys([value]))
        if counts[0] == 1 and found[0] in range(self._count)[start:stop]:
            return int(found[0])
        if counts[0] > 1:
            raise MissingRecordError(
                f"{counts[0]} samples have the key {value!r}, the first is sample {found[0]}",
                hint="Read them by sample index",
            )
        raise MissingRecordError(
            f"no sample has the key {value!r}",
            hint=f"Keys are such as {format_few([repr(one) for one in self[:3]], 3)}",
        )


def text_keys(keys: Iterable[str]) -> SampleKeys:
    """Return keys as `SampleKeys` keeps them: about the bytes of their text."""
    text, rest, count = io.BytesIO(), iter(keys), 0
    # Many in one call, a line feed between them: millions of keys are compared whenever a run begins. All in
    # one call would take several times the memory.
    while chunk := [*islice(rest, _CHUNK)]:
        text.write(json.dumps(chunk, separators=("\n", ":"))[1:-1].encode())
        text.write(b"\n")
        count += len(chunk)
    return SampleKeys(text.getvalue(), count)


def joint_keys(members: Sequence[SampleKeys]) -> SampleKeys:
    """Return the keys of several caches, one after another."""
    return SampleKeys(b"".join(keys.lines for keys in members), sum(map(len, members)))


def put_keys(storage: Storage, keys: Sequence[str]) -> None:
    """Write the keys of samples next to their records, unless the same keys are stored."""
    stored = _stored_digest(storage, len(keys))
    if all(key == str(index) for index, key in enumerate(keys)):
        given = SampleKeys(None, len(keys))
    else:
        given = keys if isinstance(keys, SampleKeys) else text_keys(keys)
    if stored == given.digest:
        return
    kind, lines = ("index", b"") if given.are_indices else ("text", given.lines)
    head = {"count": len(keys), "keys": kind, "xxh3_128": given.digest}
    storage.put(KEYS_FILE, canonical_json(head).encode() + b"\n" + lines)


def has_keys(storage: Storage, count: int) -> bool:
    """Return True if the keys of `count` samples are kept, undamaged."""
    return _stored_digest(storage, count) is not None


def _stored_digest(storage: Storage, count: int) -> str | None:
    """Return the digest of the keys of `count` samples; None if they are not kept, or damaged."""
    try:
        return read_keys(storage, count).digest
    except (FormatError, MissingRecordError):
        return None


def read_keys(storage: Storage, count: int) -> SampleKeys:
    """Return the keys of the samples of a cache.

    Args:
        storage: The cache's folder.
        count: Samples of the cache.

    Raises:
        FormatError: The file is damaged.
        MissingRecordError: The cache was made before keys were kept.
    """
    where = f"{storage.path / KEYS_FILE}"
    try:
        data = storage.read(KEYS_FILE, limit_bytes=16 * GIB)
    except FileNotFoundError as error:
        raise MissingRecordError(f"{storage.path} has no keys of its samples", hint=_NO_KEYS) from error
    first, _, rest = data.partition(b"\n")
    try:
        head = read_strict(first, where=where)
    except FormatError as error:
        raise FormatError(str(error), hint=_NO_KEYS) from error
    lines = None if head.get("keys") == "index" else rest
    found = SampleKeys(lines, count)
    counted = count if lines is None else lines.count(b"\n")
    if head.get("count") != count or counted != count:
        raise FormatError(
            f"{where} is damaged: it has {counted} keys, and the cache has {count} samples", hint=_NO_KEYS
        )
    if head.get("xxh3_128") != found.digest:
        raise FormatError(f"{where} is damaged: its keys do not match their checksum", hint=_NO_KEYS)
    return found


def _digest(count: int, lines: bytes | None) -> str:
    digest = xxhash.xxh3_128(str(count).encode())
    digest.update(b"index" if lines is None else lines)
    return digest.hexdigest()


def _joined(lines: Iterable[bytes]) -> bytes:
    """Return lines as one text; written one by one, since an object for each takes far more memory."""
    text = io.BytesIO()
    for line in lines:
        text.write(line)
        text.write(b"\n")
    return text.getvalue()
