"""What is damaged or gone costs no more than its records, and comes back as the errors advise."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import xxhash

from stoker.errors import CorruptError, FormatError
from stoker.store import Folder, Shard, make_recipe, open_cache, open_folder
from stoker.store.format import LocalFile, TensorEntry, pack_header, read_header
from stoker.store.index import load_index
from stoker.store.maintain import repair
from stoker.store.storage import Storage, open_storage
from tests.store.fakes import FakeSource, assert_whole, fill, make_cache
from tests.store.test_damage import MIXED, flip


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(MIXED, [("a", 5), ("b", 3)])


def test_a_damaged_shard_removed_as_advised_does_not_come_back_from_a_sibling(tmp_path: Path) -> None:
    """An adopted shard is a link, so the sibling's is the same damaged file."""
    make_cache(tmp_path, FakeSource(MIXED, [("a", 5)]))
    source = FakeSource(MIXED, [("a", 5), ("b", 3)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    assert folder.adopt() == 5
    fill(folder, source, folder.missing().tolist())
    cache = folder.finish()
    shard = cache.shard(next(i for i, entry in enumerate(cache.index.shards) if entry.part == 0))
    flip(cache.path / shard.name, (shard.columns["z"].offset + 2 * 40960) * 8)
    with pytest.raises(CorruptError, match=rf"{shard.name}.*verify .* --repair"):
        cache[2]

    (cache.path / shard.name).unlink()
    again = open_folder(tmp_path, "x", cache.recipe)

    assert again.complete() is None
    assert again.adopt() == 4
    assert again.missing().tolist() == [2]
    fill(again, source, [2])
    again.finish()
    assert_whole(open_cache(cache.path), source)


@pytest.mark.parametrize("damage", ["recipe.json", "index.json"])
def test_an_unreadable_sibling_is_skipped_with_one_warning(
    tmp_path: Path, source: FakeSource, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(tmp_path, source)
    other = make_cache(tmp_path, source, dtype="bfloat16").path
    (other / damage).write_text("{}")

    assert open_cache(tmp_path / "x").fingerprint == cache.fingerprint

    assert [record.name for record in caplog.records] == ["stoker"]
    assert other.name in caplog.text
    assert (other / damage).read_text() == "{}"
    shutil.rmtree(cache.path)
    if damage == "index.json":  # nothing else is left, so that one is made again
        assert open_cache(tmp_path / "x").path == other
    else:
        with pytest.raises(FormatError, match=other.name):
            open_cache(tmp_path / "x")


def test_a_damaged_record_is_named_with_file_field_sample_and_what_to_do(
    tmp_path: Path, source: FakeSource
) -> None:
    cache = make_cache(tmp_path, source)
    part = next(i for i, entry in enumerate(cache.index.shards) if entry.part == 1)
    shard = cache.shard(part)
    flip(cache.path / shard.name, (shard.columns["z"].offset + 40960) * 8)  # row 1 of b: sample 6
    advice = (
        f"`stoker cache verify {cache.path} --repair` sets aside all that is damaged, and precompute then "
        "encodes it again, and only that"
    )

    with pytest.raises(CorruptError) as read:
        open_cache(cache.path)[6]
    with pytest.raises(CorruptError) as whole:
        open_cache(cache.path).shard(part).verify_column("z")

    file = cache.path / shard.name
    assert str(read.value) == f"{file}: field 'z' of sample 6 does not match its checksum. {advice}"
    assert str(whole.value) == f"{file}: field 'z' does not match its digest; damaged samples: 6. {advice}"


def test_a_damaged_header_is_named_with_its_file_and_what_to_do(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    file = cache.path / cache.index.shards[0].file
    flip(file, 800)

    with pytest.raises(CorruptError, match=rf"{file}: the header .*Run precompute again: it leaves that"):
        open_cache(cache.path)[0]


def test_a_bad_sector_costs_its_records_and_nothing_else(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(tmp_path, source)
    shard = cache.shard(0)
    sector = shard.columns["z"].offset + 2 * 40960
    read = LocalFile.read_into

    def failing(file: LocalFile, offset: int, out: memoryview[Any]) -> None:
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        if path.endswith(shard.name) and offset <= sector < offset + len(out):
            raise OSError(errno.EIO, "Input/output error", path)
        read(file, offset, out)

    monkeypatch.setattr(LocalFile, "read_into", failing)

    with pytest.raises(CorruptError, match=r"field 'z' of sample 2 cannot be read: .*Input/output error"):
        open_cache(cache.path)[2]
    (bad,) = open_cache(cache.path).verify().bad
    assert (bad.index, bad.shard) == (2, shard.name)
    assert "Input/output error" in bad.why
    (cache.path / "index.json").unlink()
    assert open_cache(cache.path, require_complete=False).indices.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert "Input/output error" in caplog.text


def make_partly_served(tmp_path: Path, source: FakeSource) -> Folder:
    """A folder in which sample 2 came twice, so that the second shard serves only in part."""
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [0, 1, 2])
    folder.finish()
    fill(folder, source, [2, 3])
    assert folder.stored_count() == 4
    return folder


def test_a_shard_that_cannot_be_read_while_the_index_is_made_is_left_out(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Statistics are counted anew where a record has come twice, from the rows that still serve."""
    folder = make_partly_served(tmp_path, source)

    def failing(storage: Storage, name: str) -> LocalFile:
        raise OSError(errno.EIO, "Input/output error", name)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "open", failing)
        cache = folder.finish()

    assert "Input/output error" in caplog.text
    assert not cache.complete
    fill(folder, source, folder.missing().tolist())
    assert_whole(folder.finish(), source)


def test_a_damaged_record_met_while_the_index_is_made_is_missing_in_it(
    tmp_path: Path, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_partly_served(tmp_path, source)
    known = load_index(folder.path, folder.recipe).shards[0].file
    (path,) = {*folder.path.glob("shard-*")} - {folder.path / known}
    shard = Shard(open_storage(folder.path).open(path.name), path, folder.recipe.schema)
    flip(path, (shard.columns["z"].offset + 40960) * 8)

    cache = folder.finish()

    assert "1 of 2 records are damaged" in caplog.text
    assert cache.indices.tolist() == [0, 1, 2]
    assert folder.missing().tolist() == [3, 4, 5, 6, 7]


def test_damage_that_a_repair_noted_meanwhile_stays_noted(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    folder = open_folder(tmp_path, "x", cache.recipe)
    assert folder.complete() is not None  # it has looked at all shards
    shard = cache.shard(next(i for i, entry in enumerate(cache.index.shards) if entry.part == 0))
    flip(cache.path / shard.name, (shard.columns["z"].offset + 2 * 40960) * 8)

    assert repair(cache.path).missing == [2]
    folder.finish()

    assert open_cache(cache.path, require_complete=False).indices.tolist() == [0, 1, 3, 4, 5, 6, 7]


def without(path: Path, tensor: str, kept_bytes: int) -> None:
    """Write a shard, sound in itself, of whose `tensor` only the first bytes are left."""
    file = open_storage(path.parent).open(path.name)
    header = read_header(file, where=path.name)
    data = path.read_bytes()[header.data_start :]
    cut = header.tensors[tensor]
    end = cut.begin + kept_bytes
    tensors: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        begin = entry.begin - (cut.end - end if entry.begin >= cut.end else 0)
        size = kept_bytes if name == tensor else entry.end - entry.begin
        shape = (kept_bytes // 8,) if name == tensor else entry.shape
        if size or name != tensor:
            tensors[name] = TensorEntry(entry.dtype, shape, begin, begin + size)
    data = data[:end] + data[cut.end :]
    meta = xxhash.xxh3_128_hexdigest(data[tensors["__number__"].begin :])
    metadata = {name: value for name, value in header.metadata.items() if name != "self"} | {"meta": meta}
    path.write_bytes(pack_header(tensors, metadata, header.data_start) + data)


@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("tensor", ["tokens.offsets", "tokens.sums", "z.sums"])
def test_a_shard_without_its_sums_or_offsets_is_refused_by_name(
    tmp_path: Path, source: FakeSource, tensor: str, kept: int
) -> None:
    cache = make_cache(tmp_path, source)
    path = cache.path / cache.index.shards[0].file
    without(path, tensor, kept)

    with pytest.raises(FormatError, match=rf"{path.name}.*{tensor.split('.', maxsplit=1)[0]}"):
        Shard(open_storage(cache.path).open(path.name), path, cache.schema)
