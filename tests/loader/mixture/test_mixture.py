from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import index_in_place, open_cache, precompute
from stoker.errors import ConfigError
from stoker.loader import Loader, Mixture, RecordBatch, WindowBatch, Windows
from stoker.monitor.meter import StallMeter
from stoker.sources.arrays import ArraySource
from stoker.store import Cache
from stoker.store.storage import attach_mirror
from tests.kit.amount import example_count
from tests.loader.caches import write_cache
from tests.loader.mixture.three import MODES, WINDOWS, same, values_of


def task_of(batch: Any) -> str:
    return batch["task"] if isinstance(batch, dict) else batch.task


def examples(batches: list[Any], names: tuple[str, ...]) -> Counter[tuple[str, int, int]]:
    """How often each example came: task, sample, start."""
    return Counter(
        (names[task], *row)
        for batch in batches
        for task, row in zip(batch.tasks.tolist(), batch.index.tolist(), strict=True)
    )


def every(mixture: Mixture, name: str, steps: int, count: int) -> set[tuple[str, int, int]]:
    return {(name, number, start) for number in range(count) for start in range(steps - 1)}


def same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    """Mode x tier x resume at any step x world size: one stream of global batches, each of the same cache."""
    mode = data.draw(st.sampled_from([*MODES, {"mode": "concat", "mix": "example"}]))
    windows = data.draw(st.sampled_from([WINDOWS, Windows(field="latent", horizon=2), None]))
    world_size = data.draw(st.sampled_from([1, 2, 4]))
    tier = data.draw(st.sampled_from(["host", "disk"]))
    epoch, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2**32))
    one = [caches[name] for name in ("ac" if mode.get("mix") == "example" else "abc")]
    common: dict[str, Any] = {**mode, "windows": windows, "seed": seed, "drop_last": True}
    reference = Mixture(one, 4, tier="host", **common)
    reference.set_epoch(epoch)
    expected = list(reference)
    assert len(expected) == len(reference)
    stop = data.draw(st.integers(0, len(expected) - 1))

    stopped = Mixture(one, 4, tier="host", **common)
    stopped.set_epoch(epoch)
    begun = iter(stopped)
    for _ in range(stop):
        next(begun)
    state = json.loads(json.dumps(stopped.state_dict()))
    if stop:
        assert state == json.loads(json.dumps(stopped.state_dict(expected[stop - 1].position)))
    ranks = [
        Mixture(one, 4 // world_size, tier=tier, rank=rank, world_size=world_size, **common)
        for rank in range(world_size)
    ]
    for mixture in ranks:
        mixture.load_state_dict(state)

    rest = list(zip(*ranks, strict=True))

    assert len(rest) == len(expected) - stop
    for parts, whole in zip(rest, expected[stop:], strict=True):
        assert {task_of(part) for part in parts} == {task_of(whole)}
        joined = [torch.cat(values) for values in zip(*map(values_of, parts), strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(joined, values_of(whole), strict=True))
    assert [mixture.epoch for mixture in ranks] == [epoch + 1] * world_size


@settings(max_examples=example_count(50), deadline=None)
@given(data=st.data())
def test_same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    same_bytes_everywhere(caches, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_same_bytes_everywhere_many_times(caches: dict[str, Cache], data: st.DataObject) -> None:
    same_bytes_everywhere(caches, data)


@pytest.mark.parametrize("mix", ["batch", "example"])
def test_concat_serves_every_example_once_in_an_epoch(alike: list[Cache], mix: Any) -> None:
    mixture = Mixture(alike, 10, windows=WINDOWS, mix=mix)

    first, second = list(mixture), list(mixture)

    wanted = every(mixture, "a", 9, 13) | every(mixture, "c", 9, 7)
    assert examples(first, mixture.names) == examples(second, mixture.names) == Counter(wanted)
    assert not all(map(same, first, second))
    assert len(first) == len(mixture) == (17 if mix == "batch" else 16)


def test_caches_with_the_same_fields_are_one_set_of_examples(alike: list[Cache], fields: Any) -> None:
    batches = list(Mixture(alike, 10, windows=WINDOWS))

    assert any(len(set(batch.tasks.tolist())) == 2 for batch in batches)
    for batch in batches:
        assert batch.task is None
        for place, (task, (number, start)) in enumerate(zip(batch.tasks, batch.index, strict=True)):
            own = fields["ac"[task]]
            assert torch.equal(batch.z0[place], own["latent"][number, start])
            assert torch.equal(batch.cond["nu"][place, 0], own["nu"][number])


def test_batches_of_caches_that_differ_are_of_one_each(abc: list[Cache], fields: Any) -> None:
    mixture = Mixture(abc, 4, windows=WINDOWS)
    batches = list(mixture)

    for batch in batches:
        (task,) = set(batch.tasks.tolist())
        number, start = batch.index.unbind(1)
        assert mixture.names[task] == batch.task
        assert torch.equal(batch.z1, fields[batch.task]["latent"][number, start + 1])
    assert {batch.z0.shape[1:] for batch in batches} == {(4, 6), (2, 6)}
    assert [batch.task for batch in batches] != sorted(batch.task for batch in batches)


def test_conditions_are_the_union_by_name_with_masks(abc: list[Cache], fields: Any) -> None:
    forth, back = (Mixture(order, 4, windows=WINDOWS) for order in (abc, abc[::-1]))

    for mixture in (forth, back):
        for batch in mixture:
            number = batch.index[:, 0]
            assert list(batch.cond) == list(batch.mask) == ["bc", "dt", "nu", "re", "time"]
            assert [batch.cond[name].shape[1] for name in batch.cond] == [3, 1, 2, 1, 1]
            if batch.task == "b":
                assert torch.equal(batch.cond["bc"], torch.zeros(len(number), 3))
                assert not batch.mask["bc"].any()
                assert torch.equal(batch.cond["re"][:, 0], fields["b"]["re"][number])
                assert batch.mask["nu"].all()
            else:
                assert torch.equal(batch.cond["bc"], fields[batch.task]["bc"][number])
                assert torch.equal(batch.cond["nu"][:, 0], fields[batch.task]["nu"][number])
                assert not batch.cond["nu"][:, 1].any()
                assert batch.mask["nu"].tolist() == [[True, False]] * len(number)
                assert not batch.mask["re"].any()


def test_dtypes_of_conditions_are_those_that_hold_all_values(tmp_path: Path) -> None:
    a = write_cache(tmp_path, {"x": torch.randn(6, 2), "n": torch.arange(6, dtype=torch.int32)}, name="a")
    b = write_cache(tmp_path, {"x": torch.randn(6, 2).half(), "n": torch.randn(6)}, name="b")

    for batch in Mixture([a, b], 3):
        assert batch["x"].dtype == batch["n"].dtype == torch.float32
    half = next(iter(Mixture([a, b], 3, dtype="float16")))
    assert half["n"].dtype == torch.float16


def test_whole_records_carry_their_own_fields_and_the_conditions_of_all(
    abc: list[Cache], fields: Any
) -> None:
    for batch in Mixture(abc, 4):
        assert isinstance(batch, RecordBatch)
        own = fields[batch["task"]]
        assert torch.equal(batch["latent"], own["latent"][batch["index"]])
        assert list(batch["mask"]) == ["bc", "nu", "re"]
        assert batch["re"].shape == batch["mask"]["re"].shape == (len(batch["index"]),)
        assert batch["nu"].shape == (len(batch["index"]), 2)
        assert bool(batch["mask"]["re"].any()) == (batch["task"] == "b")


def test_weighted_batches_come_as_often_as_their_weights_say(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 4, windows=WINDOWS, mode="weighted", weights=[6, 3, 1], epoch_examples=400)

    for _ in range(3):
        assert Counter(batch.task for batch in mixture) == {"a": 60, "b": 30, "c": 10}
    assert len(mixture) == 100


def test_weighted_sampling_repeats_no_example_within_a_pass_over_its_cache(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 4, windows=WINDOWS, mode="weighted", weights=[6, 3, 1], epoch_examples=132)
    batches = [batch for _ in range(5) for batch in mixture if batch.task == "b"]

    lap = 10 * 6 // 4
    for first in range(0, len(batches) - lap, lap):
        assert set(examples(batches[first : first + lap], mixture.names).values()) == {1}
    assert len(batches) > 2 * lap


def test_the_longest_is_served_whole_and_so_are_the_others(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 5, windows=WINDOWS, mode="round_robin", exhausted="longest")

    for _ in range(2):
        served = examples(list(mixture), mixture.names)
        for name, steps, count in (("a", 9, 13), ("b", 7, 10), ("c", 9, 7)):
            assert every(mixture, name, steps, count) <= served.keys()


def test_round_robin_takes_turns_until_the_first_has_no_batch_left(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 4, windows=WINDOWS, mode="round_robin")

    assert [batch.task for batch in mixture] == ["a", "b", "c"] * 14
    assert len(mixture) == 42


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("other", ["in place", "at a URL"])
@pytest.mark.parametrize("first", [True, False])
def test_a_cache_here_goes_together_with_one_that_lies_elsewhere(
    tmp_path: Path, tier: str, other: str, first: bool
) -> None:
    values = torch.arange(24 * 4096, dtype=torch.float32).view(24, 4096)
    np.save(tmp_path / "a.npy", values[:12].numpy())
    np.save(tmp_path / "b.npy", values[12:].numpy())
    here = precompute(ArraySource(tmp_path / "a.npy"), None, tmp_path / "c", name="a", workers=0)
    source = ArraySource(tmp_path / "b.npy")
    if other == "in place":
        away = index_in_place(source, tmp_path / "c", name="b")
    else:
        precompute(source, None, tmp_path / "there", name="b", workers=0)
        away = open_cache(attach_mirror(f"file://{tmp_path / 'there'}/b", tmp_path / "m"))
    caches = [here, away] if first else [away, here]
    mixture = Mixture(caches, 4, mode="concat", mix="example", tier=tier)

    name = next(iter(here.schema))
    rows = torch.cat([batch[name] for batch in mixture])

    assert torch.equal(rows[rows[:, 0].argsort()], values)


def test_several_ranks_leave_out_short_batches_and_nothing_else(abc: list[Cache]) -> None:
    whole = [batch for batch in Mixture(abc, 7, windows=WINDOWS) if len(batch.index) == 7]
    ranks = list(Mixture(abc, 7, windows=WINDOWS, drop_last=True))

    assert len(ranks) < len(Mixture(abc, 7, windows=WINDOWS))
    assert all(map(same, whole, ranks))


def test_evaluation_serves_cache_after_cache_in_order(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 16, windows=WINDOWS, shuffle=False)
    seen = [(task, *row) for batch in mixture
            for task, row in zip(batch.tasks.tolist(), batch.index.tolist(), strict=True)]  # fmt: skip

    assert seen == sorted(seen)
    ranks = [Mixture(abc, 16, windows=WINDOWS, shuffle=False, rank=r, world_size=3) for r in range(3)]
    split = examples([batch for rank in ranks for batch in rank], mixture.names)
    assert split == Counter((mixture.names[task], *rest) for task, *rest in seen)


def test_one_cache_alone_comes_as_it_does_in_the_mixture(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 16, windows=WINDOWS, shuffle=False)

    for name in mixture.names:
        assert all(map(same, mixture.only(name), [batch for batch in mixture if batch.task == name]))
    with pytest.raises(ConfigError, match="'z' is not one of a, b, c"):
        mixture.only("z")


def test_loaders_keep_their_own_settings(caches: dict[str, Cache], fields: Any) -> None:
    def plus_one(batch: WindowBatch, keys: torch.Tensor) -> WindowBatch:
        return batch._replace(z0=batch.z0 + 1)

    a = Loader(caches["a"], 8, windows=Windows(field="latent", stride=2), transforms=[plus_one], shuffle=True)
    mixture = Mixture([a, Loader(caches["b"], 3, windows=WINDOWS, shuffle=True)], mode="round_robin")

    batch = next(iter(mixture))

    number, start = batch.index.unbind(1)
    assert torch.equal(batch.z0, fields["a"]["latent"][number, start] + 1)
    assert torch.equal(batch.z1, fields["a"]["latent"][number, start + 2])
    assert [len(b.index) for b in mixture][:3] == [8, 3, 8]
    assert mixture.batch_size == 8


def test_epochs_are_set_as_trainers_do_it(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 4, windows=WINDOWS)
    zero, one = list(mixture), list(mixture)

    mixture.sampler.set_epoch(0)
    assert all(map(same, mixture, zero))
    mixture.set_epoch(1)
    assert all(map(same, mixture, one))
    mixture.set_epoch(1)
    next(iter(mixture))
    assert all(map(same, mixture, one)), "a pass that was left is begun anew"
    with pytest.raises(ConfigError, match="-1"):
        mixture.set_epoch(-1)


def test_the_meter_counts_the_batches_of_all_caches(abc: list[Cache]) -> None:
    meter = StallMeter()
    mixture = Mixture(abc, 4, windows=WINDOWS, meter=meter)

    served = sum(len(batch.index) for batch in mixture)

    assert (meter.epoch().batches, meter.epoch().examples) == (len(mixture), served)


def test_statistics_are_kept_by_task(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 4)

    assert mixture.statistics["b"]["re"]["max"] == 9
    assert "re" not in mixture.statistics["a"]
