"""Blood cells, found on a grid: `python examples/images_bccd.py BCCD_FOLDER [CACHE_FOLDER] [EPOCHS]`.

364 microscope images of 640 x 480 pixels with Pascal VOC boxes (github.com/Shenggan/BCCD_Dataset) are decoded
once, at 96 x 128, with their boxes moved along. A small network then says for each place of a grid of 12 x 16
of which kinds blood cells have the middle of their box there.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stoker
from stoker.loader import Normalization

SIZE, GRID = (96, 128), (12, 16)


def loaders_of(root: Path, folder: Path) -> tuple[stoker.Loader, stoker.Loader, tuple[str, ...]]:
    """One cache of all images; of its records those of the data's own `test` are judged by."""
    source = stoker.ImageSource(root, "voc", size=SIZE)
    begin = time.perf_counter()
    cache = stoker.precompute(source, None, folder, name="bccd")
    print(f"{len(cache)} images ready after {time.perf_counter() - begin:.2f} s")
    held_out = {*stoker.ImageSource(root, "voc", size=SIZE, split="test").keys()}
    numbers = [
        [n for n, key in enumerate(source.keys()) if (key in held_out) == test] for test in (False, True)
    ]
    values = Normalization(mean=(0.66, 0.64, 0.68), std=(0.08, 0.09, 0.04), divisor=255)
    train, test = (
        stoker.Loader(cache, 32, indices=own, normalize={"image": values}, seed=0, shuffle=True)
        for own in numbers
    )
    return train, test, source.classes


def targets(batch: dict[str, Tensor], classes: int) -> Tensor:
    """`(B, classes, 12, 16)`: 1 where the middle of a box of that class lies."""
    boxes, valid = batch["boxes"], batch["boxes_valid"]
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    column = (middle[..., 0] * GRID[1] / SIZE[1]).long().clamp(0, GRID[1] - 1)
    row = (middle[..., 1] * GRID[0] / SIZE[0]).long().clamp(0, GRID[0] - 1)
    found = torch.zeros(len(boxes), classes, *GRID)
    example = torch.arange(len(boxes))[:, None].expand_as(column)
    found[example[valid], batch["labels"][valid], row[valid], column[valid]] = 1
    return found


def network(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 16), (16, 32), (32, 48)):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, classes, 1))


def main(root: Path, folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    train, test, classes = loaders_of(root, folder)
    share = torch.cat([targets(batch, len(classes)) for batch in train]).mean((0, 2, 3))
    model = network(len(classes))
    nn.init.zeros_(model[-1].weight)
    model[-1].bias.data = torch.logit(share)  # begins as the guess that knows how frequent each class is

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["image"]), targets(batch, len(classes)))

    def loss_on(loader: stoker.Loader) -> float:
        model.eval()
        with torch.no_grad():
            return float(torch.stack([loss_of(batch) for batch in loader]).mean())

    guessed = loss_on(test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
    print(f"{', '.join(classes)}: test loss {loss_on(test):.4f} (guessing {guessed:.4f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find blood cells on a grid.")
    parser.add_argument("folder", type=Path, help="the BCCD data set: has JPEGImages and Annotations")
    parser.add_argument("cache", type=Path, nargs="?", default=Path(".stoker"), help="default: .stoker")
    parser.add_argument("epochs", type=int, nargs="?", default=20, help="default: 20")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.cache, arguments.epochs)
