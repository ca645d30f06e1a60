"""Data that a source holds in memory is there once for each reader, and bounds how many there may be."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.errors import ResourceError
from stoker.plan.resources import Resources
from stoker.precompute import engine
from stoker.precompute import run as run_module
from stoker.precompute.checks import fit_copies
from stoker.precompute.settings import PrecomputeSettings
from stoker.schema import Field
from stoker.store.storage import attach_mirror
from stoker.units import GIB, MIB


class Held:
    """A Dataset that holds its data: 8 MiB."""

    def __init__(self) -> None:
        self.items = [np.full((1 << 14,), float(n)) for n in range(64)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> dict[str, float]:
        return {"value": float(self.items[number][0])}


def free(mib: int) -> Resources:
    return Resources(host_bytes=mib * MIB, host_total_bytes=mib * MIB, host_limit="machine memory", cpus=8)


@pytest.mark.parametrize(
    ("mib", "asked", "left", "most"),
    [
        (1024, None, None, 15),
        (400, None, None, 5),
        (400, 8, 5, 5),
        (400, 3, 3, 5),
        (64, None, 0, 0),
        (64, 2, 0, 0),
    ],
)
def test_workers_are_as_many_as_there_may_be_copies(
    mib: int, asked: int | None, left: int | None, most: int
) -> None:
    settings = PrecomputeSettings(workers=asked)

    found, copies = fit_copies(8 * MIB, settings, free(mib), wanted=asked or 15)

    assert (found.workers, copies) == (left, most)


def test_a_dataset_too_large_for_copies_is_read_in_this_process_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = run_module.probe
    small = free(4 * 8 + 1)

    def low(**where: Path) -> Resources:
        return replace(real(**where), host_bytes=small.host_bytes)

    monkeypatch.setattr(run_module, "probe", low)
    monkeypatch.setattr(run_module, "fit_memory", lambda _a, _b, settings, _c: (settings, 1))
    monkeypatch.setattr(stoker.TorchSource, "check_in_child", lambda _: pytest.fail("a copy was made"))

    with caplog.at_level(logging.WARNING, "stoker"):
        report = engine.run_precompute(
            stoker.TorchSource(Held()),
            None,
            tmp_path,
            name="held",
            settings=PrecomputeSettings(progress=None),
        )

    assert (report.workers, report.records) == (0, 64)
    assert float(report.cache[5]["value"]) == 5.0
    assert "holds 8.0 MiB in memory" in caplog.text
    assert "read in this process" in caplog.text


def test_a_source_that_holds_little_is_read_as_before(caplog: pytest.LogCaptureFixture) -> None:
    settings = PrecomputeSettings()

    assert fit_copies(1000, settings, free(1024), wanted=64)[0] is settings
    assert not caplog.records


def test_a_cache_at_an_address_may_be_larger_than_the_disk_that_its_mirror_is_on(tmp_path: Path) -> None:
    schema = {"x": Field(shape=(256, 1024), dtype="float32")}
    root = attach_mirror(f"file://{tmp_path / 'there'}", tmp_path / "here", 64 * MIB)
    disk = replace(free(1024), disk_bytes=2 * GIB, disk_inodes=1000)

    engine.check_space(root / "x" / "0123456789abcdef", schema, 100_000, disk)

    with pytest.raises(ResourceError, match="Make room"):
        engine.check_space(tmp_path / "plain", schema, 100_000, disk)
