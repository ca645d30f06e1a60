"""Profile a loader and a step function, or a script that has both."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from stoker.errors import ConfigError, StalledError
from stoker.plan import measure_rates, probe
from stoker.profile.probe import Enough, Probe, size_of
from stoker.profile.result import Loop, Profile, gpus_for, predict
from stoker.profile.stacks import Stacks, source_of, time_samples, watch

STEPS = 50
SAMPLES = 256
"""Samples that are read alone, at most."""
TIMEOUT_S = 600.0


def profile(
    loader: Iterable[Any],
    step: Callable[[Any], object],
    *,
    steps: int = STEPS,
    device: str | None = None,
    price_per_hour: float | None = None,
) -> Profile:
    """Where the time of a loop goes, and what each tier would make of it.

    Steps are really taken, three times `steps` of them: give a copy of a model that matters.

    Args:
        loader: Any iterable of batches; of a `DataLoader` single samples are timed too.
        step: Takes one batch.
        steps: Batches timed of each kind: the loop's own, one at hand, a made-up one.
        device: Where steps compute; None: a GPU where there is one.
        price_per_hour: For costs of an epoch.

    Raises:
        ConfigError: The loader has no more than two batches, or `steps` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}. Expected at least 1")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    watched = Probe(loader, steps=steps, device=where)
    try:
        for batch in watched:
            step(batch)
    except Enough:
        pass
    return _finish(watched, loader, where, price_per_hour)


def profile_script(
    path: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = STEPS,
    price_per_hour: float | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Profile:
    """Run a script until its first `DataLoader` has been timed, then end it.

    All that the script does before its loop is done; nothing after it is, but for `finally` blocks. Its loop
    takes three times `steps` steps.

    Raises:
        ConfigError: There is no such script, or it iterates no `DataLoader`.
        StalledError: It takes longer than `timeout_s`.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Expected a Python script that trains")
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[tuple[Probe, Any]] = []
    plain = DataLoader.__iter__

    def instrumented(loader: Any) -> Any:
        if found:
            return plain(loader)
        watched = Probe(_Plain(loader, plain), steps=steps, device=where)
        found.append((watched, loader))
        return iter(watched)

    arguments_before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    DataLoader.__iter__ = cast("Any", instrumented)
    try:
        with _deadline(timeout_s, f"{path} did not get through {3 * steps} steps"):
            runpy.run_path(str(path), run_name="__main__")
    except (Enough, SystemExit):
        pass
    finally:
        DataLoader.__iter__ = plain
        sys.argv = arguments_before
        sys.path.remove(str(path.resolve().parent))
    if not found:
        raise ConfigError(f"{path} iterated no torch DataLoader. Expected a script that trains with one")
    return _finish(*found[0], where, price_per_hour)


class _Plain:
    """A loader as it is when nobody looks."""

    def __init__(self, loader: Any, plain: Callable[[Any], Any]) -> None:
        self._loader, self._plain = loader, plain

    def __iter__(self) -> Any:
        return self._plain(self._loader)


@contextmanager
def _deadline(seconds: float, what: str) -> Generator[None]:
    """End a block that takes longer."""

    def late(*_: object) -> None:
        raise StalledError(f"{what} within {seconds:g} s. Give more with --timeout, or fewer --steps")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _finish(watched: Probe, loader: Any, where: torch.device, price: float | None) -> Profile:
    times = watched.times
    if watched.batch is None or not times["full"].steps_s:
        raise ConfigError(
            "the loader has no more than two batches. Expected some more, so that one can be timed"
        )
    size, examples = size_of(watched.batch)
    samples_s, collate_s, stacks = _read_alone(loader, examples)
    loop = Loop(
        wait_s=times["full"].wait_s,
        step_s=times["full"].step_s,
        cached_s=times["cached"].step_s,
        # On a CPU both are the same work, and what else the machine does only ever adds to it.
        compute_s=min(times["cached"].step_s, times["synthetic"].step_s)
        if where.type == "cpu"
        else times["synthetic"].step_s,
        collate_s=collate_s,
        samples_s=samples_s,
        batch_bytes=size,
        batch_examples=examples,
        examples=_count(loader, examples),
        workers=int(getattr(loader, "num_workers", 0)),
        device=str(where),
    )
    hottest = stacks.hottest()
    said = "" if hottest is None else f"{source_of(hottest[0])}, {100 * hottest[1]:.0f} % of reading a sample"
    return Profile(
        loop=loop,
        tiers=predict(loop, probe(device=str(where)), measure_rates(device=str(where))),
        bottleneck=said,
        stacks=stacks,
        gpus=gpus_for(loop),
        price_per_hour=price,
    )


def _read_alone(loader: Any, examples: int) -> tuple[dict[int, float], float, Stacks]:
    """Single samples in this process: seconds of each, of making a batch of them, and where they went."""
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return {}, 0.0, Stacks()
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
    return took, collate_s * examples / len(kept), stacks


def _count(loader: Any, examples: int) -> int:
    """Examples of an epoch, as far as the loader tells."""
    data: Any = getattr(loader, "dataset", None)
    if hasattr(data, "__len__"):
        return len(data)
    return len(loader) * examples if hasattr(loader, "__len__") else examples
