"""Read samples into arrays; and the worker process, a child that does so.

Reading in the calling process goes through the same classes, so that both read the same way, with every error
wrapped by sample and stage.

The worker unpickles the source that comes over its private socketpair, reads the batches it is given into
free slots of its arena, and says so. It decides nothing: retries, quarantine and timeouts are the caller's.
It ends at end of file on the socket, or with its parent. Torch is imported only if unpickling the source
imports it, so this module does not import torch.
"""

from __future__ import annotations

import os
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.errors import DecodeError, RecordError, SourceError, StokerError
from stoker.precompute.arena import PIECE_BYTES, Arena, layout_from_json, time_length
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.processes.entry import Connection, use_one_thread
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.runtime.processes.wire import Frame, WorkerChannel
from stoker.schema import FLOATS, Sample, Schema, check_sample
from stoker.sources.files import confine_sources, stamp_of
from stoker.sources.protocol import BatchSource, FileRef, LocatableSource, RowSource

if TYPE_CHECKING:
    from stoker.store.recipe import FileDigest

T = TypeVar("T")

# ----------------------------------------------------------------------------------------------------------
# Whether the files of a sample are still those that were digested: looked at after each read.
#
# A file that changes while it is encoded would put samples of two versions under one fingerprint. After
# each read the files of the sample's part are compared, by size, times and inode, with what they were when
# the recipe was made; a source whose samples each come from a few files of a large part names these
# (`sample_files`). Where that differs the content is digested again: an equal digest is noted and work goes
# on (a `touch`, a file put back), another one ends the run, and nothing that was read since is stored.
# Looking costs a stat for each file. This module does not import torch unless a file changed.


FEW = 8
"""Up to so many files of a part are all looked at after a read, whatever the source says."""
LOOKED_AT = 64
"""Up to so many are where the source names none; of a larger part each read looks at the next `FEW`."""


class SampleSource(Protocol):
    """The part of a `Source` that reads."""

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """As `Source.read`."""
        ...


class ChangedError(SourceError):
    """A file is not what was digested any more."""


class DigestedFile(NamedTuple):
    """One file as the recipe knows it: plain values, quick to send, and taken by a worker without torch."""

    name: str
    path: str
    bytes: int
    digest: str
    sampled: bool
    stamp: tuple[int, ...]


class ChangeGuard:
    """Reads from a source as long as its files are those of the recipe.

    Args:
        source: What reads.
        files: The files of each part.
        offsets: First number of each part.
    """

    def __init__(
        self, source: SampleSource, files: Sequence[Sequence[DigestedFile]], offsets: Sequence[int]
    ) -> None:
        self._source = source
        self._files = [list(own) for own in files]
        self._offsets = list(offsets)
        self._turns = [0] * len(self._files)
        # Beyond the protocol: without it each read would look at many files, and seldom at its own.
        self._names_of: Callable[[int], Sequence[str]] | None = getattr(source, "sample_files", None)
        self._rows = source if isinstance(source, RowSource) else None
        self._places: dict[int, dict[str, int]] = {}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """As `Source.read`.

        Raises:
            ChangedError: A file of the sample's part has other content than when it was digested.
        """
        whole = start is None and stop is None
        return self._looked(
            index, lambda: self._source.read(index) if whole else self._source.read(index, start, stop)
        )

    def read_into(self, index: int, rows: Sample) -> Sample | None:
        """As `RowSource.read_into`, of any source."""
        source = self._rows
        if source is None:
            return self.read(index)
        return self._looked(index, lambda: source.read_into(index, rows))

    def _looked(self, index: int, read: Callable[[], T]) -> T:
        try:
            sample = read()
        except Exception:
            self._look(index)  # half-written files raise anything; that they changed is the better reason
            raise
        self._look(index)
        return sample

    def read_many(self, numbers: range) -> Sample | None:
        """As `BatchSource.read_many`; None where the source has no such way, or files to look at."""
        if any(self._files) or not isinstance(self._source, BatchSource):
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
                if name in known:  # what is missing has no digest, and its sample fails on its own
                    self._compare(files, known[name], number)
            return
        first, count = 0, len(files)
        if count > LOOKED_AT:
            first, count = self._turns[part], FEW
            self._turns[part] = (first + FEW) % len(files)
        for place in range(first, first + count):
            self._compare(files, place % len(files), number)

    @staticmethod
    def _compare(files: list[DigestedFile], place: int, number: int) -> None:
        known = files[place]
        path = known.path
        try:
            status = os.stat(path)  # noqa: PTH116 - of each file at each read, where a Path costs as much again
        except OSError:
            return  # gone by name: what was read came from the file that was open, and the next read will say
        if stamp_of(status) == known.stamp:
            return
        from stoker.store.recipe import digest_file

        try:
            now = digest_file(FileRef(name=known.name, path=Path(path)), sampled=known.sampled)
        except SourceError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it cannot be read, which says nothing about its content
            raise ChangedError(
                f"{path} is being written while it is encoded, seen when sample {number} was read: "
                f"{error.problem.fact}. Nothing read since then is stored",
                hint=error.problem.hint,
            ) from error
        if (now.bytes, now.digest) != (known.bytes, known.digest):
            raise ChangedError(
                f"{path} changed while it was encoded: {known.bytes:,} bytes before, {now.bytes:,} now, "
                f"with other content, seen when sample {number} was read. Nothing read since then is stored",
                hint="Run again once it is written: changed data gives a cache of its own",
            )
        files[place] = known._replace(stamp=now.stamp)


def load_guard(payload: bytes) -> ChangeGuard:
    """Unpickle the source of a run with its guard, in a worker or in the calling process."""
    return cloudpickle.loads(payload)


def digested_files(
    refs: Sequence[Sequence[FileRef]], known: Sequence[FileDigest]
) -> list[list[DigestedFile]]:
    """Return the files of each part with their digests, which come in the same order."""
    by_name = {digest.name: digest for digest in known}
    return [
        [
            DigestedFile(ref.name, str(ref.path), d.bytes, d.digest, sampled=d.sampled, stamp=d.stamp)
            for ref in own
            if (d := by_name.get(ref.name)) is not None
        ]
        for own in refs
    ]


_ERROR_CHARS = 600
CHANGED = "changed"
"""The stage of a fault that does not belong to a sample: see `SampleFault.stage`."""


class HeartbeatWriter(Protocol):
    """Writer of progress; a `HeartbeatPage` in a worker."""

    def write(self, stage: str, number: int = -1, *, done: int = 0) -> None:
        """Say that a new stage or sample begins."""
        ...

    def progress(self, done: int) -> None:
        """Say that the sample in hand is `done` bytes further."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFault:
    """Error for which one sample could not be read."""

    number: int
    """Sample number."""
    stage: str
    """`open`, `read`, `decode`, `check` or `encode`; `CHANGED`: the source is another, the run must end."""
    error: str
    """Type and message, at most 600 characters; the `SampleLedger` adds where the sample is."""
    kind: Literal["sample", "transient"]
    """`sample`: the sample's own fault; `transient`: may pass (input/output, memory, a hang)."""
    retry: bool
    """True if another try within the run makes sense."""
    hint: str = ""
    """What to do, where `error` does not say so: of `CHANGED`."""


def passing_fault(number: int, stage: str, error: str) -> SampleFault:
    """Return a failure that another worker, or another day, may not meet."""
    return SampleFault(number=number, stage=stage, error=error[:600], kind="transient", retry=True)


class SampleFaultError(Exception):
    """Carries a `SampleFault` to the code that decides about it; never leaves this package."""

    def __init__(self, fault: SampleFault) -> None:
        super().__init__(fault.error)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNames:
    """Map from a sample index to its part, and to its name in errors."""

    offsets: Sequence[int]
    """First number of each part, ascending."""
    names: Sequence[str]
    """Path or name of each part."""
    source: LocatableSource | None = None
    """What knows more of a sample than its part."""

    def index(self, number: int) -> int:
        """Return the part that holds `number`."""
        return part_index(self.offsets, number)

    def name(self, number: int) -> str:
        """Return the name of the part that holds `number`."""
        return self.names[self.index(number)]

    def place(self, number: int) -> str:
        """Return where a user finds a sample: as the source says, else its part."""
        return self.name(number) if self.source is None else self.source.locate(number)


def part_index(offsets: Sequence[int], number: int) -> int:
    """Return the part that holds `number`, of parts with these first numbers."""
    return bisect_right(offsets, number) - 1


class SampleReader:
    """One source, read sample by sample; says where it stands and checks what comes."""

    def __init__(
        self,
        source: ChangeGuard,
        schema: Schema,
        offsets: Sequence[int],
        *,
        heartbeat: HeartbeatWriter,
        nan: str,
    ) -> None:
        self._source = source
        self._schema = schema
        self._offsets = offsets
        self._heartbeat = heartbeat
        self._reject_nan = nan == "reject"
        self._opened: set[int] = set()
        self._length = time_length(schema)
        row_bytes = sum(field.row_bytes for field in schema.values() if field.time)
        whole_bytes = row_bytes * self._length
        self._piece = max(1, PIECE_BYTES // max(row_bytes, 1)) if whole_bytes > PIECE_BYTES else 0

    def fill(self, arrays: Sample, member: int, number: int) -> None:
        """Put sample `number` into row `member` of `arrays`, in pieces along time when it is long.

        Raises:
            SampleFaultError: The sample could not be read, or is not what the schema says.
        """
        if self._piece:
            for start in range(0, self._length, self._piece):
                stop = min(start + self._piece, self._length)
                self.fill_steps(arrays, (member, start), number, (start, stop))
            return
        rows = {name: array[member, ...] for name, array in arrays.items()}
        sample = self._read(number, lambda: self._source.read_into(number, rows))
        if sample is None:
            self._accept(number, rows)
            return
        self._check(number, sample, self._schema)
        for name, array in sample.items():
            arrays[name][member] = array

    def fill_many(self, arrays: Sample, numbers: range) -> bool:
        """Put samples `numbers` into the first rows of `arrays` by one read; False: do it one by one."""
        if self._piece or len(numbers) < 2:
            return False
        self._heartbeat.write("read", numbers.start)
        try:
            samples = self._source.read_many(numbers)
        except Exception:  # noqa: BLE001  met again, and named, one by one
            return False
        if samples is None or not self._sound(samples, len(numbers)):
            return False
        for name, array in samples.items():
            arrays[name][: len(numbers)] = array
        self._heartbeat.progress(sum(array.nbytes for array in samples.values()))
        return True

    def _sound(self, samples: Sample, count: int) -> bool:
        whole = {name: replace(spec, shape=(count, *spec.shape)) for name, spec in self._schema.items()}
        try:
            check_sample(samples, whole, where="samples")
            if self._reject_nan:
                _reject_nan(samples, self._schema)
        except RecordError:
            return False
        return True

    def fill_steps(self, arrays: Sample, place: tuple[int, int], number: int, steps: tuple[int, int]) -> None:
        """Put time steps `steps` of sample `number` at `place` (member, first row) of `arrays`.

        Raises:
            SampleFaultError: As for `fill`.
        """
        member, row = place
        for name, array in self.sample(number, *steps).items():
            if self._schema[name].time:
                arrays[name][member, row : row + array.shape[0]] = array
            else:
                arrays[name][member] = array

    def pieces(self, number: int) -> Iterator[tuple[Sample, int]]:
        """Return a sample as (values, first row along time), in one piece unless it is long.

        Fields without time come with the first piece only.

        Raises:
            SampleFaultError: As for `fill`.
        """
        if not self._piece:
            yield self.sample(number), 0
            return
        for start in range(0, self._length, self._piece):
            sample = self.sample(number, start, min(start + self._piece, self._length))
            yield {n: a for n, a in sample.items() if self._schema[n].time or start == 0}, start

    def sample(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read and check a sample, or its steps `start:stop`.

        Raises:
            SampleFaultError: As for `fill`.
        """
        source = self._source
        sample = self._read(
            number, lambda: source.read(number) if start is None else source.read(number, start, stop)
        )
        self._check(number, sample, self._expected(start, stop))
        return sample

    def _read(self, number: int, read: Callable[[], T]) -> T:
        part = part_index(self._offsets, number)
        stage = "read" if part in self._opened else "open"
        self._heartbeat.write(stage, number)
        try:
            found = read()
        except Exception as error:
            raise self._fault(number, stage, error) from error
        self._opened.add(part)
        return found

    def _check(self, number: int, sample: Sample, schema: Schema) -> None:
        try:
            check_sample(sample, schema, where=f"sample {number}")
        except RecordError as error:
            raise self._fault(number, "check", error) from error
        self._accept(number, sample)

    def _accept(self, number: int, sample: Sample) -> None:
        """Note that a sample is there, unless it has values that are not wanted."""
        try:
            if self._reject_nan:
                _reject_nan(sample, self._schema)
        except RecordError as error:
            raise self._fault(number, "check", error) from error
        self._heartbeat.progress(sum([array.nbytes for array in sample.values()]))

    def _expected(self, start: int | None, stop: int | None) -> Schema:
        if start is None or stop is None:
            return self._schema
        return {
            name: replace(field, shape=(stop - start, *field.shape[1:]))
            if field.time and not field.ragged
            else field
            for name, field in self._schema.items()
        }

    def _fault(self, number: int, stage: str, error: Exception) -> SampleFaultError:
        passing = isinstance(error, MemoryError) or _from_the_system(error)
        ours = isinstance(error, StokerError) and str(error)
        text, hint = str(error) if ours else f"{type(error).__name__}: {error}", ""
        if isinstance(error, ChangedError):
            stage, text, hint = CHANGED, error.problem.fact, error.problem.hint
        elif isinstance(error, DecodeError):
            stage = "decode"
        return SampleFaultError(
            SampleFault(
                number=number,
                stage=stage,
                error=text[:_ERROR_CHARS],
                kind="transient" if passing else "sample",
                retry=stage not in ("decode", "check"),
                hint=hint,
            )
        )


def _from_the_system(error: BaseException) -> bool:
    """Return True if storage failed behind an error: sources wrap what the system said, with the path.

    What may not be read is not read by waiting.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return not isinstance(cause, PermissionError)
        cause = cause.__cause__
    return False


def zero(arrays: Sample, member: int) -> None:
    """Make a member that is missing all zeros."""
    for array in arrays.values():
        array[member] = 0


def pad_steps(arrays: Sample, schema: Schema, rows: int) -> None:
    """Make the time steps from `rows` on all zeros."""
    for name, array in arrays.items():
        if schema[name].time:
            array[:, rows:] = 0


def fill_group(
    samples: SampleReader, arrays: Sample, numbers: range, absent: Callable[[int], bool]
) -> list[SampleFault]:
    """Fill all rows of `arrays` with `numbers`; members absent, failing or past the end become zeros.

    Returns:
        What went wrong, one entry for each sample that could not be had.
    """
    return [fault for fault in fill_rows(samples, arrays, numbers, absent) if fault is not None]


def fill_rows(
    samples: SampleReader, arrays: Sample, numbers: range, absent: Callable[[int], bool]
) -> Iterator[SampleFault | None]:
    """As `fill_group`, a step at a time: yields after each read what went wrong at it, or None."""
    rows = next(iter(arrays.values())).shape[0] if arrays else 0
    at_once = not any(map(absent, numbers)) and samples.fill_many(arrays, numbers)
    for member in range(len(numbers) if at_once else 0, rows):
        if member >= len(numbers) or absent(numbers[member]):
            zero(arrays, member)
            continue
        fault = None
        try:
            samples.fill(arrays, member, numbers[member])
        except SampleFaultError as error:
            fault = error.fault
            zero(arrays, member)
        yield fault


def _reject_nan(sample: Sample, schema: Schema) -> None:
    for name, array in sample.items():
        if schema[name].dtype in FLOATS and not all_finite(array, schema[name].dtype):
            raise RecordError(f"field {name!r} holds NaN or infinity")


_FEW_VALUES = 16_384
"""Of so many, a temporary costs less than the error state that a sum needs."""


def all_finite(array: NDArray[Any], dtype: str) -> bool:
    """Return True if a float array holds neither NaN nor infinity; bfloat16 comes as its bits.

    >>> all_finite(np.array([1.0, np.nan], np.float32), "float32")
    False
    >>> all_finite(np.array([0x7F80], np.uint16), "bfloat16")
    False
    """
    if dtype == "bfloat16":
        return not bool(((array & 0x7F80) == 0x7F80).any())
    if array.size <= _FEW_VALUES:
        return bool(np.isfinite(array).all())
    # A sum meets every element without a temporary; it overflows rarely, and then the slow look decides.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=np.float64 if dtype == "float64" else np.float32)):
            return True
    return bool(np.isfinite(array).all())


# ----------------------------------------------------------------------------------------------------------
# The worker process.


class SlotFiller:
    """Takes work and room from the socket, and fills slots."""

    def __init__(self, channel: WorkerChannel, heartbeat: HeartbeatPage, arena: Arena) -> None:
        self._channel = channel
        self._heartbeat = heartbeat
        self._arena = arena
        self._layout = arena.layout
        self._free = deque(range(arena.layout.slots))
        self._work: deque[list[Any]] = deque()

    def run(self, samples: SampleReader) -> None:
        """Work until the caller closes its end."""
        while self._wait_for(self._work):
            key, first, count, absent = self._work.popleft()
            numbers = range(first, first + count)
            if self._layout.mode == "group":
                going = self._send_group(samples, key, numbers, frozenset(absent))
            elif self._layout.mode == "steps":
                going = self._send_steps(samples, key, first)
            else:
                going = self._send_pieces(samples, key, numbers, frozenset(absent))
            if not going:
                return

    def _wait_for(self, queue: deque[Any]) -> bool:
        """Take frames until `queue` holds something; False once the caller is gone."""
        if not queue:
            self._heartbeat.write("wait")
        while not queue:
            frame = self._channel.next()
            if frame is None:
                return False
            if frame["kind"] == "work":
                self._work.extend(frame["groups"])
            else:
                self._free.append(frame["slot"])
        return True

    def _send(self, frame: Frame) -> None:
        self._heartbeat.write("wait")  # a full socket is the caller's pace, not a read that hangs
        self._channel.send(frame)

    def _send_group(self, samples: SampleReader, key: int, numbers: range, absent: frozenset[int]) -> bool:
        if not self._wait_for(self._free):
            return False
        slot = self._free.popleft()
        faults = fill_group(samples, self._arena.arrays(slot), numbers, absent.__contains__)
        self._send(
            {"kind": "batch", "key": key, "slot": slot, "start": 0, "last": True, "faults": _plain(faults)}
        )
        return True

    def _send_steps(self, samples: SampleReader, key: int, number: int) -> bool:
        length = max(field.shape[0] for field in self._layout.schema.values() if field.time)
        for start in range(0, length, self._layout.steps):
            if not self._wait_for(self._free):
                return False
            slot = self._free.popleft()
            stop = min(start + self._layout.steps, length)
            arrays = self._arena.arrays(slot)
            faults: list[SampleFault] = []
            try:
                samples.fill_steps(arrays, (0, 0), number, (start, stop))
                pad_steps(arrays, self._layout.schema, stop - start)
            except SampleFaultError as error:
                faults = [error.fault]
            last = bool(faults) or stop == length
            self._send(
                {
                    "kind": "batch",
                    "key": key,
                    "slot": slot,
                    "start": start,
                    "last": last,
                    "faults": _plain(faults),
                }
            )
            if faults:
                break
        return True

    def _send_pieces(self, samples: SampleReader, key: int, numbers: range, absent: frozenset[int]) -> bool:
        """Send members one after another as runs of bytes; then an empty piece that closes the group."""
        faults: list[SampleFault] = []
        for member, number in enumerate(numbers):
            if number in absent:
                continue
            try:
                for sample, row in samples.pieces(number):
                    if not self._send_sample(key, member, sample, row):
                        return False
            except SampleFaultError as error:
                faults.append(error.fault)
        self._send(
            {"kind": "piece", "key": key, "slot": -1, "chunks": [], "last": True, "faults": _plain(faults)}
        )
        return True

    def _send_sample(self, key: int, member: int, sample: Sample, row: int) -> bool:
        """Send one sample, or rows of it from `row` on, through as many slots as it takes."""
        for name, array in sample.items():
            field = self._layout.schema[name]
            data: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
            base = row * field.row_bytes if field.time and not field.ragged else 0
            length = array.shape[0] if field.ragged else -1
            for begin in range(0, max(len(data), 1), self._layout.slot_bytes):
                if not self._wait_for(self._free):
                    return False
                slot = self._free.popleft()
                part = data[begin : begin + self._layout.slot_bytes]
                np.frombuffer(self._arena.slot(slot), np.uint8)[: len(part)] = part
                chunk = [name, member, base + begin, len(part), length]
                self._send(
                    {
                        "kind": "piece",
                        "key": key,
                        "slot": slot,
                        "chunks": [chunk],
                        "last": False,
                        "faults": [],
                    }
                )
        return True


def _plain(faults: list[SampleFault]) -> list[dict[str, Any]]:
    return [asdict(fault) for fault in faults]


def serve(connection: Connection) -> int:
    """Run one worker, until the caller is gone.

    Torch, whenever the source imports it, begins with one thread, as `InProcessReader` reads: workers share
    the cores with the encoder. Numpy has read its own settings by now and keeps its threads.
    """
    use_one_thread()
    keep_freed_memory()  # fresh pages for each sample may cost more than decoding it
    channel, heartbeat = WorkerChannel(connection.socket), connection.heartbeat
    (arena_fd,) = connection.shared
    try:
        start = channel.next()
        if start is None:
            return 0
        heartbeat.write("start")
        confine_sources(start["confined"])
        layout = layout_from_json(start["layout"])
        source = load_guard(start["payload"])
        samples = SampleReader(source, layout.schema, start["offsets"], heartbeat=heartbeat, nan=start["nan"])
    except Exception:  # noqa: BLE001  a process edge: the caller raises this with the traceback
        channel.send({"kind": "fatal", "error": traceback.format_exc()})
        return 1
    channel.send({"kind": "ready"})
    try:
        SlotFiller(channel, heartbeat, Arena(arena_fd, layout)).run(samples)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the caller is gone, and so is the reason to read
    return 0
