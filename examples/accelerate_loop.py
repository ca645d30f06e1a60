"""A loop of one's own with accelerate, resumed: `python examples/accelerate_loop.py [FOLDER]`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import stoker

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")


def train(accelerator: Accelerator, *, epochs: int, resume: bool) -> stoker.Loader:
    torch.manual_seed(0)  # other numbers would be other data, and another cache
    x = torch.randn(1_000, 32)
    loader = stoker.cached(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        cache_dir=FOLDER / "cache",
        batch_size=50,
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        shuffle=True,
    )
    model = torch.nn.Linear(32, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    accelerator.register_for_checkpointing(loader)  # the loader itself is not prepared: it has its rank
    if resume:
        accelerator.load_state(str(FOLDER / "state"))
    while loader.epoch < epochs:  # a finished pass moves on to the next epoch by itself
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if loader.state_dict()["position"] == 500:
                accelerator.save_state(str(FOLDER / "state"))
    return loader


if __name__ == "__main__":
    train(Accelerator(cpu=True), epochs=1, resume=False)
    loader = train(Accelerator(cpu=True), epochs=2, resume=True)
    print(f"epoch {loader.epoch}: {loader}")
