"""Questions about a cache are answered from what is in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.compat import (
    build_latent_pair_loader,
    check_cache_complete,
    check_sufficient_ram,
    compute_cache_hash,
    estimate_cache_size_mb,
)
from stoker.errors import SourceError
from stoker.plan import probe


def test_complete_is_what_the_index_counts_not_files(earlier: dict[str, Any], tmp_path: Path) -> None:
    build_latent_pair_loader(earlier)
    (tmp_path / "junk").mkdir()
    for number in range(12):
        (tmp_path / "junk" / f"sample_{number:05d}.pt").write_text("dummy")

    assert check_cache_complete("cache/burgers1d_train", 12) == (True, 12)
    assert check_cache_complete("cache/burgers1d_train", 13) == (False, 12)
    assert check_cache_complete("cache/nowhere", 1) == (False, 0)
    assert check_cache_complete("junk", 12) == (False, 0)
    with pytest.raises(SourceError, match=r"junk/sample_00000\.pt is not a sample.*stoker cache adopt"):
        estimate_cache_size_mb("junk")


def test_the_size_is_that_in_memory(earlier: dict[str, Any], tmp_path: Path) -> None:
    build_latent_pair_loader(earlier)
    ragged = [{"x": torch.ones(i + 1, 4), "y": i} for i in range(6)]
    loader = stoker.cached(
        ragged, name="r", cache_dir=tmp_path / "r", device="cpu", precompute={"workers": 0}, shuffle=True
    )

    size = estimate_cache_size_mb("cache/burgers1d_train")

    assert size * 2**20 == 12 * (9 * 4 * 8 * 2 + 4)  # latents in two bytes, and the parameter
    assert estimate_cache_size_mb(loader.dataset.path, num_samples=2) * 2**20 == 21 * 16 + 6 * 8


def test_memory_is_what_this_process_may_take() -> None:
    free_mb = probe().host_bytes / 2**20

    assert check_sufficient_ram(free_mb / 4)
    assert not check_sufficient_ram(free_mb * 2)
    assert not check_sufficient_ram(free_mb / 4, safety_margin=9)


def test_the_hash_changes_with_all_that_counts_and_nothing_else(earlier: dict[str, Any]) -> None:
    def hashed(section: str, name: str, value: object) -> str:
        changed = copy.deepcopy(earlier)
        changed[section][name] = value
        return compute_cache_hash(changed)

    first = compute_cache_hash(earlier)

    assert len(first) == 12
    assert first == compute_cache_hash(copy.deepcopy(earlier)) == hashed("training", "batch_size", 7)
    others = [
        hashed("latent", "dim", 16), hashed("data", "patch_size", 8), hashed("data", "split", "val"),
        hashed("training", "latent_cache_dtype", "float32"),
    ]  # fmt: skip
    assert len({first, *others}) == 5
    Path("raw/burgers1d_train.h5").write_bytes(Path("raw/burgers1d_val.h5").read_bytes())
    assert compute_cache_hash(earlier) != first
