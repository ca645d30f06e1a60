"""Train the latent operator: passes, steps, evaluations, and when to write what.

A step depends on weights, optimizer state, batch and step number alone; the learning rate is arithmetic on
the step number. So a checkpoint of these, with the loader's place, continues a run bit for bit (on one CPU,
one number of threads) from any step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.errors import ConfigError, DivergedError, Interrupted
from stoker.monitor.meter import EVERY_S, PARTS, StallJournal, StallMeter, StallReport, journal_name
from stoker.plan.resources import give_back
from stoker.plan.tiers import TIERS
from stoker.scale.ranks import ALONE, Ranks
from stoker.schema import Json
from stoker.train.config import (
    EventSink,
    FieldSpace,
    PhysicalSpace,
    Stage,
    StageName,
    TrainConfig,
    TrainReport,
)
from stoker.train.evaluate import (
    ERRORS,
    LOST,
    Errors,
    Validation,
    by_task,
    errors_of,
    evaluate,
    judge,
    with_lost,
)
from stoker.train.guard import StopFlag
from stoker.train.operator import PairBatch, PairLoader
from stoker.train.report import Section, write_report
from stoker.train.run import (
    Kind,
    Progress,
    Run,
    begin,
    changed,
    check_same,
    check_validation,
    make_optimizer,
    newest_checkpoint,
    own_folder,
    take_up,
)
from stoker.train.step import Stepper, learning_rate

# ----------------------------------------------------------------------------------------------------------
# Report a run's meter during the run: to listeners, to `stall.jsonl`, and in the progress.


TELL_S = 1.0
"""Seconds between two events `stall`."""


class Pace:
    """Reads the meter of one call of `train`. A run without a meter has one that says nothing."""

    def __init__(
        self,
        meter: StallMeter | None,
        folder: Path,
        tell: Callable[[str, Mapping[str, Json]], None],
        ranks: Ranks = ALONE,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._tell = tell
        self._ranks = ranks
        self._facts: dict[str, Json] = {}
        self._total = 0
        self._journals: tuple[StallJournal, StallJournal] | None = None
        if meter is not None:
            meter.reset()
            folder.mkdir(parents=True, exist_ok=True)  # on a machine without rank 0 it does not exist yet
            path = folder / journal_name(meter.epoch().rank)
            self._journals = (
                StallJournal(meter, every_s=TELL_S, clock=clock),
                StallJournal(meter, path, every_s=EVERY_S, clock=clock),
            )

    def begin_pass(self) -> None:
        """Start counting again: time between two passes is neither waiting nor stepping."""
        if self._meter is not None and self._journals is not None:
            self._meter.reset()
            for journal in self._journals:
                journal.restarted()

    def tick(self, progress: Progress, total: int) -> None:
        """After a step: tell and write what is due."""
        if self._journals is None:
            return
        told, written = self._journals
        self._facts = {"step": progress.step, "epoch": progress.epoch + 1}
        self._total = total
        self._say(told.tick())
        written.tick(self._facts)

    def _say(self, interval: StallReport | None) -> None:
        if interval is not None:
            self._tell("stall", {**self._facts, "total": self._total, **interval.to_json()})

    def end_pass(self, progress: Progress) -> None:
        """Add the pass of all ranks to `progress`."""
        if self._meter is None or self._journals is None:
            return
        told, written = self._journals
        self._say(told.cut())  # a pass shorter than an interval is one
        written.cut(self._facts)
        report = self._meter.epoch()
        own = [report.wait_s, report.step_s, report.batches]
        own += [report.tiers.get(tier, 0) for tier in TIERS] + [report.parts.get(part, 0.0) for part in PARTS]
        wait_s, step_s, batches, *rest = self._ranks.sums(own, "the end of a pass")
        progress.wait_s += wait_s
        progress.step_s += step_s
        progress.timed += int(batches)
        for tier, examples in zip(TIERS, rest, strict=False):
            if examples:
                progress.tiers[tier] = progress.tiers.get(tier, 0) + int(examples)
        for part, seconds in zip(PARTS, rest[len(TIERS) :], strict=True):
            if seconds:
                progress.parts[part] = progress.parts.get(part, 0.0) + seconds

    def close(self, progress: Progress) -> None:
        """Write the summary of this call."""
        if self._journals is not None:
            self._journals[1].close({"step": progress.step, "epoch": progress.epoch})


# ----------------------------------------------------------------------------------------------------------
# How long a step takes that never waits: timed on a twin, so that training itself is not touched.
#
# The twin is a copy of the operator with an optimizer of its own, and takes whole steps on one batch that
# is at hand. Its weights, its random draws and its optimizer state go with it. The figure is a mean, as is
# the run's own time of a step, so that the two compare; it is taken once, when the first batch is there.
# Each rank times its own, without the exchange of gradients.


WARM_STEPS = 2
"""Steps before the clock starts: the first ones allocate, and choose kernels."""
MOST_STEPS = 10
"""Steps that are timed at most."""
BUDGET_S = 3.0
"""Seconds for them, where a step is long; one is timed whatever it takes."""
LEAST_LR = 1e-12
"""Weights stay where they are: made-up batches must not make them diverge."""
PART_OF_RUN = 0.1
"""Nothing is measured where it would be more than this part of the steps to do."""


def worth_measuring(steps_left: int) -> bool:
    """Whether the run is long enough to spend steps on it.

    >>> worth_measuring(100), worth_measuring(300)
    (False, True)
    """
    return PART_OF_RUN * steps_left >= WARM_STEPS + MOST_STEPS


def twin_of(run: Run) -> Run:
    """The same run with a copy of everything that a step changes."""
    twin = replace(
        run,
        model=copy.deepcopy(run.model),
        decoder=copy.deepcopy(run.decoder),
        progress=copy.deepcopy(run.progress),
        loss_sum=run.loss_sum.clone(),
    )
    twin.optimizer = make_optimizer(twin.trained, run.config)
    twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return twin


def steps_of(loader: PairLoader, config: TrainConfig, folder: Path) -> Callable[[Any], object]:
    """Return a function that takes one whole training step on a batch of `loader`, and keeps nothing.

    Args:
        loader: Of which the operator's shape and scales are learnt.
        config: As for `train`; its stages and inverse losses are left out.
        folder: An empty one; nothing is left in it.

    Raises:
        StokerError: As `train`.
    """
    config = replace(config, resume=False, stages=(), lambda_inv_enc=0.0, lambda_inv_dec=0.0)
    stepper = begin(folder, config, loader, lambda: None, ALONE).stepper()
    return partial(stepper.step, rate=LEAST_LR, epoch=1, number=1)


def time_steps(step: Callable[[], object], device: torch.device) -> float | None:
    """Mean seconds of `step`; None where it fails for want of memory, or because it diverges on one batch."""
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


MOST_BETWEEN_LINES, LINES = 50, 40
"""Steps between two lines of the log, unless settings say otherwise; a short run has this many lines."""


def train(  # noqa: PLR0913  the face: two loaders, and all else by name
    train_loader: PairLoader,
    val_loader: Validation,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    meter: StallMeter | None = None,
    on_event: EventSink | None = None,
    ranks: Ranks = ALONE,
    physical: PhysicalSpace | Mapping[str, PhysicalSpace] | None = None,
    about: Callable[[], Sequence[Section]] = tuple,
    space: FieldSpace | None = None,
    loader_of: Callable[[Stage], PairLoader] | None = None,
    only: StageName | None = None,
) -> TrainReport:
    """Train an operator, in stages if `config` has some; leave metrics, curves, a report and checkpoints in
    `run_dir`.

    Args:
        train_loader: Latent pairs.
        val_loader: The same, or by name those of each task, which is then validated separately; None: no
            validation.
        config: Settings; with `resume`, the run in `run_dir` continues where it stopped.
        run_dir: Without `resume`, a run that is there is moved aside (`*.previous`).
        meter: The one that `train_loader` writes into.
        on_event: Told of what happens, see `EventSink`.
        ranks: The processes that train together, each with its own part of both sets; rank 0 writes and
            tells. A rank that has nothing to validate gives None while others validate.
        physical: Validation decodes states with it, and reports errors of fields as well as of states; by
            task where there are several.
        about: More for the run's page, asked for when it is over.
        space: What stages that train a decoder need.
        loader_of: The training loader of a stage, asked for as it begins; None: all have `train_loader`,
            as a stage has that gets the same one again.
        only: Do this stage alone: the first one begins a run, a later one continues the run in `run_dir`.

    Raises:
        ConfigError: The training loader has no batch, another training is writing to `run_dir`, or the
            stages before `only` are not done.
        DivergedError: The loss or a gradient is not finite; names epoch, step and sample.
        Interrupted: SIGTERM or SIGINT; a checkpoint was written first.
        StaleStateError: The run to resume has another operator, or the loader refuses its place.
        StalledError: Another rank ended, or did not come within the deadline.
    """
    check_validation(val_loader, max(s.patience or 0 for s in config.all_stages) or None, ranks)
    folder = Path(run_dir)
    with StopFlag() as stop, own_folder(folder) if ranks.leads else nullcontext():
        session = Session(
            train_loader=train_loader,
            val_loader=val_loader,
            config=config,
            folder=folder,
            stop=stop,
            meter=meter,
            sink=on_event if ranks.leads else None,
            ranks=ranks,
            physical={"": physical} if isinstance(physical, PhysicalSpace) else physical or {},
            about=about,
            space=space,
            loader_of=loader_of,
            only=only,
        )
        session.train()
        return session.finish()


@dataclass(slots=True, kw_only=True)
class Session:
    """One call of `train`."""

    train_loader: PairLoader
    val_loader: Validation
    config: TrainConfig
    folder: Path
    stop: StopFlag
    meter: StallMeter | None
    sink: EventSink | None
    ranks: Ranks
    physical: Mapping[str, PhysicalSpace]
    """By task; of one alone under an empty name."""
    about: Callable[[], Sequence[Section]]
    space: FieldSpace | None = None
    """See `train`; so are the two that follow."""
    loader_of: Callable[[Stage], PairLoader] | None = None
    only: StageName | None = None
    begun_s: float = field(default_factory=time.perf_counter)
    """Clock at the call."""
    startup: dict[str, float] = field(default_factory=dict[str, float])
    """As in `TrainReport`."""
    run: Run = field(init=False)
    validates: bool = field(init=False)
    """Some rank has a validation loader."""
    stepper: Stepper = field(init=False)
    """Moves the weights of this stage."""
    pace: Pace = field(init=False)
    total: int = field(init=False)
    """Steps of the run when this stage is over, for which its learning rate is laid out."""
    log_every: int = field(init=False)
    """Steps between two `step` lines."""
    rehearsed: bool = False
    """The ceiling was measured, or the run is too short for it."""
    logged: int = 0
    """Step of the last `step` line, or at which this pass began."""
    place: Mapping[str, Any] = field(init=False)
    """The loader's place after `run.progress.step` steps, as far as it was asked for."""

    def train(self) -> None:
        """Begin or resume, then stage after stage, each pass after pass until its epochs, steps or patience
        are used up.
        """
        stages = self.config.all_stages
        self.run = self._resumed() or self._begun()
        last = self._last_stage()
        self.validates = self.ranks.any(self.val_loader is not None, "the start of training")
        self.pace = Pace(self.meter, self.folder, self._tell, self.ranks)
        begun = False
        for number in range(self.run.progress.stage, last + 1):
            if number != self.run.progress.stage:
                self._use_loader(stages[number])
                self.run.begin_stage(number)
            self._enter(stages[number], "stage" if begun else "start")
            begun = True
            while self._goes_on():
                begun_s = time.perf_counter()
                over = self._pass()
                self._evaluate(time.perf_counter() - begun_s, over=over)
            self._leave(number)

    def _begun(self) -> Run:
        """A new run.

        Raises:
            ConfigError: A later stage alone was asked for.
        """
        stages = self.config.all_stages
        if self.only is not None and self.only != stages[0].name:
            raise ConfigError(
                f"stage {self.only} continues a run of the same settings, and {self.folder} has no "
                f"unfinished one. Begin with `stoker train CONFIG --stage {stages[0].name}`, or do all "
                "stages without --stage"
            )
        self._use_loader(stages[0])
        return begin(self.folder, self.config, self.train_loader, self._first_batch, self.ranks, self.space)

    def _last_stage(self) -> int:
        """Place of the last stage that this call does.

        Raises:
            ConfigError: The stage asked for is done, or one before it is not.
        """
        stages, progress = self.config.all_stages, self.run.progress
        if self.only is None:
            return len(stages) - 1
        wanted = [stage.name for stage in stages].index(self.only)
        done = len(progress.stages)
        if done < wanted:
            raise ConfigError(
                f"stage {self.only} comes after {stages[done].name}, which is not done in {self.folder}. Do "
                f"that first: `stoker train CONFIG --stage {stages[done].name}`"
            )
        if done > wanted:
            rest = f"--stage {stages[done].name}" if done < len(stages) else "another training.run_dir"
            raise ConfigError(f"stage {self.only} is done in {self.folder}. Continue with {rest}")
        return wanted

    def _use_loader(self, stage: Stage) -> None:
        if self.loader_of is not None:
            self.train_loader = self.loader_of(stage)

    def _enter(self, stage: Stage, event: str) -> None:
        """Prepare the loss, the learning rate and the length of a stage, and say so."""
        config, progress = self.config, self.run.progress
        self.stepper = self.run.stepper(self.ranks, lambda: self.stop.signal_name is not None)
        self.place = self.train_loader.state_dict()
        steps = progress.stage_step + stage.epochs * len(self.train_loader)
        self.total = min(steps, config.max_steps or 1 << 62)
        own = self.total - progress.stage_step
        self.log_every = config.log_every or max(1, min(MOST_BETWEEN_LINES, own // LINES))
        facts: dict[str, Json] = {
            "step": progress.step,
            "stage": stage.name,
            "total": self.total,
            "batches": len(self.train_loader),
            "parameters": sum(p.numel() for p in self.run.model.parameters()),
            "device": str(self.run.device),
            "ranks": self.ranks.world,
            **self.run.numerics,
        }
        self.run.log.append({"kind": event, **facts})
        self._tell(event, facts)

    def _leave(self, number: int) -> None:
        """Note what a stage came to."""
        progress, stage = self.run.progress, self.config.all_stages[number]
        if len(progress.stages) == number:
            progress.stages.append(
                {
                    "name": stage.name,
                    "epochs": progress.epoch - progress.stage_epoch,
                    "steps": progress.step - progress.stage_step,
                    **progress.errors,
                }
            )
            if len(self.config.all_stages) > 1:
                self.place = self.train_loader.state_dict()
                self._save()

    def finish(self) -> TrainReport:
        """Draw the curves, write the page, and report."""
        progress = self.run.progress
        spent_s = progress.wait_s + progress.step_s
        errors = with_lost(progress.errors, self.physical)
        report = TrainReport(
            tier=max(progress.tiers, key=lambda name: progress.tiers[name], default=""),
            stall=progress.wait_s / spent_s if spent_s else None,
            step_s=progress.step_s / progress.timed if progress.timed else None,
            epochs=progress.epoch,
            steps=progress.step,
            best_val_nrmse=progress.best if progress.best_val is None else progress.best_val,
            stages=progress.stages,
            finished=len(progress.stages) == len(self.config.all_stages),
            tasks=by_task(errors),
            run_dir=self.folder,
            startup=self.startup,
            parts=progress.parts,
            ceiling_step_s=progress.ceiling_step_s,
            lost=progress.lost,
            **{name: errors.get(name) for name in (*ERRORS, LOST)},
        )
        self.pace.close(progress)
        if self.ranks.leads:
            write_report(self.folder, self.run.log.rows(), report, asdict(self.config), self.about())
        self._tell("done", {name: value for name, value in asdict(report).items() if name != "run_dir"})
        return report

    def _resumed(self) -> Run | None:
        """The run that the newest valid checkpoint holds, if there is one and it is asked for."""
        if not self.config.resume:
            return None
        root = self.folder / "checkpoints"
        checkpoint = newest_checkpoint(root, lambda why: self._tell("skip", {"why": why}))
        check_same(checkpoint, root, self.ranks)
        if checkpoint is None:
            return None
        number = min(int(checkpoint.state["progress"].get("stage", 0)), len(self.config.all_stages) - 1)
        self._use_loader(self.config.all_stages[number])
        run = take_up(self.folder, self.config, self.train_loader, checkpoint, self.ranks, self.space)
        differs = changed(run, checkpoint.state)
        self._tell("resume", {"step": checkpoint.step, "epoch": run.progress.epoch + 1, "changed": differs})
        return run

    def _pass(self) -> bool:
        """The rest of a pass; whether it is over, which it is not when `total` steps are done before."""
        run, progress = self.run, self.run.progress
        if progress.batch == 0:
            self.train_loader.set_epoch(progress.epoch)
            run.loss_sum.zero_()
        self.pace.begin_pass()
        over = progress.whole or progress.batch >= len(self.train_loader)
        if not over and progress.step < self.total:
            self.logged = progress.step
            recent = torch.zeros_like(run.loss_sum)
            for batch in self.train_loader:
                self._first_batch()
                self._measure_ceiling(batch)
                self._step(batch, recent)
                self.pace.tick(progress, self.total)
                self._after_step()
                if progress.step >= self.total:
                    over = progress.whole
                    break
            else:
                over = True  # whatever its length was thought to be
        self.stepper.guard.check()
        if over:
            self.place = self.train_loader.state_dict()
        self.pace.end_pass(progress)
        return over

    def _measure_ceiling(self, batch: PairBatch) -> None:
        """Time steps on a twin when the first batch is at hand; after that, nothing."""
        meter, progress = self.meter, self.run.progress
        if self.rehearsed or meter is None:
            return
        self.rehearsed = True
        if not worth_measuring(self.total - progress.step):
            return
        begin, twin = time.perf_counter(), twin_of(self.run).stepper()
        step = partial(twin.step, batch, rate=self._rate(progress.step), epoch=1, number=1)
        progress.ceiling_step_s = time_steps(step, self.run.device)
        if progress.ceiling_step_s is not None:
            meter.ceiling(progress.ceiling_step_s)
        del twin, step
        give_back(self.run.device)  # the peak of two models is not what this one will want
        meter.outside(time.perf_counter() - begin)

    def _step(self, batch: PairBatch, recent: Tensor) -> None:
        """Move the weights once, and say so when it is time to."""
        run, progress = self.run, self.run.progress
        done = self.stepper.step(
            batch, rate=self._rate(progress.step), epoch=progress.epoch + 1, number=progress.step + 1
        )
        progress.step += 1
        progress.batch += 1
        progress.whole = progress.batch >= len(self.train_loader)
        progress.unjudged = True
        for total in (run.loss_sum, recent):
            total.add_(done.mean)
        if progress.step % self.log_every == 0:
            self._log_step(recent, done.norm)

    def _rate(self, step: int) -> float:
        begun = self.run.progress.stage_step
        peak, warmup = self.run.stage.lr, self.config.warmup
        return learning_rate(step - begun, self.total - begun, peak=peak, warmup=warmup)

    def _after_step(self) -> None:
        """Save when it is time to, or asked for from outside."""
        progress = self.run.progress
        due = progress.step % self.config.checkpoint_every == 0
        last = progress.step >= self.total
        alone = self.ranks.world == 1  # no other rank has to stop at the same step
        asked = self.stepper.guard.stopping or (alone and self.stop.signal_name is not None)
        if due or last or asked:
            self.place = self.train_loader.state_dict()  # only while iterating does it name the next batch
        if due and not last:
            self._save()
        if asked:
            self._stop()

    def _stop(self) -> None:
        """Raise Interrupted, with a checkpoint written; the signal may have come to another rank."""
        path = self._save()
        progress, name = self.run.progress, self.stop.signal_name or "a signal to another rank"
        self._tell("stop", {"signal": name, "step": progress.step})
        raise Interrupted(
            f"{name} after step {progress.step} in epoch {progress.epoch + 1}; "
            f"saved {path}. The same command continues from there; from Python, TrainConfig(resume=True)"
        )

    def _evaluate(self, train_s: float, *, over: bool) -> None:
        """Validate the weights, write the epoch's line and its checkpoints, and start the next pass."""
        run, progress = self.run, self.run.progress
        begun_s = time.perf_counter()
        if self.validates:
            progress.errors = judge(self.val_loader, self._errors)
            if self.ranks.any(self.stop.signal_name is not None, "the end of an evaluation"):
                self._stop()
        row: dict[str, Json] = {
            "kind": "epoch",
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": float(self.ranks.mean(run.loss_sum, "the end of an epoch")) / max(1, progress.batch),
            **progress.errors,
            "stall": self.meter.epoch().stall if self.meter is not None else None,
            "seconds": round(train_s, 3),
            "eval_seconds": round(time.perf_counter() - begun_s, 3),
        }
        run.log.append(row)
        self._tell("epoch", row)
        if over:
            progress.epoch, progress.batch, progress.whole = progress.epoch + 1, 0, False
        progress.unjudged = False
        latent = progress.errors.get("val_nrmse")
        if latent is not None:
            progress.best_val = latent if progress.best_val is None else min(progress.best_val, latent)
        error = progress.errors.get("physical_nrmse") if run.stage.name == "decoder" else latent
        if error is not None and (progress.best is None or error < progress.best):
            progress.best, progress.best_epoch = error, progress.epoch
            self._save("best")
        self._save()

    def _errors(self, loader: PairLoader | None, task: str) -> Errors:
        """The errors of the weights as they are on one validation set."""
        decoder, space = self.run.decoder, self.run.space
        decode = self.physical[task].decode if task in self.physical else None
        found = evaluate(
            self.run.model,
            self._until_stopped(loader),
            self.run.widths,
            stride=self.config.stride,
            samples=self.config.rollout_samples,
            amp=self.run.amp,
            ranks=self.ranks,
            decode=decode if decoder is None else decoder,
            raw=None if decoder is None or space is None else f"{space.field}1",
        )
        return errors_of(found)

    def _until_stopped(self, loader: PairLoader | None) -> Iterator[PairBatch]:
        """The batches to validate on. Ranks, which have different numbers of them, stop after the last."""
        if loader is None:
            return
        loader.set_epoch(0)
        for batch in loader:
            if self.ranks.world == 1 and self.stop.signal_name is not None:
                self._stop()
            yield batch

    def _where(self) -> str:
        return f"step {self.run.progress.step + 1}"

    def _save(self, kind: Kind = "last") -> Path:
        self.stepper.guard.check()
        path = self.run.save(kind, self.place)
        event = "checkpoint" if kind == "last" else "best"
        self._tell(event, {"path": str(path), "step": self.run.progress.step})
        return path

    def _log_step(self, recent: Tensor, norm: Tensor) -> None:
        progress = self.run.progress
        row: dict[str, Json] = {
            "kind": "step",
            "step": progress.step,
            "epoch": progress.epoch + 1,
            "loss": float(self.ranks.mean(recent, self._where())) / (progress.step - self.logged),
            "lr": self._rate(progress.step - 1),
            "grad_norm": float(norm),
        }
        recent.zero_()
        self.logged = progress.step
        self.run.log.append(row)
        self._tell("step", row)

    def _first_batch(self) -> None:
        if not self.startup:
            self.startup["first_batch_s"] = seconds = time.perf_counter() - self.begun_s
            self._tell("ready", {"seconds": seconds})

    def _goes_on(self) -> bool:
        """Steps of the stage are left, or those done are not evaluated yet (a signal came in between)."""
        progress, stage = self.run.progress, self.run.stage
        patient = stage.patience is None or progress.epoch - progress.best_epoch < stage.patience
        passes = progress.epoch - progress.stage_epoch
        return progress.unjudged or (passes < stage.epochs and progress.step < self.total and patient)

    def _tell(self, kind: str, facts: Mapping[str, Json]) -> None:
        if self.sink is not None:
            self.sink(kind, facts)
