"""Encode batches of fixed shape, so that a record's bits depend on its sample and nothing else.

Kernels may round otherwise for another batch size. So every call of the encoder has the shape that the recipe
names. Short encode batches are padded with zeros, and missing samples are zeros. Long samples are cut into
chunks of equal length, of which the last is padded. In return an encoder promises that a sample does not
depend on its neighbors. So a sample may be zeros today, because it is quarantined, and real after a retry:
the other records of the encode batch stay as they were.

Ragged samples are encoded one by one, or padded, with others of their padded length (`by_length.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.protocol import Encoder
from stoker.errors import DeviceError, EncoderError, ResourceError, StalledError
from stoker.plan.resources import is_out_of_memory
from stoker.precompute.arena import LoadedBatch, ReusedMemory
from stoker.precompute.by_length import pad_together
from stoker.precompute.worker import SampleFault
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.runtime.signals import guard_page
from stoker.schema import FLOATS, LENGTHS_SUFFIX, SHAPE_SUFFIX, Schema, with_lengths
from stoker.store.cache import Cache
from stoker.store.recipe import Recipe
from stoker.store.values import view_bytes

# ----------------------------------------------------------------------------------------------------------
# Whether an encoder draws random numbers: a cache would keep one draw, and another fill another.


RANDOM_ENCODER = (
    "the encoder gives other values when it is called again on the same samples: field {name!r} changes"
    "{far}, since the encoder draws random numbers, or keeps something from one call to the next; a cache "
    "would keep one draw, and each fill another"
)
FIXED_ENCODER = (
    "Return what does not change, as the mean in place of a sample (`vae.encode(x).latent_dist.mean`), or "
    "seed the generator at the start of each call (`torch.manual_seed(0)`)"
)

TOLERANCE = 1e-4
"""Relative to the largest value: what another machine, library or order of summation may change. As much as
`check_encoder` allows for a sample's neighbors."""


def random_states(device: torch.device) -> tuple[object, ...]:
    """Return the global random states that code on `device` draws from, to be compared."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        *(state.numpy().tobytes() for state in states),
    )


def refuse_random(first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, exact: bool) -> None:
    """Compare what two calls gave for the same samples.

    Args:
        first, second: Each field `(n, *shape)` on the CPU.
        exact: Bit for bit; otherwise floats may differ by rounding. Encoders may sum in no fixed order also
            on a CPU: torch's `index_put_(accumulate=True)` on several threads never gives the same bits.

    Raises:
        EncoderError: A field differs by more.
    """
    for name, tensor in first.items():
        other = second.get(name)
        if other is not None and other.shape == tensor.shape and _bytes(tensor) == _bytes(other):
            continue
        far = float("inf") if other is None else distance(tensor, other)
        floats = tensor.is_floating_point() and not exact
        if not floats or far > max(TOLERANCE, 2 * torch.finfo(tensor.dtype).eps):
            by = f" by {far:.2g} of its largest value" if 0 < far < float("inf") else ""
            raise EncoderError(RANDOM_ENCODER.format(name=name, far=by), hint=FIXED_ENCODER)


def distance(stored: Tensor, fresh: Tensor) -> float:
    """Return the largest difference as a fraction of the largest value of `fresh`; inf for another shape.

    >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    0.2
    """
    if stored.shape != fresh.shape:
        return float("inf")
    if not fresh.numel():
        return 0.0
    a, b = stored.double(), fresh.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    far = (a - b).abs()[~same].nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(far.max()) / max(float(b.abs().nan_to_num(0.0).max()), 1e-300)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ----------------------------------------------------------------------------------------------------------
# Where the encoder stands: for the watchdog, the progress display, and a guardian if there is one.


@dataclass(slots=True)
class EncodeClock:
    """Time inside the encoder."""

    limit_s: float = 0.0
    """Seconds within which the encoder, or the loop around it, must move; 0: not bounded."""
    lanes: int = 1
    """Encoders that work at the same time."""
    seconds: float = 0.0
    calls: int = 0
    batches: int = 0
    """Batches that were encoded."""
    begun: float | None = None
    """`time.monotonic()` when the present call began, or None."""
    numbers: range = field(default_factory=lambda: range(0))
    """The group in hand."""
    lost: bool = False
    """The device cannot be used again in this process; the last thing a guardian is told."""
    given_up: bool = False
    """The caller no longer waits for the encoder: no further call of it may begin."""
    page: HeartbeatPage | None = field(default_factory=guard_page)
    """Read by the guardian or owner that would kill this process. None: there is no such process, or another
    clock of this process has the page, which has room for what one thread does."""

    @contextmanager
    def starting(self, limit_s: float) -> Generator[None]:
        """Count a trial of the encoder, or its way to the device, which may hang as a call of it may."""
        self.begun = time.monotonic()
        if self.page is not None:
            self.page.write("start", limit_s=limit_s)
        try:
            yield
        finally:
            self.begun = None
            self.alive(bounded=False)

    def begin(self) -> None:
        """Note that a call of the encoder begins.

        Raises:
            StalledError: The caller no longer waits for it.
        """
        if self.given_up:
            raise StalledError("the call was given up")
        self.begun = time.monotonic()
        self._tell("encode")

    def end(self) -> None:
        """Note that it has returned or raised."""
        if self.begun is not None:
            self.seconds += time.monotonic() - self.begun
        self.calls += 1
        self.begun = None
        self._tell("wait", groups=1)

    def alive(self, *, bounded: bool) -> None:
        """Note a round of the run's loop; `bounded`: the next will take no longer than `limit_s`."""
        self._tell("wait", bounded=bounded)

    def give_up(self) -> None:
        """Note that the caller no longer waits: make no further call, and do not move the encoder."""
        self.given_up = True

    def lose_device(self) -> None:
        """Note that the device cannot be used again in this process."""
        self._tell("lost")
        self.lost = True

    def _tell(self, stage: str, *, groups: int = 0, bounded: bool = True) -> None:
        if self.page is not None and not self.lost:
            number = self.numbers.start if stage != "wait" else -1
            limit_s = self.limit_s if bounded else 0.0
            self.page.write(stage, number, done=groups, limit_s=limit_s)


# ----------------------------------------------------------------------------------------------------------
# Encode a batch.


Batch: TypeAlias = "dict[str, Tensor]"

_FATAL = (EncoderError, ResourceError, DeviceError, StalledError)
"""Errors that no other sample and no smaller group would avoid."""
_BITS = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRecords:
    """Places of the records of recognized samples in another cache."""

    origin: Cache
    places: NDArray[np.int64]
    """Shard and row of each, `(n, 2)`."""
    moved: list[int]
    """Numbers of those that have another place in their group there."""
    lost: Callable[[NDArray[np.uint64]], object]
    """Told the digests of samples whose record proved damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecords:
    """Records of one group, ready for the writer."""

    numbers: list[int]
    """Sample numbers, ascending."""
    records: dict[str, Tensor | list[Tensor]] = dataclasses.field(default_factory=dict[str, Any])
    """`(len(numbers), *shape)` on the CPU in the encoded dtype; a list of tensors for a ragged field."""
    marked: list[int] = dataclasses.field(default_factory=list[int])
    """Those encoded in a smaller group than the recipe names, for lack of memory."""
    size_bytes: int = 0
    """Bytes of the tensors."""
    contents: NDArray[np.uint64] | None = None
    """Digests of the samples, `(len(numbers), 2)`."""
    copied: CopiedRecords | None = None
    """The records are those of another cache, and nothing was encoded."""
    cache: int = 0
    """Which cache they belong to, where several are filled together."""


_COMPARED = 16
"""Samples of the first batch that are encoded twice more; a coin flip for each is missed once in 65,536."""


class BatchEncoder:
    """Applies an encoder (or none: samples are stored as they are) to batches."""

    def __init__(
        self,
        encoder: Encoder | None,
        recipe: Recipe,
        schema: Schema,
        *,
        device: str,
        nan: str,
        clock: EncodeClock | None = None,
    ) -> None:
        self._encoder = encoder
        self._recipe = recipe
        self._lengths = recipe.encode_batch.lengths
        self._sample_schema = with_lengths(schema) if self._lengths else schema
        self._ragged = [name for name, field in schema.items() if field.ragged]
        self._length_names = {name + LENGTHS_SUFFIX for name in self._ragged} if self._lengths else set[str]()
        self._record_schema = recipe.encoded
        self._steps = recipe.encode_batch.steps
        self._device = torch.device(device)
        self._reject_nan = nan == "reject"
        self._partials: dict[int, Batch] = {}
        self._memory = ReusedMemory()
        self._succeeded = False
        self.clock = clock or EncodeClock()
        self.compare_first = False
        """On a CPU, encode the first samples twice and refuse an encoder whose results differ."""

    def encode(
        self, loaded: LoadedBatch, wanted: list[int], fault: Callable[[SampleFault], object]
    ) -> EncodedRecords | None:
        """Encode a loaded batch.

        Args:
            loaded: Arrays of one group, or a stretch of one.
            wanted: Members to keep.
            fault: Told of each wanted member that the encoder cannot take.

        Returns:
            The records of the wanted members that were encoded; None while a long sample is not yet whole,
            and where it is over before its end.

        Raises:
            EncoderError: The encoder fails on any input, or returns what it did not declare.
            ResourceError: There is no memory for a single sample.
        """
        refused: set[int] = set()

        def refuse(reason: SampleFault) -> None:
            refused.add(reason.number)
            fault(reason)

        self.clock.numbers = loaded.span
        if loaded.over or not wanted:
            self.forget(loaded.work.key)
            return None
        if self._lengths and not loaded.members:
            loaded = pad_together([loaded], self._recipe, self._sample_schema)
        batch = {
            name: _tensor(array, self._sample_schema[name].dtype) for name, array in loaded.arrays.items()
        }
        marked = False
        if self._encoder is None:
            output = batch
        elif self._steps is not None:
            output = self._encode_steps(batch, loaded, refuse)
        else:
            output, marked = self._encode_group(batch, loaded, refuse)
        if output is None:
            return None
        self.clock.batches += len(loaded.tasks) if self._encoder is not None else 0
        kept = [number for number in wanted if number not in refused]
        return self._select(output, loaded, kept, fault, marked=marked)

    def forget(self, key: int) -> None:
        """Let go of what is there of the record of a long sample."""
        self._partials.pop(key, None)

    def _encode_group(
        self, batch: Batch, loaded: LoadedBatch, fault: Callable[[SampleFault], object]
    ) -> tuple[Batch | None, bool]:
        try:
            return self._call_with_halving(batch)
        except _FATAL:
            raise
        except Exception as error:  # noqa: BLE001  users' code, and one sample must not end a run
            return self._without_culprits(batch, loaded, error, fault)

    def _without_culprits(
        self, batch: Batch, loaded: LoadedBatch, error: Exception, fault: Callable[[SampleFault], object]
    ) -> tuple[Batch | None, bool]:
        """Report the members on which the encoder fails, and encode the others with zeros in their place."""
        nothing = {name: self._zeros(name, value) for name, value in batch.items()}
        if self._fails(nothing) and not self._succeeded:
            raise EncoderError(
                f"the encoder failed on samples {_span(loaded.span)} and fails on zeros of the same "
                f"shapes as well, so it is not the data: {type(error).__name__}: {error}"
            ) from error
        rest = {name: value.clone() for name, value in batch.items()}
        culprits: list[int] = []
        members = {member: number for member, number in enumerate(loaded.numbers) if number >= 0}
        for member, number in members.items():
            alone = {name: value.clone() for name, value in nothing.items()}
            for name, value in alone.items():
                value[member] = batch[name][member]
            if self._fails(alone):
                culprits.append(number)
                for name, value in rest.items():
                    value[member] = nothing[name][member]
        if not culprits or len(culprits) == len(members) or self._fails(rest):
            culprits = [*members.values()]
        for number in culprits:
            fault(_encoder_fault(number, f"{type(error).__name__}: {error}"))
        if len(culprits) == len(members):
            return None, False
        return self._call_with_halving(rest)

    def _zeros(self, name: str, value: Tensor) -> Tensor:
        """Return zeros of the same shape; sizes of axes stay, since rows are as many as they say."""
        if name in self._length_names:
            return torch.ones_like(value)
        folded = self._sample_schema.get(name.removesuffix(SHAPE_SUFFIX))
        sizes = name.endswith(SHAPE_SUFFIX) and folded is not None and folded.folded
        return value.clone() if sizes else torch.zeros_like(value)

    def _fails(self, batch: Batch) -> bool:
        try:
            self._call_with_halving(batch)
        except _FATAL:
            raise
        except Exception:  # noqa: BLE001  the question is whether it raises
            return True
        return False

    def _call_with_halving(self, batch: Batch) -> tuple[Batch, bool]:
        """Encode; out of memory: with an empty cache, then in halves. True if it took halves."""
        last = ""  # the text alone: an error keeps its frames, and so the batch that had no room, alive
        for _ in range(2):
            try:
                return self._call(batch), False
            except (RuntimeError, MemoryError) as error:
                if _device_lost(error):
                    self.clock.lose_device()
                    raise DeviceError(
                        f"the encoder lost its device at samples {_span(self.clock.numbers)}: {error}",
                        hint="No process can use the device again after that; a new one resumes with what "
                        "is stored",
                    ) from error
                if not is_out_of_memory(error):
                    raise
                last = str(error)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        rows = next(iter(batch.values())).shape[0]
        if rows < 2:
            raise ResourceError(
                f"the encoder has no memory on {self._device} for a single sample: {last}",
                hint="Free memory there, choose another device, or give the encoder a group with fewer steps",
            )
        halves = [
            {n: v[: rows // 2] for n, v in batch.items()},
            {n: v[rows // 2 :] for n, v in batch.items()},
        ]
        parts = [self._call_with_halving(half)[0] for half in halves]
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}, True

    def _call(self, batch: Batch) -> Batch:
        """Call the encoder once: to its device, encode, back to the CPU, checked."""
        first = not self._succeeded
        before = random_states(self._device) if first else None
        again = {name: _alike(value) for name, value in batch.items()} if first else {}
        output = self._output(batch)  # which may change the batch in place
        self._check(output, next(iter(batch.values())).shape[0])
        if first:
            self._refuse_random(again, output, drew=random_states(self._device) != before)
        self._succeeded = True
        return output

    def _output(self, batch: Batch) -> Batch:
        assert self._encoder is not None
        self.clock.begin()
        try:
            # The current device, for kernels of the encoder's own.
            device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
            with torch.inference_mode(), device:
                moved = {name: value.to(self._device) for name, value in batch.items()}
                output = {name: value.cpu() for name, value in self._encoder.encode(moved).items()}
        finally:
            self.clock.end()
        return self._with_lengths(output, batch) if self._lengths else output

    def _with_lengths(self, output: Batch, batch: Batch) -> Batch:
        """Return padded output with the lengths of each ragged field, by the rule of `Encoder.encode`."""
        found = {name: value for name, value in output.items() if name not in self._length_names}
        for name, spec in self._record_schema.items():
            if spec.ragged:
                of = name if name in self._ragged else self._ragged[0]
                given = output.get(name + LENGTHS_SUFFIX)
                found[name + LENGTHS_SUFFIX] = batch[of + LENGTHS_SUFFIX] if given is None else given
        return found

    def _refuse_random(self, batch: Batch, output: Batch, *, drew: bool) -> None:
        """Call an encoder again where it drew from global generators, or may draw from one of its own.

        On CUDA others are called once: kernels that sum in no fixed order are not what is refused here.
        """
        if drew:
            refuse_random(output, self._output(batch), exact=True)
        elif self.compare_first and self._device.type == "cpu":
            refuse_random(*self._outputs_of_two_calls(batch, output), exact=False)

    def _outputs_of_two_calls(self, batch: Batch, output: Batch) -> tuple[Batch, Batch]:
        """Return two outputs for the same input: for some samples if possible, since a set may be one batch.

        Padding and samples that could not be read are zeros, on which some random operations do nothing.
        """
        rows = next(iter(batch.values())).shape[0]
        fields = [value for name, value in batch.items() if name not in self._length_names]
        filled = (n for n in range(rows) if any(bool(value[n].any()) for value in fields))
        some = [*itertools.islice(filled, _COMPARED)]
        if 0 < len(some) < rows and "torch._inductor" not in sys.modules:  # a compiled encoder compiles again
            parts = [{name: _alike(value[some]) for name, value in batch.items()} for _ in range(2)]
            with suppress(Exception):  # an encoder may accept only full batches
                return self._output(parts[0]), self._output(parts[1])
        return output, self._output(batch)

    def _check(self, output: Batch, rows: int) -> None:
        found = [name for name in output if not self._lengths or not name.endswith(LENGTHS_SUFFIX)]
        if {*found} != self._record_schema.keys():
            raise EncoderError(
                f"the encoder returned fields {sorted(found)}, its schema says {sorted(self._record_schema)}"
            )
        for name, spec in self._record_schema.items():
            shape = tuple(output[name].shape)
            length = shape[1:2] if spec.ragged else spec.shape[:1]
            if self._steps is not None and spec.time:
                length = (self._steps,)
            expected = (rows, *length, *spec.shape[1:])
            dtype = str(output[name].dtype).removeprefix("torch.")
            if shape != expected or dtype != spec.dtype:
                raise EncoderError(
                    f"the encoder returned {name!r} as {dtype} {shape}, its schema says {spec.dtype} "
                    f"{spec.shape} for each of {rows} samples"
                )
            if self._lengths and spec.ragged:
                self._check_lengths(name, output[name + LENGTHS_SUFFIX], rows, shape[1])

    @staticmethod
    def _check_lengths(name: str, lengths: Tensor, rows: int, padded: int) -> None:
        if tuple(lengths.shape) == (rows,) and lengths.dtype == torch.int64:
            low, high = map(int, lengths.aminmax())
            if low >= 0 and high <= padded:
                return
            said = f"from {low} to {high}, and rows of {padded}"
        else:
            said = f"as {lengths.dtype} {tuple(lengths.shape)}, expected int64 {(rows,)}"
        raise EncoderError(
            f"the lengths of the encoder's output {name!r} are {said}",
            hint=f"Return {name + LENGTHS_SUFFIX!r} with the length of each of its rows, where these are not "
            "the lengths of the input",
        )

    def _encode_steps(
        self, batch: Batch, loaded: LoadedBatch, fault: Callable[[SampleFault], object]
    ) -> Batch | None:
        """Encode the chunks of a stretch of one sample; the whole record once its last stretch is in."""
        key = loaded.work.key
        if loaded.start == 0:  # also when its worker was lost half-way and another one starts over
            self._partials[key] = {}
        elif key not in self._partials:
            return None  # it failed on an earlier stretch
        try:
            self._chunks(batch, loaded.start, self._partials[key])
        except _FATAL:
            raise
        except Exception as error:
            if not self._succeeded and self._fails(
                {n: torch.zeros_like(v) for n, v in self._chunk(batch, 0).items()}
            ):
                raise EncoderError(
                    f"the encoder fails on any input: {type(error).__name__}: {error}"
                ) from error
            fault(_encoder_fault(loaded.work.numbers[0], f"{type(error).__name__}: {error}"))
            self._partials.pop(key)
            return None
        return self._partials.pop(key) if loaded.last else None

    def _chunks(self, batch: Batch, start: int, record: Batch) -> None:
        assert self._steps is not None
        rows = max(value.shape[1] for name, value in batch.items() if self._sample_schema[name].time)
        for begin in range(0, rows, self._steps):
            if self._total(rows) <= start + begin:
                break  # the padded end of a slot holds no further chunk
            output, _ = self._call_with_halving(self._chunk(batch, begin))
            self._keep(record, output, start + begin, self._total(rows))

    def _total(self, rows: int) -> int:
        """Return the time steps of the complete sample; for a ragged one those that are here."""
        spec = next(spec for spec in self._sample_schema.values() if spec.time)
        return rows if spec.ragged else spec.shape[0]

    def _chunk(self, batch: Batch, begin: int) -> Batch:
        """`steps` rows from `begin` on, zeros past the end; in fresh memory, so all are aligned alike."""
        assert self._steps is not None
        chunk: Batch = {}
        for name, value in batch.items():
            if not self._sample_schema[name].time:
                chunk[name] = value
                continue
            part = value[:, begin : begin + self._steps]
            fresh = part.new_zeros((1, self._steps, *part.shape[2:]))
            fresh[:, : part.shape[1]] = part
            chunk[name] = fresh
        return chunk

    def _keep(self, record: Batch, output: Batch, begin: int, total: int) -> None:
        for name, value in output.items():
            if not self._record_schema[name].time:
                record.setdefault(name, value.clone())
                continue
            if name not in record:
                record[name] = value.new_empty((1, total, *value.shape[2:]))
            stop = min(begin + value.shape[1], total)
            record[name][:, begin:stop] = value[:, : stop - begin]

    def _select(
        self,
        output: Batch,
        loaded: LoadedBatch,
        wanted: list[int],
        fault: Callable[[SampleFault], object],
        *,
        marked: bool,
    ) -> EncodedRecords | None:
        """Return the rows of the wanted members, in memory that outlives the loaded batch."""
        if self._lengths:
            return self._cut(output, loaded, wanted, fault, marked=marked)
        first = loaded.work.numbers.start
        rows = [number - first for number in wanted]
        if self._reject_nan and self._encoder is not None:
            for row, name in self._nan_rows(output).items():
                if row in rows:
                    fault(_nan_fault(first + row, name, loaded))
                    rows.remove(row)
        if not rows:
            return None
        whole = rows == list(range(len(rows)))
        index = torch.tensor(rows, device="cpu")
        records: dict[str, Tensor | list[Tensor]] = {}
        for name, value in output.items():
            kept = value[: len(rows)] if whole else value.index_select(0, index)
            if whole and not loaded.owned and _within(kept, loaded):
                kept = self._copied(kept)
            records[name] = list(kept) if self._record_schema[name].ragged else kept.contiguous()
        numbers = [first + row for row in rows]
        size = sum(value.nbytes for value in output.values())
        return EncodedRecords(
            numbers=numbers, records=records, marked=numbers if marked else [], size_bytes=size
        )

    def _cut(
        self,
        output: Batch,
        loaded: LoadedBatch,
        wanted: list[int],
        fault: Callable[[SampleFault], object],
        *,
        marked: bool,
    ) -> EncodedRecords | None:
        """Return the rows of the wanted members without their padding, ascending by number."""
        ends = {
            name: output[name + LENGTHS_SUFFIX].tolist()
            for name, spec in self._record_schema.items()
            if spec.ragged
        }
        rows = {number: row for row, number in enumerate(loaded.numbers)}
        cut: dict[int, Batch] = {}
        for number in sorted(wanted):
            row = rows[number]
            record = {
                name: (output[name][row, : ends[name][row]] if name in ends else output[name][row]).clone()
                for name in self._record_schema
            }
            bad = self._reject_nan and self._encoder is not None and self._field_with_nan(record)
            if bad:
                fault(_nan_fault(number, bad, loaded))
            else:
                cut[number] = record
        if not cut:
            return None
        records: dict[str, Tensor | list[Tensor]] = {}
        for name in self._record_schema:
            values = [record[name] for record in cut.values()]
            records[name] = values if name in ends else torch.stack(values)
        size = sum(value.nbytes for record in cut.values() for value in record.values())
        return EncodedRecords(
            numbers=[*cut], records=records, marked=[*cut] if marked else [], size_bytes=size
        )

    def _field_with_nan(self, record: Batch) -> str:
        """Return a field that holds NaN or infinity; empty where none does."""
        floats = (name for name, spec in self._record_schema.items() if spec.dtype in FLOATS)
        return next((name for name in floats if not bool(torch.isfinite(record[name]).all())), "")

    def _copied(self, value: Tensor) -> Tensor:
        """Return a copy, made by one thread: workers have the other cores, and torch would wait for them."""
        if not value.nbytes:
            return value.clone()
        room = self._memory.take(value.nbytes)
        np.copyto(room, np.asarray(view_bytes(value.reshape(-1))))
        fresh: Tensor = torch.from_numpy(room)  # pyright: ignore[reportUnknownMemberType]
        return fresh.view(value.dtype).view(value.shape)

    def _nan_rows(self, output: Batch) -> dict[int, str]:
        """Return rows with NaN or infinity, and a field that has it: a sum meets all, then we look closer."""
        found: dict[int, str] = {}
        for name, spec in self._record_schema.items():
            if spec.dtype not in FLOATS or not output[name].numel():
                continue
            rows = output[name].reshape(output[name].shape[0], -1)
            sums = rows.sum(1, dtype=torch.float32).numpy()
            for row in map(int, np.flatnonzero(~np.isfinite(sums))):
                if not bool(torch.isfinite(rows[row]).all()):
                    found.setdefault(row, name)
        return found


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the rows of several outputs, padded to the longest where they differ in length."""
    longest = max(part.shape[1] for part in parts) if parts[0].ndim > 1 else 0
    padded = [
        torch.cat([part, part.new_zeros((len(part), longest - part.shape[1], *part.shape[2:]))], 1)
        if part.ndim > 1 and part.shape[1] < longest
        else part
        for part in parts
    ]
    return torch.cat(padded)


def _encoder_fault(number: int, error: str) -> SampleFault:
    return SampleFault(number=number, stage="encode", error=error[:600], kind="sample", retry=False)


def _nan_fault(number: int, name: str, loaded: LoadedBatch) -> SampleFault:
    why = "".join(f"; field {empty!r} of the sample is empty" for empty in loaded.empty_fields)
    return _encoder_fault(number, f"field {name!r} of the record holds NaN or infinity{why}")


def _tensor(array: NDArray[Any], dtype: str) -> Tensor:
    tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return tensor.view(_BITS[dtype]) if dtype in _BITS else tensor


def _alike(value: Tensor) -> Tensor:
    """Return a copy that begins at the same place of a page: vector kernels may round by alignment."""
    room = torch.empty(value.nbytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    begin = (value.data_ptr() - room.data_ptr()) % mmap.PAGESIZE
    return room[begin : begin + value.nbytes].view(value.dtype).view(value.shape).copy_(value)


def _within(value: Tensor, loaded: LoadedBatch) -> bool:
    """Return True if a tensor lies in the loaded batch's memory, which will be written over."""
    at = value.untyped_storage().data_ptr()
    for array in loaded.arrays.values():
        begin = array.__array_interface__["data"][0]
        if begin <= at < begin + max(array.nbytes, 1):
            return True
    return False


def _device_lost(error: Exception) -> bool:
    """True if a CUDA context is beyond use: any CUDA error but out of memory, by class or by message."""
    if is_out_of_memory(error):
        return False
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or str(error).startswith("CUDA error")


def _span(numbers: range) -> str:
    return f"{numbers.start}-{numbers.stop - 1}"


# ----------------------------------------------------------------------------------------------------------
# Products of float32 in float32 while samples are read and encoded, whatever the program has set.
#
# TensorFloat-32 and bfloat16 products change the third or fourth digit of a record. They are switches of
# the whole process (`torch.set_float32_matmul_precision`, `allow_tf32`, since torch 2.9 also
# `fp32_precision` by backend and operation), so without this a cache would depend on what a program set
# before it was filled.


PRECISION = "highest"
"""What an encoder is called with, as `torch.set_float32_matmul_precision` spells it."""

_SWITCHES = (
    ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip

T = TypeVar("T")


@contextmanager
def full_precision() -> Generator[None]:
    """No TF32 and no bfloat16 within products of float32 while entered, and algorithms of cuDNN that are the
    same in each call; then everything is as before.

    An encoder that wants less sets its own switches in `encode`.
    """
    found = [getattr(getattr(torch.backends, backend), operation, None) for backend, operation in _SWITCHES]
    switches: list[Any] = [switch for switch in found if hasattr(switch, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    with _without_advice():
        older = _legible(torch.get_float32_matmul_precision), _legible(_cudnn_tf32)
    cudnn = torch.backends.cudnn
    choice = cudnn.benchmark, cudnn.deterministic
    _turn(switches, ["ieee"] * len(switches), (PRECISION, False))
    # Algorithms that are timed, or that sum in no fixed order, give other last bits from call to call.
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = choice
        _turn(switches, before, older)


def _turn(switches: list[Any], values: list[Any], older: tuple[str | None, bool | None]) -> None:
    """Set the older switches, then the newer: torch refuses to tell the older where the two disagree."""
    matmul, cudnn = older
    with _without_advice():
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
    for switch, value in zip(switches, values, strict=True):
        switch.fp32_precision = value


@contextmanager
def _without_advice() -> Generator[None]:
    """Silence warnings of the older switches in some versions of torch, which no user of ours can avoid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _cudnn_tf32() -> bool:
    return torch.backends.cudnn.allow_tf32


def _legible(ask: Callable[[], T]) -> T | None:
    """Return the answer; None where torch refuses the older question since the newer switch is set."""
    try:
        return ask()
    except RuntimeError:
        return None


# ----------------------------------------------------------------------------------------------------------
# What a program has set in torch and numpy, for the child that encodes for it.

_FLAGS = (
    ("cudnn", "enabled"), ("mkldnn", "enabled"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"), ("cuda.matmul", "allow_fp16_accumulation"),
)  # fmt: skip
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_DENORMAL = 1e-40


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchState:
    """Settings of a process and its thread that the bits of a record may depend on."""

    threads: int
    dtype: torch.dtype
    device: torch.device
    """The default of each."""
    deterministic: tuple[bool, bool]
    """True if deterministic algorithms are asked for; True if a lack of one is only a warning."""
    flushes_denormals: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """Kinds of devices for which it is on, with the dtype of each and whether it caches weights."""
    flags: dict[tuple[str, str], Any]
    """Switches of `torch.backends`."""
    attention: dict[str, bool]
    """Per kernel of scaled dot product attention: True if it may be used."""
    numpy_errors: dict[str, Any]

    @classmethod
    def of_caller(cls) -> TorchState:
        """Return that of this process and thread."""
        tiny = torch.tensor([_DENORMAL], dtype=torch.float32, device="cpu") * 1.0
        return cls(
            threads=torch.get_num_threads(),
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            flushes_denormals=tiny.item() == 0.0,
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ),
            flags={flag: getattr(_backend(flag[0]), flag[1], None) for flag in _FLAGS},
            attention={
                name: ask()
                for name in _ATTENTION
                if (ask := getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)) is not None
            },
            numpy_errors=dict(np.geterr()),
        )

    @contextmanager
    def entered(self) -> Generator[None]:
        """Compute so while entered, in a child or in a new thread of the process that it was taken from.

        What belongs to the process is not undone: a child ends, and the other already has it so.
        """
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # OpenMP counts for each thread separately
        torch.set_default_dtype(self.dtype)
        if self.deterministic != TorchState.of_caller().deterministic:  # a call imports torch's compiler
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if self.flushes_denormals:
            torch.set_flush_denormal(True)
        for (backend, name), value in self.flags.items():
            if value is not None and getattr(_backend(backend), name) != value:
                setattr(_backend(backend), name, value)
        for name, value in self.attention.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
        with ExitStack() as stack:
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            for kind, dtype, cached in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            stack.enter_context(np.errstate(**self.numpy_errors))
            yield


def _backend(path: str) -> Any:
    found: Any = torch.backends
    for name in path.split("."):
        found = getattr(found, name)
    return found


# ----------------------------------------------------------------------------------------------------------
# Who encodes the batches of a run: children (`encoder_processes.py`), or this process (`in_process.py`).


class EncodeStage(Protocol):
    """Takes batches and gives records, in whatever order. Called by one thread."""

    clock: EncodeClock
    """Time inside the encoder, on all devices."""

    @property
    def hungry(self) -> bool:
        """Some encoder has nothing to do."""
        ...

    def take(self, batch: LoadedBatch) -> bool:
        """Have a loaded batch encoded; False when there is no room for it now.

        From then on it is this object that gives it back to its feed.

        Raises:
            StokerError: No other sample, and no other device, would help.
        """
        ...

    def results(self) -> list[EncodedRecords]:
        """Return what has been encoded since the last call. Errors as `take`."""
        ...

    def watch(self, fd: int) -> int:
        """Return a descriptor that is readable when there may be results, or when `fd` is (signals)."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there may be results or room, or after `timeout_s`."""
        ...

    def processor_s(self) -> float:
        """Return the processor time that processes of its own have used."""
        ...

    def close(self) -> None:
        """End the processes that it started; safe to call twice."""
        ...
