"""Compressed chunks are decoded about once, whatever the workers and however groups lie across them."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from stoker.precompute import PrecomputeSettings, run_precompute
from tests.precompute.counted_hdf5 import CountedHDF5, decoded_rows

ROWS, CHUNK = 13 * 20 - 5, 13


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Rows of chunks of 13 samples and about 8 MiB each, so that a run is one row of chunks."""
    path = tmp_path_factory.mktemp("compressed") / "u.h5"
    with h5py.File(path, "w") as file:
        shape = (ROWS, 20, 8192)
        data = file.create_dataset("u", shape, "f4", chunks=(CHUNK, 20, 1024), compression="gzip")
        for first in range(0, ROWS, CHUNK):
            stop = min(first + CHUNK, ROWS)
            data[first:stop] = np.full((stop - first, *shape[1:]), first, "f4")
    return path


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_each_chunk_is_decoded_at_most_1_1_times_in_all_workers_together(tmp_path, compressed, workers):
    log = tmp_path / "log"
    source = CountedHDF5(compressed, log, fields={"u": "n t x"})
    assert max(map(len, source.runs())) == CHUNK
    settings = PrecomputeSettings(workers=workers, progress=None)

    report = run_precompute(source, None, tmp_path / "cache", name="c", settings=settings)
    assert report.cache.recipe.encode_batch.samples == 6

    rows = decoded_rows(log)
    assert 1 <= len(rows) <= workers
    assert set().union(*rows.values()) == set(range(ROWS))
    assert sum(map(len, rows.values())) <= 1.1 * ROWS
