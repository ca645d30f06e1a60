"""Several caches in one loader: each record with its partners, in one order, from every tier."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker import transforms
from stoker.errors import ConfigError, CorruptError, MissingRecordError, RecordError, StaleStateError

COUNT, TEXTS = 57, 7


def stored(folder: Path, name: str, items: list[dict[str, Any]], keys: Sequence[str], **more: Any) -> Any:
    source = stoker.TorchSource(items, keys=keys, version=name)
    return stoker.precompute(source, None, folder, name=name, workers=0, progress=None, **more)


def caption(key: str) -> str:
    """Images share seven texts."""
    return f"text {int(key[4:-4]) % TEXTS}"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> stoker.Zip:
    folder = tmp_path_factory.mktemp("zip")
    images = stored(
        folder,
        "images",
        [{"mean": torch.full((2, 3), float(i)), "logvar": torch.zeros(2, 3)} for i in range(COUNT)],
        [f"img/{i}.png" for i in range(COUNT)],
    )
    texts = stored(
        folder,
        "texts",
        [{"hidden": torch.full((i + 1, 2), float(i))} for i in range(TEXTS)],
        [f"text {i}" for i in range(TEXTS)],
    )
    labels = stored(
        folder,
        "labels",
        [{"label": torch.tensor(1000 + i)} for i in reversed(range(COUNT))],
        [f"img/{i}.cls" for i in reversed(range(COUNT))],
    )
    return stoker.zip(image=images, text=texts, label=labels, on={"text": caption, "label": "stem"})


def check(batch: Any) -> None:
    """Every row of a batch has its own partners."""
    for row, index in enumerate(batch["index"].tolist()):
        assert batch["image.mean"][row, 0, 0] == index
        assert batch["label"][row] == 1000 + index
        text = batch["text"][row]
        assert len(text) == index % TEXTS + 1
        assert text[0, 0] == index % TEXTS


@pytest.mark.parametrize("shuffle", [False, True, "block", "block(2,8)"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_record_comes_with_its_partners(joined: stoker.Zip, tier: str, shuffle: bool | str) -> None:
    loader = stoker.Loader(joined, 8, shuffle=shuffle, tier=tier, seed=5)

    for _ in range(2):
        seen: list[int] = []
        for batch in loader:
            check(batch)
            seen += batch["index"].tolist()
        assert sorted(seen) == list(range(COUNT))


def test_the_order_is_that_of_the_first_cache_alone(joined: stoker.Zip) -> None:
    alone = [b["index"].tolist() for b in stoker.Loader(joined.main, 8, shuffle=True, seed=3)]

    assert [b["index"].tolist() for b in stoker.Loader(joined, 8, shuffle=True, seed=3)] == alone


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 20),
    stop=st.integers(0, 5),
    seed=st.integers(0, 9),
    world=st.integers(1, 3),
    tiers=st.tuples(st.sampled_from(["host", "disk"]), st.sampled_from(["host", "disk"])),
)
def test_it_resumes_anywhere_at_another_tier(
    joined: stoker.Zip, batch: int, stop: int, seed: int, world: int, tiers: tuple[str, str]
) -> None:
    make = {"batch_size": batch, "shuffle": True, "seed": seed, "rank": world - 1, "world_size": world}
    loader = stoker.Loader(joined, tier=tiers[0], **make, drop_last=False)
    passed = iter(loader)
    for _ in range(min(stop, len(loader))):
        next(passed)
    state = loader.state_dict()
    rest = [*passed]

    again = stoker.Loader(joined, tier=tiers[1], **make, drop_last=False)
    again.load_state_dict(state)

    if state["epoch"] == 0:
        found = [*again]
        assert [b["index"].tolist() for b in found] == [b["index"].tolist() for b in rest]
        for one in found:
            check(one)


def test_parts_of_records_are_chosen_by_the_names_in_batches(joined: stoker.Zip) -> None:
    choose = {"text": stoker.Rows(3), "image.mean": stoker.OneOf()}
    for tier in ("host", "disk"):
        loader = stoker.Loader(joined, 8, shuffle=True, tier=tier, choose=choose)
        for batch in loader:
            assert batch["text"].shape[1:] == (3, 2)
            assert batch["text.lengths"].tolist() == [min(3, i % TEXTS + 1) for i in batch["index"].tolist()]
            assert torch.equal(batch["text"][:, 0, 0].long(), batch["index"] % TEXTS)
            assert batch["image.mean"].shape[1:] == (3,)
    with pytest.raises(ConfigError, match="fields of several caches"):
        stoker.Loader(joined, 8, choose={("text", "image.mean"): stoker.Rows(2)})
    with pytest.raises(ConfigError, match="choose names"):
        stoker.Loader(joined, 8, choose={"mean": stoker.OneOf()})


def test_ranks_share_the_records(joined: stoker.Zip) -> None:
    seen: list[int] = []
    for rank in range(3):
        loader = stoker.Loader(joined, 4, shuffle=True, rank=rank, world_size=3, drop_last=False)
        for batch in loader:
            check(batch)
            seen += batch["index"].tolist()

    assert sorted(seen) == list(range(COUNT))


def test_a_state_of_other_partners_is_refused(joined: stoker.Zip) -> None:
    loader = stoker.Loader(joined, 8, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    other = stoker.zip(
        image=joined.caches["image"],
        text=joined.caches["text"],
        label=joined.caches["label"],
        on={"text": lambda _: "text 0", "label": "stem"},
    )

    with pytest.raises(StaleStateError, match="zipped"):
        stoker.Loader(other, 8, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("field", ["text", "image.mean"])
def test_a_state_of_other_choices_is_refused(joined: stoker.Zip, field: str) -> None:
    def loader(count: int | None) -> stoker.Loader:
        choose = None if count is None else {field: stoker.Rows(count)}
        return stoker.Loader(joined, 8, shuffle=True, choose=choose)

    for saved, other in ((1, 2), (1, None), (None, 1)):
        made = loader(saved)
        next(iter(made))
        loader(saved).load_state_dict(made.state_dict())
        with pytest.raises(StaleStateError, match=r"choose.*Rows\(count=1, random=True\)"):
            loader(other).load_state_dict(made.state_dict())


def test_transforms_and_settings_go_by_the_names_in_batches(joined: stoker.Zip) -> None:
    def double(batch: Any) -> Any:
        return {**batch, "label": batch["label"] * 2}

    loader = stoker.Loader(
        joined,
        8,
        ragged=stoker.Pad(value={"text": -1}),
        normalize={"image.mean": stoker.Normalization(mean=0, std=2)},
        transforms=[double, transforms.Flip(axis=-1, fields=["image.logvar"])],
    )

    batch = next(iter(loader))

    assert batch["image.mean"][4, 0, 0] == 2
    assert batch["label"][4] == 2 * 1004
    assert batch["text.lengths"].tolist() == [i % TEXTS + 1 for i in range(8)]
    assert batch["text"][0, 1:].eq(-1).all()
    with pytest.raises(ConfigError, match=r"normalize names \['mean'\]"):
        stoker.Loader(joined, 8, normalize={"mean": stoker.Normalization(mean=0, std=2)})


def test_indices_and_weights_are_those_of_the_first_cache(joined: stoker.Zip) -> None:
    some = stoker.Loader(joined, 2, indices=[9, 3, 9])
    assert [b["index"].tolist() for b in some] == [[9, 3], [9]]
    for batch in some:
        check(batch)

    weights = torch.zeros(COUNT)
    weights[[4, 8]] = 1
    drawn = stoker.Loader(joined, 16, weights=weights.tolist(), seed=2)
    for batch in drawn:
        check(batch)
        assert {*batch["index"].tolist()} <= {4, 8}


def test_an_empty_selection_of_joined_caches_is_named(joined: stoker.Zip) -> None:
    with pytest.raises(ConfigError, match="indices= is empty"):
        stoker.Loader(joined, 4, indices=[])
    for none in (joined.where("sample_index > 100000"), joined.select([])):
        with pytest.raises(ConfigError, match=r"0 records.* is empty"):
            stoker.Loader(none, 4)


def test_missing_partners_are_named_before_training(tmp_path: Path) -> None:
    one = stored(tmp_path, "one", [{"x": torch.ones(1)}] * 4, ["a", "b", "c", "d"])
    two = stored(tmp_path, "two", [{"y": torch.ones(1)}] * 2, ["a", "c"])

    with pytest.raises(MissingRecordError, match=r"2 of 4 records have no partner in two .*'b', 'd'"):
        stoker.zip(one=one, two=two)

    left = stoker.zip(one=one, two=two, missing="drop")
    assert left.keys() == ["a", "c"]
    assert [b["index"].tolist() for b in stoker.Loader(left, 4)] == [[0, 2]]


def test_a_quarantined_partner_is_missing(tmp_path: Path) -> None:
    bad = [{"y": torch.tensor([float("nan") if i == 2 else 1.0])} for i in range(4)]
    keys = ["a", "b", "c", "d"]
    one = stored(tmp_path, "one", [{"x": torch.ones(1)}] * 4, keys)
    two = stored(tmp_path, "two", bad, keys, max_quarantined=0.5)

    with pytest.raises(MissingRecordError, match=r"1 of 4 .*'c'"):
        stoker.zip(one=one, two=two)


def test_keys_that_name_several_partners_are_refused(tmp_path: Path) -> None:
    one = stored(tmp_path, "one", [{"x": torch.ones(1)}] * 2, ["a", "b"])
    two = stored(tmp_path, "two", [{"y": torch.ones(1)}] * 3, ["a", "b", "a"])

    with pytest.raises(ConfigError, match=r"2 samples of two .* have the key 'a'"):
        stoker.zip(one=one, two=two)


def test_caches_of_one_source_are_joined_although_keys_repeat(tmp_path: Path) -> None:
    keys = ["a", "a", "b"]
    one = stored(tmp_path, "one", [{"x": torch.tensor([float(i)])} for i in range(3)], keys)
    two = stored(tmp_path, "two", [{"y": torch.tensor([float(i)])} for i in range(3)], keys)

    batch = next(iter(stoker.Loader(stoker.zip(one=one, two=two), 3)))

    assert torch.equal(batch["one"], batch["two"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda z: stoker.zip(one=z.main), "at least two"),
        (lambda z: stoker.zip(one=z.main, two=z.main, on={"three": "key"}), "caches but the first are two"),
        (lambda z: stoker.zip(one=z.main, two=z.main, on="name"), "'key', 'stem', 'index'"),
        (lambda z: stoker.zip(one=z.main, two=z.main, on={"two": lambda _: 3}), "Expected a text"),
        (lambda z: stoker.zip(one=z.main, two=z.main, missing="mask"), "refuse or drop"),
        (lambda z: stoker.zip(one=z.main, two=3), "Expected a stoker.Cache"),
        (
            lambda z: stoker.zip(image=z.main, index=z.caches["label"], on="stem"),
            "'index' in batches",
        ),
        (
            lambda z: stoker.zip(**{"image": z.main, "image.mean": z.caches["label"]}, on="stem"),
            "'image.mean' in batches",
        ),
        (lambda z: stoker.Loader(z, 4, windows=stoker.Windows()), "Leave windows out"),
        (lambda z: stoker.Loader(z, 4, indices=[999]), "sample 999"),
        (lambda z: stoker.Mixture([stoker.Loader(z, 4)]), "joins several"),
        (lambda z: z.where("nothing = 1"), "Columns of image"),
    ],
)
def test_what_cannot_be_joined_says_so(
    joined: stoker.Zip, make: Callable[[stoker.Zip], object], says: str
) -> None:
    with pytest.raises(stoker.StokerError, match=says):
        make(joined)


def test_records_are_read_and_filtered_by_the_names_in_batches(joined: stoker.Zip) -> None:
    record = joined.get("img/11.png")
    assert record["label"] == 1011
    assert record["text"].shape == (5, 2)

    some = joined.where("label >= 1050 AND key <> 'img/52.png'")
    assert some.indices.tolist() == [50, 51, 53, 54, 55, 56]
    for batch in stoker.Loader(some, 4, shuffle=True):
        check(batch)
    assert len(some.as_dataset()) == 6
    assert some.as_dataset()[0]["label"] == 1050


def test_joined_caches_are_read_as_one_cache_is(tmp_path: Path) -> None:
    keys = ["a", "b", "c", "d", "e"]
    one = stored(tmp_path, "one", [{"x": torch.full((2,), float(i))} for i in range(5)], keys)
    two = stored(tmp_path, "two", [{"y": torch.full((i + 1,), float(i))} for i in (4, 1, 3)], ["e", "b", "d"])
    some = stoker.zip(one=one, two=two, missing="drop")

    assert [record["one"][0].item() for record in some] == [1, 3, 4]
    for index in (-1, 4, np.int64(4), torch.tensor(4)):
        assert some[index]["two"].tolist() == [4] * 5
    assert some[1:4]["index"].tolist() == [1, 3]
    assert some[1:4]["one"].tolist() == [[1, 1], [3, 3]]
    assert [len(value) for value in some[[4, -4]]["two"]] == [5, 2]
    assert some[:0]["one"].shape == (0, 2)
    assert [index in some for index in range(-1, 6)] == [False, False, True, False, True, True, False]
    with pytest.raises(MissingRecordError, match="sample 2 of one"):
        some[2]
    with pytest.raises(MissingRecordError, match="does not exist"):
        some[5]
    with pytest.raises(RecordError, match=r"caches\['two'\]\['y'\]"):
        some["two"]
    assert some.caches["two"]["y"][some.indices_in["two"]][2].tolist() == [4] * 5


def test_samples_without_keys_are_not_joined_by_position_in_silence(tmp_path: Path) -> None:
    def unkeyed(name: str, values: Sequence[int], encoder: Any = None) -> stoker.Cache:
        items = [{"x": torch.tensor([float(value)])} for value in values]
        return stoker.precompute(items, encoder, tmp_path, name=name, workers=0, progress=None)

    ten, many, other = unkeyed("ten", range(10)), unkeyed("many", range(25)), unkeyed("other", range(5, 15))

    for on in ("key", "stem"):
        for partner in (many, other):
            with pytest.raises(ConfigError, match=r"ten.*10 samples.*no keys.*on='index'"):
                stoker.zip(a=ten, b=partner, on=on)
    assert len(stoker.zip(a=ten, b=many, on="index")) == 10
    assert len(stoker.zip(a=ten, b=other, c=many, on={"b": "index", "c": str})) == 10


def test_caches_of_the_same_samples_are_joined_without_keys(tmp_path: Path) -> None:
    items = [{"x": torch.tensor([float(i)])} for i in range(10)]
    one, two = (
        stoker.precompute(items, encoder, tmp_path, name=name, workers=0, progress=None)
        for name, encoder in (("one", None), ("two", torch.nn.Linear(1, 3).requires_grad_(False)))
    )

    (batch,) = stoker.Loader(stoker.zip(one=one, two=two), 10)

    assert batch["two"].shape == (10, 3)


def test_records_that_the_first_caches_table_leaves_out_need_no_partner(tmp_path: Path) -> None:
    one = stored(tmp_path, "one", [{"x": torch.ones(1)}] * 4, ["a", "b", "c", "d"])
    two = stored(tmp_path, "two", [{"y": torch.ones(1)}] * 2, ["a", "c"])
    (tmp_path / "table.csv").write_text("id,label\n0,5\n2,6\n")
    join = {"table": tmp_path / "table.csv", "key": "id", "columns": ["label"], "missing": "drop"}

    labeled = stoker.zip(one=stoker.open_cache(one.path, join=join), two=two)

    assert labeled.keys() == ["a", "c"]
    (batch,) = stoker.Loader(labeled, 4)
    assert batch["one.label"].tolist() == [5, 6]


def test_records_of_a_large_join_are_selected_in_little_memory(joined: stoker.Zip) -> None:
    count = 200_000
    every = np.arange(count)
    large = stoker.Zip({"one": joined.main, "two": joined.main}, {"one": every, "two": every})
    tracemalloc.start()

    some = large.select(every[::2])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(some) == count // 2
    assert peak_bytes < 50 * count


def test_a_condition_reads_fields_called_number_of_each_cache(tmp_path: Path) -> None:
    keys = ["a", "b", "c"]
    one = stored(tmp_path, "one", [{"x": torch.ones(1), "number": 9 - i} for i in range(3)], keys)
    two = stored(tmp_path, "two", [{"y": torch.ones(1), "number": i, "key": i} for i in range(3)], keys)

    both = stoker.zip(one=one, two=two)

    assert both.where('"two.number" > 0 AND "one.number" > 7').indices.tolist() == [1]
    assert both.where("\"two.key\" = 2 AND key = 'c' AND sample_index = 2").indices.tolist() == [2]


def test_it_can_be_pickled_in_mid_epoch(joined: stoker.Zip) -> None:
    loader = stoker.Loader(joined, 8, shuffle=True, seed=1)
    passed = iter(loader)
    next(passed)

    copied = pickle.loads(pickle.dumps(loader))

    assert next(iter(copied))["index"].tolist() == next(passed)["index"].tolist()


def test_a_damaged_partner_is_encoded_again(tmp_path: Path) -> None:
    keys = [str(i) + "k" for i in range(20)]
    one = stored(tmp_path, "one", [{"x": torch.ones(64)}] * 20, keys)
    two = stored(tmp_path, "two", [{"y": torch.full((64,), float(i))} for i in range(20)], keys)
    (shard,) = two.path.glob("shard-*")
    data = bytearray(shard.read_bytes())
    at = bytes(data).rindex(torch.full((64,), 7.0).numpy().tobytes())
    data[at + 5] ^= 0xFF
    shard.write_bytes(data)

    with_source = stoker.zip(one=one, two=two)
    without = stoker.zip(one=one, two=stoker.open_cache(two.path))

    with pytest.raises(CorruptError):
        for _ in stoker.Loader(without, 5, tier="disk"):
            pass
    loader = stoker.Loader(with_source, 5, tier="disk")
    values = torch.cat([batch["two"][:, 0] for batch in loader])
    assert values.tolist() == list(range(20))
    assert loader.repaired == 1


def test_an_abandoned_pass_begins_again(joined: stoker.Zip) -> None:
    loader = stoker.Loader(joined, 8, shuffle=True, seed=1)
    first = next(iter(loader))

    for batch in loader:
        check(batch)
    loader.set_epoch(0)

    assert next(iter(loader))["index"].tolist() == first["index"].tolist()
