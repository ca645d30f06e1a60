from pathlib import Path

import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.sources import hdf5_open
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.hdf5_fields import Piece
from stoker.sources.hdf5_open import BLOCK_LIMIT_BYTES, plan_block
from stoker.units import MIB


def bytes_read() -> int:
    """Bytes this process has asked the kernel for: HDF5 reads a chunk's bytes each time it decodes it."""
    return int(Path("/proc/self/io").read_text().split()[1])


def piece(shape: tuple, chunks: tuple | None, axes: str = "n t x") -> Piece:
    return Piece(dataset="d", axes=tuple(axes.split()), shape=shape, dtype="float32", chunks=chunks)


@pytest.fixture
def noise(write):
    """A gzip file with h5py's default chunks, which cut samples and time alike."""
    values = np.random.default_rng(0).standard_normal((120, 101, 256)).astype("float32")
    return write("noise.h5", {"tensor": values}, gzip=True), values


@pytest.mark.parametrize("step", [101, 30], ids=["whole", "pieces-along-time"])
def test_each_chunk_is_decompressed_once(noise, step: int) -> None:
    path, values = noise
    source = HDF5Source(path, preset="pdebench")
    assert len(source.runs()) > 1
    source.read(0)
    source.close()

    before = bytes_read()
    for run in source.runs():
        for number in run:
            for start in range(0, 101, step):
                part = source.read(number, start, start + step)["data"]
                np.testing.assert_array_equal(part[:, 0, :, 0], values[number, start : start + step])

    assert bytes_read() - before <= 1.1 * path.stat().st_size


def test_chunk_touches_are_counted_call_by_call(noise, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same claim without the kernel's counter: chunks that each call into HDF5 intersects."""
    path, _ = noise
    touched: dict[tuple, int] = {}
    fetch = hdf5_open.fetch

    def counting(dataset, selection, out) -> None:
        spans = [
            range(s.start // c, (s.stop - 1) // c + 1) for s, c in zip(selection, dataset.chunks, strict=True)
        ]
        for chunk in np.stack(np.meshgrid(*spans), axis=-1).reshape(-1, len(spans)):
            touched[tuple(chunk)] = touched.get(tuple(chunk), 0) + 1
        fetch(dataset, selection, out)

    monkeypatch.setattr(hdf5_open, "fetch", counting)
    source = HDF5Source(path, preset="pdebench")
    for number in range(len(source)):
        source.read(number)

    assert set(touched.values()) == {1}


def test_runs_end_where_rows_of_chunks_end(noise) -> None:
    path, _ = noise
    rows = HDF5Source(path).runs()[0].stop
    import h5py

    with h5py.File(path) as file:
        assert rows % file["tensor"].chunks[0] == 0


def test_a_split_reads_only_its_rows_and_keeps_runs_aligned(noise) -> None:
    path, values = noise
    source = HDF5Source(path, split="val", seed=3)
    rows = [int(key.rsplit(":", 1)[1]) for key in list(source.keys())]

    for number, row in enumerate(rows):
        np.testing.assert_array_equal(source.read(number)["data"][:, 0, :, 0], values[row])
    assert rows == sorted(rows)


def test_large_samples_are_read_in_pieces_without_holding_them() -> None:
    """(T=1000, 1024 x 1024): 4 GiB a sample, one sample a chunk."""
    block = plan_block(piece((4, 1000, 1024, 1024), (1, 1, 1024, 1024), "n t x y"), {}, BLOCK_LIMIT_BYTES)

    assert (block.samples, block.steps, block.redundancy) == (1, 2, 1)


@pytest.mark.parametrize(
    ("shape", "chunks", "expected"),
    [
        pytest.param((10_000, 201, 1024), None, (1, 1, 1), id="contiguous-is-read-directly"),
        pytest.param((10_000, 201, 1024), (313, 7, 32), (313, None, 1), id="default-chunks-whole-row"),
        pytest.param((10_000, 16, 32), None, (512, None, 1), id="small-samples-together"),
        pytest.param((100_000, 201, 1024), (5000, 7, 32), (625, None, 8), id="row-too-large-is-divided"),
        pytest.param((50, 201, 1024), (1, 201, 1024), (10, None, 1), id="one-sample-a-chunk"),
    ],
)
def test_block_plans(shape: tuple, chunks: tuple | None, expected: tuple) -> None:
    block = plan_block(piece(shape, chunks), {}, BLOCK_LIMIT_BYTES)

    assert (block.samples, block.steps, block.redundancy) == expected


def test_blocks_never_exceed_their_limit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 400, size=4))
        chunks = tuple(int(rng.integers(1, n + 1)) for n in shape)
        strides = {"t": int(rng.integers(1, 4))}
        limit = int(rng.integers(1, 64)) * MIB
        found = piece(shape, chunks, "n t x y")
        block = plan_block(found, strides, limit)
        unit = (
            chunks[1] * strides["t"] * shape[2] * shape[3] * 4
        )  # one row of chunks of one sample is the floor
        assert hdf5_open.block_bytes(found, block, strides) <= max(limit, unit)


def test_a_row_of_chunks_beyond_the_limit_still_reads_right(
    noise, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    path, values = noise
    monkeypatch.setattr("stoker.sources.hdf5.BLOCK_LIMIT_BYTES", 512 * 1024)
    source = HDF5Source(path)

    np.testing.assert_array_equal(source.read(7, 13, 57)["data"][:, 0, :, 0], values[7, 13:57])
    assert source.buffer_bytes <= 512 * 1024
    assert "each chunk is decompressed" in caplog.text


def test_one_bad_chunk_costs_only_its_samples(write) -> None:
    """Blocks span samples; a damaged chunk must not quarantine the neighbors that it does not hold."""
    import h5py

    values = np.random.default_rng(0).standard_normal((16, 40, 8)).astype("float32")
    path = write("bad.h5", {"tensor": values}, gzip=True, chunks={"tensor": (2, 40, 8)})
    with h5py.File(path) as file:
        chunk = file["tensor"].id.get_chunk_info_by_coord((6, 0, 0))
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + 20 : chunk.byte_offset + 60] = b"\0" * 40
    path.write_bytes(data)
    source = HDF5Source(path)

    for number in range(16):
        if number in (6, 7):
            with pytest.raises(SourceError, match=f"bad.h5: row {number}: dataset 'tensor' cannot be read"):
                source.read(number)
        else:
            np.testing.assert_array_equal(source.read(number)["data"][:, 0, :, 0], values[number])
