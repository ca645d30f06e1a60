"""A slice that is out as a task: what is known of it, and what it means if it does not come back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stoker.errors import ConfigError, StokerError
from stoker.scale.ray_cluster import ray
from stoker.scale.ray_view import View
from stoker.scale.slices import Slice

LOST = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.TaskCancelledError,
)
"""A worker or a node is gone, with what it was doing; another one can do it."""


@dataclass(slots=True, kw_only=True)
class Out:
    """A slice that is out."""

    slice: Slice
    heard: float | None = None
    """When it was last heard of; None: it waits for a place."""
    word: int = -1
    view: View = field(default_factory=View)
    halted: bool = False
    """It was told to end, for others have nothing left to do."""
    _placed: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """What the board knows it by."""
        return self.slice.key, self.slice.losses

    @property
    def left_s(self) -> float:
        """Work that it has left, by its own pace; 0 where that is not known."""
        if self.heard is None or not self.view.encoded:
            return 0.0
        left = len(self.slice.numbers) - self.view.encoded
        return left / self.view.encoded * (self.heard - self._placed)

    def hear(self, word: int, view: View) -> None:
        """Take in its latest word, the number of which says that it is a new one."""
        self.heard = time.monotonic()
        self._placed = self._placed or self.heard
        self.word, self.view = word, view


def why(error: Exception) -> str:
    """What Ray says of a loss, in short."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def failed(task: Out, error: Exception) -> StokerError:
    """The error for a task that Ray could not run, or that raised what none of ours does."""
    text = " ".join(str(error).split())
    if "No module named 'stoker" in text:
        return ConfigError(
            f"a node of the Ray cluster cannot import this version of stoker: {text[-300:]}. Install the "
            "driver's version of it on every node"
        )
    return StokerError(
        f"the task for samples {task.slice.span} failed: {type(error).__name__}: {text[-600:]}"
    )
