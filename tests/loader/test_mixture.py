from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Mixture, RecordBatch, TaskBatch, WindowBatch, Windows
from stoker.monitor.meter import StallMeter
from stoker.store import Cache, open_cache
from stoker.store.joint import Joint, reopened
from tests.loader.caches import trajectories, write_cache
from tests.loader.test_filling import Steps
from tests.loader.test_mend import flip
from tests.loader.test_mend import make as make_mendable

TIMED = ("latent", "time")
WINDOWS = Windows(field="latent")
MODES: list[dict[str, Any]] = [
    {"mode": "concat", "mix": "batch"},
    {"mode": "weighted", "weights": {"a": 3, "b": 1, "c": 2}, "epoch_examples": 97},
    {"mode": "round_robin"},
    {"mode": "round_robin", "exhausted": "longest"},
]


def narrow(count: int = 10) -> dict[str, torch.Tensor]:
    """Other lengths, other latents, other conditions: `re` instead of `bc`, a wider `nu` in float64."""
    fields = trajectories(count, 7, (2, 6))
    fields["nu"] = torch.arange(2 * count, dtype=torch.float64).view(count, 2)
    fields["re"] = torch.arange(count, dtype=torch.int32)
    del fields["bc"]
    return fields


@pytest.fixture(scope="module")
def fields() -> dict[str, dict[str, torch.Tensor]]:
    a = trajectories(13, 9)
    return {"a": a, "b": narrow(), "c": {name: values[:7] + 1 for name, values in a.items()}}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> dict[str, Cache]:
    shards = {"a": (5, 7, 1), "b": (), "c": (2, 5)}
    return {
        name: write_cache(tmp_path_factory.mktemp(name), fields[name], timed=TIMED, shards=own, name=name)
        for name, own in shards.items()
    }


@pytest.fixture
def abc(caches: dict[str, Cache]) -> list[Cache]:
    return [caches[name] for name in "abc"]


@pytest.fixture
def alike(caches: dict[str, Cache]) -> list[Cache]:
    return [caches["a"], caches["c"]]


def values_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, TaskBatch):
        future = [] if batch.future is None else [batch.future]
        named = [*batch.cond.values(), *batch.mask.values()]
        return [batch.index, batch.z0, batch.z1, *future, *named, batch.tasks]
    tensors = [batch[name] for name in sorted(batch) if name not in ("task", "mask")]
    return [*tensors, *batch["mask"].values()]


def same(a: Any, b: Any) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(values_of(a), values_of(b), strict=True)
    )


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
    world = data.draw(st.sampled_from([1, 2, 4]))
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
    ranks = [Mixture(one, 4 // world, tier=tier, rank=rank, world=world, **common) for rank in range(world)]
    for mixture in ranks:
        mixture.load_state_dict(state)

    rest = list(zip(*ranks, strict=True))

    assert len(rest) == len(expected) - stop
    for parts, whole in zip(rest, expected[stop:], strict=True):
        assert {task_of(part) for part in parts} == {task_of(whole)}
        joined = [torch.cat(values) for values in zip(*map(values_of, parts), strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(joined, values_of(whole), strict=True))
    assert [mixture.epoch for mixture in ranks] == [epoch + 1] * world


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_same_bytes_everywhere(caches: dict[str, Cache], data: st.DataObject) -> None:
    same_bytes_everywhere(caches, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_same_bytes_everywhere_a_thousand_times(caches: dict[str, Cache], data: st.DataObject) -> None:
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
            assert list(batch.cond) == list(batch.mask) == ["bc", "nu", "re", "time"]
            assert [batch.cond[name].shape[1] for name in batch.cond] == [3, 2, 1, 1]
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


def test_several_ranks_leave_out_short_batches_and_nothing_else(abc: list[Cache]) -> None:
    whole = [batch for batch in Mixture(abc, 7, windows=WINDOWS) if len(batch.index) == 7]
    ranks = list(Mixture(abc, 7, windows=WINDOWS, drop_last=True))

    assert len(ranks) < len(Mixture(abc, 7, windows=WINDOWS))
    assert all(map(same, whole, ranks))


def test_evaluation_serves_cache_after_cache_in_order(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 16, windows=WINDOWS, order="sequential")
    seen = [(task, *row) for batch in mixture
            for task, row in zip(batch.tasks.tolist(), batch.index.tolist(), strict=True)]  # fmt: skip

    assert seen == sorted(seen)
    ranks = [Mixture(abc, 16, windows=WINDOWS, order="sequential", rank=r, world=3) for r in range(3)]
    split = examples([batch for rank in ranks for batch in rank], mixture.names)
    assert split == Counter((mixture.names[task], *rest) for task, *rest in seen)


def test_one_cache_alone_comes_as_it_does_in_the_mixture(abc: list[Cache]) -> None:
    mixture = Mixture(abc, 16, windows=WINDOWS, order="sequential")

    for name in mixture.names:
        assert all(map(same, mixture.only(name), [batch for batch in mixture if batch.task == name]))
    with pytest.raises(ConfigError, match="'z' is none of a, b, c"):
        mixture.only("z")


def test_loaders_keep_their_own_settings(caches: dict[str, Cache], fields: Any) -> None:
    def plus_one(batch: WindowBatch, keys: torch.Tensor) -> WindowBatch:
        return batch._replace(z0=batch.z0 + 1)

    a = Loader(caches["a"], 8, windows=Windows(field="latent", stride=2), transforms=[plus_one])
    mixture = Mixture([a, Loader(caches["b"], 3, windows=WINDOWS)], mode="round_robin")

    batch = next(iter(mixture))

    number, start = batch.index.unbind(1)
    assert torch.equal(batch.z0, fields["a"]["latent"][number, start] + 1)
    assert torch.equal(batch.z1, fields["a"]["latent"][number, start + 2])
    assert [len(b.index) for b in mixture][:3] == [8, 3, 8]
    assert mixture.batch_size == 8


@pytest.mark.parametrize("mode", [*MODES, {"mix": "example"}], ids=str)
def test_a_state_of_other_caches_is_refused_and_named(
    caches: dict[str, Cache], tmp_path: Path, mode: Any
) -> None:
    changed = write_cache(tmp_path, {k: v[:6] for k, v in trajectories(13, 9).items()}, timed=TIMED, name="c")
    weights = {"weights": None} if mode.get("mode") == "weighted" else {}
    common = {"windows": WINDOWS, **mode, **weights}
    own = [caches["a"], caches["c"]]
    state = Mixture(own, 4, **common).state_dict()

    with pytest.raises(StaleStateError, match=f"cache 'c' has fingerprint {caches['c'].fingerprint} there"):
        Mixture([caches["a"], changed], 4, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="caches a, c there, c, a here"):
        Mixture(own[::-1], 4, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="seed 0 there, 3 here"):
        Mixture(own, 4, seed=3, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="global_batch 4 there, 8 here"):
        Mixture(own, 8, **common).load_state_dict(state)
    with pytest.raises(StaleStateError, match="not the state of a mixture"):
        Mixture(own, 4, **common).load_state_dict(Loader(own[0]).state_dict())


def test_a_state_of_another_mode_or_other_weights_is_refused(alike: list[Cache]) -> None:
    state = Mixture(alike, 4, mode="weighted").state_dict()

    with pytest.raises(StaleStateError, match="counts"):
        Mixture(alike, 4, mode="weighted", weights=[3, 1]).load_state_dict(state)
    with pytest.raises(StaleStateError, match="mode 'weighted' there, 'concat of examples' here"):
        Mixture(alike, 4).load_state_dict(state)
    beyond = {**state, "position": 10**6}
    with pytest.raises(StaleStateError, match="step 1000000"):
        Mixture(alike, 4, mode="weighted").load_state_dict(beyond)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "both"}, "mode 'both'"),
    ({"mode": "round_robin", "exhausted": "all"}, "exhausted is 'all'"),
    ({"mix": "example"}, "mix='batch'"),
    ({"mix": "example", "mode": "weighted"}, "mix is 'example' in mode 'weighted'"),
    ({"weights": [1, 1, 1]}, "of mode 'weighted'"),
    ({"mode": "weighted", "weights": [1, 1]}, "for each of a, b, c"),
    ({"mode": "round_robin", "order": "sequential"}, "cache after cache"),
    ({"names": ["x", "x", "y"]}, "called 'x'"),
    ({"names": ["x"]}, "1 names for 3 caches"),
    ({"indices": [1]}, "indices= means nothing"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_has_no_meaning_is_refused(abc: list[Cache], given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mixture(abc, 4, windows=WINDOWS, **given)


def test_members_that_do_not_go_together_are_refused(caches: dict[str, Cache]) -> None:
    a = Loader(caches["a"], 4, windows=WINDOWS)
    for other, words in (
        (Loader(caches["b"], 4), "differ in windows"),
        (Loader(caches["b"], 4, windows=WINDOWS, rank=1, world=2), "differ in rank: 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            Mixture([a, other])
    with pytest.raises(ConfigError, match="batch_size: settings of loaders that are made already"):
        Mixture([a], 4)
    with pytest.raises(ConfigError, match="got 3"):
        Mixture([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"got Cache.*Give a list of them"):
        Mixture(caches["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got nothing"):
        Mixture([])
    with pytest.raises(ConfigError, match="no items by number"):
        Mixture([a])[0]


def test_a_field_called_as_a_batch_calls_its_own_is_refused(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"task": torch.randn(6, 2)}, name="a")

    with pytest.raises(ConfigError, match="field 'task'"):
        Mixture([cache], 2)


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
    with pytest.raises(ConfigError, match="epoch -1"):
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


def test_damage_in_one_of_several_caches_is_mended_on_the_way(tmp_path: Path) -> None:
    own = [make_mendable(tmp_path / name) for name in "ab"]
    names = ["a", "b"]
    expected = list(Mixture(own, 5, names=names))
    flip(own[1], 3)

    mixture = Mixture([make_mendable(tmp_path / name) for name in names], 5, names=names, tier="disk")

    assert all(map(same, mixture, expected))
    assert [loader.mended for loader in mixture.loaders.values()] != [0]


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "twice"])
def test_damage_is_mended_in_the_folder_where_it_is(tmp_path: Path, *, copied: bool) -> None:
    names = ["a", "b"]
    first = make_mendable(tmp_path / "a")
    if copied:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    given = [first, make_mendable(tmp_path / names[copied])]
    expected = list(Mixture(given, 5, names=names))
    for number in (3, 15):
        flip(given[1], number)
    mixture = Mixture(given, 5, names=names, tier="disk")

    assert all(map(same, mixture, expected))
    assert [loader.mended for loader in mixture.loaders.values()] == [2]
    assert open_cache(given[1].path).verify().bad == []


@pytest.mark.parametrize("made", [False, True], ids=["cache", "loader"])
def test_a_cache_that_is_being_filled_is_refused_before_anything_is_encoded(
    tmp_path: Path, caches: dict[str, Cache], *, made: bool
) -> None:
    filling = Steps(tmp_path, trajectories(13, 9))
    cache = filling.cache()

    with pytest.raises(ConfigError, match=r"complete caches, .* is being filled.*(wait=False|Precompute)"):
        Mixture([caches["a"], Loader(cache, 4) if made else cache], 4)

    assert filling.filled == []


def test_what_a_cache_lacks_is_encoded_once_beside_a_loader(tmp_path: Path, caches: dict[str, Cache]) -> None:
    filling = Steps(tmp_path, trajectories(13, 9))
    cache = filling.cache()
    cache.filling = None

    mixture = Mixture([Loader(caches["b"], 4), cache], 4)

    assert filling.filled == [*range(13)]
    assert all(own.complete for own in mixture.dataset)
    assert mixture.statistics["c"]["latent"]["count"] > 0


@pytest.mark.parametrize("lacks", ["index", "nu"])
@pytest.mark.parametrize("mix", ["batch", "example"])
def test_a_batch_that_transforms_leave_without_what_a_mixture_needs_is_named(
    alike: list[Cache], lacks: str, mix: Any
) -> None:
    def without(batch: Any, keys: torch.Tensor) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name != lacks}

    mixture = Mixture(alike, 4, mix=mix, transforms=[without])

    with pytest.raises(ConfigError, match=f"transforms= of 'a.*lacks '{lacks}'.*`index`.*Return them too"):
        next(iter(mixture))


def test_caches_as_one_are_reopened_after_a_fork(alike: list[Cache]) -> None:
    joint = Joint(alike)
    again = reopened(joint)

    assert isinstance(again, Joint)
    assert again.fingerprint == joint.fingerprint
    assert torch.equal(again[13 + 2]["latent"], alike[1][2]["latent"])
    assert not {id(member) for member in again.members} & {id(member) for member in alike}
    assert joint.numbers.tolist() == list(range(20))


def test_quarantined_samples_keep_their_place_among_the_others(tmp_path: Path) -> None:
    fields = {"x": torch.arange(8.0).view(8, 1)}
    own = [write_cache(tmp_path, fields, skip=skip, name=name) for name, skip in (("a", (7,)), ("b", (0, 3)))]

    batches = list(Mixture(own, 4))
    keys = [key for b in batches for key in zip(b["tasks"].tolist(), b["index"].tolist(), strict=True)]
    served = dict(zip(keys, torch.cat([batch["x"] for batch in batches]).tolist(), strict=True))

    assert set(served) == {(0, n) for n in range(7)} | {(1, n) for n in (1, 2, 4, 5, 6, 7)}
    assert all(x == [float(n)] for (_, n), x in served.items())
