"""Hugging Face's Trainer on a Loader, resumed from a checkpoint: `python examples/hf_trainer.py [FOLDER]`."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import stoker
from stoker.integrations import as_dataloader

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hf")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - y).square().mean()}


class CachedTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        torch.manual_seed(0)  # other numbers would be other data, and another cache
        x = torch.randn(1_000, 32)
        loader = stoker.cached(
            torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
            cache_dir=FOLDER / "cache",
            batch_size=self.args.per_device_train_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            shuffle=True,
            transforms=[lambda batch: {"x": batch[0], "y": batch[1]}],  # names of `forward`
        )
        return as_dataloader(loader)  # on a resume the Trainer skips batches by their number


def trainer(epochs: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(FOLDER), num_train_epochs=epochs, per_device_train_batch_size=50, save_steps=30,
        learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    return CachedTrainer(model=Model(), args=arguments)


if __name__ == "__main__":
    trainer(epochs=2).train()
    result = trainer(epochs=5).train(resume_from_checkpoint=str(FOLDER / "checkpoint-30"))
    print(f"{result.global_step} steps")
