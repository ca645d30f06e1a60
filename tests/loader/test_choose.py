"""What part of a record is read: the same bytes from every tier, while filling, on ranks, after a resume."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError, RecordError, StaleStateError
from stoker.loader import Loader, Mixture, Normalization, OneOf, Rows, Span, Windows, disk
from stoker.loader.choose import FieldGroup, chosen_rows
from stoker.splitmix import GAMMA, MASK, Salt, mix, stream
from stoker.store import Cache, open_cache
from stoker.store.shard import ShardFile
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
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    while True:
        low, high = place % (1 << low_bits), place >> low_bits
        for step in range(6):
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
        if choice.random == "turn":
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
    return sorted(permuted(key, size, place) for place in range(count))


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
    "view": [OneOf(), OneOf("turn"), OneOf(random=False), Rows(2), Rows(None)],
    "clip": [Span(4), Span(12), Span(4, random=False), Rows(3), Rows(9), Rows(11), OneOf("turn")],
    "caption": [OneOf(), OneOf("turn"), Rows(2), OneOf(random=False)],
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
    max_examples=example_count(160),
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
