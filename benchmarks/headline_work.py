"""The three workloads of `headline.py`: data, datasets, frozen encoders, trained models.

Data is made from seeds. A dataset gives raw samples. A frozen encoder, where there is one, takes them one by one.
The training step sees encoded examples alone, so every contender trains the same model on the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

CLASSES = 10
SIDE = 128
"""Pixels of an image after resizing; the file has twice as many a side."""
STEPS, POINTS = 41, 1024
"""Of a trajectory."""
TOKENS, DIM = 16, 32
"""Of a latent state."""
WIDTH = 512
"""Numbers of a feature vector."""

Example = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """One kind of training that readers know."""

    name: str
    title: str
    count: int
    """Samples: images, trajectories, feature vectors."""
    batch: int
    """Examples of a training batch."""
    make: Callable[[Path, int], None]
    """Write the raw files of so many samples."""
    samples: Callable[[Path], Dataset[Any]]
    """Raw samples, each of which is encoded once by a contender that stores."""
    examples: Callable[[Path], Dataset[Any]]
    """Raw examples, as a DataLoader without a store reads them."""
    encode: Callable[[nn.Module, Example], Example]
    """Encode a batch of either, on its device."""
    encoder: Callable[[], nn.Module] | None
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Example], Tensor]


# ---------------------------------------------------------------------------------------------------- images


def make_images(folder: Path, count: int) -> None:
    """JPEG files of gratings in noise; the class is the angle of the grating."""
    from PIL import Image

    rng = np.random.default_rng(0)
    size = 2 * SIDE
    y, x = np.mgrid[:size, :size] / size
    for number in range(count):
        label = number % CLASSES
        angle, phase = np.pi * label / CLASSES, rng.uniform(0, 2 * np.pi)
        wave = np.sin(2 * np.pi * rng.uniform(5, 8) * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        coarse = rng.normal(size=(size // 4, size // 4, 3)).repeat(4, 0).repeat(4, 1)
        pixels = 128 + 40 * wave[..., None] * rng.uniform(0.3, 1, 3) + 30 * coarse
        Image.fromarray(pixels.clip(0, 255).astype("u1")).save(
            folder / f"{number:05}_{label}.jpg", quality=90
        )


class Images(Dataset[tuple[Tensor, int]]):
    """Decode and resize one file on each access; the class is in its name."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[number]) as image:
            pixels = np.array(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), int(self.paths[number].stem[-1])


class VisionEncoder(nn.Module):
    """Four convolutions from uint8 `(n, 3, 128, 128)` to float32 `(n, 64, 8, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64, 64)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 64 - 2
        for layer in self.layers:
            x = F.gelu(layer(x)) * 2
        return x


def image_head() -> nn.Module:
    """A small convolutional classifier on the frozen features."""
    return nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    )


def classification_loss(model: nn.Module, example: Example) -> Tensor:
    features, labels = example
    return F.cross_entropy(model(features), labels.long().flatten())


# -------------------------------------------------------------------------------------------------------- pde


def make_burgers(folder: Path, count: int) -> None:
    """One HDF5 file in PDEBench's 1D layout: `tensor` (N, 41, 1024) float32."""
    from stoker.run.demo import BurgersSpec, write_burgers

    spec = BurgersSpec(trajectories=count, steps=STEPS, points=POINTS, interval=0.01)
    write_burgers(folder / "1D_Burgers_Sols_Nu0.01.hdf5", spec)


class Burgers(Dataset[Any]):
    """Entire trajectories `(41, 1024)`, or pairs of neighboring states; the file is opened on first use."""

    def __init__(self, folder: Path, *, pairs: bool) -> None:
        import h5py

        self.path, self.pairs, self.states = next(folder.glob("*.hdf5")), pairs, None
        with h5py.File(self.path) as file:
            self.count = len(file["tensor"])

    def __len__(self) -> int:
        return self.count * (STEPS - 1 if self.pairs else 1)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        import h5py

        self.states = h5py.File(self.path)["tensor"] if self.states is None else self.states
        if not self.pairs:
            return (torch.from_numpy(self.states[number]),)
        sample, start = divmod(number, STEPS - 1)
        both = torch.from_numpy(self.states[sample, start : start + 2])
        return both[0], both[1]


class StateEncoder(nn.Module):
    """Five convolutions from states of 1,024 points to latents `(n, 16, 32)` float32."""

    LAYERS: ClassVar = ((1, 32, 7, 2), (32, 64, 5, 2), (64, 64, 5, 1), (64, 128, 5, 4), (128, DIM, 5, 4))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, k, stride=s, padding=k // 2, padding_mode="circular")
            for a, b, k, s in self.LAYERS
        )

    def forward(self, states: Tensor) -> Tensor:
        x = states.reshape(len(states), 1, POINTS)
        for layer in self.layers:
            x = F.gelu(layer(x)) * 2
        return x.transpose(1, 2)


class Operator(nn.Module):
    """Predict the next latent state: one transformer layer over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.place = nn.Parameter(torch.zeros(TOKENS, 64))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.leave(self.layer(self.enter(z) + self.place))


def next_state_loss(model: nn.Module, example: Example) -> Tensor:
    z0, z1 = example
    return F.mse_loss(model(z0), z1)


# --------------------------------------------------------------------------------------------------- features


def make_features(folder: Path, count: int) -> None:
    """A `.pt` file for each of `count` feature vectors, with its class."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    for number in range(count):
        features = torch.randn(WIDTH, generator=generator) * 8 + centers[number % CLASSES]
        torch.save((features, torch.tensor(number % CLASSES)), folder / f"{number:06}.pt")


class Features(Dataset[tuple[Tensor, Tensor]]):
    """Load one `.pt` file on each access."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.pt"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.load(self.paths[number], weights_only=True)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES)
    )


# -------------------------------------------------------------------------------------------------------------


def encode_first(encoder: nn.Module, example: Example) -> Example:
    return encoder(example[0]), *example[1:]


def encode_states(encoder: nn.Module, example: Example) -> Example:
    """Encode the states of pairs in one call, or those of trajectories, of which pairs are made then."""
    if len(example) == 2:
        return encoder(torch.cat(example)).chunk(2)
    states = example[0]
    latents = encoder(states.flatten(0, 1)).unflatten(0, states.shape[:2])
    return latents[:, :-1].flatten(0, 1), latents[:, 1:].flatten(0, 1)


WORKLOADS = (
    Workload(
        name="images",
        title="Images: JPEG files, frozen vision encoder, convolutional head",
        count=1_024,
        batch=64,
        make=make_images,
        samples=Images,
        examples=Images,
        encode=encode_first,
        encoder=VisionEncoder,
        model=image_head,
        loss=classification_loss,
    ),
    Workload(
        name="pde",
        title="PDE trajectories: HDF5 file, frozen convolutional encoder, latent operator",
        count=64,
        batch=64,
        make=make_burgers,
        samples=partial(Burgers, pairs=False),
        examples=partial(Burgers, pairs=True),
        encode=encode_states,
        encoder=StateEncoder,
        model=Operator,
        loss=next_state_loss,
    ),
    Workload(
        name="features",
        title="Features: a folder of .pt files, no encoder, three-layer network",
        count=20_480,
        batch=128,
        make=make_features,
        samples=Features,
        examples=Features,
        encode=lambda _encoder, example: example,
        encoder=None,
        model=mlp,
        loss=classification_loss,
    ),
)


def quick(workload: Workload) -> Workload:
    """The same with little data."""
    return replace(workload, count={"images": 256, "pde": 16, "features": 1_024}[workload.name])
