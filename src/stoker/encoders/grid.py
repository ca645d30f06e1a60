"""Encode fields on a regular grid into a few tokens per time step, by one matrix product.

    (n, T, H, W, C) --cut into cells--> (n T L, values of a cell) --project--> (n, T, L, D)

A grid has two or three axes, (H, W) or (D, H, W); one-dimensional data has H = 1. It is cut into patches, and
neighboring patches are pooled into `tokens` cells. A cell is projected on an orthonormal basis: its lowest
spatial frequencies first, all of them if `dim` allows. A seeded rotation gives every latent dimension a like
share. So a `dim` of at least the values of a cell loses nothing and keeps distances, and a smaller one is a
low pass. A mean over patches would lose all detail below a cell, for any `dim`. The place of a token is
added as Fourier features of its patch centers. The map is linear: it costs one matrix product, and a decoder
needs only the transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, product
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.arguments import NAME, PATH, SIZES, check, or_none, whole
from stoker.encoders.protocol import EncodeBatchSize, SampleShapes, fixed_batch_size, schema_of
from stoker.encoders.weights import digest_weights, load_weights, orthonormal, rounded, uniform
from stoker.encoders.wrappers import KEEPING, NORMALIZED, STEADY, weights_of
from stoker.errors import EncoderError, arg
from stoker.schema import Json, Schema
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# The frozen encoder of a recipe as a function that gradients pass, for losses on encoded fields.
#
# `Encoder.encode` works in inference mode and in scratch memory, so that filling a cache is fast. These are
# the same maps in plain torch, made of the identity and the weights that a cache keeps: no raw data is
# needed.


Encode: TypeAlias = "Callable[[Tensor], Tensor]"
"""From fields `(B, H, W, C)` to states `(B, L, D)`, float32, on the same device."""


def encode_of(identity: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> Encode | None:
    """Return the encoder from its identity and weights in a recipe; None: it has no form that gradients pass.

    Raises:
        KeyError: The weights are not those of this encoder.
    """
    if identity is None:
        return None
    kind, config = identity["class"], identity["config"]
    if kind == KEEPING:
        return encode_of(config["inner"], weights)
    if kind == NORMALIZED:
        inner = encode_of(config["inner"], weights)
        return (
            None if inner is None else _scaled(inner, weights["normalize.shift"], weights["normalize.scale"])
        )
    if kind != "stoker.GridEncoder":
        return None
    return _grid(config, weights)


def _grid(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Encode:

    cells = plan_cells(tuple(config["grid"]), tuple(config["patch"]), config["tokens"])
    project, position = weights["project"].float(), weights["position"].float()
    parts = [size for pair in zip(cells.layout, cells.size, strict=True) for size in pair]
    axes = range(1, 1 + len(parts), 2)

    def encode(fields: Tensor) -> Tensor:
        with torch.autocast(fields.device.type, enabled=False):
            for axis, index in enumerate(cells.points_of, 1):
                if index is not None:
                    fields = fields.index_select(axis, torch.as_tensor(index, device=fields.device))
            split = fields.float().reshape(len(fields), *parts, fields.shape[-1])
            order = (0, *axes, *(axis + 1 for axis in axes), 1 + len(parts))
            values = split.permute(order).reshape(len(fields), math.prod(cells.layout), -1)
            return values @ project.to(fields.device) + position.to(fields.device)

    return encode


def _scaled(inner: Encode, shift: Tensor, scale: Tensor) -> Encode:
    def encode(fields: Tensor) -> Tensor:
        return inner((fields - shift.to(fields.device)) / scale.to(fields.device))

    return encode


# ----------------------------------------------------------------------------------------------------------
# Back from latents to fields, by the least-squares inverse of the frozen grid encoder.
#
# The encoder is linear on each cell: `latent = cell @ project + position`. So the best a decoder can do,
# without knowing anything of the data, is the pseudo-inverse of `project`. With at least as many latent
# numbers as a cell has values nothing is lost but rounding. With fewer, what `project` does not see is
# lost: for the seeded weights the waves of a cell beyond its lowest, so the field comes back smoothed
# within each cell. It is exact arithmetic on the recorded weights: nothing is learned, and nothing depends
# on data.


Decode: TypeAlias = "Callable[[Tensor], Tensor]"
"""From latents `(..., L, D)` to fields, float32, on the same device."""


@runtime_checkable
class DecodeByRecord(Protocol):
    """Decodes states of encoders whose fields are at points that every record has of its own."""

    def of(self, number: int, latents: Tensor, /) -> Tensor:
        """Return fields `(..., N, C)` float32 of latents `(..., L, D)` of sample `number`, same device."""
        ...


DECODE_CHUNK_BYTES = 16 * MIB
"""Fields decoded at a time."""


class GridDecoder:
    """Latents of a `GridEncoder` back to fields on its grid."""

    def __init__(self, cells: GridCells, channels: int, weights: Mapping[str, Tensor]) -> None:
        self._cells, self._channels = cells, channels
        project = weights["project"].detach().cpu().double()
        self._position = weights["position"].detach().cpu().float()
        self._inverse: Tensor = torch.linalg.pinv(project).float()

    def __call__(self, latents: Tensor) -> Tensor:
        """Return fields `(..., *grid, C)` float32 of latents `(..., L, D)`; shared points are averaged."""
        tokens, dim = latents.shape[-2:]
        if self._inverse.device != latents.device:
            self._inverse = self._inverse.to(latents.device)
            self._position = self._position.to(latents.device)
        steps = latents.reshape(-1, tokens, dim)
        size = 4 * tokens * self._inverse.shape[1]
        count = max(1, DECODE_CHUNK_BYTES // max(1, size))
        with torch.autocast(latents.device.type, enabled=False):
            pieces = [self._fields(steps[at : at + count]) for at in range(0, max(1, len(steps)), count)]
        fields = torch.cat(pieces)
        return fields.view(*latents.shape[:-2], *fields.shape[1:])

    def _fields(self, latents: Tensor) -> Tensor:
        cells, channels = self._cells, self._channels
        axes = range(len(cells.layout))
        values = (latents.float() - self._position) @ self._inverse
        split = values.view(len(latents), *cells.layout, *cells.size, channels).permute(
            0, *(1 + axis + half for axis in axes for half in (0, len(axes))), 2 * len(axes) + 1
        )
        sizes = (count * size for count, size in zip(cells.layout, cells.size, strict=True))
        fields = split.reshape(len(latents), *sizes, channels)
        for axis, index in enumerate(cells.points_of, 1):
            if index is not None:
                fields = _averaged(fields, axis, index)
        return fields


def _averaged(fields: Tensor, axis: int, index: NDArray[np.int64]) -> Tensor:
    """Points of cells put back on their place of the grid, those of several cells averaged."""
    places = torch.as_tensor(index, device=fields.device)
    counts = torch.bincount(places).to(fields.dtype)
    shape = [*fields.shape]
    shape[axis] = len(counts)
    summed = fields.new_zeros(shape).index_add_(axis, places, fields)
    return summed / counts.view([-1 if i == axis else 1 for i in range(fields.ndim)])


def decoder_of(
    identity: Mapping[str, Any] | None, weights: Mapping[str, Tensor], own: Decode | None = None
) -> Decode | None:
    """Return the decoder of an encoder, from its identity and weights in a recipe; None: it has no decoder.

    Args:
        identity, weights: As recorded with a cache.
        own: What decodes in place of the encoder at the center, where that is not a `GridEncoder`.

    Raises:
        KeyError: The weights are not those of this encoder.
    """

    if identity is None:
        return None
    kind, config = identity["class"], identity["config"]
    if kind == KEEPING:
        return decoder_of(config["inner"], weights, own)
    if kind == NORMALIZED:
        inner = decoder_of(config["inner"], weights, own)
        if inner is None and config["inner"] is not None:
            return None
        return _rescaled(inner, weights["normalize.shift"], weights["normalize.scale"])
    if kind == STEADY:
        return decoder_of(config["solution"], weights_of("solution", weights))
    if kind != "stoker.GridEncoder":
        return own
    cells = plan_cells(tuple(config["grid"]), tuple(config["patch"]), config["tokens"])
    return GridDecoder(cells, config["channels"], weights)


def _rescaled(inner: Decode | None, shift: Tensor, scale: Tensor) -> Decode:
    def decode(latents: Tensor) -> Tensor:
        fields = latents.float() if inner is None else inner(latents)
        return fields * scale.to(fields.device) + shift.to(fields.device)

    return decode


Sizes: TypeAlias = "tuple[int, ...]"
"""One number for each axis of a grid: `(H, W)` or `(D, H, W)`."""
_AXES = {2: "H, W", 3: "D, H, W"}
VERSION = 1
"""Bumped by hand whenever equal settings and weights would give other latents."""
POSITION_GAIN = 0.1
"""Root mean square of the position features: seen by a network, small compared with data of order one."""
CHUNK_BYTES = 4 * MIB
"""Cells and latents handled at a time, so that both stay in the processor's cache.

Source: measured on 2 cores with (6, 201, 1, 1024, 1) and (4, 41, 64, 64, 3).
Sizes from 2 to 8 MiB take the same time; 0.5 MiB takes up to 1.7 times as long.
"""


@dataclass(kw_only=True, slots=True, eq=False)
class GridEncoder:
    """Frozen encoder of regular grids; satisfies `Encoder`. 1D data has `H = 1` and patch `(1, p)`.

    The record holds `latent` `(T, L, D)` float32, and every other field of the sample. The map is linear: the
    lowest waves of each cell of the grid, rotated. Nothing is learned.

    Raises:
        EncoderError: A setting is out of range, the patch does not divide the grid, there are more tokens
            than patches, or the checkpoint holds other weights.

    Examples:
        >>> import stoker, torch
        >>> data = [{"data": torch.rand(9, 16, 32, 2)} for _ in range(4)]  # (T, H, W, C)
        >>> source = stoker.TorchSource(data, time=["data"])
        >>> encoder = stoker.GridEncoder(channels=2, grid=(16, 32), patch=(8, 8), tokens=8, dim=128)
        >>> latent = stoker.precompute(source, encoder, "caches", name="fields")[0]["latent"]
        >>> latent.shape, torch.allclose(encoder.decode(latent), data[0]["data"], atol=1e-5)
        (torch.Size([9, 8, 128]), True)
    """

    channels: int
    """Channels of the field, the last axis."""
    grid: Sizes
    """Points along `(H, W)` or `(D, H, W)`."""
    patch: Sizes
    """Points of a patch along the same axes; must divide `grid`."""
    tokens: int
    """Tokens in a time step, L; at most as many as patches. Fewer: neighboring patches are pooled into cells
    of equal size, which overlap where the numbers do not divide."""
    dim: int
    """Numbers in a token, D. With as many as the values of a cell, nothing but rounding is lost."""
    fourier: tuple[int, ...] = (1, 2)
    """Waves across the domain of the position features; empty for none."""
    seed: int = 0
    """Decides the weights, by a generator of its own: no global random state is read or changed."""
    checkpoint: str | Path | None = None
    """Safetensors file with `project` and `position` to use in place of seeded weights."""
    field: str = "data"
    """Field of the sample to encode, `(T, *grid, C)` or `(*grid, C)`; all others pass through."""
    _cells: GridCells = dataclasses.field(init=False, repr=False)
    _weights: dict[str, Tensor] = dataclasses.field(init=False, repr=False)
    _scratch: Tensor | None = dataclasses.field(init=False, repr=False, default=None)
    _decoder: GridDecoder | None = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Check the settings, then make or load the weights."""
        check({name: (getattr(self, name), SIZES) for name in ("grid", "patch", "fourier")}, EncoderError)
        counts = ("channels", "tokens", "dim")
        check({name: (getattr(self, name), whole(least=1)) for name in counts}, EncoderError)
        check({"seed": (self.seed, whole(least=0)), "field": (self.field, NAME)}, EncoderError)
        check({"checkpoint": (self.checkpoint, or_none(PATH))}, EncoderError)
        self.grid, self.patch = _sizes("grid", self.grid), _sizes("patch", self.patch)
        self.fourier = tuple(self.fourier)
        self._cells = plan_cells(self.grid, self.patch, self.tokens)
        values = self._cells.points * self.channels
        shapes = {"project": (values, self.dim), "position": (self.tokens, self.dim)}
        if self.checkpoint is not None:
            self._weights = load_weights(self.checkpoint, shapes)
        else:
            self._weights = seeded_weights(self._cells, self.channels, self.dim, self.fourier, self.seed)

    @classmethod
    def for_source(
        cls,
        source: SampleShapes,
        *,
        tokens: int = 16,
        dim: int = 32,
        field: str = "data",
        patch: int | Sizes | None = None,
        **settings: Any,
    ) -> GridEncoder:
        """Return an encoder for a field of a source, whose grid and channels the source knows.

        Args:
            source: What will be encoded.
            tokens: Tokens in a time step.
            dim: Numbers in a token.
            field: Field of the samples to encode.
            patch: Points of a patch along each axis, or along all; None: the largest of 8, 4, 2 and 1 that
                divides each axis and gives at least `tokens` patches.
            **settings: Others of `GridEncoder`: `fourier`, `seed`, `checkpoint`.

        Raises:
            EncoderError: The source has no such field, or it is not on a grid.

        Examples:
            >>> import stoker, torch
            >>> steps = torch.zeros(20, 9, 16, 32, 2)  # 20 samples of 9 steps, 16 x 32 points, 2 channels
            >>> source = stoker.TorchSource([{"data": one} for one in steps], time=["data"])
            >>> stoker.GridEncoder.for_source(source, tokens=8).patch
            (8, 8)
        """
        schema = schema_of(source)
        spec = schema.get(field)
        axes = 0 if spec is None else len(spec.shape) - spec.time
        if spec is None or axes not in (3, 4):
            shown = ", ".join(f"{name} {one.shape}" for name, one in schema.items())
            raise EncoderError(
                f"{arg('field', field)} is not a field on a grid, (T, H, W, C) or (T, D, H, W, C). Samples "
                f"have {shown}",
                hint=f"Name one with {arg('field', ..., call='GridEncoder.for_source')}",
            )
        *grid, channels = spec.shape[spec.time :]
        if patch is None:
            sizes = _largest_patch(tuple(grid), tokens)
        else:
            sizes = tuple(patch) if isinstance(patch, Sequence) else tuple(min(int(patch), n) for n in grid)
        return cls(
            channels=channels, grid=tuple(grid), patch=sizes, tokens=tokens, dim=dim, field=field, **settings
        )

    @property
    def independent_steps(self) -> bool:
        """True: each time step is encoded alone."""
        return True

    def schema(self, sample_schema: Schema) -> Schema:
        """Return `latent` `(T, L, D)` float32 in place of the field; other fields as they are.

        Raises:
            EncoderError: The field is missing or has another grid or other channels.
        """
        found = sample_schema.get(self.field)
        if found is None:
            raise EncoderError(
                f"samples have no field {self.field!r}, only {sorted(sample_schema)}",
                hint="Set GridEncoder(field=...)",
            )
        wanted = (*self.grid, self.channels)
        axes = len(wanted)
        if (
            found.shape[-axes:] != wanted
            or len(found.shape) not in (axes, axes + 1)
            or (found.ragged and not found.time)
        ):
            raise EncoderError(
                f"field {self.field!r} has shape {found.shape}, this encoder takes {wanted}, with or "
                "without a time axis before",
                hint="Set grid=(H, W) or (D, H, W), and channels, to those of the data",
            )
        if "latent" in sample_schema:
            raise EncoderError(
                "samples have a field 'latent' already, which is what this encoder would write"
            )
        latent = replace(found, shape=(*found.shape[:-axes], self.tokens, self.dim), dtype="float32")
        return {"latent": latent, **{name: f for name, f in sample_schema.items() if name != self.field}}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return about 8 MiB of samples and latents a call; large samples are cut over time."""
        return fixed_batch_size(
            sample_schema, self.schema(sample_schema), cut_time=sample_schema[self.field].time
        )

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode `(n, T, *grid, C)` of any real dtype to `latent` `(n, T, L, D)` float32, fresh memory.

        Raises:
            EncoderError: The field has another grid or other channels.
        """
        data = batch[self.field]
        project, position = self._weights["project"], self._weights["position"]
        axes = len(self.grid) + 1
        if data.ndim < axes or data.shape[-1] != self.channels or data.shape[-axes:-1] != self.grid:
            raise EncoderError(
                f"field {self.field!r} of the batch has shape {tuple(data.shape)}, this encoder takes "
                f"{self.channels} channels on the grid {self.grid}: (..., "
                f"{', '.join(map(str, (*self.grid, self.channels)))})"
            )
        shape = (*data.shape[:-axes], self.tokens, self.dim)
        latent = torch.empty(shape, dtype=torch.float32, device=data.device)
        with torch.inference_mode(), torch.autocast(data.device.type, enabled=False):
            rows, out = data.reshape(-1, *data.shape[-axes:]), latent.view(-1, self.dim)
            count = max(1, CHUNK_BYTES // (4 * self.tokens * sum(project.shape)))
            for first in range(0, len(rows), count):
                cells = self._cut(rows[first : first + count])
                tokens = out[first * self.tokens :][: len(cells)]
                torch.mm(cells, project, out=tokens)
                tokens.view(-1, self.tokens, self.dim).add_(position)
        return {"latent": latent, **{name: value for name, value in batch.items() if name != self.field}}

    def decode(self, latents: Tensor) -> Tensor:
        """Return fields `(..., *grid, C)` float32 of latents `(..., L, D)`, by the least-squares inverse.

        Exact but for rounding where `dim` is at least the values of a cell; with fewer, the finest waves
        within each cell are lost.

        Args:
            latents: As stored, `(..., L, D)`.
        """
        if self._decoder is None:
            self._decoder = GridDecoder(self._cells, self.channels, self._weights)
        return self._decoder(latents)

    def to(self, device: torch.device) -> None:
        """Move weights to `device`."""
        self._weights = {name: tensor.to(device) for name, tensor in self._weights.items()}
        self._scratch = None

    def weights(self) -> Mapping[str, Tensor]:
        """Return `project` `(values of a cell, D)` and `position` `(L, D)`, float32."""
        return self._weights

    def identity(self) -> dict[str, Json]:
        """Return settings and weights, without the seed or the checkpoint's path: weights show these."""
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
        """Return rows `(r, *grid, C)` as cells `(r L, values)` float32; valid until the next call."""
        cells = self._cells
        for axis, index in enumerate(cells.points_of, 1):
            if index is not None:
                rows = rows.index_select(axis, torch.as_tensor(index, device=rows.device))
        axes = len(cells.layout)
        pairs = (size for pair in zip(cells.layout, cells.size, strict=True) for size in pair)
        first = range(1, 2 * axes, 2)
        split = rows.view(len(rows), *pairs, self.channels).permute(
            0, *first, *(axis + 1 for axis in first), 2 * axes + 1
        )
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
class GridCells:
    """The cells of a grid, one per token; a tuple has an entry for each axis of the grid."""

    layout: Sizes
    """Cells along each axis; their product is the number of tokens."""
    size: Sizes
    """Points of a cell along each axis."""
    points_of: tuple[NDArray[np.int64] | None, ...]
    """Grid points of the cells one after another where cells overlap, else None: the grid as it is."""
    centers: tuple[NDArray[np.float64], ...]
    """Patch centers of each cell in [0, 1], `(cells, patches of a cell)`."""

    @property
    def points(self) -> int:
        """Grid points of a cell."""
        return math.prod(self.size)


def _largest_patch(grid: Sizes, tokens: int) -> Sizes:
    """Return the largest patch of 8, 4, 2 or 1 points along each axis that gives enough patches.

    >>> _largest_patch((1, 256), 16), _largest_patch((64, 64), 1024)
    ((1, 8), (2, 2))
    """
    for most in (8, 4, 2):
        patch = tuple(next(n for n in (most, 4, 2, 1) if n <= most and points % n == 0) for points in grid)
        if math.prod(points // size for points, size in zip(grid, patch, strict=True)) >= tokens:
            return patch
    return tuple(1 for _ in grid)


def plan_cells(grid: Sizes, patch: Sizes, tokens: int) -> GridCells:
    """Pool the patches of a grid into `tokens` equal cells, as square as can be.

    Raises:
        EncoderError: The patch does not divide the grid, there are more tokens than patches, or so many
            tokens cannot be laid out along the axes.
    """
    if len(patch) != len(grid):
        raise EncoderError(
            f"patch {patch} has {len(patch)} numbers, grid {grid} has {len(grid)}",
            hint="Use "
            f"{arg('patch', tuple(max(n for n in (4, 2, 1) if points % n == 0) for points in grid))}",
        )
    if any(points % size for points, size in zip(grid, patch, strict=True)):
        cure = tuple(
            max(n for n in range(1, size + 1) if points % n == 0)
            for points, size in zip(grid, patch, strict=True)
        )
        raise EncoderError(
            f"{arg('patch', patch)} does not divide grid {grid} ({_AXES[len(grid)]})",
            hint=f"Use {arg('patch', cure)}" + (", as 1D data has H = 1" if grid[0] == 1 else ""),
        )
    patches = tuple(points // size for points, size in zip(grid, patch, strict=True))
    most, shown = math.prod(patches), " x ".join(map(str, patches))
    if tokens > most:
        raise EncoderError(
            f"{tokens} tokens from {shown} = {most} patches would be copies of each other",
            hint=f"Use {arg('tokens', most)} or fewer, or a smaller patch than {patch}",
        )
    layouts = _layouts(tokens, patches)
    if not layouts:
        nearby = (near for step in range(1, most) for near in (tokens - step, tokens + step))
        near = next(near for near in nearby if 0 < near <= most and _layouts(near, patches))
        raise EncoderError(
            f"{tokens} tokens cannot be laid out on {shown} patches",
            hint=f"The nearest number that can is {arg('tokens', near)}",
        )

    def uneven(layout: Sizes) -> float:
        sizes = [-(-n // count) * size for n, count, size in zip(patches, layout, patch, strict=True)]
        return sum(abs(math.log(one / other)) for one, other in combinations(sizes, 2))

    layout = min(layouts, key=uneven)
    spread = [_spread(n, count) for n, count in zip(patches, layout, strict=True)]
    return GridCells(
        layout=layout,
        size=tuple(index.shape[1] * size for (index, _), size in zip(spread, patch, strict=True)),
        points_of=tuple(
            None if index.size == n else _points(index, size)
            for (index, _), n, size in zip(spread, patches, patch, strict=True)
        ),
        centers=tuple(centers for _, centers in spread),
    )


def seeded_weights(
    cells: GridCells, channels: int, dim: int, fourier: tuple[int, ...], seed: int
) -> dict[str, Tensor]:
    """`project` `(values, dim)` with orthonormal rows (or columns, if `dim` is smaller), and `position`."""
    bits = np.random.PCG64(seed)  # raw bits: the one stream that numpy promises never to change
    basis = low_frequencies(cells.size, channels, dim)
    turn = orthonormal(bits, dim, basis.shape[1])
    waves = np.asarray(fourier, dtype=np.float64)[:, None, None] * 2 * np.pi
    axes = len(cells.layout)
    parts = [
        np.broadcast_to(
            np.expand_dims(wave(waves * at).mean(-1), [1 + other for other in range(axes) if other != axis]),
            (len(fourier), *cells.layout),
        )
        for axis, at in enumerate(cells.centers)
        for wave in (np.sin, np.cos)
    ]
    features = np.concatenate(parts).reshape(2 * axes * len(fourier), math.prod(cells.layout)).T
    mix = uniform(bits, features.shape[1], dim) * math.sqrt(3)
    position = POSITION_GAIN * (features @ mix) / math.sqrt(max(1, axes * len(fourier)))
    return {"project": rounded(basis @ turn.T), "position": rounded(position)}


def low_frequencies(size: Sizes, channels: int, most: int) -> NDArray[np.float64]:
    """Orthonormal cosines on a cell, lowest first, `(points of the cell * channels, min(most, all))`.

    >>> basis = low_frequencies((2, 3), 1, most=4)
    >>> basis.shape, bool(np.allclose(basis.T @ basis, np.eye(4)))
    ((6, 4), True)
    """
    points = math.prod(size)
    # Squared frequencies times points squared: whole numbers, so that equal ones are exactly equal.
    order = sorted(
        (sum((wave * points // n) ** 2 for wave, n in zip(waves, size, strict=True)), waves)
        for waves in product(*map(range, size))
    )
    count = min(most, points * channels)
    basis = np.zeros((*size, channels, count))
    for column in range(count):
        (_, waves), channel = order[column // channels], column % channels
        cosines = [_cosine(n, wave) for n, wave in zip(size, waves, strict=True)]
        basis[..., channel, column] = reduce(np.multiply.outer, cosines)
    return basis.reshape(-1, count)


def _cosine(points: int, waves: int) -> NDArray[np.float64]:
    wave = np.cos(np.pi * waves * (np.arange(points) + 0.5) / points)
    return wave * math.sqrt((1 if waves == 0 else 2) / points)


def _sizes(name: str, value: Sizes) -> Sizes:
    if len(value) not in _AXES or min(value) < 1:
        raise EncoderError(f"{name} must be (H, W) or (D, H, W), each at least 1, got {value}")
    return tuple(int(size) for size in value)


def _layouts(tokens: int, patches: Sizes) -> list[Sizes]:
    """Return all ways to write `tokens` as a product of at most so many cells as patches along each axis."""
    if len(patches) == 1:
        return [(tokens,)] if tokens <= patches[0] else []
    return [
        (first, *rest)
        for first in range(1, patches[0] + 1)
        if tokens % first == 0
        for rest in _layouts(tokens // first, patches[1:])
    ]


def _spread(patches: int, cells: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Patches of each cell, `(cells, patches a cell)`, evenly spread and covering all; and their centers."""
    size = -(-patches // cells)
    starts = np.arange(cells) * (patches - size) // max(1, cells - 1)
    index = starts[:, None] + np.arange(size)
    return index.astype(np.int64), (index + 0.5) / patches


def _points(patches: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return (patches.reshape(-1, 1) * size + np.arange(size)).ravel()
