from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ResourceError, StalledError
from stoker.plan import Rates, measure_rates, rates

MIB = 2**20


def test_copies_and_reads_are_timed(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "shard").write_bytes(bytes(16 * MIB))

    found = measure_rates(tmp_path)

    assert found.measured
    assert found.copy_bytes_s not in (0, Rates().copy_bytes_s)
    assert found.disk_bytes_s not in (0, Rates().disk_bytes_s)
    assert found.h2d_bytes_s == Rates().h2d_bytes_s


@pytest.mark.parametrize("name", ["nothing here", "tiny"])
def test_without_enough_to_read_the_disk_stays_typical(name: str, tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")

    assert measure_rates(tmp_path / name).disk_bytes_s == Rates().disk_bytes_s


def test_storage_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(_: Any) -> None:
        time.sleep(5)

    monkeypatch.setattr(rates, "_disk_rate", hang)
    monkeypatch.setattr(rates, "TIMEOUT_S", 0.05)

    with pytest.raises(StalledError, match="did not answer"):
        measure_rates(tmp_path)


def test_a_gpu_that_is_not_there_is_not_timed() -> None:
    if pytest.importorskip("torch").cuda.device_count() > 31:
        pytest.skip("there is such a GPU")

    with pytest.raises(ResourceError, match="is not there"):
        measure_rates(device="cuda:31")


@pytest.mark.gpu
def test_a_gpu_copies_faster_within_than_from_the_host() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA device")

    found = measure_rates(device="cuda")

    assert found.device_bytes_s > found.h2d_bytes_s
