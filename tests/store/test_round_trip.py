"""What goes in comes out, bit by bit, whatever the schema, the order, the sizes and the shards."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from safetensors import safe_open

from stoker.loader.tiers import MemorySink
from stoker.schema import DTYPE_BYTES, FLOATS, QUANTIZED_DTYPES, Field, Schema
from stoker.store import Cache, WriterSettings, make_recipe, open_cache, open_folder
from stoker.store.values import unpack
from tests.kit.amount import example_count
from tests.store.fakes import FakeSource, assert_whole, batch_of, bits, expected, make_cache

SIZES = st.integers(0, 4)


@st.composite
def fields(draw: st.DrawFn) -> Field:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES.keys() - {"float8_e4m3fn"})))
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    if shape and draw(st.booleans()):
        # A long axis 0 spans several blocks: 16 KiB hold 2,048 steps of 8 bytes.
        shape = (draw(st.sampled_from([1, 3, 2500])), *shape[1:])
    ragged = bool(shape) and draw(st.booleans())
    time = bool(shape) and draw(st.booleans())
    return Field(shape=(-1, *shape[1:]) if ragged else shape, dtype=dtype, time=time, ragged=ragged)


@st.composite
def caches(draw: st.DrawFn) -> tuple[Schema, list[tuple[str, int]], dict[str, str]]:
    schema = draw(
        st.dictionaries(st.sampled_from(["z", "a", "été", "x.y", "b"]), fields(), min_size=1, max_size=3)
    )
    parts = [
        (f"p{i}", count) for i, count in enumerate(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    ]
    floats = [name for name, field in schema.items() if field.dtype in FLOATS]
    dtypes = {
        name: draw(
            st.sampled_from(
                ["float32", "float16", "bfloat16", *(QUANTIZED_DTYPES if schema[name].step_shape else ())]
            )
        )
        for name in floats
        if draw(st.booleans())
    }
    return schema, parts, dtypes


@settings(max_examples=example_count(120), deadline=None)
@given(
    what=caches(),
    shard_bytes=st.sampled_from([1, 100, 5000, 1 << 20]),
    compression=st.sampled_from(["none", "none", "zstd", "lz4", "auto"]),
    data=st.data(),
)
def test_records_read_back_bit_exact(
    what: object, shard_bytes: int, compression: Any, data: st.DataObject
) -> None:
    schema, parts, dtypes = what  # type: ignore[misc]
    source = FakeSource(schema, parts)
    with tempfile.TemporaryDirectory() as root:
        folder = open_folder(Path(root), "x", make_recipe(source, None, dtype=dtypes))
        writer = folder.writer(WriterSettings(shard_bytes=shard_bytes, compression=compression))
        order = data.draw(st.permutations(range(len(source))))
        while order:
            part = folder.recipe.part_of(order[0])[0]
            same_part = [n for n in order if folder.recipe.part_of(n)[0] == part]
            chunk = same_part[: data.draw(st.integers(1, len(same_part)))]
            writer.append(chunk, batch_of(source, chunk))
            if data.draw(st.booleans()):
                writer.commit()
            order = [n for n in order if n not in chunk]
        writer.commit()
        cache = folder.finish()

        assert cache.complete
        assert_whole(cache, source)
        if cache.index.stored_ratio is None:
            assert_whole_through_safetensors(cache, source)
        assert cache.verify().bad == []
        (cache.path / "index.json").unlink()
        if len(source):
            assert_whole(open_cache(cache.path), source)


def assert_whole_through_safetensors(cache: Cache, source: FakeSource) -> None:
    """Any safetensors reader sees the same records."""
    seen: set[int] = set()
    for entry in cache.index.shards:
        offset = cache.recipe.parts[entry.part].offset
        with safe_open(cache.path / entry.file, "pt") as file:
            for row, local in enumerate(file.get_tensor("__number__").tolist()):
                seen.add(offset + local)
                for name, value in expected(source, cache.recipe, offset + local).items():
                    found = column(file, cache, name, row)
                    if cache.schema[name].quantized:
                        scales = column(file, cache, f"{name}.scale", row)
                        found = unpack(found.view(torch.int8), scales, cache.schema[name].dtype)
                    assert found.dtype == value.dtype
                    assert bits(found) == bits(value)
    assert seen == set(range(len(source)))


def column(file: Any, cache: Cache, name: str, row: int) -> torch.Tensor:
    """One record's piece of a tensor in a shard."""
    found = file.get_tensor(name)
    if not cache.recipe.columns[name].ragged:
        return found[row]
    begin, end = file.get_tensor(f"{name}.offsets")[row : row + 2].tolist()
    return found[begin:end]


def test_any_slice_of_a_record_reads_back(tmp_path: Path) -> None:
    """Slices begin and end inside blocks: 2,500 steps of 12 bytes are two blocks of 1,365."""
    schema = {
        "w": Field(shape=(2500, 3), dtype="float32", time=True),
        "r": Field(shape=(-1, 2), dtype="int16", ragged=True),
    }
    source = FakeSource(schema, [("a", 3)])
    cache = make_cache(tmp_path, source)
    shard = cache.shard(0)

    for start, stop in [(0, 2500), (0, 1), (1364, 1366), (1365, 2500), (2499, 2500), (7, 7), (0, 1365)]:
        for row in range(3):
            whole = source.record(row)["w"].numpy()
            assert np.array_equal(shard.read("w", row, start, stop), whole[start:stop])
            out = bytearray((stop - start) * 12)
            shard.read_into("w", row, start, stop, memoryview(out))
            assert bytes(out) == whole[start:stop].tobytes()
    assert cache.lengths("r").tolist() == [len(source.record(row)["r"]) for row in range(3)]
    assert cache.lengths("w").tolist() == [2500] * 3


def test_a_column_lands_in_the_buffer_it_is_verified_into(tmp_path: Path) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source)
    shard = cache.shard(0)

    values = torch.empty((shard.rows, 9, 4, 8), dtype=torch.float32)
    shard.verify_column("latent", MemorySink(values))

    for row, local in enumerate(shard.numbers().tolist()):
        assert torch.equal(values[row], source.record(local)["latent"])
    assert all(column.offset % 4096 == 0 for column in shard.columns.values())


def test_full_shards_have_equal_rows(tmp_path: Path) -> None:
    """However large the appends are: consecutive shards then map into one range of addresses."""
    source = FakeSource({"z": Field(shape=(32,), dtype="float32")}, [("a", 300)])

    cache = make_cache(tmp_path, source, group=7, shard_bytes=64 * 128)

    assert [shard.rows for shard in cache.index.shards] == [64, 64, 64, 64, 44]
    assert_whole(cache, source)


def test_parts_may_interleave(tmp_path: Path) -> None:
    """Workers finish the end of one file and the beginning of the next in any order."""
    source = FakeSource(parts=[(f"p{i}", 3) for i in range(7)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    writer = folder.writer()
    for local in range(3):
        for part in range(7):
            writer.append([part * 3 + local], batch_of(source, [part * 3 + local]))
    writer.commit()

    assert_whole(folder.finish(), source)
