"""Every setting: its name, type, default and one sentence.

docs/reference/config.md is made from this module and `sections.py`, and messages about wrong values quote
them. Models are frozen, so what a run was started with is what it records. Names of earlier systems are in
`earlier.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from omegaconf import OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr

from stoker.config.sections import (
    ArraysConfig,
    CountBytes,
    CountInt,
    FetchConfig,
    Flag,
    Fraction,
    ImagesConfig,
    JoinConfig,
    Kind,
    LaunchConfig,
    Names,
    NonNegativeFloat,
    ParquetConfig,
    Place,
    PluginName,
    PositiveBytes,
    PositiveFloat,
    PositiveInt,
    RayConfig,
    SettingsSection,
    SqlConfig,
    TarConfig,
    TorchConfig,
    as_names,
)
from stoker.errors import ConfigError
from stoker.schema import TIER_ALIASES, Json
from stoker.train.config import STAGES, StageName

# ----------------------------------------------------------------------------------------------------------
# `stages`: the parts of a training run, in order.


OTHER_NAMES: Mapping[str, str] = {"decoder_finetune": "decoder", "decoder_fine_tune": "decoder"}
"""Names of earlier systems to today's of equal meaning."""

_REFUSED: Mapping[str, str] = {
    "diffusion": "a diffusion model of what the operator misses",
    "diff_residual": "a diffusion model of what the operator misses",
    "distill": "a diffusion model in few steps",
    "consistency_distill": "a diffusion model in few steps",
}
"""Names of earlier systems to what they trained, which this version does not."""


def stage_name(name: str) -> StageName:
    """Return the stage that `name` means.

    >>> stage_name("decoder_finetune")
    'decoder'

    Raises:
        ConfigError: No stage has this name. For one of the earlier systems it says what to use instead.
    """
    name = OTHER_NAMES.get(name, name)
    if name in _REFUSED:
        raise ConfigError(
            f"stage {name!r} trained {_REFUSED[name]}, which this version does not have",
            hint="For consistent roll-outs use the stage consistency; for a diffusion model of your own "
            "train on stoker.Loader",
        )
    if name not in STAGES:
        raise ConfigError(f"stage {name!r} is unknown", hint=f"Known: {', '.join(STAGES)}")
    return name


class StageConfig(BaseModel):
    """One stage. What is left out is as in `training`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: StageName
    epochs: PositiveInt | None = None
    lr: PositiveFloat | None = None
    early_stop_patience: CountInt | None = None
    freeze_operator: Flag = True
    lambda_inv_enc: NonNegativeFloat | None = None
    lambda_inv_dec: NonNegativeFloat | None = None
    lambda_consistency: NonNegativeFloat = 1.0
    horizon: Annotated[int, Field(ge=2, strict=True)] | None = None


ONLY_IN: Mapping[str, str] = {
    "freeze_operator": "decoder",
    "lambda_consistency": "consistency",
    "horizon": "consistency",
}
"""Keys to the stage that alone has a use for them."""


def _named(name: str, own: object) -> object:
    """Return an entry of a mapping as one of a list; what is not a mapping is left to be refused."""
    if own is None:
        return {"name": name}
    return {"name": name, **cast("Mapping[str, object]", own)} if isinstance(own, Mapping) else own


def _listed(value: object) -> object:
    """Return `{operator: {epochs: 20}, decoder: {}}` as a list; names of earlier systems as today's."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        value = [_named(name, own) for name, own in mapping.items()]
    if not isinstance(value, list | tuple):
        return value
    found: list[object] = []
    for entry in cast("list[object]", value):
        own = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(own, Mapping) and isinstance(own.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
            known = cast("Mapping[str, object]", own)
            own = {**known, "name": stage_name(str(known["name"]))}
        found.append(own)
    return tuple(found)


Stages: TypeAlias = Annotated[tuple[StageConfig, ...], BeforeValidator(_listed)]


# ----------------------------------------------------------------------------------------------------------
# `training.transforms`: what is done to training batches; each is one of `stoker.transforms`, by kind.


Axis: TypeAlias = Annotated[int, Field(lt=0, strict=True)]
Axes: TypeAlias = Annotated[tuple[Axis, ...], Field(min_length=1)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Numbers: TypeAlias = Number | Annotated[tuple[Number, ...], Field(min_length=1)]


class _TransformStep(BaseModel):
    """Base of all kinds: no unknown names, and the fields that are changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: tuple[str, ...] | None = None


class FlipStep(_TransformStep):
    """As `stoker.transforms.Flip`."""

    kind: Literal["flip"]
    axis: Axis = -2
    p: Annotated[float, Field(ge=0, le=1)] = 0.5
    negate: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()


class RollStep(_TransformStep):
    """As `stoker.transforms.Roll`."""

    kind: Literal["roll"]
    axes: Axes = (-2,)


class CropStep(_TransformStep):
    """As `stoker.transforms.Crop`."""

    kind: Literal["crop"]
    size: Annotated[int, Field(ge=1, strict=True)] | tuple[Annotated[int, Field(ge=1, strict=True)], ...]
    axes: Axes = (-3, -2)
    padding: Annotated[int, Field(ge=0, strict=True)] = 0
    border: Literal["zeros", "wrap", "reflect"] = "zeros"


class NoiseStep(_TransformStep):
    """As `stoker.transforms.Noise`."""

    kind: Literal["noise"]
    std: Numbers


class NormalizeStep(_TransformStep):
    """As `stoker.transforms.Normalize`; without `mean` and `std` by the statistics of the training cache."""

    kind: Literal["normalize"]
    mean: Numbers | None = None
    std: Numbers | None = None
    axis: Axis = -1


Step: TypeAlias = Annotated[
    FlipStep | RollStep | CropStep | NoiseStep | NormalizeStep, Field(discriminator="kind")
]
Steps: TypeAlias = tuple[Step, ...]


_SHORT = {
    "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
}  # fmt: skip


def _long_dtype(value: object) -> object:
    return _SHORT.get(value, value) if isinstance(value, str) else value


def _of_percent(value: object) -> object:
    """Return the number that `2%` stands for; anything else as it is."""
    text = value.strip() if isinstance(value, str) else ""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else value
    except ValueError:
        return value


StorageDtype: TypeAlias = Annotated[
    Literal["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"], BeforeValidator(_long_dtype)
]


class DataConfig(SettingsSection):
    """Which raw samples there are."""

    kind: Kind = "hdf5"
    """Kind of the raw data; each kind has settings of its own below (docs/how-to/sources.md)."""
    task: Names = "burgers1d"
    """Name of the data set; it names the caches, and the files below `data.root` (`{task}_{split}.h5`)."""
    root: str = "data/pdebench"
    """Folder with the files."""
    files: Names | None = None
    """A path, a list or a glob of files; wins over `data.root` and the names made from `data.task`."""
    split: Names = "train"
    """The split, or splits, to encode; training takes the first, and `val` for validation."""
    splits: dict[str, PositiveFloat] | None = None
    """Shares of the splits, when no files are named by split; null: 0.8 train, 0.1 val, 0.1 test."""
    seed: CountInt = 0
    """Decides which samples fall into which split."""
    preset: Literal["pdebench", "well"] | None = None
    """Layout of the files; null: recognized from what they hold."""
    fields: dict[str, str] | None = None
    """Datasets and their axes, as `{latent: "n t x c"}`, in place of a preset."""
    include: Annotated[
        tuple[Literal["time", "dt", "coordinates", "boundary"], ...], BeforeValidator(as_names)
    ] = ()
    """Serve these as fields too, where HDF5 files state them: times, time step, coordinates, boundaries."""
    input: str | None = None
    """In samples without time, the field that training maps to `data`, as `nu` of Darcy flow; null: none."""
    normalize: Flag = False
    """Shift and scale each channel by mean and deviation of the train split, before encoding."""
    limit: PositiveInt | None = None
    """Take only the first so many samples."""
    stage: Literal["auto", "never", "always"] = "never"
    """Copy files to a local disk before they are read; `auto`: from network storage
    (docs/how-to/staging.md)."""
    stage_dir: Place | None = None
    """Folder for these copies; null: `.staged` next to the caches."""
    arrays: ArraysConfig = ArraysConfig()
    tar: TarConfig = TarConfig()
    parquet: ParquetConfig = ParquetConfig()
    images: ImagesConfig = ImagesConfig()
    join: JoinConfig = JoinConfig()
    sql: SqlConfig = SqlConfig()
    dataset: str | None = None
    """A torch Dataset, or what makes it: `module:name`, `path/file.py:name`; then `data.kind` is `torch`."""
    torch: TorchConfig = TorchConfig()
    options: dict[str, JsonValue] | None = None
    """Settings of a kind that another package adds (docs/how-to/plugins.md)."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """`task` as a tuple."""
        return as_names(self.task)

    @property
    def wanted_splits(self) -> tuple[str, ...]:
        """`split` as a tuple."""
        return as_names(self.split)


class LatentConfig(SettingsSection):
    """Size of what the encoder makes of one time step."""

    dim: PositiveInt = 32
    """Numbers in one token."""
    tokens: PositiveInt = 16
    """Tokens of one time step."""


class EncoderConfig(SettingsSection):
    """The frozen encoder."""

    kind: Literal["grid", "features", "module", "mesh", "identity"] = "grid"
    """`grid` and `mesh` take simulations, `features` images, `module` what you choose; `identity`: as is."""
    patch_size: (
        PositiveInt | tuple[PositiveInt, PositiveInt] | tuple[PositiveInt, PositiveInt, PositiveInt]
    ) = 4
    """Points of a patch along each axis, or `[height, width]` or `[depth, height, width]`; in 1D along x."""
    fourier: tuple[PositiveInt, ...] = (1, 2)
    """Waves across the domain that tell the encoder where a patch lies; `[]` for none."""
    seed: CountInt = 0
    """Decides the weights where no checkpoint is given."""
    checkpoint: Place | None = None
    """A file with the weights: safetensors; of `module` also `.pt` or `.pth`, read without running code."""
    target: str | None = None
    """Of `module`: an `nn.Module` class, or a function that makes one: `package.module:Class`,
    `path/file.py:Class`."""
    arguments: dict[str, JsonValue] | None = None
    """Of `module`: keyword arguments that the target is called with."""
    checkpoint_key: str | None = None
    """Of `module`: the entry of the checkpoint that holds the weights, as `state_dict`; dots go deeper."""
    checkpoint_prefix: str = ""
    """Of `module`: take the weights whose names begin with this, and cut it off, as `encoder.`."""
    field: Names = "data"
    """Of `module`: the field, or fields, of a sample that it is given."""
    output: Names = "latent"
    """Of `module`: the name, or names, of what it returns."""
    time: Literal["none", "steps", "whole"] | None = None
    """Of `module`: it takes time steps one by one, trajectories (`whole`), or knows no time (`none`); null:
    `steps` where the field has time."""
    version: str | None = None
    """Of `module`: stands for its code in the recipe; null: source text and settings do."""
    folder: Place | None = None
    """Of `features`: the local folder of a vision model of transformers (docs/how-to/images.md)."""
    pooling: Literal["cls", "mean", "tokens"] = "cls"
    """Of `features`: the class token, the mean of the patches, or all tokens."""
    processor: Literal["device", "pil"] = "device"
    """Of `features`: images as they are stored, or resized and cropped by the model's own processor."""

    def patch(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the patch on a grid `(H, W)` or `(D, H, W)`; one-dimensional data has height 1."""
        if isinstance(self.patch_size, tuple):
            return self.patch_size
        return tuple(1 if points == 1 else self.patch_size for points in grid)


class ModelConfig(SettingsSection):
    """The operator that is trained."""

    width: PositiveInt = 128
    """Numbers per token inside the transformer."""
    depth: PositiveInt = 3
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads; divides `model.width`."""


def _tier(value: object) -> object:
    """Return the name of a tier for another name of it."""
    return TIER_ALIASES.get(value, value) if isinstance(value, str) else value


def _as_name(value: object) -> object:
    """Return a field's name: the fields of tuples are numbers."""
    return str(value) if type(value) is int else value


class TrainingConfig(SettingsSection):
    """Training, and where the cache lies."""

    batch_size: PositiveInt = 256
    """Windows in one batch, on each rank; a resumed run keeps the global batch."""
    batch_trajectories: PositiveInt | None = None
    """Whole trajectories in one batch, as the earlier systems counted; in place of `batch_size`."""
    epochs: PositiveInt = 10
    """Passes over the train split."""
    max_steps: PositiveInt | None = None
    """End after so many steps, whatever `epochs` says."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 1e-4
    """AdamW's weight decay."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: not clipped."""
    use_inverse_losses: Flag | None = None
    """Train a decoder with the operator, on raw fields that caches then keep; null: if a weight is set."""
    lambda_inv_enc: NonNegativeFloat | None = None
    """Weight of the inverse-encoding loss, decoded states against raw fields; null: 1 if it is used."""
    lambda_inv_dec: NonNegativeFloat | None = None
    """Weight of the inverse-decoding loss, predictions against encoded decoded ones; null: 0.1 if used."""
    early_stop_patience: CountInt = 0
    """Epochs without a better validation error before training ends; 0: never."""
    checkpoint_every: PositiveInt = 1
    """Epochs between checkpoints."""
    amp: Flag | None = None
    """Mixed precision; null: on a GPU."""
    time_stride: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Steps of the trajectory between z0 and z1; of a range, as `[1, 4]`, each example draws its own."""
    rollout_horizon: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Strides that a window reaches ahead, or a range to draw from; above 1 a batch carries `future`."""
    target: Annotated[str | None, BeforeValidator(_as_name)] = None
    """Field that is predicted from others, of records without time; null: `label`, `target` or `y`."""
    inputs: Annotated[tuple[str, ...] | None, BeforeValidator(as_names)] = None
    """Fields to predict `target` from; null: all others of fixed shape."""
    state_fields: Annotated[tuple[str, ...] | None, BeforeValidator(as_names)] = None
    """Fields with time that make up the state, side by side; null: the only one, or `latent`, or `data`."""
    start_every: PositiveInt = 1
    """Steps between the starts of windows; equal to `time_stride`: the pairs of the earlier systems."""
    device: Annotated[
        str,
        Field(pattern=r"^(auto|cpu|gpu|cuda(:\d+)?)$", examples=["auto", "cpu", "gpu", "cuda", "cuda:1"]),
    ] = "auto"
    """Where to compute; `auto` takes a GPU where there is one."""
    shuffle: (
        bool
        | Annotated[
            str, Field(pattern=r"^block(\(\d+, ?\d+\))?$", examples=["true", "block", "block(64,4096)"])
        ]
    ) = True
    """Shuffle all examples again in each epoch, or by `block` for slow storage; false: by sample index."""
    partition: Annotated[
        str, Field(pattern=r"^(global|static(\(\d+\))?)$", examples=["global", "static", "static(8)"])
    ] = "global"
    """How ranks divide the examples: `static`: each rank keeps one part for all epochs."""
    rank_deadline: PositiveFloat = 300.0
    """Seconds that a rank waits for the others, under torchrun, before it ends and names them."""
    tier: Annotated[Literal["auto", "device", "host", "disk", "encode"], BeforeValidator(_tier)] = "auto"
    """Where batches are served from; `auto`: the fastest that fits (docs/explanation/tiers.md)."""
    reserve_bytes: CountBytes | None = None
    """Memory of the device to leave to the model; null: by the rules of docs/explanation/tiers.md."""
    transforms: Steps = ()
    """Done to every training batch, as `[{kind: noise, std: 0.01}]`; `normalize` also in validation."""
    subset: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Part of the stored samples to train on, the same share of every file, by `data.seed`; null: all."""
    indices_file: Place | None = None
    """Indices of the samples to train on: a `.npy` file, or text with one a line; null: all."""
    weights_file: Place | None = None
    """A weight per stored sample, or per entry of `indices_file`, to draw by; null: each once an epoch."""
    max_stall: Annotated[Fraction | None, BeforeValidator(_of_percent)] = None
    """Largest part of the time that may be waited for data, as `2%` or 0.02; above it: exit code 5."""
    seed: CountInt = 0
    """Decides the order of examples and the model's first weights."""
    trackers: Annotated[tuple[str, ...], BeforeValidator(as_names)] = ()
    """Who gets the figures of a run as well: `tensorboard`, `wandb`, `mlflow`, or an entry point's name."""
    price_per_hour: PositiveFloat | None = None
    """Price of the machine per hour, in any currency, for the cost of the run; null: not told."""
    run_dir: Place | None = None
    """Folder for checkpoints, metrics and curves; null: `runs/{task}`."""
    mixture: Literal["concat", "weighted", "round_robin"] = "concat"
    """How several tasks share an epoch: all of each, parts by weight, a batch of each in turn."""
    task_weights: dict[str, PositiveFloat] | None = None
    """Parts that tasks have in an epoch of `mixture: weighted`, by name; null: equal ones."""
    latent_cache_dir: Place = "data/latent_cache"
    """Folder of the caches, or an address as `s3://bucket/caches`; also gs, az, file
    (docs/how-to/objects.md)."""
    mirror_dir: Place = ".stoker/mirror"
    """Where copies of caches at an address are kept on this machine: a local disk."""
    mirror_bytes: PositiveBytes | None = None
    """How many bytes of them at most; what was unused longest goes first. Null: no limit."""
    latent_cache_dtype: StorageDtype | dict[str, StorageDtype] | None = "float16"
    """How floats are stored, all or by field; null: as encoded, the default but for the grid encoder."""


class TimeoutsConfig(SettingsSection):
    """Seconds without progress after which a stage counts as stalled."""

    start: PositiveFloat = 60.0
    """Starting a worker process."""
    open: PositiveFloat = 60.0
    """Opening a file."""
    read: PositiveFloat = 60.0
    """Reading one sample, or one piece of a long one."""
    encode: PositiveFloat = 300.0
    """One call of the encoder, or bringing it to its device."""
    write: PositiveFloat = 120.0
    """Writing one encode batch, or committing one shard."""


class PrecomputeConfig(SettingsSection):
    """Filling the cache."""

    workers: CountInt | None = None
    """Worker processes; 0 reads in this process, without timeouts; null: the first samples are read in this
    process, then as many workers as pay."""
    devices: Annotated[tuple[str, ...], BeforeValidator(as_names)] = ()
    """An encoder on each of these, as `[cuda:0, cuda:1]` or `all`; none: on `training.device`."""
    max_quarantined: Fraction = 0.001
    """Largest part of the samples that may be quarantined before the run counts as failed."""
    nan: Literal["reject", "allow"] = "reject"
    """Quarantine a sample with a NaN or an infinity, or store it."""
    max_error: PositiveFloat | None = None
    """Largest rounding error of the storage dtype, relative to a record's largest value; null: no bound."""
    compression: Literal["none", "zstd", "lz4", "auto"] = "none"
    """How shards are compressed, without loss (docs/how-to/caches.md); `auto`: zstd where it saves
    a tenth."""
    in_place: Flag = False
    """With `encoder.kind: identity`: serve contiguous HDF5 and `.npy` files where they are, without a copy
    (docs/how-to/sources.md)."""
    keep: str | tuple[str, ...] = ()
    """Fields of the raw samples to store with the latents, as `data` or `[data]`, for losses on them."""
    overwrite: Flag = False
    """Encode all records of this recipe again."""
    retry_quarantined: Flag = False
    """Try quarantined samples again, those with errors of their own as well."""
    wait: Flag = True
    """Encode what is missing before `train` begins; `false`: encode while it trains."""
    encode_batch: PositiveInt | Literal["auto"] | None = None
    """Samples in one call of the encoder, a part of the recipe; null: about 8 MiB of them; `auto`: measured
    once, then kept (docs/how-to/encoders.md)."""
    engine: Annotated[str, PluginName("stoker.engines", ("local",))] = "local"
    """Who encodes: this machine, or a Ray cluster (docs/how-to/ray.md)."""
    ray: RayConfig = RayConfig()
    options: dict[str, JsonValue] | None = None
    """Settings of an engine that another package adds (docs/how-to/plugins.md)."""
    timeouts: TimeoutsConfig = TimeoutsConfig()


class VerifyConfig(SettingsSection):
    """Checks that served records are what was encoded."""

    on_read: Literal["always", "first", "off"] = "always"
    """When the disk tier compares what it reads with checksums: at each read, a block's first, or never."""
    spot_check: CountInt = 0
    """Records of each training cache to encode again while training, and to compare with the stored ones."""


class Config(SettingsSection):
    """All settings of a run. Made by `load_config`; `notes` says what was accepted without effect."""

    data: DataConfig = DataConfig()
    latent: LatentConfig = LatentConfig()
    encoder: EncoderConfig = EncoderConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    stages: Stages = ()
    """Parts of a training run, as `[{name: operator, epochs: 20}, {name: decoder}]`
    (docs/how-to/training.md)."""
    precompute: PrecomputeConfig = PrecomputeConfig()
    verify: VerifyConfig = VerifyConfig()
    fetch: FetchConfig = FetchConfig()
    launch: LaunchConfig = LaunchConfig()
    identity: Literal["auto", "full"] = "auto"
    """How source files are digested: `full` reads all bytes; `auto` probes them above 4 GiB in all."""
    tasks: dict[str, dict[str, JsonValue]] | None = None
    """Settings of one task alone, as `{well2d: {data: {preset: well}}}` (docs/how-to/mixtures.md)."""

    _notes: tuple[str, ...] = PrivateAttr(default=())
    _where: str = PrivateAttr(default="defaults")
    _of_task: dict[str, Config] = PrivateAttr(default_factory=dict[str, "Config"])

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each setting that was accepted and has no effect; to be shown once."""
        return self._notes

    @property
    def where(self) -> str:
        """The file that the settings came from, for messages."""
        return self._where

    def noted(self, where: str, notes: tuple[str, ...]) -> Config:
        """Return the same settings with their origin and notes."""
        copy = self.model_copy()
        copy._where, copy._notes = where, notes
        return copy

    def with_tasks(self, of_task: dict[str, Config]) -> Config:
        """Return the same settings, which for these tasks are others."""
        copy = self.model_copy()
        copy._of_task = of_task
        return copy

    def for_task(self, task: str) -> Config:
        """Return the settings as they are for one task."""
        own = self._of_task.get(task)
        if own is None:
            return self
        # The device may have been changed since, for this process.
        training = own.training.model_copy(update={"device": self.training.device})
        return own.model_copy(update={"training": training})

    def to_dict(self) -> dict[str, Json]:
        """Return every setting in force, as plain JSON types; `make_config` reads it back."""
        plain: dict[str, Any] = self.model_dump(mode="json")
        if self.training.batch_trajectories is not None:
            del plain["training"]["batch_size"]
        return plain

    def to_yaml(self) -> str:
        """Return every setting as YAML, a file that `load_config` reads."""
        plain: dict[str, Any] = self.to_dict()
        return OmegaConf.to_yaml(OmegaConf.create(plain))
