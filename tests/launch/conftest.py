"""A machine, and a model of a script for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.extras.launch.script import StartScript
from tests.launch.box import Box, a_box, a_repository
from tests.launch.vast import Vast, serving


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "box") as one:
        yield one
        one.clear()


def model(box: Box, **more: Any) -> StartScript:
    """A script with every step, for a repository beside the machine."""
    repo = box.root / "repo"
    commit = more.pop("commit", None) or a_repository(repo, {"c.yaml": "training: {epochs: 1}\n"})
    settings: dict[str, Any] = {
        "target": "vast", "name": "run", "repo": str(repo), "commit": commit, "config": "c.yaml",
        "overrides": ("training.epochs=1",), "workdir": str(box.workdir), "fetch": True,
        "cache_dir": "data/cache", "run_dir": "runs/a", "upload": f"far:{box.root}/up",
        "cache": f"far:{box.root}/cache", "secrets": ("PLANTED", "RCLONE_CONFIG_FAR_TYPE"),
        "api": box.url, "stall_minutes": 5.0, "grace": 20,
    }  # fmt: skip
    return StartScript(**(settings | more))


@pytest.fixture
def vast() -> Iterator[Vast]:
    """The provider, on loopback."""
    with serving() as world:
        yield world
