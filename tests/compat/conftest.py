"""Raw files by split, settings under the earlier names, and a cache made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_burgers


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings as the earlier systems wrote them; the working directory has the raw files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    write_burgers(tmp_path / "raw" / "burgers1d_train.h5")
    write_burgers(tmp_path / "raw" / "burgers1d_val.h5", samples=4, seed=1)
    return {
        "data": {"task": "burgers1d", "root": "raw", "patch_size": 4},
        "latent": {"dim": 8, "tokens": 4},
        "training": {
            "batch_size": 3, "num_workers": 0, "latent_cache_dir": "cache", "latent_cache_dtype": "float16",
            "time_stride": 2, "rollout_horizon": 2, "pin_memory": True, "prefetch_factor": 2, "device": "cpu",
        },
    }  # fmt: skip
