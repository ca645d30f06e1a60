"""The keys of a cache's samples: names that stay when numbers change, by which caches are joined.

They are kept next to the shards in `keys.jsonl`: a head with the number of samples and a digest, then one
JSON string per sample, by sample index. Where keys are the indices themselves there is the head alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.errors import FormatError, MissingRecordError
from stoker.runtime.jsonio import canonical_json, read_strict
from stoker.store.format import KEYS_FILE
from stoker.store.storage import Storage
from stoker.units import GIB, format_few

_NO_KEYS = "Run the same precompute again: it encodes nothing, and notes the keys of the samples"


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

    def line(self, index: int) -> bytes:
        """Return the key of a sample as a JSON string."""
        if self._lines is None:
            return b'"%d"' % index
        return self._lines[self._ends[index] : self._ends[index + 1] - 1]

    @cached_property
    def _hashes(self) -> NDArray[np.uint64]:
        return hashes_of(self.line(index) for index in range(self._count))

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        order = np.argsort(self._hashes, kind="stable")
        return self._hashes[order], order

    def find(self, lines: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Look keys up.

        Args:
            lines: Keys as `line` returns them.

        Returns:
            The first sample with each key, -1 where there is none; and how many samples have it. Both `(n,)`.
        """
        wanted = hashes_of(lines)
        hashes, order = self._sorted
        begins, ends = (np.searchsorted(hashes, wanted, side=side) for side in ("left", "right"))
        found, counts = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), np.int64)
        for place, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            # Hashes may collide.
            own = [int(i) for i in order[begin:end] if self.line(int(i)) == lines[place]]
            if own:
                found[place], counts[place] = own[0], len(own)
        return found, counts

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the sample index of a key.

        Args:
            value: The key.
            start, stop: Sample indices to look among.

        Raises:
            MissingRecordError: None has it, or several have.
        """
        found, counts = self.find([_line(value)])
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


def joint_keys(members: Sequence[SampleKeys]) -> SampleKeys:
    """Return the keys of several caches, one after another."""
    lines = b"".join(line + b"\n" for keys in members for line in key_lines(keys))
    return SampleKeys(lines, sum(map(len, members)))


def hashes_of(lines: Any) -> NDArray[np.uint64]:
    """Return a hash of each of several byte strings, `(n,)`."""
    return np.fromiter((xxhash.xxh3_64_intdigest(line) for line in lines), np.uint64)


def key_lines(keys: Sequence[str]) -> list[bytes]:
    """Return keys as `SampleKeys.find` takes them."""
    if isinstance(keys, SampleKeys):
        return [keys.line(index) for index in range(len(keys))]
    return [_line(key) for key in keys]


def put_keys(storage: Storage, keys: Sequence[str]) -> None:
    """Keep the keys of samples next to their records, unless these very keys are there."""
    texts = [*keys]
    # All in one call, with a line feed between them: millions of keys are compared whenever a run begins.
    lines = json.dumps(texts, separators=("\n", ":"))[1:-1].encode() + b"\n" if texts else b""
    if all(key == str(index) for index, key in enumerate(texts)):
        lines = None
    digest = _digest(len(texts), lines)
    with suppress(FormatError, MissingRecordError):
        if read_keys(storage, len(texts)).digest == digest:
            return
    head = {"count": len(texts), "keys": "index" if lines is None else "text", "xxh3_128": digest}
    storage.put(KEYS_FILE, canonical_json(head).encode() + b"\n" + (lines or b""))


def has_keys(storage: Storage, count: int) -> bool:
    """Return True if the keys of `count` samples are kept, undamaged."""
    try:
        return len(read_keys(storage, count)) == count
    except (FormatError, MissingRecordError):
        return False


def read_keys(storage: Storage, count: int) -> SampleKeys:
    """Return the keys of the samples of a cache.

    Args:
        storage: The cache's folder.
        count: Samples that it is of.

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
    head = read_strict(first, where=where)
    lines = None if head.get("keys") == "index" else rest
    found = SampleKeys(lines, count)
    counted = count if lines is None else lines.count(b"\n")
    if head.get("count") != count or counted != count or head.get("xxh3_128") != found.digest:
        raise FormatError(
            f"{where} is damaged: it has {counted} keys for {count} samples, or other bytes", hint=_NO_KEYS
        )
    return found


def _digest(count: int, lines: bytes | None) -> str:
    digest = xxhash.xxh3_128(str(count).encode())
    digest.update(b"index" if lines is None else lines)
    return digest.hexdigest()


def _line(key: str) -> bytes:
    return json.dumps(key).encode()
