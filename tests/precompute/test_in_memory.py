"""A cache in memory: served like any other, within the limits, and gone with its loader."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import stoker
from stoker.cached import SHARED_MEMORY, MemoryFolder
from stoker.errors import ConfigError, ResourceError
from stoker.plan import resources
from tests.kit import forked as subprocess

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no memory file system")


def left() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"stoker-{os.getuid()}-*"))


def cached(**changes: object) -> stoker.Loader:
    dataset = torch.utils.data.TensorDataset(torch.arange(4000.0).view(1000, 4))
    settings = {
        "shuffle": True,
        "device": "cpu",
        "batch_size": 100,
        "precompute": {"workers": 0},
        "seed": 1,
        **changes,
    }
    return stoker.cached(dataset, **settings)  # type: ignore[arg-type]


def test_it_is_served_like_one_on_disk_and_goes_with_its_loader(tmp_path: Path) -> None:
    loader = cached(cache_dir=None)

    assert loader.dataset.path.is_relative_to(SHARED_MEMORY)
    for one, other in zip(loader, cached(cache_dir=tmp_path), strict=True):
        assert torch.equal(one[0], other[0])
    assert loader.dataset.complete
    folder = loader.dataset.path.parent.parent
    batch = next(iter(loader))
    del loader
    gc.collect()

    assert not folder.exists()
    assert batch[0].shape == (100, 4)


def test_what_does_not_fit_is_refused_before_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory file system may be larger than what this process may use."""
    before = left()
    monkeypatch.setattr(resources, "IN_MEMORY", 1e-9)

    with pytest.raises(ResourceError, match=r"/dev/shm/stoker-.* free, 1,000 records need"):
        cached(cache_dir=None)
    assert left() <= before


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next() -> None:
    code = (
        "import sys, time\nfrom stoker.cached import MemoryFolder\n"
        "print(MemoryFolder().path, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        first = MemoryFolder()
        assert folder.is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait(30)

    second = MemoryFolder()

    assert not folder.exists()
    assert first.path.is_dir()
    for one in (first, second):
        one.remove()
        one.remove()
    assert not first.path.exists()


def test_without_memory_to_write_to_a_folder_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache_dir=None .* Give a folder, as cache_dir='\.stoker'"):
        MemoryFolder(tmp_path / "nowhere")
