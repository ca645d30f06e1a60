"""What is damaged on disk is encoded again while it is served, and nobody can tell from the batches."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError, CorruptError, ResourceError
from stoker.loader import Loader, Mixture, Windows, design
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.store import Cache, open_cache
from tests.kit import forked as subprocess
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource, RaggedSource

SETTINGS = PrecomputeSettings(progress=None, workers=0)


def make(folder: Path, source: Any = None, encoder: Any = None) -> Cache:
    """22 records in two shards, whose bits depend on the group that they are encoded in."""
    source = source or FakeSource((10, 12))
    return run_precompute(
        source, encoder or FakeEncoder(by_shape=True), folder, name="c", settings=SETTINGS
    ).cache


def flip(cache: Cache, number: int, field: str = "latent", byte: int = 5) -> str:
    """Damage one byte of a record; returns its shard."""
    segments = cache.segments
    place = int((segments.first <= number).sum()) - 1
    shard = cache.shard(int(segments.shard[place]))
    row = int(segments.row[place]) + number - int(segments.first[place])
    column = shard.columns[field]
    if column.field.ragged:
        at = int(shard.offsets(field)[row]) * column.field.row_bytes
    else:
        at = row * column.row_bytes
    path = cache.path / shard.name
    with path.open("r+b") as file:
        file.seek(column.offset + at + byte)
        value = file.read(1)[0]
        file.seek(column.offset + at + byte)
        file.write(bytes([value ^ 16]))
    return shard.name


def plain(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, dict):
        return [one for v in batch.values() for one in (v if isinstance(v, list) else [v])]
    return [batch.z0, batch.z1, batch.index, *batch.cond.values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x.position == y.position and all(torch.equal(p, q) for p, q in zip(plain(x), plain(y), strict=True))
        for x, y in zip(a, b, strict=True)
    )


WAYS = [
    pytest.param({"tier": "disk"}, id="disk"),
    pytest.param({"tier": "host"}, id="host"),
    pytest.param({"tier": "disk", "windows": Windows()}, id="disk-windows"),
    pytest.param({"tier": "host", "windows": Windows(), "indices": [13, 5, 4, 5]}, id="host-chosen"),
]


@pytest.mark.parametrize("how", WAYS)
def test_a_flipped_byte_is_encoded_again_and_batches_are_the_same(
    tmp_path: Path, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = list(Loader(make(tmp_path / "sound"), batch_size=3, seed=1, **{"shuffle": True, **how}))
    encoder = FakeEncoder(by_shape=True)
    cache = make(tmp_path / "c", encoder=encoder)
    shard = flip(cache, 5)
    encoder.calls.clear()
    loader = Loader(cache, batch_size=3, seed=1, **{"shuffle": True, **how})

    found = list(loader)

    assert same(found, wanted)
    assert loader.repaired == 1
    assert encoder.calls == [(4, 6, 5)], "one group, that of the damaged sample"
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    (warning,) = [line for line in said if "Encoded again from the source: samples 5" in line]
    assert shard in warning
    assert "field 'latent'" in warning
    assert open_cache(cache.path).verify().bad == []


@pytest.mark.parametrize("windows", [None, Windows()], ids=["records", "windows"])
def test_damage_between_and_within_epochs_is_repaired_at_first_touch(tmp_path: Path, windows: Any) -> None:
    def serve(cache: Cache, *, damage: bool) -> list[Any]:
        loader = Loader(cache, batch_size=2, seed=3, tier="disk", windows=windows, shuffle=True)
        batches = list(loader)
        if damage:
            flip(cache, 2)
            flip(cache, 3)
            flip(cache, 12, "nu", 1)
        passing = iter(loader)
        batches.append(next(passing))
        if damage:
            flip(cache, 20)
        batches += passing
        assert loader.repaired == (4 if damage else 0)
        assert loader.state_dict()["epoch"] == 2
        return batches

    sound = serve(make(tmp_path / "sound"), damage=False)
    assert same(serve(make(tmp_path / "c"), damage=True), sound)


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("damage", ["header", "gone", "cut"])
def test_a_shard_that_is_lost_after_opening_is_encoded_again(tmp_path: Path, tier: str, damage: str) -> None:
    source = RaggedSource((10, 12))
    encoder = FakeEncoder(samples=1, ragged=True)
    wanted = list(Loader(make(tmp_path / "sound", source, encoder), batch_size=3, tier=tier, shuffle=True))
    path = make(tmp_path / "c", source, encoder).path
    cache = open_cache(path)
    cache.filler = make(tmp_path / "c", source, encoder).filler
    shard = path / cache.index.shards[1].file
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, shard.stat().st_size - 4096)
    else:
        data = bytearray(shard.read_bytes())
        data[30] ^= 1
        shard.write_bytes(data)

    loader = Loader(cache, batch_size=3, tier=tier, shuffle=True)

    assert same(list(loader), wanted)
    assert loader.repaired == 12


def test_without_a_source_the_record_is_named_with_the_remedy(tmp_path: Path) -> None:
    cache = open_cache(make(tmp_path).path)
    shard = flip(cache, 5)

    with pytest.raises(CorruptError, match=rf"{shard}.*'latent' of sample 5 .*verify .* --repair"):
        list(Loader(cache, batch_size=3, tier="disk", shuffle=True))


def test_a_source_that_changed_makes_no_record(tmp_path: Path) -> None:
    source = FakeSource((10, 12))
    cache = make(tmp_path, source)
    flip(cache, 5)
    source.steps = 7

    with pytest.raises(CorruptError, match=r"sample 5 .*failed: .*was made from other data"):
        list(Loader(cache, batch_size=3, tier="disk", shuffle=True))
    assert 5 not in open_cache(cache.path, require_complete=False)


def test_a_sample_that_cannot_be_encoded_any_more_is_named(tmp_path: Path) -> None:
    source = FakeSource((10, 12))
    cache = make(tmp_path, source)
    flip(cache, 5)
    source.faults = {5: "nan"}

    with pytest.raises(CorruptError, match=r"sample 5 .*failed: sample 5 is quarantined .check: "):
        list(Loader(cache, batch_size=3, tier="disk", shuffle=True))


def test_storage_that_damages_it_every_time_is_named(tmp_path: Path) -> None:
    cache = make(tmp_path)
    flip(cache, 5)
    filler = cache.filler

    class Worn:
        def fill(self, numbers: list[int], deadline_s: float) -> None:
            filler.fill(numbers, deadline_s)
            flip(open_cache(cache.path), 5)

    cache.filler = Worn()

    with pytest.raises(CorruptError, match=r"sample 5 of .* has been damaged 3 times in this run"):
        list(Loader(cache, batch_size=3, tier="disk", shuffle=True))


RANK = """
import sys, torch
from pathlib import Path
from stoker.loader import Loader
from tests.loader.test_repair import make
from tests.precompute.fake_encoders import FakeEncoder
folder, rank, tier = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
encoder = FakeEncoder(by_shape=True, sleep_s=0.5)
cache = make(folder, encoder=encoder)
loader = Loader(cache, 2, shuffle=True, seed=1, tier=tier, rank=rank, world_size=2, drop_last=False)
print("ready", flush=True)
sys.stdin.readline()
batches = list(loader)
torch.save([dict(batch) for batch in batches], folder / f"rank{rank}.pt")
print(len(encoder.calls), loader.repaired, flush=True)
"""


@pytest.mark.parametrize("tier", [pytest.param("disk", marks=pytest.mark.slow), "host"])
def test_of_several_ranks_one_encodes_and_all_go_on(tmp_path: Path, tier: str) -> None:
    cache = make(tmp_path)
    wanted = [
        list(Loader(cache, batch_size=2, seed=1, rank=r, world_size=2, drop_last=False, shuffle=True))
        for r in range(2)
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), tier],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        shard = cache.path / cache.index.shards[0].file
        data = bytearray(shard.read_bytes())
        data[30] ^= 1  # in the header, so that every rank meets it
        shard.write_bytes(data)
        for rank in ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
        said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()

    assert sorted(said) == [["0", "0"], ["3", "10"]], "three groups of ten samples, encoded by one of them"
    for rank, batches in enumerate(wanted):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert len(found) == len(batches)
        for a, b in zip(found, batches, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


def test_samples_of_one_number_in_two_caches_are_counted_apart(tmp_path: Path) -> None:
    """One loader serves both, where batches hold examples of several caches."""
    caches = [make(tmp_path / "a"), make(tmp_path / "b")]
    mixture = Mixture(caches, 4, names=["a", "b"], mix="example", tier="disk")
    for _ in range(2):  # each record as often as one may be damaged
        for cache in caches:
            flip(open_cache(cache.path), 5)
        assert len(list(mixture)) == 11

    (loader,) = mixture.loaders.values()
    assert loader.repaired == 4
    flip(open_cache(caches[1].path), 5)
    with pytest.raises(CorruptError, match=rf"sample 5 of {caches[1].path} has been damaged 3 times"):
        list(mixture)


@pytest.mark.parametrize("windows", [None, Windows()], ids=["records", "windows"])
@pytest.mark.parametrize(("verify", "found_in"), [("always", 1), ("first", 0), ("off", None)])
def test_a_policy_says_when_damage_is_found(
    tmp_path: Path, verify: Any, found_in: int | None, windows: Any
) -> None:
    """Damage before the first epoch is found unless nothing is checked; later damage by `always` alone."""
    cache = open_cache(make(tmp_path / "early").path)
    flip(cache, 5)
    early = Loader(cache, batch_size=3, tier="disk", verify=verify, windows=windows, shuffle=True)
    if found_in is None:
        list(early)
    else:
        with pytest.raises(CorruptError, match="sample 5 does not match"):
            list(early)

    cache = open_cache(make(tmp_path / "late").path)
    late = Loader(cache, batch_size=3, tier="disk", verify=verify, windows=windows, shuffle=True)
    sound = list(late)
    assert same(sound, list(Loader(cache, batch_size=3, tier="host", windows=windows, shuffle=True)))
    flip(cache, 5)
    if found_in:
        with pytest.raises(CorruptError, match="sample 5 does not match"):
            list(late)
    else:
        assert len(list(late)) == len(sound)


def test_a_policy_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify is 'never'\. Expected always, first, off"):
        Loader(make(tmp_path), verify="never", shuffle=True)


def test_a_mend_does_not_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is free once the model is there says nothing about where the records were served from."""
    wanted = list(Loader(make(tmp_path / "sound"), batch_size=3, seed=1, tier="host", shuffle=True))
    cache = make(tmp_path / "c")
    flip(cache, 5)
    loader = Loader(cache, batch_size=3, seed=1, tier="host", shuffle=True)
    full = replace(design.probe(device="cpu", path=tmp_path), host_bytes=0)
    monkeypatch.setattr(design, "probe", lambda **_: full)
    with pytest.raises(ResourceError):
        Loader(cache, batch_size=3, seed=1, tier="host", shuffle=True)

    found = list(loader)

    assert same(found, wanted)
    assert loader.repaired == 1
    stored = sum(shard.rows for shard in open_cache(cache.path).index.shards)
    assert stored > len(cache)  # the damaged row stays where it is
    assert loader.plan.records_by_tier()["host"] == stored
