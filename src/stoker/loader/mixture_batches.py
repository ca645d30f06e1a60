"""Make batches of a mixture: those of its loaders, with the conditions of all caches under the same names.

Every batch has the same names, widths and dtypes. A name that a cache lacks is given as zeros with a mask
that says so; a condition that is narrower there is filled up with zeros. Names come sorted, so the order of
the caches decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.errors import ConfigError, arg
from stoker.loader.batch import RecordBatch, Role, TaskBatch, WindowBatch
from stoker.loader.chunks import RECORD
from stoker.loader.design import Design
from stoker.loader.outputs import OutputSpec
from stoker.store.cache import JointCache, served_schema

OURS = ("task", "tasks", "mask")
"""What a mixture adds to a batch of whole records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition as batches of a mixture have it."""

    name: str
    shape: tuple[int, ...]
    """Shape of one example: that of every cache that has it, or the widest one's `(C,)`."""
    dtype: torch.dtype
    """The narrowest that holds the values of all caches."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """Its shape in each cache; None where a cache lacks it."""
    same_dtype: bool
    """True if all caches that have it have it in this dtype."""

    def fit(self, member: int, values: Mapping[str, Tensor], index: Tensor) -> Tensor:
        """Return the values of a cache in the shape and dtype of all; zeros where it has none."""
        shape = self.shapes[member]
        if shape == self.shape and self.same_dtype:
            return values[self.name]
        if shape is None:
            return torch.zeros((len(index), *self.shape), dtype=self.dtype, device=index.device)
        value = values[self.name].to(self.dtype)
        if shape == self.shape:
            return value
        value = value.reshape(len(index), -1)
        return F.pad(value, (0, self.shape[0] - value.shape[1]))

    def mask(self, member: int, index: Tensor) -> Tensor:
        """Return which numbers a cache has, as `(B, *shape)` bool without memory for each example."""
        shape, row = self.shapes[member], torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        if shape == self.shape:
            row.fill_(True)
        elif shape is not None:
            row[: _width(shape)] = True
        return row.to(index.device).expand(len(index), *self.shape)


class MixtureBatches:
    """Makes the batches of a mixture out of those of its loaders."""

    def __init__(self, designs: Mapping[str, Design], names: Sequence[str], joint: JointCache | None) -> None:
        """Find the conditions of the caches.

        With windows these are all fields but the one they are cut from. Of whole records they are the fields
        without time that hold one number or a row of numbers: only these fit next to those of another cache.

        Args:
            designs: Of each cache, by its name.
            names: Of the caches, in the order in which `task` refers to them.
            joint: The caches as one, where batches hold examples of several.

        Raises:
            ConfigError: Windows have several state fields, or a field of whole records has a name that
                batches of a mixture give to something else.
        """
        self._names, self._joint = tuple(names), joint
        for name, design in designs.items():
            _check_names(name, design)
        found = [_outputs_of(design) for design in designs.values()]
        self._conditions = [_condition(n, found) for n in sorted({n for outputs in found for n in outputs})]
        # Under these names batches of windows give what is not a condition: kept raw fields, a mask.
        self._raw = [
            [output.name for output in design.outputs if output.role in (Role.RAW, Role.MASK)]
            for design in designs.values()
        ]
        self._kept: dict[tuple[int, int, torch.device], tuple[Tensor, dict[str, Tensor]]] = {}

    def make(self, batch: Any, member: int, position: tuple[int, int]) -> Any:
        """Return a loader's batch with the conditions of all caches, and the cache of each example.

        Masks and tasks are the same for every batch of a size and cache, so they are given without memory of
        their own: writing to one is an error.

        Args:
            batch: Of the loader of `member`.
            member: Place of the loader among those of the mixture.
            position: Where the mixture resumes after this batch.

        Raises:
            ConfigError: Transforms left out something that a mixture needs.
        """
        windowed = isinstance(batch, WindowBatch)
        values = batch.cond if windowed else batch
        task = self._names[member] if self._joint is None else None
        try:
            index: Tensor = batch.index if windowed else batch["index"]
            tasks, mask = self._tasks_and_masks(member, index)
            if self._joint is not None:
                tasks, index = _split_joint(self._joint, index)
            cond = {one.name: one.fit(member, values, index) for one in self._conditions}
            cond |= {name: values[name] for name in self._raw[member]}
        except KeyError as error:  # loaders give all of them; only transforms leave one out
            raise self._lacking(error.args[0], member, values) from error
        if windowed:
            states = (batch.z0, batch.z1, batch.future)
            return TaskBatch(*states, cond, index, position, task, tasks, mask.copy())
        made = RecordBatch(
            {**batch, **cond, "index": index, "task": task, "tasks": tasks, "mask": mask.copy()}
        )
        made.position = position
        return made

    def _tasks_and_masks(self, member: int, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        key = (member, len(index), index.device)
        if key not in self._kept:
            with torch.inference_mode(False):  # they outlive the caller's mode
                tasks = torch.tensor(member, device=index.device).expand(len(index))
                self._kept[key] = (tasks, {one.name: one.mask(member, index) for one in self._conditions})
        return self._kept[key]

    def _lacking(self, name: str, member: int, values: Mapping[str, Any]) -> ConfigError:
        whose = self._names[member] if self._joint is None else "+".join(self._names)
        return ConfigError(
            f"what {arg('transforms')} of {whose!r} returned lacks {name!r} and has "
            f"{', '.join(map(str, values))}. A mixture needs `index`, which says which cache each example is "
            "from, and every condition. Return them too, as in {**batch, ...} of a batch of records"
        )


def _split_joint(joint: JointCache, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of the cache of each example of a joint batch, and its `index` in that cache."""
    offsets = _offsets(index.device, joint.offsets)
    own = index.clone()
    numbers = own.view(len(own), -1)[:, 0]
    tasks = torch.bucketize(numbers.contiguous(), offsets, right=True).sub_(1)
    numbers.sub_(offsets[tasks])
    return tasks, own


@cache
def _offsets(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    """Return the numbers as int64 on a device."""
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def _check_names(name: str, design: Design) -> None:
    windows = design.options.windows
    if windows is not None and isinstance(windows.field, tuple):
        raise ConfigError(
            f"windows of {name!r} have several state fields, {', '.join(windows.field)}, which a mixture "
            "cannot line up with those of other caches. Name one field in Windows(field=...)"
        )
    taken = [own for own in OURS if windows is None and own in served_schema(design.cache)]
    if taken:
        raise ConfigError(
            f"records of {name!r} have a field {taken[0]!r}, a name that batches of a mixture give to "
            "something else. Give the field another name in its source"
        )


def _outputs_of(design: Design) -> dict[str, OutputSpec]:
    outputs = (*design.outputs, *_column_outputs(design))
    return {output.name: output for output in outputs if output.role in (Role.CONDITION, Role.SIZES)}


def _column_outputs(design: Design) -> list[OutputSpec]:
    """Return the columns of a table as batches have them: with windows as `(B, C)`."""
    joined = design.cache.joined
    found = {} if joined is None else joined.values
    return [
        OutputSpec(
            name=name,
            field=name,
            index=RECORD,
            shape=(int(np.prod(values.shape[1:])),) if design.options.windowed else tuple(values.shape[1:]),
            dtype=values.dtype,
            role=Role.CONDITION if design.options.windowed or values.ndim < 3 else Role.FIELD,
        )
        for name, values in found.items()
    ]


def _condition(name: str, found: Sequence[Mapping[str, OutputSpec]]) -> Condition:
    own = [outputs[name] for outputs in found if name in outputs]
    shapes, dtypes = {output.shape for output in own}, {output.cast or output.dtype for output in own}
    return Condition(
        name=name,
        shape=shapes.pop() if len(shapes) == 1 else (max(map(_width, shapes)),),
        dtype=reduce(torch.promote_types, dtypes),
        shapes=tuple(outputs[name].shape if name in outputs else None for outputs in found),
        same_dtype=len(dtypes) == 1,
    )


def _width(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
