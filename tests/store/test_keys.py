"""Records by the key of their sample: kept next to the records, looked up, filtered, and handed to others."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import stoker
from stoker.errors import ConfigError, MissingRecordError, SourceError
from stoker.sources.splits import Subset
from stoker.store.access import Column
from stoker.store.keys import put_keys, read_keys
from stoker.store.storage import open_storage
from stoker.store.transfer import pull, push
from stoker.store.where import ConditionColumn, select_rows

Items = list[dict[str, Any]]


def items(count: int) -> Items:
    return [{"x": torch.full((3,), float(i)), "label": torch.tensor(i % 4)} for i in range(count)]


def keyed(folder: Path, keys: Sequence[str], *, name: str = "keyed") -> stoker.Cache:
    source = stoker.TorchSource(items(len(keys)), keys=keys, version="1")
    return stoker.precompute(source, None, folder, name=name, workers=0, progress=None)


ODD = ["a/1.png", 'quote"d', "new\nline", "ünï", "", "7", "a/1"]


def test_a_cache_keeps_the_keys_of_its_samples(tmp_path: Path) -> None:
    cache = keyed(tmp_path, ODD)

    again = stoker.open_cache(tmp_path / "keyed")

    assert list(cache.keys()) == list(again.keys()) == ODD
    assert [again.keys().index(key) for key in ODD] == list(range(len(ODD)))
    assert again.get("new\nline")["x"].tolist() == [2, 2, 2]


def test_files_are_the_keys_of_records_made_of_them(tmp_path: Path) -> None:
    for name in ("run1", "run2"):
        np.save(tmp_path / f"{name}.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    source = stoker.ArraySource([tmp_path / "run1.npy", tmp_path / "run2.npy"])

    cache = stoker.precompute(source, None, tmp_path / "caches", name="runs", workers=0, progress=None)
    in_place = stoker.index_in_place(source, tmp_path / "caches", name="there")

    assert list(cache.keys()) == list(source.keys()) == list(in_place.keys())


def test_samples_without_keys_of_their_own_go_by_their_index(tmp_path: Path) -> None:
    cache = stoker.precompute(items(12), None, tmp_path, name="plain", workers=0, progress=None)

    assert cache.keys().index("11") == 11
    assert (cache.path / "keys.jsonl").stat().st_size < 200  # nothing is kept for each


def test_an_unknown_key_and_one_of_several_samples_say_so(tmp_path: Path) -> None:
    cache = keyed(tmp_path, ["a", "b", "a"])

    with pytest.raises(MissingRecordError, match=r"no sample .* key 'c'.*'a', 'b'"):
        cache.get("c")
    with pytest.raises(MissingRecordError, match=r"2 samples .* key 'a', the first is sample 0"):
        cache.get("a")


def test_damaged_or_missing_keys_are_noted_again_by_the_same_precompute(tmp_path: Path) -> None:
    cache = keyed(tmp_path, ["a", "b", "c"])
    path = cache.path / "keys.jsonl"

    for change in (lambda: path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"')), path.unlink):
        change()
        with pytest.raises(stoker.StokerError, match="Run the same precompute again"):
            stoker.open_cache(cache.path).keys()
        assert list(keyed(tmp_path, ["a", "b", "c"]).keys()) == ["a", "b", "c"]


def test_other_keys_for_the_same_samples_are_noted(tmp_path: Path) -> None:
    first = keyed(tmp_path, ["a", "b", "c"])

    second = keyed(tmp_path, ["x", "y", "z"])

    assert second.fingerprint == first.fingerprint
    assert list(second.keys()) == ["x", "y", "z"]


def test_other_names_of_the_files_of_a_complete_cache_are_noted(tmp_path: Path) -> None:
    """The same files, found by a pattern and by their folder."""
    for name in ("run1", "run2"):
        (tmp_path / "data" / name).mkdir(parents=True)
        np.save(tmp_path / "data" / name / "x.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    paths = [tmp_path / "data" / name / "x.npy" for name in ("run1", "run2")]
    sources = [stoker.ArraySource(tmp_path / "data" / "*" / "x.npy"), stoker.ArraySource(paths)]
    named = [list(source.keys()) for source in sources]
    assert named[0] != named[1]

    for source, keys in zip((*sources, sources[0]), (*named, named[0]), strict=True):
        cache = stoker.precompute(source, None, tmp_path / "caches", name="runs", workers=0, progress=None)
        assert list(cache.keys()) == keys

    assert len([*(tmp_path / "caches" / "runs").iterdir()]) == 1


def test_given_keys_that_are_left_out_later_are_not_kept(tmp_path: Path) -> None:
    keyed(tmp_path, ["a", "b", "c"])

    source = stoker.TorchSource(items(3), version="1")
    cache = stoker.precompute(source, None, tmp_path, name="keyed", workers=0, progress=None)

    assert list(cache.keys()) == ["0", "1", "2"]


def test_other_keys_of_some_of_the_samples_are_noted(tmp_path: Path) -> None:
    def first_two(keys: Sequence[str]) -> stoker.Cache:
        source = Subset(stoker.TorchSource(items(len(keys)), keys=keys, version="1"), 2)
        return stoker.precompute(source, None, tmp_path, name="some", workers=0, progress=None)

    first = first_two(["a", "b", "c"])

    assert list(first_two(["b", "c", "d"]).keys()) == ["b", "c"]
    assert list(stoker.open_cache(first.path).keys()) == ["b", "c"]


def test_a_source_whose_keys_cannot_be_listed_leaves_those_of_its_complete_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unlisted(stoker.TorchSource):
        def keys(self) -> Sequence[str]:
            raise SourceError("the table of names is gone")

    keyed(tmp_path, ["a", "b", "c"])

    source = Unlisted(items(3), version="1")
    cache = stoker.precompute(source, None, tmp_path, name="keyed", workers=0, progress=None)

    assert list(cache.keys()) == ["a", "b", "c"]
    assert "keeps the keys" in caplog.text
    assert "the table of names is gone" in caplog.text


def test_keys_travel_with_a_cache(tmp_path: Path) -> None:
    keyed(tmp_path / "a", ODD)
    url = f"file://{tmp_path / 'there'}"
    push(tmp_path / "a" / "keyed", url, mirror_dir=tmp_path / "m")

    pull(f"{url}/keyed", tmp_path / "b")

    assert list(stoker.open_cache(tmp_path / "b" / "keyed").keys()) == ODD
    assert list(stoker.open_cache(f"{url}/keyed").keys()) == ODD


def test_where_picks_records_by_their_numbers_and_keys(tmp_path: Path) -> None:
    cache = keyed(tmp_path, [f"{'train' if i % 2 else 'val'}/{i}" for i in range(20)])

    assert cache.where("label = 3 AND sample_index > 10").tolist() == [11, 15, 19]
    assert cache.where("key LIKE 'val/%' OR label IN (1)").tolist() == [
        i for i in range(20) if i % 2 == 0 or i % 4 == 1
    ]
    assert cache.where("label > 9").tolist() == []
    loader = stoker.Loader(cache, 4, indices=cache.where("label = 2"))
    assert {int(label) for batch in loader for label in batch["label"]} == {2}


def test_where_reads_joined_columns(tmp_path: Path) -> None:
    cache = keyed(tmp_path, list("abcdef"))
    (tmp_path / "table.csv").write_text(
        "id,split\n" + "".join(f"{i},{'train' if i < 4 else 'val'}\n" for i in range(6))
    )
    join = {
        "table": tmp_path / "table.csv",
        "key": "id",
        "columns": {"split": {"text": ["train", "val"]}},
    }

    joined = stoker.open_cache(cache.path, join=join)

    assert joined.where("split = 1").tolist() == [4, 5]


def test_records_left_out_by_a_joined_table_are_served_nowhere(tmp_path: Path) -> None:
    cache = keyed(tmp_path, list("abcdef"))
    (tmp_path / "table.csv").write_text("id,lab\n0,0\n2,1\n3,0\n5,1\n")
    join = {"table": tmp_path / "table.csv", "key": "id", "columns": ["lab"], "missing": "drop"}

    joined = stoker.open_cache(cache.path, join=join)

    (batch,) = stoker.Loader(joined, 6)
    dataset = joined.as_dataset()
    assert batch["index"].tolist() == [0, 2, 3, 5]
    assert dataset.indices.tolist() == [0, 2, 3, 5]
    assert [item["lab"].item() for item in dataset.__getitems__([0, 1, 2, 3])] == [0, 1, 0, 1]
    assert joined.where("lab = 0").tolist() == [0, 3]
    assert joined.where("1").tolist() == [0, 2, 3, 5]


def with_fields(folder: Path, **fields: Sequence[float]) -> stoker.Cache:
    rows = [
        dict(zip(fields, map(torch.tensor, row), strict=True)) for row in zip(*fields.values(), strict=True)
    ]
    return stoker.precompute(rows, None, folder, name="fields", workers=0, progress=None)


def test_a_field_called_number_is_read_by_a_condition(tmp_path: Path) -> None:
    cache = with_fields(tmp_path, number=[5, 4, 3, 2, 1, 0], rowid=[9, 9, 9, 0, 0, 0])

    assert cache.where("number < 2").tolist() == [4, 5]
    assert cache.where("sample_index < 2").tolist() == [0, 1]
    assert cache.where("rowid = 9").tolist() == [0, 1, 2]


def test_a_position_among_the_records_is_not_taken_for_their_index(tmp_path: Path) -> None:
    """SQLite calls it rowid."""
    cache = with_fields(tmp_path, x=[0, 1, 2])

    with pytest.raises(ConfigError, match="no such column: rowid"):
        cache.where("rowid > 1")


def test_a_field_with_the_name_of_the_key_or_index_is_refused_only_where_it_is_used(tmp_path: Path) -> None:
    cache = with_fields(tmp_path, key=[3, 2, 1], sample_index=[7, 8, 9], x=[0, 1, 2])

    assert cache.where("x > 0").tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"'KEY = 3' means the key of the sample and field 'key'"):
        cache.where("KEY = 3")
    with pytest.raises(ConfigError, match=r"the index of the sample and field 'sample_index'"):
        cache.where('"sample_index" > 0')


def test_fields_whose_names_differ_in_case_alone_are_refused_only_where_they_are_used(tmp_path: Path) -> None:
    cache = with_fields(tmp_path, Label=[3, 2, 1], label=[7, 8, 9], x=[0, 1, 2])

    assert cache.where("x > 0").tolist() == [1, 2]
    with pytest.raises(ConfigError, match="field 'Label' and field 'label'"):
        cache.where("label = 3")


def test_a_misspelled_name_in_double_quotes_is_refused(tmp_path: Path) -> None:
    """SQLite takes it for a text."""
    cache = keyed(tmp_path, list("abc"))

    assert cache.where('key <> \'a "b"\' AND "label" = 1').tolist() == [1]
    with pytest.raises(ConfigError, match=r"lable.*Columns of keyed"):
        cache.where('"lable" = 1')


def test_a_condition_reads_only_the_columns_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_fields(tmp_path, a=[3, 2, 1], b=[7, 8, 9])
    (cache.path / "keys.jsonl").unlink()
    read: list[str] = []
    whole = Column.__getitem__
    monkeypatch.setattr(
        Column, "__getitem__", lambda self, rows: (read.append(self.name), whole(self, rows))[1]
    )

    assert cache.where("b > (SELECT avg(b) FROM records)").tolist() == [2]
    assert read == ["b"]
    with pytest.raises(MissingRecordError, match="no keys"):
        cache.where("key = 'a'")


def test_a_million_keys_are_kept_and_looked_up_in_little_memory(tmp_path: Path) -> None:
    count = 200_000
    keys = [f"k{i:07}" for i in range(count)]
    tracemalloc.start()

    put_keys(open_storage(tmp_path), keys)
    put_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    found = read_keys(open_storage(tmp_path), count)
    places, _ = found.find(found.select(np.arange(count - 1, -1, -1)))
    found_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert places[:3].tolist() == [count - 1, count - 2, count - 3]
    assert put_bytes < 40 * count  # the lines alone are 11 bytes each
    assert found_bytes < 160 * count


def test_a_condition_over_many_records_takes_little_memory() -> None:
    count = 200_000
    values = np.arange(count)
    column = ConditionColumn("x", "field 'x'", lambda: values)
    tracemalloc.start()

    rows = select_rows([column], "x >= 10", count, "the test")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(rows) == count - 10
    assert peak_bytes < 40 * count  # SQLite's own memory is not counted


@pytest.mark.parametrize(
    "condition",
    [
        "label >",
        "unknown = 1",
        "1) ; DROP TABLE records; --",
        "1); SELECT (1",
        "1 IN (SELECT name FROM pragma_database_list) AND load_extension('x')",
    ],
)
def test_a_condition_that_is_none_is_refused_with_the_columns_there_are(
    tmp_path: Path, condition: str
) -> None:
    cache = keyed(tmp_path, list("abc"))

    with pytest.raises(ConfigError, match=r"not understood.*sample_index, key, label"):
        cache.where(condition)


def test_a_condition_that_never_ends_is_stopped(tmp_path: Path) -> None:
    cache = keyed(tmp_path, list("abc"))
    endless = "1 IN (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n)"

    with pytest.raises(ConfigError, match="not understood"):
        cache.where(endless)


def test_a_cache_is_a_dataset_for_samplers_and_workers_of_others(tmp_path: Path) -> None:
    cache = keyed(tmp_path, [str(i) for i in range(30)])
    dataset = cache.as_dataset()
    sampler = WeightedRandomSampler([0.0] * 15 + [1.0] * 15, 12)

    batches = [*DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)]

    assert [batch["x"].shape for batch in batches] == [(4, 3)] * 3
    assert all(int(x) >= 15 for batch in batches for x in batch["x"][:, 0])
    assert pickle.loads(pickle.dumps(dataset))[-1]["x"].tolist() == [29, 29, 29]
    assert [item["x"][0].item() for item in dataset.__getitems__([7, 3, 7])] == [7, 3, 7]
    with pytest.raises(IndexError):
        dataset[30]


def test_quarantined_samples_are_no_items_of_a_dataset(tmp_path: Path) -> None:
    data = items(10)
    data[4]["x"] = torch.tensor([0.0, float("nan"), 0.0])
    cache = stoker.precompute(
        data, None, tmp_path, name="holes", max_quarantined=0.2, workers=0, progress=None
    )

    dataset = cache.as_dataset()

    assert len(dataset) == 9
    assert dataset.indices.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert dataset[4]["x"][0].item() == 5


def test_a_whole_column_is_what_its_records_say(tmp_path: Path) -> None:
    data = items(25)
    data[3]["x"] = torch.tensor([float("inf")] * 3)
    cache = stoker.precompute(
        data, None, tmp_path, name="whole", max_quarantined=0.1, workers=0, progress=None
    )

    assert torch.equal(cache["x"][:], torch.stack([cache[i]["x"] for i in cache.indices.tolist()]))
