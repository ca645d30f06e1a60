"""Encode fields on a regular grid into a few tokens per time step, by one matrix product.

    (n, T, H, W, C) --cut into cells--> (n T L, values of a cell) --project--> (n, T, L, D)

The grid is cut into patches, and neighbouring patches are pooled into `tokens` cells. A cell is projected
on an orthonormal basis: its lowest spatial frequencies first, all of them if `dim` allows, turned by a seeded
rotation so that every latent dimension carries a like share. So a `dim` of at least the values of a cell
loses nothing and keeps distances, and a smaller one is a low pass; a mean over patches would lose all detail
below a cell whatever `dim` is. Where a token lies is added as Fourier features of its patch centres. The map
is linear: it costs one matrix product, and a decoder needs only the transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.decode import GridDecoder
from stoker.encoders.groups import fixed_group
from stoker.encoders.protocol import Group
from stoker.encoders.weights import digest_weights, load_weights
from stoker.errors import EncoderError, arg
from stoker.schema import Json, Schema
from stoker.units import MIB

VERSION = 1
"""Bumped by hand whenever equal settings and weights would give other latents."""
POSITION_GAIN = 0.1
"""Root mean square of the position features: seen by a network, small compared with data of order one."""
CHUNK_BYTES = 4 * MIB
"""Cells and latents handled at a time, so that both stay in the processor's cache.

Source: measured on 2 cores with (6, 201, 1, 1024, 1) and (4, 41, 64, 64, 3): 2 to 8 MiB alike, 0.5 MiB takes
up to 1.7 times as long.
"""


@dataclass(kw_only=True, slots=True, eq=False)
class GridEncoder:
    """Frozen encoder of regular grids; satisfies `Encoder`. 1D data has `H = 1` and patch `(1, p)`.

    Raises:
        EncoderError: A setting is out of range, the patch does not divide the grid, there are more tokens
            than patches, or the checkpoint holds other weights.
    """

    channels: int
    """Channels of the field, the last axis."""
    grid: tuple[int, int]
    """Points along height and width."""
    patch: tuple[int, int]
    """Points of a patch along height and width; must divide `grid`."""
    tokens: int
    """Tokens a time step; at most as many as patches. Fewer: neighbouring patches are pooled into cells of
    equal size, which overlap where the numbers do not divide."""
    dim: int
    """Latent numbers a token."""
    fourier: tuple[int, ...] = (1, 2)
    """Waves across the domain of the position features; empty for none."""
    seed: int = 0
    """Decides the weights, by a generator of its own: no global random state is read or changed."""
    checkpoint: str | Path | None = None
    """Safetensors file with `project` and `position` to use in place of seeded weights."""
    field: str = "data"
    """Field of the sample to encode, `(T, H, W, C)` or `(H, W, C)`; all others pass through."""
    _cells: Cells = dataclasses.field(init=False, repr=False)
    _weights: dict[str, Tensor] = dataclasses.field(init=False, repr=False)
    _scratch: Tensor | None = dataclasses.field(init=False, repr=False, default=None)
    _decoder: GridDecoder | None = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Check the settings, then make or load the weights."""
        self.grid, self.patch = _pair("grid", self.grid), _pair("patch", self.patch)
        self.fourier = tuple(self.fourier)
        for name in ("channels", "tokens", "dim"):
            if getattr(self, name) < 1:
                raise EncoderError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise EncoderError(f"seed must be 0 or more, got {self.seed}")
        self._cells = plan_cells(self.grid, self.patch, self.tokens)
        values = self._cells.points * self.channels
        shapes = {"project": (values, self.dim), "position": (self.tokens, self.dim)}
        if self.checkpoint is not None:
            self._weights = load_weights(self.checkpoint, shapes)
        else:
            self._weights = seeded_weights(self._cells, self.channels, self.dim, self.fourier, self.seed)

    @property
    def independent_steps(self) -> bool:
        """Each time step is encoded alone."""
        return True

    def schema(self, sample_schema: Schema) -> Schema:
        """`latent` `(T, L, D)` float32 in place of the field; other fields as they are.

        Raises:
            EncoderError: The field is missing or has another grid or other channels.
        """
        found = sample_schema.get(self.field)
        if found is None:
            raise EncoderError(
                f"samples have no field {self.field!r}, only {sorted(sample_schema)}. "
                f"Set GridEncoder(field=...)"
            )
        wanted = (*self.grid, self.channels)
        if found.shape[-3:] != wanted or len(found.shape) not in (3, 4) or (found.ragged and not found.time):
            raise EncoderError(
                f"field {self.field!r} has shape {found.shape}, this encoder takes {wanted}, "
                f"with or without a time axis before. Set grid=(H, W) and channels to those of the data"
            )
        if "latent" in sample_schema:
            raise EncoderError(
                "samples have a field 'latent' already, which is what this encoder would write"
            )
        latent = replace(found, shape=(*found.shape[:-3], self.tokens, self.dim), dtype="float32")
        return {"latent": latent, **{name: f for name, f in sample_schema.items() if name != self.field}}

    def group(self, sample_schema: Schema) -> Group:
        """About 8 MiB of samples and latents a call; large samples are cut over time."""
        return fixed_group(sample_schema, self.schema(sample_schema), cut_time=sample_schema[self.field].time)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode `(n, T, H, W, C)` of any real dtype to `latent` `(n, T, L, D)` float32, fresh memory."""
        data = batch[self.field]
        project, position = self._weights["project"], self._weights["position"]
        shape = (*data.shape[:-3], self.tokens, self.dim)
        latent = torch.empty(shape, dtype=torch.float32, device=data.device)
        with torch.inference_mode(), torch.autocast(data.device.type, enabled=False):
            rows, out = data.reshape(-1, *data.shape[-3:]), latent.view(-1, self.dim)
            count = max(1, CHUNK_BYTES // (4 * self.tokens * sum(project.shape)))
            for first in range(0, len(rows), count):
                cells = self._cut(rows[first : first + count])
                tokens = out[first * self.tokens :][: len(cells)]
                torch.mm(cells, project, out=tokens)
                tokens.view(-1, self.tokens, self.dim).add_(position)
        return {"latent": latent, **{name: value for name, value in batch.items() if name != self.field}}

    def decode(self, latents: Tensor) -> Tensor:
        """Latents `(..., L, D)` as fields `(..., H, W, C)` float32, by the least-squares inverse.

        Exact but for rounding where `dim` is at least the values of a cell; with fewer, the finest waves
        within each cell are lost. See `decode.py`.
        """
        if self._decoder is None:
            self._decoder = GridDecoder(self._cells, self.channels, self._weights)
        return self._decoder(latents)

    def to(self, device: torch.device) -> None:
        """Move weights to `device`."""
        self._weights = {name: tensor.to(device) for name, tensor in self._weights.items()}
        self._scratch = None

    def weights(self) -> Mapping[str, Tensor]:
        """`project` `(values of a cell, D)` and `position` `(L, D)`, float32."""
        return self._weights

    def identity(self) -> dict[str, Json]:
        """Settings and weights; not the seed or the checkpoint's path, whose effect the weights are."""
        config: dict[str, Json] = {
            "channels": self.channels,
            "grid": list(self.grid),
            "patch": list(self.patch),
            "tokens": self.tokens,
            "dim": self.dim,
            "fourier": list(self.fourier),
            "field": self.field,
        }
        digest = digest_weights(self._weights)
        return {"class": "stoker.GridEncoder", "config": config, "weights": digest, "version": VERSION}

    def _cut(self, rows: Tensor) -> Tensor:
        """Rows `(r, H, W, C)` as cells `(r L, values)` float32; valid until the next call."""
        cells = self._cells
        for axis, index in ((1, cells.rows), (2, cells.cols)):
            if index is not None:
                rows = rows.index_select(axis, torch.as_tensor(index, device=rows.device))
        (down, across), (height, width) = cells.layout, cells.size
        split = rows.view(len(rows), down, height, across, width, self.channels).permute(0, 1, 3, 2, 4, 5)
        shape = (split.shape[0] * self.tokens, cells.points * self.channels)
        if split.is_contiguous():
            return split.view(shape).to(torch.float32)
        # One buffer for the whole run: a fresh one each time costs as much in page faults as the copy.
        if self._scratch is None or self._scratch.numel() < split.numel():
            self._scratch = torch.empty(split.numel(), dtype=torch.float32, device=rows.device)
        flat = self._scratch[: split.numel()]
        flat.view(split.shape).copy_(split)
        return flat.view(shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """How a grid is cut into one cell per token."""

    layout: tuple[int, int]
    """Cells down and across; their product is the number of tokens."""
    size: tuple[int, int]
    """Points of a cell, height and width."""
    rows: NDArray[np.int64] | None
    """Grid rows of the cells one after another where cells overlap, else None: the grid as it is."""
    cols: NDArray[np.int64] | None
    """The same for grid columns."""
    centres: tuple[NDArray[np.float64], NDArray[np.float64]]
    """Patch centres of each cell in [0, 1]: `(down, patches)` and `(across, patches)`."""

    @property
    def points(self) -> int:
        """Grid points of a cell."""
        return self.size[0] * self.size[1]


def plan_cells(grid: tuple[int, int], patch: tuple[int, int], tokens: int) -> Cells:
    """Pool the patches of a grid into `tokens` equal cells, as square as can be.

    Raises:
        EncoderError: The patch does not divide the grid, there are more tokens than patches, or so many
            tokens cannot be laid out in rows and columns.
    """
    if any(points % size for points, size in zip(grid, patch, strict=True)):
        cure = tuple(
            max(n for n in range(1, size + 1) if points % n == 0)
            for points, size in zip(grid, patch, strict=True)
        )
        raise EncoderError(
            f"patch {patch} does not divide grid {grid} (H, W). Use {arg('patch', cure)}"
            + (", as 1D data has H = 1" if grid[0] == 1 else "")
        )
    high, wide = grid[0] // patch[0], grid[1] // patch[1]
    if tokens > high * wide:
        raise EncoderError(
            f"{tokens} tokens from {high} x {wide} = {high * wide} patches would be copies of each other. "
            f"Use {arg('tokens', high * wide)} or fewer, or a smaller patch than {patch}"
        )
    layouts = _layouts(tokens, high, wide)
    if not layouts:
        near = min(
            (n for n in range(1, high * wide + 1) if _layouts(n, high, wide)), key=lambda n: abs(n - tokens)
        )
        raise EncoderError(
            f"{tokens} tokens cannot be laid out as rows times columns on {high} x {wide} patches. "
            f"The nearest number that can is {arg('tokens', near)}"
        )
    down, across = min(
        layouts,
        key=lambda n: abs(math.log((-(-high // n[0]) * patch[0]) / (-(-wide // n[1]) * patch[1]))),
    )
    rows, centres_down = _spread(high, down)
    cols, centres_across = _spread(wide, across)
    return Cells(
        layout=(down, across),
        size=(rows.shape[1] * patch[0], cols.shape[1] * patch[1]),
        rows=None if rows.size == high else _points(rows, patch[0]),
        cols=None if cols.size == wide else _points(cols, patch[1]),
        centres=(centres_down, centres_across),
    )


def seeded_weights(
    cells: Cells, channels: int, dim: int, fourier: tuple[int, ...], seed: int
) -> dict[str, Tensor]:
    """`project` `(values, dim)` with orthonormal rows (or columns, if `dim` is smaller), and `position`."""
    bits = np.random.PCG64(seed)  # raw bits: the one stream that numpy promises never to change
    basis = low_frequencies(cells.size, channels, dim)
    turn, triangle = np.linalg.qr(_uniform(bits, dim, basis.shape[1]))
    turn *= np.sign(np.diagonal(triangle))  # which signs a QR returns is left to the library
    waves = np.asarray(fourier, dtype=np.float64)[:, None, None] * 2 * np.pi
    parts = [
        np.broadcast_to(wave(waves * at).mean(-1)[shape], (len(fourier), *cells.layout))
        for at, shape in ((cells.centres[0], np.s_[:, :, None]), (cells.centres[1], np.s_[:, None, :]))
        for wave in (np.sin, np.cos)
    ]
    features = np.concatenate(parts).reshape(4 * len(fourier), math.prod(cells.layout)).T
    mix = _uniform(bits, features.shape[1], dim) * math.sqrt(3)
    position = POSITION_GAIN * (features @ mix) / math.sqrt(max(1, 2 * len(fourier)))
    return {"project": _rounded(basis @ turn.T), "position": _rounded(position)}


def low_frequencies(size: tuple[int, int], channels: int, most: int) -> NDArray[np.float64]:
    """Orthonormal cosines on a cell, lowest first, `(height width channels, min(most, all))`.

    >>> basis = low_frequencies((2, 3), 1, most=4)
    >>> basis.shape, bool(np.allclose(basis.T @ basis, np.eye(4)))
    ((6, 4), True)
    """
    high, wide = size
    order = sorted(
        ((down * wide) ** 2 + (across * high) ** 2, down, across)
        for down in range(high)
        for across in range(wide)
    )
    count = min(most, high * wide * channels)
    basis = np.zeros((high, wide, channels, count))
    for column in range(count):
        (_, down, across), channel = order[column // channels], column % channels
        basis[:, :, channel, column] = np.outer(_cosine(high, down), _cosine(wide, across))
    return basis.reshape(-1, count)


def _cosine(points: int, waves: int) -> NDArray[np.float64]:
    wave = np.cos(np.pi * waves * (np.arange(points) + 0.5) / points)
    return wave * math.sqrt((1 if waves == 0 else 2) / points)


def _uniform(bits: np.random.PCG64, rows: int, cols: int) -> NDArray[np.float64]:
    """Uniform numbers in [-1, 1), `(rows, cols)`."""
    raw = np.asarray(bits.random_raw(rows * cols), dtype=np.uint64)
    return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1).reshape(rows, cols)


def _rounded(values: NDArray[np.float64]) -> Tensor:
    """To float32 in steps of 2^-20: far above what another processor's last bits change.

    Otherwise one seed would have one fingerprint on this machine and another on the next.
    """
    return torch.as_tensor(np.round(values * 2.0**20) * 2.0**-20, dtype=torch.float32, device="cpu")


def _pair(name: str, value: tuple[int, int]) -> tuple[int, int]:
    if len(value) != 2 or min(value) < 1:
        raise EncoderError(f"{name} must be (H, W), both at least 1, got {value}")
    return (int(value[0]), int(value[1]))


def _layouts(tokens: int, high: int, wide: int) -> list[tuple[int, int]]:
    return [
        (down, tokens // down) for down in range(1, high + 1) if tokens % down == 0 and tokens // down <= wide
    ]


def _spread(patches: int, cells: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Patches of each cell, `(cells, patches a cell)`, evenly spread and covering all; and their centres."""
    size = -(-patches // cells)
    starts = np.arange(cells) * (patches - size) // max(1, cells - 1)
    index = starts[:, None] + np.arange(size)
    return index.astype(np.int64), (index + 0.5) / patches


def _points(patches: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return (patches.reshape(-1, 1) * size + np.arange(size)).ravel()
