"""Transforms that only move values of images, done by the gather itself: a crop, a mirror, or both.

A batch that is cropped after it was gathered goes through memory twice more. Where a kernel gathers, the rows
it reads are cut on the way; the values are the same, since cutting and normalising do not touch each other.
Only what stands at the head of `transforms=` can be done before the batch is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stoker.loader.fused import Fused
from stoker.loader.kernels.twin import Views
from stoker.loader.keyed import child_keys, example_keys
from stoker.loader.outputs import RECORD, Output
from stoker.loader.transform import Transform

EXACT = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
"""Dtypes whose values pass through float32, as kernels take them, unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one transform does to the last two axes of one field."""

    field: str
    draw: Callable[[Tensor], Tensor]
    """From keys to where crops begin, `(n, 2)` int64, or to which examples are mirrored, `(n,)` bool."""
    crop: tuple[int, int] | None = None
    """Rows and columns kept; None: it mirrors."""


@runtime_checkable
class Cutting(Protocol):
    """A transform that may be a cut."""

    def as_cut(self, shapes: Mapping[str, tuple[int, ...]]) -> Cut | None:
        """This transform as a cut of records whose examples have these shapes; None: it is more than that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The cuts at the head of a loader's transforms."""

    cuts: tuple[Cut, ...] = ()
    """A crop, a mirror, or a crop and then a mirror of the same field."""
    seed: int = 0

    @property
    def count(self) -> int:
        """Transforms that need not be applied any more."""
        return len(self.cuts)

    def outputs(self, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
        """What is gathered, with the cuts."""
        return tuple(self._output(output) for output in outputs)

    def views(self, epoch: int, examples: Any, device: torch.device) -> dict[str, Views]:
        """By output, where crops begin and which of these examples are mirrored."""
        if not self.cuts:
            return {}
        keys = example_keys(self.seed, epoch, torch.as_tensor(examples, device=device))
        begins: Tensor | None = None
        flips: Tensor | None = None
        for place, one in enumerate(self.cuts):
            drawn = one.draw(child_keys(keys, place))
            begins, flips = (begins, drawn) if one.crop is None else (drawn, flips)
        return {self.cuts[0].field: (begins, flips)}

    def _output(self, output: Output) -> Output:
        if not self.cuts or output.name != self.cuts[0].field:
            return output
        fused = output.fused or Fused(dtype=output.dtype)
        crop = next((one.crop for one in self.cuts if one.crop is not None), None)
        return replace(output, fused=replace(fused, crop=crop, flip=any(c.crop is None for c in self.cuts)))


NOTHING = Lowered()
"""All transforms come after the gather."""


def lowered(
    transforms: Sequence[Transform], outputs: tuple[Output, ...], seed: int, *, windowed: bool
) -> Lowered:
    """As many of the first transforms as a gather can do with the bytes that they would give."""
    cuts: list[Cut] = []
    shapes = {output.name: output.shape for output in outputs if not output.ragged}
    for transform in () if windowed else transforms[:2]:
        found = transform.as_cut(shapes) if isinstance(transform, Cutting) else None
        if found is None or not _follows(found, cuts) or not _gathered(found.field, outputs):
            break
        cuts.append(found)
    return Lowered(cuts=tuple(cuts), seed=seed)


def _follows(found: Cut, cuts: Sequence[Cut]) -> bool:
    """Whether a cut may come after these: kernels crop first, and then mirror, what is of one field."""
    return not cuts or (cuts[0].field == found.field and cuts[0].crop is not None and found.crop is None)


def _gathered(name: str, outputs: Sequence[Output]) -> bool:
    """Whether a field is gathered as whole images, normalised by numbers that hold for a plane of them."""
    (output,) = [output for output in outputs if output.name == name]
    if output.index != RECORD or output.parts or output.dtype not in EXACT:
        return False
    fused = output.fused
    return fused is None or len(fused.scale) < 2 or fused.inner % math.prod(output.shape[-2:]) == 0
