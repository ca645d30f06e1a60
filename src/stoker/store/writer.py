"""Write records of a folder into shards: convert, checksum, write as it comes, seal by size or age."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, FormatError, RecordError, arg
from stoker.schema import Field, canonical_json
from stoker.store import layout
from stoker.store.cache import Cache
from stoker.store.compressed import Compression, check_compression
from stoker.store.convert import FieldScratch, StoredRows, torch_dtype
from stoker.store.copies import copy_rows
from stoker.store.packing import store_columns
from stoker.store.protocols import Storage
from stoker.store.recipe import Recipe
from stoker.store.shard_write import OpenShard, ShardSpec
from stoker.store.strict_json import read_strict

EARLY_S, EARLY_SHARE = 1.0, 0.05
"""An early seal comes after a second, or a 20th of the time so far: about 200 shards in the first hour."""
OPEN_PARTS = 4
"""Parts with an open shard at a time: readers' work interleaves where one part ends and the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How a writer cuts shards, and what it insists on.

    Raises:
        ConfigError: A time or an error bound is out of range. `layout.capacity` checks `shard_bytes`.
    """

    shard_bytes: int = layout.SHARD_BYTES
    """Bytes of records in a full shard."""
    seal_after_s: float = 30.0
    """Seconds after its first record at which a shard is sealed even if it is not full."""
    early: bool = False
    """Somebody serves what is sealed: seal after `EARLY_S` at first, then ever more rarely."""
    max_error: float | None = None
    """Largest conversion error of a record and field, as a fraction of its largest value; None: any."""
    device: str = "cpu"
    """Where records are encoded; noted in the shards."""
    float32: str = "unknown"
    """How products of float32 are computed while encoding; noted in the shards."""
    compression: Compression = "none"
    """Compression of shards; the records are the same."""

    def __post_init__(self) -> None:
        check_compression(self.compression)
        if self.seal_after_s <= 0:
            raise ConfigError(f"seal_after_s is {self.seal_after_s}, expected more than 0")
        if self.max_error is not None and self.max_error < 0:
            raise ConfigError(f"max_error is {self.max_error}, expected 0 at least, or None for any")


_Key: TypeAlias = tuple[int, str]
"""Part, and the environment that made the records as JSON; empty: this process."""


class RecordWriter:
    """Appends records to shards of its own. One thread only; any number of writers may fill one folder.

    `rows` and `bytes` count what was appended so far; what is in an open shard is lost by a kill.
    """

    def __init__(self, storage: Storage, recipe: Recipe, settings: WriterSettings) -> None:
        self.rows = 0
        self.bytes = 0
        self._storage, self._recipe, self._settings = storage, recipe, settings
        self._token = secrets.token_hex(6)
        self._seq = 0
        self._open: dict[_Key, OpenShard] = {}
        self._since: dict[_Key, float] = {}
        self._latest: _Key | None = None
        self._begun = time.monotonic()
        self._scratch = {name: FieldScratch() for name in recipe.schema}
        self._capacity = layout.capacity(recipe.columns, settings.shard_bytes)

    def append(
        self,
        numbers: range | Sequence[int],
        records: Mapping[str, Tensor | list[Tensor]],
        *,
        marked: Sequence[int] = (),
        contents: NDArray[np.uint64] | None = None,
    ) -> None:
        """Store records.

        Args:
            numbers: Global sample numbers of one part, one per record.
            records: Fixed fields `(n, *shape)`, ragged ones a list of `n` tensors; on the CPU, in the encoded
                dtype (or already the stored one). Not kept after the call.
            marked: Those of `numbers` that were encoded in a smaller group than the recipe's.
            contents: Digests of their raw samples, `(n, 2)`, by which a grown source finds the records again.
        Raises:
            RecordError: A record does not fit the schema, overflows its dtype, or loses more than
                `max_error`; nothing of the call was stored.
            ResourceError: No space left; the open shards are gone, sealed ones are kept.
        """
        numbers = [int(number) for number in numbers]
        if not numbers:
            return
        part, local = self._local(numbers)
        stored = self._convert(numbers, records)
        marks = {self._recipe.part_of(number)[1] for number in marked}
        begin = 0
        while begin < len(numbers):
            shard = self._shard((part, ""))
            end = begin + self._room(shard, stored, begin)
            try:
                shard.add(local, stored, begin, end, contents=contents)
            except BaseException:
                self.abort()
                raise
            shard.mark([number for number in local[begin:end].tolist() if number in marks])
            if self._capacity.is_full(shard.rows, shard.size):
                self._seal((part, ""))
            begin = end
        self.rows += len(numbers)
        self.bytes += sum(rows.values.nbytes for rows in stored.values())
        self.tick()

    def copy(
        self,
        numbers: Sequence[int],
        origin: Cache,
        places: NDArray[np.int64],
        *,
        marked: Sequence[int] = (),
    ) -> list[int]:
        """Store records of another cache as they are, bit for bit.

        Args:
            numbers: Global sample numbers of one part to store them under.
            origin: The other cache. Its recipe differs from ours in the source alone.
            places: Shard and row in `origin` of each, `(n, 2)`.
            marked: Those of `numbers` that have another place in their group here than there.

        Returns:
            Those of `numbers` whose record proved damaged: they were not stored.
        """
        part, local = self._local([int(number) for number in numbers])
        marks = {self._recipe.part_of(number)[1] for number in marked}
        table = np.column_stack([local, places])
        made_in = {int(i): _environment_of(origin, int(i)) for i in np.unique(places[:, 0])}
        damaged: list[int] = []
        for environment in dict.fromkeys(made_in.values()):
            own = table[[made_in[int(i)] == environment for i in places[:, 0]]]
            while len(own):
                shard = self._shard((part, environment))
                room = self._capacity.rows - shard.rows if self._capacity.fixed else 1
                for rows in self._copied(shard, origin, own[:room], damaged):
                    shard.mark([number for number in rows[:, 0].tolist() if number in marks])
                    self.rows += len(rows)
                own = own[room:]
                if not shard.rows:
                    self._drop((part, environment))
                elif self._capacity.is_full(shard.rows, shard.size):
                    self._seal((part, environment))
        self.tick()
        offset = self._recipe.parts[part].offset
        return [number + offset for number in damaged]

    def _copied(
        self, shard: OpenShard, origin: Cache, table: NDArray[np.int64], damaged: list[int]
    ) -> Iterator[NDArray[np.int64]]:
        """Copy rows at once, or one by one where one of them is damaged; yield those that were copied."""
        try:
            copy_rows(shard, origin, table)
        except FormatError:  # met while reading, before anything was appended
            if len(table) > 1:
                for at in range(len(table)):
                    yield from self._copied(shard, origin, table[at : at + 1], damaged)
            else:
                damaged.append(int(table[0, 0]))
        except BaseException:
            self.abort()
            raise
        else:
            yield table

    def tick(self) -> None:
        """Seal shards that are older than their time; call when idle."""
        now, after_s = time.monotonic(), self._settings.seal_after_s
        if self._settings.early:
            after_s = min(after_s, max(EARLY_S, EARLY_SHARE * (now - self._begun)))
        for key in [key for key, since in self._since.items() if now - since >= after_s]:
            self._seal(key)

    def seal(self) -> None:
        """Seal what is open; returns when it is durable. The writer may be used again."""
        for key in [*self._open]:
            self._seal(key)

    def abort(self) -> None:
        """Drop what is not sealed."""
        for shard in self._open.values():
            shard.discard()
        self._open.clear()
        self._since.clear()

    @property
    def shard_fill(self) -> tuple[int, int]:
        """Bytes in the shard last appended to, and bytes at which it is full."""
        shard = None if self._latest is None else self._open.get(self._latest)
        return (0 if shard is None else shard.size), self._capacity.bytes

    def _local(self, numbers: list[int]) -> tuple[int, NDArray[np.int64]]:
        part, _ = self._recipe.part_of(numbers[0])
        entry = self._recipe.parts[part]
        local = np.array(numbers, np.int64) - entry.offset
        if local.min() < 0 or local.max() >= entry.count:
            raise RecordError(
                f"samples {min(numbers)} to {max(numbers)} are not of one part; {entry.name!r} has "
                f"{entry.offset} to {entry.offset + entry.count - 1}. Append part by part"
            )
        return part, local

    def _convert(
        self, numbers: list[int], records: Mapping[str, Tensor | list[Tensor]]
    ) -> dict[str, StoredRows]:
        schema, encoded = self._recipe.schema, self._recipe.encoded
        if records.keys() != schema.keys():
            raise RecordError(
                f"samples from {numbers[0]}: records have fields {sorted(records)}, "
                f"the schema has {sorted(schema)}"
            )
        stored: dict[str, StoredRows] = {}
        for name, field in schema.items():
            _check_shape(name, records[name], encoded[name], field, numbers)
            stored |= store_columns(name, field, records[name], numbers, self._scratch[name])
            bound = self._settings.max_error
            worst = int(stored[name].max_error.argmax())
            error = stored[name].max_error[worst]
            if bound is not None and error > bound:
                wider = "float16" if field.packed else "float32"
                raise RecordError(
                    f"sample {numbers[worst]}: field {name!r} loses {error:.3g} of its largest value as "
                    f"{field.dtype}, {bound:.3g} is allowed. Store it wider, as with "
                    f"{arg('dtype', wider)}, or raise {arg('max_error')}"
                )
        return stored

    def _shard(self, key: _Key) -> OpenShard:
        part, made_in = key
        shard = self._open.get(key)
        if shard is None:
            if len(self._open) >= OPEN_PARTS:
                self._seal(min(self._since, key=self._since.__getitem__))
            spec = ShardSpec(
                schema=self._recipe.schema,
                part=self._recipe.parts[part].key,
                writer=self._token,
                seq=self._seq,
                environment=read_strict(made_in.encode(), where="an environment")
                if made_in
                else environment(self._settings),
            )
            shard = OpenShard(
                self._storage,
                spec,
                capacity=self._capacity.rows,
                compression=self._settings.compression,
            )
            self._seq += 1
            self._open[key] = shard
            self._since[key] = time.monotonic()
        self._latest = key
        return shard

    def _room(self, shard: OpenShard, stored: Mapping[str, StoredRows], begin: int) -> int:
        """Records from `begin` on that still go into `shard`; one at least."""
        count = len(next(iter(stored.values())).lengths)
        room = min(count - begin, self._capacity.rows - shard.rows)
        if self._capacity.fixed:
            return room
        size, taken = shard.size, 0
        while taken < room and (size < self._capacity.bytes or not taken):
            row = begin + taken
            size += sum((r.starts[row + 1] - r.starts[row]) * r.values.itemsize for r in stored.values())
            taken += 1
        return taken

    def _drop(self, key: _Key) -> None:
        self._since.pop(key)
        self._open.pop(key).discard()

    def _seal(self, key: _Key) -> None:
        self._since.pop(key)
        self._open.pop(key).seal()


def _environment_of(cache: Cache, i: int) -> str:
    """Return what made the records of a shard, as JSON; `{}` where the shard cannot be read."""
    try:
        return canonical_json(dict(cache.shard(i).described("environment")))
    except (FormatError, OSError):
        return "{}"


def _check_shape(
    name: str, values: Tensor | list[Tensor], encoded: Field, field: Field, numbers: Sequence[int]
) -> None:
    count = len(numbers)
    if isinstance(values, list) != field.ragged or (field.ragged and len(values) != count):
        kind = f"a list of {count} tensors" if field.ragged else "one tensor"
        raise RecordError(f"samples from {numbers[0]}: field {name!r} must be {kind}")
    tensors = values if isinstance(values, list) else [values]
    wanted = (-1 if field.ragged else count, *field.shape[field.ragged :])
    dtypes = {torch_dtype(encoded.dtype), torch_dtype((encoded if field.packed else field).dtype)}
    for number, tensor in zip(
        numbers, tensors, strict=False
    ):  # one tensor holds all numbers of a fixed field
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted) and shape[field.ragged :] == wanted[field.ragged :]
        if not fits or tensor.dtype not in dtypes or tensor.device.type != "cpu":
            raise RecordError(
                f"sample {number}: field {name!r} is {tensor.dtype} {shape} on {tensor.device}, "
                f"expected {encoded.dtype} {wanted} on the CPU"
            )


def environment(settings: WriterSettings) -> dict[str, str]:
    """What may change the last bits of a record: versions, hardware, threads, precision of products."""
    device = settings.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": device
        if not device.startswith("cuda")
        else f"{device} {torch.cuda.get_device_name(device)}",
        "threads": str(torch.get_num_threads()),
        "float32": settings.float32,
    }


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
