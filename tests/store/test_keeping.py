"""Whatever is done to a cache in whatever order, and killed on the way: the records stay what they were."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit import forked as subprocess

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_sequences_with_kills_keep_every_record(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.keep_rounds", str(tmp_path / "c"), str(seed), "6"],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 5


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(7300)
def test_a_thousand_random_sequences(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.keep_rounds", str(tmp_path / "c"), "2", "1000"],
        cwd=ROOT, capture_output=True, text=True, timeout=7200,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
