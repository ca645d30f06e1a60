"""The unit tests that the start-up plan of the latent cache named, written anew from what they did."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stoker.compat import (
    PreloadedCacheDataset,
    RawFieldDataset,
    build_latent_pair_loader,
    check_cache_complete,
    check_cache_valid,
    check_sufficient_ram,
    compute_cache_hash,
    estimate_cache_size_mb,
    latent_pair_collate,
    save_cache_metadata,
    validate_cache,
    validate_ram_for_cache,
)
from stoker.errors import SourceError
from stoker.run.validate import CheckRow

SETTINGS: dict[str, Any] = {
    "latent": {"dim": 32, "tokens": 16},
    "encoder": {"patch_size": 4},
    "data": {"task": "burgers1d", "root": "data/pdebench"},
}


def with_setting(section: str, name: str, value: object) -> dict[str, Any]:
    return {**SETTINGS, section: {**SETTINGS.get(section, {}), name: value}}


def write_samples(folder: Path, count: int, *, steps: int = 10, **more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        torch.manual_seed(number)
        latent = torch.randn(steps, 16, 32)
        torch.save({"latent": latent, "params": None, "bc": None, **more}, folder / f"sample_{number:05d}.pt")
    return folder


def statuses(rows: list[CheckRow]) -> Mapping[str, str]:
    return {row.check: row.status for row in rows}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_hash_deterministic(caplog: pytest.LogCaptureFixture) -> None:
    """Without any data on disk the settings alone are hashed, and a line says so."""
    with caplog.at_level("INFO", "stoker"):
        first = compute_cache_hash(SETTINGS)

    assert first == compute_cache_hash(json.loads(json.dumps(SETTINGS)))
    assert len(first) == 12
    int(first, 16)
    assert any("of the settings alone" in line and "data/pdebench" in line for line in caplog.messages)


def test_hash_changes_with_config() -> None:
    others = [
        with_setting("latent", "dim", 64),
        with_setting("latent", "tokens", 8),
        with_setting("encoder", "patch_size", 8),
        with_setting("data", "task", "advection1d"),
        with_setting("data", "root", "elsewhere"),
        with_setting("training", "latent_cache_dtype", "float32"),
    ]

    hashes = {compute_cache_hash(settings) for settings in [SETTINGS, *others]}

    assert len(hashes) == 7
    same = with_setting("training", "batch_size", 99)
    assert compute_cache_hash(same) == compute_cache_hash(SETTINGS)
    both = [with_setting("data", "task", tasks) for tasks in (["a", "b"], ["b", "a"])]
    assert compute_cache_hash(both[0]) == compute_cache_hash(both[1])


def test_completeness_check(caplog: pytest.LogCaptureFixture) -> None:
    folder = write_samples(Path("cache/burgers1d_train"), 10)

    assert check_cache_complete(folder, 10) == (True, 10)
    assert check_cache_complete(folder, 11) == (False, 10)
    (folder / "sample_00003.pt").unlink()
    assert check_cache_complete(folder, 10) == (False, 9)
    # The plan's own test wrote text into the files and took them for complete: such a file does not count.
    (folder / "sample_00003.pt").write_text("dummy")
    cut = folder / "sample_00004.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert check_cache_complete(folder, 10) == (False, 8)
    assert any("sample_00003.pt is not a complete file" in line for line in caplog.messages)


def test_size_estimation() -> None:
    folder = write_samples(Path("cache/burgers1d_train"), 6)
    own = 10 * 16 * 32 * 4 / 2**20

    assert estimate_cache_size_mb(folder) == pytest.approx(6 * own)
    assert estimate_cache_size_mb(folder, num_samples=1) == pytest.approx(6 * own)


def test_ram_sufficiency() -> None:
    assert check_sufficient_ram(1.0)
    assert not check_sufficient_ram(1e9)


def test_preloaded_cache_dataset() -> None:
    more = {"params": {"nu": torch.tensor(0.1)}, "bc": {"left": torch.arange(2.0), "kind": "periodic"}}
    folder = write_samples(Path("cache/burgers1d_train"), 5, **more)

    dataset = PreloadedCacheDataset(folder, num_samples=5, time_stride=2, rollout_horizon=2)

    assert len(dataset) == 5
    pair, stored = dataset[3], torch.load(folder / "sample_00003.pt", weights_only=True)["latent"]
    assert torch.equal(pair.z0, stored[::2][:3])
    assert torch.equal(pair.z1, stored[::2][1:4])
    assert pair.future is not None
    assert torch.equal(pair.future[:, 0], stored[::2][2:5])
    assert pair.cond["param_nu"].shape == (3, 1)
    assert pair.cond["bc_left"].tolist() == [[0, 1]] * 3
    assert pair.task_name == "burgers1d"
    batch = next(iter(DataLoader(dataset, batch_size=2, collate_fn=latent_pair_collate)))
    assert batch["z0"].shape == (6, 16, 32)
    with pytest.raises(ValueError, match="Cache incomplete: 5/6"):
        PreloadedCacheDataset(folder, num_samples=6)
    raw = RawFieldDataset([{"data": torch.zeros(10, 1, 8, 1)}] * 6, folder)
    assert torch.equal(raw[3]["latent"], stored)
    assert raw[3]["cache_path"] == str(folder / "sample_00003.pt")
    assert not raw[5]["cached"]


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def test_a_file_with_code_in_it_is_refused_by_name() -> None:
    folder = write_samples(Path("cache/burgers1d_train"), 3)
    torch.save({"latent": torch.zeros(2, 1, 1), "params": Harmful()}, folder / "sample_00001.pt")

    with pytest.raises(SourceError, match=r"sample_00001\.pt"):
        PreloadedCacheDataset(folder, num_samples=3)
    assert not Path("harm").exists()


def test_cache_persistence_across_runs(earlier: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Generate, reuse, change a setting, which is another cache; then delete the raw data."""
    assert statuses(validate_cache(earlier)) == {"cache dir": "warn"}
    assert [row.detail for row in validate_ram_for_cache(earlier)] == ["skipped (no cache)"]
    first = build_latent_pair_loader(earlier).dataset.path
    saved = save_cache_metadata("cache", earlier)

    with caplog.at_level("INFO", "stoker"):
        assert check_cache_valid("cache", earlier)
        assert build_latent_pair_loader(earlier).dataset.path == first
        changed = {**earlier, "latent": {"dim": 16, "tokens": 4}}
        assert not check_cache_valid("cache", changed)
        assert build_latent_pair_loader(changed).dataset.path != first

    known = json.loads(saved.read_text())
    assert known["config_hash"] == compute_cache_hash(earlier)
    assert (known["latent_dim"], known["latent_tokens"], known["data_task"]) == (8, 4, "burgers1d")
    own = known["config_hash"]
    assert f"Cache valid (hash={own}, age=0.0h)" in caplog.messages
    assert any(line.startswith(f"Cache invalid (hash mismatch: {own} != ") for line in caplog.messages)
    assert set(statuses(validate_cache(earlier)).values()) == {"pass"}
    assert "RAM sufficient" in validate_ram_for_cache(earlier)[0].detail
    for file in Path("raw").iterdir():
        file.unlink()
    assert check_cache_valid("cache", earlier)
    assert not check_cache_valid("cache", changed)
    assert statuses(validate_cache(earlier))["cache burgers1d_train"] == "pass"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"config_hash": "a", "generated_at": "soon"}'])
def test_metadata_that_is_none_is_invalid_and_fails_its_row(text: str) -> None:
    Path("cache").mkdir()
    Path("cache/.cache_metadata.json").write_text(text)
    settings = with_setting("training", "latent_cache_dir", "cache")

    assert not check_cache_valid("cache", settings)
    assert statuses(validate_cache(settings))["cache metadata"] == "fail"
    assert not check_cache_valid("nowhere", settings)
