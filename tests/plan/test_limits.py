from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.plan import rates
from stoker.units import MIB

SHORT_S = 0.01


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b")]
    for file in found:
        file.write_bytes(bytes(2 * MIB))
    return found


def test_every_limit_is_measured(files: list[Path]) -> None:
    for limit in (
        rates.copy_limit(),
        rates.gather_limit(1024, 16, source_bytes=MIB),
        rates.random_limit(files, 5000),
        rates.random_limit(files, 5000, cached=True),
    ):
        assert limit(SHORT_S) > 0


def test_files_without_a_whole_block_have_no_limit(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")

    assert rates.sequential_limit([tmp_path / "tiny"])(SHORT_S) == 0


def test_small_files_are_read_over_and_over(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is smaller than what fits in the time would otherwise look slow."""
    now_s = iter(range(10_000))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(now_s) * 1e-3)

    assert rates.random_limit(files, MIB)(0.1) * 0.1 > sum(file.stat().st_size for file in files)


def test_the_number_of_threads_is_as_before() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    rates._repeat(lambda: seen.append(torch.get_num_threads()), 1, SHORT_S)

    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_nothing_is_written(files: list[Path]) -> None:
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}
    rates.sequential_limit(files)(SHORT_S)
    rates.drop_from_page_cache(files)

    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files} == before
    assert sorted(files[0].parent.iterdir()) == files
