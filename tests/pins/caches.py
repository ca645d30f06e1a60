"""Caches that the pins serve, each made once in a process."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.pins.fingerprints import SOURCES
from tests.pins.items import Narrow, Numbers, Pictures, Trajectories
from tests.pins.names import ModuleEncoder, TorchSource, open_cache, precompute
from tests.pins.objects import Pooled

DATA = Path(__file__).parent / "data"
OLD = Path(__file__).parents[1] / "data"
TIMED = ("latent", "flow", "time")


def trajectories(count: int = 14, **more: Any) -> Any:
    """Return a source of trajectories."""
    return TorchSource(Trajectories(count, **more), version=f"trajectories {count} {more}", time=TIMED)


def exact(output: str = "latent") -> Any:
    """Return an encoder of sums of two numbers, the same on every processor."""
    return ModuleEncoder(Pooled(), field="latent", output=output, time="steps", version="1", encode_batch=4)


MAKERS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "trajectories": lambda: (trajectories(), None, {}),
    "others": lambda: (trajectories(6), None, {}),
    "narrow": lambda: (TorchSource(Narrow(), version="narrow", time=("latent",)), None, {}),
    "float16": lambda: (trajectories(), None, {"dtype": {"latent": "float16", "flow": "bfloat16"}}),
    "int8": lambda: (trajectories(dim=64), None, {"dtype": {"latent": "int8"}}),
    "float8": lambda: (trajectories(dim=64), None, {"dtype": {"latent": "float8_e4m3fn"}}),
    "zstd": lambda: (trajectories(dim=64), None, {"compression": "zstd"}),
    "lz4": lambda: (trajectories(dim=64), None, {"compression": "lz4"}),
    "encoded": lambda: (trajectories(), exact(), {"dtype": {"latent": "float16"}}),
    "kept": lambda: (trajectories(), exact("code"), {"keep": "latent"}),
    "pictures": lambda: (TorchSource(Pictures(), version="pictures"), None, {}),
    "files": lambda: (SOURCES["images/encoded"](), None, {}),
    "simulations": lambda: (SOURCES["hdf5/pdebench 1d, two files"](), None, {}),
    "ragged": lambda: (SOURCES["arrays/groups"](), None, {}),
    "particles": lambda: (SOURCES["meshes/particles"](), None, {}),
    "mesh": lambda: (SOURCES["meshes/mesh"](), None, {}),
    "rows": lambda: (SOURCES["sql/rules"](), None, {}),
    **{
        f"numbers {count}": lambda count=count: (
            TorchSource(Numbers(count), version=f"numbers {count}"),
            None,
            {},
        )
        for count in (1, 13, 64, 1000)
    },
}
CHECKED_IN = {
    "version 1": "store_v1/golden",
    "version 1, ragged": "store_v1/golden_ragged",
    "version 2": "store_v2/golden",
    "version 2, ragged": "store_v2/golden_ragged",
    "version 2, float8": "store_v2/golden_float8",
    "version 3": "store_v3/golden",
    "version 3, ragged": "store_v3/golden_ragged",
}
"""Caches of earlier formats, with two shards each."""


@once
def root() -> Path:
    """Return a folder that goes away with this process."""
    folder = TemporaryDirectory(prefix="stoker-pins-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@once
def get(name: str) -> Any:
    """Return a cache by name: made now, or of an earlier format."""
    if (
        name in CHECKED_IN
    ):  # a copy: code that is being changed may take files for damaged, and write them again
        return open_cache(shutil.copytree(OLD / CHECKED_IN[name], root() / name.replace(" ", "_") / "cache"))
    source, encoder, settings = MAKERS[name]()
    plain = name.replace(" ", "_")
    return precompute(source, encoder, root(), name=plain, workers=0, progress=None, **settings)
