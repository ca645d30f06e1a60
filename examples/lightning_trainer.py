"""Lightning's Trainer on a Loader, stopped and resumed: `python examples/lightning_trainer.py [FOLDER]`."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

import stoker

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def train_dataloader(self) -> Any:
        torch.manual_seed(0)  # other numbers would be other data, and another cache
        x = torch.randn(1_000, 32)
        dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        # Each rank takes its part of every batch; Lightning calls set_epoch and saves the state.
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return stoker.cached(
            dataset, cache_dir=FOLDER / "cache", batch_size=50, rank=rank, world_size=world_size, shuffle=True
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def fit(steps: int, resume: Path | None = None) -> L.Trainer:
    saved = L.callbacks.ModelCheckpoint(dirpath=FOLDER, filename="{step}", every_n_train_steps=30)
    trainer = L.Trainer(max_steps=steps, accelerator="cpu", logger=False, callbacks=[saved])
    trainer.fit(Model(), ckpt_path=resume, weights_only=False)
    return trainer


if __name__ == "__main__":
    fit(35)
    trainer = fit(100, resume=FOLDER / "step=30.ckpt")  # saved in the middle of the second epoch
    print(f"{trainer.global_step} steps, {trainer.current_epoch} epochs, {trainer.train_dataloader!r}")
