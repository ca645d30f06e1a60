from __future__ import annotations

import errno
from typing import Any

import pytest

from stoker.errors import IncompleteError
from stoker.run.context import Run
from stoker.run.precompute import fill_caches, precompute_config, wanted_splits
from stoker.run.train import prepare
from stoker.sources.hdf5 import HDF5Source
from tests.run.conftest import Configure


@pytest.fixture
def flaky(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A train cache of which sample 3 is set aside: its disk failed for a while."""
    fill_caches(Run(configure()), ["val"])
    read = HDF5Source.read

    def fail(self: HDF5Source, number: int, *args: Any) -> Any:
        if number == 3:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, number, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HDF5Source, "read", fail)
        result = fill_caches(Run(configure("precompute.max_quarantined=0.5")), ["train"])[0]
    assert [failure["number"] for failure in result.failures] == [3]


def test_training_takes_the_cache_as_it_is(configure: Configure, flaky: None) -> None:
    caches = prepare(Run(configure("precompute.max_quarantined=0.5"))).caches

    assert (caches[0].encoded, len(caches[0].cache)) == (0, 11)


def test_precompute_tries_once_more_what_failed_for_a_passing_reason(
    configure: Configure, flaky: None
) -> None:
    cache = precompute_config(Run(configure("precompute.max_quarantined=0.5"))).caches[0]

    assert (cache.encoded, cache.reused, len(cache.failures)) == (1, 11, 0)


def test_training_refuses_more_quarantined_samples_than_allowed(
    configure: Configure, flaky: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HDF5Source, number: int, *args: Any) -> Any:
        raise ValueError("never read")

    monkeypatch.setattr(HDF5Source, "read", fail)

    with pytest.raises(IncompleteError, match="quarantined"):
        prepare(Run(configure("precompute.max_quarantined=0.01")))


def test_precompute_makes_what_training_needs(configure: Configure) -> None:
    assert wanted_splits(Run(configure())) == ["train", "val"]
    assert wanted_splits(Run(configure("data.split=val"))) == ["val"]
    assert wanted_splits(Run(configure("data.split=[train,valid]"))) == ["train", "val"]

    precompute_config(Run(configure()))

    assert [cache.encoded for cache in prepare(Run(configure())).caches] == [0, 0]


def test_several_tasks_have_caches_of_their_own(configure: Configure) -> None:
    import shutil

    for split in ("train", "val"):
        shutil.copyfile(f"raw/burgers1d_{split}.h5", f"raw/advection_{split}.h5")

    caches = precompute_config(Run(configure("data.task=[burgers1d,advection]"))).caches

    assert [c.name for c in caches] == [
        "burgers1d_train",
        "burgers1d_val",
        "advection_train",
        "advection_val",
    ]
