"""What a training job is asked for: the fields of the earlier service, each honoured or refused.

A field that can have no effect is refused unless it is left at its default, and the message says why; a wrong
one is never taken and then ignored. `runs/settings.py` says which field means what to which kind of data.
docs/service-jobs.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
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

WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "parent_model_id": "there is no registry of models; `continue` gives a finished job more epochs",
        "pretrained": "the networks here begin from a seed; there are no weights to fetch",
        "freeze_backbone": "no network here has a backbone apart from its head",
        "n_mels": "nothing here makes spectrograms; features come ready-made with the rows",
        "n_fft": "nothing here makes spectrograms; features come ready-made with the rows",
        "hop_length": "nothing here makes spectrograms; features come ready-made with the rows",
        "devices": "a job has one GPU; several jobs run side by side",
        "only_approved": "rows carry no mark of approval; register the sets that are wanted",
    }
)
"""Fields of the earlier service that nothing here could honour, and why."""

Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class TrainingConfig(BaseModel):
    """What to train on what, and how."""

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
    """Rows, images or windows in a step."""
    num_workers: Annotated[int, Field(ge=0, le=32, strict=True)] = 0
    """Processes that read the data while it is encoded; 0: as many as pay. Batches need none."""
    validation_split: Annotated[float, Field(ge=0, le=0.5, strict=True)] = 0.2
    """Part of the data to validate on, by a hash of its keys; 0, for rows and images: none."""
    preload_to_gpu: StrictBool = True
    """Serve batches from the device if they fit, else from the best that does; false: from host memory."""
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
    """Of AdamW, on matrices."""
    dropout_rate: Annotated[float, Field(ge=0, le=0.9, strict=True)] = 0.2
    """In the network of rows and of images."""
    lr_scheduler: Literal["cosine", "constant"] = "cosine"
    """What the rate does after it has risen: fall to a hundredth, or stay."""
    warmup_epochs: Count = 5
    """Epochs over which the rate rises; at most half of all."""
    early_stop_patience: Annotated[int, Field(ge=0, le=100, strict=True)] = 20
    """Epochs without a better validation loss before training ends; 0: never."""
    early_stop_delta: NotNegative = 1e-3
    """How much lower a validation loss has to be to count as better."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    accelerator: Literal["auto", "gpu", "cpu"] = "auto"
    """Where to compute; `gpu` fails where there is none, `auto` takes one where there is."""
    devices: StrictInt = 1
    """Refused unless 1."""
    min_snr_db: Annotated[float, Field(allow_inf_nan=False, strict=True)] | None = None
    """Radio rows: only those with at least this mean signal to noise; null: all. What is dropped is told."""
    max_gdop: Positive | None = None
    """Radio rows: only those with at most this dilution of precision; null: all."""
    only_approved: StrictBool = True
    """Refused unless true."""
    max_receivers: Annotated[int, Field(ge=1, le=64, strict=True)] = 7
    """Radio rows: room for receivers in a row; a row with more is set aside and listed."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Decides the order of examples, the split and the first weights."""
    settings: dict[str, JsonValue] = {}
    """Simulations and images: further settings of docs/config.md by name, as `{"model.width": 64}`."""

    @model_validator(mode="before")
    @classmethod
    def _one_dataset(cls, given: Any) -> Any:
        """An early form named one data set, as `dataset_id`."""
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
            raise ValueError(
                f"{name}={value!r} can have no effect here: {WITHOUT_EFFECT[name]}. Leave it out, or give "
                f"its default {default!r}"
            )
        return value

    @field_validator("dataset_ids")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a data set is named twice. Name each once")
        return value

    @model_validator(mode="after")
    def _judged_by_something(self) -> TrainingConfig:
        if self.validation_split == 0 and self.early_stop_patience:
            raise ValueError(
                f"validation_split is 0, so early_stop_patience={self.early_stop_patience} has nothing to "
                "judge by. Give early_stop_patience=0, or a validation_split above 0"
            )
        return self

    @property
    def warmup(self) -> float:
        """Part of all steps over which the rate rises."""
        return min(self.warmup_epochs / self.epochs, 0.5)
