"""Make small simulations in the file layouts of PDEBench and The Well, and train on any of them.

    python examples/pde_layouts.py data/made               # all files, about 10 seconds
    python examples/pde_layouts.py data/made darcy cfd3d   # some of them
    stoker train configs/train_darcy.yaml data.files=data/made/2D_DarcyFlow_made.hdf5

Real equations, solved small: reaction-diffusion, shallow water, Darcy flow, compressible flow in one, two and
three dimensions, a dye carried round an obstacle, heat in three dimensions. Datasets, axes, coordinates and
attributes are laid out as in the public data sets, whose files are read the same way; the values are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np

GAMMA = 5 / 3  # ratio of specific heats


def smooth(rng: np.random.Generator, count: int, points: int, axes: int) -> np.ndarray:
    """Return random periodic fields `(count, points, ...)` of wave numbers up to 2, scaled to [-1, 1]."""
    at = 2 * np.pi * np.arange(points) / points
    fields = np.zeros((count, *[points] * axes))
    for _ in range(6):
        angle = rng.uniform(0, 2 * np.pi, (count, *[1] * axes))
        for axis in range(axes):
            shape = [points if other == axis else 1 for other in range(axes)]
            angle = angle + rng.integers(-2, 3, (count, *[1] * axes)) * at.reshape(1, *shape)
        fields += rng.normal(size=(count, *[1] * axes)) * np.sin(angle)
    return fields / np.abs(fields).max(axis=tuple(range(1, axes + 1)), keepdims=True)


def centers(points: int) -> np.ndarray:
    """Return cell centers on [0, 1)."""
    return ((np.arange(points) + 0.5) / points).astype(np.float32)


def laplacian(u: np.ndarray, axes: Sequence[int], h: float, edge: str = "wrap") -> np.ndarray:
    """Return the second-order Laplacian; `edge` is `wrap` (periodic) or `edge` (no flow)."""
    total = -2.0 * len(axes) * u
    for axis in axes:
        pad = [(1, 1) if other == axis % u.ndim else (0, 0) for other in range(u.ndim)]
        wide = np.pad(u, pad, mode=edge)
        total += np.take(wide, range(u.shape[axis]), axis) + np.take(wide, range(2, u.shape[axis] + 2), axis)
    return total / h**2


def advance(state: np.ndarray, flux: Callable, speed: Callable, h: float, span: float) -> np.ndarray:
    """Advance conservation laws `(n, variables, *grid)`, periodic, by `span`: the Rusanov scheme.

    Args:
        state: Conserved variables.
        flux: State and axis (0, 1, ...) to the flux along it.
        speed: State to the fastest wave speed in each cell.
        h, span: Cell size and time.
    """
    done = 0.0
    axes = state.ndim - 2
    while done < span:
        fastest = speed(state)
        dt = min(span - done, 0.4 * h / axes / float(fastest.max()))
        change = np.zeros_like(state)
        for axis in range(axes):
            after = np.roll(state, -1, axis + 2)
            wave = np.maximum(fastest, np.roll(fastest, -1, axis + 1))[:, None]
            flow = flux(state, axis)
            face = 0.5 * (flow + np.roll(flow, -1, axis + 2)) - 0.5 * wave * (after - state)
            change -= (face - np.roll(face, 1, axis + 2)) / h
        state = state + dt * change
        done += dt
    return state


def euler_flux(state: np.ndarray, axis: int) -> np.ndarray:
    """Return the flux of mass, momentum and energy."""
    density, momentum, energy = state[:, 0], state[:, 1:-1], state[:, -1]
    velocity = momentum[:, axis] / density
    pressure = (GAMMA - 1) * (energy - 0.5 * (momentum**2).sum(1) / density)
    flow = np.concatenate([density[:, None], momentum, (energy + pressure)[:, None]], 1) * velocity[:, None]
    flow[:, 1 + axis] += pressure
    return flow


def euler_speed(state: np.ndarray) -> np.ndarray:
    """Return velocity plus the speed of sound."""
    density, momentum, energy = state[:, 0], state[:, 1:-1], state[:, -1]
    kinetic = 0.5 * (momentum**2).sum(1) / density
    return np.sqrt(2 * kinetic / density) + np.sqrt(GAMMA * (GAMMA - 1) * (energy - kinetic) / density)


def cfd(folder: Path, axes: int, count: int, steps: int, points: int, span: float) -> Path:
    """Write compressible flow: `density`, `pressure`, `Vx`[, `Vy`, `Vz`] (N,T,X[,Y,Z])."""
    rng = np.random.default_rng(axes)
    density = 1 + 0.3 * smooth(rng, count, points, axes)
    velocity = [0.3 * smooth(rng, count, points, axes) for _ in range(axes)]
    pressure = 1 + 0.3 * smooth(rng, count, points, axes)
    energy = pressure / (GAMMA - 1) + 0.5 * density * sum(v**2 for v in velocity)
    state = np.stack([density, *[density * v for v in velocity], energy], 1)
    states = [state]
    for _ in range(steps - 1):
        state = advance(state, euler_flux, euler_speed, 1 / points, span)
        states.append(state)
    states = np.stack(states, 1)  # (n, t, variables, *grid)
    density, momentum = states[:, :, 0], states[:, :, 1:-1]
    pressure = (GAMMA - 1) * (states[:, :, -1] - 0.5 * (momentum**2).sum(2) / density)
    names = ["x", "y", "z"][:axes]
    path = folder / f"{axes}D_CFD_Rand_periodic_made.hdf5"
    with h5py.File(path, "w") as file:
        file["density"], file["pressure"] = density.astype("f4"), pressure.astype("f4")
        for at, name in enumerate(names):
            file[f"V{name}"] = (momentum[:, :, at] / density).astype("f4")
            file[f"{name}-coordinate"] = centers(points)
        file["t-coordinate"] = (np.arange(steps + 1) * span).astype("f4")
        file.attrs["eta"] = file.attrs["zeta"] = 0.0
    return path


def groups(path: Path, data: np.ndarray, span: float, attributes: str) -> Path:
    """Write one group per sample: `0000/data` (T,X,Y,C) and `0000/grid/{t,x,y}`."""
    with h5py.File(path, "w") as file:
        for number, sample in enumerate(data.astype("f4")):
            group = file.create_group(f"{number:04d}")
            group["data"] = sample
            group["grid/t"] = (np.arange(len(sample)) * span).astype("f4")
            group["grid/x"], group["grid/y"] = centers(sample.shape[1]), centers(sample.shape[2])
            group.attrs["config"] = attributes
    return path


def diffusion_reaction(folder: Path) -> Path:
    """Write two reacting species (FitzHugh-Nagumo), walls without flow."""
    rng, points, steps, span = np.random.default_rng(10), 32, 21, 0.25
    u, v = smooth(rng, 32, points, 2), smooth(rng, 32, points, 2)
    states, inner = [np.stack([u, v], -1)], 50
    for _ in range(steps - 1):
        for _ in range(inner):
            dt, h = span / inner, 2 / points
            du = 1e-3 * laplacian(u, (1, 2), h, "edge") + u - u**3 - 5e-3 - v
            dv = 5e-3 * laplacian(v, (1, 2), h, "edge") + u - v
            u, v = u + dt * du, v + dt * dv
        states.append(np.stack([u, v], -1))
    return groups(folder / "2D_diff-react_made.h5", np.stack(states, 1), span, "Du: 1e-3, Dv: 5e-3")


def shallow_water(folder: Path) -> Path:
    """Write radial dam breaks: the height of water, one channel."""
    rng, points, steps, span = np.random.default_rng(11), 32, 21, 0.02
    x = centers(points) * 5 - 2.5
    radius = rng.uniform(0.3, 0.9, (32, 1, 1))
    height = 1 + 1.0 * (np.hypot(x[:, None], x[None]) < radius)

    def flux(state: np.ndarray, axis: int) -> np.ndarray:
        speed = state[:, 1 + axis] / state[:, 0]
        flow = state * speed[:, None]
        flow[:, 1 + axis] += 0.5 * state[:, 0] ** 2
        return flow

    def speed(state: np.ndarray) -> np.ndarray:
        return np.abs(state[:, 1:] / state[:, :1]).max(1) + np.sqrt(state[:, 0])

    state = np.stack([height, 0 * height, 0 * height], 1)
    states = [state[:, 0]]
    for _ in range(steps - 1):
        state = advance(state, flux, speed, 5 / points, 5 * span)
        states.append(state[:, 0])
    data = np.stack(states, 1)[..., None]
    return groups(folder / "2D_rdb_made.h5", data, 5 * span, "inner height 2, outer height 1")


def darcy(folder: Path, count: int = 512) -> Path:
    """Write steady flow, -div(a grad u) = 1, u = 0 at the edge: `nu` (N,X,Y) and `tensor` (N,1,X,Y)."""
    rng, points = np.random.default_rng(12), 16
    nu = np.where(smooth(rng, count, points, 2) > 0, 1.0, 0.1)
    number = np.arange(points**2).reshape(points, points)
    matrix = np.zeros((count, points**2, points**2))
    for axis in (0, 1):
        one, other = (np.take(number, where, axis).ravel() for where in (range(points - 1), range(1, points)))
        a, b = nu.reshape(count, -1)[:, one], nu.reshape(count, -1)[:, other]
        face = 2 * a * b / (a + b) * points**2
        for row, col, sign in ((one, one, 1), (other, other, 1), (one, other, -1), (other, one, -1)):
            matrix[:, row, col] += sign * face
        for edge in (np.take(number, 0, axis), np.take(number, -1, axis)):  # half a cell to the edge
            matrix[:, edge, edge] += 2 * nu.reshape(count, -1)[:, edge] * points**2
    solution = np.linalg.solve(matrix, np.ones((count, points**2, 1)))
    path = folder / "2D_DarcyFlow_made.hdf5"
    with h5py.File(path, "w") as file:
        file["nu"] = nu.astype("f4")
        file["tensor"] = solution.reshape(count, 1, points, points).astype("f4")
        file["x-coordinate"], file["y-coordinate"] = centers(points), centers(points)
        file.attrs["beta"] = 1.0
    return path


def well(path: Path, fields: dict[str, np.ndarray], span: float, walls: dict[str, str]) -> h5py.File:
    """Begin a file of The Well: fields by `t0_fields/name`, boundaries by axis with their type."""
    grid = next(iter(fields.values())).shape[2:]
    space = ["x", "y", "z"][: len(walls)]
    file = h5py.File(path, "w")
    file.attrs["grid_type"], file.attrs["n_spatial_dims"] = "cartesian", len(space)
    file.create_group("dimensions").attrs["spatial_dims"] = space
    steps = next(iter(fields.values())).shape[1]
    file["dimensions/time"] = (np.arange(steps) * span).astype("f4")
    file["dimensions/time"].attrs["sample_varying"] = False
    for name, points in zip(space, grid, strict=False):
        file[f"dimensions/{name}"] = centers(points)
        mask = np.zeros(points, bool)
        mask[[0, -1]] = True
        side = file.create_group(f"boundary_conditions/{name}_{walls[name].lower()}")
        side["mask"] = mask
        if walls[name] == "WALL":
            side["values"] = np.zeros(2, "f4")
        side.attrs.update({"bc_type": walls[name], "associated_dims": [name], "associated_fields": []})
        side.attrs.update({"sample_varying": False, "time_varying": False})
    for name, values in fields.items():
        put(file, name, values, sample=True, time=True)
    return file


def put(file: h5py.File, name: str, values: np.ndarray, *, sample: bool, time: bool) -> None:
    """Write one field with the attributes that name its axes."""
    file[name] = np.asarray(values, "f4")
    space = len(file["dimensions"].attrs["spatial_dims"])
    file[name].attrs.update({"sample_varying": sample, "time_varying": time, "dim_varying": [True] * space})
    group = file[name].parent
    group.attrs["field_names"] = sorted(group)


def well_2d(folder: Path) -> Path:
    """Write a dye carried round an obstacle: y has walls, x is periodic; the flow is a constant field."""
    rng, points, steps, span = np.random.default_rng(13), 32, 21, 0.02
    x, y = np.meshgrid(centers(points), centers(points), indexing="ij")
    solid = np.hypot(x - 0.5, y - 0.5) < 0.15
    stream = np.where(
        solid, 0.0, np.sin(np.pi * y) * (1 - np.exp(-(((x - 0.5) ** 2 + (y - 0.5) ** 2) / 0.05)))
    )
    flow = np.stack([np.gradient(stream, 1 / points, axis=1), -np.gradient(stream, 1 / points, axis=0)], -1)
    dye = smooth(rng, 24, points, 2) * ~solid
    states, inner = [dye], 20
    for _ in range(steps - 1):
        for _ in range(inner):
            change = 2e-3 * laplacian(dye, (1, 2), 1 / points, "edge")
            for axis in (1, 2):  # upwind
                back = (dye - np.roll(dye, 1, axis)) * points
                ahead = (np.roll(dye, -1, axis) - dye) * points
                change -= np.where(flow[..., axis - 1] > 0, back, ahead) * flow[..., axis - 1]
            dye = (dye + span / inner * change) * ~solid
        states.append(dye)
    path = folder / "well_obstacle_2d_made.hdf5"
    fields = {"t0_fields/dye": np.stack(states, 1)}
    with well(path, fields, span, {"x": "PERIODIC", "y": "WALL"}) as file:
        put(file, "t0_fields/solid", solid, sample=False, time=False)
        put(file, "t1_fields/flow", flow, sample=False, time=False)
        file["scalars/diffusivity"] = np.float32(2e-3)
        file["scalars/diffusivity"].attrs.update({"sample_varying": False, "time_varying": False})
    return path


def well_3d(folder: Path) -> Path:
    """Write heat in a periodic cube, with the flow of heat as a vector field."""
    rng, points, steps, span = np.random.default_rng(14), 16, 21, 0.02
    heat = smooth(rng, 16, points, 3)
    states, inner = [heat], 4
    for _ in range(steps - 1):
        for _ in range(inner):
            heat = heat + span / inner * 0.02 * laplacian(heat, (1, 2, 3), 1 / points)
        states.append(heat)
    heat = np.stack(states, 1)
    flow = np.stack([np.roll(heat, 1, a) - np.roll(heat, -1, a) for a in (2, 3, 4)], -1) * points / 2 * 0.02
    path = folder / "well_heat_3d_made.hdf5"
    walls = dict.fromkeys("xyz", "PERIODIC")
    well(path, {"t0_fields/heat": heat, "t1_fields/flow": flow}, span, walls).close()
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "cfd1d": lambda folder: cfd(folder, 1, 48, 41, 64, 0.01),
    "cfd2d": lambda folder: cfd(folder, 2, 24, 21, 32, 0.01),
    "cfd3d": lambda folder: cfd(folder, 3, 12, 11, 16, 0.02),
    "reaction": diffusion_reaction,
    "water": shallow_water,
    "darcy": darcy,
    "well2d": well_2d,
    "well3d": well_3d,
}


def main(folder: Path, names: Sequence[str]) -> None:
    """Write the files of some names, or of all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MAKERS:
        path = MAKERS[name](folder)
        print(f"{name}: {path} ({path.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    if len(sys.argv) < 2 or set(sys.argv[2:]) - MAKERS.keys():
        sys.exit(f"usage: python {sys.argv[0]} FOLDER [{'] ['.join(MAKERS)}]")
    main(Path(sys.argv[1]), sys.argv[2:])
