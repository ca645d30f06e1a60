"""`job.json`: what a job's process is told, written anew for each attempt."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stoker.runtime.files import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a job's process is told. It finds everything else beside the file."""

    id: str
    name: str
    kind: str
    """`training` or `generation`."""
    attempt: int
    """1 the first time."""
    epochs: int
    """Epochs wanted in all; may be more than the configuration says, once a job was extended."""
    epoch: int
    """Epochs that were reported as finished; one that was not may still have its checkpoint."""
    checkpoint: str | None
    """The newest checkpoint that was reported: there has to be a valid one then. None: maybe none yet."""
    config: dict[str, Json]
    datasets: list[dict[str, Json]]
    """The registered data sets of `dataset_ids`, described so that they can be opened."""
    dataset_ids: list[str]
    caches: str
    """Folder of the caches of all jobs."""
    data: str
    """Folder of the data sets that the service makes."""
    limits: dict[str, Json]
    """`memory_bytes`, `wall_s`, `grace_s`: to plan with; who passes them is ended from outside."""
    resume: bool = True

    def write(self, path: Path) -> None:
        """Put it there in one step.

        Raises:
            ResourceError: The disk is full.
        """
        with replacing(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))
