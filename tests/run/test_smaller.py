"""What a smaller storage dtype would buy and cost, said before anybody encodes anything again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from stoker.plan import probe
from stoker.run import plan as plan_module
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.precompute import fill_caches
from tests.run.conftest import Configure

WIDE = ("latent.dim=32", "latent.tokens=4", "training.latent_cache_dtype=float32")


def by_dtype(result: Any) -> dict[str, Any]:
    return {one.dtype: one for one in result.smaller}


def test_bytes_and_errors_are_what_storing_so_really_comes_to(configure: Configure) -> None:
    fill_caches(Run(configure(*WIDE)), ["train"])

    told = by_dtype(plan_config(Run(configure(*WIDE))))

    assert [*told] == ["float16", "int8", "float8_e4m3fn"]
    for dtype, one in told.items():
        (made,) = fill_caches(Run(configure(*WIDE[:2], f"training.latent_cache_dtype={dtype}")), ["train"])
        records = made.cache.recipe.columns
        assert one.bytes == len(made.cache) * sum(f.size_bytes() for f in records.values())
        error = made.cache.index.error["latent"]
        # eight of twelve records were looked at
        assert 0.8 * error["max"] <= one.max_error <= error["max"]
        assert 0.8 * error["rms"] <= one.rms_error <= error["rms"]
        assert one.samples == 8


def test_before_encoding_bytes_are_known_and_errors_are_not(configure: Configure) -> None:
    result = plan_config(Run(configure(*WIDE)))

    assert by_dtype(result)["int8"].max_error is None
    assert by_dtype(result)["int8"].bytes < result.plan.to_json()["bytes"]  # type: ignore[operator]
    assert "known once some records are encoded" in result.advice


def test_it_says_which_tier_the_records_would_fit(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the records fit in memory as float32; all of them do as int8."""
    fill_caches(Run(configure(*WIDE)), ["train"])
    size = plan_config(Run(configure(*WIDE))).plan.to_json()["bytes"]
    assert isinstance(size, int)
    monkeypatch.setattr(
        plan_module,
        "probe",
        lambda **given: replace(probe(**given), host_bytes=size // 2, host_total_bytes=size),
    )

    result = plan_config(Run(configure(*WIDE, "training.reserve_bytes=0")))

    assert result.plan.records_by_tier()["disk"] == 6
    assert by_dtype(result)["int8"].plan.records_by_tier()["host"] == 12
    assert "latent_cache_dtype=int8 would take" in result.advice
    assert "12 records on the host tier instead of 6" in result.advice
    assert result.to_json()["smaller"][1]["tiers"]["host"] == 12  # type: ignore[index,call-overload]


def test_the_bound_that_was_set_is_kept(configure: Configure) -> None:
    fill_caches(Run(configure(*WIDE)), ["train"])

    assert "=int8 " in plan_config(Run(configure(*WIDE, "precompute.max_error=0.01"))).advice
    assert "limit you set: 0.01" in plan_config(Run(configure(*WIDE, "precompute.max_error=0.01"))).advice
    assert "=float16 " in plan_config(Run(configure(*WIDE, "precompute.max_error=0.001"))).advice
    assert plan_config(Run(configure(*WIDE, "precompute.max_error=1e-9"))).advice == ""


def test_a_cache_at_an_address_is_planned_through_its_local_copy(
    configure: Configure, tmp_path: Path
) -> None:
    at = (*WIDE, f"training.latent_cache_dir=file://{tmp_path}/share")
    fill_caches(Run(configure(*at)), ["train"])

    whole = plan_config(Run(configure(*at))).reason
    small = plan_config(Run(configure(*at, "training.mirror_bytes=4096"))).reason

    assert f"from file://{tmp_path}/share/" in whole
    assert "through a local cache of all" in whole
    assert "through a local cache of 4.0 KiB of" in small


def test_nothing_is_smaller_than_what_is_packed(configure: Configure) -> None:
    assert plan_config(Run(configure(*WIDE[:2], "training.latent_cache_dtype=int8"))).smaller == ()


def test_a_dtype_that_does_not_pay_is_not_tried(configure: Configure) -> None:
    raw = configure("encoder.kind=identity", "training.latent_cache_dtype=float32")

    assert [*by_dtype(plan_config(Run(raw)))] == ["float16"]


def test_a_dtype_that_cannot_hold_the_records_is_told_and_not_advised(
    configure: Configure, tmp_path: Path
) -> None:
    for name in ("train", "val"):
        with h5py.File(tmp_path / "raw" / f"burgers1d_{name}.h5", "r+") as file:
            file["tensor"][...] = np.asarray(file["tensor"]) * np.float32(1e6)
    fill_caches(Run(configure(*WIDE)), ["train"])

    result = plan_config(Run(configure(*WIDE, "precompute.max_error=0.001")))

    assert "float16 ends at" in by_dtype(result)["float16"].refused
    assert by_dtype(result)["int8"].refused == ""
    assert result.advice == ""
