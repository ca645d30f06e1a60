from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader

from stoker.errors import ConfigError
from stoker.integrations import as_dataloader
from stoker.loader import Loader
from stoker.store import Cache
from tests.integrations.passes import EPOCHS, make_cache, sequence


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


def test_nothing_but_a_loader_is_taken(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="got a list"):
        as_dataloader([cache])
