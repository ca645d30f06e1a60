"""What a `Loader` is called with: what is taken, and what is refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker.errors import ConfigError
from stoker.loader import design
from stoker.loader.options import check_share
from stoker.loader.order import RankShare
from stoker.plan import Resources
from stoker.plan.resources import resolve_device
from tests.kit.orders import in_order
from tests.loader.caches import write_cache


class Numbers:
    """Ten samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(index)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    folder = tmp_path_factory.mktemp("cache")
    return stoker.precompute(stoker.TorchSource(Numbers()), None, folder, name="n", workers=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": "4"}, r"batch_size is '4'\. Expected a whole number, as batch_size=64"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5"),
        ({"batch_size": None}, r"batch_size is None"),
        ({"batch_size": torch.tensor(4)}, r"batch_size is tensor\(4\)"),
        ({"batch_size": 0}, r"batch_size 0.*Expected batch_size >= 1"),
        ({"seed": "0"}, r"seed is '0'"),
        ({"world_size": 1.0}, r"world_size is 1\.0"),
        ({"device": "tpu"}, r"device 'tpu' .*cpu, cuda or cuda:0"),
        ({"device": 3.5}, r"device 3\.5 is not known"),
        ({"windows": (1, 1)}, r"windows is \(1, 1\)\. Expected stoker\.Windows\(stride=1, horizon=1\)"),
        ({"transforms": "flip"}, r"transforms is 'flip'.*Expected functions"),
        ({"transforms": [1]}, r"transforms is \[1\]"),
        ({"batch_size": True}, r"batch_size is True"),
        ({"seed": False}, r"seed is False"),
        ({"drop_last": "no"}, r"drop_last is 'no'\. Expected True or False"),
        ({"drop_last": 1}, r"drop_last is 1"),
        ({"static": "no"}, r"static is 'no'"),
        ({"pin_memory": "no"}, r"pin_memory is 'no'"),
        ({"timeout": -1}, r"timeout is -1\. Expected .* at least 0"),
        ({"timeout": "5"}, r"timeout is '5'"),
        ({"timeout": float("nan")}, r"timeout is nan"),
        ({"reserve_bytes": True}, r"reserve_bytes is True"),
        ({"reserve_bytes": float("inf")}, r"reserve_bytes is inf"),
        ({"meter": "on"}, r"meter is 'on'"),
        ({"weights": ["1"] * 10}, r"weights are of <U1"),
        ({"weights": {1: 2}}, r"weights are of object"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_malformed_argument_is_named(cache: stoker.Cache, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stoker.Loader(cache, **{"shuffle": True, **changes})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: stoker.Rows(5, random="no"), "random is 'no'"),
        (lambda: stoker.Rows(5, random=1), "random is 1"),
        (lambda: stoker.Rows(True), r"Rows\(True\)"),
        (lambda: stoker.Rows(2**31), str(2**31)),
        (lambda: stoker.Span(5, random=None), "random is None"),
        (lambda: stoker.Span(True), r"Span\(True\)"),
        (lambda: stoker.Windows(stride=True), "stride is True"),
        (lambda: stoker.Windows(horizon=(True, 2)), r"horizon is \[True, 2\]"),
        (lambda: stoker.Windows(field=1), "field is 1"),
        (lambda: stoker.Weights([1.0], samples=1.5), r"samples is 1\.5"),
        (lambda: stoker.Weights([1.0], replacement="no"), "replacement is 'no'"),
        (lambda: stoker.Pad(to=True), r"Pad\(to=True\)"),
        (lambda: stoker.Pad(value="0"), "value is '0'"),
        (lambda: stoker.Pad(value={"x": None}), "value is None"),
        (lambda: stoker.Normalization(mean="0.5", std=1), r"mean is '0\.5'"),
        (lambda: stoker.Normalization(mean=0, std=True), "std is True"),
        (lambda: stoker.Normalization(mean=0, std=1, divisor="255"), "divisor is '255'"),
        (lambda: stoker.Normalization(mean=0, std=1, axis=-1.5), r"axis is -1\.5"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        {"choose": {"bag": stoker.Rows(10**9)}},
        {"choose": {"bag": stoker.Span(10**9)}},
        {"ragged": stoker.Pad(to=10**9)},
    ],
    ids=str,
)
def test_batches_that_no_memory_holds_are_refused_before_any_is_made(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    bags = write_cache(tmp_path, {"bag": [torch.ones(2 + n, 512) for n in range(4)]})
    with pytest.raises(ConfigError, match=r"1000000000.* batches of .*TiB"):
        stoker.Loader(bags, 4, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fraction": True}, "fraction is True"),
        ({"fraction": None}, "fraction"),
        ({"seed": "0"}, "seed is '0'"),
    ],
)
def test_a_subset_takes_numbers(cache: stoker.Cache, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stoker.subset(cache, **{"fraction": 0.5, **settings})


@pytest.mark.parametrize("examples", ["8", 1.5, True, 0])
def test_the_length_of_a_mixtures_epoch_is_a_number(cache: stoker.Cache, examples: Any) -> None:
    with pytest.raises(ConfigError, match=f"epoch_examples is {re.escape(repr(examples))}"):
        stoker.Mixture([cache, cache], 4, names=["a", "b"], mode="weighted", epoch_examples=examples)


def test_numbers_of_numpy_count_and_the_state_stays_json(cache: stoker.Cache) -> None:
    loader = stoker.Loader(cache, batch_size=np.int64(4), seed=np.uint8(7), shuffle=True)

    assert len(loader) == 3
    assert (
        json.loads(json.dumps(loader.state_dict()))
        == stoker.Loader(cache, 4, seed=7, shuffle=True).state_dict()
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_in_a_dataloader_says_what_to_do(cache: stoker.Cache, workers: int) -> None:
    wrapped: Any = DataLoader(stoker.Loader(cache, 4, shuffle=True), num_workers=workers)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="Iterate over the Loader itself"):
        next(iter(wrapped))


def test_a_loader_has_no_items_by_number(cache: stoker.Cache) -> None:
    with pytest.raises(ConfigError, match=r"Iterate over the Loader itself.*loader\.dataset\[number\]"):
        stoker.Loader(cache, 4, shuffle=True)[0]
    assert sum(len(batch["index"]) for batch in stoker.Loader(cache, 4, shuffle=True)) == 10


def test_dropping_all_there_is_is_refused_with_the_numbers(cache: stoker.Cache) -> None:
    says = (
        r"no batch of 10 examples: a whole one takes 11\. Use a batch_size of 10 or less, or drop_last=False"
    )
    with pytest.raises(ConfigError, match=says):
        stoker.Loader(cache, 11, drop_last=True, shuffle=True)
    with pytest.raises(ConfigError, match=r"takes 4 on each of 3 ranks\. Use a batch_size of 3 or less"):
        stoker.Loader(cache, 4, rank=1, world_size=3, shuffle=True)

    assert len(stoker.Loader(cache, 10, drop_last=True, shuffle=True)) == 1
    assert len(stoker.Loader(cache, 11, shuffle=True)) == 1
    assert len(stoker.Loader(cache, 4, rank=1, world_size=3, shuffle=False)) == 1


def test_more_ranks_than_examples_need_fewer_ranks() -> None:
    share = RankShare(positions=2, batch_size=1, rank=0, world_size=3, drop_last=True, contiguous=False)

    with pytest.raises(ConfigError, match="Use at most 2 ranks"):
        check_share(share)


def test_a_plan_prints_as_a_short_table(cache: stoker.Cache, tmp_path: Path) -> None:
    plan = stoker.Loader(cache, 4, tier="host", shuffle=True).plan

    assert repr(plan) == "Plan(host 10 records, 80 B)"
    lines = str(plan).splitlines()
    assert lines[0].split() == ["tier", "records", "bytes", "load/batch"]
    assert lines[1].split()[:4] == ["host", "10", "80", "B"]
    assert lines[2].startswith("no stall (below 1 %) at steps of ")
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80


def test_cuda_is_the_gpu_that_is_current_when_the_loader_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)

    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda:5")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(("order", "an_example"), [("full", 64), ("sequential", 0)])
def test_tables_and_orders_are_part_of_what_a_gpu_is_asked_for(
    cache: stoker.Cache, monkeypatch: pytest.MonkeyPatch, order: str, an_example: int
) -> None:
    gpu = Resources(
        host_bytes=2**30, host_total_bytes=2**30, host_limit="machine memory",
        device="cuda:0", device_bytes=2**33, device_total_bytes=2**33, device_name="a GPU",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(design, "probe", lambda **_: gpu)

    loader = stoker.Loader(cache, 8, device="cuda:0", **in_order(order))

    demand = loader._serving.design.demand
    assert demand.table_bytes == len(cache) * (24 + an_example)
    assert stoker.Loader(cache, 8, shuffle=True)._serving.design.demand.table_bytes == 0
