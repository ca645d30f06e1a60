"""What a run is made of, how it begins, and how it is saved and taken up again."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from stoker.errors import ConfigError, CorruptError, StaleStateError
from stoker.plan.resources import resolve_device, use_device
from stoker.runtime.disk import explained
from stoker.runtime.files import remove_unfinished, replacing
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.scale.ranks import ALONE, Ranks
from stoker.schema import Json, canonical_json
from stoker.train.config import FieldSpace, Stage, TrainConfig
from stoker.train.evaluate import Validation
from stoker.train.guard import check_finite
from stoker.train.objective import Objective
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
from stoker.train.step import Losses, Stepper

# ----------------------------------------------------------------------------------------------------------
# Checkpoints: tensors as safetensors, the rest as JSON, whole or not there at all.
#
#     checkpoints/last-000000500/       model.safetensors  optimizer.safetensors  state.json
#     checkpoints/best-000000400/       the same
#     checkpoints/last-000000500-old/   while the same step is saved again: the one before
#
# A checkpoint is written under a temporary name, made durable, then renamed; only then older ones go. So at
# every moment the newest one is whole. `state.json` holds the digests of the other two, so damage is found
# before anything is loaded. Nothing is pickled.


Kind: TypeAlias = Literal["last", "best"]

FORMAT = 1
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""Checkpoints kept of a kind: two of `last`, so that one can be damaged."""
NAME = re.compile(r"(last|best)-(\d{9,})(-old)?")
OLD = "-old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    """Optimizer steps done."""
    model: Mapping[str, Tensor]
    """Weights and buffers by name."""
    optimizer: Mapping[str, Tensor]
    """Optimizer and random state by name."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""


def save_checkpoint(root: Path, kind: Kind, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `root`, then remove older ones of its kind.

    Returns:
        Its folder.
    Raises:
        ResourceError: No space is left; older checkpoints are still there.
        ReadOnlyError: `root` cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{kind}-{checkpoint.step:09d}"
    with replacing(folder) as temporary:
        temporary.mkdir()
        digests: dict[str, Json] = {}
        for name in _FILES:
            tensors: Mapping[str, Tensor] = getattr(checkpoint, name)
            data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
            digests[name] = hashlib.sha256(data).hexdigest()
            (temporary / f"{name}.safetensors").write_bytes(data)
        body: dict[str, Json] = {
            "format": FORMAT,
            "step": checkpoint.step,
            "files": digests,
            "state": dict(checkpoint.state),
        }
        digest = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        (temporary / "state.json").write_bytes(canonical_json({**body, "digest": digest}).encode())
        if folder.exists():  # this step again: the one before counts until the new one has its name
            _remove(root / (folder.name + OLD))
            folder.rename(root / (folder.name + OLD))
    for old in _superseded(folder, kind):
        _remove(old)
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CorruptError: A file is missing, damaged, or of another format.
    """
    try:
        body = json.loads((folder / "state.json").read_bytes())
        digest = body.pop("digest")
        if body["format"] != FORMAT:
            raise CorruptError(f"{folder}: format {body['format']}, this version reads format {FORMAT}")
        if digest != hashlib.sha256(canonical_json(body).encode()).hexdigest():
            raise CorruptError(f"{folder}/state.json does not match its digest")
        tensors = {name: _read(folder / f"{name}.safetensors", body["files"][name]) for name in _FILES}
        return Checkpoint(step=int(body["step"]), state=body["state"], **tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            f"{folder} is not a complete checkpoint: {type(error).__name__}: {error}"
        ) from error


def newest_checkpoint(
    root: Path, on_damaged: Callable[[str], None], kind: Kind | None = None
) -> Checkpoint | None:
    """The valid checkpoint with most steps, of a kind or of any; damaged ones are told of and passed over."""
    for folder in _folders(root, kind):
        try:
            return load_checkpoint(folder)
        except CorruptError as error:
            on_damaged(str(error))
    return None


def checkpoint_to_resume(
    root: Path, on_damaged: Callable[[str], None], *, expected: bool = False
) -> Checkpoint | None:
    """The checkpoint that a run continues from; None where it has not made one yet.

    Args:
        root, on_damaged: As for `newest_checkpoint`.
        expected: There was one, as another record of the run says.
    Raises:
        CorruptError: There are, or were, checkpoints, and none is complete. Starting again would
            discard the training without a message.
    """
    found = newest_checkpoint(root, on_damaged)
    there = len(_folders(root))
    if found is None and (there or expected):
        raise CorruptError(
            f"{root}: none of {there} checkpoints is complete, and the run had made some",
            advice="Bring one back from a copy, or start again as another run",
        )
    return found


_FILES = ("model", "optimizer")


def _folders(root: Path, kind: Kind | None = None) -> list[Path]:
    """Checkpoints below `root`, most steps first; of equal step `last` before `best` before old ones."""
    found = [
        (int(match[2]), match[3] is None, match[1], entry)
        for entry in (root.iterdir() if root.is_dir() else ())
        if (match := NAME.fullmatch(entry.name)) and kind in (None, match[1])
    ]
    return [entry for *_, entry in sorted(found, reverse=True)]


def _superseded(folder: Path, kind: Kind) -> list[Path]:
    """Checkpoints of a kind that are not needed after the one just written.

    Those of later steps are among them: they were damaged, or the run would have gone on from there.
    """
    folders = _folders(folder.parent, kind)
    before = [entry for entry in folders[folders.index(folder) :] if not entry.name.endswith(OLD)]
    return [entry for entry in folders if entry not in before[: KEPT[kind]]]


def _remove(folder: Path) -> None:
    """Remove a folder that may be absent; a kill on the way leaves a temporary, not half a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"{path} does not match its digest")
    return load(data)


# ----------------------------------------------------------------------------------------------------------
# Optimizer and random state as tensors by name, for a checkpoint.


def dump_optimizer(optimizer: Any, device: torch.device) -> dict[str, Tensor]:
    """Moments of every weight, and the random state of the CPU and of `device`."""
    tensors = {
        f"adamw.{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_optimizer(optimizer: Any, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
    """Put both back as they were when `tensors` were dumped."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "adamw":
            number, _, key = rest.partition(".")
            states.setdefault(int(number), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


# ----------------------------------------------------------------------------------------------------------
# What decides the last bits of a step besides the settings: kept with a run, compared on resume.


def numerics_of(device: torch.device, amp: bool) -> dict[str, Json]:
    """How this process computes on `device`; `dtype` is that of products and attention."""
    return {
        "torch": str(torch.__version__),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16" if amp else "float32",
        "float32_matmul": _float32_matmul(device),
    }


def _float32_matmul(device: torch.device) -> str:
    """How products of float32 are computed: `ieee`, or `tf32` or `bf16` for less exact ones."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Absent before torch 2.9. The older question raises where a program has set the newer answer.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        precision = {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")
    return "ieee" if precision == "none" else str(precision)


# ----------------------------------------------------------------------------------------------------------
# Metrics of a run: one JSON object per line, readable while it grows.


class MetricsLog:
    """`metrics.jsonl` of a run: lines of kind `start`, `step` and `epoch`. `writes`: true on rank 0 alone."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes

    def append(self, row: Mapping[str, Json]) -> None:
        """Add a line; numbers that JSON cannot hold become null.

        Raises:
            ResourceError: No space is left.
            ReadOnlyError: The file cannot be written.
        """
        if not self._writes:
            return
        line = json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False)
        with explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All lines; one that a kill left half-written is passed over."""
        if not self.path.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)  # pyright: ignore[reportUnknownArgumentType] -- JSON
        return rows

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other lines: those that a resumed run is about to write again."""
        if not self._writes:
            return
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows() if wanted(row))
        with replacing(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _finite(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value


DECODER = "decoder."
"""Begins the names of the decoder's weights in a checkpoint."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is; all of it goes into a checkpoint as JSON."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes finished and evaluated."""
    batch: int = 0
    """Batches done of the pass after those; all of them while it waits to be evaluated."""
    whole: bool = False
    """They were all batches of the pass, as long as it was then: beside a filling it has another length when
    the run goes on, since quarantined samples are tried again."""
    loss_sum: float = 0.0
    """Sum of the losses of those batches."""
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
    """The last evaluation, by the names of `TrainReport`."""
    best_val: float | None = None
    """Lowest `val_nrmse` of all stages."""
    stage: int = 0
    """Place of the stage among the run's."""
    stage_step: int = 0
    """Steps done when it began."""
    stage_epoch: int = 0
    """Passes finished when it began."""
    stages: list[dict[str, Json]] = field(default_factory=list["dict[str, Json]"])
    """The stages that ended, as in `TrainReport`."""

    @property
    def lost(self) -> float | None:
        """How far the run is below its ceiling, 0..1; None while that was not measured."""
        spent_s = self.wait_s + self.step_s
        if self.ceiling_step_s is None or not spent_s:
            return None
        return max(0.0, 1.0 - self.ceiling_step_s * self.timed / spent_s)


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything that a checkpoint holds, alive."""

    folder: Path
    """The run's folder."""
    config: TrainConfig
    model: LatentOperator
    shape: OperatorShape
    widths: dict[str, int]
    """Numbers per example of each condition, in the order in which the operator takes them."""
    optimizer: Any
    """`torch.optim.AdamW`, whose methods carry no types."""
    progress: Progress
    loss_sum: Tensor
    """`progress.loss_sum` on the device, float64; of this rank's examples."""
    ranks: Ranks
    decoder: FieldDecoder | None = None
    """From states to fields, in a run some stage of which trains it."""
    space: FieldSpace | None = None
    """Data that the decoder is trained with."""

    @property
    def stage(self) -> Stage:
        """The stage that the run is in."""
        return self.config.all_stages[self.progress.stage]

    @property
    def trained(self) -> nn.ModuleList:
        """The models whose weights move in this stage."""
        stage = self.stage
        found: list[nn.Module] = [self.model] if stage.trains_operator else []
        return nn.ModuleList([*found, *([self.decoder] if self.decoder and stage.trains_decoder else [])])

    def _objective(self) -> Objective:
        """The loss of this stage."""
        at, columns = 0, dict[str, int]()
        for name, width in self.widths.items():
            if width == 1:
                columns[name] = at
            at += width
        return Objective(
            self.model,
            self.stage,
            decoder=self.decoder if self.stage.trains_decoder else None,
            encode=None if self.space is None else self.space.encode,
            columns=columns,
            most_stride=self.config.most_stride,
        )

    def _losses(self, batch: PairBatch, objective: nn.Module) -> Losses:
        """The losses of a batch by `objective`, a module as `_objective` gives it, maybe wrapped."""
        pairs, fields = to_pairs(batch, self.widths, self.device), None
        if self.decoder is not None and self.space is not None and self.stage.trains_decoder:
            names = (f"{self.space.field}{k}" for k in (0, 1))
            fields = tuple(raw_field(batch, name, self.device) for name in names)
        errors = objective(pairs.z0, pairs.states, pairs.cond, pairs.mask, fields)
        return Losses(errors, pairs.index, getattr(batch, "task", None))

    def stepper(self, ranks: Ranks = ALONE, stopped: Callable[[], bool] = lambda: False) -> Stepper:
        """What moves the weights of this stage, its gradients being means over `ranks`."""
        return Stepper(
            losses=partial(self._losses, objective=ranks.wrapped(self._objective())),
            models=[*self.trained],
            optimizer=self.optimizer,
            grad_clip=self.config.grad_clip,
            device=self.device,
            amp=self.amp,
            ranks=ranks,
            stopped=stopped,
        )

    def begin_stage(self, number: int) -> None:
        """Have the weights of stage `number` move, by an optimizer of its own."""
        progress = self.progress
        progress.stage, progress.stage_step, progress.stage_epoch = number, progress.step, progress.epoch
        progress.best, progress.best_epoch = None, progress.epoch
        self.free()
        self.optimizer = make_optimizer(self.trained, self.config)

    def free(self) -> None:
        """Give the weights of this stage gradients, and others none."""
        self.model.requires_grad_(self.stage.trains_operator)
        if self.decoder is not None:
            self.decoder.requires_grad_(self.stage.trains_decoder)

    @property
    def device(self) -> torch.device:
        """Where the operator is."""
        return self.loss_sum.device

    @property
    def amp(self) -> bool:
        """Whether to compute in bfloat16."""
        return self.device.type == "cuda" if self.config.amp is None else self.config.amp

    @property
    def numerics(self) -> dict[str, Json]:
        """What decides the last bits of a step in addition to the settings."""
        return numerics_of(self.device, self.amp)

    @property
    def log(self) -> MetricsLog:
        """The run's metrics."""
        return MetricsLog(self.folder / "metrics.jsonl", writes=self.ranks.leads)

    def weights(self) -> dict[str, Tensor]:
        """Those of the operator by name, and of the decoder under `decoder.`."""
        own = {} if self.decoder is None else self.decoder.state_dict()
        return {**self.model.state_dict(), **{DECODER + name: value for name, value in own.items()}}

    def load_weights(self, found: Mapping[str, Tensor]) -> None:
        """Take over what `weights` gave."""
        self.model.load_state_dict({n: v for n, v in found.items() if not n.startswith(DECODER)})
        if self.decoder is not None:
            own = {n.removeprefix(DECODER): v for n, v in found.items() if n.startswith(DECODER)}
            self.decoder.load_state_dict(own)

    def save(self, kind: Kind, place: Mapping[str, Any]) -> Path:
        """Write a checkpoint, on rank 0; `place` is the loader's, taken at this step."""
        self.progress.loss_sum = float(self.ranks.mean(self.loss_sum, "a checkpoint"))
        if not self.ranks.leads:
            return self.folder / "checkpoints"
        optimizer = dump_optimizer(self.optimizer, self.device)
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "loader": dict(place),
            "config": asdict(self.config),
            "stage": self.stage.name,
            "shape": asdict(self.shape),
            "decoder": None if self.decoder is None else asdict(self.decoder.shape),
            "widths": self.widths,
            "numerics": self.numerics,
        }
        return save_checkpoint(
            self.folder / "checkpoints",
            kind,
            Checkpoint(step=self.progress.step, model=self.weights(), optimizer=optimizer, state=state),
        )


def check_validation(loader: Validation, patience: int | None, ranks: Ranks) -> None:
    """Refuse what cannot be validated.

    Raises:
        ConfigError: `patience` without a loader, or a loader without a batch.
    """
    if loader is None and ranks.world > 1:
        return  # its part is empty
    if loader is None and patience is not None:
        raise ConfigError(
            f"TrainConfig.patience is {patience}, but nothing is validated, so training would end after "
            "that many epochs whatever it learnt. Give a val_loader, or leave patience out"
        )
    every = loader.values() if isinstance(loader, Mapping) else [loader]
    if any(one is not None and not len(one) for one in every):
        raise ConfigError("the validation loader has no batch. Give one that has, or None to train without")


@contextmanager
def own_folder(folder: Path) -> Generator[None]:
    """Hold a run's folder: no other process trains in it, and half-written files of a kill are removed.

    Raises:
        ConfigError: Another training is writing there, or the path is a file's.
        ReadOnlyError: It cannot be written.
    """
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        why = "its file system takes none" if isinstance(error, FileNotFoundError) else "a file is in its way"
        raise ConfigError(f"{folder} cannot be a folder: {why}. Give another training.run_dir") from error
    with lock_folder(folder, "train") as got:
        if not got:
            raise ConfigError(
                f"{lock_holder(folder, 'train')} is training in {folder}. Wait until it ends or stop it, "
                "or give another training.run_dir"
            )
        remove_unfinished(folder)
        remove_unfinished(folder / "checkpoints")
        yield


def begin(
    folder: Path,
    config: TrainConfig,
    loader: PairLoader,
    on_batch: Callable[[], None],
    ranks: Ranks,
    space: FieldSpace | None = None,
) -> Run:
    """A run at step 0, its scales learnt from the first batches; an earlier run there is moved aside.

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
            "the training loader has no batch. It drops a last short batch when drop_last is set: "
            "use a smaller training.batch_size, or more samples"
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
    run = _make(folder, config, shape, widths, ranks, decoder, space)
    run.model.set_scales(scales)
    if run.decoder is not None and fields is not None:
        run.decoder.set_scales(scales.z_mean, scales.z_std, *field_scales(fields, ranks))
    run.begin_stage(0)
    if ranks.leads:
        _set_aside(folder)
    return run


def check_same(checkpoint: Checkpoint | None, root: Path, ranks: Ranks) -> None:
    """Compare the checkpoints that the ranks found.

    Raises:
        StaleStateError: Not all found the same.
    """
    found = ranks.tell("none" if checkpoint is None else f"step {checkpoint.step}", "the checkpoint")
    if len(set(found)) > 1:
        raise StaleStateError(
            f"the newest checkpoint in {root} is of {', '.join(found)} as the ranks see it. Expected one "
            "folder that all of them see: put training.run_dir on storage that the machines share"
        )


def take_up(
    folder: Path,
    config: TrainConfig,
    loader: PairLoader,
    checkpoint: Checkpoint,
    ranks: Ranks,
    space: FieldSpace | None = None,
) -> Run:
    """The run of a checkpoint, with the loader, the metrics and the random state where they were.

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
            f"say {wanted}. Resume with the settings it was begun with, or train in another training.run_dir"
        )
    number, name = int(saved["progress"].get("stage", 0)), saved.get("stage", "operator")
    names = [stage.name for stage in config.all_stages]
    if names[number : number + 1] != [name]:
        raise StaleStateError(
            f"the checkpoint of step {checkpoint.step} in {folder} is of stage {number + 1}, {name}; the "
            f"settings have the stages {', '.join(names)}. Resume with the stages it was begun with, or "
            "train in another training.run_dir"
        )
    found = saved.get("decoder")
    decoder = None if found is None else replace(DecoderShape(**found), field=tuple(found["field"]))
    if decoder is not None:
        space = _checked(space, config)
    run = _make(folder, config, shape, dict(saved["widths"]), ranks, decoder, space)
    run.load_weights(checkpoint.model)
    run.progress = Progress(**saved["progress"])
    run.free()
    run.optimizer = make_optimizer(run.trained, config)
    restore_optimizer(run.optimizer, run.device, checkpoint.optimizer)
    run.loss_sum.fill_(run.progress.loss_sum)
    loader.load_state_dict(saved["loader"])
    done = run.progress
    run.log.keep(
        lambda row: (
            row.get("step", 0) <= done.step and (row.get("kind") != "epoch" or row["epoch"] <= done.epoch)
        )
    )
    return run


def changed(run: Run, saved: Mapping[str, Any]) -> dict[str, Json]:
    """What differs from when a checkpoint was written, as `{name: [before, now]}`: settings and numerics."""
    config: dict[str, Json] = json.loads(json.dumps(asdict(run.config)))
    pairs = {name: [saved["config"].get(name), value] for name, value in config.items() if name != "resume"}
    before = saved.get("numerics", {})
    pairs |= {name: [before.get(name, value), value] for name, value in run.numerics.items()}
    return {name: [was, now] for name, (was, now) in pairs.items() if was != now}


def _finite_pairs(
    batches: Iterable[PairBatch], widths: Mapping[str, int], device: torch.device
) -> Iterator[Pairs]:
    for batch in batches:
        pairs = to_pairs(batch, widths, device)
        check_finite(pairs)
        yield pairs


def _checked(space: FieldSpace | None, config: TrainConfig) -> FieldSpace:
    """What decoders are trained with, which the stages need.

    Raises:
        ConfigError: `space` is None, or the inverse-decoding loss lacks an encoder with gradients.
    """
    if space is None:
        raise ConfigError(
            "a stage trains a decoder, and nothing tells which raw field it decodes to. From Python give "
            'train(..., space=FieldSpace(field="data"))'
        )
    if space.encode is None and any(stage.lambda_inv_dec for stage in config.all_stages):
        raise ConfigError(
            "lambda_inv_dec is above 0, and this encoder has no form that gradients pass. Set it to 0; "
            "inverse encoding works with any encoder"
        )
    return space


def _make(  # noqa: PLR0913, PLR0917 - as `begin`
    folder: Path,
    config: TrainConfig,
    shape: OperatorShape,
    widths: dict[str, int],
    ranks: Ranks,
    decoder: DecoderShape | None,
    space: FieldSpace | None,
) -> Run:
    device = resolve_device(config.device)
    use_device(device)
    model = LatentOperator(shape, seed=config.seed).to(device)
    model.clock = _clock(widths)
    made = None
    if decoder is not None and space is not None:
        made = FieldDecoder(decoder, space.decode, seed=config.seed).to(device)
    return Run(
        folder=folder,
        config=config,
        model=model,
        shape=shape,
        widths=widths,
        optimizer=make_optimizer(model, config),
        progress=Progress(),
        loss_sum=torch.zeros((), dtype=torch.float64, device=device),
        ranks=ranks,
        decoder=made,
        space=space,
    )


def _clock(widths: Mapping[str, int]) -> tuple[int, int] | None:
    """Places of `time` and `dt` among the numbers of the condition, if each is one number."""
    names = list(widths)
    if any(widths.get(name) != 1 for name in ("time", "dt")):
        return None
    time, step = (sum(widths[name] for name in names[: names.index(own)]) for own in ("time", "dt"))
    return time, step


def make_optimizer(model: nn.Module, config: TrainConfig) -> Any:
    """AdamW over the weights of `model`; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.lr,
        fused=True,
    )


def _set_aside(folder: Path) -> None:
    """Keep one earlier run: starting again by mistake must not cost days of training.

    Its checkpoints and its lines stay together. A run that ended before its first checkpoint left nothing
    that could be gone on from, so it takes the place of no other.
    """
    found = [folder / "checkpoints", *folder.glob("metrics*.jsonl"), *folder.glob("stall*.jsonl")]
    before = [path for path in found if ".previous" in path.name]
    before += folder.glob("checkpoints.previous")
    run = [path for path in found if path not in before and path.exists()]
    if not run:
        return
    drop = before if (folder / "checkpoints").exists() or not before else run
    for path in drop:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in run:
        if path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
