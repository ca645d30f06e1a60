"""The eight guarantees of docs/project/architecture.md, each by its name, through the public API alone."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import IncompleteError
from stoker.precompute import PrecomputeSettings, Timeouts, run_precompute
from stoker.schema import Field
from stoker.sources.protocol import Part, SourceIdentity
from tests.conftest import write_burgers
from tests.kit import forked as subprocess


def grid_encoder(**changes: Any) -> stoker.GridEncoder:
    settings: dict[str, Any] = {
        "channels": 1,
        "grid": (1, 32),
        "patch": (1, 4),
        "tokens": 8,
        "dim": 4,
        "seed": 0,
    }
    return stoker.GridEncoder(**{**settings, **changes})


def everything(batches: Any) -> list[torch.Tensor]:
    return [part for batch in batches for part in (batch.index, batch.z0, batch.z1, *batch.cond.values())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Faulty:
    """Numbers 0..19 as samples; some of them raise, are NaN, or hang, by name."""

    def __init__(self, faults: dict[int, str]) -> None:
        self.faults = faults

    def __len__(self) -> int:
        return 20

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        fault = self.faults.get(number)
        if fault == "raise":
            raise ValueError("the flux capacitor is empty")
        if fault == "hang":
            time.sleep(3600)
        value = np.nan if fault == "nan" else number
        return {"x": np.full((3,), value, dtype=np.float32)}

    def runs(self) -> list[range]:
        return [range(first, first + 5) for first in range(0, 20, 5)]

    def keys(self) -> list[str]:
        return [str(number) for number in range(20)]

    def identity(self) -> SourceIdentity:
        return SourceIdentity(kind="faulty/1", parts=(Part(name="all", count=20, digest="0" * 64),))

    def schema(self) -> dict[str, Field]:
        return {"x": Field(shape=(3,), dtype="float32")}


def test_same_bytes_everywhere(burgers: Path, tmp_path: Path) -> None:
    source = stoker.HDF5Source(burgers, preset="pdebench")
    caches = [
        stoker.precompute(
            source, grid_encoder(), tmp_path / str(workers), name="b", dtype="float16", workers=workers
        )
        for workers in (0, 2)
    ]
    windows = stoker.Windows(stride=2, horizon=2)

    def loader(cache: stoker.Cache, **changes: Any) -> stoker.Loader:
        return stoker.Loader(
            cache, windows=windows, seed=3, **{"shuffle": True, "batch_size": 8, "tier": "host", **changes}
        )

    expected = everything(loader(caches[0]))
    for cache in caches:
        for tier in ("auto", "host", "disk"):
            assert same(everything(loader(cache, tier=tier)), expected), tier
    stopped = loader(caches[0])
    begun = iter(stopped)
    head = [next(begun), next(begun)]
    resumed = loader(caches[1], tier="disk")
    resumed.load_state_dict(stopped.state_dict())
    assert same(everything(head) + everything(resumed), expected)
    ranks = [
        list(loader(caches[0], batch_size=4, rank=rank, world_size=2, drop_last=True)) for rank in (0, 1)
    ]
    for whole, *halves in zip(loader(caches[0], drop_last=True), *ranks, strict=True):
        assert torch.equal(torch.cat([half.z0 for half in halves]), whole.z0)


def test_a_cache_is_complete_and_verified_or_says_what_is_missing(burgers: Path, tmp_path: Path) -> None:
    source = stoker.HDF5Source(burgers, preset="pdebench")
    cache = stoker.precompute(source, grid_encoder(), tmp_path / "cache", name="b", workers=0)
    assert len(cache) == len(source)
    assert cache.verify().ok
    shard = next(cache.path.glob("shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    report = stoker.open_cache(cache.path).verify()

    assert not report.ok
    assert report.bad[0].shard == shard.name
    with pytest.raises(stoker.StokerError, match=shard.name):
        list(stoker.Loader(stoker.open_cache(cache.path), batch_size=4, tier="host", shuffle=True))
    shard.unlink()
    with pytest.raises(IncompleteError, match=rf"{shard.name}.*\b12 records"):
        stoker.open_cache(cache.path)


@pytest.mark.chaos
def test_every_wait_has_a_timeout(tmp_path: Path) -> None:
    settings = PrecomputeSettings(workers=2, timeouts=Timeouts(read=1.0), max_quarantined=0.5)
    begin = time.monotonic()

    report = run_precompute(Faulty({7: "hang"}), None, tmp_path, name="f", settings=settings)

    assert time.monotonic() - begin < 60
    (failure,) = report.cache.quarantined.values()
    assert (failure.number, failure.stage, failure.attempts) == (7, "read", 2)
    assert sorted(set(range(20)) - {7}) == report.cache.indices.tolist()


def test_nothing_is_dropped_silently(tmp_path: Path) -> None:
    settings = PrecomputeSettings(workers=1, max_quarantined=0.5)

    cache = run_precompute(Faulty({3: "raise", 11: "nan"}), None, tmp_path, name="f", settings=settings).cache

    assert len(cache) + len(cache.quarantined) == 20
    by_number = cache.quarantined
    assert "flux capacitor" in by_number[3].error
    assert by_number[3].stage == "read"
    assert "NaN" in by_number[11].error or "nan" in by_number[11].error
    with pytest.raises(KeyError, match="flux capacitor"):
        cache[3]
    served = torch.cat([batch["index"] for batch in stoker.Loader(cache, batch_size=4, shuffle=True)])
    assert sorted(served.tolist()) == sorted(set(range(20)) - {3, 11})


PSS_CHILD = """
import sys, stoker, torch
torch.set_num_threads(1)
def anonymous():
    rollup = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss_Anon:"))
before = anonymous()
loader = stoker.Loader(stoker.open_cache(sys.argv[1]), batch_size=64, shuffle=True, tier="host")
for batch in loader:
    pass
print(anonymous() - before, flush=True)
sys.stdin.read()
"""


def shared_and_private_bytes(pid: int, folder: Path) -> tuple[int, int]:
    """Proportional and resident bytes of a process's maps of files below `folder`."""
    pss = rss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and ":" not in head[0]:
            inside = len(head) == 6 and head[5].startswith(str(folder))
        elif inside and head[0] == "Pss:":
            pss += int(head[1]) * 1024
        elif inside and head[0] == "Rss:":
            rss += int(head[1]) * 1024
    return pss, rss


def test_one_copy_of_the_cached_bytes_per_node(tmp_path: Path) -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(6000, 16, 256))
    cache = stoker.precompute(
        stoker.TorchSource(dataset, version="random"), None, tmp_path, name="r", workers=0
    )
    size = 6000 * 16 * 256 * 4
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PSS_CHILD, str(cache.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        private = [int(child.stdout.readline()) for child in children]

        figures = [shared_and_private_bytes(child.pid, cache.path) for child in children]

        assert all(rss >= 0.95 * size for _, rss in figures), (
            "the cache is not mapped: the test proves nothing"
        )
        assert sum(pss for pss, _ in figures) <= 1.1 * size
        assert all(grown < size // 2 for grown in private), "a private copy of the cache"
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_no_code_in_data(burgers: Path, tmp_path: Path) -> None:
    cache = stoker.precompute(
        stoker.HDF5Source(burgers, preset="pdebench"), grid_encoder(), tmp_path / "cache", name="b", workers=1
    )

    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            assert path.suffix in {".safetensors", ".json", ".jsonl"}, path
    torch.save({"index": print}, cache.path / "index.json")
    reopened = stoker.open_cache(cache.path)  # derived, so it is made again from the shards, never unpickled
    assert len(reopened) == 12
    assert json.loads((cache.path / "index.json").read_text())["format"] == 1


def test_the_key_is_right_and_explains_itself(burgers: Path, tmp_path: Path) -> None:
    from stoker.store import diff_recipes

    def make(path: Path = burgers, encoder: Any = None, **changes: Any) -> stoker.Cache:
        source = stoker.HDF5Source(path, preset="pdebench")
        return stoker.precompute(
            source, encoder or grid_encoder(), tmp_path / "cache", name="b", workers=0, **changes
        )

    base = make()
    changed = bytearray(burgers.read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "other").mkdir()
    (tmp_path / "moved").mkdir()
    other = tmp_path / "other" / burgers.name
    other.write_bytes(changed)
    moved = tmp_path / "moved" / burgers.name
    moved.write_bytes(burgers.read_bytes())

    assert make(moved).path == base.path
    for cache, entry in (
        (make(encoder=grid_encoder(seed=1)), "encoder.weights"),
        (make(encoder=grid_encoder(dim=6)), "encoder.config.dim"),
        (make(other), "source.parts[0].digest"),
        (make(dtype="float16"), "dtype.latent"),
    ):
        assert cache.fingerprint != base.fingerprint
        assert entry in [difference.entry for difference in diff_recipes(base.recipe, cache.recipe)]


KILL_CHILD = """
import sys, stoker
source = stoker.HDF5Source(sys.argv[1], preset="pdebench")
encoder = stoker.GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=8, dim=4, seed=0)
stoker.precompute(source, encoder, sys.argv[2], name="b", workers=2)
"""


@pytest.mark.chaos
def test_killed_at_any_instant_nothing_is_lost(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "b_Nu0.01.hdf5", samples=400)
    whole = stoker.precompute(
        stoker.HDF5Source(path, preset="pdebench"), grid_encoder(), tmp_path / "whole", name="b", workers=0
    )
    chance = random.Random(0)

    command = [sys.executable, "-c", KILL_CHILD, str(path), str(tmp_path / "killed")]
    kills, codes = 0, list[int]()
    for wait_s in sorted(chance.uniform(0.02, 0.6) for _ in range(6)):  # or the first may do all the work
        child = subprocess.Popen(command, start_new_session=True)
        try:
            codes.append(child.wait(timeout=wait_s))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            kills += 1
    subprocess.run(command, check=True, timeout=120)

    cache = stoker.open_cache(tmp_path / "killed" / "b")
    assert kills, codes
    assert cache.fingerprint == whole.fingerprint
    assert len(cache) == 400
    for number in range(400):
        for name, value in whole[number].items():
            assert torch.equal(cache[number][name], value)
