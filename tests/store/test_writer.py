"""The writer refuses what does not fit, seals by size and age, and leaves nothing half-done."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError, RecordError, ResourceError
from stoker.schema import Field
from stoker.store import Folder, WriterSettings, make_recipe, open_folder
from tests.store.fakes import RAGGED, FakeSource, assert_whole, batch_of, fill, make_cache


def open_x(root: Path, source: FakeSource, dtype: Any = None) -> Folder:
    return open_folder(root, "x", make_recipe(source, None, dtype=dtype))


def test_records_that_do_not_fit_the_schema_are_refused_by_name(tmp_path: Path) -> None:
    source = FakeSource()
    writer = open_x(tmp_path, source).writer()
    good = batch_of(source, [0, 1])
    latent: Any = good["latent"]

    for change, message in (
        ({"latent": latent[:1]}, r"sample 0: field 'latent' is torch.float32 \(1, 9, 4, 8\)"),
        ({"latent": latent.double()}, "torch.float64"),
        ({"latent": latent.transpose(1, 2)}, r"expected float32 \(2, 9, 4, 8\)"),
        ({"latent": [*latent]}, "must be one tensor"),
        ({"extra": latent}, "records have fields"),
        ({"latent": latent.to("meta")}, "on meta"),
    ):
        with pytest.raises(RecordError, match=message):
            writer.append([0, 1], {**good, **change})
    with pytest.raises(RecordError, match="not of one part"):
        writer.append([9, 10], batch_of(source, [9, 10]))
    with pytest.raises(RecordError, match="there is no sample 16"):
        writer.append([16], good)
    assert writer.rows == 0


def test_ragged_records_that_do_not_fit_are_refused_by_sample(tmp_path: Path) -> None:
    source = FakeSource(RAGGED, [("a", 4)])
    writer = open_x(tmp_path, source).writer()
    good = batch_of(source, [0, 1])

    for tokens, message in (
        ([torch.zeros(3, 5), torch.zeros(3, 4)], r"sample 1: field 'tokens' is torch.float32 \(3, 4\)"),
        ([torch.zeros(3, 5)], "list of 2 tensors"),
        (torch.zeros(2, 3, 5), "list of 2 tensors"),
        ([torch.zeros(3, 5), torch.tensor(1.0)], "sample 1"),
    ):
        with pytest.raises(RecordError, match=message):
            writer.append([0, 1], {**good, "tokens": tokens})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_overflow_is_an_error_that_names_sample_and_field(tmp_path: Path, dtype: str) -> None:
    source = FakeSource()
    folder = open_x(tmp_path, source, dtype)
    batch: Any = batch_of(source, range(4))
    batch["latent"][2, 5, 1, 1] = 3.4e38

    with pytest.raises(RecordError, match=rf"sample 2: field 'latent' holds 3.4e\+38, {dtype} ends at"):
        folder.writer().append(range(4), batch)


def test_what_is_not_finite_already_is_stored_as_it_is(tmp_path: Path) -> None:
    """Whether NaN is allowed is for the encode stage to say."""
    source = FakeSource()
    folder = open_x(tmp_path, source, "float16")
    batch: Any = batch_of(source, range(3))
    batch["latent"][1, 0, 0, :2] = torch.tensor([float("inf"), float("nan")])
    writer = folder.writer(WriterSettings(max_error=0.01))

    writer.append(range(3), batch)
    writer.commit()

    cache = folder.finish()
    assert cache[1]["latent"][0, 0, 0] == float("inf")
    assert cache[1]["latent"][0, 0, 1].isnan()
    assert cache.statistics["latent"]["nonfinite"] == 2


def test_the_error_of_a_narrower_dtype_is_measured_kept_and_bounded(tmp_path: Path) -> None:
    # The second field is wider than what is converted at a time.
    source = FakeSource(
        {"z": Field(shape=(9, 5), dtype="float32"), "w": Field(shape=(50_000,), dtype="float32")}
    )
    folder = open_x(tmp_path, source, {"z": "bfloat16", "w": "float16"})
    batch: Any = batch_of(source, range(4))
    exact = {name: values.reshape(4, -1).double() for name, values in batch.items()}
    stored = {"z": exact["z"].bfloat16().double(), "w": exact["w"].half().double()}
    writer = folder.writer()
    writer.append(range(4), batch)
    writer.commit()

    error = folder.finish().index.error

    for name in ("z", "w"):
        difference = (stored[name] - exact[name]).abs()
        worst = float((difference.amax(1) / exact[name].abs().amax(1)).max())
        rms = float((difference.square().sum(1) / exact[name].square().sum(1)).sqrt().max())
        assert error[name]["max"] == pytest.approx(worst, rel=1e-5)
        assert error[name]["rms"] == pytest.approx(rms, rel=1e-3)
    with pytest.raises(
        RecordError, match=r"sample \d: field 'w' loses 0.000.* as float16, 0.0001 is allowed"
    ):
        folder.writer(WriterSettings(max_error=1e-4)).append(range(4), batch)


def test_zeros_and_wider_dtypes_have_no_error(tmp_path: Path) -> None:
    source = FakeSource({"z": Field(shape=(3,), dtype="float32"), "h": Field(shape=(3,), dtype="float16")})
    folder = open_x(tmp_path, source, {"z": "float16", "h": "float32"})
    writer = folder.writer(WriterSettings(max_error=0.0))

    writer.append([0], {"z": torch.zeros(1, 3), "h": torch.tensor([[0.1, 2.0, -3.0]], dtype=torch.float16)})
    writer.commit()

    cache = folder.finish()
    assert cache.index.error == {name: {"max": 0.0, "rms": 0.0} for name in "hz"}
    assert cache[0]["h"].dtype == torch.float32


def test_an_old_shard_is_sealed_by_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("stoker.store.write.time.monotonic", lambda: now)
    source = FakeSource()
    folder = open_x(tmp_path, source)
    writer = folder.writer(WriterSettings(commit_after_s=30))
    writer.append([0, 1], batch_of(source, [0, 1]))

    now += 29
    writer.tick()
    assert folder.stored_count() == 0
    assert writer.shard_fill[0] == 2 * (9 * 4 * 8 + 1) * 4
    now += 1
    writer.tick()

    assert folder.stored_count() == 2
    assert writer.shard_fill == (0, writer.shard_fill[1])


def test_abort_drops_what_is_not_sealed(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_x(tmp_path, source)
    writer = folder.writer()
    writer.append([0], batch_of(source, [0]))
    writer.commit()
    writer.append([1], batch_of(source, [1]))

    writer.abort()

    assert folder.missing().tolist() == [*range(1, 16)]
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_full_disk_keeps_what_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    source = FakeSource(parts=[("a", 10)])
    folder = open_x(tmp_path, source)
    fill(folder, source, [0, 1])
    calls, real = 0, os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ResourceError, match=r"No space left.*free.*run again"):
        fill(folder, source, [2, 3, 4, 5, 6, 7], group=2)
    monkeypatch.undo()

    assert folder.missing().tolist() == [*range(2, 10)]
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".tmp")]
    fill(folder, source, folder.missing().tolist())
    assert_whole(folder.finish(), source)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: real_read(fd, [out[0][:777]], at))
    source = FakeSource()

    assert_whole(make_cache(tmp_path, source), source)


def test_marked_samples_are_noted_in_the_shard(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_x(tmp_path, source)
    writer = folder.writer()
    writer.append(range(10, 16), batch_of(source, range(10, 16)), marked=[12, 13])
    writer.commit()

    shard = folder.finish().shard(0)

    assert shard.marked.tolist() == [2, 3]
    assert shard.described("environment")["torch"] == torch.__version__


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = open_x(tmp_path, FakeSource())

    for settings in ({"shard_bytes": 0}, {"commit_after_s": 0.0}, {"max_error": -1.0}):
        with pytest.raises(ConfigError):
            folder.writer(WriterSettings(**settings))
