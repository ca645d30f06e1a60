"""No damaged byte is served, and every damaged byte is found."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stoker.errors import CorruptError, FormatError, IncompleteError, StokerError
from stoker.schema import Field, canonical_json
from stoker.store import Cache, Shard, load_recipe, make_recipe, open_cache, open_folder
from stoker.store.index import ShardCatalog, damaged_rows, load_index
from stoker.store.storage import Storage, open_storage
from tests.kit.amount import example_count
from tests.store.fakes import RAGGED, FakeSource, assert_whole, expected, fill, make_cache, same_bits

MIXED = {
    **RAGGED,
    "z": Field(shape=(40, 16, 32), dtype="float16", time=True),
    "nu": Field(shape=(), dtype="float32"),
}


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(MIXED, [("a", 5), ("b", 3)])


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def wrong_reads(cache: Cache, wanted: dict[int, dict[str, Tensor]]) -> list[int]:
    """Numbers whose read raised; a wrong record that was served fails the test."""
    raised: list[int] = []
    for number in cache.indices.tolist():
        try:
            record = cache[number]
        except StokerError:
            raised.append(number)
        else:
            assert same_bits(record, wanted[number])
    return raised


@pytest.mark.chaos
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(None, id="plain"),
        pytest.param({"z": "int8", "tokens": "float8_e4m3fn"}, id="packed", marks=pytest.mark.slow),
    ],
)
def test_bit_flips_are_all_found_and_none_is_served(
    tmp_path: Path, source: FakeSource, caplog: pytest.LogCaptureFixture, dtype: dict[str, str] | None
) -> None:
    cache = make_cache(tmp_path, source, dtype=dtype)
    wanted = {number: expected(source, cache.recipe, number) for number in range(len(source))}
    files = [*sorted(cache.path.glob("shard-*")), cache.path / "index.json", cache.path / "recipe.json"]
    chance = random.Random(0)
    sizes = [path.stat().st_size for path in files]
    caplog.set_level(logging.ERROR)  # a thousand warnings are no help
    found_on_read, flips = 0, example_count(1000)

    for _ in range(flips):
        path = (
            files[chance.choices(range(len(files)), sizes)[0]]
            if chance.random() < 0.7
            else chance.choice(files)
        )
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)

        bad = Cache(cache.path, cache.recipe, cache.index).verify().bad

        assert bad, f"bit {bit} of {path.name} was not found"
        assert {record.shard for record in bad} == {path.name}
        raised = wrong_reads(Cache(cache.path, cache.recipe, cache.index), wanted)
        assert set(raised) == {record.index for record in bad if record.index >= 0}
        found_on_read += bool(raised)
        flip(path, bit)

    assert found_on_read > flips / 2
    assert_whole(open_cache(cache.path), source)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_index_made_while_a_shard_cannot_be_opened_is_not_kept(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cache = make_cache(tmp_path, source)
    path, shard = cache.path, cache.index.shards[0].file
    (path / "index.json").unlink()
    plain = Storage.open

    def fails(storage: Storage, name: str) -> Any:
        if name == shard:
            raise OSError(number, os.strerror(number), name)
        return plain(storage, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(open_storage(path)), "open", fails)
        assert len(open_cache(path, require_complete=False)) < len(source)
        with pytest.raises(IncompleteError):
            open_cache(path)

    assert_whole(open_cache(path), source)


def test_a_shard_proves_itself_without_an_index(
    tmp_path: Path, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(tmp_path, source)
    (cache.path / "index.json").unlink()
    storage = open_storage(cache.path)
    path = cache.path / cache.index.shards[0].file
    shard = cache.shard(0)
    tail = max(column.offset + column.nbytes for column in shard.columns.values())
    header = min(column.offset for column in shard.columns.values())
    chance = random.Random(1)
    caplog.set_level(logging.ERROR)

    for _ in range(300):
        first, last = chance.choice([(0, header), (header, tail), (tail, path.stat().st_size)])
        bit = chance.randrange(first * 8, last * 8)
        flip(path, bit)
        found = [info for info in ShardCatalog(storage, cache.recipe).refresh() if info.file == path.name]
        if found and not damaged_rows(storage, found[0], cache.recipe):
            with pytest.raises(CorruptError, match="padding"):
                Shard(storage.open(path.name), path, cache.schema).check_padding()
        flip(path, bit)


def test_a_flip_in_index_or_recipe_is_refused_or_repaired(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    for name, load in (
        ("index.json", lambda: load_index(cache.path, cache.recipe)),
        ("recipe.json", lambda: load_recipe(cache.path)),
    ):
        path = cache.path / name
        good = path.read_bytes()
        for bit in range(0, len(good) * 8, 37):
            flip(path, bit)
            with pytest.raises(FormatError):
                load()
            path.write_bytes(good)
    flip(cache.path / "index.json", 1234)

    assert_whole(open_cache(cache.path), source)
    assert load_index(cache.path, cache.recipe).complete  # written anew


def replace(cache: Cache, change: Callable[[bytearray], object]) -> Path:
    path = cache.path / cache.index.shards[0].file
    data = bytearray(path.read_bytes())
    change(data)
    path.unlink()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: d.__delitem__(slice(-1, None)), id="one-byte-short"),
        pytest.param(lambda d: d.__delitem__(slice(len(d) // 2, None)), id="half"),
        pytest.param(lambda d: d.__delitem__(slice(100, None)), id="100-bytes"),
        pytest.param(lambda d: d.clear(), id="empty"),
        pytest.param(lambda d: d.append(0), id="one-byte-long"),
        pytest.param(lambda d: d.__setitem__(slice(0, 8), b"\xff" * 8), id="header-of-16-exabytes"),
        pytest.param(
            lambda d: d.__setitem__(slice(0, 8), (1 << 26).to_bytes(8, "little")), id="header-beyond-file"
        ),
        pytest.param(
            lambda d: d.__setitem__(slice(0, 8), (1).to_bytes(8, "little")), id="header-of-one-byte"
        ),
        pytest.param(lambda d: d.__setitem__(slice(0, len(d)), bytes(len(d))), id="zeros"),
    ],
)
def test_a_mangled_shard_is_refused_by_name(
    tmp_path: Path, source: FakeSource, change: Callable[[bytearray], object]
) -> None:
    cache = make_cache(tmp_path, source)

    path = replace(cache, change)

    with pytest.raises(FormatError, match=path.name):
        open_cache(cache.path)[0]
    report = open_cache(cache.path, require_complete=False).verify()
    assert report.records == 8
    assert {bad.shard for bad in report.bad} == {path.name}
    assert not report.ok
    assert len({bad.index for bad in report.bad}) == 5


def test_swapped_and_foreign_shards_are_refused(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source, shard_bytes=1)
    other = make_cache(tmp_path, FakeSource(MIXED, [("a", 5), ("b", 3)], salt={"a": "other"}))
    first, second = (cache.path / shard.file for shard in cache.index.shards[:2])

    spare = first.rename(tmp_path / "spare")
    second.rename(first)
    spare.rename(second)
    with pytest.raises(CorruptError, match=first.name):
        open_cache(cache.path)[0]

    shutil.copy(other.path / other.index.shards[0].file, second)
    with pytest.raises(CorruptError, match=second.name):
        open_cache(cache.path)[1]
    folder = open_folder(tmp_path, "x", cache.recipe)
    # The foreign shard is of none of its parts; a swapped one still holds what its own header says.
    assert folder.missing().tolist() == [0]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(
    tmp_path: Path, source: FakeSource, kind: str
) -> None:
    cache = make_cache(tmp_path, source)
    path = cache.path / cache.index.shards[0].file
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()

    with pytest.raises(FormatError, match=path.name):
        Cache(cache.path, cache.recipe, cache.index)[0]
    assert open_folder(tmp_path, "x", cache.recipe).complete() is None
    for name in ("index.json", "recipe.json"):
        (cache.path / name).unlink()
        os.mkfifo(cache.path / name)
    with pytest.raises(FormatError, match=r"recipe\.json"):
        open_cache(cache.path)


def forge(cache: Cache, **changes: object) -> None:
    """Write an index that is sound in itself and says something else."""
    import hashlib

    entries = json.loads((cache.path / "index.json").read_text())
    del entries["digest"]
    entries |= changes
    digest = hashlib.sha256(canonical_json(entries).encode()).hexdigest()
    (cache.path / "index.json").write_text(canonical_json({**entries, "digest": digest}))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..", "", "a/b", "shard-\n", ".hidden", 7]
)
def test_names_outside_the_folder_are_refused(tmp_path: Path, source: FakeSource, name: object) -> None:
    cache = make_cache(tmp_path, source)
    shards = json.loads((cache.path / "index.json").read_text())["shards"]

    forge(cache, shards=[{**shards[0], "file": name}, *shards[1:]])

    with pytest.raises(FormatError, match=r"index\.json|names the file"):
        load_index(cache.path, cache.recipe)


def shard_changes() -> list[object]:
    huge, segment = 1 << 61, [[0, 0, 5]]
    return [
        *({"part": part} for part in (-1, 2, 1, True, None, "0")),
        *({"rows": rows} for rows in (4, -5, 1.5)),
        *(
            {"segments": s}
            for s in (
                [[0, 0, 4]],
                [[0, 1, 5]],
                [[-1, 0, 5]],
                [[1, 0, 5]],
                [[0, 0, 0], *segment],
                "AAAA",
                "é",
                [[0, 0]],
                5,
            )
        ),
        {"segments": [[huge, huge, huge]]},
        {"segments": [[0, 0, 5], [0, 0, 5]]},
        {"bad": [5]},
        {"bad": ["0"]},
        {"bytes": -1},
    ]


@pytest.mark.parametrize("change", shard_changes(), ids=str)
def test_an_index_that_contradicts_itself_is_refused(
    tmp_path: Path, source: FakeSource, change: dict[str, object]
) -> None:
    cache = make_cache(tmp_path, source)
    shards = json.loads((cache.path / "index.json").read_text())["shards"]

    forge(cache, shards=[{**shards[0], **change}, *shards[1:]])

    with pytest.raises(FormatError, match="index"):
        load_index(cache.path, cache.recipe)


@pytest.mark.parametrize(
    "change",
    [{"stored": 7}, {"count": 9}, {"complete": False}, {"fingerprint": "0" * 16}, {"format": 2},
     {"quarantined": [{}]}, {"shards": {}}, {"generation": -1}, {"quarantined": None}, {"schema": {}},
     {"statistics": 3}],
    ids=str,
)  # fmt: skip
def test_an_index_of_something_else_is_refused(
    tmp_path: Path, source: FakeSource, change: dict[str, object]
) -> None:
    cache = make_cache(tmp_path, source)

    forge(cache, **change)

    with pytest.raises(FormatError, match=r"index\.json"):
        load_index(cache.path, cache.recipe)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"complete":' * 100_000,
     b'{"complete":true,"complete":true}', b'{"complete":NaN}', b'{"complete":1e999}', b"\x80\x04K\x00.",
     b'{"complete": true}', "{\"complete\":\"é\"}".encode()],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_garbage_in_place_of_an_index_is_refused_and_repaired(
    tmp_path: Path, source: FakeSource, data: bytes
) -> None:
    cache = make_cache(tmp_path, source)
    (cache.path / "index.json").write_bytes(data)

    with pytest.raises(FormatError, match=r"index\.json"):
        load_index(cache.path, cache.recipe)
    assert_whole(open_cache(cache.path), source)


def test_a_huge_index_is_refused_before_it_is_read(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    with (cache.path / "index.json").open("r+b") as file:
        file.truncate(10 << 30)  # sparse; begins like an index

    with pytest.raises(FormatError, match=r"index\.json has 10"):
        load_index(cache.path, cache.recipe)
    with (cache.path / "index.json").open("wb") as file:
        file.truncate((1 << 30) - 1)
    with pytest.raises(FormatError, match="does not begin like an index"):
        load_index(cache.path, cache.recipe)


def test_another_format_is_refused_with_its_number(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    import hashlib

    text = canonical_json({**cache.recipe.entries, "format": 4})
    folder = cache.path.parent / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir()
    (folder / "recipe.json").write_text(text)

    with pytest.raises(FormatError, match=r"format 4.*reads \(1, 2, 3\)"):
        open_cache(folder)


def test_a_damaged_record_is_left_out_and_encoded_again(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    shard = cache.shard(0)
    flip(cache.path / shard.name, (shard.columns["z"].offset + 2 * 40960) * 8)
    (cache.path / "index.json").unlink()

    assert len(open_cache(cache.path, require_complete=False)) == 7
    again = open_folder(tmp_path, "x", cache.recipe)
    assert again.missing().tolist() == [2]
    with pytest.raises(IncompleteError, match="7 of 8"):
        open_cache(cache.path)
    fill(again, source, [2])

    assert_whole(again.finish(), source)
    assert_whole(open_cache(cache.path), source)
    (cache.path / "index.json").unlink()  # and again when the note of the bad row is lost with the index
    assert_whole(open_cache(cache.path), source)


def test_a_rebuilt_index_says_what_is_missing(
    tmp_path: Path, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(tmp_path, source)
    (cache.path / "index.json").unlink()
    replace(cache, lambda data: data.__delitem__(slice(-1, None)))

    with pytest.raises(IncompleteError, match="3 of 8"):
        open_cache(tmp_path / "x")
    assert cache.index.shards[0].file in caplog.text
    assert open_cache(cache.path, require_complete=False).indices.tolist() == [5, 6, 7]


def test_a_lost_shard_makes_a_cache_incomplete_and_is_named(tmp_path: Path, source: FakeSource) -> None:
    cache = make_cache(tmp_path, source)
    path = cache.path / cache.index.shards[1].file
    path.unlink()

    for place in (cache.path, tmp_path / "x"):
        with pytest.raises(
            IncompleteError, match=rf"{path.name} is missing. Run precompute again.*3 records"
        ):
            open_cache(place)
    with pytest.raises(CorruptError, match=path.name):  # by a handle that was opened before
        cache[5]
    partial = open_cache(cache.path, require_complete=False)
    assert (partial.complete, len(partial), partial.indices.tolist()) == (False, 5, [0, 1, 2, 3, 4])
    for subset in (1.0, 0.5):
        assert {5, 6, 7} == {bad.index for bad in partial.verify(subset).bad}
    path.write_bytes(b"another")
    with pytest.raises(CorruptError, match=rf"{path.name} has 7 bytes"):
        open_cache(cache.path)
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    assert folder.complete() is None
    assert folder.missing().tolist() == [5, 6, 7]
    fill(folder, source, folder.missing().tolist())
    folder.finish()
    assert_whole(open_cache(cache.path), source)
