"""`training.transforms`: what is done to training batches; each is one of `stoker.transforms`, by kind."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

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

KINDS: Mapping[str, type[_Step]] = {
    "flip": FlipStep, "roll": RollStep, "crop": CropStep, "noise": NoiseStep, "normalize": NormalizeStep,
}  # fmt: skip


def explain_step(problem: Mapping[str, Any]) -> str | None:
    """What is wrong with one transform, from an error of pydantic; None where it is the list that is wrong.

    >>> place = ("training", "transforms", 0)
    >>> explain_step({"type": "union_tag_invalid", "loc": place, "ctx": {"tag": "flop"}})
    "entry 0 is of kind 'flop', not one of flip, roll, crop, noise, normalize (did you mean flip?)"
    """
    _, _, *place = problem["loc"]
    if not place:
        return None
    entry = f"entry {place[0]}"
    if problem["type"] == "union_tag_invalid":
        kind = problem["ctx"]["tag"]
        return f"{entry} is of kind {kind!r}, not one of {', '.join(KINDS)}{_meant(kind, KINDS)}"
    if len(place) < 2:
        return f"{entry} has no kind. Expected a mapping with kind: one of {', '.join(KINDS)}"
    kind, *setting = (str(part) for part in place[1:])
    if problem["type"] == "extra_forbidden":
        known = [name for name in KINDS[kind].model_fields if name != "kind"]
        return f"{entry}: {setting[-1]} is not a setting of {kind}{_meant(setting[-1], known)}"
    return f"{entry}: {kind}.{'.'.join(setting)}: {problem['msg']}"


def _meant(name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else f" (there are: {', '.join(known)})"
