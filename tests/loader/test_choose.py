"""What part of a record is read: the same bytes from every tier, while filling, on ranks, after a resume."""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError, CorruptError, RecordError, StaleStateError
from stoker.loader import Loader, Mixture, Normalization, OneOf, Rows, Span, Windows
from stoker.loader.choose import FieldGroup, chosen_rows
from stoker.splitmix import GAMMA, MASK, Salt, mix, stream
from stoker.store import Cache, open_cache
from stoker.store.shard import FieldReader
from tests.kit.amount import example_count
from tests.kit.orders import in_order
from tests.loader.caches import write_cache
from tests.loader.test_filling import Steps, groups_of_one
from tests.loader.test_partial import HOMES, move

SHARDS = (3, 4, 5, 2, 6, 4)
COUNT = sum(SHARDS)
LENGTHS = [(7 * number) % 23 for number in range(COUNT)]
"""Rows of a bag: of some none, of others fewer than are chosen."""
BAG = ("features", "coords")


def bags(lengths: Sequence[int] = LENGTHS, width: int = 3) -> dict[str, Any]:
    """Bags whose values say record, row and column; views; a fixed field with rows; sounds; a number."""
    count = len(lengths)
    generator = torch.Generator().manual_seed(3)
    return {
        "features": [
            1000.0 * number + torch.arange(rows * width).reshape(rows, width)
            for number, rows in enumerate(lengths)
        ],
        "coords": [
            torch.arange(rows * 2).reshape(rows, 2) - 100 * number for number, rows in enumerate(lengths)
        ],
        "view": torch.randn((count, 4, 2, 5), generator=generator).half(),
        "caption": [torch.randn((1 + n % 3, 3), generator=generator) for n in range(count)],
        "clip": torch.randint(0, 255, (count, 9, 2), generator=generator, dtype=torch.uint8),
        "tokens": [torch.arange(n % 5) for n in range(count)],
        "label": torch.arange(count),
    }


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return bags()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> Cache:
    return write_cache(tmp_path_factory.mktemp("bags"), fields, shards=SHARDS, compression=("none", "zstd"))


# ----------------------------------------------------------------------------------------------------------
# What is chosen, once more: example by example, in plain Python.


def key_of(name: str, seed: int, epoch: int, example: int) -> int:
    base = mix(stream(seed, epoch, Salt.CHOICE) ^ (zlib.crc32(name.encode()) + 1) * GAMMA & MASK)
    return mix((example + 1) * GAMMA + base)


def permuted(key: int, size: int, place: int) -> int:
    """Where a place goes in the permutation of `range(size)` of a key."""
    bits = (size - 1).bit_length()
    low_bits = bits // 2
    while True:
        low, high = place % (1 << low_bits), place >> low_bits
        for step in range(8):
            word = mix(key + (step + 1) * GAMMA)
            if step % 2:
                high ^= mix((low + 1) * GAMMA + word) % (1 << bits - low_bits)
            else:
                low ^= mix((high + 1) * GAMMA + word) % (1 << low_bits)
        place = high << low_bits | low
        if place < size:
            return place


def expected_rows(choice: Any, name: str, seed: int, epoch: int, example: int, size: int) -> list[int]:
    if isinstance(choice, OneOf):
        if choice.random == "rotate":
            return [(key_of(name, seed, 0, example) % size + epoch) % size]
        return [key_of(name, seed, epoch, example) % size if choice.random else 0]
    if isinstance(choice, Span):
        room = max(0, size - choice.length)
        start = key_of(name, seed, epoch, example) % (room + 1) if choice.random else room // 2
        return [*range(start, min(size, start + choice.length))]
    count = choice.count
    if size <= count:
        return [*range(size)]
    if not choice.random:
        return [(2 * place + 1) * size // (2 * count) for place in range(count)]
    key = key_of(name, seed, epoch, example)
    if size > 64:
        return sorted(permuted(key, size, place) for place in range(count))
    word = mix(key + GAMMA)
    by_word = sorted(range(size), key=lambda row: (mix((row + 1) * GAMMA + word) >> 7 & (1 << 56) - 1, row))
    return sorted(by_word[:count])


def normalized(values: torch.Tensor, how: Normalization | None, dtype: torch.dtype | None) -> torch.Tensor:
    if how is not None:
        factor, shift = 1.0 / how.std[0], -how.mean[0] / how.std[0]  # type: ignore[index]
        values = values.float() * torch.tensor(factor) + torch.tensor(shift)
    return values.to(dtype) if dtype is not None and values.is_floating_point() else values


def check(
    batch: Any, fields: dict[str, Any], choose: dict[Any, Any], epoch: int, seed: int, **how: Any
) -> None:
    """Compare a batch with the chosen rows of the fields."""
    normalize, dtype = how.get("normalize") or {}, how.get("dtype")
    wanted = None if dtype is None else getattr(torch, dtype)
    groups = [(k if isinstance(k, tuple) else (k,), choice) for k, choice in choose.items()]
    chosen = {name for names, choice in groups for name in names if choice != Rows(None)}
    index = batch["index"].tolist()
    for names, choice in groups:
        for name in names if choice != Rows(None) else ():
            own = [
                expected_rows(choice, "+".join(sorted(names)), seed, epoch, number, len(fields[name][number]))
                for number in index
            ]
            parts = [fields[name][number][rows] for number, rows in zip(index, own, strict=True)]
            parts = [normalized(part, normalize.get(name), wanted) for part in parts]
            if isinstance(choice, OneOf):
                expected = torch.stack([part[0] for part in parts])
            else:
                count = choice.length if isinstance(choice, Span) else choice.count
                expected = parts[0].new_zeros((len(parts), count, *parts[0].shape[1:]))
                for place, part in enumerate(parts):
                    expected[place, : len(part)] = part
                if isinstance(fields[name], list) or fields[name].shape[1] < count:
                    assert batch[f"{name}.lengths"].tolist() == [len(part) for part in parts]
                else:
                    assert f"{name}.lengths" not in batch
            assert (f"{name}.start" in batch) == isinstance(choice, Span)
            if isinstance(choice, Span):
                assert batch[f"{name}.start"].tolist() == [rows[0] if rows else 0 for rows in own]
            assert batch[name].dtype == expected.dtype
            assert torch.equal(batch[name], expected), name
    for name in fields.keys() - chosen:
        own = [normalized(fields[name][number], normalize.get(name), wanted) for number in index]
        assert all(torch.equal(one, other) for one, other in zip(batch[name], own, strict=True)), name


CHOICES: dict[str, list[Any]] = {
    "bag": [
        Rows(1),
        Rows(5),
        Rows(16),
        Rows(40),
        Rows(5, random=False),
        Rows(None),
        Span(6),
        Span(30, random=False),
    ],
    "view": [OneOf(), OneOf("rotate"), OneOf(random=False), Rows(2), Rows(None)],
    "clip": [Span(4), Span(12), Span(4, random=False), Rows(3), Rows(9), Rows(11), OneOf("rotate")],
    "caption": [OneOf(), OneOf("rotate"), Rows(2), OneOf(random=False)],
    "label": [],
}


@st.composite
def choices(draw: st.DrawFn) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    kind = draw(st.sampled_from(["together", "apart", "one", "none"]))
    if kind == "together":
        found[BAG] = draw(st.sampled_from(CHOICES["bag"]))
    for name in {"apart": BAG, "one": BAG[:1]}.get(kind, ()):
        found[name] = draw(st.sampled_from(CHOICES["bag"]))
    for name in ("view", "clip", "caption"):
        if (one := draw(st.sampled_from([None, *CHOICES[name]]))) is not None:
            found[name] = one
    return found


def rest_of(loader: Loader, epochs: int) -> Iterator[tuple[int, Any]]:
    """Yield the batches of the rest of an epoch and of those that follow, with their epoch."""
    for _ in range(epochs):
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch


def filling(folder: Path, fields: dict[str, Any], seed: int) -> Cache:
    return Steps(folder, fields, chance=seed).cache()  # type: ignore[return-value]


def same_everywhere(
    cache: Cache, fields: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Any choice, tier, number of ranks, order and place: the rows that plain Python finds."""
    choose = data.draw(choices())
    seed = data.draw(st.integers(0, 9))
    world = data.draw(st.sampled_from([1, 1, 2, 3]))
    tier = data.draw(st.sampled_from(["disk", "host", "device", "mixed", "filling"]))
    how: dict[str, Any] = {
        "dtype": data.draw(st.sampled_from([None, "bfloat16"])),
        "normalize": data.draw(st.sampled_from([None, {"features": Normalization(mean=0.25, std=1.5)}])),
    }
    orders = (
        ["full", "sequential"] if tier == "filling" else ["full", "block(3,12)", "static(1)", "sequential"]
    )
    common: dict[str, Any] = {
        "choose": choose,
        "seed": seed,
        "batch_size": data.draw(st.integers(1, 7)),
        "world_size": world,
        **how,
        **in_order(data.draw(st.sampled_from(orders))),
    }
    common["batch_size"] = min(common["batch_size"], COUNT // world // 2)
    epoch = data.draw(st.integers(0, 5)) if tier != "filling" else 0
    homes = st.lists(st.sampled_from(HOMES), min_size=len(SHARDS), max_size=len(SHARDS))
    plans = data.draw(st.lists(homes, min_size=2, max_size=2))
    chances, stops = (data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)) for _ in range(2))
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(world):

        def loader(rank: int = rank, place: int = 0) -> Loader:
            if tier == "filling":
                return Loader(
                    filling(folder / f"{rank}-{place}", fields, chances[place]), rank=rank, **common
                )
            made = Loader(cache, rank=rank, tier="disk" if tier == "mixed" else tier, **common)
            if tier == "mixed":
                move(made, plans[place])
            return made

        first = loader()
        first.set_epoch(epoch)
        running, stop = rest_of(first, 1), min(stops[rank], len(first))
        head = [next(running) for _ in range(stop)]
        state = first.state_dict()
        second = loader(place=1)
        second.load_state_dict(state)
        epochs = 2 if stop < len(first) else 1
        for at, batch in [*head, *rest_of(second, epochs)]:
            check(batch, fields, choose, at, seed, **how)
            seen.update((at, number) for number in batch["index"].tolist())
    assert max(seen.values()) == 1


@settings(
    max_examples=example_count(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_chosen_rows_are_the_same_on_every_tier_rank_and_after_a_resume(
    cache: Cache,
    fields: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    groups_of_one(monkeypatch)
    same_everywhere(cache, fields, tmp_path_factory.mktemp("filling"), monkeypatch, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chosen_rows_are_the_same_everywhere_a_thousand_times(
    cache: Cache,
    fields: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    groups_of_one(monkeypatch)
    same_everywhere(cache, fields, tmp_path_factory.mktemp("filling"), monkeypatch, data)


# ----------------------------------------------------------------------------------------------------------
# What is drawn.


def rows_of(choice: Any, examples: Any, sizes: Any, epoch: int = 0, seed: int = 0) -> Any:
    return chosen_rows(FieldGroup(fields=("x",), choice=choice), seed, epoch, examples, sizes)


@pytest.mark.parametrize(
    "choice", [Rows(3), Rows(40), Rows(5, random=False), Span(7), OneOf(), OneOf("rotate")]
)
@settings(max_examples=example_count(60), deadline=None)
@given(sizes=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20), seed=st.integers(0, 1 << 62))
def test_numpy_and_torch_choose_the_same_rows(choice: Any, sizes: list[int], seed: int) -> None:
    examples = np.arange(len(sizes)) * 1_000_003
    ours = rows_of(choice, examples, np.array(sizes), 4, seed)
    theirs = rows_of(choice, torch.from_numpy(examples), torch.tensor(sizes), 4, seed)

    assert np.array_equal(ours.rows, theirs.rows.numpy())
    assert np.array_equal(ours.lengths, theirs.lengths.numpy())
    for example, size, rows, length in zip(examples.tolist(), sizes, ours.rows, ours.lengths, strict=True):
        assert rows[:length].tolist() == expected_rows(choice, "x", seed, 4, example, size)
        assert (np.diff(rows[:length]) > 0).all()
        assert 0 <= rows[0] <= rows[-1] < size


@pytest.mark.parametrize(
    ("size", "count"), [(3, 2), (5, 2), (6, 3), (20, 1), (33, 32), (64, 1), (66, 65), (70, 2)]
)
def test_every_subset_of_rows_is_as_likely_as_another(size: int, count: int) -> None:
    draws = 30_000
    rows = rows_of(Rows(count), np.arange(draws), np.full(draws, size), epoch=3).rows

    found = np.unique(rows, axis=0, return_counts=True)[1]

    subsets = len(np.unique(rows, axis=0))
    assert subsets == comb(size, count)
    mean = draws / subsets
    chi = float(((found - mean) ** 2 / mean).sum())
    assert abs(chi - (subsets - 1)) < 5 * (2 * (subsets - 1)) ** 0.5


def test_each_start_of_a_crop_is_as_likely_as_another() -> None:
    starts = rows_of(Span(10), np.arange(40_000), np.full(40_000, 29)).start
    counts = np.bincount(starts)
    assert len(counts) == 20
    assert abs(counts - 2000).max() < 5 * 2000**0.5


def test_epochs_examples_and_fields_draw_apart() -> None:
    examples, sizes = np.arange(200), np.full(200, 1000)
    first, other, epoch = (
        rows_of(Rows(3), examples, sizes, epoch=epoch, seed=seed).rows
        for epoch, seed in ((0, 0), (0, 1), (1, 0))
    )
    field = chosen_rows(FieldGroup(fields=("y",), choice=Rows(3)), 0, 0, examples, sizes).rows
    found = [tuple(rows) for drawn in (first, other, epoch, field) for rows in drawn.tolist()]
    assert len({*found}) == len(found)


@pytest.mark.parametrize("views", [1, 2, 5])
def test_views_take_turns_and_each_comes_once_in_as_many_epochs(views: int) -> None:
    epochs = [
        rows_of(OneOf("rotate"), np.arange(300), np.full(300, views), epoch=epoch).start
        for epoch in range(3, 3 + views)
    ]
    assert (np.sort(np.stack(epochs), axis=0) == np.arange(views)[:, None]).all()
    assert len(np.unique(epochs[0])) == views, "all examples show the same view"


def test_rows_for_validation_are_spread_evenly() -> None:
    rows = rows_of(Rows(4, random=False), np.arange(3), np.array([100, 4, 5])).rows.tolist()
    assert rows == [[12, 37, 62, 87], [0, 1, 2, 3], [0, 1, 3, 4]]


# ----------------------------------------------------------------------------------------------------------
# What is read.


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that are read from shards, by field."""
    found: Counter[str] = Counter()
    right = FieldReader._right

    def noted(self: Any, row: int, low: int, data: Any, *rest: Any) -> bool:
        found[self._name] += len(data)
        return right(self, row, low, data, *rest)

    monkeypatch.setattr(FieldReader, "_right", noted)
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Two bags of 10,000 rows of 1 KiB: 16 of them share a sum."""
    fields = {"features": [torch.randn(10_000, 512).half() for _ in range(2)], "label": torch.arange(2)}
    return write_cache(tmp_path_factory.mktemp("large"), fields)


@pytest.mark.usefixtures("twins_alone")
@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_eight_rows_of_a_large_bag_are_read_without_the_others(
    large: Cache, read: Counter[str], verify: Any
) -> None:
    loader = Loader(large, 1, tier="disk", choose={"features": Rows(8)}, verify=verify)
    list(loader)
    assert 0 < read["features"] <= 2 * 8 * 16 * 1024
    read.clear()
    list(Loader(large, 1, tier="disk"))
    assert read["features"] == 2 * 10_000 * 1024


def test_a_crop_is_read_in_one_piece(large: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    steps = FieldReader.steps

    def noted(self: Any, row: int, start: int, stop: int, *rest: Any, **named: Any) -> Any:
        calls.append((start, stop))
        return steps(self, row, start, stop, *rest, **named)

    monkeypatch.setattr(FieldReader, "steps", noted)
    batch = next(iter(Loader(large, 1, tier="disk", choose={"features": Span(100)})))
    start = int(batch["features.start"])
    assert {*calls[:1]} == {(start, start + 100)}


def test_a_damaged_row_is_refused_when_it_is_chosen_and_only_then(tmp_path: Path) -> None:
    rows = torch.randn(1000, 512).half()
    cache = write_cache(tmp_path, {"features": [rows]})
    file = cache.path / cache.index.shards[0].file
    with file.open("r+b") as out:
        out.seek(cache.shard(0).columns["features"].offset + 500 * 1024)
        out.write(b"\x01\x02\x03")
    damaged = open_cache(cache.path)
    loader = Loader(damaged, 1, tier="disk", choose={"features": Rows(2, random=False)})
    assert torch.equal(next(iter(loader))["features"][0], rows[[250, 750]])
    with pytest.raises(CorruptError, match=r"features.*sample 0"):
        list(Loader(damaged, 1, tier="disk", choose={"features": Rows(3, random=False)}))


# ----------------------------------------------------------------------------------------------------------
# With other settings.


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "where", [["device"] * 2, ["host"] * 2, ["disk"] * 2, ["device", "host"], ["disk", "device"]]
)
def test_quantized_rows_come_with_their_scales(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, where: list[str]
) -> None:
    generator = torch.Generator().manual_seed(1)
    bags = [torch.randn((rows, 200), generator=generator) * (1 + rows) for rows in (9, 0, 30, 4)]
    views = torch.randn((4, 3, 130), generator=generator)
    folder = tmp_path_factory.mktemp("quantized")
    cache = write_cache(folder, {"features": bags, "view": views}, shards=(2,), dtype=dtype)
    served = {name: [] for name in ("features", "view")}
    for batch in Loader(cache, 1, tier="disk"):
        for name, values in served.items():
            values.append(batch[name][0])
    choose: dict[Any, Any] = {"features": Rows(6), "view": OneOf("rotate")}
    for settings_ in ({}, {"dtype": "float16"}):
        loader = Loader(cache, 3, tier="disk", shuffle=True, seed=4, choose=choose, **settings_)
        move(loader, where)
        for batch in loader:
            check(batch, served, choose, 0, 4, **settings_)


def test_batches_at_fixed_addresses(cache: Cache, fields: dict[str, Any]) -> None:
    choose: dict[Any, Any] = {
        BAG: Rows(5),
        "view": OneOf(),
        "clip": Span(4),
        "caption": OneOf(),
        "tokens": Rows(2),
    }
    loader = Loader(cache, 4, tier="device", static=True, shuffle=True, choose=choose)
    places: set[tuple[int, ...]] = set()
    for batch in loader:
        check(batch, fields, choose, 0, 0)
        places.add(tuple(values.data_ptr() for values in batch.values()))
    assert len(places) == 1


@pytest.mark.parametrize("ragged", ["pad", "pack"])
def test_other_ragged_fields_are_joined_as_without_a_choice(cache: Cache, ragged: str) -> None:
    chosen = next(iter(Loader(cache, 6, ragged=ragged, choose={BAG: Rows(5)})))
    entire = next(iter(Loader(cache, 6, ragged=ragged)))
    for name in entire:
        if name.split(".")[0] not in BAG:
            assert torch.equal(chosen[name], entire[name])
    assert chosen["features"].shape == (6, 5, 3)
    assert torch.equal(chosen["features.lengths"], torch.tensor(LENGTHS[:6]).clamp(max=5))


def test_bags_that_are_all_empty_are_all_zeros(tmp_path: Path) -> None:
    cache = write_cache(
        tmp_path, {"features": [torch.zeros(0, 3)] * 4, "label": torch.arange(4)}, shards=(2,)
    )
    for tier in ("disk", "host", "device"):
        (batch,) = Loader(cache, 4, tier=tier, choose={"features": Rows(2)}, dtype="float16")
        assert torch.equal(batch["features"], torch.zeros(4, 2, 3).half())
        assert batch["features.lengths"].tolist() == [0] * 4


def test_an_empty_bag_at_the_end_of_what_is_mapped_is_not_read_beyond(tmp_path: Path) -> None:
    """The address behind it is of a shard that is not in memory: reading there would end the process."""
    bags = [torch.ones(1, 1024), torch.zeros(0, 1024), torch.ones(1, 1024)]
    cache = write_cache(tmp_path, {"features": bags}, shards=(2,))
    loader = Loader(cache, 2, tier="disk", choose={"features": Rows(3)})
    move(loader, ["host", "disk"])
    batch = next(iter(loader))
    assert batch["features.lengths"].tolist() == [1, 0]
    assert batch["features"].sum((1, 2)).tolist() == [1024.0, 0.0]


def test_draws_by_weight_choose_by_example(cache: Cache, fields: dict[str, Any]) -> None:
    weights = [float(number % 3) for number in range(COUNT)]
    for batch in Loader(cache, 5, weights=weights, choose={BAG: Rows(4)}):
        check(batch, fields, {BAG: Rows(4)}, 0, 0)


@pytest.mark.parametrize("mix", ["batch", "example"])
def test_a_mixture_hands_out_what_its_loaders_choose(
    cache: Cache, fields: dict[str, Any], tmp_path: Path, mix: str
) -> None:
    choose: dict[Any, Any] = {BAG: Rows(4), "view": OneOf(), "clip": Span(4)}
    others = bags(LENGTHS[3:9])
    mixture = Mixture(
        [cache, write_cache(tmp_path, others, name="other")],
        batch_size=3,
        mix=mix,
        choose=choose,
        shuffle=True,
    )
    if mix == "example":  # examples of both caches are numbered as one
        fields = {name: [*fields[name], *others[name]] for name in fields if name != "clip"}
        fields["clip"] = torch.cat((bags()["clip"], others["clip"]))
    seen: set[int] = set()
    for batch in mixture:
        tasks = batch.pop("tasks")
        seen |= {*tasks.tolist()}
        of_other = int(tasks[0]) == 1
        (loader,) = mixture.loaders.values() if mix == "example" else [mixture.loaders[batch["task"]]]
        if mix == "example":
            batch["index"] = batch["index"] + COUNT * tasks
        check(batch, others if mix == "batch" and of_other else fields, choose, 0, loader.options.seed)
    assert seen == {0, 1}


def test_a_cache_of_variants_shows_them_in_turn(tmp_path: Path) -> None:
    data = [{"x": torch.arange(6.0) + 10 * number, "label": number} for number in range(9)]
    encoder = stoker.ModuleEncoder(torch.nn.Identity(), field="x", output="view")
    varied = stoker.precompute(
        data,
        encoder,
        tmp_path,
        name="varied",
        variants=4,
        augment=stoker.transforms.Noise(0.5, fields=["x"]),
        workers=0,
    )
    assert varied.variants == {"view": 4}

    seen: dict[int, list[Any]] = {number: [] for number in range(9)}
    loader = Loader(varied, 4, shuffle=True)
    for _ in range(4):
        for batch in loader:
            for number, view in zip(batch["label"].tolist(), batch["view"], strict=True):
                seen[number].append(view.tolist())

    for number, views in seen.items():
        assert sorted(views) == sorted(varied[number]["view"].tolist())
        assert len({tuple(view) for view in views}) == 4
    (batch, *_) = Loader(varied, 6, choose={"view": Rows(None)})
    assert batch["view"].shape == (6, 4, 6)


def test_a_pickled_loader_goes_on_with_its_choices(cache: Cache, fields: dict[str, Any]) -> None:
    loader = Loader(cache, 5, shuffle=True, choose={BAG: Rows(4)})
    running = iter(loader)
    next(running)
    again = pickle.loads(pickle.dumps(loader))
    for ours, theirs in zip(again, running, strict=True):
        assert torch.equal(ours["features"], theirs["features"])
        check(ours, fields, {BAG: Rows(4)}, 0, 0)


def test_items_of_a_dataset_become_dictionaries_where_lengths_are_told() -> None:
    data = [{"features": torch.ones(rows, 2), "label": rows} for rows in (5, 2)]
    (batch,) = stoker.cached(data, batch_size=2, cache_dir=None, choose={"features": Rows(3)})
    assert batch["features.lengths"].tolist() == [3, 2]
    pairs = [(torch.arange(6).reshape(3, 2) + number, number) for number in range(2)]
    ((views, labels),) = stoker.cached(pairs, batch_size=2, cache_dir=None, choose={"0": OneOf(random=False)})
    assert views.tolist() == [[0, 1], [1, 2]]
    assert labels.tolist() == [0, 1]


# ----------------------------------------------------------------------------------------------------------
# What is refused.


def test_a_state_of_other_choices_is_refused(cache: Cache) -> None:
    state = Loader(cache, 4, choose={BAG: Rows(4)}).state_dict()
    Loader(cache, 4, choose={BAG: Rows(4)}).load_state_dict(state)
    for other in (None, {BAG: Rows(5)}, {"features": Rows(4)}, {BAG: Rows(4, random=False)}):
        with pytest.raises(StaleStateError, match=r"choose .*Rows\(count=4, random=True\)"):
            Loader(cache, 4, choose=other).load_state_dict(state)
        with pytest.raises(StaleStateError, match="choose"):
            Loader(cache, 4, choose={BAG: Rows(4)}).load_state_dict(
                Loader(cache, 4, choose=other).state_dict()
            )
    mixed = Mixture([cache], batch_size=4, choose={BAG: Rows(4)}).state_dict()
    with pytest.raises(StaleStateError, match="choose"):
        Mixture([cache], batch_size=4).load_state_dict(mixed)


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        ("features", "choose is 'features'"),
        ({"features": 8}, "choose is"),
        ({"features": None}, "choose is"),
        ({(): Rows(8)}, "choose is"),
        ({"bag": Rows(8)}, "names the field 'bag'.*Records have caption"),
        ({"label": Rows(1)}, "'label', which holds one number"),
        ({BAG: Rows(2), "coords": Rows(3)}, "names 'coords' twice"),
        ({("coords", "coords"): Rows(2)}, "names 'coords' twice"),
    ],
)
def test_a_malformed_choice_is_named(cache: Cache, choose: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Loader(cache, choose=choose)


@pytest.mark.parametrize(
    "make", [lambda: Rows(0), lambda: Rows(1.5), lambda: Span(0), lambda: OneOf("turns")]
)  # type: ignore[arg-type]
def test_a_count_below_one_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"Expected"):
        make()


def test_windows_and_choices_exclude_each_other(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"latent": torch.randn(4, 9, 2)}, timed=("latent",))
    with pytest.raises(ConfigError, match=r"reads a part of entire records, and windows="):
        Loader(cache, windows=Windows(), choose={"latent": Span(3)})


def test_fields_that_share_rows_have_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "latent": [torch.zeros(n, 2) for n in range(1, 5)],
        "time": [torch.zeros(n + (n == 3)) for n in range(1, 5)],
    }
    cache = write_cache(tmp_path / "a", fields)
    with pytest.raises(RecordError, match=r"'latent' and 'time' of sample 2 have 3 and 4 rows"):
        Loader(cache, choose={("latent", "time"): Rows(2)})
    groups_of_one(monkeypatch)
    with pytest.raises(RecordError, match=r"'latent' and 'time' of sample 2 have 3 and 4 rows"):
        list(Loader(filling(tmp_path / "b", fields, 0), choose={("latent", "time"): Rows(2)}))


def test_a_record_without_a_view_is_named(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"caption": [torch.zeros(n, 2) for n in (2, 1, 0)]})
    with pytest.raises(RecordError, match=r"'caption' of sample 2 holds no view"):
        Loader(cache, choose={"caption": OneOf()})
    assert len(list(Loader(cache, choose={"caption": OneOf()}, indices=[0, 1]))) == 2


def test_channels_that_are_rows_are_not_normalized_by_channel(cache: Cache) -> None:
    how = {"clip": Normalization(mean=[0.0] * 9, std=[1.0] * 9, axis=-2)}
    with pytest.raises(ConfigError, match="channels of 'clip' are its axis 0"):
        Loader(cache, choose={"clip": Rows(3)}, normalize=how)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    fields = {"bag": [torch.zeros(n, 2) for n in (2, 1)], "bag.lengths": torch.arange(2)}
    with pytest.raises(ConfigError, match=r"adds 'bag\.lengths'"):
        Loader(write_cache(tmp_path, fields), choose={"bag": Rows(2)})
