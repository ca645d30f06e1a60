"""What `gpu_serve.py` trains: a ResNet-18 and the reference operator, each with its step and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.train.operator import LatentOperator, OperatorShape

CLASSES = 10


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(leaving) for _ in range(2))
        around: list[nn.Module] = []
        if stride > 1 or entering != leaving:
            around = [nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)]
        self.around = nn.Sequential(*around)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.around(x))


def resnet18(width: int = 64) -> nn.Module:
    """He et al., "Deep residual learning" (2016): 18 layers, 11.2 M weights at width 64 and ten classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    entering = width
    for stage in range(4):
        leaving = width << stage
        for place in range(2):
            layers.append(Residual(entering, leaving, 2 if stage and not place else 1))
            entering = leaving
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, CLASSES))


Step = Callable[..., Tensor]
"""Takes a batch's tensors, trains on them, returns the loss, on the device."""


def image_step(device: torch.device, *, width: int) -> Step:
    """Classify normalized images; on a GPU in bfloat16."""
    torch.manual_seed(0)
    model = resnet18(width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(
                model(images.contiguous(memory_format=torch.channels_last)).float(), labels
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def latent_step(device: torch.device, tokens: int, dim: int, *, width: int, depth: int) -> Step:
    """The reference operator on pairs of states."""
    shape = OperatorShape(tokens=tokens, dim=dim, cond=0, width=width, depth=depth, heads=4)
    model = LatentOperator(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(z0: Tensor, z1: Tensor) -> Tensor:
        z0, z1 = z0.float(), z1.float()
        loss = model.distance(model(z0, z0.new_zeros((len(z0), 0))), z1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def labelled_images(count: int, side: int) -> dict[str, Tensor]:
    """Noise around one of ten patterns, so that there is something to learn: uint8 images and int64 labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    patterns = torch.randint(0, 128, (CLASSES, 3, side, side), generator=generator, dtype=torch.uint8)
    images = torch.empty((count, 3, side, side), dtype=torch.uint8)
    for begin in range(0, count, 1024):
        own = labels[begin : begin + 1024]
        noise = torch.randint(0, 128, (len(own), 3, side, side), generator=generator, dtype=torch.uint8)
        images[begin : begin + 1024] = patterns[own] + noise
    return {"image": images, "label": labels}


def waves(count: int, steps: int, tokens: int, dim: int) -> Tensor:
    """Trajectories that one state decides: `(count, steps, tokens, dim)` float16."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.matrix_exp(0.1 * torch.randn(dim, dim, generator=generator).tril(-1))
    state = torch.randn(count, tokens, dim, generator=generator)
    out = torch.empty((count, steps, tokens, dim), dtype=torch.float16)
    for step in range(steps):
        out[:, step] = state.half()
        state = F.normalize(state @ turn, dim=-1) * dim**0.5
    return out


def launches_per_batch(batches: Any) -> float | None:
    """Kernels and copies that a GPU runs for one batch, over an entire epoch: its order has some, too. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        count = sum(1 for _ in batches)
        torch.cuda.synchronize()
    return round(sum(1 for event in seen.events() if event.device_type.name == "CUDA") / count, 2)


class VisionTransformer(nn.Module):
    """Frozen features of uint8 images `(n, 3, side, side)`: the mean token, `(n, width)` float32.

    Width 384 and depth 12 are those of DINOv2's small model (Oquab et al., 2023); its weights do not matter here.
    """

    def __init__(self, *, side: int, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(1, (side // 16) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, data: Tensor) -> Tensor:
        with torch.autocast(data.device.type, torch.bfloat16, enabled=data.device.type == "cuda"):
            tokens = self.patches(data.float() / 255).flatten(2).transpose(1, 2) + self.places
            return self.layers(tokens).mean(1).float()
