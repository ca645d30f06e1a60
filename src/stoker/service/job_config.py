"""The configuration of a training job: the fields of the earlier service, each used or refused.

A field without an effect is refused unless it has its default value, and the message says why; no field is
accepted and ignored. `settings_of` translates the fields for each kind of data. docs/reference/http-api.md
lists all fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stoker.config import Config
from stoker.config.load import make_config
from stoker.config.names import nearest
from stoker.errors import ConfigError, Problem
from stoker.service.kinds import IMAGE_SIZE, kind_of
from stoker.service.security import texts_in

WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "parent_model_id": "there is no model registry; `continue` gives a finished job more epochs",
        "pretrained": "the networks here start from a seed; there are no pretrained weights",
        "freeze_backbone": "no network here has a backbone apart from its head",
        "n_mels": "this service makes no spectrograms; rows contain the features",
        "n_fft": "this service makes no spectrograms; rows contain the features",
        "hop_length": "this service makes no spectrograms; rows contain the features",
        "devices": "a job has one GPU; several jobs run at the same time",
        "only_approved": "rows have no approval mark; register only the sets to use",
    }
)
"""Fields of the earlier service without an effect here, and why."""


class JobFieldError(ConfigError):
    """Raised for fields of a job's configuration that do not fit each other or the data; names each."""

    def __init__(self, *args: object, hint: str = "", fields: Sequence[tuple[str, Problem]] = ()) -> None:
        super().__init__(*args, hint=hint)
        self.fields = tuple(fields)
        """Fields of `JobConfig`, as `seed` or `settings.model.width`, and what is wrong with each."""

    @classmethod
    def of_fields(cls, wrong: Sequence[tuple[str, Problem]]) -> JobFieldError:
        """Return the error for some fields, a line each."""
        error = cls.of_all([problem for _, problem in wrong])
        error.fields = tuple(wrong)
        return error


MOST_SETTINGS = 64
"""Names in `settings`, more than are allowed."""
Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class JobConfig(BaseModel):
    """The data, the network and the settings of a training job."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    dataset_ids: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(min_length=1, max_length=64)
    ]
    """Registered data sets, by id or name; several only of radio rows in one database."""
    parent_model_id: str | None = None
    """Refused: see `WITHOUT_EFFECT`."""
    model_architecture: Literal["triangulation", "operator", "classifier"] | None = None
    """The network; null: the one for the data, which is `triangulation` for radio rows."""
    pretrained: StrictBool = False
    """Refused unless false."""
    freeze_backbone: StrictBool = False
    """Refused unless false."""
    batch_size: Annotated[int, Field(ge=1, le=1024, strict=True)] = 128
    """Rows, images or windows per step."""
    num_workers: Annotated[int, Field(ge=0, le=32, strict=True)] = 0
    """Processes that read the data while it is encoded; 0: automatic. Batches need none."""
    validation_split: Annotated[float, Field(ge=0, le=0.5, strict=True)] = 0.2
    """Part of the data for validation, by a hash of its keys; 0, only for rows and images: none."""
    preload_to_gpu: StrictBool = True
    """Serve batches from the device if they fit, else from the next best tier; false: from host memory."""
    n_mels: StrictInt = 128
    """Refused unless at its default."""
    n_fft: StrictInt = 2048
    """Refused unless at its default."""
    hop_length: StrictInt = 512
    """Refused unless at its default."""
    epochs: Annotated[int, Field(ge=1, le=5000, strict=True)] = 100
    """Passes over the training part."""
    learning_rate: Positive = 1e-3
    """Peak rate of AdamW."""
    weight_decay: NotNegative = 1e-4
    """Weight decay of AdamW, on matrices."""
    dropout_rate: Annotated[float, Field(ge=0, le=0.9, strict=True)] = 0.2
    """Dropout of the networks for rows and images."""
    lr_scheduler: Literal["cosine", "constant"] = "cosine"
    """The rate after the warmup: falls to a hundredth, or stays."""
    warmup_epochs: Count = 5
    """Epochs over which the rate rises; at most half of all."""
    early_stop_patience: Annotated[int, Field(ge=0, le=100, strict=True, validate_default=True)] = 20
    """Epochs without a better validation loss before training ends; 0: never."""
    early_stop_delta: NotNegative = 1e-3
    """How much lower a validation loss must be to count as better."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    accelerator: Literal["auto", "gpu", "cpu"] = "auto"
    """Device; `gpu` fails without a GPU, `auto` uses one if it exists."""
    devices: StrictInt = 1
    """Refused unless 1."""
    min_snr_db: Annotated[float, Field(allow_inf_nan=False, strict=True)] | None = None
    """Radio rows: only those with at least this mean signal to noise; null: all. Dropped rows are told."""
    max_gdop: Positive | None = None
    """Radio rows: only those with at most this dilution of precision; null: all."""
    only_approved: StrictBool = True
    """Refused unless true."""
    max_receivers: Annotated[int, Field(ge=1, le=64, strict=True)] = 7
    """Radio rows: most receivers of a row; a row with more is quarantined."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Decides the order of examples, the split and the first weights."""
    settings: Annotated[
        dict[Annotated[str, Field(max_length=100)], JsonValue], Field(max_length=MOST_SETTINGS)
    ] = {}
    """Simulations and images: more settings of docs/reference/config.md by name, as `{"model.width": 64}`."""

    @model_validator(mode="before")
    @classmethod
    def _one_dataset(cls, given: Any) -> Any:
        """Return an early form named one data set, as `dataset_id`."""
        if isinstance(given, dict) and "dataset_id" in given and "dataset_ids" not in given:
            named: dict[str, Any] = dict(given)
            return {"dataset_ids": [named.pop("dataset_id")], **named}
        return given

    @field_validator(*WITHOUT_EFFECT)
    @classmethod
    def _has_an_effect(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        default = cls.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"{name}={value!r} has no effect here: {WITHOUT_EFFECT[name]}",
                hint=f"Leave it out, or give its default {default!r}",
            )
        return value

    @field_validator("dataset_ids")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ConfigError("a data set is named twice", hint="Name each once")
        return value

    @field_validator("early_stop_patience")
    @classmethod
    def _has_validation(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("validation_split") == 0 and value:
            raise ConfigError(
                f"validation_split is 0, so early_stop_patience={value} has no loss to watch",
                hint="Give early_stop_patience=0, or a validation_split above 0",
            )
        return value

    @property
    def warmup(self) -> float:
        """Part of all steps over which the rate rises."""
        return min(self.warmup_epochs / self.epochs, 0.5)


# ----------------------------------------------------------------------------------------------------------
# A job's configuration and data sets as settings of docs/reference/config.md, by kind of data.
#
# A field without an effect on a kind of data is refused unless it has its default value. Strings from the
# network are never interpolated: `${...}`, by which a settings file may name another setting or the
# environment, is refused.


NETWORKS: Mapping[str, str] = MappingProxyType(
    {"radio": "triangulation", "hdf5": "operator", "images": "classifier"}
)
"""The network for each kind of data set."""

_RADIO = "it applies to radio rows"
UNUSED_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "radio": {"settings": "all settings of radio rows are fields of the configuration"},
        "hdf5": {
            "dropout_rate": "the operator has no dropout",
            "early_stop_delta": "the operator's early stop takes any improvement",
            "lr_scheduler": "the operator's rate falls as a cosine",
            "warmup_epochs": "the operator's rate rises over the first twentieth of all steps",
            "min_snr_db": _RADIO,
            "max_gdop": _RADIO,
            "max_receivers": _RADIO,
        },
        "images": {"min_snr_db": _RADIO, "max_gdop": _RADIO, "max_receivers": _RADIO},
    }
)
"""Fields without an effect on a kind of data, and why."""

SETTINGS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "hdf5": (
            "latent.dim", "latent.tokens", "encoder.kind", "encoder.patch_size", "encoder.fourier",
            "encoder.seed", "encoder.target", "encoder.arguments", "encoder.field", "encoder.output",
            "encoder.time", "precompute.encode_batch", "model.width", "model.depth", "model.heads",
            "data.normalize", "data.limit", "data.preset",
            "training.max_steps", "training.amp", "training.time_stride",
            "training.rollout_horizon", "training.start_every", "training.shuffle", "training.partition",
            "training.subset",
            "training.latent_cache_dtype", "training.checkpoint_every", "precompute.max_quarantined",
            "precompute.nan", "precompute.retry_quarantined",
        ),
        "images": (
            "data.images.size", "data.images.fit", "data.images.color", "data.limit",
            "precompute.max_quarantined", "precompute.retry_quarantined",
        ),
    }
)  # fmt: skip
"""Names allowed in `settings` by kind: numbers and choices, no paths, and no code except encoders that the
operator allowed (`security.DataAccess`)."""


def check(config: JobConfig, datasets: Sequence[Mapping[str, Any]]) -> str:
    """Return the kind of a job's data, if its configuration and data sets fit each other.

    Args:
        config: The configuration.
        datasets: Its data sets in the form of `datasets.describe`.
    Raises:
        JobFieldError: They do not fit; has one line per reason.
    """
    kinds = sorted({str(one["kind"]) for one in datasets})
    if len(kinds) != 1:
        several = Problem(
            f"the data sets are of kinds {', '.join(kinds) or 'none'}",
            "Expected one kind: train on each in a job of its own",
        )
        raise JobFieldError.of_fields([("dataset_ids", several)])
    kind = kinds[0]
    if kind not in NETWORKS:
        unknown = Problem(
            f"data sets of kind {kind!r} cannot be trained on", f"Known are {', '.join(NETWORKS)}"
        )
        raise JobFieldError.of_fields([("dataset_ids", unknown)])
    wrong = [*_wrong_fields(config, kind), *_wrong_sets(config, kind, datasets)]
    if kind == "images":
        wrong += _wrong_images(config)
    if wrong:
        raise JobFieldError.of_fields(wrong)
    return kind


def settings_of(
    config: JobConfig, datasets: Sequence[Mapping[str, Any]], *, caches: str, run_dir: str, epochs: int
) -> Config:
    """Return the settings of `stoker train` for a job.

    Args:
        config, datasets: As for `check`.
        caches: Folder of the caches of all jobs.
        run_dir: The job's folder.
        epochs: Epochs in total, more than `config.epochs` if the job was extended.
    Raises:
        JobFieldError: They do not fit each other, or a value of `settings` is invalid.
    """
    kind = check(config, datasets)
    spec: Mapping[str, Any] = datasets[0]["spec"]
    settings: dict[str, Any] = {
        **kind_of(kind).settings(config, datasets),
        **_of_training(config),
        **config.settings,
    }
    if spec.get("named_splits"):
        settings.pop("data.splits")
    settings |= {
        "training.epochs": epochs,
        "training.latent_cache_dir": caches,
        "training.run_dir": run_dir,
    }
    for name, value in settings.items():
        for text in texts_in(value):
            if "${" in text:
                refused = Problem(
                    f"the job: {name} {text[:80]!r} holds '${{', which is refused here",
                    "Write the value itself",
                )
                raise JobFieldError.of_fields([(f"settings.{name}", refused)])
    try:
        return make_config(settings, where="the job")
    except ConfigError as error:
        wrong = [*_wrong_settings(config.settings)] or [("settings", error.problem)]
        raise JobFieldError(error.problem.fact, hint=error.problem.hint, fields=wrong) from None


def _wrong_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """Yield the settings that are wrong each alone, whatever the others are."""
    for name, value in settings.items():
        try:
            make_config({name: value}, where="the job")
        except ConfigError as error:
            yield f"settings.{name}", error.problem


def splits_of(config: JobConfig) -> tuple[str, ...]:
    """Return the splits that are encoded and trained on."""
    return ("train", "val") if config.validation_split else ("train",)


def _of_training(config: JobConfig) -> dict[str, Any]:
    own: dict[str, Any] = {
        "training.batch_size": config.batch_size,
        "training.lr": config.learning_rate,
        "training.weight_decay": config.weight_decay,
        "training.grad_clip": config.max_grad_norm,
        "training.early_stop_patience": config.early_stop_patience,
        "training.device": {"auto": "auto", "gpu": "cuda", "cpu": "cpu"}[config.accelerator],
        "training.seed": config.seed,
        "data.seed": config.seed,
        "data.splits": {"train": 1.0},
        "precompute.workers": config.num_workers or None,
    }
    if config.validation_split:
        share = config.validation_split
        own["data.splits"] = {"train": round(1 - share, 9), "val": share}
    if not config.preload_to_gpu:
        own["training.reserve_bytes"] = NOTHING_ON_DEVICE
    return own


NOTHING_ON_DEVICE = 1 << 60
"""Reserved device memory that leaves no space for records."""


MAX_IMAGE_SIDE = 1024
"""Pixels: a batch of the largest images has to fit in memory with all that a network makes of it."""


LEAST_SIDE = 9
"""Pixels: of smaller images the network keeps one pixel, and a batch of one has nothing to normalize over."""


def _wrong_images(config: JobConfig) -> Iterator[tuple[str, Problem]]:
    """Yield settings of images that the network cannot train on, which would show at the start of the job."""
    settings: Mapping[str, Any] = config.settings
    size = settings.get("data.images.size", [*IMAGE_SIZE])
    sides: list[Any] = size if isinstance(size, list) and len(size) == 2 else [None]
    if any(type(side) is not int or not 1 <= side <= MAX_IMAGE_SIDE for side in sides):
        yield (
            "settings.data.images.size",
            Problem(
                f"settings: data.images.size is {size!r}",
                f"Expected [height, width], each a whole number from 1 to {MAX_IMAGE_SIDE}",
            ),
        )
    elif config.batch_size == 1 and max(sides) < LEAST_SIDE:
        yield (
            "batch_size",
            Problem(
                f"batch_size=1 cannot train on images of {sides[0]} x {sides[1]} pixels: the network "
                "normalizes over a batch, and one image this small leaves one value",
                f"Give batch_size=2 or more, or data.images.size with a side of {LEAST_SIDE} or more",
            ),
        )
    if settings.get("data.images.fit") == "short":
        yield (
            "settings.data.images.fit",
            Problem(
                "settings: data.images.fit is 'short', which leaves images of several sizes",
                "Expected stretch or letterbox",
            ),
        )


def _wrong_fields(config: JobConfig, kind: str) -> Iterator[tuple[str, Problem]]:
    fields = type(config).model_fields
    for name, why in UNUSED_FIELDS[kind].items():
        value, default = getattr(config, name), fields[name].default
        if value != default:
            fact = f"{name}={value!r:.200} has no effect on {kind} data: {why}"
            yield name, Problem(fact, f"Leave it out, or give its default {default!r}")
    network = config.model_architecture
    if network not in (None, NETWORKS[kind]):
        fact = f"model_architecture={network!r} is not for {kind} data, which takes {NETWORKS[kind]!r}"
        yield "model_architecture", Problem(fact, "Leave it out")
    allowed = SETTINGS.get(kind, ())
    listed = f"Allowed are {', '.join(allowed)}"
    for name in config.settings if allowed else ():
        if name not in allowed:
            near = nearest(name, allowed)
            hint = f"Did you mean {near}?" if near else listed
            listed = listed if near else ""  # once
            yield f"settings.{name}", Problem(f"settings: {name!r} cannot be set by a job", hint)


def _wrong_sets(
    config: JobConfig, kind: str, datasets: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Problem]]:
    specs: list[Mapping[str, Any]] = [one["spec"] for one in datasets]
    if kind != "radio" and len(datasets) > 1:
        fact = f"{len(datasets)} data sets of kind {kind} are named"
        yield "dataset_ids", Problem(fact, "Expected one, of one folder")
    if kind == "radio" and len({(spec["url"], spec["table"]) for spec in specs}) > 1:
        fact = "the data sets are in several databases"
        yield "dataset_ids", Problem(fact, "Expected one: register them from there")
    if kind == "hdf5" and not config.validation_split:
        fact = "validation_split=0: the operator needs a validation error"
        yield "validation_split", Problem(fact, "Give one above 0")
    usual = type(config).model_fields["validation_split"].default
    if specs[0].get("named_splits") and config.validation_split != usual:
        fact = f"validation_split={config.validation_split}: the data names its validation part"
        yield "validation_split", Problem(fact, "Leave it out")
