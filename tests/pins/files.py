"""The files of a cache that is written now, without what names the moment and the machine of writing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.pins import caches

WRITTEN = ("trajectories", "float16", "int8", "float8", "encoded", "ragged", "particles", "rows", "pictures")
"""Caches whose bytes follow from their values alone; compressed ones follow from the library as well."""
KEPT = ("trajectories", "int8", "ragged", "zstd")
"""Caches that are checked in as they were written when the pins were made."""
OF_THE_WRITER = ("environment", "meta", "self", "writer")
"""Entries of a shard's metadata that name its writer, or are checksums over what does."""
TOKEN = re.compile(r"(?<=shard-)[0-9a-f]{12}")


def shard(path: Path) -> dict[str, Any]:
    """Return what a shard's header says, and a digest of the bytes behind it."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    return {
        "data": sha256(data[end:]).hexdigest(),
        "metadata": {name: "" if name in OF_THE_WRITER else value for name, value in metadata.items()},
        "tensors": {name: entry for name, entry in header.items() if not name.startswith("__pad__")},
        "data begins on a page": end % 4096 == 0,
    }


def written(name: str) -> dict[str, Any]:
    """Return the names of a cache's files, its recipe and its index, and what is in its shards."""
    folder = caches.get(name).path
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    index = json.loads(TOKEN.sub("TOKEN", (folder / "index.json").read_text()))
    index.pop("digest")
    for entry in index["shards"]:
        entry.pop("header")
    return {
        "files": [TOKEN.sub("TOKEN", path.name) for path in files],
        "recipe": sha256((folder / "recipe.json").read_bytes()).hexdigest(),
        "index": index,
        "shards": [shard(path) for path in files if path.name.startswith("shard-")],
    }


CASES: dict[str, Callable[[], Any]] = {name: lambda name=name: written(name) for name in WRITTEN}
