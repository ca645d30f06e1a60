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
from stoker.loader.arguments import check_share
from stoker.loader.ranks import Share


class Numbers:
    """Ten samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(index)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    folder = tmp_path_factory.mktemp("cache")
    return stoker.precompute(stoker.TorchSource(Numbers()), None, folder, name="n", readers=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": "4"}, r"batch_size is '4'\. Expected a whole number, as batch_size=64"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5"),
        ({"batch_size": None}, r"batch_size is None"),
        ({"batch_size": torch.tensor(4)}, r"batch_size is tensor\(4\)"),
        ({"batch_size": 0}, r"batch_size 0.*Expected batch_size >= 1"),
        ({"seed": "0"}, r"seed is '0'"),
        ({"world": 1.0}, r"world is 1\.0"),
        ({"device": "gpu"}, r"device 'gpu' is not known\. Expected cpu, cuda or cuda:0"),
        ({"device": 3.5}, r"device 3\.5 is not known"),
        ({"windows": (1, 1)}, r"windows is \(1, 1\)\. Expected stoker\.Windows\(stride=1, horizon=1\)"),
        ({"transforms": torch.neg}, r"Expected a list of functions"),
        ({"transforms": [1]}, r"transforms is \[1\]"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_malformed_argument_is_named(cache: stoker.Cache, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stoker.Loader(cache, **changes)


def test_numbers_of_numpy_count_and_the_state_stays_json(cache: stoker.Cache) -> None:
    loader = stoker.Loader(cache, batch_size=np.int64(4), seed=np.uint8(7))

    assert len(loader) == 3
    assert json.loads(json.dumps(loader.state_dict())) == stoker.Loader(cache, 4, seed=7).state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_in_a_dataloader_says_what_to_do(cache: stoker.Cache, workers: int) -> None:
    wrapped: Any = DataLoader(stoker.Loader(cache, 4), num_workers=workers)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="Iterate over the Loader itself"):
        next(iter(wrapped))


def test_a_loader_has_no_items_by_number(cache: stoker.Cache) -> None:
    with pytest.raises(ConfigError, match=r"Iterate over the Loader itself.*loader\.dataset\[number\]"):
        stoker.Loader(cache, 4)[0]
    assert sum(len(batch["index"]) for batch in stoker.Loader(cache, 4)) == 10


def test_dropping_all_there_is_is_refused_with_the_numbers(cache: stoker.Cache) -> None:
    says = (
        r"no batch of 10 examples: a whole one takes 11\. Use a batch_size of 10 or less, or drop_last=False"
    )
    with pytest.raises(ConfigError, match=says):
        stoker.Loader(cache, 11, drop_last=True)
    with pytest.raises(ConfigError, match=r"takes 4 on each of 3 ranks\. Use a batch_size of 3 or less"):
        stoker.Loader(cache, 4, rank=1, world=3)

    assert len(stoker.Loader(cache, 10, drop_last=True)) == 1
    assert len(stoker.Loader(cache, 11)) == 1
    assert len(stoker.Loader(cache, 4, rank=1, world=3, order="sequential")) == 1


def test_more_ranks_than_examples_need_fewer_ranks() -> None:
    share = Share(positions=2, batch_size=1, rank=0, world=3, drop_last=True, contiguous=False)

    with pytest.raises(ConfigError, match="Use at most 2 ranks"):
        check_share(share)


def test_a_plan_prints_as_a_short_table(cache: stoker.Cache, tmp_path: Path) -> None:
    plan = stoker.Loader(cache, 4, tier="host").plan

    assert repr(plan) == "Plan(host 10 records, 40 B)"
    lines = str(plan).splitlines()
    assert lines[0].split() == ["tier", "records", "bytes", "load/batch"]
    assert lines[1].split()[:4] == ["host", "10", "40", "B"]
    assert lines[2].startswith("no stall (below 1 %) at steps of ")
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
