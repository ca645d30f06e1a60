"""Damaged and forged indexes, shard headers, recipes and quarantine files: refused or read, never a crash.

`python -m tests.chaos.fuzz --count 100000` prints its figures as JSON. Half of the inputs are damaged bytes;
the others are well-formed, with their digests made right again, so that what is behind those is met too.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import hashlib
import json
import logging
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from stoker.errors import StokerError
from stoker.schema import canonical_json
from stoker.store import Cache, Shard, load_recipe, open_cache
from stoker.store.failures import read_failures
from stoker.store.index import load_index
from stoker.store.storage import open_storage
from stoker.units import MIB
from tests.chaos import program
from tests.chaos.scenarios import FAILED, MIXED, SMALL, nothing, quarantine
from tests.store.fakes import FakeSource

MEMORY_BYTES = 200 * MIB
SLOW_S = 1.0
HANG_S = 60.0
NASTY: list[Any] = [
    -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, True, False, None, "", "0", "é", "\0",
    "a" * 100_000, "../../etc/passwd", "/etc/passwd", ".", [], {}, [[]], [{}], [0] * 50_000, {"a": {}},
    "AAAA", [1, 2],
]  # fmt: skip


class MemoryFile:
    """Bytes as an `OpenFile`."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, out: memoryview) -> None:
        piece = self.data[offset : offset + len(out)]
        if len(piece) != len(out):
            raise AssertionError(
                f"a read of {len(out)} bytes at {offset} of {len(self.data)} was not checked"
            )
        out[:] = piece

    origin: str | None = None
    generation: tuple[int, int] | None = None

    def prefetch(self, offset: int, size: int) -> None:
        pass

    def refetch(self, offset: int, size: int) -> bool:
        return False

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with bits flipped, pieces cut out, doubled, moved or made up."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        at = chance.randrange(len(out) + 1)
        size = min(chance.choice((1, 1, 2, 8, 64, 4096)), len(out) - at)
        what = chance.randrange(7)
        if what == 0 and size:
            out[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            del out[at : at + size]
        elif what == 2:
            out[at:at] = out[at : at + size]
        elif what == 3:
            out[at : at + size] = chance.randbytes(size)
        elif what == 4:
            del out[at:]
        elif what == 5:
            out[at:at] = chance.choice(
                (b"{", b"[", b"]", b'"', b",", b"NaN", b"1e999", b"[" * 10_000, b"\0", b"\xff")
            )
        else:
            out[at : at + size] = bytes(size)
        if not out:
            break
    return bytes(out)


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with one or a few entries, at any depth, replaced, removed, added or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        here = value
        while isinstance(here, dict | list) and here:
            keys = [*here] if isinstance(here, dict) else [*range(len(here))]
            key = chance.choice(keys)
            if isinstance(here[key], dict | list) and here[key] and chance.random() < 0.8:
                here = here[key]
                continue
            what = chance.randrange(5)
            if what == 0:
                del here[key]
            elif what == 1 and isinstance(here, dict):
                here[chance.choice(("", "__x__", "format", "count", "z" * 200))] = copy.deepcopy(
                    chance.choice(NASTY)
                )
            elif what == 1:
                here.append(copy.deepcopy(here[key]))
            elif what == 2 and isinstance(here[key], int):
                here[key] += chance.choice((-1, 1, 2**40))
            else:
                here[key] = copy.deepcopy(chance.choice(NASTY))
            break
    return value


class Index:
    """Indexes, loaded and read through."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._good = (cache.path / "index.json").read_bytes()
        for path in cache.path.iterdir():
            if path.name.startswith(("shard-", "recipe", "failures")):
                shutil.copy(path, folder)

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return damaged(self._good, chance)
        entries = json.loads(self._good)
        del entries["digest"]
        entries = changed(entries, chance)
        if not isinstance(entries, dict):
            return canonical_json(entries).encode()
        digest = hashlib.sha256(canonical_json(entries).encode()).hexdigest()
        return canonical_json({**entries, "digest": digest}).encode()

    def read(self, data: bytes) -> None:
        (self._folder / "index.json").write_bytes(data)
        index = load_index(self._folder, self._cache.recipe)
        cache = Cache(self._folder, self._cache.recipe, index)
        for number in cache.indices[:20].tolist():
            try:
                cache[number]
            except StokerError:
                continue


class Header:
    """Shards, opened and read through."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self._schema = cache.schema
        self._path = cache.path / cache.index.shards[0].file
        self._good = self._path.read_bytes()
        size = 8 + int.from_bytes(self._good[:8], "little")
        self._entries = json.loads(self._good[8:size])
        self._body = self._good[size:]

    def make(self, chance: random.Random) -> bytes:
        what = chance.random()
        if what < 0.4:
            return damaged(self._good, chance)
        entries, body = self._entries, self._body
        if what < 0.9:
            entries = changed(entries, chance)
        else:
            body = damaged(body, chance)
        return self._sealed(entries, body)

    def _sealed(self, entries: Any, body: bytes) -> bytes:
        """With its digests made right, as far as there is a place for them."""
        metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
        if isinstance(metadata, dict):
            begin = _begin_of(entries.get("__number__"))
            metadata = {**metadata, "self": "0" * 32}
            if begin is not None:
                metadata["meta"] = xxhash.xxh3_128_hexdigest(body[begin:])
            entries = {**entries, "__metadata__": metadata}
        text = canonical_json(entries).encode()
        size = -(-(8 + len(text)) // 4096) * 4096
        blank = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
        digest = xxhash.xxh3_128_hexdigest(blank)
        return blank.replace(b'"self":"' + b"0" * 32, f'"self":"{digest}'.encode(), 1) + body

    def read(self, data: bytes) -> None:
        shard = Shard(MemoryFile(data), self._path, self._schema)
        for entry in ("statistics", "error", "environment"):
            shard.described(entry)
        shard.check_padding()
        for field in shard.columns:
            shard.damage(field)


def _begin_of(entry: Any) -> int | None:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    begin = offsets[0] if isinstance(offsets, list) and offsets else None
    return begin if isinstance(begin, int) and begin >= 0 else None


class Recipe:
    """Recipes, loaded; those that are accepted, opened as a cache."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self._folder = folder
        self._good = (cache.path / "recipe.json").read_bytes()

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return damaged(self._good, chance)
        return canonical_json(changed(json.loads(self._good), chance)).encode()

    def read(self, data: bytes) -> None:
        folder = self._folder / hashlib.sha256(data).hexdigest()[:16]
        folder.mkdir()
        try:
            (folder / "recipe.json").write_bytes(data)
            load_recipe(folder)
            open_cache(folder, require_complete=False)
        finally:
            shutil.rmtree(folder)


class Failures:
    """Quarantine files: what is damaged in them is passed over, so every one is read."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self._folder, self._recipe = folder, cache.recipe
        self._good = b"".join(path.read_bytes() for path in cache.path.glob("failures-*"))

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return damaged(self._good, chance)
        lines = []
        for line in self._good.splitlines():
            entry = json.loads(line)
            del entry["check"]
            entry = changed(entry, chance)
            check = xxhash.xxh3_64_hexdigest(canonical_json(entry).encode())
            lines.append(canonical_json({**entry, "check": check}).encode())
        return b"\n".join(lines) + b"\n"

    def read(self, data: bytes) -> None:
        (self._folder / "failures-00112233aabb.jsonl").write_bytes(data)
        for failure in read_failures(open_storage(self._folder), self._recipe).values():
            assert 0 <= failure.number < self._recipe.count


KINDS: dict[str, Callable[[Cache, Path], Any]] = {
    "index": Index,
    "header": Header,
    "recipe": Recipe,
    "failures": Failures,
}


def fuzz(kind: str, caches: list[Cache], base: Path, count: int, seed: int) -> dict[str, Any]:
    """Make and read `count` inputs."""
    targets = []
    for i, cache in enumerate(caches):
        folder = base / f"{kind}-{i}" / cache.fingerprint
        folder.mkdir(parents=True)
        targets.append(KINDS[kind](cache, folder))
    chance, wrong = random.Random(seed), list[str]()
    accepted, slowest_s = 0, 0.0
    for i in range(count):
        if i % 100 == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        target = targets[i % len(targets)]
        data = target.make(chance)
        begun = time.process_time()
        try:
            target.read(data)
            accepted += 1
        except StokerError:
            pass
        except Exception as error:
            wrong.append(f"{kind} {i}: {type(error).__name__}: {str(error)[:150]} from {data[:300]!r}")
        took_s = time.process_time() - begun
        slowest_s = max(slowest_s, took_s)
        if took_s > SLOW_S:
            wrong.append(f"{kind} {i}: took {took_s:.1f} s")
    faulthandler.cancel_dump_traceback_later()
    return {"count": count, "accepted": accepted, "slowest_s": round(slowest_s, 3), "wrong": wrong}


def good_caches(base: Path) -> list[Cache]:
    """Caches that inputs are made from: fixed, ragged and packed fields, with quarantined samples."""
    caches: list[Cache] = []
    for i, (source, dtype) in enumerate(((SMALL, None), (MIXED, None), (SMALL, "int8"))):
        assert isinstance(source, FakeSource)
        quarantine(source, FAILED, base / str(i), nothing, dtype=dtype)
        caches.append(open_cache(base / str(i) / "caches" / "x"))
    return caches


def run(argv: Sequence[str]) -> program.Figures:
    """Make and read as many inputs of each kind as the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="inputs of each kind")
    parser.add_argument("--kind", action="append", choices=[*KINDS])
    parser.add_argument("--seed", type=int, default=0)
    arguments, begun = parser.parse_args(argv), time.monotonic()
    logging.getLogger("stoker").setLevel(logging.CRITICAL)
    kinds = arguments.kind or KINDS
    with program.workplace() as base:
        caches = good_caches(base)
        for kind in kinds:  # what is imported and kept for good is not counted
            fuzz(kind, caches, base / "warm", 50, arguments.seed)
        with limited_memory() as grown_mib:
            found = {
                kind: fuzz(kind, caches, base / "run", arguments.count, arguments.seed) for kind in kinds
            }
            grown = grown_mib()
    wrong = [text for figures in found.values() for text in figures.pop("wrong")]
    return program.figures({**found, "grown_mib": grown}, wrong, begun)


@contextmanager
def limited_memory() -> Generator[Callable[[], float]]:
    """Refuse this process more than `MEMORY_BYTES` on top; yields what tells how many MiB it took at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        yield lambda: round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(program.main(run))
