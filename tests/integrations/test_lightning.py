"""The real `Trainer`: it makes the iterator before it sets the epoch, and never asks beyond the last."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from stoker.errors import StaleStateError
from stoker.loader import Loader
from stoker.store import Cache
from tests.integrations.passes import EPOCHS, make_cache, sequence

L = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'stoker[trainers]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trainer are not ours to mend


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return make_cache(tmp_path_factory.mktemp("c"))


class Mean(L.LightningModule):
    """Learns the mean of a field, and notes what it is given."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader
        self.mean = torch.nn.Parameter(torch.zeros(3))
        self.seen: list[list[int]] = []

    def train_dataloader(self) -> Loader:
        return self.loader

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return ((batch["bc"] - self.mean) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, loader: Loader, *, resume: Path | None = None, **settings) -> Mean:
    saved = L.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
    )
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved],
        **settings,
    )
    model = Mean(loader)
    trainer.fit(model, ckpt_path=resume, weights_only=False)
    return model


def test_epochs_are_those_of_a_plain_loop(cache: Cache, tmp_path: Path) -> None:
    model = fit(tmp_path, Loader(cache, batch_size=5, seed=3, shuffle=True))

    assert model.seen == sequence(Loader(cache, batch_size=5, seed=3, shuffle=True))


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_a_run_resumed_after_any_batch_goes_on_as_if_unbroken(
    cache: Cache, tmp_path: Path, settings: dict
) -> None:
    whole = fit(tmp_path / "whole", Loader(cache, batch_size=5, seed=3, shuffle=True), **settings)

    checkpoints = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    for path in checkpoints[::3]:
        trained = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        resumed = fit(
            tmp_path / "again", Loader(cache, batch_size=5, seed=3, shuffle=True), resume=path, **settings
        )

        assert resumed.seen == whole.seen[trained["total"]["ready"] :]
        assert torch.equal(resumed.mean, whole.mean)


def test_epochs_cut_short_begin_anew_after_a_resume(cache: Cache, tmp_path: Path) -> None:
    """The state saved with the last batch of a cut epoch lies in the middle of it."""
    whole = fit(tmp_path / "whole", Loader(cache, batch_size=5, seed=3, shuffle=True), limit_train_batches=3)

    for step in (2, 3, 4, 6):
        resumed = fit(
            tmp_path / "again",
            Loader(cache, batch_size=5, seed=3, shuffle=True),
            resume=tmp_path / "whole" / f"step={step}.ckpt",
            limit_train_batches=3,
        )

        assert resumed.seen == whole.seen[step:]


def test_a_checkpoint_of_another_order_is_refused(cache: Cache, tmp_path: Path) -> None:
    fit(tmp_path, Loader(cache, batch_size=5, seed=3, shuffle=True))

    with pytest.raises(StaleStateError, match="seed 3 there, 4 here"):
        fit(
            tmp_path / "again",
            Loader(cache, batch_size=5, seed=4, shuffle=True),
            resume=tmp_path / "step=2.ckpt",
        )
