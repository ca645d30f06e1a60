"""Everything that a command works with: its settings and what follows from them, computed once.

A command makes one `Run` and hands it on. `Run.for_task` is the same for one task of several: it has that
task's own settings, and shares ranks, encoders and the run's folder.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stoker
from stoker.config import Config
from stoker.config.models import StageConfig, stage_name
from stoker.distributed.ranks import SINGLE_PROCESS, Ranks, nodes_that_share
from stoker.encoders.protocol import Encoder
from stoker.encoders.wrappers import field_names, is_steady
from stoker.errors import ConfigError, FormatError, docs_url
from stoker.loader import Windows
from stoker.loader.batch import number_examples, state_fields, time_field
from stoker.loader.outputs import make_outputs
from stoker.monitor import MissingGpu, open_gpu
from stoker.plan import probe
from stoker.plan.resources import automatic_device, encode_on, require_devices, use_device
from stoker.precompute.progress import ProgressSink
from stoker.runtime.jsonio import read_strict
from stoker.schema import Json, Schema, canonical_json, digest_json, schema_to_json
from stoker.sources.files import canonical_split
from stoker.store.remote import is_url, local_path
from stoker.store.storage import attach_mirror, open_storage
from stoker.train.config import StageName, TrainStage
from stoker.train.operator import unequal_tokens
from stoker.units import format_bytes

# ----------------------------------------------------------------------------------------------------------
# The stages of a configuration: their losses, their windows, and the raw fields that some need.


INVERSE_ENCODING, INVERSE_DECODING = 1.0, 0.1
"""Weights of the inverse losses where `training.use_inverse_losses` stands alone. The first does not reach
the operator, the second does."""
CONSISTENCY_HORIZON = 4
"""Strides that windows of a consistency stage reach ahead, at least."""
CONSISTENCY_LR = 0.1
"""Part of `training.lr` with which the operator is fine-tuned for consistency."""
RAW = "data"
"""The field of samples that encoders of a grid take, and that decoders give back."""


def stages_of(config: Config) -> tuple[TrainStage, ...]:
    """Return the stages for the training loop; one of `operator` where none are given.

    Raises:
        ConfigError: The first is not `operator`, a name comes twice, or the problem has no such stage.
    """
    given = config.stages or (StageConfig(name="operator"),)
    names = [stage.name for stage in given]
    if names[0] != "operator" or len({*names}) < len(names):
        raise ConfigError(
            f"stages are {', '.join(names)}",
            hint="Expected operator first, then decoder, consistency or both, each once",
        )
    training = config.training
    enc, dec = _inverse(config)
    found: list[TrainStage] = []
    for own in given:
        patience = (
            training.early_stop_patience if own.early_stop_patience is None else own.early_stop_patience
        )
        part = CONSISTENCY_LR if own.name == "consistency" else 1.0
        inverse = own.name == "operator"
        found.append(
            TrainStage(
                name=own.name,
                epochs=own.epochs or training.epochs,
                lr=own.lr or training.lr * part,
                patience=patience or None,
                freeze_operator=own.freeze_operator,
                lambda_inv_enc=_first(own.lambda_inv_enc, enc if inverse else 0.0),
                lambda_inv_dec=_first(own.lambda_inv_dec, dec if inverse else 0.0),
                lambda_consistency=own.lambda_consistency,
            )
        )
    if config.data.input is not None and (len(found) > 1 or found[0].trains_decoder):
        raise ConfigError(
            f"data.input is {config.data.input!r}, and a steady problem trains the operator alone: stages "
            f"are {', '.join(names)}, training.lambda_inv_enc is {found[0].lambda_inv_enc:g} and "
            f"training.lambda_inv_dec {found[0].lambda_inv_dec:g}",
            hint="Set stages=[operator] and training.use_inverse_losses=false",
        )
    if config.encoder.kind == "mesh" and any(stage.trains_decoder for stage in found):
        raise ConfigError(
            f"encoder.kind is mesh, and a decoder is trained on the field {RAW!r} of a grid",
            hint="Leave the stage decoder out, and set training.use_inverse_losses=false",
        )
    return tuple(found)


def only_stage(config: Config, wanted: str | None) -> StageName | None:
    """Return the stage of `--stage NAME`; None for all.

    Raises:
        ConfigError: The settings have no such stage.
    """
    if wanted is None or wanted == "all":
        return None
    name, names = stage_name(wanted), [stage.name for stage in stages_of(config)]
    if name not in names:
        raise ConfigError(
            f"--stage is {wanted}, and the settings have {', '.join(names)}",
            hint=f"Add it to the settings: stages=[{','.join([*names, name])}]",
        )
    return name


def with_epochs(config: Config, wanted: str | None, epochs: int | None) -> Config:
    """Return the settings with `epochs` in the stage `wanted`; None: `training.epochs` says it already."""
    if epochs is None or only_stage(config, wanted) is None or not config.stages:
        return config
    name = stage_name(str(wanted))
    stages = [s.model_copy(update={"epochs": epochs}) if s.name == name else s for s in config.stages]
    return config.model_copy(update={"stages": tuple(stages)})


def _inverse(config: Config) -> tuple[float, float]:
    """Return weights of the inverse losses; `use_inverse_losses: false` turns them off whatever they are."""
    training = config.training
    on, enc, dec = training.use_inverse_losses, training.lambda_inv_enc, training.lambda_inv_dec
    if on is False:
        return 0.0, 0.0
    if on:
        return _first(enc, INVERSE_ENCODING), _first(dec, INVERSE_DECODING)
    return enc or 0.0, dec or 0.0


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def horizon_of(config: Config, stage: TrainStage) -> int | None:
    """Return the horizon of a stage's training windows; None: that of the settings."""
    if stage.name != "consistency":
        return None
    asked = next(own.horizon for own in config.stages if own.name == stage.name)
    own = config.training.rollout_horizon
    return asked or max(CONSISTENCY_HORIZON, own[1] if isinstance(own, tuple) else own)


# ----------------------------------------------------------------------------------------------------------
# The run.


log = logging.getLogger("stoker")


@dataclass(frozen=True, eq=False)
class Run:
    """The settings of a command, the processes that do it, and what follows from both.

    What is asked of the machine (a device, the nodes that share a folder) is asked at the first use and kept.

    Args:
        config: The settings.
        ranks: The processes that do it together.
        progress: Where the progress of encoding goes; None: to standard error.
    """

    config: Config
    ranks: Ranks = field(default=SINGLE_PROCESS, kw_only=True)
    progress: ProgressSink | None = field(default=None, kw_only=True)
    encoders: dict[str, Encoder] = field(default_factory=dict[str, Encoder], kw_only=True, repr=False)
    """Those made so far, by the digest of their identity: equal ones are one object."""
    task: str = field(default="", kw_only=True)
    """The task that this is for; empty: all of them."""
    whole: Run | None = field(default=None, kw_only=True, repr=False)
    """The run of all tasks that this is a part of; None: this is it."""

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks; where none is given, made from `data.files`, or the folder or kind of data."""
        data, given = self.config.data, self.config.data.model_fields_set
        if self.task:
            return (self.task,)
        if "task" in given:
            return tuple(data.tasks)
        if data.files is not None:
            return (stem_of(data.files),)
        if data.dataset is not None:
            return (stem_of(data.dataset.rpartition(":")[2]).lower(),)
        if data.kind != "hdf5":
            return (stem_of(data.root) if "root" in given else data.kind,)
        return tuple(data.tasks)

    @cached_property
    def _by_task(self) -> dict[str, Run]:
        return {}

    def for_task(self, task: str) -> Run:
        """Return the run as it is for one task."""
        if task == self.task:
            return self
        known, whole = self._by_task, self.whole or self
        if task not in known:
            known[task] = replace(self, config=self.config.for_task(task), task=task, whole=whole)
        return known[task]

    def parts(self) -> list[Run]:
        """Return the run as it is for each task, in their order."""
        return [self.for_task(task) for task in self.tasks]

    def with_training(self, **settings: Any) -> Run:
        """Return the run with other settings of `training`."""
        training = self.config.training.model_copy(update=settings)
        return replace(self, config=self.config.model_copy(update={"training": training}))

    # Folders

    @cached_property
    def cache_dir(self) -> Path:
        """The local folder of the caches: of a URL the one that stands for it.

        Raises:
            StokerError: As `attach_mirror`.
        """
        if self.whole is not None:
            return self.whole.cache_dir
        training = self.config.training
        if is_url(training.latent_cache_dir):
            return attach_mirror(training.latent_cache_dir, training.mirror_dir, training.mirror_bytes)
        return Path(training.latent_cache_dir)

    @cached_property
    def run_dir(self) -> Path:
        """`training.run_dir`, or `runs/{task}`, or `runs/{task}+{task}`, of all tasks together.

        Raises:
            ConfigError: It is a URL.
        """
        if self.whole is not None:
            return self.whole.run_dir
        named = self.config.training.run_dir or f"runs/{'+'.join(self.tasks)}"
        return local_path(named, "training.run_dir")

    @cached_property
    def nodes(self) -> list[int]:
        """The machines that share the cache folder with this one (a URL: all); where not all do, it is said.

        All ranks ask this at the same point. Errors as `nodes_that_share`.
        """
        if self.whole is not None:
            return self.whole.nodes
        ranks, folder = self.ranks, self.config.training.latent_cache_dir
        if is_url(folder):
            return list(range(ranks.num_nodes))
        nodes = nodes_that_share(Path(folder), ranks)
        if ranks.is_rank_zero and len(nodes) < ranks.num_nodes:
            log.info(
                "%d of %d machines see the same %s: each of the others encodes all of it for itself. In a "
                "folder that all of them see, each would encode 1/%d",
                len(nodes),
                ranks.num_nodes,
                folder,
                ranks.num_nodes,
            )
        return nodes

    # Devices

    @cached_property
    def device(self) -> str:
        """`training.device`, with `auto` resolved: a GPU where there is one."""
        wanted = self.config.training.device
        if self.whole is not None and self.whole.config.training.device == wanted:
            return self.whole.device
        return automatic_device()[0] if wanted == "auto" else wanted

    # Splits and windows

    @property
    def split(self) -> str:
        """The first of `data.split`: the one to train on."""
        return canonical_split(self.config.data.wanted_splits[0])

    @property
    def splits(self) -> list[str]:
        """All of `data.split`."""
        return [canonical_split(split) for split in self.config.data.wanted_splits]

    @cached_property
    def windows(self) -> Windows:
        """Rules by which trajectories are cut; pairs of earlier systems began `time_stride` steps apart."""
        training = self.config.training
        windows = Windows(
            stride=training.time_stride,
            horizon=training.rollout_horizon,
            start_every=training.start_every,
            field=training.state_fields,
        )
        if training.batch_trajectories is not None and "start_every" not in training.model_fields_set:
            return replace(windows, start_every=windows.strides[0])
        return windows

    def windows_for(self, schema: Schema) -> Windows | None:
        """Return how records are cut; None where no field has time, so that each is an example."""
        timed = any(field.evolves and not field.kept for field in schema.values())
        return self.windows if timed else None


def on_own_device(run: Run) -> Run:
    """Return the run with this rank's own GPU, made the current one, where there are several of each."""
    if run.ranks.world_size == 1 or run.device != "cuda":
        return run
    own = f"cuda:{run.ranks.local_rank}"
    use_device(own)
    return run.with_training(device=own)


def encode_devices(run: Run) -> tuple[str, ...]:
    """Return the devices that encode on this machine: those asked for, else that of each rank here.

    Raises:
        ConfigError: A device that was asked for is not there.
    """
    wanted, count = run.config.precompute, run.ranks.local_world_size
    if wanted.devices:
        devices = encode_on(wanted.devices)
        if wanted.engine == "local":
            require_devices(*devices)
        return devices
    if count == 1:
        return (run.config.training.device,)  # `auto` is resolved, and said, where encoding begins
    if not run.device.startswith("cuda"):
        return (run.device,) * count
    return tuple(f"cuda:{place}" for place in range(count))


def names_of_caches(run: Run) -> dict[str, tuple[Run, str]]:
    """Return task and split of each cache that may be made, by name; `data.split` comes first."""
    splits = dict.fromkeys([*run.splits, "train", "val", "test"])
    return {f"{part.task}_{split}": (part, split) for part in run.parts() for split in splits}


def trains_decoder(run: Run) -> bool:
    """Return True if a stage trains a decoder, for which caches keep the raw field."""
    return any(stage.trains_decoder for stage in stages_of(run.config))


def kept_fields(run: Run) -> tuple[str, ...]:
    """Return the raw fields that caches keep: those of `precompute.keep`, and what stages need."""
    wanted = field_names(run.config.precompute.keep)
    return field_names([*wanted, *([RAW] if trains_decoder(run) else [])])


def windows_in(run: Run, schema: Schema) -> int | None:
    """Return the windows that training cuts from one record; None where records differ in length.

    A record of a steady problem is one example.

    Raises:
        ConfigError: None, so that no loader could serve them; the records have no time; or the operator
            cannot take the state fields side by side.
    """
    windows = run.windows_for(schema)
    if target_of(run, schema) is not None or windows is None:
        return 1
    if schema[main := time_field(schema, windows.field)].folded:
        raise ConfigError(
            f"field {main!r} has other points in every record, and `stoker train` trains an operator on "
            "latents of one shape",
            hint="Set encoder.kind=mesh; or train in Python on stoker.Loader(..., windows=stoker.Windows(), "
            f"ragged='pack') ({docs_url('how-to/meshes')})",
        )
    make_outputs(schema, windows, None)
    states = state_fields(schema, windows)
    if why := unequal_tokens({name: schema[name].shape[1:] or (1,) for name in states}):
        raise ConfigError.of_all([why])
    if schema[main].ragged:
        return None
    return number_examples(np.array([schema[main].shape[0]]), 1, windows).count


def batch_examples(run: Run, schema: Schema) -> int:
    """Return the examples in a batch; `training.batch_trajectories` counts whole trajectories."""
    training, steps = run.config.training, trajectory_steps(schema)
    if training.batch_trajectories is None:
        return training.batch_size
    if steps <= 1:
        return training.batch_trajectories
    return max(1, training.batch_trajectories * run.windows.count(steps))


TARGETS = ("label", "target", "y")
"""Fields that are learned where `training.target` names none."""


def target_of(run: Run, schema: Schema) -> str | None:
    """Return the field that training learns to predict from the others; None: it trains the operator.

    Raises:
        ConfigError: `training.target` names no such field, records with time have none, or none is known; or
            there are several tasks or ranks.
    """
    wanted = run.config.training.target
    evolving = [name for name, one in schema.items() if one.evolves and not one.kept]
    if evolving or is_steady(schema):
        if wanted is not None:
            what = f"{evolving[0]} has time" if evolving else "the problem is steady (data.input)"
            raise ConfigError(
                f"training.target is {wanted!r}, and {what}: an operator is trained",
                hint="Leave training.target out",
            )
        return None
    numbers = fields_to_learn(schema)
    if wanted is None:
        wanted = next((name for name in TARGETS if name in numbers), None)
    if wanted is None:
        raise ConfigError(
            f"records have {', '.join(schema)}, none with time",
            hint=_to_train(run.config.data.kind, schema, numbers),
        )
    if wanted not in numbers:
        what = "is not a field of fixed shape" if wanted in schema else "is not a field"
        raise ConfigError(
            f"training.target is {wanted!r}, which {what} of the records",
            hint=f"Expected one of {', '.join(numbers)}" if numbers else "",
        )
    if run.config.stages or trains_decoder(run):
        raise ConfigError(
            f"records have no time, so {wanted} is learned from the other fields, and `stages` and inverse "
            "losses are for an operator",
            hint="Leave stages, training.use_inverse_losses and the lambdas out",
        )
    whole = run.whole or run
    if len(whole.tasks) > 1:
        raise ConfigError(
            f"records of {run.task} have no time, and there are the tasks {', '.join(whole.tasks)}",
            hint="Train each alone with data.task",
        )
    if run.ranks.world_size > 1:
        raise ConfigError(
            f"records have no time, and {run.ranks.world_size} processes train: `stoker train` learns "
            f"{wanted} in one process",
            hint="Start it without torchrun, or train in Python on stoker.Loader "
            f"({docs_url('how-to/training#several-ranks')})",
        )
    inputs_of(run.config, schema, wanted)
    return wanted


def inputs_of(config: Config, schema: Schema, target: str) -> tuple[str, ...]:
    """Return the fields from which `target` is predicted: `training.inputs`, or all others of fixed shape.

    Raises:
        ConfigError: There is none, or no such field.
    """
    found = tuple(name for name in fields_to_learn(schema) if name != target)
    given = config.training.inputs
    if given is not None:
        if wrong := [name for name in given if name not in found]:
            raise ConfigError(
                f"training.inputs names {wrong[0]!r}, which is "
                f"{'the target' if wrong[0] == target else 'not a field of fixed shape'}",
                hint=f"Expected some of {', '.join(found)}, as training.inputs=[{', '.join(found[:2])}]",
            )
        found = given
    if not found:
        raise ConfigError(
            f"training.target is {target!r}, and records have no other field of fixed shape",
            hint="Add one to data, or name another target",
        )
    return found


def fields_to_learn(schema: Schema) -> list[str]:
    """Return the fields of fixed shape, which a network can read or predict."""
    return [name for name, one in schema.items() if not (one.ragged or one.kept or 0 in one.shape)]


_SAY_TIME = {"torch": "data.torch.time=[x]", **dict.fromkeys(("hdf5", "arrays"), "the axes in data.fields")}
"""By kind of data, how to say which fields have time."""


def _to_train(kind: str, schema: Schema, numbers: Sequence[str]) -> str:
    """Return what to do where nothing says what is to be learned."""
    ways: list[str] = []
    if kind == "images":
        ways.append("To learn labels, say where they are with data.images.annotations")
    elif len(numbers) > 1:
        ways.append(f"Name the field to predict from the others, as training.target={numbers[-1]}")
    if len(schema) > 1 and not schema.keys().isdisjoint(("data", "latent")):
        ways.append("For a steady problem name the field that data follows from, as data.input=nu")
    if (time := _SAY_TIME.get(kind)) is not None:
        ways.append(f"Where axis 0 of a field is time, say so with {time}")
    ways.append(
        "Else fill the cache with `stoker precompute`, and train in Python on stoker.Loader(CACHE_PATH, "
        "batch_size=64, shuffle=True)"
    )
    return ". ".join(ways)


def trajectory_steps(schema: Schema) -> int:
    """Return the steps of the longest field with time; 1 without one."""
    return max((field.shape[0] for field in schema.values() if field.time and not field.ragged), default=1)


def stem_of(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str:
    """Return a cache's name from the first path of `data.files`: its stem, or its folder's for a pattern.

    Later entries do not count, so that a file added to the list keeps the name and its records are reused.

    >>> stem_of("raw/1D_Burgers_Sols_Nu0.01.hdf5"), stem_of(["raw/sols_*.h5"]), stem_of("raw/*.h5")
    ('1D_Burgers_Sols_Nu0.01', 'sols', 'raw')
    """
    first = Path(files if isinstance(files, str | os.PathLike) else next(iter(files), "data"))
    known = first.suffix.lower() in {".h5", ".hdf5", ".hdf", ".he5", ".zarr", ".npy", ".tar", ".parquet"}
    name = first.stem if known else first.name
    for text in (name, first.parent.name, "data"):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", re.sub(r"\[[^]]*\]|[*?]+", "", text)).strip("._-")
        if plain:
            return plain
    return "data"


def describe_machine() -> str:
    """Return this machine in one line, for people who compare figures: version, device, memory, torch."""
    resources = probe()
    gpu = open_gpu()
    build = "CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
    if isinstance(gpu, MissingGpu):
        device = f"CPU ({resources.cpus:g} cores"
        driver = "no NVIDIA driver"
    else:
        gpu.close()
        device = f"GPU and CPU ({resources.cpus:g} cores"
        driver = "NVIDIA driver found"
    memory = f"{format_bytes(resources.host_bytes)} usable of {format_bytes(resources.host_total_bytes)})"
    return f"stoker {stoker.__version__} · {device}, {memory} · {driver}: {build}"


# ----------------------------------------------------------------------------------------------------------
# What a run folder remembers between commands: whether its run finished, and how long a step took.
#
# `run.json` is next to the checkpoints. An interrupted run with the same settings resumes; a finished one,
# or one with other settings, starts again. The time of a step counts for steps of
# the same work only.


FILE = "run.json"
LIMIT_BYTES = 1 << 20
_CHANGES_NO_BATCH = (
    "tier", "reserve_bytes", "run_dir", "latent_cache_dir", "checkpoint_every", "device", "max_stall",
    "rank_deadline", "trackers", "price_per_hour",
)  # fmt: skip
"""Settings of `training` that change no batch. A run with another value of one of these still resumes."""


def settings_digest(config: Config, fingerprints: Mapping[str, str]) -> str:
    """Return the digest of what an interrupted run must share with this one: model, training and data."""
    settings: dict[str, Any] = config.to_dict()
    training = {k: v for k, v in settings["training"].items() if k not in _CHANGES_NO_BATCH}
    kept: dict[str, Json] = {"training": training, "model": settings["model"], "caches": dict(fingerprints)}
    if settings["stages"]:  # how long each is may change from one to the next
        kept["stages"] = [{k: v for k, v in own.items() if k != "epochs"} for own in settings["stages"]]
        del training["epochs"]
    if settings["tasks"] is not None:
        kept["tasks"] = settings["tasks"]
    return digest_json(kept)


def unfinished(run: Run, digest: str) -> int | None:
    """Return the number of ranks that began an interrupted run of these settings; None: no such run."""
    diary = _read(run.run_dir)
    if diary.get("settings") != digest or diary.get("finished") is not False:
        return None
    return diary.get("ranks", 1)


def work_digest(run: Run, schema: Schema) -> str:
    """Return the digest of what decides the time of a step: model, batch of such records, and device."""
    work: dict[str, Json] = {
        "model": run.config.to_dict()["model"],
        "fields": schema_to_json(schema),
        "batch_size": batch_examples(run, schema),
        "horizon": run.windows.horizons[1],
        "device": run.device,
        "amp": run.config.training.amp,
    }
    return digest_json(work)


def last_step_s(run: Run, schema: Schema) -> float | None:
    """Return the seconds of a step of the last run here, without loading; None without a similar run."""
    diary = _read(run.run_dir)
    step_s = diary.get("step_s")
    if not isinstance(step_s, float) or step_s <= 0 or diary.get("work") != work_digest(run, schema):
        return None
    return step_s


def write_diary(
    run_dir: Path, *, digest: str, finished: bool, work: str, step_s: float | None, ranks: int = 1
) -> None:
    """Note the state of a run; `digest` and `work` as `settings_digest` and `work_digest` make them.

    Args:
        ranks: With how many it was begun.

    Raises:
        ReadOnlyError: The folder cannot be written.
    """
    text = canonical_json(
        {"settings": digest, "finished": finished, "work": work, "step_s": step_s, "ranks": ranks}
    )
    open_storage(run_dir).put(FILE, text.encode())


def _read(run_dir: Path) -> dict[str, Any]:
    """Return the content of `run.json`; empty if it is missing or damaged."""
    with suppress(OSError, FormatError):
        return read_strict(open_storage(run_dir).read(FILE, limit_bytes=LIMIT_BYTES), where=FILE)
    return {}
