"""Floats packed into a byte with scales: what comes back, what it costs, what is refused, what is checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from stoker.errors import CorruptError, FormatError, RecordError
from stoker.schema import QUANTIZED_DTYPES, Field, canonical_json, columns_of
from stoker.store import WriterSettings, make_recipe, open_cache, open_folder
from stoker.store import index as index_module
from stoker.store import recipe as recipe_module
from stoker.store.maintain import repair
from stoker.store.values import store_columns, unpack, unpack_rows
from tests.store.fakes import FakeSource, assert_whole, batch_of, fill, make_cache, rounded, same_bits

STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}
"""Largest rounding error in units of a block's largest value."""
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def packed(shape: tuple[int, ...], dtype: str, **axes: bool) -> Field:
    return Field(shape=shape, dtype=dtype, quantized=True, **axes)


def decoded(field: Field, columns: Any, name: str = "z") -> torch.Tensor:
    return unpack_rows(field, columns[name].values, columns[f"{name}.scale"].values)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(QUANTIZED_DTYPES))
def test_no_value_is_further_off_than_half_a_step_of_its_block(data: st.DataObject, dtype: str) -> None:
    """From denormals to the largest float32, zeros, and axes that are no multiple of a block."""
    lines, width = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 2, 5, 127, 128, 129, 300]))
    scale = data.draw(st.sampled_from([1.0, 1e-45, 1e-40, 1e-30, 1e30]))
    values = data.draw(arrays(np.float32, (2, lines, width), elements=FLOAT32, fill=st.just(0.0)))
    with np.errstate(all="ignore"):
        values = np.nan_to_num(values * np.float32(scale), posinf=3.4028235e38, neginf=-3.4028235e38)
    field = packed((lines, width), dtype)

    columns = store_columns("z", field, torch.from_numpy(values), [0, 1])

    back = decoded(field, columns).numpy().reshape(values.shape).astype(np.float64)
    exact = values.astype(np.float64)
    assert np.isfinite(back).all()
    for begin in range(0, width, 128):
        block, ours = exact[..., begin : begin + 128], back[..., begin : begin + 128]
        largest = np.abs(block).max(-1, keepdims=True)
        smallest = 2.0**-149  # what denormal scales can tell apart
        assert (np.abs(block - ours) <= largest * STEP[dtype] * (1 + 1e-5) + smallest * 0.5).all()
    largest = np.abs(exact).reshape(2, -1).max(1, initial=0.0)
    error = np.abs(exact - back).reshape(2, -1).max(1, initial=0.0)
    relative = np.divide(error, largest, out=np.zeros(2), where=largest > 0)
    assert columns["z"].max_error == pytest.approx(relative, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_errors_are_measured_per_record_whatever_their_size(dtype: str) -> None:
    """Squares of 1e30 overflow float32, those of 1e-30 vanish; the relative errors are the same."""
    one = torch.randn((1, 6, 200), generator=torch.Generator().manual_seed(0))
    values = torch.cat([one, one * 2.0**100, one * 2.0**-100, torch.zeros_like(one)])
    field = packed((6, 200), dtype)

    rows = store_columns("z", field, values, range(4))["z"]

    back = rounded(one, dtype)
    assert rows.max_error[:3] == pytest.approx(float((back - one).abs().max() / one.abs().max()), rel=1e-5)
    assert rows.rms_error[:3] == pytest.approx(float((back - one).norm() / one.norm()), rel=1e-5)
    assert (rows.max_error[3], rows.rms_error[3]) == (0.0, 0.0)


def test_a_long_record_is_packed_as_its_pieces_are() -> None:
    """Conversion goes by chunks, which end inside records and between them."""
    values = torch.randn((3, 700, 130), generator=torch.Generator().manual_seed(1))
    field = packed((700, 130), "int8", time=True)

    back = decoded(field, store_columns("z", field, values, range(3)))

    assert torch.equal(back.view(values.shape), rounded(values, "int8"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_what_no_scale_can_hold_is_refused_by_sample_and_field(
    tmp_path: Path, bad: float, dtype: str
) -> None:
    source = FakeSource({"z": Field(shape=(3, 40), dtype="float64")}, [("a", 4)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None, dtype=dtype))
    batch: Any = batch_of(source, [0, 1, 2])
    batch["z"][1, 2, 7] = bad

    with pytest.raises(RecordError, match=rf"sample 1: field 'z' holds .*, which {dtype} with .* Store"):
        folder.writer().append([0, 1, 2], batch)


def test_an_error_above_the_bound_is_refused_and_the_measured_one_is_kept(tmp_path: Path) -> None:
    source = FakeSource()
    recipe = make_recipe(source, None, dtype="int8")
    writer = open_folder(tmp_path, "x", recipe).writer(WriterSettings(max_error=0.001))

    with pytest.raises(RecordError, match=r"sample \d: field 'latent' loses 0\.00\d+ .* as int8, 0\.001"):
        writer.append([0, 1], batch_of(source, [0, 1]))

    cache = make_cache(tmp_path, source, dtype="int8", max_error=0.004)
    exact = [source.record(number)["latent"] for number in range(16)]
    worst = max(float((rounded(one, "int8") - one).abs().max() / one.abs().max()) for one in exact)
    assert cache.index.error["latent"]["max"] == pytest.approx(worst, rel=1e-5)
    assert cache.index.error["nu"] == {"max": 0.0, "rms": 0.0}


def test_statistics_are_of_the_values_that_come_back(tmp_path: Path) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source, dtype="int8")
    values = torch.stack([cache[number]["latent"] for number in range(16)]).double()

    assert cache.statistics.keys() == {"latent", "nu"}
    assert cache.statistics["latent"]["mean"] == pytest.approx(float(values.mean()), rel=1e-6)
    assert cache.statistics["latent"]["max"] == float(values.max())


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_a_flipped_bit_in_a_scale_is_found_named_and_repaired(tmp_path: Path, dtype: str) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source, dtype=dtype)
    shard = cache.shard(0)
    column = shard.columns["latent.scale"]
    path = cache.path / shard.name
    data = bytearray(path.read_bytes())
    data[column.offset + 3 * column.row_bytes + 2] ^= 1
    path.write_bytes(data)
    number = int(shard.numbers()[3])

    opened = open_cache(cache.path)
    with pytest.raises(CorruptError, match=rf"'latent.scale' of sample {number}"):
        opened[number]
    assert {bad.index for bad in opened.verify().bad} == {number}
    assert repair(cache.path).missing == [number]
    folder = open_folder(tmp_path, "x", make_recipe(source, None, dtype=dtype))
    fill(folder, source, [number])
    mended = folder.finish()

    assert_whole(mended, source)
    assert mended.verify().ok
    assert mended.statistics == cache.statistics


def test_a_reader_of_format_1_refuses_the_cache_and_reads_its_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource()
    plain, ours = make_cache(tmp_path, source), make_cache(tmp_path, source, dtype="int8")
    for module in (recipe_module, index_module):
        monkeypatch.setattr(module, "FORMATS", (1,))

    with pytest.raises(FormatError, match=r"has format 2, this version reads .*Upgrade stoker"):
        open_cache(ours.path)
    assert open_cache(plain.path).complete


@pytest.mark.parametrize("changes", [{"format": 1}, {"packed": False}])
def test_a_recipe_whose_format_and_schema_differ_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    entries = {**make_cache(tmp_path, dtype="int8").recipe.entries}
    if "packed" in changes:
        entries["schema"] = {**entries["schema"], "latent": {**entries["schema"]["latent"], "packed": False}}
    else:
        entries |= changes
    text = canonical_json(entries)
    folder = tmp_path / "x" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir()
    (folder / "recipe.json").write_text(text)

    with pytest.raises(FormatError, match="not a recipe"):
        index_module.load_recipe(folder)


def test_shards_alone_make_the_same_index_again(tmp_path: Path) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source, dtype="float8_e4m3fn")
    (cache.path / "index.json").unlink()

    again = open_cache(cache.path)

    assert_whole(again, source)
    assert (again.statistics, again.index.error) == (cache.statistics, cache.index.error)


def test_a_shard_that_serves_in_part_is_counted_by_its_decoded_values(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 8)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None, dtype="int8"))
    fill(folder, source, range(5))
    fill(folder, source, range(3, 8))

    found = folder.finish()

    whole = make_cache(tmp_path / "whole", source, dtype="int8")
    assert found.statistics == whole.statistics


def test_columns_follow_their_fields() -> None:
    schema = {"a": packed((4, 129), "int8"), "b": Field(shape=(), dtype="int8")}

    assert [*columns_of(schema)] == ["a", "a.scale", "b"]
    assert columns_of(schema)["a.scale"].shape == (4, 2)
    for shape, axes in (((), {}), ((7,), {"time": True}), ((-1,), {"ragged": True})):
        with pytest.raises(RecordError, match="cannot be quantized"):
            packed(shape, "int8", **axes)
    with pytest.raises(RecordError, match="with scales only"):
        Field(shape=(4,), dtype="float8_e4m3fn")


def test_any_part_of_a_batch_decodes_to_the_same_bits() -> None:
    """Otherwise a batch would depend on its size, and so on the tier that serves it."""
    values = torch.randn((37, 3, 200), generator=torch.Generator().manual_seed(2)) * 1e-3
    field = packed((3, 200), "float8_e4m3fn")
    columns = store_columns("z", field, values, range(37))
    bits = columns["z"].values.view(37, 3, 200)
    scales = columns["z.scale"].values.view(37, 3, 2)
    whole = unpack(bits, scales, field.dtype)

    for rows in (slice(0, 1), slice(5, 18), slice(36, 37)):
        part = unpack(bits[rows].clone(), scales[rows].clone(), field.dtype)
        assert same_bits({"z": part}, {"z": whole[rows]})
