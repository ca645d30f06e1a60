"""What a training job may be asked for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrainingConfig(BaseModel):
    """The settings of one training job."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    dataset_ids: list[str] = Field(min_length=1, max_length=100)
    batch_size: int = Field(default=128, ge=1, le=1024)
    epochs: int = Field(default=100, ge=1, le=5000)
    learning_rate: float = Field(default=1e-3, gt=0)
    preload_to_gpu: bool = True
    accelerator: str = "auto"
