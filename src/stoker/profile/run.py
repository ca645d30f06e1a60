"""Profile a loader and a step function, or a script that has both."""

from __future__ import annotations

import runpy
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the place that torch's notes on it name
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import ConfigError, StalledError, StokerError
from stoker.plan import measure_rates, probe
from stoker.plan.resources import resolve_device
from stoker.profile.result import (
    LoopTimes,
    Profile,
    SampleStage,
    StackSamples,
    check_prices,
    demand_of,
    forecast_other_gpus,
    gpus_for,
    predict,
    say_used,
    source_of,
    time_samples,
    watch,
)
from stoker.used_code import describe_failure, place_of_error

# ----------------------------------------------------------------------------------------------------------
# What one step asks of any device: operations in matrix products, and calls of kernels.


# Torch's modes carry no types.
# pyright: reportUnknownMemberType=false


NO_WORDS: Mapping[str, Any] = MappingProxyType({})


class _CallCounter(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or NO_WORDS))


class StepCounter:
    """Counts from when it is made until `close`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._products = self._stack.enter_context(FlopCounterMode(display=False))
        self._calls = self._stack.enter_context(_CallCounter())

    @property
    def flops(self) -> float:
        """Operations in matrix products and convolutions so far."""
        return float(self._products.get_total_flops())

    @property
    def calls(self) -> int:
        """Calls of kernels so far; views do not count."""
        return self._calls.count

    def close(self) -> None:
        """Count no more."""
        self._stack.close()


# ----------------------------------------------------------------------------------------------------------
# Time a loop from inside the loader that it iterates: no step function has to be known.
#
# The loop is first given its own batches, then the last of them again and again, then one of the same form
# with made-up numbers that lies on the device. What passes between handing a batch over and being asked for
# the next is the step; what passes in between is the wait. The products of one more step are counted, not
# timed.


Part: TypeAlias = Literal["full", "cached", "synthetic"]
WARM = 2
"""Batches before the clock starts: the first ones start workers, allocate, and choose kernels."""


class ProfilingDone(BaseException):
    """Ends the loop that was measured; no error, so that nothing but `finally` blocks sees it."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of every step, and of the wait before it."""

    waits_s: list[float] = field(default_factory=list[float])
    steps_s: list[float] = field(default_factory=list[float])

    @property
    def wait_s(self) -> float:
        """Mean wait: stragglers count, as they do in an epoch."""
        return statistics.fmean(self.waits_s) if self.waits_s else 0.0

    @property
    def step_s(self) -> float:
        """Median step."""
        return statistics.median(self.steps_s) if self.steps_s else 0.0


class LoopProbe:
    """Iterates batches for a loop until all three parts are timed, then raises `ProfilingDone` in it."""

    def __init__(self, batches: Iterable[Any], *, steps: int, device: torch.device) -> None:
        self.times: dict[Part, StepTimes] = {
            "full": StepTimes(),
            "cached": StepTimes(),
            "synthetic": StepTimes(),
        }
        self.batch: Any = None
        """The last batch of the loop's own."""
        self.flops: float | None = None
        """Operations in matrix products and convolutions of a step; None: they could not be counted."""
        self.calls = 0
        """Calls of kernels in that step."""
        self.counting: StepCounter | None = None
        """Counts during the last step: code that fails under it was timed before."""
        self._batches, self._steps, self._device = batches, steps, device

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._batches)
        yield from self._timed("full", lambda: next(source, None))
        if self.batch is None:
            return
        yield from self._timed("cached", lambda: self.batch)
        made_up = synthetic(self.batch, self._device)
        yield from self._timed("synthetic", lambda: made_up)
        self.counting = StepCounter()
        yield made_up
        self.flops, self.calls = self.counting.flops, self.counting.calls
        raise ProfilingDone

    def close(self) -> None:
        """Count no more."""
        counting, self.counting = self.counting, None
        if counting is not None:
            counting.close()

    def _timed(self, part: Part, take: Callable[[], Any]) -> Iterator[Any]:
        times = self.times[part]
        for number in range(WARM + self._steps):
            begin = time.perf_counter()
            batch = take()
            if batch is None:  # a loader shorter than that
                return
            if part == "full":
                self.batch = batch
            handed = time.perf_counter()
            yield batch
            self._finish()
            if number >= WARM:
                times.waits_s.append(handed - begin)
                times.steps_s.append(time.perf_counter() - handed)

    def _finish(self) -> None:
        """Wait for the GPU, whose queue runs ahead of the clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def over_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest of lists, tuples and mappings with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        items = cast("Mapping[Any, Any]", batch).items()
        return {name: over_tensors(value, change) for name, value in items}
    if isinstance(batch, tuple) and hasattr(cast("Any", batch), "_fields"):
        return type(cast("Any", batch))(*(over_tensors(value, change) for value in cast("Any", batch)))
    if isinstance(batch, list | tuple):
        values = [over_tensors(value, change) for value in cast("list[Any]", batch)]
        return values if isinstance(batch, list) else tuple(values)
    return batch


def synthetic(batch: Any, device: torch.device) -> Any:
    """Return a batch like this one on the device: noise for floats, the same values for labels and masks."""

    def made_up(tensor: Tensor) -> Tensor:
        return torch.randn_like(tensor, device=device) if tensor.is_floating_point() else tensor.to(device)

    return over_tensors(batch, made_up)


def size_of(batch: Any) -> tuple[int, int]:
    """Return bytes of a batch, and its examples: the length of its first tensor that has one."""
    sizes: list[int] = []
    lengths: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        if tensor.ndim:
            lengths.append(len(tensor))
        return tensor

    over_tensors(batch, look)
    return sum(sizes), lengths[0] if lengths else 1


STEPS = 50
SAMPLES = 256
"""Samples that are read alone, at most."""
TIMEOUT_S = 600.0
NO_PRICES: Mapping[str, float] = MappingProxyType({})


def profile(
    loader: Iterable[Any],
    step: Callable[[Any], object],
    *,
    steps: int = STEPS,
    device: str | torch.device = "auto",
    price_per_hour: float | None = None,
    prices: Mapping[str, float] = NO_PRICES,
) -> Profile:
    """Return where the time of a loop goes, and what each tier would make of it.

    Steps are really taken, three times `steps` of them and one: give a copy of a model that matters.

    Args:
        loader: Any iterable of batches; of a `DataLoader` single samples are timed too.
        step: Takes one batch; its result is dropped.
        steps: Batches timed of each kind: the loop's own, one at hand, a made-up one.
        device: Where steps compute: `cpu`, `cuda[:i]`, or `auto`, a GPU if there is one.
        price_per_hour: Price of an hour on this machine, for costs of an epoch; None: costs are left out.
        prices: The same for other GPUs, by the beginning of a name (`H100`).

    Returns:
        Times, stall and predictions: `verdict` is one sentence, `to_json` has all figures.

    Raises:
        ConfigError: The loader has no more than two batches, `steps` is below 1, or no GPU of the table has
            a name of `prices`.

    Examples:
        >>> import stoker, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(256, 8))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=8)
        >>> model = torch.nn.Linear(8, 1)
        >>> report = stoker.profile(loader, lambda batch: model(batch[0]), steps=5, device="cpu")
        >>> 0 <= report.loop.stall <= 1, report.batches
        (True, 32)
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}", hint="Expected at least 1")
    check_prices(prices)
    where = resolve_device(device)
    watched = LoopProbe(loader, steps=steps, device=where)
    take(watched, step)
    return _finish(watched, loader, where, (price_per_hour, prices))


def take(watched: LoopProbe, step: Callable[[Any], object]) -> None:
    """Have a probe time a step function."""
    try:
        for batch in watched:
            step(batch)
    except ProfilingDone:
        pass
    except Exception:  # whatever fails while products are counted: times were taken by then
        if watched.counting is None:
            raise
    finally:
        watched.close()


def profile_script(
    path: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = STEPS,
    price_per_hour: float | None = None,
    prices: Mapping[str, float] = NO_PRICES,
    timeout_s: float = TIMEOUT_S,
) -> Profile:
    """Run a script until its first `DataLoader` has been timed, then end it.

    All that the script does before its loop is done; nothing after it is, but for `finally` blocks. Its loop
    takes three times `steps` steps.

    Raises:
        ConfigError: There is no such script, it fails or exits with another code than 0 (names file and
            line), or it iterates no `DataLoader`; or no GPU of the table has a name of `prices`.
        StalledError: It takes longer than `timeout_s`.
    """
    if not path.is_file():
        why = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {why}", hint="Expected a Python script that trains, or a YAML file")
    check_prices(prices)
    where = resolve_device("auto")
    found: list[tuple[LoopProbe, Any]] = []
    plain = DataLoader.__iter__

    def instrumented(loader: Any) -> Any:
        if found:
            return plain(loader)
        watched = LoopProbe(_PlainLoader(loader, plain), steps=steps, device=where)
        found.append((watched, loader))
        return iter(watched)

    arguments_before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    DataLoader.__iter__ = cast("Any", instrumented)
    try:
        with time_limit(timeout_s, f"{path} did not get through {3 * steps} steps"):
            runpy.run_path(str(path), run_name="__main__")
    except ProfilingDone:
        pass
    except StokerError:
        raise
    except (Exception, SystemExit) as error:
        ended = isinstance(error, SystemExit) and error.code in (None, 0)
        if not ended and not (found and found[0][0].counting):  # else as in `take`
            raise ConfigError(
                f"the script {path} {_failure(error)}",
                hint=f"Correct it until `{shlex.join(['python', str(path), *arguments])}` trains, then "
                "profile it again",
            ) from error
    finally:
        for watched, _ in found:
            watched.close()
        DataLoader.__iter__ = plain
        sys.argv = arguments_before
        sys.path.remove(str(path.resolve().parent))
    if not found:
        raise ConfigError(
            f"{path} iterated no torch DataLoader", hint="Expected a script that trains with one"
        )
    return _finish(*found[0], where, (price_per_hour, prices))


def _failure(error: BaseException) -> str:
    """Say how a script failed, and where."""
    if not isinstance(error, SystemExit):
        return f"failed with {describe_failure(error)}"
    code, text = (error.code, "") if isinstance(error.code, int) else (1, f": {error.code}")
    place = place_of_error(error)
    return f"exited with code {code}{f' at {place}' if place else ''}{text}"


class _PlainLoader:
    """A loader that iterates without a probe."""

    def __init__(self, loader: Any, plain: Callable[[Any], Any]) -> None:
        self._loader, self._plain = loader, plain

    def __iter__(self) -> Any:
        return self._plain(self._loader)


@contextmanager
def time_limit(seconds: float, what: str) -> Generator[None]:
    """End a block that takes longer."""

    def late(*_: object) -> None:
        raise StalledError(f"{what} within {seconds:g} s", hint="Give more with --timeout, or fewer --steps")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def loop_times(
    watched: LoopProbe, where: torch.device, *, examples: int | None = None, batch_examples: int | None = None
) -> LoopTimes:
    """Return what a probe found of a loop, single samples left out.

    Args:
        watched: After its loop.
        where: Where steps compute.
        examples, batch_examples: Of an epoch and of a batch; None: as the batch looks.

    Raises:
        ConfigError: There were no more than two batches.
    """
    times = watched.times
    if watched.batch is None or not times["full"].steps_s:
        raise ConfigError(
            "the loader has no more than two batches", hint="Expected some more, so that one can be timed"
        )
    size, seen = size_of(watched.batch)
    cached_s, synthetic_s = times["cached"].step_s, times["synthetic"].step_s
    return LoopTimes(
        wait_s=times["full"].wait_s,
        step_s=times["full"].step_s,
        cached_s=cached_s,
        # On a CPU both are the same work, and what else the machine does only ever adds to it.
        compute_s=min(cached_s, synthetic_s) if where.type == "cpu" else synthetic_s,
        flops=watched.flops,
        calls=watched.calls,
        samples_s={},
        batch_bytes=size,
        batch_examples=batch_examples or seen,
        examples=seen if examples is None else examples,
        workers=0,
        device=str(where),
    )


def _finish(
    watched: LoopProbe, loader: Any, where: torch.device, prices: tuple[float | None, Mapping[str, float]]
) -> Profile:
    loop = loop_times(watched, where)
    samples_s, collate_s, stacks = _read_alone(loader, loop.batch_examples)
    loop = replace(
        loop,
        samples_s=samples_s,
        examples=_count(loader, loop.batch_examples),
        workers=int(getattr(loader, "num_workers", 0)),
    )
    hottest = stacks.hottest()
    said = "" if hottest is None else f"{source_of(hottest[0])}, {100 * hottest[1]:.0f} % of reading a sample"
    stages = [SampleStage(name="read", seconds=fmean(samples_s.values()), note=said)] if samples_s else []
    if collate_s:
        stages.append(
            SampleStage(name="collate", seconds=collate_s, note="making a batch, its part of one sample")
        )
    resources = probe(device=str(where))
    demand, rates = demand_of(loop, resources.cpus), measure_rates(device=str(where))
    return Profile(
        loop=loop,
        tiers=predict(loop, demand, resources, rates),
        stages=tuple(stages),
        bottleneck=said,
        stacks=stacks,
        gpus=gpus_for(demand),
        elsewhere=forecast_other_gpus(loop, demand, resources, rates, prices[1]),
        elsewhere_note=say_used(loop, resources),
        price_per_hour=prices[0],
    )


def _read_alone(loader: Any, examples: int) -> tuple[dict[int, float], float, StackSamples]:
    """Single samples in this process: seconds of each, of its part of making a batch, and where they went."""
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return {}, 0.0, StackSamples()
    count = len(data)
    numbers = list(range(0, count, max(1, count // SAMPLES)))[:SAMPLES]
    kept: list[Any] = []
    took: dict[int, float] = {}

    def read(number: int) -> None:
        sample = data[number]
        if len(kept) < examples:
            kept.append(sample)

    stacks = watch(lambda: took.update(time_samples(read, numbers)))
    collate = getattr(loader, "collate_fn", None)
    if collate is None or not kept:
        return took, 0.0, stacks
    collate_s = min(time_samples(lambda _: collate(kept), range(3)).values())
    return took, collate_s / len(kept), stacks


def _count(loader: Any, examples: int) -> int:
    """Return the number of examples of an epoch, as far as the loader tells."""
    data: Any = getattr(loader, "dataset", None)
    if hasattr(data, "__len__"):
        return len(data)
    return len(loader) * examples if hasattr(loader, "__len__") else examples
