"""Caches at an address, and batches of them compared with those of the same cache on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stoker.loader import Loader
from stoker.store import Cache, open_cache
from stoker.store.mirror import MirrorFolder
from stoker.store.storage import attach_mirror, open_storage
from tests.loader.caches import write_cache
from tests.loader.layouts import same
from tests.store.s3_server import S3Server

RECORD = (64, 400)
"""100 KiB in float32."""


def stored(folder: Path, records: int, *, record: tuple[int, ...] = RECORD, shards: int = 4) -> Cache:
    """A cache of records of 100 KiB."""
    fields = {"latent": torch.randn((records, *record), generator=torch.Generator().manual_seed(3))}
    return write_cache(folder, fields, shards=(records // shards,) * (shards - 1))


def put(cache: Cache, server: S3Server, folder: str = "caches") -> str:
    """Put a cache's files with a client of its own; its address."""
    below = f"{folder}/{cache.path.parent.name}/{cache.path.name}"
    for path in cache.path.iterdir():
        if path.is_file() and not path.name.startswith("."):
            server.put(f"{below}/{path.name}", path.read_bytes())
    return f"s3://{server.bucket}/{below}"


def size_of(cache: Cache) -> int:
    """Bytes of all its shards."""
    return sum(entry.bytes for entry in cache.index.shards)


def opened(url: str, mirrors: Path, limit_bytes: int | None = None) -> tuple[Cache, MirrorFolder]:
    """A cache at an address, and the mirror that it is served through."""
    cache = open_cache(attach_mirror(url, mirrors, limit_bytes, must_exist=True))
    mirror = open_storage(cache.path).mirror
    assert mirror is not None
    return cache, mirror


def compared(remote: Loader, local: Loader, epochs: int) -> int:
    """Batches of both, bit by bit; how many there were."""
    count = 0
    for _ in range(epochs):
        for a, b in zip(remote, local, strict=True):
            assert same(a, b), f"batch {count}"
            count += 1
    return count


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """In the environment for a while, and nothing else that begins alike."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def settings(**more: Any) -> dict[str, Any]:
    """Of both loaders that are compared."""
    return {"batch_size": 4, "seed": 5, "tier": "disk", **more}
