"""Training from a cache that lies elsewhere, through a local cache smaller than the set.

The quick test has the set in a folder of shared storage; those with a real S3 server, and a wire that fails,
are slow ones.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import StalledError
from stoker.loader import Loader, disk, prefetch
from stoker.loader.assembly import stored_outputs
from stoker.loader.loader import design_of
from stoker.monitor import StallMeter
from stoker.store import Cache, storage
from stoker.store import mirror as folder
from stoker.store.remote import FolderRemote, TransientError
from stoker.units import KIB
from tests.kit import forked as subprocess
from tests.loader.objects import compared, opened, put, settings, size_of, stored, variables
from tests.store.faulty_s3 import Faults, a_wire
from tests.store.s3_server import S3Server, an_s3_server, missing

needs_s3 = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """48 MiB."""
    return stored(tmp_path_factory.mktemp("local"), 480)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with an_s3_server() as one:
        yield one


@pytest.fixture(scope="module")
def url(local: Cache, server: S3Server) -> str:
    return put(local, server)


def test_a_small_mirror_serves_the_same_batches_and_fetches_no_more_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch fetches about what does not fit. By what was unused longest it would be nearly all."""
    block = 64 * KIB
    for module in (prefetch, folder, storage):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    cache = stored(tmp_path / "share", 400, record=(64, 64))
    room = size_of(cache) // 2
    remote, mirror = opened(f"file://{tmp_path}/share/c", tmp_path / "mirrors", room)
    one, other = (
        Loader(c, **{"shuffle": True, **settings(batch_size=8, shuffle="block(20,40)")})
        for c in (remote, cache)
    )

    compared(one, other, 1)
    before = mirror.counters.bytes
    assert compared(one, other, 2) == 100

    fetched = (mirror.counters.bytes - before) / 2 / size_of(cache)
    said = design_of(one).demand.remote
    assert said is not None
    assert 0.4 < said.fetched() < 0.75
    assert fetched < said.fetched() + 0.25  # a busy machine fetches a few blocks twice
    assert mirror.root.space.used() <= room
    assert "share/c/" in one.plan.reason
    assert "through a local cache of 3.2 MiB of 6.3 MiB" in one.plan.reason
    assert one.plan.tier == "disk"


def test_neighbors_that_an_order_takes_at_different_times_come_in_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record is a block, and the blocks of a window are taken at random. Nothing is served meanwhile."""
    block = 16 * KIB
    for module in (prefetch, folder, storage):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    monkeypatch.setattr(prefetch, "LOOK_S", 60.0)
    stored(tmp_path / "share", 1200, record=(64, 64))
    room = 6 * 16 * folder.SHARE * block
    remote, mirror = opened(f"file://{tmp_path}/share/c", tmp_path / "mirrors", room)
    design = design_of(Loader(remote, **{"shuffle": "block(40,240)", **settings(batch_size=8)}))
    locator = prefetch.BlockLocator(
        design.cache, design.table, design.examples, stored_outputs(design.outputs), block
    )
    shards = prefetch.find_mirrors(remote)
    assert shards is not None
    ahead = prefetch.BlockPrefetcher(design.share, design.order.epoch, locator, shards)
    runs: list[prefetch.BlockRun] = []
    for position in range(0, 1200, 8):  # as an epoch goes on
        ahead._upcoming.at(0, position)
        runs += iter(ahead._next_run, None)

    assert mirror.root.run_blocks == 6
    blocks = sum(run.stop - run.first for run in runs)
    assert blocks > 1000
    assert len(runs) < blocks / 3


def _stop_answering(monkeypatch: pytest.MonkeyPatch, answers_again_after_s: float = float("inf")) -> None:
    """From now on no shard can be read from a shared folder."""
    read, back = FolderRemote.read, time.monotonic() + answers_again_after_s

    def refused(self: FolderRemote, name: str, begin: int, end: int, **more: Any) -> None:
        if name.endswith(".safetensors") and time.monotonic() < back:
            raise TransientError("the connection was refused")
        read(self, name, begin, end, **more)

    monkeypatch.setattr(FolderRemote, "read", refused)
    monkeypatch.setattr(disk, "READ_TIMEOUT_S", 0.3)


def test_a_store_that_is_away_longer_than_a_local_read_may_take_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = stored(tmp_path / "share", 16, record=(64, 64))
    remote, _ = opened(f"file://{tmp_path}/share/c", tmp_path / "mirrors")
    one, other = (Loader(c, **{"shuffle": True, **settings()}) for c in (remote, local))
    _stop_answering(monkeypatch, 1.5)

    assert compared(one, other, 1) == 4


@pytest.mark.parametrize("given", [{}, {"timeout": 1.0}])
def test_a_store_that_stays_away_ends_the_epoch_with_url_operation_attempts_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, float]
) -> None:
    """By the timeout of the fetch, or by one that the user gave, which is shorter."""
    stored(tmp_path / "share", 16, record=(64, 64))
    remote, _ = opened(f"file://{tmp_path}/share/c", tmp_path / "mirrors")
    _stop_answering(monkeypatch)
    if not given:
        monkeypatch.setattr(folder.MirrorFolder.fetch, "__defaults__", (1.0,))
    begun = time.monotonic()

    with pytest.raises(
        StalledError, match=r"get file://.*/shard-\S+ failed \d+ times .*connection was refused"
    ):
        next(iter(Loader(remote, **{"shuffle": True, **given, **settings()})))

    assert time.monotonic() - begun < 30


@pytest.mark.slow
@needs_s3
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("cut", "short"), id="cut"),
        pytest.param(("busy", "broken", "refused"), id="503"),
        pytest.param(("slow",), id="slow"),
        pytest.param(("flipped", "padded"), id="wrong-bytes"),
        pytest.param(("cut", "short", "busy", "broken", "refused", "slow", "flipped", "padded"), id="all"),
    ],
)
def test_no_fault_of_the_wire_reaches_a_batch(
    local: Cache, server: S3Server, url: str, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """A third of all answers fail. Batches are those of the cache on this machine, bit by bit."""
    faults = Faults(rate=0.33, kinds=kinds, seed=11, slow_bytes_s=2e6, under=".safetensors")
    with a_wire(server.url, faults) as wire, variables(server.variables(wire.url)):
        remote, mirror = opened(url, tmp_path, size_of(local) // 2)
        one, other = (
            Loader(c, **{"shuffle": True, **settings(batch_size=16, shuffle="block(20,120)")})
            for c in (remote, local)
        )
        assert compared(one, other, 2) == 60

        met = {request.fault for request in wire.requests if request.fault}
        assert len(met) >= min(len(kinds), 3)  # how many requests there are depends on who comes first
        if {"flipped", "padded"} & met:
            assert mirror.counters.refetched > 0


@pytest.mark.slow
@needs_s3
def test_a_store_that_hangs_is_given_up_in_time_and_served_when_it_is_back(
    local: Cache, server: S3Server, url: str, tmp_path: Path
) -> None:
    faults = Faults(rate=1.0, kinds=("hang",), most=10**6, under=".safetensors")
    with a_wire(server.url) as wire, variables(server.variables(wire.url)):
        remote, _ = opened(url, tmp_path)
        loader = Loader(remote, **{"shuffle": True, **settings(timeout=2.0)})
        state = loader.state_dict()
        wire.faults = faults
        with pytest.raises(StalledError):
            next(iter(loader))
        wire.faults = Faults()
        wire.release()
        loader.load_state_dict(state)
        assert compared(loader, Loader(local, **{"shuffle": True, **settings()}), 1) == 120


@pytest.mark.slow
@needs_s3
def test_requests_that_hang_twice_are_given_up_before_the_loader_is(
    local: Cache, server: S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may wait for two such requests in a row, that of a header and that of records.

    Half the silence of the defaults: with 15 s and 60 s, these two would take all of the batch's time.
    """
    from stoker.store import object_store

    monkeypatch.setattr(object_store, "SILENCE_S", 2.0)
    faults = Faults(rate=0.3, kinds=("hang",), most=2, seed=7, under=".safetensors")
    with a_wire(server.url, faults) as wire, variables(server.variables(wire.url)):
        remote, mirror = opened(url, tmp_path)
        loaders = [
            Loader(c, **{"shuffle": True, **settings(batch_size=16, timeout=16.0)}) for c in (remote, local)
        ]
        assert compared(*loaders, 1) == 30
        assert mirror.root.retries.count > 0


CHILD = """
import json, sys, torch
from pathlib import Path
from stoker.errors import StalledError
from stoker.loader import Loader
from tests.loader.objects import opened
url, mirrors, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
cache, mirror = opened(url, mirrors)
loader = Loader(cache, batch_size=4, shuffle=True, seed=5, tier="disk", rank=rank, world_size=4)
total = 0.0
for _ in range(2):
    for batch in loader:
        total += float(batch["latent"].double().sum())
print(json.dumps({"bytes": mirror.counters.bytes, "sum": total}))
"""


@pytest.mark.slow
@needs_s3
def test_four_processes_of_a_node_download_the_set_once(
    local: Cache, server: S3Server, url: str, tmp_path: Path
) -> None:
    root = Path(__file__).parent.parent.parent
    with variables(server.variables()):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, url, str(tmp_path), str(rank)],
                cwd=root, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(4)
        ]  # fmt: skip
        told = [json.loads(child.communicate(timeout=150)[0]) for child in children]

    assert sum(one["bytes"] for one in told) == size_of(local)
    loaders = [Loader(local, **{"shuffle": True, **settings(rank=rank, world_size=4)}) for rank in range(4)]
    for one, loader in zip(told, loaders, strict=True):
        sums = [float(batch["latent"].double().sum()) for _ in range(2) for batch in loader]
        assert one["sum"] == pytest.approx(sum(sums))


SOAK_S = 180.0
SOAKED = """
import json, sys, time
from pathlib import Path
from stoker.loader import Loader
from stoker.store import open_cache
from tests.loader.objects import compared, opened
url, mirrors, local = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
rank, until, room = int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
cache, mirror = opened(url, mirrors, room)
options = {"batch_size": 4, "shuffle": "block(20,120)", "seed": 5, "tier": "disk"}
options |= {"rank": rank, "world_size": 4}
one, other = Loader(cache, **options), Loader(open_cache(local), **options)
epochs = 0
while time.time() < until:
    compared(one, other, 1)
    epochs += 1
print(json.dumps({"epochs": epochs, "waited_s": mirror.counters.wait_s}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_s3
def test_minutes_of_faults_and_a_busy_machine_stall_no_rank(
    local: Cache, server: S3Server, url: str, tmp_path: Path
) -> None:
    """Four ranks share a local cache of a third of the set; four programs take all processor time."""
    faults = Faults(
        rate=0.1,
        kinds=("cut", "short", "busy", "broken", "refused", "slow", "flipped"),
        slow_bytes_s=2e6,
        latency_s=0.02,
        most=10**6,
        under=".safetensors",
    )
    root = Path(__file__).parent.parent.parent
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with a_wire(server.url, faults) as wire, variables(server.variables(wire.url)):
            until, room = time.time() + SOAK_S, size_of(local) // 3
            children = [
                subprocess.Popen(
                    [sys.executable, "-c", SOAKED, *map(str, (url, tmp_path, local.path, rank, until, room))],
                    cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for rank in range(4)
            ]  # fmt: skip
            for seed in itertools.count():
                wire.faults = replace(faults, seed=seed)  # other requests fail
                time.sleep(0.5)
                if time.time() > until:
                    break
            ends = [child.communicate(timeout=400) for child in children]
            met = sum(bool(request.fault) for request in wire.requests)
    finally:
        for one in busy:
            one.kill()
            one.wait()

    assert [child.returncode for child in children] == [0] * 4, [said[-2000:] for _, said in ends]
    told = [json.loads(answer) for answer, _ in ends]
    assert all(one["epochs"] >= 1 for one in told), told
    assert met > 200


@pytest.mark.slow
@needs_s3
def test_a_mirror_with_room_for_the_set_is_filled_and_memory_serves(
    local: Cache, server: S3Server, url: str, tmp_path: Path
) -> None:
    with variables(server.variables()):
        remote, mirror = opened(url, tmp_path)
        one = Loader(remote, **{"shuffle": True, **settings(tier="auto")})
        assert compared(one, Loader(local, **{"shuffle": True, **settings(tier="auto")}), 3) == 360

    assert one.plan.tier == "host"
    assert mirror.counters.bytes == size_of(local)
    assert one._serving.engine.placement.complete  # type: ignore[union-attr]


@pytest.mark.slow
@needs_s3
def test_training_waits_for_the_network_and_the_meter_says_so(
    local: Cache, server: S3Server, url: str, tmp_path: Path
) -> None:
    meter = StallMeter()
    with a_wire(server.url, Faults(latency_s=0.1)) as wire, variables(server.variables(wire.url)):
        remote, _ = opened(url, tmp_path, size_of(local) // 3)
        loader = Loader(remote, **{"shuffle": True, **settings(batch_size=8, meter=meter)})
        for batch in loader:
            assert batch["latent"].dtype == torch.float32
    report = meter.epoch()
    assert report.parts["fetch"] > 0.5 * report.wait_s > 0.1
