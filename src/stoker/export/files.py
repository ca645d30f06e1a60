"""Files of an export while they are made: counted and hashed as they are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.export.columns import Tensor
from stoker.export.read import Records
from stoker.runtime.disk import explained
from stoker.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One file of an export."""

    file: str
    """Name in the folder."""
    bytes: int
    sha256: str
    """Of all of it, 64 hex digits."""
    records: int
    first: int
    """Sample number of the first record in it."""
    last: int
    """Sample number of the last."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What the files of an export are made of and in."""

    folder: Path
    records: Records
    wrote: Callable[[int], None]
    """Told of bytes as they are written."""

    def file(self, name: str, between: tuple[int, int], pieces: Iterator[Any]) -> ExportedFile:
        """Write one file; `between`: the places of the records in it.

        Raises:
            ResourceError: No space left.
        """
        digest, size = hashlib.sha256(), 0
        with explained(self.folder), (self.folder / name).open("xb", buffering=0) as file:
            for piece in pieces:
                data = memoryview(piece).cast("B")
                at = 0
                while at < len(data):
                    at += file.write(data[at:])
                digest.update(data)
                size += len(data)
                self.wrote(len(data))
        numbers = self.records.numbers(*between)
        return ExportedFile(
            file=name,
            bytes=size,
            sha256=digest.hexdigest(),
            records=between[1] - between[0],
            first=int(numbers[0]),
            last=int(numbers[-1]),
        )

    def values(
        self, tensor: Tensor, between: tuple[int, int], lengths: NDArray[np.int64] | None
    ) -> Iterator[Any]:
        """The bytes of a tensor over the records at places `between`; `lengths`: theirs, if it is ragged."""
        if tensor.part == "index":
            yield self.records.numbers(*between).astype("<i8").data
        elif tensor.part == "values":
            to = tensor.shape[1] if tensor.padded else None
            yield from self.records.pieces(tensor.field, tensor.dtype, *between, padded_to=to)
        elif lengths is not None:
            both = {"lengths": lengths, "offsets": np.concatenate([[0], np.cumsum(lengths)])}
            yield both[tensor.part].astype("<i8").data
