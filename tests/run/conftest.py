"""Raw files by split and settings over them, without a settings file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.config import Config, load_config
from tests.conftest import write_burgers

Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Makes settings from `key=value`; the working directory has raw files of a train and a val split."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    write_burgers(tmp_path / "raw" / "burgers1d_train.h5")
    write_burgers(tmp_path / "raw" / "burgers1d_val.h5", samples=4, seed=1)
    own = {
        "data.root": "raw", "latent.dim": "8", "latent.tokens": "4", "precompute.workers": "0",
        "training.device": "cpu", "training.batch_size": "16", "training.epochs": "2",
        "model.width": "16", "model.depth": "1", "model.heads": "2",
    }  # fmt: skip

    def make(*overrides: str) -> Config:
        given = {text.partition("=")[0] for text in overrides}
        kept = [f"{key}={value}" for key, value in own.items() if key not in given]
        return load_config(None, [*kept, *overrides])

    return make
