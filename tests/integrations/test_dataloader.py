from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

from stoker.errors import ConfigError
from stoker.integrations import as_dataloader
from stoker.loader import Loader
from stoker.store import Cache
from tests.integrations.passes import EPOCHS, make_cache, make_varied_cache, sequence


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("c"))


def make(cache: Cache, **changes: int) -> Loader:
    return Loader(cache, **{"shuffle": True, "batch_size": 5, "seed": 3, **changes})


class Skip(BatchSampler):
    """What `accelerate.skip_first_batches` puts around a sampler."""

    def __init__(self, inner: BatchSampler, count: int) -> None:
        self.batch_sampler, self.count = inner, count

    def __iter__(self):
        yield from list(self.batch_sampler)[self.count :]


def test_it_is_a_dataloader_with_the_loaders_batches(cache: Cache) -> None:
    data = as_dataloader(make(cache))

    assert isinstance(data, DataLoader)
    assert len(data) == 5
    found = [batch["index"].tolist() for _ in range(EPOCHS) for batch in data]
    assert found == sequence(make(cache))


def test_an_epoch_broken_off_begins_again(cache: Cache) -> None:
    data = as_dataloader(make(cache))
    next(iter(data))

    assert [batch["index"].tolist() for batch in data] == sequence(make(cache))[:5]
    with pytest.raises(ConfigError, match="shares the batches out"):
        [data.dataset[number] for number in (0, 1, 3)]


def test_epochs_by_number(cache: Cache) -> None:
    data = as_dataloader(make(cache))
    for epoch in (2, 0):
        data.set_epoch(epoch)
        assert [batch["index"].tolist() for batch in data] == sequence(make(cache))[epoch * 5 : epoch * 5 + 5]


@pytest.mark.parametrize("changes", [{}, {"rank": 1, "world_size": 2, "batch_size": 2}])
def test_skipping_is_a_change_of_position(cache: Cache, changes: dict[str, int]) -> None:
    loader = make(cache, **changes)
    data = as_dataloader(loader)
    skipping = DataLoader(data.dataset, batch_sampler=Skip(data.batch_sampler, 3), collate_fn=data.collate_fn)
    skipping.batch_sampler.batch_sampler.set_epoch(1)

    size = len(loader)
    rest = [batch["index"].tolist() for batch in skipping]
    assert rest == sequence(make(cache, **changes))[size + 3 : 2 * size]
    assert loader.epoch == 2


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_varied_cache(tmp_path_factory.mktemp("v"))


@pytest.mark.parametrize("ranks", [{}, {"rank": 1, "world_size": 2}], ids=["", "ranks"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "setting", [{"batch_by": "kind"}, {"batch_by": "kind", "drop_last": True}, {"batch_tokens": 9}], ids=str
)
def test_batches_of_varying_size_come_as_without_it_and_may_be_skipped(
    varied: Cache, setting: dict[str, Any], shuffle: bool, ranks: dict[str, int]
) -> None:
    size = 1 if "batch_tokens" in setting else 2 if "drop_last" in setting else 4
    setting = {"batch_size": size, "shuffle": shuffle, **setting, **ranks}
    plain = sequence(Loader(varied, **setting))
    if "drop_last" not in setting:
        assert len({len(batch) for batch in plain}) > 1

    data = as_dataloader(Loader(varied, **setting))
    assert [batch["index"].tolist() for _ in range(EPOCHS) for batch in data] == plain

    first = len(Loader(varied, **setting))
    for count in range(first):
        fresh = as_dataloader(Loader(varied, **setting))
        skipping = DataLoader(
            fresh.dataset, batch_sampler=Skip(fresh.batch_sampler, count), collate_fn=fresh.collate_fn
        )
        assert [batch["index"].tolist() for batch in skipping] == plain[count:first]


def test_nothing_but_a_loader_is_taken(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="got a list"):
        as_dataloader([cache])
