"""Simulate springs and heat on triangles, both of differing sizes, and write a configuration for each.

    python examples/particles_and_meshes.py FOLDER
    stoker train FOLDER/particles.yaml
    stoker train FOLDER/mesh.yaml

Needs `pip install 'stoker[zarr]'`. The files are in the layouts of docs/how-to/meshes.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray

SAMPLES = 100
CONFIG = """\
data:
  kind: arrays
  task: {task}
  files: {files}
  arrays: {{layout: {layout}{more}}}
latent: {{tokens: {tokens}, dim: {dim}}}
encoder: {{kind: mesh}}
model: {{width: 64, depth: 2}}
training:
  batch_size: 64
  epochs: 30
  lr: 0.003
  time_stride: {stride}
  latent_cache_dir: {folder}/cache
  run_dir: {folder}/runs/{task}
  device: cpu
"""


def springs(rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Masses on a ring of springs around a center, each held by a weaker one at its place; leapfrog in
    time."""
    count, steps, inner, dt = int(rng.integers(10, 25)), int(rng.integers(31, 52)), 5, 0.01
    angle = 2 * np.pi * np.arange(count) / count
    rest = np.stack([np.cos(angle), np.sin(angle)], 1) * (1 + 0.2 * np.sin(2 * angle))[:, None]
    edges = np.concatenate([np.stack([np.arange(count), np.roll(np.arange(count), -k)], 1) for k in (1, 2)])
    phase = rng.uniform(0, 2 * np.pi, (2, 2))
    modes = np.stack([np.sin(angle + phase[0, 0]), np.sin(2 * angle + phase[0, 1])], 1)
    x = rest + 0.15 * modes @ rng.normal(size=(2, 2))
    v = 0.3 * np.stack([np.sin(angle + phase[1, 0]), np.cos(angle + phase[1, 1])], 1)

    stiffness = (count / 12) ** 2  # waves then travel alike on rings of all sizes

    def force(x: NDArray[np.float64]) -> NDArray[np.float64]:
        displaced = x - rest
        stretch = displaced[edges[:, 1]] - displaced[edges[:, 0]]
        found = -2.0 * displaced
        np.add.at(found, edges[:, 0], stiffness * stretch)
        np.add.at(found, edges[:, 1], -stiffness * stretch)
        return found

    positions, velocities = [x], [v]
    for _ in range(steps - 1):
        for _ in range(inner):
            half = v + 0.5 * dt * force(x)
            x = x + dt * half
            v = half + 0.5 * dt * force(x)
        positions.append(x)
        velocities.append(v)
    return {"positions": np.stack(positions), "velocities": np.stack(velocities), "neighbors/edges": edges}


def heat(rng: np.random.Generator) -> tuple[dict[str, NDArray[np.float64]], float]:
    """Heat on a triangulated square with shaken points: linear elements, lumped masses, implicit Euler."""
    across, down, steps, dt = *(int(n) for n in rng.integers(9, 16, 2)), int(rng.integers(21, 32)), 0.01
    kappa = float(rng.uniform(0.05, 0.2))
    x, y = np.meshgrid(np.linspace(0, 1, across), np.linspace(0, 1, down), indexing="ij")
    coords = np.stack([x.ravel(), y.ravel()], 1)
    inside = ((coords > 0) & (coords < 1)).all(1)
    coords[inside] += rng.uniform(-0.25, 0.25, (inside.sum(), 2)) / [across - 1, down - 1]
    corner = (np.arange(across - 1)[:, None] * down + np.arange(down - 1)).ravel()
    cells = np.concatenate(
        [
            np.stack([corner, corner + down, corner + 1], 1),
            np.stack([corner + 1, corner + down, corner + down + 1], 1),
        ]
    )
    stiff, mass = np.zeros((len(coords), len(coords))), np.zeros(len(coords))
    for cell in cells:
        a, b, c = coords[cell]
        area = 0.5 * abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]))
        gradients = np.array(
            [[b[1] - c[1], c[0] - b[0]], [c[1] - a[1], a[0] - c[0]], [a[1] - b[1], b[0] - a[0]]]
        )
        stiff[np.ix_(cell, cell)] += gradients @ gradients.T / (4 * area)
        mass[cell] += area / 3
    advance = np.linalg.inv(np.diag(mass) + dt * kappa * stiff) * mass
    spots = rng.uniform(0.15, 0.85, (3, 2))
    u = sum(
        a * np.exp(-40 * ((coords - spot) ** 2).sum(1))
        for a, spot in zip(rng.uniform(0.5, 1.5, 3), spots, strict=True)
    )
    states = [u]
    for _ in range(steps - 1):
        states.append(advance @ states[-1])
    pairs = np.sort(np.concatenate([cells[:, [0, 1]], cells[:, [1, 2]], cells[:, [0, 2]]]), axis=1)
    fields = {"fields/u": np.stack(states)[:, :, None].astype(np.float32), "time": dt * np.arange(steps)}
    return {"coords": coords, "cells": cells, "edges": np.unique(pairs, axis=0), **fields}, kappa


def write(folder: Path, samples: int = SAMPLES, seed: int = 0) -> tuple[Path, Path]:
    """Write both sets and their configurations; returns the configurations."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "springs.h5", "w") as file:
        for number in range(samples):
            for name, values in springs(rng).items():
                file[f"{number:04d}/{name}"] = values
    root = zarr.open(str(folder / "heat.zarr"), mode="w")
    for number in range(samples):
        arrays, kappa = heat(rng)
        group = root.create_group(f"{number:04d}")
        group.attrs["kappa"] = kappa
        for name, values in arrays.items():
            group.create_array(name, data=values)
    configs = folder / "particles.yaml", folder / "mesh.yaml"
    shared = {"folder": folder}
    configs[0].write_text(
        CONFIG.format(
            task="springs",
            files=folder / "springs.h5",
            layout="particles",
            more="",
            tokens=4,
            dim=32,
            stride=2,
            **shared,
        )
    )
    more = ", attributes: [kappa]"
    configs[1].write_text(
        CONFIG.format(
            task="heat",
            files=folder / "heat.zarr",
            layout="mesh",
            more=more,
            tokens=16,
            dim=8,
            stride=2,
            **shared,
        )
    )
    return configs


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(f"stoker train {path}")
