"""Train the operator: start a run, its stages, resume it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import ConfigError, DivergedError, StaleStateError, arg
from stoker.monitor.meter import StallMeter
from stoker.plan.resources import resolve_device, use_device
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import remove_unfinished
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import Json
from stoker.train.config import (
    EventSink,
    FieldSpace,
    PhysicalSpace,
    StageName,
    TrainConfig,
    TrainReport,
    TrainStage,
)
from stoker.train.loop import StallRecorder, StopFlag, TrainLoop, ignore_event
from stoker.train.objective import (
    DECODER,
    ERRORS,
    LOST,
    OperatorObjective,
    OperatorProgress,
    Validation,
    by_task,
    with_lost,
)
from stoker.train.operator import (
    DecoderShape,
    FieldDecoder,
    LatentOperator,
    OperatorShape,
    PairBatch,
    PairLoader,
    Pairs,
    cond_widths,
    field_scales,
    measure_scales,
    raw_field,
    to_pairs,
)
from stoker.train.report import ReportTable, write_report
from stoker.train.state import Checkpoint, MetricsLog, newest_checkpoint, restore_optimizer

LEAST_LR = 1e-12
"""Weights stay where they are: made-up batches must not make them diverge."""


def train(  # noqa: PLR0913  the face: two loaders, and all else by name
    train_loader: PairLoader,
    val_loader: Validation,
    config: TrainConfig,
    run_dir: str | Path,
    *,
    meter: StallMeter | None = None,
    on_event: EventSink | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    physical: PhysicalSpace | Mapping[str, PhysicalSpace] | None = None,
    about: Callable[[], Sequence[ReportTable]] = tuple,
    space: FieldSpace | None = None,
    loader_of: Callable[[TrainStage], PairLoader] | None = None,
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
        StalledError: Another rank ended, or did not come within the timeout.
    """
    check_validation(val_loader, max(s.patience or 0 for s in config.all_stages) or None, ranks)
    folder = Path(run_dir)
    with StopFlag() as stop, lock_run_folder(folder) if ranks.is_rank_zero else nullcontext():
        run = _TrainRun(
            config=config,
            folder=folder,
            ranks=ranks,
            tell=on_event if ranks.is_rank_zero and on_event is not None else ignore_event,
            space=space,
            loader_of=loader_of or (lambda _: train_loader),
            only=only,
        )
        spaces = {"": physical} if isinstance(physical, PhysicalSpace) else physical or {}
        run.objective.validation, run.objective.physical = val_loader, spaces
        loop = TrainLoop(
            objective=run.objective,
            loader=run.loader,
            config=config,
            folder=folder,
            stop=stop,
            log=run.log,
            validates=ranks.any(val_loader is not None, "the start of training"),
            tell=run.tell,
            meter=meter,
            recorder=StallRecorder(meter, folder, run.tell, ranks),
            ranks=ranks,
            on_batch=run.note_batch,
        )
        run.do_stages(loop)
        return run.finish(loop, about)


@dataclass(slots=True, kw_only=True)
class _TrainRun:
    """One call of `train`: begins or resumes a run, and does its stages."""

    config: TrainConfig
    folder: Path
    ranks: Ranks
    tell: EventSink
    space: FieldSpace | None
    loader_of: Callable[[TrainStage], PairLoader]
    only: StageName | None
    begun_s: float = field(default_factory=time.perf_counter)
    """Clock at the call."""
    startup: dict[str, float] = field(default_factory=dict[str, float])
    """As in `TrainReport`."""
    log: MetricsLog = field(init=False)
    loader: PairLoader = field(init=False)
    """Of the stage that the run is in."""
    objective: OperatorObjective = field(init=False)

    def __post_init__(self) -> None:
        """Resume the run of the newest complete checkpoint if that is asked for, else begin one."""
        self.log = MetricsLog(self.folder / "metrics.jsonl", writes=self.ranks.is_rank_zero)
        self.objective = self._resumed() or self._begun()

    def note_batch(self) -> None:
        """Say that the first batch is there."""
        if not self.startup:
            self.startup["first_batch_s"] = seconds = time.perf_counter() - self.begun_s
            self.tell("ready", {"seconds": seconds})

    def _resumed(self) -> OperatorObjective | None:
        """Return the run that the newest valid checkpoint holds, if there is one and it is asked for."""
        if not self.config.resume:
            return None
        root, stages = self.folder / "checkpoints", self.config.all_stages
        checkpoint = newest_checkpoint(root, lambda why: self.tell("skip", {"why": why}))
        check_same(checkpoint, root, self.ranks)
        if checkpoint is None:
            return None
        number = min(int(checkpoint.state["progress"].get("stage", 0)), len(stages) - 1)
        self.loader = self.loader_of(stages[number])
        resumed = resume_run(self.folder, self.config, self.loader, checkpoint, self.ranks, self.space)
        done = resumed.progress
        self.log.keep(
            lambda row: (
                row.get("step", 0) <= done.step and (row.get("kind") != "epoch" or row["epoch"] <= done.epoch)
            )
        )
        differs = changed_settings(resumed, checkpoint.state)
        rows = [row for row in self.log.rows() if row.get("kind") == "epoch"]
        facts: dict[str, Json] = {"step": checkpoint.step, "epoch": done.epoch + 1, "changed": differs}
        self.tell("resume", {**facts, "row": rows[-1] if rows else None})
        return resumed

    def _begun(self) -> OperatorObjective:
        """Return a new run.

        Raises:
            ConfigError: A later stage alone was asked for.
        """
        stages = self.config.all_stages
        if self.only is not None and self.only != stages[0].name:
            raise ConfigError(
                f"stage {self.only} continues a run of the same settings, and {self.folder} has no "
                "unfinished one",
                hint=f"Begin with `stoker train CONFIG --stage {stages[0].name}`, or do all stages without "
                "--stage",
            )
        self.loader = self.loader_of(stages[0])
        objective = start_run(self.config, self.loader, self.note_batch, self.ranks, self.space)
        if self.ranks.is_rank_zero:
            move_previous_run(self.folder)
        return objective

    def _last_stage(self) -> int:
        """Return the place of the last stage that this call does.

        Raises:
            ConfigError: The stage asked for is done, or one before it is not.
        """
        stages, done = self.config.all_stages, len(self.objective.progress.stages)
        if self.only is None:
            return len(stages) - 1
        wanted = [stage.name for stage in stages].index(self.only)
        if done < wanted:
            raise ConfigError(
                f"stage {self.only} comes after {stages[done].name}, which is not done in {self.folder}",
                hint=f"Do that first: `stoker train CONFIG --stage {stages[done].name}`",
            )
        if done > wanted:
            rest = f"--stage {stages[done].name}" if done < len(stages) else "another training.run_dir"
            raise ConfigError(f"stage {self.only} is done in {self.folder}", hint=f"Continue with {rest}")
        return wanted

    def do_stages(self, loop: TrainLoop) -> None:
        """Do what is left of the stages, and note what each came to."""
        progress, stages = self.objective.progress, self.config.all_stages
        first, last = progress.stage, self._last_stage()
        for number in range(first, last + 1):
            if number != progress.stage:
                loop.loader = self.loader_of(stages[number])
                self.objective.begin_stage(number)
            loop.train_stage("start" if number == first else "stage")
            if len(progress.stages) > number:  # done in an earlier call
                continue
            progress.stages.append(
                {
                    "name": stages[number].name,
                    "epochs": progress.epoch - progress.stage_epoch,
                    "steps": progress.step - progress.stage_step,
                    **progress.errors,
                }
            )
            if len(stages) > 1:
                loop.place = loop.loader.state_dict()
                loop.save()

    def finish(self, loop: TrainLoop, about: Callable[[], Sequence[ReportTable]]) -> TrainReport:
        """Draw the curves, write the page, and report."""
        progress = self.objective.progress
        spent_s = progress.wait_s + progress.step_s
        errors: dict[str, Any] = with_lost(progress.errors, self.objective.physical)
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
        loop.recorder.close(progress)
        if self.ranks.is_rank_zero:
            write_report(self.folder, self.log.rows(), report, asdict(self.config), about())
        self.tell("done", {name: value for name, value in asdict(report).items() if name != "run_dir"})
        return report


def steps_of(loader: PairLoader, config: TrainConfig) -> Callable[[Any], object]:
    """Return a function that takes one complete training step on a batch of `loader`, and keeps nothing.

    Args:
        loader: Of which the operator's shape and scales are learned.
        config: As for `train`; its stages and inverse losses are left out.

    Raises:
        StokerError: As `train`.
    """
    config = replace(config, resume=False, stages=(), lambda_inv_enc=0.0, lambda_inv_dec=0.0)
    stepper = start_run(config, loader, lambda: None, SINGLE_PROCESS).stepper()
    return partial(stepper.step, rate=LEAST_LR, epoch=1, number=1)


def check_validation(loader: Validation, patience: int | None, ranks: Ranks) -> None:
    """Refuse what cannot be validated.

    Raises:
        ConfigError: `patience` without a loader, or a loader without a batch.
    """
    if loader is None and ranks.world_size > 1:
        return  # its part is empty
    if loader is None and patience is not None:
        raise ConfigError(
            f"TrainConfig.patience is {patience}, but nothing is validated, so training would end after "
            "that many epochs whatever it learned",
            hint="Give a val_loader, or leave patience out",
        )
    every = loader.values() if isinstance(loader, Mapping) else [loader]
    if any(one is not None and not len(one) for one in every):
        raise ConfigError(
            "the validation loader has no batch", hint="Give one that has, or None to train without"
        )


@contextmanager
def lock_run_folder(folder: Path) -> Generator[None]:
    """Hold a run's folder: no other process trains in it, and half-written files of a kill are removed.

    Raises:
        ConfigError: Another training is writing there, or the path is a file's.
        ReadOnlyError: It cannot be written.
    """
    try:
        with explain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        why = "its file system takes none" if isinstance(error, FileNotFoundError) else "a file is in its way"
        raise ConfigError(
            f"{folder} cannot be a folder: {why}", hint="Give another training.run_dir"
        ) from error
    with lock_folder(folder, "train") as got:
        if not got:
            raise ConfigError(
                f"{lock_holder(folder, 'train')} is training in {folder}",
                hint="Wait until it ends or stop it, or give another training.run_dir",
            )
        remove_unfinished(folder)
        remove_unfinished(folder / "checkpoints")
        yield


def start_run(
    config: TrainConfig,
    loader: PairLoader,
    on_batch: Callable[[], None],
    ranks: Ranks,
    space: FieldSpace | None = None,
) -> OperatorObjective:
    """Return a run at step 0, its scales learned from the first batches.

    Raises:
        ConfigError: The loader has no batch, or a stage trains a decoder without `space`.
        DivergedError: A value in the first batches is not finite.
        ResourceError: The device is not there.
    """
    device = resolve_device(config.device)
    use_device(device)
    loader.set_epoch(0)
    batches: list[PairBatch] = []
    for batch in islice(loader, config.scale_batches):
        if not batches:
            on_batch()
        batches.append(batch)
    if not batches:
        raise ConfigError(
            "the training loader has no batch",
            hint="It drops a last short batch when drop_last is set: use a smaller training.batch_size, or "
            "more samples",
        )
    widths = cond_widths(batches[0])
    scales = measure_scales(_finite_pairs(batches, widths, device), ranks)
    first = to_pairs(batches[0], widths, device)
    shape = OperatorShape(
        tokens=first.z0.shape[1],
        dim=len(scales.z_mean),
        cond=len(scales.cond_mean),
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        steady=first.steady,
    )
    fields = None
    if any(stage.trains_decoder for stage in config.all_stages):
        space = _checked(space, config)
        fields = [raw_field(batch, f"{space.field}0", device) for batch in batches]
    decoder = None if fields is None else DecoderShape(
        tokens=shape.tokens, dim=shape.dim, field=tuple(fields[0].shape[1:]), width=config.width
    )  # fmt: skip
    run = _make(config, shape, widths, ranks, decoder, space)
    run.model.set_scales(scales)
    if run.decoder is not None and fields is not None:
        run.decoder.set_scales(scales.z_mean, scales.z_std, *field_scales(fields, ranks))
    return run


def check_same(checkpoint: Checkpoint | None, root: Path, ranks: Ranks) -> None:
    """Compare the checkpoints that the ranks found.

    Raises:
        StaleStateError: Not all found the same.
    """
    found = ranks.all_gather("none" if checkpoint is None else f"step {checkpoint.step}", "the checkpoint")
    if len(set(found)) > 1:
        raise StaleStateError(
            f"the newest checkpoint in {root} is of {', '.join(found)} as the ranks see it",
            hint="Expected one folder that all of them see: put training.run_dir on storage that the "
            "machines share",
        )


def resume_run(
    folder: Path,
    config: TrainConfig,
    loader: PairLoader,
    checkpoint: Checkpoint,
    ranks: Ranks,
    space: FieldSpace | None = None,
) -> OperatorObjective:
    """Return the run of a checkpoint, with the loader and the random state where they were.

    Raises:
        StaleStateError: The operator has another shape, or the loader refuses the place.
        ResourceError: The device is not there.
    """
    saved = checkpoint.state
    shape = OperatorShape(**saved["shape"])
    wanted = {name: getattr(config, name) for name in ("width", "depth", "heads")}
    found = {name: getattr(shape, name) for name in wanted}
    if found != wanted:
        raise StaleStateError(
            f"the checkpoint of step {checkpoint.step} in {folder} has an operator of {found}, the settings "
            f"say {wanted}",
            hint="Resume with the settings it was begun with, or train in another training.run_dir",
        )
    number, name = int(saved["progress"].get("stage", 0)), saved.get("stage", "operator")
    names = [stage.name for stage in config.all_stages]
    if names[number : number + 1] != [name]:
        raise StaleStateError(
            f"the checkpoint of step {checkpoint.step} in {folder} is of stage {number + 1}, {name}; the "
            f"settings have the stages {', '.join(names)}",
            hint="Resume with the stages it was begun with, or train in another training.run_dir",
        )
    found = saved.get("decoder")
    decoder = None if found is None else replace(DecoderShape(**found), field=tuple(found["field"]))
    if decoder is not None:
        space = _checked(space, config)
    progress = OperatorProgress(**saved["progress"])
    run = _make(config, shape, dict(saved["widths"]), ranks, decoder, space, progress)
    run.model.load_state_dict({n: v for n, v in checkpoint.model.items() if not n.startswith(DECODER)})
    if run.decoder is not None:
        own = {n.removeprefix(DECODER): v for n, v in checkpoint.model.items() if n.startswith(DECODER)}
        run.decoder.load_state_dict(own)
    restore_optimizer(run.optimizer, run.device, checkpoint.optimizer)
    run.loss_sum.fill_(progress.loss_sum)
    loader.load_state_dict(saved["loader"])
    return run


def changed_settings(run: OperatorObjective, saved: Mapping[str, Any]) -> dict[str, Json]:
    """Return settings and numerics that differ from a checkpoint's, as `{name: [before, now]}`."""
    config: dict[str, Json] = json.loads(json.dumps(asdict(run.config)))
    before = saved["config"]  # a setting that there was not yet is as its default
    pairs = {name: [before.get(name, value), value] for name, value in config.items() if name != "resume"}
    before = saved.get("numerics", {})
    pairs |= {name: [before.get(name, value), value] for name, value in run.numerics.items()}
    return {name: [was, now] for name, (was, now) in pairs.items() if was != now}


def check_finite(pairs: Pairs) -> None:
    """Refuse a batch from which no scales can be learned.

    Raises:
        DivergedError: A state or condition is not finite; names the first sample.
    """
    bad = torch.zeros(len(pairs.z0), dtype=torch.bool, device=pairs.z0.device)
    for values in (pairs.z0, pairs.states, pairs.cond):
        bad |= ~torch.isfinite(values).flatten(1).all(1)
    if bool(bad.any()):
        number, start = pairs.index[int(bad.int().argmax())].tolist()
        raise DivergedError(
            f"sample {number}, time step {start} holds a NaN or an infinity ({int(bad.sum())} of {len(bad)} "
            "examples of a batch do)",
            hint=f"Expected finite states and parameters. Look at cache[{number}]; precompute with "
            f"{arg('nan', 'reject')} leaves such samples out",
        )


def _finite_pairs(
    batches: Iterable[PairBatch], widths: Mapping[str, int], device: torch.device
) -> Iterator[Pairs]:
    for batch in batches:
        pairs = to_pairs(batch, widths, device)
        check_finite(pairs)
        yield pairs


def _checked(space: FieldSpace | None, config: TrainConfig) -> FieldSpace:
    """Return what decoders are trained with, which the stages need.

    Raises:
        ConfigError: `space` is None, or the inverse-decoding loss lacks an encoder with gradients.
    """
    if space is None:
        raise ConfigError(
            "a stage trains a decoder, and nothing tells which raw field it decodes to",
            hint='From Python give train(..., space=FieldSpace(field="data"))',
        )
    if space.encode is None and any(stage.lambda_inv_dec for stage in config.all_stages):
        raise ConfigError(
            "lambda_inv_dec is above 0, and this encoder has no form that gradients pass",
            hint="Set it to 0; inverse encoding works with any encoder",
        )
    return space


def _make(  # noqa: PLR0913, PLR0917 - as `begin`
    config: TrainConfig,
    shape: OperatorShape,
    widths: dict[str, int],
    ranks: Ranks,
    decoder: DecoderShape | None,
    space: FieldSpace | None,
    progress: OperatorProgress | None = None,
) -> OperatorObjective:
    device = resolve_device(config.device)
    use_device(device)
    model = LatentOperator(shape, seed=config.seed).to(device)
    model.clock = _clock(widths)
    made = None
    if decoder is not None and space is not None:
        made = FieldDecoder(decoder, space.decode, seed=config.seed).to(device)
    return OperatorObjective(
        config=config,
        model=model,
        shape=shape,
        widths=widths,
        device=device,
        ranks=ranks,
        decoder=made,
        space=space,
        progress=progress or OperatorProgress(),
    )


def _clock(widths: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the places of `time` and `dt` among the numbers of the condition, if each is one number."""
    names = list(widths)
    if any(widths.get(name) != 1 for name in ("time", "dt")):
        return None
    time, step = (sum(widths[name] for name in names[: names.index(own)]) for own in ("time", "dt"))
    return time, step


def move_previous_run(folder: Path) -> None:
    """Keep earlier runs: starting again by mistake must not cost days of training.

    The last one is `*.previous`; of those before, the newest has the highest number: `*.previous-3`. The
    checkpoints and lines of a run stay together. A run that ended before its first checkpoint left nothing
    that could be gone on from, so next to another it is not kept.
    """
    found = [*folder.glob("metrics*.jsonl"), *folder.glob("stall*.jsonl")]
    found += [*folder.glob("checkpoints"), *folder.glob("checkpoints.previous*")]
    run = [path for path in found if ".previous" not in path.name]
    last = [path for path in found if path.name.removesuffix(".jsonl").endswith(".previous")]
    if last and not (folder / "checkpoints").exists():
        for path in run:
            path.unlink()
        return
    numbers = [int(match[1]) for path in found if (match := _KEPT.search(path.name))]
    for path in last:
        place = path.name.replace(".previous", f".previous-{max(numbers, default=0) + 1}")
        path.replace(path.with_name(place))
    for path in run:
        path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))


_KEPT = re.compile(r"\.previous-(\d+)")
