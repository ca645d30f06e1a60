"""Time the stages one after another on a few batches, and find a good number of samples for a call.

What is stored goes to a folder of the caller's, and is a complete cache of these few.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import on_device
from stoker.errors import EncoderError, ResourceError, SourceError, StalledError, StokerError
from stoker.plan.resources import is_out_of_memory, probe
from stoker.precompute.arena import LoadedBatch
from stoker.precompute.by_length import calls_of, split_by_part
from stoker.precompute.encode import full_precision
from stoker.precompute.run import StageBuilder
from stoker.precompute.settings import PrecomputeSettings
from stoker.runtime.libc import release_memory
from stoker.runtime.threads import call_within
from stoker.schema import Json, Sample, Schema
from stoker.sources.protocol import Part, Source, SourceIdentity, locate
from stoker.store import Cache, Failure, Recipe, make_recipe
from stoker.store.folder import Folder, open_folder
from stoker.store.values import torch_dtype
from stoker.units import KIB, MIB, format_bytes, format_percent

SAMPLES = 256
"""Samples of a trial, at most."""
SECONDS = 15.0
"""After which no further group is begun."""


@dataclass(slots=True)
class Trial:
    """What each stage took; and while it runs, where it is."""

    opens_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds to open a file and read its first sample, by that sample's number."""
    reads_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds to read every other sample, by number."""
    encodes_s: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds in the encoder, and samples of each group; the first calls choose kernels and get memory."""
    writes_s: float = 0.0
    """Converting, checksums and writing of all records."""
    commit_s: float = 0.0
    """Bringing a shard to the disk for good, once."""
    records: int = 0
    """Samples that were stored."""
    failures: list[str] = field(default_factory=list[str])
    """Samples that could not be read or encoded, in words."""
    names: dict[int, str] = field(default_factory=dict[int, str])
    """File or table of each sample that was read, by number."""
    stage: str = "open"
    number: int = -1

    @property
    def encode_s(self) -> float:
        """Seconds in the encoder for one sample.

        Without the first quarter of the calls: until its memory is in place one may take twice as long.
        """
        calls = self.encodes_s[-(-len(self.encodes_s) // 4) :] or self.encodes_s
        return sum(seconds for seconds, _ in calls) / max(1, sum(count for _, count in calls))


class _ChosenSamples:
    """Some samples of a source as a source of their own, whose reads are noted."""

    def __init__(self, source: Source, numbers: NDArray[np.int64], trial: Trial) -> None:
        self._source, self._trial = source, trial
        self.numbers = [int(number) for number in numbers]
        whole = source.identity().parts
        ends = np.cumsum([part.count for part in whole])
        self._parts = np.searchsorted(ends, numbers, side="right").tolist()
        self._names = [part.name for part in whole]
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self.numbers)

    def schema(self) -> Schema:
        return self._source.schema()

    def keys(self) -> Sequence[str]:
        return [str(number) for number in self.numbers]

    def locate(self, number: int) -> str:
        return locate(self._source, self.numbers[number])

    def runs(self) -> Sequence[range]:
        return [range(part.start, part.stop) for part in self._spans()]

    def identity(self) -> SourceIdentity:
        """Of no use to anybody else, so that no file has to be digested for it."""
        parts = [Part(name=self._names[self._parts[span.start]], count=len(span), digest="trial")
                 for span in self._spans()]  # fmt: skip
        return SourceIdentity(kind="trial/1", parts=tuple(parts), settings={"numbers": [*self.numbers]})

    def _spans(self) -> list[range]:
        starts = [at for at, part in enumerate(self._parts) if not at or part != self._parts[at - 1]]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self)], strict=True)]

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        trial, part, number = self._trial, self._parts[index], self.numbers[index]
        first = part not in self._open
        trial.stage, trial.number = "open" if first else "read", number
        trial.names[number] = self._names[part]
        begin = time.perf_counter()
        sample = self._source.read(number, start, stop) if start is not None else self._source.read(number)
        took = trial.opens_s if first or number in trial.opens_s else trial.reads_s
        took[number] = took.get(number, 0.0) + time.perf_counter() - begin
        self._open.add(part)
        return sample


def spread(recipe: Recipe, most: int) -> NDArray[np.int64]:
    """Return numbers of complete groups, evenly over all parts, `most` of them or one group.

    A group is what is encoded together, so that a part of one would cost as much.
    """
    size = recipe.encode_batch.consecutive
    groups = [range(p.offset + at, p.offset + min(at + size, p.count)) for p in recipe.parts
              for at in range(0, p.count, size)]  # fmt: skip
    step = max(1, -(-len(groups) * size // max(most, size)))
    return np.array([number for group in groups[::step] for number in group], dtype=np.int64)


@full_precision()
def try_stages(
    source: Source,
    encoder: Encoder | None,
    place: tuple[Path, str, Recipe],
    settings: PrecomputeSettings,
    trial: Trial,
) -> Cache:
    """Read, encode and store some samples in this process; a complete cache of those, numbered from 0.

    Args:
        source, encoder: As for precompute.
        place: Folder to write to, name, and the recipe that source and encoder give.
        settings: As for precompute; workers and what they are told have no meaning here.
        trial: Filled while it runs, by numbers of `source`.

    Raises:
        SourceError: Not one of them can be read and encoded.
        StokerError: As precompute.
    """
    cache_dir, name, whole = place
    own = replace(settings, workers=0, progress=None, overwrite=False, by_blocks=False, identity="auto")
    chosen = _ChosenSamples(source, spread(whole, SAMPLES), trial)
    folder = open_folder(
        cache_dir,
        name,
        make_recipe(chosen, encoder, dtype=settings.dtype, encode_batch=settings.encode_batch),
    )
    builder = StageBuilder(chosen, encoder, folder, own, missing=np.arange(len(chosen)), rehearsal=True)
    done = _go(builder, folder, trial)
    trial.failures = [
        f"sample {chosen.numbers[f.number]} ({f.stage}: {f.error})" for f in builder.ledger.failures
    ]
    if not done:
        raise SourceError(
            f"none of {len(chosen)} samples could be read and encoded. The first: "
            f"{trial.failures[0] if trial.failures else 'nothing was said'}",
            hint="Fix that, or the settings",
        )
    left = sorted(set(range(len(chosen))) - done)
    folder.quarantine_many(
        [Failure(number=n, stage="read", error="left out", attempts=1, kind="sample") for n in left]
    )
    return folder.finish()


def _go(builder: StageBuilder, folder: Folder, trial: Trial) -> set[int]:
    """Go through the stages; the numbers of what was stored."""
    trial.stage, done = "encode", set[int]()
    feed, encoder, writer = builder.feed(), builder.encoder(), folder.writer()

    def encode(batch: LoadedBatch) -> None:
        trial.stage, begin = "encode", time.perf_counter()
        wanted = [number for work in batch.tasks for number in builder.queue.wanted(work)]
        encoded = encoder.encode(batch, wanted, builder.ledger.fault)
        trial.encodes_s.append((time.perf_counter() - begin, len(wanted) if batch.last else 0))
        trial.stage, begin = "write", time.perf_counter()
        for one in () if encoded is None else split_by_part(encoded, folder.recipe):
            writer.append(one.numbers, one.records, marked=one.marked)
            done.update(one.numbers)
        trial.writes_s += time.perf_counter() - begin

    end = time.monotonic() + SECONDS
    try:
        while not feed.finished and time.monotonic() < end:
            for batch in feed.poll(0.0):
                for call in calls_of(builder.gatherer, batch):
                    encode(call)
                feed.release(batch)
        for call in calls_of(builder.gatherer, None):
            encode(call)
    finally:
        feed.close()
        builder.leave_device()
        release_memory()
    trial.stage, begin = "commit", time.perf_counter()
    writer.commit()
    trial.commit_s, trial.records = time.perf_counter() - begin, len(done)
    return done


# ----------------------------------------------------------------------------------------------------------
# Measure on a device how many samples to give an encoder in one call.
#
# More samples a call cost less overhead each, until the device is full. So the number is doubled until
# throughput stops rising, or memory ends. Then all sizes are measured again in turns. What else the machine
# does slows some turns and speeds up none, so the fastest turn counts: in 14 runs on a machine with more busy
# processes than cores it gave the same number 12 times, the median of turns 10 times. The number is a part
# of the recipe; `run/build.py` has it measured once (docs/design/039-encode-batch-size.md).


MOST_SAMPLES = 1024
MOST_BYTES = 128 * MIB
"""Samples and records of one call: worker processes hold a few calls' samples each."""
GAIN = 1.05
"""A number of samples that is not this much faster than the best smaller one gained nothing."""
VAIN = 2
"""Sizes in a row without a gain after which the search ends."""
ENOUGH = 0.95
"""The smallest number that reaches this part of the best throughput is chosen: less is lost at an error."""
NOISY = 0.1
"""Noise that is said."""
LEAST_ROUNDS, ROUNDS, ROUNDS_S = 3, 5, 2.0
"""Turns of each size, if time allows; more than `LEAST_ROUNDS` only within so many seconds."""
TURN_S = 0.05
"""A turn is so long, by one call at least; the fastest call counts."""
BUDGET_S = 20.0
"""No size and no round is begun that would end after this."""
HOST_PART = 0.25
"""Of the free host memory, what a call on a CPU may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """One size that was tried."""

    samples: int
    """Samples in one call."""
    call_s: float
    """Seconds of the fastest call."""
    samples_s: float
    """Samples a second."""
    noise: float = 0.0
    """How much longer the fastest call of the median turn took, as a part of `call_s`."""
    rounds: int = 1
    """Turns that were measured."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """The measurements of `measure_encode_batch`, and the number that follows from them."""

    samples: int | None
    """Samples in one call; None: the fixed rule, as `why` says."""
    device: str
    trials: tuple[BatchTrial, ...]
    why: str
    """Why the search ended, and how sure the number is on a busy machine, in words."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "samples": self.samples,
            "device": self.device,
            "trials": [trial.to_json() for trial in self.trials],
            "why": self.why,
        }


def measure_encode_batch(
    encoder: Encoder,
    schema: Schema,
    device: str = "cpu",
    *,
    most: int = MOST_SAMPLES,
    timeout_s: float = 300.0,
    budget_s: float = BUDGET_S,
) -> EncodeBatch:
    """Return how many samples a call of the encoder should have on a device, as `samples`; takes seconds.

    Args:
        encoder: Left where it was. It is called on zeros, as for its schema.
        schema: Fields of the samples, `source.schema()`.
        device: `cpu` or `cuda[:i]`.
        most: No more samples than this, as the samples of a file.
        timeout_s: Seconds that one call may take.
        budget_s: Seconds after which no further size is tried, and none measured again.

    Raises:
        EncoderError: The encoder fails on one sample.
        ResourceError: The device's memory does not suffice for one sample.
        StalledError: A call did not come back.

    Examples:
        >>> from stoker.precompute import measure_encode_batch
        >>> measure_encode_batch(encoder, source.schema(), "cuda").samples  # doctest: +SKIP
        64
    """
    records = encoder.schema(schema)
    fields = [*schema.values(), *records.values()]
    if any(f.ragged for f in fields):
        why = "samples differ in length, so the encoder's own number is used"
        return EncodeBatch(samples=None, device=device, trials=(), why=why)
    if encoder.encode_batch_size(schema).steps is not None:
        why = "samples are so large that each is cut over time; one fills a call"
        return EncodeBatch(samples=None, device=device, trials=(), why=why)
    size = max(1, sum(f.size_bytes() for f in fields))
    search = _Search(
        encoder, schema, torch.device(device), most=min(most, MOST_SAMPLES, max(1, MOST_BYTES // size))
    )
    try:
        # The device's context, or a first call that compiles, may take as long as a call may.
        return call_within(2 * timeout_s + budget_s, lambda: search.run(budget_s), "the encoder")
    except StalledError as error:
        raise StalledError(
            f"the encoder did not come back from a call of {search.samples} samples within {timeout_s:g} s",
            hint="Give precompute.encode_batch a number below that",
        ) from error


class _Search:
    """One search over sizes."""

    def __init__(self, encoder: Encoder, schema: Schema, device: torch.device, *, most: int) -> None:
        self._encoder, self._schema, self._device, self._most = encoder, schema, device, most
        self.samples = 1
        """The size that is tried now."""
        self._turns: dict[int, list[float]] = {}
        """Seconds of the fastest call of each turn, by size."""

    def run(self, budget_s: float) -> EncodeBatch:
        """Double the size until throughput, memory, time or the samples end it; then measure in turns."""
        with (
            _named_errors(self._device),
            on_device(self._encoder, self._device),
            torch.inference_mode(),
            full_precision(),
        ):
            why = self._search(time.perf_counter() + budget_s)
        trials = [_trial(samples, turns) for samples, turns in self._turns.items()]
        samples = choose(trials)
        noise = max(trial.noise for trial in trials if trial.samples >= samples)
        if noise > NOISY:
            why += f"; turns of a size differ by {format_percent(noise)}: something else uses this machine"
        return EncodeBatch(samples=samples, device=str(self._device), trials=tuple(trials), why=why)

    def _search(self, end: float) -> str:
        began = _peak_bytes()
        while True:
            why = self._grow(end, began)
            self._repeat(end)
            if why or self._is_flat():  # a moment's load may have looked like that before
                return why or "throughput stopped rising"

    def _grow(self, end: float, began: int) -> str:
        """Double the size until throughput seems to rise no more; returns what else ended that."""
        while not self._is_flat():
            if why := self._obstacle(end, began):
                return why
            self.samples = 2 * max(self._turns) if self._turns else 1
            try:
                self._turn()
            except Exception as error:
                if not self._turns or not is_out_of_memory(error):
                    raise
                return f"{self._device} has no memory for {self.samples} samples"
        return ""

    def _obstacle(self, end: float, began: int) -> str:
        """Return why twice the largest size cannot be tried; empty if it can."""
        if not self._turns:
            return ""
        samples = max(self._turns)
        if 2 * samples > self._most:
            return f"{self._most} samples are the most"
        # Warm-up and a turn; then two rounds, each as long as two calls of the largest size.
        if time.perf_counter() + 2 * min(self._turns[samples]) * 6 > end:
            return "a larger call would take too long to measure"
        taken = _peak_bytes() - began
        if self._device.type == "cpu" and 2 * taken > HOST_PART * probe().host_bytes:
            return f"a call of {samples} took {format_bytes(taken)} of host memory"
        return ""

    def _is_flat(self) -> bool:
        """Return True if the last sizes were not faster than one before."""
        best, vain = 0.0, 0
        for samples, turns in self._turns.items():
            rate = samples / min(turns)
            vain = 0 if rate > GAIN * best else vain + 1
            best = max(best, rate)
        return vain >= VAIN

    def _repeat(self, end: float) -> None:
        """Measure all sizes again, one after another, as often as time allows."""
        soon = time.perf_counter() + ROUNDS_S
        for rounds in range(2, ROUNDS + 1):
            sizes = [samples for samples, turns in self._turns.items() if len(turns) < rounds]
            round_s = sum(max(TURN_S, *self._turns[samples]) for samples in sizes)
            if time.perf_counter() + round_s > (end if rounds <= LEAST_ROUNDS else min(soon, end)):
                return
            for self.samples in sizes:
                try:
                    self._turn()
                except Exception as error:
                    if self.samples == 1 or not is_out_of_memory(error):
                        raise
                    # Memory that was there is gone: another process has it.
                    self._turns = {size: turns for size, turns in self._turns.items() if size < self.samples}
                    return

    def _turn(self) -> None:
        """Time calls of the present size."""
        batch = {
            name: torch.zeros((self.samples, *f.shape), dtype=torch_dtype(f.dtype), device=self._device)
            for name, f in self._schema.items()
        }
        if self.samples not in self._turns:
            self._timed(lambda: self._encoder.encode(batch))  # allocates, chooses algorithms
        times: list[float] = []
        while not times or (sum(times) < TURN_S and len(times) < 100):
            times.append(self._timed(lambda: self._encoder.encode(batch)))
        self._turns.setdefault(self.samples, []).append(max(min(times), 1e-9))

    def _timed(self, call: Callable[[], dict[str, Tensor]]) -> float:
        begin = time.perf_counter()
        call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin


def _trial(samples: int, turns: Sequence[float]) -> BatchTrial:
    call_s = min(turns)
    noise = median(turns) / call_s - 1
    return BatchTrial(
        samples=samples, call_s=call_s, samples_s=samples / call_s, noise=noise, rounds=len(turns)
    )


def choose(trials: Sequence[BatchTrial]) -> int:
    """Return the smallest number of samples that is about as fast as the fastest.

    >>> rates = {1: 10.0, 2: 18.0, 4: 29.0, 8: 30.0}
    >>> choose([BatchTrial(samples=n, call_s=n / r, samples_s=r) for n, r in rates.items()])
    4
    """
    best = max(trial.samples_s for trial in trials)
    return next(trial.samples for trial in trials if trial.samples_s >= ENOUGH * best)


def _peak_bytes() -> int:
    """Most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


# ----------------------------------------------------------------------------------------------------------
# Whether an encoder works at all: brought to its device, and given a sample of zeros.


def try_encoder(encoder: Encoder, schema: Schema, device: str, timeout_s: float) -> float:
    """Return the seconds to bring an encoder to its device and encode zeros, as short groups have.

    Args:
        encoder: Left where it was.
        schema: Of the samples. Long ones are cut over time as for encoding; a ragged axis has one entry.
        device, timeout_s: Where it runs, and how long that may take.

    Raises:
        EncoderError: It fails, or does not return what its schema says.
        ResourceError: The device's memory does not suffice.
        StalledError: It is not done in time.
    """
    where, steps = torch.device(device), encoder.encode_batch_size(schema).steps

    def encode() -> float:
        begin = time.perf_counter()
        with _named_errors(where), on_device(encoder, where):
            batch: dict[str, torch.Tensor] = {}
            for name, field in schema.items():
                length = 1 if field.ragged else steps if field.time and steps is not None else None
                shape = field.shape if length is None else (length, *field.shape[1:])
                batch[name] = torch.zeros((1, *shape), dtype=torch_dtype(field.dtype), device=where)
            with torch.inference_mode(), full_precision():
                found = encoder.encode(batch)
            if missing := encoder.schema(schema).keys() - found.keys():
                said = f"the encoder's schema promises {sorted(missing)}, which it did not return"
                raise EncoderError(said)
        return time.perf_counter() - begin

    try:
        return call_within(timeout_s, encode, "the encoder")
    except StalledError as error:
        raise EncoderError(f"the encoder did not encode a sample of zeros within {timeout_s:g} s") from error


@contextmanager
def _named_errors(device: torch.device) -> Generator[None]:
    """Say of an error of the encoder at a sample of zeros what it means.

    Raises:
        ResourceError: Memory does not suffice.
        EncoderError: Any other, but errors of ours.
    """
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ResourceError(f"the encoder has no memory on {device} for one sample: {error}") from error
        raise EncoderError(
            f"the encoder fails on a sample of zeros on {device}: {type(error).__name__}: {error}"
        ) from error
