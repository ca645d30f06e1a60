"""The training loop: passes, steps, evaluations, and when to write what.

`TrainLoop` knows neither networks nor data. An `Objective` says what is learned: the operator on latents
(`objective.py`), or whatever has a loss for each record (`stoker.run.fitting`).

A step depends on weights, optimizer state, random state, batch and step number alone; the learning rate is
arithmetic on the step number. So a checkpoint of these, with the loader's place, continues a run bit for bit
(on one CPU, one number of threads) from any step.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import DivergedError, Interrupted, Problem
from stoker.monitor.meter import EVERY_S, PARTS, StallJournal, StallMeter, StallReport, journal_name
from stoker.plan.resources import give_back
from stoker.plan.tiers import TIERS
from stoker.runtime.signals import TOGETHER_S, takes
from stoker.schema import Json
from stoker.train.config import BatchLoader, EventSink, Schedule, TrainConfig, TrainStage
from stoker.train.state import Checkpoint, Kind, MetricsLog, save_checkpoint

FINAL_RATE = 0.01
"""Part of the peak learning rate at which the cosine ends."""


def learning_rate(
    step: int, total: int, *, peak: float, warmup: float, schedule: Schedule = "cosine"
) -> float:
    """Return the rate of a step, counted from 0: a linear rise, then a cosine down to a hundredth of `peak`.

    With the schedule `constant` it stays at `peak` after the rise.

    >>> [round(learning_rate(step, 4, peak=1.0, warmup=0.5), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.505]
    """
    rise = round(warmup * total)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule == "constant":
        return peak
    part = (step - rise) / max(1, total - rise)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * part)))


LOSS = "the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about a step before the weights move."""

    epoch: int
    step: int
    errors: Tensor
    """Error per example, `(B,)`."""
    norm: Tensor
    """Norm of all gradients, a scalar."""
    index: Tensor
    """Sample number and start per example, `(B, 2)`."""
    task: str | None = None
    """Of a mixture: which cache the sample numbers are of."""


class FiniteGuard:
    """Looks at every step of all ranks. On a CPU at once; on a GPU one step later: the queue never drains.

    `check` must be called before weights are saved: a poisoned step must not become a checkpoint.
    """

    def __init__(
        self, device: torch.device, ranks: Ranks = SINGLE_PROCESS, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """`stop` says whether this process was asked to stop; ranks exchange it with the step's result."""
        self._ranks = ranks
        self._stop = stop
        self.stopping = False
        """True if any rank had been asked to stop when the ranks last exchanged a result."""
        self._device, self._cuda = device, device.type == "cuda"
        self._flag = torch.ones((), dtype=torch.bool, pin_memory=self._cuda, device="cpu")
        self._event = torch.cuda.Event() if self._cuda else None
        self._pending: StepFacts | None = None

    def submit(self, facts: StepFacts) -> None:
        """Take a step in, before its optimizer step.

        Raises:
            DivergedError: It (on a GPU: the one before) is not finite.
        """
        self.check()
        finite = torch.isfinite(facts.errors).all() & torch.isfinite(facts.norm)
        self._flag.copy_(finite.detach(), non_blocking=self._cuda)
        self._pending = facts
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))  # of another GPU it says nothing
        else:
            self.check()

    def check(self) -> None:
        """Judge the step submitted last.

        Raises:
            DivergedError: It is not finite.
        """
        facts, self._pending = self._pending, None
        if facts is None:
            return
        if self._event is not None:
            self._event.synchronize()
        own, where = not bool(self._flag), f"step {facts.step}"
        bad, stops = self._ranks.all_sum([float(own), float(self._stop())], where)
        self.stopping = stops > 0
        if bad:
            told = self._ranks.all_gather(json.dumps(_describe(facts)) if own else "", where)
            causes = [Problem(*json.loads(text)) for text in told if text]
            # A gradient that one rank spoils is spoilt on all: who lost the loss itself knows the sample.
            blamed = [one for one in causes if one.fact.startswith(LOSS)] or causes
            raise DivergedError.of_all(blamed[:1])


def _describe(facts: StepFacts) -> Problem:
    errors = facts.errors.detach().float().cpu()
    bad = ~torch.isfinite(errors)
    count = int(bad.sum())
    row = int(bad.int().argmax() if count else errors.argmax())  # the first bad one
    number, start = int(facts.index[row, 0]), int(facts.index[row, 1])
    what = LOSS if count else "the gradient"
    of = "" if facts.task is None else f" of {facts.task}"
    sample = f"sample {number}{of}"
    blame = f"first at {sample}, time step {start}" if count else f"largest loss at {sample}"
    more = f" ({count} of {len(errors)} examples)" if count else ""
    return Problem(
        f"{what} is not finite in epoch {facts.epoch}, step {facts.step}, {blame}{more}",
        f"Expected a finite number. Look at cache[{number}] for NaN or extreme values, else lower "
        "training.lr; the last checkpoint is from before this step",
    )


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of a batch, with a graph behind it."""

    values: Tensor
    """Of each example, `(B,)`."""
    index: Tensor
    """Sample number and start of each example, `(B, 2)`."""
    task: str | None = None
    """Of a mixture: which cache the sample numbers are of."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step; tensors on the device, so that nothing waits for it."""

    losses: Tensor
    """Of each example, `(B,)`."""
    mean: Tensor
    """Their mean, from which the gradient is."""
    norm: Tensor
    """Norm of the gradient before it was clipped."""


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Moves the weights of some models, batch by batch."""

    losses: Callable[[Any], Losses]
    """The objective: the losses of a batch."""
    models: Sequence[nn.Module]
    """Each is clipped on its own: what a decoder learns must not shorten an operator's steps."""
    optimizer: Any
    """A `torch.optim.Optimizer`, whose methods carry no types."""
    grad_clip: float | None
    """Largest norm of a model's gradient; None: as it comes."""
    device: torch.device
    amp: bool = False
    """Compute losses in bfloat16 where that is safe."""
    ranks: Ranks = SINGLE_PROCESS
    stopped: Callable[[], bool] = lambda: False
    """Returns True once this process is asked to stop; the ranks exchange it with each step."""
    guard: FiniteGuard = field(init=False)
    """Raises at the first step that is not finite."""

    def __post_init__(self) -> None:
        """Make the guard of these steps."""
        self.guard = FiniteGuard(self.device, self.ranks, self.stopped)

    def step(self, batch: Any, *, rate: float, epoch: int, number: int) -> StepResult:
        """Move the weights once.

        Args:
            batch: One batch of the loader.
            rate: The learning rate.
            epoch, number: Of this step, both from 1, for messages.
        Raises:
            DivergedError: This step (on a GPU: the one before) is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            found = self.losses(batch)
        mean: Any = found.values.mean()
        self.optimizer.zero_grad(set_to_none=True)
        with self.ranks.waiting(f"step {number}"):
            mean.backward()
        limit = self.grad_clip or math.inf
        norms = [nn.utils.clip_grad_norm_(model.parameters(), limit) for model in self.models]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        facts = StepFacts(
            epoch=epoch, step=number, errors=found.values, norm=norm, index=found.index, task=found.task
        )
        self.guard.submit(facts)
        self.optimizer.step()
        return StepResult(found.values.detach(), mean.detach(), norm)


# ----------------------------------------------------------------------------------------------------------
# SIGTERM and SIGINT as a flag that the loop looks at between two steps.


class StopFlag:
    """Context in which the first signal only sets `signal_name`; a second one acts as it would without us.

    Outside the main thread, where Python allows no handlers, it never sets anything. A signal that the
    program ignores stays ignored.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._since = 0.0

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if takes(number):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self._since = signal.Signals(number).name, now
        elif now - self._since > TOGETHER_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


# ----------------------------------------------------------------------------------------------------------
# Progress of a run, and the protocol of what it trains.


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """Progress of a run; all of it goes into a checkpoint as JSON."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes finished and evaluated."""
    batch: int = 0
    """Batches done of the pass after those; all of them while it waits to be evaluated."""
    whole: bool = False
    """They were all batches of the pass, with the length that it had then. While a cache is being filled, the
    pass may have another length when the run continues, since quarantined samples are tried again."""
    best: float | None = None
    """Lowest validation error of this stage."""
    best_epoch: int = 0
    """Passes finished when it was measured."""
    unjudged: bool = False
    """Steps were done since the last evaluation."""
    wait_s: float = 0.0
    """Seconds waited for data."""
    step_s: float = 0.0
    """Seconds spent in steps."""
    timed: int = 0
    """Steps that those seconds are of: a pass that was broken off is not among them."""
    tiers: dict[str, int] = field(default_factory=dict[str, int])
    """Examples by the tier that served them."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """`wait_s` by what it was for."""
    ceiling_step_s: float | None = None
    """Seconds of a step that never waits, measured last."""
    errors: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """The last evaluation."""
    stage: int = 0
    """Place of the stage among the run's."""
    stage_step: int = 0
    """Steps done when it began."""
    stage_epoch: int = 0
    """Passes finished when it began."""

    @property
    def epochs_without_better(self) -> int:
        """Passes since the best evaluation, which patience counts."""
        return self.epoch - self.best_epoch

    @property
    def lost(self) -> float | None:
        """Fraction that the run is below its ceiling, 0..1; None until it is measured."""
        spent_s = self.wait_s + self.step_s
        if self.ceiling_step_s is None or not spent_s:
            return None
        return max(0.0, 1.0 - self.ceiling_step_s * self.timed / spent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSummary:
    """Facts that the loop knows about a pass when it was evaluated."""

    epoch: int
    """Its number, from 1."""
    lr: float
    """Rate of its last step."""
    stall: float | None
    """Part of its time that was waited for data; None without a meter."""
    train_s: float
    """Seconds of its steps, loading included."""
    eval_s: float
    """Seconds of its evaluation."""


class Objective(Protocol):
    """Models to train, their losses and figures, and their part of a checkpoint.

    The loop calls `begin_pass`, then `count` after each step of the pass, then `evaluate` and `epoch_row`.
    """

    @property
    def progress(self) -> TrainProgress:
        """The progress of the run; the loop advances it."""
        ...

    @property
    def stage(self) -> TrainStage:
        """Length, peak learning rate and patience of the part of the run that it is in."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        ...

    @property
    def facts(self) -> dict[str, Json]:
        """Facts about the models and how they compute, to report when a stage starts."""
        ...

    def stepper(self, ranks: Ranks = SINGLE_PROCESS, stopped: Callable[[], bool] = ..., /) -> Stepper:
        """Return what moves the weights of this stage; `stopped` tells if this process was asked to stop."""
        ...

    def twin(self) -> Objective | None:
        """Return a copy of everything that a step changes; None: the time of a step is not measured."""
        ...

    def begin_pass(self, *, resumed: bool) -> None:
        """Zero the sums of a pass; `resumed`: only those that begin again in the middle of one."""
        ...

    def count(self, done: StepResult, lr: float, log_every: int) -> tuple[str, dict[str, Json]] | None:
        """Add a step, which `progress` counts already; return an event where it is time for one."""
        ...

    def evaluate(self, interruptible: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        """Measure `progress.errors`; batches are taken through `interruptible`, which may raise."""
        ...

    @property
    def error(self) -> float | None:
        """The one of `progress.errors` that decides which weights are best, lower being better."""
        ...

    def epoch_row(self, figures: PassSummary) -> dict[str, Json]:
        """Return the line of a pass, whose batches `progress` still counts."""
        ...

    def checkpoint(self, place: Mapping[str, Any]) -> Checkpoint | None:
        """Return all that it takes to continue, `place` being the loader's; None: another rank writes it."""
        ...


# ----------------------------------------------------------------------------------------------------------
# Report a run's meter during the run: to listeners, to `stall.jsonl`, and in the progress.


TELL_S = 1.0
"""Seconds between two events `stall`."""


class StallRecorder:
    """Reads the meter of one run. A run without a meter has one that says nothing."""

    def __init__(
        self,
        meter: StallMeter | None,
        folder: Path | None,
        tell: EventSink,
        ranks: Ranks = SINGLE_PROCESS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin; without a folder no lines are written."""
        self._meter = meter
        self._tell = tell
        self._ranks = ranks
        self._facts: dict[str, Json] = {}
        self._total = 0
        self._told: StallJournal | None = None
        self._written: StallJournal | None = None
        if meter is None:
            return
        meter.reset()
        self._told = StallJournal(meter, every_s=TELL_S, clock=clock)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # on a machine without rank 0 it does not exist yet
            path = folder / journal_name(meter.epoch().rank)
            self._written = StallJournal(meter, path, every_s=EVERY_S, clock=clock)

    def begin_pass(self) -> None:
        """Start counting again: time between two passes is neither waiting nor stepping."""
        if self._meter is not None:
            self._meter.reset()
        for journal in (self._told, self._written):
            if journal is not None:
                journal.restarted()

    def tick(self, progress: TrainProgress, total: int) -> None:
        """Tell and write what is due after a step."""
        if self._told is None:
            return
        self._facts = {"step": progress.step, "epoch": progress.epoch + 1}
        self._total = total
        self._say(self._told.tick())
        if self._written is not None:
            self._written.tick(self._facts)

    def _say(self, interval: StallReport | None) -> None:
        if interval is not None:
            self._tell("stall", {**self._facts, "total": self._total, **interval.to_json()})

    def end_pass(self, progress: TrainProgress) -> float | None:
        """Add the pass of all ranks to `progress`; return this rank's stall, None without a meter."""
        if self._meter is None:
            return None
        if self._told is not None:
            self._say(self._told.cut())  # a pass shorter than an interval is one
        if self._written is not None:
            self._written.cut(self._facts)
        report = self._meter.epoch()
        own = [report.wait_s, report.step_s, report.batches]
        own += [report.tiers.get(tier, 0) for tier in TIERS] + [report.parts.get(part, 0.0) for part in PARTS]
        wait_s, step_s, batches, *rest = self._ranks.all_sum(own, "the end of a pass")
        progress.wait_s += wait_s
        progress.step_s += step_s
        progress.timed += int(batches)
        for tier, examples in zip(TIERS, rest, strict=False):
            if examples:
                progress.tiers[tier] = progress.tiers.get(tier, 0) + int(examples)
        for part, seconds in zip(PARTS, rest[len(TIERS) :], strict=True):
            if seconds:
                progress.parts[part] = progress.parts.get(part, 0.0) + seconds
        return report.stall

    def close(self, progress: TrainProgress) -> None:
        """Write the summary of this run."""
        if self._written is not None:
            self._written.close({"step": progress.step, "epoch": progress.epoch})


# ----------------------------------------------------------------------------------------------------------
# How long a step takes that never waits: timed on a twin, so that training itself is not touched.
#
# The twin is a copy of the models with an optimizer of its own, and takes complete steps on one batch that
# is at hand. Its weights, its random draws and its optimizer state go with it. The figure is a mean, as is
# the run's own time of a step, so that the two compare; it is taken once, when the first batch is there.
# Each rank times its own, without the exchange of gradients.


WARM_STEPS = 2
"""Steps before the clock starts: the first ones allocate, and choose kernels."""
MOST_STEPS = 10
"""Steps that are timed at most."""
BUDGET_S = 3.0
"""Seconds for them, where a step is long; one is timed whatever it takes."""
PART_OF_RUN = 0.1
"""Nothing is measured where it would be more than this part of the steps to do."""


def worth_measuring(steps_left: int) -> bool:
    """Return True if the run is long enough to spend steps on it.

    >>> worth_measuring(100), worth_measuring(300)
    (False, True)
    """
    return PART_OF_RUN * steps_left >= WARM_STEPS + MOST_STEPS


def time_steps(step: Callable[[], object], device: torch.device) -> float | None:
    """Return mean seconds of `step`; None where it runs out of memory, or diverges on one batch."""
    cuda = device.type == "cuda"

    def timed(count: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    try:
        with torch.random.fork_rng([device] if cuda else []):
            timed(WARM_STEPS - 1)
            warm_s = timed(1)
            return timed(max(1, min(MOST_STEPS, int(BUDGET_S / max(warm_s, 1e-9)))))
    except DivergedError:
        return None
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


# ----------------------------------------------------------------------------------------------------------
# The loop.


MOST_BETWEEN_LINES, LINES = 50, 40
"""Steps between two lines of the log, unless settings say otherwise; a short run has this many lines."""


def ignore_event(_kind: str, _facts: Mapping[str, Json]) -> None:
    """Do nothing."""


@dataclass(slots=True, kw_only=True)
class TrainLoop:
    """Trains one stage after the other. An objective and a loader may be replaced in between."""

    objective: Objective
    loader: BatchLoader[Any]
    config: TrainConfig
    folder: Path | None
    """The run's folder; None: nothing is written."""
    stop: StopFlag
    log: MetricsLog
    validates: bool
    """Some rank has a validation loader."""
    tell: EventSink = ignore_event
    meter: StallMeter | None = None
    """The one that the loader writes into."""
    recorder: StallRecorder
    ranks: Ranks = SINGLE_PROCESS
    on_batch: Callable[[], None] = lambda: None
    """Called when a batch is there, before its step."""
    stage: TrainStage = field(init=False)
    """The objective's, looked up once: it is asked for at every step."""
    stepper: Stepper = field(init=False)
    """Moves the weights of this stage."""
    place: Mapping[str, Any] = field(init=False)
    """The loader's place after `progress.step` steps, as far as it was asked for."""
    total: int = field(init=False)
    """Steps of the run when this stage is over, for which its learning rate is laid out."""
    log_every: int = field(init=False)
    """Steps between two `step` lines."""
    _rehearsed: bool = False
    """The ceiling was measured, or the run is too short for it."""
    _saved_s: float = field(default_factory=time.monotonic)
    """When the last checkpoint was written, or training began."""
    _best: Checkpoint | None = None
    """The best epoch, while it is not written."""

    def train_stage(self, event: str) -> None:
        """Do what is left of the objective's stage: passes until its epochs, steps or patience are used up.

        Args:
            event: How the start of it is told: `start` or `stage`.

        Raises:
            DivergedError: A loss or gradient is not finite; names epoch, step and sample.
            Interrupted: SIGTERM or SIGINT; with a folder, a checkpoint was written first.
            StalledError: Another rank ended, or did not come within the timeout.
        """
        self._enter(event)
        while self._continues():
            begun_s = time.perf_counter()
            over, stall = self._pass()
            self._evaluate(time.perf_counter() - begun_s, stall, over=over)

    def _enter(self, event: str) -> None:
        """Prepare the loss, the learning rate and the length of a stage, and say so."""
        config, progress = self.config, self.objective.progress
        self.stage = stage = self.objective.stage
        self.stepper = self.objective.stepper(self.ranks, lambda: self.stop.signal_name is not None)
        self.place = self.loader.state_dict()
        steps = progress.stage_step + stage.epochs * len(self.loader)
        self.total = min(steps, config.max_steps or 1 << 62)
        own = self.total - progress.stage_step
        self.log_every = config.log_every or max(1, min(MOST_BETWEEN_LINES, own // LINES))
        facts: dict[str, Json] = {
            "step": progress.step,
            "total": self.total,
            "batches": len(self.loader),
            "device": str(self.objective.device),
            "ranks": self.ranks.world_size,
            **self.objective.facts,
        }
        self.log.append({"kind": event, **facts})
        self.tell(event, facts)

    def _continues(self) -> bool:
        """Return True if steps are left, or those done are not evaluated yet (a signal came in between)."""
        progress, stage = self.objective.progress, self.stage
        patient = stage.patience is None or progress.epochs_without_better < stage.patience
        passes = progress.epoch - progress.stage_epoch
        return progress.unjudged or (passes < stage.epochs and progress.step < self.total and patient)

    def _pass(self) -> tuple[bool, float | None]:
        """Do the rest of a pass.

        Returns:
            True if it is over, which it is not when `total` steps are done before; and its stall.
        """
        progress = self.objective.progress
        if progress.batch == 0:
            self.loader.set_epoch(progress.epoch)
        self.objective.begin_pass(resumed=progress.batch > 0)
        self.recorder.begin_pass()
        over = progress.whole or progress.batch >= len(self.loader)
        if not over and progress.step < self.total:
            for batch in self.loader:
                self.on_batch()
                self._measure_ceiling(batch)
                self._step(batch)
                self.recorder.tick(progress, self.total)
                self._after_step()
                if progress.step >= self.total:
                    over = progress.whole
                    break
            else:
                over = True  # whatever its length was thought to be
        self.stepper.guard.check()
        if over:
            self.place = self.loader.state_dict()
        return over, self.recorder.end_pass(progress)

    def _measure_ceiling(self, batch: Any) -> None:
        """Time steps on a twin when the first batch is at hand; after that, nothing."""
        meter, progress = self.meter, self.objective.progress
        if self._rehearsed or meter is None:
            return
        self._rehearsed = True
        if not worth_measuring(self.total - progress.step):
            return
        begin, twin = time.perf_counter(), self.objective.twin()
        if twin is None:
            return
        step = partial(twin.stepper().step, batch, rate=self._rate(progress.step), epoch=1, number=1)
        progress.ceiling_step_s = time_steps(step, self.objective.device)
        if progress.ceiling_step_s is not None:
            meter.ceiling(progress.ceiling_step_s)
        del twin, step
        give_back(self.objective.device)  # the peak of two models is not what this one will want
        meter.outside(time.perf_counter() - begin)

    def _step(self, batch: Any) -> None:
        """Move the weights once, and say so when it is time to."""
        progress = self.objective.progress
        rate = self._rate(progress.step)
        done = self.stepper.step(batch, rate=rate, epoch=progress.epoch + 1, number=progress.step + 1)
        progress.step += 1
        progress.batch += 1
        progress.whole = progress.batch >= len(self.loader)
        progress.unjudged = True
        event = self.objective.count(done, rate, self.log_every)
        if event is not None:
            kind, facts = event
            self.log.append({"kind": kind, **facts})
            self.tell(kind, facts)

    def _rate(self, step: int) -> float:
        begun, config = self.objective.progress.stage_step, self.config
        return learning_rate(
            step - begun,
            self.total - begun,
            peak=self.stage.lr,
            warmup=config.warmup,
            schedule=config.schedule,
        )

    def _after_step(self) -> None:
        """Save when it is time to, or asked for from outside."""
        progress, every = self.objective.progress, self.config.checkpoint_every
        due = every is not None and progress.step % every == 0
        last = progress.step >= self.total
        alone = self.ranks.world_size == 1  # no other rank has to stop at the same step
        asked = self.stepper.guard.stopping or (alone and self.stop.signal_name is not None)
        if due or last or asked:
            self.place = self.loader.state_dict()  # only while iterating does it name the next batch
        if due and not last:
            self.save()
        if asked:
            self._stop()

    def _evaluate(self, train_s: float, stall: float | None, *, over: bool) -> None:
        """Validate the weights, write the epoch's line and its checkpoints, and start the next pass."""
        objective, progress = self.objective, self.objective.progress
        begun_s = time.perf_counter()
        if self.validates:
            objective.evaluate(self._until_stopped)
            if self.ranks.any(self.stop.signal_name is not None, "the end of an evaluation"):
                self._stop()
        epoch = progress.epoch + 1
        if over:
            progress.epoch = epoch
        progress.unjudged = False
        error, best = objective.error, progress.best
        better = error is not None and (best is None or error < best - self.config.delta)
        if better:
            progress.best, progress.best_epoch = error, progress.epoch
        eval_s, lr = time.perf_counter() - begun_s, self._rate(progress.step - 1)
        row = objective.epoch_row(
            PassSummary(epoch=epoch, lr=lr, stall=stall, train_s=train_s, eval_s=eval_s)
        )
        if over:
            progress.batch, progress.whole = 0, False
        self.log.append({"kind": "epoch", **row})
        if better:
            self._best = self._checkpoint()
        if self._is_due():
            self.save()
        elif self._best is not None and better:  # training changes its tensors before it is written
            self._best = _copied(self._best)
        self.tell("epoch", row)

    def _until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches to validate on. Ranks have different numbers of them, and stop after the last."""
        for batch in batches:
            if self.ranks.world_size == 1 and self.stop.signal_name is not None:
                self._stop()
            yield batch

    def _is_due(self) -> bool:
        """Return True if the checkpoint of an epoch is due; all ranks agree."""
        every_s = self.config.save_every_s
        if not every_s or not self._continues():
            return True
        return self.ranks.any(time.monotonic() - self._saved_s >= every_s, "the end of an epoch")

    def _checkpoint(self) -> Checkpoint | None:
        """Return all that it takes to continue from here; never of a step that is not finite."""
        self.stepper.guard.check()
        return None if self.folder is None else self.objective.checkpoint(self.place)

    def save(self) -> Path | None:
        """Write checkpoints: of the best epoch, if it is not written yet, and then of this step.

        Returns:
            The folder of the last one; None: the run has none, or another rank writes.
        """
        path: Path | None = None
        found: dict[Kind, Checkpoint | None] = {"best": self._best, "last": self._checkpoint()}
        for kind, checkpoint in found.items():
            if checkpoint is not None and self.folder is not None:
                begun_s = time.perf_counter()
                path = save_checkpoint(self.folder / "checkpoints", kind, checkpoint)
                event, took_s = "checkpoint" if kind == "last" else "best", time.perf_counter() - begun_s
                self.tell(event, {"path": str(path), "step": checkpoint.step, "seconds": round(took_s, 4)})
        self._best, self._saved_s = None, time.monotonic()
        return path

    def _stop(self) -> None:
        """Raise Interrupted, with a checkpoint written; the signal may have come to another rank."""
        path = self.save()
        progress, name = self.objective.progress, self.stop.signal_name or "a signal to another rank"
        self.tell("stop", {"signal": name, "step": progress.step})
        kept = "nothing of it is kept"
        if self.folder is not None:
            kept = (
                f"saved {path or self.folder / 'checkpoints'}. The same command continues from there; from "
                "Python, TrainConfig(resume=True)"
            )
        raise Interrupted(f"{name} after step {progress.step} in epoch {progress.epoch + 1}; {kept}")


def _copied(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same with tensors of its own: training changes those of the models."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in tensors.items()}

    return replace(checkpoint, model=copies(checkpoint.model), optimizer=copies(checkpoint.optimizer))
