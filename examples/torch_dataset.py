"""Any map-style Dataset, encoded once and trained on: `python examples/torch_dataset.py [FOLDER]`."""

import sys
from pathlib import Path

import torch

import stoker


class Waves(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Travelling waves on 64 points, 21 steps, computed (slowly, one would imagine) on every access."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x, t = torch.linspace(0, 6.2832, 65)[:64], torch.linspace(0, 1, 21)[:, None]
        speed = torch.tensor(1.0 + number / 40)
        data = torch.sin(x - speed * t + number) + 0.3 * torch.sin(3 * x - speed * t)
        return {"data": data.view(21, 1, 64, 1), "speed": speed}


def main(folder: Path) -> None:
    source = stoker.TorchSource(Waves(), time=("data",))
    encoder = stoker.GridEncoder(channels=1, grid=(1, 64), patch=(1, 4), tokens=8, dim=8, seed=0)
    cache = stoker.precompute(source, encoder, folder / "cache", name="waves", dtype="float16")

    windows = stoker.Windows(stride=1, horizon=1)
    train = stoker.Loader(cache, batch_size=64, windows=windows, indices=range(32), shuffle=True)
    val = stoker.Loader(cache, batch_size=64, windows=windows, indices=range(32, 40), shuffle=False)

    from stoker.train.config import TrainConfig
    from stoker.train.run import train as fit

    report = fit(train, val, TrainConfig(epochs=10, lr=2e-3, width=32, depth=2), folder / "run")
    print(f"NRMSE {report.val_nrmse:.3f} (persistence {report.persistence_nrmse:.3f})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/waves"))
