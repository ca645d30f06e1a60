"""The state protocol, beside torchdata's `StatefulDataLoader`, and the arguments of torch's `DataLoader`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stoker.loader import Loader, Mixture
from stoker.loader.options import IGNORED, REFUSED, TAKEN
from stoker.store import Cache
from tests.integrations.passes import make_cache

EPOCH = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21, 22, 23]]
Make = Callable[[], Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # importing torchdata touches what torch calls deprecated


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("c"))


@pytest.fixture(params=["stoker", "torchdata"])
def make(request: pytest.FixtureRequest, cache: Cache) -> Make:
    if request.param == "stoker":
        return lambda: Loader(cache, batch_size=5, shuffle=False)
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install 'stoker[trainers]'"
    )
    return lambda: torchdata.StatefulDataLoader(list(range(24)), batch_size=5)


def numbers(loader: Any) -> list[list[int]]:
    return [(batch["index"] if isinstance(batch, dict) else batch).tolist() for batch in loader]


def restored(make: Make, state: dict[str, Any]) -> Any:
    loader = make()
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("count", range(5))
def test_a_state_goes_on_after_the_batches_handed_out(make: Make, count: int) -> None:
    loader = make()
    batches = iter(loader)
    for _ in range(count):
        next(batches)

    again = restored(make, loader.state_dict())

    assert numbers(again) == EPOCH[count:]
    assert numbers(again) == EPOCH


def test_after_a_whole_pass_comes_a_whole_pass(make: Make) -> None:
    loader = make()
    assert numbers(loader) == EPOCH

    assert numbers(restored(make, loader.state_dict())) == EPOCH
    assert numbers(loader) == EPOCH


def test_a_pass_given_up_begins_again(make: Make) -> None:
    loader = make()
    next(iter(loader))

    assert numbers(loader) == EPOCH


def test_every_argument_of_a_dataloader_is_known() -> None:
    """The names of the torch that is installed: a new one must be decided on."""
    theirs = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", "dataset"}
    ours = inspect.signature(Loader.__init__).parameters.keys() | IGNORED.keys() | REFUSED.keys() | {*TAKEN}

    assert theirs <= ours


def test_what_trainers_look_at_is_there(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, drop_last=True, shuffle=True)

    assert (loader.batch_size, loader.drop_last, loader.dataset, len(loader)) == (5, True, cache, 4)
    loader.sampler.set_epoch(3)
    assert loader.epoch == 3
    assert len(loader.sampler) == 20


@pytest.mark.parametrize("kind", [Loader, Mixture])
def test_the_epoch_may_be_set_after_the_iterator_is_made(cache: Cache, kind: Any) -> None:
    """As Lightning does."""

    def make_one() -> Any:
        return (
            kind([cache, cache], 5, names=["a", "b"], seed=3) if kind is Mixture else kind(cache, 5, seed=3)
        )

    expected, loader = make_one(), make_one()
    expected.set_epoch(2)

    batches = iter(loader)
    loader.sampler.set_epoch(2)

    assert numbers(batches) == numbers(expected)
