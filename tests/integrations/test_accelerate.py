"""The real accelerate: it must leave a loader alone, and save its place with everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.errors import ConfigError
from stoker.integrations import as_dataloader
from stoker.loader import Loader
from stoker.store import Cache
from tests.integrations.passes import make_cache, sequence

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install 'stoker[trainers]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the framework are not ours to mend


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("c"))


@pytest.fixture
def accelerator():
    return accelerate.Accelerator(cpu=True)


def test_prepare_hands_a_loader_back_as_it_is(cache: Cache, accelerator) -> None:
    """A wrapper would fetch a batch ahead, and share out what is a rank's own already."""
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)

    model, same = accelerator.prepare(torch.nn.Linear(3, 1), loader)

    assert same is loader
    assert model is not None


@pytest.mark.parametrize("handed_out", [1, 4, 5, 6])
def test_a_saved_run_goes_on_after_the_batch_trained_last(
    cache: Cache, accelerator, tmp_path: Path, handed_out: int
) -> None:
    whole = sequence(Loader(cache, batch_size=5, seed=3, shuffle=True))
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)
    accelerator.register_for_checkpointing(loader)
    seen: list[list[int]] = []
    while len(seen) < handed_out:
        for batch in loader:
            seen.append(batch["index"].tolist())
            if len(seen) == handed_out:
                accelerator.save_state(str(tmp_path))
                break

    again = accelerate.Accelerator(cpu=True)
    again._custom_objects.clear()
    fresh = Loader(cache, batch_size=5, seed=3, shuffle=True)
    again.register_for_checkpointing(fresh)
    again.load_state(str(tmp_path))

    rest = [batch["index"].tolist() for batch in fresh]
    assert seen == whole[:handed_out]
    assert rest == whole[handed_out:][: len(rest)]
    assert fresh.epoch == 1 + handed_out // 5


def test_skipping_batches_of_a_loader_as_dataloader_reads_none(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)

    rest = accelerate.skip_first_batches(as_dataloader(loader), 3)

    assert [batch["index"].tolist() for batch in rest] == sequence(
        Loader(cache, batch_size=5, seed=3, shuffle=True)
    )[3:5]


def test_a_loader_as_dataloader_is_not_shared_out_again(cache: Cache) -> None:
    """Each rank has a loader of its own part; a part of a part would lose examples in silence."""
    from accelerate.data_loader import prepare_data_loader

    data = as_dataloader(Loader(cache, batch_size=5, shuffle=True))

    shared = prepare_data_loader(data, num_processes=2, process_index=1, rng_types=[])

    with pytest.raises(ConfigError, match=r"batch 3 was asked for .* leave it out of `prepare`"):
        list(shared)
