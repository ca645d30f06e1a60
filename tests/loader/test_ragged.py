from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import ConfigError, RecordError, StaleStateError
from stoker.loader import Loader, Mixture, Pad, Windows
from stoker.loader.assembly import pack, pad
from stoker.loader.gather import RaggedGather
from stoker.store import Cache
from tests.loader.caches import write_cache

LENGTHS = [3, 9, 0, 5, 2, 7, 4, 1, 6, 8]
TIERS = ["disk", "host"]


def values() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "u": [torch.randn((n, 4), generator=generator) for n in LENGTHS],
        "kind": [torch.arange(n) + 1 for n in LENGTHS],
        "nu": torch.arange(10, dtype=torch.float32),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(tmp_path_factory.mktemp("ragged"), values(), timed=("u",), shards=(3, 4))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_padded_batches_hold_each_record_its_length_and_a_mask(
    cache: Cache, tier: str, dtype: str | None
) -> None:
    u = values()["u"]
    for batch in Loader(cache, 4, tier=tier, seed=1, ragged="pad", dtype=dtype, shuffle=True):
        longest = max(LENGTHS[n] for n in batch["index"])
        assert batch["u"].shape == (len(batch["index"]), longest, 4)
        for i, number in enumerate(batch["index"].tolist()):
            length = LENGTHS[number]
            assert batch["u.lengths"][i] == length
            assert batch["u.mask"][i].tolist() == [True] * length + [False] * (longest - length)
            assert torch.equal(batch["u"][i, :length], u[number].to(batch["u"].dtype))
            assert not batch["u"][i, length:].any()
            assert batch["nu"][i] == number


def test_packed_batches_hold_records_one_after_another(cache: Cache) -> None:
    u = values()["u"]
    for batch in Loader(cache, 4, tier="host", seed=1, ragged="pack", shuffle=True):
        numbers = batch["index"].tolist()
        assert torch.equal(batch["u"], torch.cat([u[n] for n in numbers]))
        assert batch["u.offsets"].diff().tolist() == [LENGTHS[n] for n in numbers]
        assert batch["u.offsets"][0] == 0
        assert batch["kind.offsets"].dtype == torch.int64


@pytest.mark.parametrize("ragged", ["pad", "pack", Pad(to=16, value={"kind": -100})])
def test_every_tier_joins_to_the_same_bytes(cache: Cache, ragged: object) -> None:
    found = [list(Loader(cache, 3, tier=tier, seed=5, ragged=ragged, shuffle=True)) for tier in TIERS]
    found.append(list(Loader(cache, 3, tier="disk", seed=5, ragged=ragged, verify="off", shuffle=True)))

    for batches in zip(*found, strict=True):
        assert all(batch.keys() == batches[0].keys() for batch in batches)
        assert all(torch.equal(batch[name], batches[0][name]) for batch in batches for name in batch)


def test_lengths_and_padding_are_as_asked_for(cache: Cache) -> None:
    batch = next(iter(Loader(cache, 4, shuffle=False, ragged=Pad(to=16, value={"kind": -100}))))
    assert batch["u"].shape == (4, 16, 4)
    assert batch["kind"][0].tolist() == [1, 2, 3] + [-100] * 13
    rounded = next(iter(Loader(cache, 4, shuffle=False, ragged=Pad(multiple=8))))
    assert rounded["u"].shape == (4, 16, 4)


def test_a_record_too_long_is_named_before_anything_is_read(cache: Cache) -> None:
    with pytest.raises(RecordError, match=r"sample 1 has 9 steps.*Pad\(to=9\)"):
        Loader(cache, 4, ragged=Pad(to=8), shuffle=True)
    few = [n for n, length in enumerate(LENGTHS) if length <= 8]
    assert len(list(Loader(cache, 3, ragged=Pad(to=8), indices=few, shuffle=True))) == 3


@pytest.mark.parametrize(
    ("ragged", "said"),
    [
        ("padded", "Expected list, pad, pack"),
        (Pad(value={"v": 1}), "fields of varying length are u, kind|fields of varying length are kind, u"),
        (Pad(value=0.5), r"cannot be held by field 'kind' of torch.int64"),
        (Pad(value=float("nan")), r"cannot be held by field 'kind'"),
        (Pad(value={"u": 1e60}), r"cannot be held by field 'u' of torch.float32"),
    ],
)
def test_what_cannot_be_padded_is_refused(cache: Cache, ragged: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Loader(cache, 4, ragged=ragged, shuffle=True)
    with pytest.raises(ConfigError, match="Expected a whole number from 1 on"):
        Pad(to=0)
    with pytest.raises(ConfigError, match="multiple of 8"):
        Pad(to=10, multiple=8)


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    made = write_cache(tmp_path, {"u": [torch.ones(2), torch.ones(3)], "u.mask": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"adds u\.mask"):
        Loader(made, 2, ragged="pad", shuffle=True)
    assert len(next(iter(Loader(made, 2, shuffle=True)))["u"]) == 2


def test_a_state_goes_on_with_the_same_padded_batches(cache: Cache) -> None:
    whole = list(Loader(cache, 3, seed=2, ragged="pad", shuffle=True))
    first = Loader(cache, 3, seed=2, ragged="pad", shuffle=True)
    taken = iter(first)
    next(taken)
    other = Loader(cache, 3, seed=2, ragged="pad", tier="disk", shuffle=True)
    other.load_state_dict(first.state_dict())

    for got, wanted in zip(other, whole[1:], strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """203 records of 0 to 99 numbers, and some of their first ones."""
    lengths = [n * 37 % 100 for n in range(203)]
    fields = {"u": [torch.full((n,), i) for i, n in enumerate(lengths)], "nu": torch.tensor(lengths)}
    return write_cache(tmp_path_factory.mktemp("many"), fields, shards=(70, 133))


def padding(loader: Loader) -> float:
    """The part of an epoch's padded values that are none."""
    masks = [batch["u.mask"] for batch in loader]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def test_batches_of_similar_length_serve_every_record_once_with_little_padding(many: Cache) -> None:
    loader = Loader(many, 8, shuffle="bucket(10)", seed=1, ragged="pad")

    first, second = list(loader), list(loader)

    for epoch in (first, second):
        assert sorted(int(n) for batch in epoch for n in batch["index"]) == list(range(203))
        assert [len(batch["index"]) for batch in epoch] == [8] * 25 + [3]
    assert not torch.equal(first[0]["index"], second[0]["index"])
    assert padding(loader) < 0.15 < 0.35 < padding(Loader(many, 8, seed=1, ragged="pad", shuffle=True))
    longest = [int(batch["nu"].max()) for batch in list(Loader(many, 8, shuffle="bucket"))[:-1]]
    assert longest != sorted(longest)
    assert padding(Loader(many, 8, shuffle="bucket(1)", ragged="pad")) > 0.35


def test_batches_of_similar_length_are_the_same_for_every_tier_rank_and_stop(many: Cache) -> None:
    common = {"shuffle": "bucket(5)", "seed": 3, "ragged": "pack"}
    whole = list(Loader(many, 8, tier="host", **common))
    assert all(
        torch.equal(a["u"], b["u"])
        for a, b in zip(whole, list(Loader(many, 8, tier="disk", **common)), strict=True)
    )

    halves = [list(Loader(many, 4, rank=rank, world_size=2, drop_last=False, **common)) for rank in range(2)]
    for place, pair in enumerate(zip(*halves, strict=False)):
        assert torch.equal(torch.cat([half["index"] for half in pair]), whole[place]["index"])
    means = [float(torch.cat([b["nu"] for b in half]).float().mean()) for half in halves]
    assert abs(means[0] - means[1]) < 5  # sorted inside a batch, the first rank had all of the short ones

    stopped = Loader(many, 8, **common)
    taken = iter(stopped)
    [next(taken) for _ in range(7)]
    other = Loader(many, 4, rank=1, world_size=2, drop_last=False, **common)
    other.load_state_dict(stopped.state_dict())
    rest = [batch["index"].tolist() for batch in other]
    assert rest == [batch["index"].tolist() for batch in halves[1][7:]]
    with pytest.raises(StaleStateError, match="global_batch 8 there, 5 here"):
        Loader(many, 5, **common).load_state_dict(stopped.state_dict(), allow_rebatch=True)


def test_an_order_by_length_needs_records_that_have_one(many: Cache, tmp_path: Path) -> None:
    alike = write_cache(tmp_path, {"x": torch.ones(5, 2)})

    with pytest.raises(
        ConfigError, match=r"shuffle='bucket\(50\)' puts records of similar length.*one shape"
    ):
        Loader(alike, 2, shuffle="bucket")
    with pytest.raises(ConfigError, match=r"shuffle is 'bucket\(0\)'"):
        Loader(many, 2, shuffle="bucket(0)")


def test_transforms_see_joined_batches_and_mixtures_take_them(cache: Cache, tmp_path: Path) -> None:
    seen: list[torch.Size] = []

    def look(batch: dict[str, torch.Tensor], _: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(batch["u"].shape)
        return batch

    loader = Loader(cache, 5, ragged=Pad(to=10), transforms=[look], shuffle=True)
    assert len(list(loader)) == len(seen) == 2
    assert set(seen) == {torch.Size([5, 10, 4])}
    second = write_cache(tmp_path, values(), timed=("u",))
    mixed = Mixture([cache, second], 5, names=["a", "b"], ragged="pad")
    assert all(batch["u.mask"].shape == batch["u"].shape[:2] for batch in mixed)


@pytest.mark.parametrize("tier", TIERS)
def test_windows_respect_the_length_of_each_trajectory(tmp_path: Path, tier: str) -> None:
    u = values()["u"]
    cache = write_cache(tmp_path, {"u": u}, timed=("u",), shards=(3, 4))
    loader = Loader(cache, 4, tier=tier, windows=Windows(stride=2, horizon=2), ragged="pad", shuffle=True)
    found = {tuple(place): batch for batch in loader for place in batch.index.tolist()}

    assert sorted(found) == [(n, s) for n, length in enumerate(LENGTHS) for s in range(length - 4)]
    for batch in loader:
        for i, (number, start) in enumerate(batch.index.tolist()):
            assert torch.equal(batch.z0[i], u[number][start])
            assert torch.equal(batch.future[i, 0], u[number][start + 4])


class Copies(TorchDispatchMode):
    """Notes copies from one device to another, and whether they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and given.get("device") not in (None, args[0].device):
            self.waiting.append(not given.get("non_blocking"))
        if func is torch.ops.aten._pin_memory.default:  # which needs a GPU
            return args[0].clone()
        return func(*args, **given)


@pytest.mark.parametrize(
    ("work", "copies"),
    [
        (lambda rows: pad([rows[:2], rows[:5]], 6), 2),
        (lambda rows: pack([rows[:2], rows[:5]]), 1),
        (lambda rows: RaggedGather(rows, None)(np.array([0, 3]), np.array([2, 4])), 1),
    ],
    ids=["pad", "pack", "gather"],
)
def test_joining_records_on_a_device_waits_for_nothing(work: Any, copies: int) -> None:
    """`meta` stands for the device: a copy that waits would wait for all that a GPU has to do."""
    rows = torch.empty((9, 3), device="meta")
    with Copies() as seen:
        work(rows)

    assert seen.waiting == [False] * copies
