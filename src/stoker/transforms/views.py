"""Several augmented views of every example in one batch, as contrastive training takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.keyed import child_keys
from stoker.loader.transform import run
from stoker.transforms.fields import TensorKey, tensors_of, with_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Applies transforms `count` times with other random numbers, and puts the results side by side.

    What they changed gets an axis of views after that of examples, `(B, count, *shape)`; the rest of the
    batch, labels and `index` among it, stays as it is. Transforms before it in the list are common to all
    views. The functions must not write into the batch they are given.
    """

    transforms: Sequence[Callable[[Any, Tensor], Any]]
    """What makes a view, applied in order."""
    count: int = 2
    """Views of each example."""

    def __post_init__(self) -> None:
        """Refuse less than one view."""
        if self.count < 1:
            raise ConfigError(f"Views(count={self.count}). Expected at least 1")

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        """The batch with `count` views of each example."""
        views = [run(self.transforms, batch, child_keys(keys, place)) for place in range(self.count)]
        before, each = tensors_of(batch), [tensors_of(view) for view in views]
        stacked: dict[TensorKey, Any] = {}
        for key, first in each[0].items():
            if first is not before.get(key):
                stacked[key] = torch.stack([view[key] for view in each], dim=1)
        return with_tensors(batch, stacked)
