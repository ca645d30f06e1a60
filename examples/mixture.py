"""Two tasks of other grids and parameters in one stream of batches: `python examples/mixture.py [FOLDER]`."""

import sys
from collections import Counter
from pathlib import Path

import torch

import stoker


class Waves(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Waves that travel at a `speed`, or that also fade at a `rate`."""

    def __init__(self, points: int, count: int, *, fading: bool) -> None:
        self.points, self.count, self.fading = points, count, fading

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x, t = torch.linspace(0, 6.2832, self.points + 1)[:-1], torch.linspace(0, 1, 21)[:, None]
        speed = torch.tensor(1.0 + number / self.count)
        sample = {"data": torch.sin(x - speed * t + number), "speed": speed}
        if self.fading:
            sample["rate"] = torch.tensor(0.5 + number % 3)
            sample["data"] = sample["data"] * torch.exp(-sample["rate"] * t)
        sample["data"] = sample["data"].view(21, 1, self.points, 1)
        return sample


def encoded(name: str, points: int, count: int, folder: Path) -> stoker.Cache:
    """Latents of 8 tokens of 8 numbers, whatever the grid."""
    source = stoker.TorchSource(Waves(points, count, fading=name == "fading"), time=("data",))
    encoder = stoker.GridEncoder(channels=1, grid=(1, points), patch=(1, 4), tokens=8, dim=8, seed=0)
    return stoker.precompute(source, encoder, folder / "cache", name=name, dtype="float16")


def main(folder: Path) -> None:
    caches = [encoded("plain", 64, 40, folder), encoded("fading", 32, 12, folder)]
    mixture = stoker.Mixture(
        caches, batch_size=32, windows=stoker.Windows(), mode="weighted", weights={"plain": 3, "fading": 1}
    )

    steps: Counter[str] = Counter()
    for batch in mixture:  # batch.z0, batch.z1: one task at a time
        steps[batch.task] += 1
        if batch.task == "plain":  # it has no rate: zeros, and a mask that says so
            assert not batch.mask["rate"].any()
            assert not batch.cond["rate"].any()

    print(mixture)
    print("conditions", ", ".join(batch.cond), "· steps", dict(sorted(steps.items())))

    state = mixture.state_dict()  # a few numbers: goes on at this step, at any tier and world size
    mixture.load_state_dict(state)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mixture"))
