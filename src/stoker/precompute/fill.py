"""Read samples out of a source into arrays, with every error wrapped by sample and stage.

Used by reader processes, and by the calling process when there are none: both read the same way. This module
does not import torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DecodeError, RecordError
from stoker.precompute.layout import PIECE_BYTES, time_length
from stoker.precompute.unchanged import ChangedError, Reads
from stoker.schema import FLOATS, Sample, Schema, check_sample
from stoker.sources.protocol import Locating, ReadsMany

_ERROR_CHARS = 600
CHANGED = "changed"
"""The stage of a fault that is no sample's: see `SampleFault.stage`."""


class Pulse(Protocol):
    """Where progress is written; a `BeatPage` in a reader."""

    def write(self, stage: str, number: int = -1, *, done: int = 0) -> None:
        """A new stage or sample begins."""
        ...

    def progress(self, done: int) -> None:
        """The sample in hand is `done` bytes further."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFault:
    """Why one sample could not be had."""

    number: int
    """Sample number."""
    stage: str
    """`open`, `read`, `decode`, `check` or `encode`; `CHANGED`: the source is another, the run must end."""
    error: str
    """Type and message, at most 600 characters; the `Ledger` adds where the sample is."""
    kind: Literal["sample", "transient"]
    """`sample`: the sample's own fault; `transient`: may pass (input/output, memory, a hang)."""
    retry: bool
    """Whether another try within the run makes sense."""


def passing_fault(number: int, stage: str, error: str) -> SampleFault:
    """A failure that another reader, or another day, may not meet."""
    return SampleFault(number=number, stage=stage, error=error[:600], kind="transient", retry=True)


class SampleFaultError(Exception):
    """Carries a `SampleFault` to whoever decides about it; never leaves this package."""

    def __init__(self, fault: SampleFault) -> None:
        super().__init__(fault.error)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNames:
    """Which part a sample number belongs to, and how to name it in an error."""

    offsets: Sequence[int]
    """First number of each part, ascending."""
    names: Sequence[str]
    """Path or name of each part."""
    source: Locating | None = None
    """What knows more of a sample than its part."""

    def index(self, number: int) -> int:
        """The part that holds `number`."""
        return part_index(self.offsets, number)

    def name(self, number: int) -> str:
        """The name of the part that holds `number`."""
        return self.names[self.index(number)]

    def place(self, number: int) -> str:
        """Where a user finds a sample: as the source says, else its part."""
        return self.name(number) if self.source is None else self.source.locate(number)


def part_index(offsets: Sequence[int], number: int) -> int:
    """The part that holds `number`, of parts with these first numbers."""
    return bisect_right(offsets, number) - 1


class SampleReader:
    """One source, read sample by sample; says where it stands and checks what comes."""

    def __init__(
        self, source: Reads, schema: Schema, offsets: Sequence[int], *, pulse: Pulse, nan: str
    ) -> None:
        self._source = source
        self._schema = schema
        self._offsets = offsets
        self._pulse = pulse
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
        for name, array in self.sample(number).items():
            arrays[name][member] = array

    def fill_many(self, arrays: Sample, numbers: range) -> bool:
        """Put samples `numbers` into the first rows of `arrays` by one read; False: do it one by one."""
        if self._piece or len(numbers) < 2 or not isinstance(self._source, ReadsMany):
            return False
        self._pulse.write("read", numbers.start)
        try:
            samples = self._source.read_many(numbers)
        except Exception:  # noqa: BLE001  met again, and named, one by one
            return False
        if samples is None or not self._sound(samples, len(numbers)):
            return False
        for name, array in samples.items():
            arrays[name][: len(numbers)] = array
        self._pulse.progress(sum(array.nbytes for array in samples.values()))
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
        """A sample as (values, first row along time), in one piece unless it is long.

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
        part = part_index(self._offsets, number)
        stage = "read" if part in self._opened else "open"
        self._pulse.write(stage, number)
        try:
            sample = self._source.read(number) if start is None else self._source.read(number, start, stop)
        except Exception as error:
            raise self._fault(number, stage, error) from error
        self._opened.add(part)
        try:
            check_sample(sample, self._expected(start, stop), where=f"sample {number}")
            if self._reject_nan:
                _reject_nan(sample, self._schema)
        except RecordError as error:
            raise self._fault(number, "check", error) from error
        self._pulse.progress(sum(array.nbytes for array in sample.values()))
        return sample

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
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ChangedError):
            stage, text = CHANGED, str(error)
        elif isinstance(error, DecodeError):
            stage = "decode"
        return SampleFaultError(
            SampleFault(
                number=number,
                stage=stage,
                error=text[:_ERROR_CHARS],
                kind="transient" if passing else "sample",
                retry=stage not in ("decode", "check"),
            )
        )


def _from_the_system(error: BaseException) -> bool:
    """Whether storage failed behind an error: sources wrap what the system said, with the path."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return True
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
    reader: SampleReader, arrays: Sample, numbers: range, absent: Callable[[int], bool]
) -> list[SampleFault]:
    """Fill all rows of `arrays` with `numbers`; members absent, failing or past the end become zeros.

    Returns:
        What went wrong, one entry for each sample that could not be had.
    """
    faults: list[SampleFault] = []
    rows = next(iter(arrays.values())).shape[0] if arrays else 0
    at_once = not any(map(absent, numbers)) and reader.fill_many(arrays, numbers)
    for member in range(len(numbers) if at_once else 0, rows):
        if member >= len(numbers) or absent(numbers[member]):
            zero(arrays, member)
            continue
        try:
            reader.fill(arrays, member, numbers[member])
        except SampleFaultError as error:
            faults.append(error.fault)
            zero(arrays, member)
    return faults


def _reject_nan(sample: Sample, schema: Schema) -> None:
    for name, array in sample.items():
        if schema[name].dtype in FLOATS and not all_finite(array, schema[name].dtype):
            raise RecordError(f"field {name!r} holds NaN or infinity")


def all_finite(array: NDArray[Any], dtype: str) -> bool:
    """Whether a float array holds neither NaN nor infinity; bfloat16 comes as its bits.

    >>> all_finite(np.array([1.0, np.nan], np.float32), "float32")
    False
    >>> all_finite(np.array([0x7F80], np.uint16), "bfloat16")
    False
    """
    if dtype == "bfloat16":
        return not bool(((array & 0x7F80) == 0x7F80).any())
    # A sum meets every element without a temporary; it overflows rarely, and then the slow look decides.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=np.float64 if dtype == "float64" else np.float32)):
            return True
    return bool(np.isfinite(array).all())
