"""What a `Loader` is called with: what is taken, and what is refused in words."""

from __future__ import annotations

import json
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
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_malformed_argument_is_named(cache: stoker.Cache, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stoker.Loader(cache, **{"shuffle": True, **changes})


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
