"""Train attention over bags of features: `python examples/bags.py FEATURES LABELS OUT`.

FEATURES is a folder with an HDF5 file a slide, `features` (n, width) and `coords` (n, 2), as of CLAM and
TRIDENT. LABELS is a table with the columns `slide` and `label`. Features are taken over as they are. Training
sees 512 other rows of each slide in each epoch, validation evenly spaced ones.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import stoker


class Attention(torch.nn.Module):
    """A label of a bag from the weighted mean of its rows (Ilse, Tomczak and Welling, 2018)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.score = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.label = torch.nn.Linear(width, classes)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = self.score(rows)[..., 0]
        behind = torch.arange(rows.shape[1]) >= lengths[:, None]  # short bags end before
        weights = scores.masked_fill(behind, -torch.inf).softmax(1)
        return self.label((weights[..., None] * rows).sum(1))


def main(features: Path, labels: Path, out: Path, epochs: int = 8, rows: int = 512) -> list[float]:
    """Return the part of the validation bags with the right label, for each epoch."""
    bags = stoker.adopt(features, out, name="bags")
    table = {"table": labels, "key": "slide", "columns": {"label": "int64"}, "on": [*bags.keys()]}
    bags = stoker.open_cache(bags.path, join=table)

    def load(part: str, random: bool) -> Any:
        choose = {("features", "coords"): stoker.Rows(rows, random=random)}
        return stoker.Loader(bags, 4, shuffle=random, seed=0, choose=choose, indices=bags.where(part))

    train, val = load("sample_index % 4 <> 0", True), load("sample_index % 4 = 0", False)
    torch.manual_seed(0)
    model, right = Attention(bags.schema["features"].shape[-1], classes=2), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for batch in train:
            found = model(batch["features"].float(), batch["features.lengths"])
            loss = F.cross_entropy(found, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = [(model(b["features"].float(), b["features.lengths"]), b["label"]) for b in val]
        right.append(torch.cat([made.argmax(1) == label for made, label in found]).float().mean().item())
    return right


if __name__ == "__main__":
    print("right", *(f"{part:.0%}" for part in main(*map(Path, sys.argv[1:4]))))
