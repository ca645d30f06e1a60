"""Batches whose examples have one shape, or one value of a key."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Mixture, Pad, Windows
from stoker.loader.assembly import on_host
from stoker.loader.batching import BatchPlan, GroupPlanner
from stoker.store import Cache
from tests.loader.caches import folded, write_cache
from tests.loader.test_partial import move

COUNT = 60
SHAPES = [(2, 3, 4), (2, 4, 3), (2, 5, 5)]


def shape_of(number: int) -> tuple[int, ...]:
    return SHAPES[0 if number % 7 < 4 else 1 if number % 7 < 6 else 2]


def image(number: int) -> torch.Tensor:
    return torch.randn(shape_of(number), generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = {
        **folded("image", [image(number) for number in range(COUNT)], 3),
        "words": [torch.arange(1 + number % 2) for number in range(COUNT)],
        "kind": torch.arange(COUNT) % 5,
        "nu": torch.arange(COUNT, dtype=torch.float32),
    }
    folder = tmp_path_factory.mktemp("by")
    return write_cache(folder, fields, axes={"image": ("2", "*", "*")}, shards=(20, 15))


def planner(groups: Any, batch: int, world: int = 1, **settings: Any) -> GroupPlanner:
    settings = {"seed": 0, "shuffle": True, "drop_last": False, **settings}
    return GroupPlanner(np.asarray(groups), batch, by="shape", world_size=world, **settings)


def batches_of(plan: BatchPlan) -> list[list[int]]:
    return [part.tolist() for part in np.split(plan.ids, plan.bounds[1:-1])]


# ---------------------------------------------------------------------------------------------------- plans


@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_example_comes_once_in_a_batch_of_its_group_and_ranks_have_as_many(
    groups: list[int], batch: int, world: int, epoch: int, shuffle: bool
) -> None:
    sizes = Counter(groups).values()
    least = sum(-(-size // batch) for size in sizes)
    made = planner(np.unique(groups, return_inverse=True)[1], batch, world, shuffle=shuffle)
    if -(-least // world) * world > len(groups):  # no way to do it
        with pytest.raises(ConfigError, match="equal numbers of batches"):
            made.epoch(epoch)
        return

    plan = made.epoch(epoch)

    found = batches_of(plan)
    assert sorted(plan.ids.tolist()) == [*range(len(groups))]
    assert len(found) == plan.steps * world == made.epoch(epoch + 1).steps * world
    assert all(1 <= len(one) <= batch and len({groups[i] for i in one}) == 1 for one in found)
    own = [plan.of_rank(rank) for rank in range(world)]
    assert [len(begins) for begins, _ in own] == [plan.steps] * world


def test_ranks_have_the_same_group_in_a_step_wherever_that_is_possible() -> None:
    groups = np.repeat([0, 1, 2], [40, 23, 3])
    plan = planner(groups, 4, 4).epoch(0)
    mixed = 0
    for step in range(plan.steps):
        one = [groups[plan.ids[plan.bounds[b]]] for b in range(4 * step, 4 * step + 4)]
        mixed += len({*one}) > 1
    assert mixed == 1  # the three that are left of a group cannot be shared by four


def test_a_hundred_thousand_samples_of_forty_shapes_over_four_ranks() -> None:
    """None left out, none mixed, equal counts; every epoch another order; any step is where to resume."""
    rng = np.random.default_rng(0)
    groups = rng.choice(40, 100_000, p=rng.dirichlet(np.ones(40) / 2))
    made = planner(groups, 32, 4, seed=3)
    first, second = made.epoch(0), made.epoch(1)

    assert np.array_equal(np.sort(first.ids), np.arange(100_000))
    begins, ends = first.bounds[:-1], first.bounds[1:]
    assert np.diff(first.bounds).max() == 32
    assert np.diff(first.bounds).min() > 0
    assert np.array_equal(np.maximum.reduceat(groups[first.ids], begins), groups[first.ids][ends - 1])
    assert np.array_equal(np.minimum.reduceat(groups[first.ids], begins), groups[first.ids][ends - 1])
    assert first.steps == second.steps <= 100_000 // 128 + 2 * 40
    assert not np.array_equal(first.ids, second.ids)
    assert (np.diff(groups[first.ids[begins[::4]]]) != 0).mean() > 0.5  # steps of groups are mixed
    for step in (0, 1, 400, first.steps):
        assert first.step_at(int(first.step_bounds[step])) == step


GOLDEN = {
    "shuffled": [[5, 6], [2, 0, 8], [4, 9], [7, 1, 3]],
    "ranks": [[4], [9], [8], [6, 5], [0], [2], [1], [7, 3]],
    "in order": [[0, 2, 5], [6, 8], [1, 3, 7], [4, 9]],
}


def test_golden_plans_never_change() -> None:
    groups = [0, 1, 0, 1, 2, 0, 0, 1, 0, 2]
    assert batches_of(planner(groups, 3, seed=5).epoch(2)) == GOLDEN["shuffled"]
    assert batches_of(planner(groups, 2, 2).epoch(0)) == GOLDEN["ranks"]
    assert batches_of(planner(groups, 3, shuffle=False).epoch(1)) == GOLDEN["in order"]


def test_a_plan_is_a_function_of_the_global_batch() -> None:
    groups = np.repeat([0, 1, 2], [40, 28, 20])
    one, four = planner(groups, 16).epoch(1), planner(groups, 4, 4).epoch(1)
    assert one.ids.tolist() == four.ids.tolist()
    assert one.step_bounds.tolist() == four.step_bounds.tolist()


def test_planners_are_plain_objects_without_a_cache() -> None:
    made = planner([0, 1, 1, 0, 2], 2)
    plan = made.epoch(1)
    assert pickle.loads(pickle.dumps(made)).epoch(1).ids.tolist() == plan.ids.tolist()
    assert len(pickle.dumps(made)) < 2000


# -------------------------------------------------------------------------------------------------- loaders


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_one_shape_are_one_tensor(cache: Cache, tier: str, shuffle: bool) -> None:
    loader = Loader(cache, 8, batch_by="shape", tier=tier, shuffle=shuffle, seed=1)
    numbers: list[int] = []
    for batch in loader:
        own = batch["index"].tolist()
        assert {*batch} == {"image", "words", "kind", "nu", "index"}
        assert torch.equal(batch["image"], torch.stack([image(n) for n in own]))
        assert torch.equal(batch["words"], torch.stack([torch.arange(1 + n % 2) for n in own]))
        assert batch["nu"].tolist() == own
        numbers += own
    assert sorted(numbers) == [*range(COUNT)]
    assert "of 8 of one shape" in repr(loader)


def test_a_hundred_thousand_records_are_served_to_four_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.choice(40, 100_000, p=rng.dirichlet(np.ones(40)))
    flat = torch.arange(40, dtype=torch.uint8)
    cache = write_cache(tmp_path, {"u": [flat[:n] for n in lengths.tolist()]}, shards=(60_000,))
    setting = {"batch_by": "shape", "shuffle": True, "world_size": 4, "tier": "host", "seed": 9}
    numbers: list[np.ndarray[Any, Any]] = []
    counts: set[int] = set()
    for rank in range(4):
        loader = Loader(cache, 256, rank=rank, **setting)
        batches = list(loader)
        counts |= {len(batches), len(loader)}
        for batch in batches:
            own = batch["index"].numpy()
            assert (lengths[own] == batch["u"].shape[1]).all()
            assert torch.equal(batch["u"][-1], flat[: batch["u"].shape[1]])
            numbers.append(own)
        middle = len(batches) // 2
        loader.load_state_dict(loader.state_dict(batches[middle].position))
        assert torch.equal(next(iter(loader))["index"], batches[middle + 1]["index"])
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(100_000))
    assert len(counts) == 1


def test_one_field_may_decide_and_others_come_as_ever(cache: Cache) -> None:
    for batch in Loader(cache, 8, batch_by="image", shuffle=True, ragged="pad"):
        assert isinstance(batch["image"], torch.Tensor)
        assert "image.mask" not in batch
        assert batch["words.lengths"].tolist() == [1 + n % 2 for n in batch["index"].tolist()]
    for batch in Loader(cache, 8, batch_by="image", shuffle=True, ragged=Pad(to=2)):
        assert batch["words"].shape[1] == 2
    for batch in Loader(cache, 8, batch_by="kind", shuffle=True):
        assert len({*batch["kind"].tolist()}) == 1
        assert isinstance(batch["image"], list)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_every_tier_gives_the_same_bytes(cache: Cache, dtype: str | None) -> None:
    def made(tier: str) -> Loader:
        return Loader(cache, 8, batch_by="shape", tier=tier, seed=4, shuffle=True, dtype=dtype)

    found = [list(made(tier)) for tier in ("host", "disk", "device")]
    with torch.inference_mode():
        found.append(list(made("host")))
    for homes in (["device", "host", "disk"], ["disk", "device", "host"], ["host", "disk", "disk"]):
        mixed = made("auto")
        move(mixed, homes)
        found.append(list(mixed))
    for batches in zip(*found, strict=True):
        assert all(batch.keys() == batches[0].keys() for batch in batches)
        assert all(torch.equal(batch[name], batches[0][name]) for batch in batches for name in batch)
        assert all(batch.position == batches[0].position for batch in batches)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_serve_all_records_once_in_as_many_batches(cache: Cache, world: int) -> None:
    for epoch in (0, 1):
        numbers: list[int] = []
        counts: set[int] = set()
        for rank in range(world):
            loader = Loader(cache, 4, batch_by="shape", shuffle=True, rank=rank, world_size=world)
            loader.set_epoch(epoch)
            batches = list(loader)
            counts |= {len(batches), len(loader)}
            numbers += [n for batch in batches for n in batch["index"].tolist()]
            assert all(len({shape_of(n) for n in b["index"].tolist()}) == 1 for b in batches)
        assert sorted(numbers) == [*range(COUNT)]
        assert len(counts) == 1


@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 20), world=st.sampled_from([1, 2]), epoch=st.integers(0, 2), shuffle=st.booleans())
def test_it_resumes_after_any_batch_at_another_tier(
    cache: Cache, stop: int, world: int, epoch: int, shuffle: bool
) -> None:
    setting = {"batch_by": "shape", "rank": world - 1, "world_size": world, "shuffle": shuffle}
    whole = Loader(cache, 4, tier="host", **setting)
    whole.set_epoch(epoch)
    every = list(whole)
    stop = min(stop, len(every) - 1)
    again = Loader(cache, 4, tier="disk", **setting)
    state = whole.state_dict(every[stop].position)
    assert len(str(state)) < 1000
    again.load_state_dict(state)

    rest = list(again) if again.epoch == epoch else []

    assert [b["index"].tolist() for b in rest] == [b["index"].tolist() for b in every[stop + 1 :]]


def test_a_state_is_of_one_rule_and_of_equal_steps(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"u": [torch.ones(1 + n % 3) for n in range(48)]})
    loader = Loader(cache, 4, batch_by="shape", shuffle=True)
    state = loader.state_dict(next(iter(loader)).position)

    two = [Loader(cache, 2, batch_by="shape", shuffle=True, rank=r, world_size=2) for r in range(2)]
    for rank in two:
        rank.load_state_dict(state)
    rest = [sorted(torch.cat([b["index"] for b in step]).tolist()) for step in zip(*two, strict=True)]
    assert rest == [sorted(b["index"].tolist()) for b in list(loader)[1:]]

    for other in (Loader(cache, 4, shuffle=True), Loader(cache, 4, batch_by="u", shuffle=True)):
        with pytest.raises(StaleStateError, match="batches 'by shape' there"):
            other.load_state_dict(state)
    ragged = Loader(cache, 1, batch_by="shape", shuffle=True, indices=[*range(44)], world_size=4)
    with pytest.raises(StaleStateError):
        ragged.load_state_dict(state)


def test_a_state_of_other_steps_says_what_continues_and_another_epoch_may_begin(cache: Cache) -> None:
    two = Loader(cache, 8, batch_by="shape", shuffle=True, rank=0, world_size=2)
    state = two.state_dict(next(iter(two)).position)
    one = Loader(cache, 8, batch_by="shape", shuffle=True)
    for allow in (False, True):
        with pytest.raises(StaleStateError, match=r"global_batch 16 there, 8 here") as refused:
            one.load_state_dict(state, allow_rebatch=allow)
        assert "allow_rebatch" not in str(refused.value)
        assert "2 ranks of batch_size=8" in str(refused.value)
    one.set_epoch(0)  # as the hint says
    assert sorted(i for b in one for i in b["index"].tolist()) == [*range(COUNT)]

    list(two)  # from one epoch to the next, whatever a step was
    with pytest.raises(StaleStateError, match="allow_rebatch=True"):
        one.load_state_dict(two.state_dict())
    one.load_state_dict(two.state_dict(), allow_rebatch=True)
    assert one.position == (1, 0)
    assert sorted(i for b in one for i in b["index"].tolist()) == [*range(COUNT)]


def test_drop_last_leaves_full_batches(cache: Cache) -> None:
    loader = Loader(cache, 8, batch_by="shape", shuffle=True, drop_last=True)
    batches = list(loader)
    assert [len(b["index"]) for b in batches] == [8] * len(loader)
    with pytest.raises(ConfigError, match="drop_last leaves no batch"):
        Loader(cache, 40, batch_by="shape", drop_last=True)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("setting", [{"batch_size": 4, "batch_by": "shape"}, {"batch_tokens": 7}])
def test_no_record_comes_twice_when_resuming_with_another_drop_last(
    tmp_path: Path, setting: dict[str, Any], saved: bool
) -> None:
    cache = write_cache(tmp_path, {"u": [torch.ones(1 + n % 3) for n in range(103)]})
    loader = Loader(cache, shuffle=True, drop_last=saved, **setting)
    state = loader.state_dict(next(iter(loader)).position)

    Loader(cache, shuffle=True, drop_last=saved, **setting).load_state_dict(state)
    with pytest.raises(StaleStateError, match="drop_last"):
        Loader(cache, shuffle=True, drop_last=not saved, **setting).load_state_dict(state)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("ranks", [{}, {"world_size": 2, "rank": 1, "shuffle": False}])
def test_batches_of_one_size_resume_with_another_drop_last(
    cache: Cache, saved: bool, ranks: dict[str, Any]
) -> None:
    made = {"shuffle": True, "seed": 3, **ranks}
    every = [b["index"].tolist() for b in Loader(cache, 7, drop_last=False, **made)]
    loader = Loader(cache, 7, drop_last=saved, **made)
    passed = iter(loader)
    first = [next(passed)["index"].tolist() for _ in range(2)]
    other = Loader(cache, 7, drop_last=not saved, **made)
    other.load_state_dict(loader.state_dict())

    rest = [b["index"].tolist() for b in other]

    assert first + rest == every[: 2 + len(rest)]
    assert len(rest) == len(every) - 2 - (not saved)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"windows": Windows()}, "windows have one shape"),
        ({"weights": [1.0] * COUNT}, "drawn records"),
        ({"static": True, "tier": "device"}, "differ in size"),
        ({"batch_tokens": 4, "batch_size": 1}, "each decides"),
        ({"shuffle": "block"}, "the order is 'block'"),
        ({"shuffle": True, "partition": "static"}, "the order is 'static'"),
        ({"batch_by": "nu"}, "neither 'shape' nor a field.*image, kind, words"),
        ({"batch_by": 3}, "batch_by is 3"),
    ],
)
def test_what_makes_no_sense_together_is_refused(cache: Cache, setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Loader(cache, **{"batch_size": 4, "batch_by": "shape", **setting})


def test_means_by_channel_of_images_of_many_sizes_are_for_the_transform(cache: Cache) -> None:
    each = {"mean": (0.5, -0.5), "std": (1.0, 2.0)}
    with pytest.raises(ConfigError, match=r"2 means for axis -3 .*\(2, \*, \*\).*Normalize") as refused:
        Loader(cache, 4, batch_by="shape", normalize={"image": stoker.Normalization(**each)})
    assert "batch_by='shape'" in str(refused.value)
    change = stoker.transforms.Normalize(**each, axis=-3, fields=["image"])
    for plain, made in zip(  # as the hint says
        Loader(cache, 4, batch_by="shape"), Loader(cache, 4, batch_by="shape", transforms=change), strict=True
    ):
        mean, std = (torch.tensor(numbers).view(2, 1, 1) for numbers in each.values())
        assert torch.allclose(made["image"], (plain["image"] - mean) / std)


def test_a_mixture_and_one_shape_for_all_are_refused(cache: Cache, tmp_path: Path) -> None:
    plain = write_cache(tmp_path, {"x": torch.ones(4, 2)}, name="plain")
    with pytest.raises(ConfigError, match="batches of varying size"):
        Mixture([Loader(cache, 4, batch_by="kind", shuffle=True), Loader(plain, 4, shuffle=True)])
    with pytest.raises(ConfigError, match="all records have one shape"):
        Loader(plain, 2, batch_by="shape")


def test_batches_of_a_dataset_keep_its_structure_and_transforms_see_tensors(tmp_path: Path) -> None:
    data = [(image(n), n) for n in range(COUNT)]
    loader = stoker.cached(data, batch_size=4, batch_by="shape", shuffle=True, cache_dir=tmp_path)
    numbers: list[int] = []
    for images, own in loader:
        assert torch.equal(images, torch.stack([image(n) for n in own.tolist()]))
        numbers += own.tolist()
    assert sorted(numbers) == [*range(COUNT)]


def test_latents_of_a_module_take_the_place_of_images(tmp_path: Path) -> None:
    data = [(image(n), n) for n in range(COUNT)]
    net = torch.nn.Conv2d(2, 3, 1)
    loader = stoker.cached(data, net, batch_size=4, batch_by="shape", shuffle=True, cache_dir=tmp_path)
    with torch.inference_mode():
        for latents, own in loader:
            wanted = torch.stack([net(image(n)[None])[0] for n in own.tolist()])
            assert torch.allclose(latents, wanted, atol=1e-6)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU, and counts what its host waits for."""

    waits = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        Elsewhere.waits += 1
        return self.as_subclass(torch.Tensor)


def test_the_host_waits_once_for_the_sizes_of_many_batches() -> None:
    sizes = [torch.tensor([[n, n + 1], [n, n + 2]]) for n in range(20)]
    column = iter([one.as_subclass(Elsewhere) for one in sizes])

    found = [*on_host(column)]

    assert Elsewhere.waits == 1
    assert all(type(one) is torch.Tensor for one in found)
    assert all(torch.equal(a, b) for a, b in zip(found, sizes, strict=True))
