from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loader import Loader, tiers
from stoker.loader.records import find_records
from stoker.loader.tiers import Memory, allocate_on_device, map_host
from stoker.store import Cache
from tests.kit import forked as subprocess
from tests.kit.amount import example_count
from tests.loader.caches import write_cache


def fill(memory: Memory) -> Memory:
    for shard in sorted(memory.shards):
        memory.load(shard)
    return memory


def everything(cache: Cache) -> frozenset[int]:
    return frozenset(range(len(cache.index.shards)))


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@settings(max_examples=example_count(40), deadline=None)
@given(
    width=st.integers(1, 700),
    shards=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    mapping=st.booleans(),
    on_device=st.booleans(),
)
def test_shards_of_any_size_serve_like_one_array(
    tmp_path_factory: pytest.TempPathFactory, width: int, shards: list[int], mapping: bool, on_device: bool
) -> None:
    count = sum(shards)
    fields = {
        "x": torch.randint(0, 255, (count, width), dtype=torch.uint8),
        "y": torch.randn(count, 2),
        "z": torch.arange(count),
    }
    cache = write_cache(tmp_path_factory.mktemp("c"), fields, shards=shards)
    places = find_records(cache, None)

    if on_device:
        memory = fill(allocate_on_device(cache, places, everything(cache), torch.device("cpu")))
    else:
        memory = fill(map_host(cache, places, everything(cache), mapping=mapping))

    rows = torch.as_tensor(memory.rows)
    for name, values in fields.items():
        assert torch.equal(memory.sources[name].index_select(0, rows), values)


def test_maps_are_given_back_when_nobody_needs_them(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(64, 1024)}, shards=(16,) * 4)
    memory = fill(map_host(cache, find_records(cache, None), everything(cache)))
    rows = memory.sources["x"][memory.rows[3]]

    assert maps_of(cache.path) > 0
    kept = rows.clone()
    del memory
    gc.collect()
    assert torch.equal(rows, kept), "a tensor over the range keeps it"
    del rows
    gc.collect()
    assert maps_of(cache.path) == 0


def test_without_addresses_everything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(20, 8)
    cache = write_cache(tmp_path, {"x": values}, shards=(7, 9))

    def refuse(self: object, size_bytes: int) -> None:
        raise OSError(12, "no addresses")

    monkeypatch.setattr(tiers.AddressRange, "__init__", refuse)
    memory = fill(map_host(cache, find_records(cache, None), everything(cache)))

    assert torch.equal(memory.sources["x"][memory.rows], values)
    assert maps_of(cache.path) == 0


def test_too_many_maps_and_machines_without_them_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(20, 8)}, shards=(7, 9))

    for name, value in (("MAX_MAPS", 2), ("MAX_RANGE_BYTES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(tiers, name, value)
            fill(map_host(cache, find_records(cache, None), everything(cache)))
            assert maps_of(cache.path) == 0
    assert "3 shards of 1 fields are more than the 2 that one process can map" in caplog.text
    monkeypatch.setattr(sys, "platform", "darwin")
    fill(map_host(cache, find_records(cache, None), everything(cache)))
    assert maps_of(cache.path) == 0


def test_a_small_field_is_copied_where_mapping_would_stretch_the_rest(tmp_path: Path) -> None:
    """One 4-byte value per record would need shards at multiples of 1,024 rows."""
    cache = write_cache(tmp_path, {"x": torch.randn(40, 1024), "nu": torch.randn(40)}, shards=(10,) * 4)

    memory = map_host(cache, find_records(cache, None), everything(cache))

    assert len(memory.sources["x"]) == 40


def test_rows_known_to_be_damaged_are_left_out(tmp_path: Path) -> None:
    values = torch.randn(20, 64)
    cache = write_cache(tmp_path, {"x": values}, shards=(10,))
    entry = cache.index.shards[1]
    own = list(cache.segments.shard).index(1)
    first = int(cache.segments.first[own])
    shard = cache.shard(1)
    data = bytearray((cache.path / shard.name).read_bytes())
    data[shard.columns["x"].offset + 9 * 256] ^= 1
    (cache.path / shard.name).chmod(0o600)
    (cache.path / shard.name).write_bytes(data)
    marked = [replace(s, bad=(9,)) if s is entry else s for s in cache.index.shards]
    damaged = type(cache)(cache.path, cache.recipe, replace(cache.index, shards=tuple(marked)))
    sound = [n for n in range(20) if n != first + 9]

    for mapping in (True, False):
        memory = fill(map_host(damaged, find_records(damaged, sound), everything(damaged), mapping=mapping))
        assert torch.equal(memory.sources["x"][memory.rows], values[sound])


PSS_CHILD = """
import sys, torch
torch.set_num_threads(1)
from stoker.loader import Loader
from stoker.store import open_cache
loader = Loader(open_cache(sys.argv[1]), batch_size=64, shuffle=True, tier="host")
for batch in loader:
    pass
assert loader._serving.engine.placement.complete
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_processes_hold_the_bytes_once(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(1200, 16, 256), "y": torch.randn(1200, 4)}, shards=(500,))
    size = 1200 * 16 * 256 * 4
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PSS_CHILD, str(cache.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        resident_bytes = proportional = 0
        for child in children:
            inside = False
            for line in Path(f"/proc/{child.pid}/smaps").read_text().splitlines():
                words = line.split()
                if "-" in words[0] and ":" not in words[0]:
                    inside = words[-1].startswith(str(cache.path))
                elif inside and words[0] == "Rss:":
                    resident_bytes += int(words[1]) * 1024
                elif inside and words[0] == "Pss:":
                    proportional += int(words[1]) * 1024
        assert resident_bytes > 1.9 * size, "the records are not mapped: the test proves nothing"
        assert proportional < 1.05 * size
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_few_descriptors_suffice_for_many_shards(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(200, 8)}, shards=(2,) * 100)
    code = f"""
import resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from stoker.loader import Loader
from stoker.store import open_cache
for tier in ("host", "disk"):
    loader = Loader(open_cache({str(cache.path)!r}), batch_size=9, shuffle=True, tier=tier)
    assert sum(len(batch["index"]) for batch in loader) == 200
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_major_faults_are_exposed(tmp_path: Path) -> None:
    loader = Loader(write_cache(tmp_path, {"x": torch.randn(20, 8)}), batch_size=4, tier="host", shuffle=True)

    assert loader.major_faults == 0
    list(loader)
    assert loader.major_faults >= 0
