"""Single records replaced by key, without a copy of the others."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError, CorruptError, MissingRecordError, StaleStateError
from stoker.store import WriterSettings, make_recipe, open_folder
from stoker.store.cache import reopen
from stoker.store.keys import put_keys
from stoker.store.storage import open_storage
from tests.loader.caches import Arrays


def keyed(folder: Path, values: dict[str, float], name: str, **more: Any) -> stoker.Cache:
    items = [{"x": torch.full((8,), value), "path": torch.full((int(abs(value)) % 3 + 1, 2), value)}
             for value in values.values()]  # fmt: skip
    source = stoker.TorchSource(items, keys=list(values), version=name, ragged=["path"])
    return stoker.precompute(source, None, folder, name=name, workers=0, progress=None, **more)


@pytest.fixture
def base(tmp_path: Path) -> stoker.Cache:
    return keyed(tmp_path, {f"k{i}": float(i) for i in range(40)}, "base")


def values_of(cache: stoker.Cache, **options: Any) -> dict[int, float]:
    found: dict[int, float] = {}
    for batch in stoker.Loader(cache, 7, shuffle=True, **options):
        assert all((path == x[0]).all() for path, x in zip(batch["path"], batch["x"], strict=True))
        found.update(zip(batch["index"].tolist(), batch["x"][:, 0].tolist(), strict=True))
    return dict(sorted(found.items()))


def test_replaced_records_are_served_and_the_others_stay(tmp_path: Path, base: stoker.Cache) -> None:
    fixes = keyed(tmp_path, {"k31": -31.0, "k0": -100.0, "k30": -30.0}, "fixes")
    expected = {i: float(i) for i in range(40)} | {0: -100.0, 30: -30.0, 31: -31.0}

    updated = stoker.open_cache(base.path, updates=fixes)

    assert updated.complete
    for tier in ("host", "disk"):
        assert values_of(updated, tier=tier) == expected
    assert {i: updated[i]["x"][0].item() for i in range(40)} == expected
    assert values_of(base) == {i: float(i) for i in range(40)}
    assert updated["x"][:][:, 0].tolist() == list(expected.values())
    assert updated.get("k31")["x"][0] == -31
    assert updated.verify().ok
    assert values_of(pickle.loads(pickle.dumps(updated))) == expected


def test_records_of_many_shards_are_replaced(tmp_path: Path) -> None:
    def made(folder: Path, values: list[float]) -> stoker.Cache:
        source = Arrays({"x": torch.tensor(values)[:, None].repeat(1, 8)}, parts=[len(values) // 2] * 2)
        filled = open_folder(folder, "x", make_recipe(source, None))
        put_keys(open_storage(filled.path), [f"k{i}" for i in range(len(values))])
        writer = filled.writer(WriterSettings(shard_bytes=200))
        for i in range(len(values)):
            writer.append([i], {"x": source.fields["x"][i : i + 1]})
        writer.commit()
        return filled.finish()

    base, fixes = (
        made(tmp_path / "a", [float(i) for i in range(30)]),
        made(tmp_path / "b", [-1.0, -2, -3, -4]),
    )

    updated = stoker.open_cache(base.path, updates=fixes)

    assert len(base.index.shards) > 5
    assert updated["x"][:][:, 0].tolist() == [-1, -2, -3, -4, *range(4, 30)]
    assert [v for b in stoker.Loader(updated, 8, tier="disk") for v in b["x"][:, 0].tolist()] == [
        -1, -2, -3, -4, *range(4, 30)]  # fmt: skip


def test_updates_follow_one_another(tmp_path: Path, base: stoker.Cache) -> None:
    first = keyed(tmp_path, {"k1": -1.0, "k2": -2.0}, "first")
    second = keyed(tmp_path, {"k2": -22.0}, "second")
    once = stoker.open_cache(base.path, updates=first)
    twice = stoker.open_cache(base.path, updates=[first, second.path])

    assert [twice[i]["x"][0].item() for i in range(4)] == [0, -1, -22, 3]
    assert len({base.fingerprint, once.fingerprint, twice.fingerprint}) == 3


def test_a_quarantined_sample_is_served_once_it_is_fixed(tmp_path: Path) -> None:
    values = {f"k{i}": float("nan") if i == 3 else float(i) for i in range(6)}
    items = [{"x": torch.full((8,), value)} for value in values.values()]
    source = stoker.TorchSource(items, keys=list(values), version="1")
    base = stoker.precompute(
        source, None, tmp_path, name="holes", max_quarantined=0.5, workers=0, progress=None
    )
    fixed = stoker.TorchSource([{"x": torch.full((8,), 3.0)}], keys=["k3"], version="2")
    fixes = stoker.precompute(fixed, None, tmp_path, name="fixed", workers=0, progress=None)

    updated = stoker.open_cache(base.path, updates=fixes)

    assert len(base) == 5
    assert updated["x"][:][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert updated.quarantined == {}


def test_fixes_that_would_go_by_position_are_refused(tmp_path: Path) -> None:
    """A fix meant for sample 7 has the index 0 in its own cache."""

    def unkeyed(values: Sequence[float], name: str, keys: Sequence[str] | None = None) -> stoker.Cache:
        items = [{"x": torch.tensor([float(value)])} for value in values]
        source = stoker.TorchSource(items, keys=keys, version=name)
        return stoker.precompute(source, None, tmp_path, name=name, workers=0, progress=None)

    base, fix = unkeyed(range(10), "base"), unkeyed([-7.0], "fix")

    with pytest.raises(ConfigError, match=r"fix.* has no keys of its own.*keys=\["):
        stoker.open_cache(base.path, updates=fix)
    base, fix = unkeyed(range(10), "base", [f"k{i}" for i in range(10)]), unkeyed([-7.0], "fix", ["k7"])
    assert stoker.open_cache(base.path, updates=fix)["x"][:].flatten().tolist()[6:] == [6, -7, 8, 9]


def test_columns_of_a_table_stay_in_every_handle_of_an_updated_cache(
    tmp_path: Path, base: stoker.Cache
) -> None:
    fixes = keyed(tmp_path, {"k3": -3.0}, "fixes")
    table = tmp_path / "labels.csv"
    table.write_text("id,label\n" + "".join(f"{i},{i % 5}\n" for i in range(40)))
    join = {"table": table, "key": "id", "columns": ["label"]}

    updated = stoker.open_cache(base.path, updates=fixes, join=join)
    loader = stoker.Loader(updated, 40)

    for one in (updated, pickle.loads(pickle.dumps(updated)), reopen(updated)):
        assert one[3]["label"] == 3
        assert one[3]["x"][0] == -3
    for one in (loader, pickle.loads(pickle.dumps(loader))):
        (batch,) = one
        assert batch["label"].tolist() == [i % 5 for i in range(40)]


def test_columns_of_a_table_stay_when_a_damaged_fix_is_encoded_again(
    tmp_path: Path, base: stoker.Cache
) -> None:
    fixes = keyed(tmp_path, {"k3": -3.0}, "fixes")
    (shard,) = fixes.path.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[bytes(data).rindex(torch.full((8,), -3.0).numpy().tobytes())] ^= 0xFF
    shard.write_bytes(data)
    table = tmp_path / "labels.csv"
    table.write_text("id,label\n" + "".join(f"{i},{i % 5}\n" for i in range(40)))
    join = {"table": table, "key": "id", "columns": ["label"]}

    loader = stoker.Loader(stoker.open_cache(base.path, updates=fixes, join=join), 40, tier="disk")

    for _ in range(2):
        (batch,) = loader
        assert batch["x"][3, 0] == -3
        assert batch["label"].tolist() == [i % 5 for i in range(40)]
    assert loader.repaired == 1
    assert "label" in loader.dataset[3]


def test_a_state_of_the_cache_before_is_refused(tmp_path: Path, base: stoker.Cache) -> None:
    loader = stoker.Loader(base, 4, shuffle=True)
    next(iter(loader))

    updated = stoker.open_cache(base.path, updates=keyed(tmp_path, {"k1": -1.0}, "fixes"))

    with pytest.raises(StaleStateError, match="fingerprint"):
        stoker.Loader(updated, 4, shuffle=True).load_state_dict(loader.state_dict())


def test_a_damaged_fix_is_found(tmp_path: Path, base: stoker.Cache) -> None:
    fixes = keyed(tmp_path, {"k1": -1.0}, "fixes")
    (shard,) = fixes.path.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[bytes(data).rindex(torch.full((8,), -1.0).numpy().tobytes())] ^= 0xFF
    shard.write_bytes(data)

    with pytest.raises(CorruptError, match="fixes"):
        values_of(stoker.open_cache(base.path, updates=fixes.path), tier="disk")


def test_what_is_no_fix_says_so(tmp_path: Path, base: stoker.Cache) -> None:
    with pytest.raises(MissingRecordError, match="'other'"):
        stoker.open_cache(base.path, updates=keyed(tmp_path, {"other": 1.0, "k1": 2.0}, "unknown"))
    with pytest.raises(ConfigError, match="same fields and dtypes"):
        stoker.open_cache(base.path, updates=keyed(tmp_path, {"k1": 1.0}, "narrow", dtype="float16"))


def test_records_of_another_encoder_are_no_fixes(tmp_path: Path) -> None:
    def encoded(name: str, seed: int) -> stoker.Cache:
        torch.manual_seed(seed)
        source = stoker.TorchSource([{"x": torch.ones(4)}] * 3, keys=["a", "b", "c"], version="1")
        encoder = torch.nn.Linear(4, 2).requires_grad_(False)
        return stoker.precompute(source, encoder, tmp_path, name=name, workers=0, progress=None)

    with pytest.raises(ConfigError, match="another encoder"):
        stoker.open_cache(encoded("one", 0).path, updates=encoded("two", 1))
