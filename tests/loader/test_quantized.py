"""Packed caches are served as what they decode to, the same bits from every tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import CorruptError
from stoker.loader import Loader, Windows, assembly
from stoker.loader.assembly import stored_outputs
from stoker.loader.outputs import make_outputs
from stoker.schema import QUANTIZED_DTYPES
from stoker.store import Cache, open_cache
from stoker.store.values import unpack
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import same, values_of

TIMED = ("latent", "time", "wide")
TIERS = ("host", "disk", "device")


def fields_of(count: int = 24) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        **trajectories(count, 9, (4, 40), torch.float32),
        "wide": torch.randn((count, 9, 2, 150), generator=generator),
        "flat": torch.randn((count, 300), generator=generator),
    }


@pytest.fixture(params=QUANTIZED_DTYPES)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Cache:
    return write_cache(tmp_path, fields_of(), timed=TIMED, shards=(5, 7, 1), dtype=request.param)


@pytest.mark.parametrize("tier", TIERS)
def test_records_are_what_the_cache_gives(cache: Cache, tier: str) -> None:
    for batch in Loader(cache, batch_size=5, tier=tier, shuffle=True):
        for name in cache.schema:
            for row, number in enumerate(batch["index"].tolist()):
                assert torch.equal(batch[name][row], cache[number][name]), name
        assert batch["latent"].dtype == torch.float32


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("horizon", [1, 3])
def test_windows_are_steps_of_the_decoded_trajectories(cache: Cache, tier: str, horizon: int) -> None:
    windows = Windows(field="latent", stride=2, horizon=horizon)
    for batch in Loader(cache, batch_size=7, windows=windows, tier=tier, shuffle=True):
        for row, (number, start) in enumerate(batch.index.tolist()):
            record = cache[number]
            steps = record["latent"][start : start + 2 * horizon + 1 : 2]
            assert torch.equal(batch.z0[row], steps[0])
            assert torch.equal(batch.z1[row], steps[1])
            if horizon > 1:
                assert torch.equal(batch.future[row], steps[2:])
            assert torch.equal(batch.cond["wide"][row], record["wide"][start].flatten())
            assert torch.equal(batch.cond["flat"][row], record["flat"])


@pytest.mark.parametrize("tier", TIERS)
def test_trajectories_of_varying_length(tmp_path: Path, tier: str) -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = [7, 3, 0, 9, 5, 8]
    fields: dict[str, Any] = {
        "latent": [torch.randn((n, 3, 140), generator=generator) for n in lengths],
        "set": [torch.randn((n + 1, 6), generator=generator) for n in lengths],
    }
    cache = write_cache(tmp_path, fields, timed=("latent",), shards=(2, 3), dtype="int8")

    for batch in Loader(cache, batch_size=4, tier=tier, shuffle=True):
        for row, number in enumerate(batch["index"].tolist()):
            assert torch.equal(batch["latent"][row], cache[number]["latent"])
            assert torch.equal(batch["set"][row], cache[number]["set"])
    alone = write_cache(tmp_path / "alone", {"latent": fields["latent"]}, timed=("latent",), dtype="int8")
    seen = 0
    for batch in Loader(alone, batch_size=4, windows=Windows(horizon=2), tier=tier, shuffle=True):
        for row, (number, start) in enumerate(batch.index.tolist()):
            steps = alone[number]["latent"][start : start + 3]
            assert torch.equal(torch.stack([batch.z0[row], batch.z1[row], *batch.future[row]]), steps)
            seen += 1
    assert seen == sum(max(0, n - 2) for n in lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_dtype_is_the_decoded_values_rounded_once(cache: Cache, dtype: str) -> None:
    wanted = getattr(torch, dtype)
    for tier in TIERS:
        for batch in Loader(cache, batch_size=5, tier=tier, dtype=dtype, shuffle=True):
            whole = [cache[number] for number in batch["index"].tolist()]
            for name in cache.schema:
                assert torch.equal(batch[name], torch.stack([one[name] for one in whole]).to(wanted))


def test_memory_holds_and_gathers_the_packed_bytes(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, tier="host", shuffle=True)
    next(iter(loader))

    assert loader._serving.engine is not None
    (memory,) = loader._serving.engine.placement.held.memories
    assert memory.sources["latent"].dtype == torch.int8
    packed = sum(f.size_bytes() for f in cache.recipe.columns.values())
    assert sum(row.bytes for row in loader.plan.rows) == packed * len(cache)
    (output,) = [o for o in make_outputs(cache.schema, None, None) if o.name == "latent"]
    assert output.example_bytes == 9 * 4 * 40 + 9 * 4 * 4
    assert output.served_bytes == 9 * 4 * 40 * 4


@pytest.mark.parametrize("windows", [None, Windows(field="latent")])
def test_large_values_with_small_scales_are_gathered_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: Windows | None
) -> None:
    """Not those of 128 batches at once, as scales are, which have the same name."""
    fields = {"latent": torch.randn((64, 2, 1, 8192), generator=torch.Generator().manual_seed(5))}
    cache = write_cache(tmp_path, fields, timed=("latent",), dtype="int8")
    held: list[int] = []

    def unpacked(bits: torch.Tensor, *rest: Any) -> torch.Tensor:
        held.append(bits.untyped_storage().nbytes())
        return unpack(bits, *rest)

    monkeypatch.setattr(assembly, "unpack", unpacked)

    assert len([*Loader(cache, batch_size=4, tier="host", windows=windows, shuffle=True)]) == 16
    assert max(held) <= 4 * 2 * 8192


def test_floats_come_as_bfloat16_for_cuda(cache: Cache) -> None:
    served = {o.name: o.dtype for o in make_outputs(cache.schema, None, None, device="cuda")}

    assert served["latent"] == torch.bfloat16
    assert served["nu"] == torch.float32
    assert make_outputs(cache.schema, None, "float16", device="cuda")[0].cast == torch.float16


def test_a_batch_may_draw_from_memory_and_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(field="latent", horizon=2)
    expected = list(Loader(cache, batch_size=6, windows=windows, tier="host", shuffle=True))
    monkeypatch.setattr("stoker.loader.placement.assign", lambda *_: {"device": frozenset(), "host": {0, 2}})

    mixed = Loader(cache, batch_size=6, windows=windows, tier="host", shuffle=True)

    for _ in range(2):
        assert all(same(a, b) for a, b in zip(mixed, expected, strict=True))
        mixed.set_epoch(0)


def test_large_batches_own_their_memory(tmp_path: Path) -> None:
    """Decoded batches of 1 MiB and more reuse buffers, as others do, and never one that is held."""
    fields = {"latent": torch.randn((64, 600, 32), generator=torch.Generator().manual_seed(5))}
    cache = write_cache(tmp_path, fields, timed=("latent",), dtype="int8")
    for dtype in (None, "bfloat16"):
        loader = Loader(cache, batch_size=32, tier="host", dtype=dtype, shuffle=True)
        kept = list(loader) + list(loader)

        for batch in kept:
            whole = torch.stack([cache[number]["latent"] for number in batch["index"].tolist()])
            assert torch.equal(batch["latent"], whole.to(batch["latent"].dtype))


def test_fixed_addresses_for_graphs(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, tier="device", static=True, shuffle=True)
    addresses = set()
    for batch in loader:
        addresses.add(tuple(values.data_ptr() for values in values_of(batch)))
        assert torch.equal(batch["wide"][3], cache[int(batch["index"][3])]["wide"])

    assert len(addresses) == 1


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_flipped_bit_in_a_scale_is_found_and_never_served(cache: Cache, tier: str) -> None:
    shard = cache.shard(1)
    path = cache.path / shard.name
    data = bytearray(path.read_bytes())
    data[shard.columns["latent.scale"].offset + 100] ^= 4
    os.chmod(path, 0o600)
    path.write_bytes(data)

    with pytest.raises(CorruptError, match=r"latent\.scale"):
        list(Loader(open_cache(cache.path), batch_size=4, tier=tier, shuffle=True))


def test_nothing_is_added_for_caches_that_are_not_packed(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, trajectories(), timed=("latent", "time"))
    loader = Loader(cache, batch_size=5, tier="host", shuffle=True)
    next(iter(loader))

    assert loader._serving.engine is not None
    assert loader._serving.engine._assembly._unpack is None
    outputs = make_outputs(cache.schema, None, None)
    assert stored_outputs(outputs) == outputs


@pytest.mark.usefixtures("twins_alone")
def test_large_values_with_small_scales_are_gathered_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered for many batches at once, as their scales are, they would take 128 times the memory."""
    cache = write_cache(tmp_path, {"flat": torch.randn(256, 8192)}, dtype="int8")
    rows: dict[torch.dtype, set[int]] = {}
    select = torch.index_select

    def noted(view: torch.Tensor, dim: int, index: torch.Tensor, **out: Any) -> torch.Tensor:
        rows.setdefault(view.dtype, set()).add(len(index))
        return select(view, dim, index, **out)

    monkeypatch.setattr(torch, "index_select", noted)
    for _ in Loader(cache, batch_size=4, tier="host", shuffle=True):
        pass

    bits, scales = rows.pop(torch.int8), rows
    assert bits == {4}
    assert max(max(counts) for counts in scales.values()) > 4
