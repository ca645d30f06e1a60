"""Measure on a device how many samples to give an encoder in one call.

More samples a call cost less overhead each, until the device is full. So the number is doubled until
throughput stops rising, or memory ends. The number is a part of the recipe; `pipeline/encode_batch.py` has it
measured once (docs/design/039-encode-batch-size.md).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved
from stoker.errors import EncoderError, ResourceError, StalledError, StokerError
from stoker.plan.resources import probe
from stoker.precompute.encode import is_out_of_memory
from stoker.precompute.precision import full_precision
from stoker.runtime.threads import call_within
from stoker.schema import Json, Schema
from stoker.store.convert import torch_dtype
from stoker.units import KIB, MIB, format_bytes

MOST_SAMPLES = 1024
MOST_BYTES = 128 * MIB
"""Samples and records of one call: reader processes hold a few calls' samples each."""
GAIN = 1.05
"""A number of samples that is not this much faster than the best smaller one gained nothing."""
VAIN = 2
"""Sizes in a row without a gain after which the search ends."""
ENOUGH = 0.95
"""The smallest number that reaches this part of the best throughput is chosen: less is lost at an error."""
TRIAL_S, TRIAL_CALLS = 0.15, 3
"""A size is timed for so long, by so many calls at least; the fastest call counts."""
BUDGET_S = 20.0
"""No size is begun that would end after this."""
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

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {"samples": self.samples, "call_s": self.call_s, "samples_s": self.samples_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """The measurements of `measure_encode_batch`, and the number that follows from them."""

    samples: int | None
    """Samples in one call; None: the fixed rule, as `why` says."""
    device: str
    trials: tuple[BatchTrial, ...]
    why: str
    """Why the search ended, in words."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
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
    deadline_s: float = 300.0,
    budget_s: float = BUDGET_S,
) -> EncodeBatch:
    """Return how many samples a call of the encoder should have on a device; takes seconds.

    Args:
        encoder: Left where it was. It is called on zeros, as for its schema.
        schema: Fields of the samples, `source.schema()`.
        device: `cpu` or `cuda[:i]`.
        most: No more samples than this, as the samples of a file.
        deadline_s: Seconds that one call may take.
        budget_s: Seconds after which no further size is tried.

    Raises:
        EncoderError: The encoder fails on one sample.
        ResourceError: The device's memory does not suffice for one sample.
        StalledError: A call did not come back.

    >>> measure_encode_batch(encoder, source.schema(), "cuda").samples  # doctest: +SKIP
    64
    """
    records = encoder.schema(schema)
    fields = [*schema.values(), *records.values()]
    if any(f.ragged for f in fields):
        why = "samples differ in length, so each is encoded alone"
        return EncodeBatch(samples=None, device=device, trials=(), why=why)
    if encoder.group(schema).steps is not None:
        why = "samples are so large that each is cut over time; one fills a call"
        return EncodeBatch(samples=None, device=device, trials=(), why=why)
    size = max(1, sum(f.size_bytes() for f in fields))
    search = _Search(
        encoder, schema, torch.device(device), most=min(most, MOST_SAMPLES, max(1, MOST_BYTES // size))
    )
    try:
        # The device's context, or a first call that compiles, may take as long as a call may.
        return call_within(2 * deadline_s + budget_s, lambda: search.run(budget_s), "the encoder")
    except StalledError as error:
        raise StalledError(
            f"the encoder did not come back from a call of {search.samples} samples within {deadline_s:g} s. "
            f"Give precompute.encode_batch a number below that"
        ) from error


class _Search:
    """One search over sizes."""

    def __init__(self, encoder: Encoder, schema: Schema, device: torch.device, *, most: int) -> None:
        self._encoder, self._schema, self._device, self._most = encoder, schema, device, most
        self.samples = 1
        """The size that is tried now."""
        self._trials: list[BatchTrial] = []

    def run(self, budget_s: float) -> EncodeBatch:
        """Double the size until throughput, memory, time or the samples end it."""
        try:
            with moved(self._encoder, self._device), torch.inference_mode(), full_precision():
                why = self._search(time.perf_counter() + budget_s)
        except StokerError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise ResourceError(f"the encoder has no memory on {self._device} for one sample") from error
            raise EncoderError(
                f"the encoder fails on a sample of zeros on {self._device}: {type(error).__name__}: {error}"
            ) from error
        return EncodeBatch(
            samples=choose(self._trials), device=str(self._device), trials=tuple(self._trials), why=why
        )

    def _search(self, end: float) -> str:
        room = int(HOST_PART * probe().host_bytes) if self._device.type == "cpu" else None
        began, vain = _peak_bytes(), 0
        while True:
            try:
                trial = self._try()
            except Exception as error:
                if not self._trials or not is_out_of_memory(error):
                    raise
                return f"{self._device} has no memory for {self.samples} samples"
            best = max((known.samples_s for known in self._trials), default=0.0)
            self._trials.append(trial)
            vain = 0 if trial.samples_s > GAIN * best else vain + 1
            if vain >= VAIN:
                return "throughput stopped rising"
            if 2 * trial.samples > self._most:
                return f"{self._most} samples are the most"
            # Warm-up, then at least the calls that are timed.
            if time.perf_counter() + 2 * trial.call_s * (1 + TRIAL_CALLS) > end:
                return "a larger call would take too long to measure"
            taken = _peak_bytes() - began
            if room is not None and 2 * taken > room:
                return f"a call of {trial.samples} took {format_bytes(taken)} of host memory"
            self.samples = 2 * trial.samples

    def _try(self) -> BatchTrial:
        batch = {
            name: torch.zeros((self.samples, *f.shape), dtype=torch_dtype(f.dtype), device=self._device)
            for name, f in self._schema.items()
        }
        self._timed(lambda: self._encoder.encode(batch))  # allocates, chooses algorithms
        times: list[float] = []
        while len(times) < TRIAL_CALLS or (sum(times) < TRIAL_S and len(times) < 100):
            times.append(self._timed(lambda: self._encoder.encode(batch)))
        best = max(min(times), 1e-9)
        return BatchTrial(samples=self.samples, call_s=best, samples_s=self.samples / best)

    def _timed(self, call: Callable[[], dict[str, Tensor]]) -> float:
        begin = time.perf_counter()
        call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin


def choose(trials: list[BatchTrial]) -> int:
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
