"""`training.transforms`: what is done to training batches; each is one of `stoker.transforms`, by kind."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Axis: TypeAlias = Annotated[int, Field(lt=0, strict=True)]
Axes: TypeAlias = Annotated[tuple[Axis, ...], Field(min_length=1)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Numbers: TypeAlias = Number | Annotated[tuple[Number, ...], Field(min_length=1)]


class _Step(BaseModel):
    """What all kinds share: no unknown names, and the fields that are changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: tuple[str, ...] | None = None


class FlipStep(_Step):
    """As `stoker.transforms.Flip`."""

    kind: Literal["flip"]
    axis: Axis = -2
    p: Annotated[float, Field(ge=0, le=1)] = 0.5
    negate: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()


class RollStep(_Step):
    """As `stoker.transforms.Roll`."""

    kind: Literal["roll"]
    axes: Axes = (-2,)


class CropStep(_Step):
    """As `stoker.transforms.Crop`."""

    kind: Literal["crop"]
    size: Annotated[int, Field(ge=1, strict=True)] | tuple[Annotated[int, Field(ge=1, strict=True)], ...]
    axes: Axes = (-3, -2)
    padding: Annotated[int, Field(ge=0, strict=True)] = 0
    border: Literal["zeros", "wrap", "reflect"] = "zeros"


class NoiseStep(_Step):
    """As `stoker.transforms.Noise`."""

    kind: Literal["noise"]
    std: Numbers


class NormalizeStep(_Step):
    """As `stoker.transforms.Normalize`; without `mean` and `std` by the statistics of the training cache."""

    kind: Literal["normalize"]
    mean: Numbers | None = None
    std: Numbers | None = None
    axis: Axis = -1


Step: TypeAlias = Annotated[
    FlipStep | RollStep | CropStep | NoiseStep | NormalizeStep, Field(discriminator="kind")
]
Steps: TypeAlias = tuple[Step, ...]
