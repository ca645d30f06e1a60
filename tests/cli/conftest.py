"""A small project folder: raw files by split, and a settings file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_burgers

SETTINGS = """\
data:
  task: burgers1d
  root: raw
latent: {dim: 8, tokens: 4}
model: {width: 16, depth: 1, heads: 2}
training:
  epochs: 2
  batch_size: 16
  num_workers: 0
  device: cpu
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `c.yaml` and raw files of a train and a val split."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    write_burgers(tmp_path / "raw" / "burgers1d_train.h5")
    write_burgers(tmp_path / "raw" / "burgers1d_val.h5", samples=4, seed=1)
    (tmp_path / "c.yaml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture(autouse=True)
def no_thread_waits_for_our_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command run in this process would leave one behind; `tests/test_exit.py` runs it in its own."""
    monkeypatch.setattr("stoker.cli.command._end_in_time", lambda _: None)
