"""The earlier grid encoder: its call, with the encoder of today behind it, and the use of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.encoders.grid import GridEncoder
from stoker.encoders.weights import read_checkpoint, weights_to_bytes
from stoker.errors import EncoderError, docs_url
from stoker.runtime.files import replace_atomically
from stoker.schema import JsonResult


@dataclass(frozen=True, slots=True, kw_only=True)
class GridEncoderConfig:
    """Settings of `GridEncoder`, by their earlier names."""

    latent_len: int
    """Tokens of one time step."""
    latent_dim: int
    """Numbers in one token."""
    field_channels: Mapping[str, int]
    """Channels of each field, which are encoded together in this order."""
    patch_size: int = 4
    """Points of a patch along each axis; along x alone where the grid has one row."""
    stem_width: int | None = None
    """Has no effect: the encoder is a projection."""
    use_fourier_features: bool = True
    """Add the place of a patch to its token."""
    fourier_frequencies: tuple[int, ...] = (1, 2)
    """Waves across the domain."""
    seed: int = 0
    """Decides the weights; in the earlier system each process drew its own."""


class EarlierGridEncoder(nn.Module):
    """Frozen encoder of grids with the earlier call; `stoker.GridEncoder` does the work.

    Its weights follow from the settings and the seed, so that every process encodes alike. Weights that an
    earlier version trained or drew are others.

    Example:
        >>> config = GridEncoderConfig(latent_len=4, latent_dim=8, field_channels={"u": 1})
        >>> encoder = EarlierGridEncoder(config)
        >>> encoder({"u": torch.zeros(2, 32, 1)}, meta={"grid_shape": (1, 32)}).shape
        torch.Size([2, 4, 8])
    """

    def __init__(self, config: GridEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self._made: dict[tuple[int, int], GridEncoder] = {}

    def for_grid(self, grid_shape: Sequence[int], field: str = "data") -> GridEncoder:
        """Return the encoder of today for a grid `(H, W)` and a field `(T, H, W, C)`."""
        own, (height, width) = self.config, grid_shape
        patch = (1 if height == 1 else own.patch_size, own.patch_size)
        return GridEncoder(
            channels=sum(own.field_channels.values()),
            grid=(height, width),
            patch=patch,
            tokens=own.latent_len,
            dim=own.latent_dim,
            fourier=tuple(own.fourier_frequencies) if own.use_fourier_features else (),
            seed=own.seed,
            field=field,
        )

    def forward(
        self,
        fields: Mapping[str, Tensor],
        coords: Tensor | None = None,
        *,
        params: object = None,
        bc: object = None,
        geom: object = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return latents `(B, L, D)` float32 of fields `(B, H * W, C)` on the grid `meta["grid_shape"]`.

        `coords`, `params`, `bc` and `geom` have no effect, as before: positions follow from the grid.

        Raises:
            EncoderError: A field or the grid is missing, or they do not fit together.
        """
        names = [*self.config.field_channels]
        if missing := [name for name in names if name not in fields]:
            raise EncoderError(f"fields has {sorted(fields)}, and lacks {', '.join(missing)}")
        if meta is None or "grid_shape" not in meta:
            raise EncoderError("meta lacks grid_shape", hint='Give meta={"grid_shape": (H, W)}')
        height, width = (int(size) for size in meta["grid_shape"])
        values = torch.cat([fields[name] for name in names], -1)
        if values.dim() != 3 or values.shape[1] != height * width:
            raise EncoderError(f"fields are {tuple(values.shape)}, expected (B, {height * width}, C)")
        made = self._made.get((height, width))
        if made is None:
            made = self._made[height, width] = self.for_grid((height, width))
        grid = values.reshape(1, len(values), height, width, -1)
        return made.encode({"data": grid.to(torch.float32)})["latent"][0]


class EarlierCall(nn.Module):
    """A module of the earlier form, `encoder(fields, coords, meta=...)`, called with steps of a field."""

    def __init__(self, encoder: nn.Module, coords: Tensor | None, grid: Sequence[int], field: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.grid, self.field = tuple(grid), field
        self.register_buffer("coords", grid_coords(grid) if coords is None else coords.reshape(1, -1, 2))

    def forward(self, steps: Tensor) -> Tensor:
        """Return latents `(n, L, D)` of `(n, *step)`."""
        points = math.prod(self.grid)
        coords = self.get_buffer("coords").expand(len(steps), points, 2)
        fields = {self.field: steps.reshape(len(steps), points, -1)}
        return self.encoder(fields, coords, meta={"grid_shape": self.grid})


def grid_coords(grid: Sequence[int]) -> Tensor:
    """Return the places of all points of a grid `(H, W)` as `(1, H * W, 2)` float32: x and y from 0 to 1."""
    height, width = grid
    y, x = (torch.linspace(0, 1, n, device="cpu") for n in (height, width))
    return torch.stack([x.expand(height, width), y[:, None].expand(height, width)], -1).reshape(1, -1, 2)


# ----------------------------------------------------------------------------------------------------------
# Use the weights of the earlier grid encoder.
#
# The earlier encoder, on a grid of H x W points with patches of p x p points:
#
#     x = PixelUnshuffle(p)(fields)                  (C p p, H/p, W/p)
#     x = x + stem(x)                                two convolutions, the last one made as zeros
#     x = [x, sin(2 pi k c), cos(2 pi k c), ...]     Fourier features of the coordinates, for each k
#     z = projection(x)                              one linear layer for each patch: n = H W / p^2 tokens
#     latent = adaptive_avg_pool1d(z, L)             where n is not L
#
# With a stem that is zero this is linear on a patch, plus a number that depends on the place alone.
# `GridEncoder` computes that, if pooling takes equal rectangles of patches: a rectangle is its patch
# then. All else is refused.


Forward: TypeAlias = "Callable[[Tensor], Tensor]"
"""From fields `(n, H, W, C)` to latents `(n, L, D)`."""
TOLERANCE = 1e-4
"""Largest difference that rounding may make, relative to the largest latent."""
CHECKED = 4
"""Random fields that are encoded both ways."""
_INSTEAD = (
    "Use the original class: encoder.kind=module, encoder.target=FILE.py:NAME and encoder.checkpoint "
    f"({docs_url('how-to/encoders')})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedEncoder(JsonResult):
    """Weights of a `GridEncoder` that gives the latents of an earlier one."""

    json_keys = (
        "out", "grid", "channels", "patch", "tokens", "dim", "checked_against", "max_difference",
        "max_latent", "settings",
    )  # fmt: skip

    out: Path
    grid: tuple[int, int]
    channels: int
    patch: tuple[int, int]
    """Points of the rectangle that becomes a token: the earlier patch, times what was pooled."""
    tokens: int
    dim: int
    checked_against: str
    """`formula`, or `original` if that was at hand."""
    max_difference: float
    """Largest difference of latents, on random fields of deviation one."""
    max_latent: float
    """Largest latent among those."""

    @property
    def settings(self) -> list[str]:
        """The settings with which it is used, as `key=value`."""
        return [
            f"encoder.checkpoint={self.out}",
            f"encoder.patch_size=[{self.patch[0]},{self.patch[1]}]",
            f"latent.tokens={self.tokens}",
            f"latent.dim={self.dim}",
            "data.normalize=false",
        ]


def convert_encoder(  # noqa: PLR0913  what the earlier class was made with, by name
    old: str | Path,
    out: str | Path,
    *,
    grid: tuple[int, int],
    patch: int,
    tokens: int,
    channels: int = 1,
    fourier: Sequence[int] = (1, 2),
    key: str | None = None,
    prefix: str = "",
    original: Forward | None = None,
) -> ConvertedEncoder:
    """Write the weights of a `GridEncoder` that gives the latents of an earlier grid encoder.

    Args:
        old: Its `state_dict`, a `.pt`, `.pth` or `.safetensors` file.
        out: The safetensors file to write.
        grid, patch, tokens, channels: As it was made: points along height and width, `patch_size`,
            `latent_len`, and the channels of all its fields together, in their order.
        fourier: Its `fourier_frequencies`; they count where its projection has columns for them.
        key, prefix: Where in the file its weights are, see `read_checkpoint`.
        original: The original module's forward pass. With it, what depends on the place is taken from the
            original, and the result is compared with it; without it, both are by the formula above.

    Raises:
        EncoderError: The file cannot be read, or no `GridEncoder` gives these latents; says which layer.

    >>> convert_encoder("old.pt", "new.safetensors", grid=(64, 64), patch=4, tokens=16)  # doctest: +SKIP
    """
    weights = read_checkpoint(old, key=key, prefix=prefix)
    _require_zero_stem(weights)
    shape = _Shape.of(grid, patch, tokens, channels)
    project, bias = _projection(weights, shape)
    formula = _formula(shape, project, bias, tuple(fourier))
    forward = original or formula
    if original is not None:
        shape.check(original(torch.zeros(1, *grid, channels)), project.shape[0])
    rows = _cell_rows(shape)
    encoder_weights = {
        "project": (project[:, rows].T / shape.pooled).float().contiguous(),
        "position": forward(torch.zeros(1, *grid, channels))[0].float().contiguous(),
    }
    place = Path(out)
    if place.suffix != ".safetensors":
        raise EncoderError(f"{place}: weights are written as safetensors", hint="Name a file that ends so")
    with replace_atomically(place) as temporary:
        temporary.write_bytes(weights_to_bytes(encoder_weights))
        found, largest = _compare(shape, temporary, project.shape[0], forward)
        if found > TOLERANCE * max(largest, 1e-30):
            raise EncoderError(
                f"{old}: the converted encoder differs by {found:.3g} from latents of up to {largest:.3g}: "
                "the original computes something else than the formula",
                hint=_INSTEAD,
            )
    return ConvertedEncoder(
        out=place, grid=grid, channels=channels, patch=shape.cell, tokens=tokens, dim=project.shape[0],
        checked_against="formula" if original is None else "original",
        max_difference=found, max_latent=largest,
    )  # fmt: skip


def original_forward(module: nn.Module, grid: tuple[int, int], field: str) -> Forward:
    """Return the forward pass of the original class, from fields `(n, H, W, C)` to latents `(n, L, D)`.

    Args:
        module: The original, which takes `fields`, `coords` and `meta`.
        grid: Points along height and width.
        field: The name that it has for its only field.

    Raises:
        EncoderError: When called: the original returned something that is not a tensor.
    """
    coords = torch.stack([at.reshape(-1) for at in _coordinates(grid)], -1).float()
    call = EarlierCall(module, coords, grid, field)

    def forward(data: Tensor) -> Tensor:
        with torch.inference_mode():
            found: object = call(data.float())
        if not isinstance(found, Tensor):
            raise EncoderError(
                f"the original gives a {type(found).__name__}", hint="Expected latents (n, L, D)"
            )
        return found.double()

    return forward


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of the earlier encoder."""

    grid: tuple[int, int]
    patch: int
    tokens: int
    channels: int
    cell: tuple[int, int]
    """Points of the rectangle of patches that one token is the mean of."""

    @property
    def pooled(self) -> int:
        """Patches of a token."""
        return self.cell[0] * self.cell[1] // self.patch**2

    @property
    def values(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.patch**2

    @staticmethod
    def of(grid: tuple[int, int], patch: int, tokens: int, channels: int) -> _Shape:
        """Refuse what has no equal rectangles.

        Raises:
            EncoderError: Pooling takes patches that are no rectangle, or the patch does not divide the grid.
        """
        if min(*grid, patch, tokens, channels) < 1 or grid[0] % patch or grid[1] % patch:
            raise EncoderError(
                f"patch {patch} does not divide grid {grid} (H, W)", hint="Give those it was made with"
            )
        high, wide = grid[0] // patch, grid[1] // patch
        if tokens > high * wide:
            raise EncoderError(
                f"{tokens} tokens were made of {high * wide} patches by copying, which GridEncoder does not "
                "do",
                hint=_INSTEAD,
            )
        run, rest = divmod(high * wide, tokens)
        rows, cols = (1, run) if run <= wide else (run // wide, wide)
        if rest or wide % cols or rows * cols != run or high % rows:
            raise EncoderError(
                f"adaptive_avg_pool1d makes {tokens} tokens of {high} x {wide} patches, row after row; "
                "these are not equal rectangles, which GridEncoder needs",
                hint=_INSTEAD,
            )
        return _Shape(grid, patch, tokens, channels, (rows * patch, cols * patch))

    def check(self, latents: Tensor, dim: int) -> None:
        """Refuse an original of other sizes."""
        if tuple(latents.shape) != (1, self.tokens, dim):
            raise EncoderError(
                f"the original gives latents {tuple(latents.shape)}, its weights are for (1, {self.tokens}, "
                f"{dim})",
                hint="Give the sizes that it was made with",
            )


def _require_zero_stem(weights: Mapping[str, Tensor]) -> None:
    """The last convolution of each stem has to be zero: then the stem adds nothing, whatever is before it.

    Raises:
        EncoderError: One is not.
    """
    last: dict[str, str] = {}
    for name, tensor in weights.items():
        if tensor.ndim == 4:  # in the order of the layers
            layer = name.rpartition(".")[0]
            last[layer.rpartition(".")[0]] = layer
    for layer in last.values():
        for name in (f"{layer}.weight", f"{layer}.bias"):
            largest = float(weights[name].abs().max()) if name in weights else 0.0
            if largest != 0.0:
                raise EncoderError(
                    f"layer {name}, the last of the stem, has values up to {largest:.3g}, so the encoder is "
                    "not linear and GridEncoder cannot give its latents",
                    hint=_INSTEAD,
                )


def _projection(weights: Mapping[str, Tensor], shape: _Shape) -> tuple[Tensor, Tensor]:
    """Return matrix `(D, features)` and bias `(D,)`, float64; the identity where there was none."""
    found = [name for name, tensor in weights.items() if tensor.ndim == 2]
    if not found:
        return torch.eye(shape.values, dtype=torch.float64), torch.zeros(shape.values, dtype=torch.float64)
    if len(found) > 1:
        raise EncoderError(
            f"layers {', '.join(found[:4])} are all linear; the earlier grid encoder has one projection",
            hint="Name the part of the file that is the encoder with --key and --prefix",
        )
    matrix = weights[found[0]].double()
    if matrix.shape[1] < shape.values:
        raise EncoderError(
            f"layer {found[0]} takes {matrix.shape[1]} numbers, a patch has {shape.values} "
            f"({shape.channels} channels of {shape.patch} x {shape.patch})",
            hint="Give the patch and channels it was made with",
        )
    bias = weights.get(f"{found[0].rpartition('.')[0]}.bias")
    return matrix, torch.zeros(len(matrix)).double() if bias is None else bias.double()


def _formula(shape: _Shape, project: Tensor, bias: Tensor, fourier: tuple[int, ...]) -> Forward:
    """Return the earlier forward pass in float64, its stem left out.

    Raises:
        EncoderError: The projection has another number of columns than there are features.
    """
    features = _fourier(shape, fourier, project.shape[1] - shape.values)

    def forward(data: Tensor) -> Tensor:
        x = F.pixel_unshuffle(data.double().permute(0, 3, 1, 2), shape.patch)
        x = torch.cat([x, features.expand(len(x), *features.shape)], dim=1)
        z = (x.flatten(2).transpose(1, 2) @ project.T + bias).transpose(1, 2)
        return F.adaptive_avg_pool1d(z, shape.tokens).transpose(1, 2)

    return forward


def _fourier(shape: _Shape, frequencies: tuple[int, ...], columns: int) -> Tensor:
    """Return features of the place of each patch, `(columns, H/p, W/p)`: at its center, or at all points."""
    across, down = _coordinates(shape.grid)
    points = F.pixel_unshuffle(torch.stack([across, down])[None], shape.patch)[0]
    centers = torch.stack([at.mean(0) for at in points.split(shape.patch**2)])
    if columns == 0:
        return points[:0]
    for at in (centers, points):
        if columns == 2 * len(frequencies) * len(at):
            waves = [wave(2 * torch.pi * k * at) for k in frequencies for wave in (torch.sin, torch.cos)]
            return torch.cat(waves)
    counts = [2 * len(frequencies) * len(at) for at in (centers, points)]
    raise EncoderError(
        f"the projection has {columns} columns more than a patch has numbers, and Fourier features of "
        f"{list(frequencies)} take {counts[0]} or {counts[1]}",
        hint="Give the frequencies it was made with",
    )


def _coordinates(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return x and y of all points, each `(H, W)` float64 in [0, 1]."""
    y, x = (torch.linspace(0, 1, points, dtype=torch.float64) for points in grid)
    return x.expand(grid), y[:, None].expand(grid)


def _cell_rows(shape: _Shape) -> Tensor:
    """For each value of a cell, in the order of `GridEncoder`, its column in the earlier projection."""
    (height, width), p = shape.cell, shape.patch
    y, x, channel = torch.meshgrid(*map(torch.arange, (height, width, shape.channels)), indexing="ij")
    return (channel * p * p + (y % p) * p + x % p).reshape(-1)


def _compare(shape: _Shape, checkpoint: Path, dim: int, forward: Forward) -> tuple[float, float]:
    """Return largest difference of latents of random fields, and the largest latent."""
    encoder = GridEncoder(
        channels=shape.channels, grid=shape.grid, patch=shape.cell, tokens=shape.tokens, dim=dim,
        checkpoint=checkpoint,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(CHECKED, *shape.grid, shape.channels, generator=generator)
    wanted, found = forward(data), encoder.encode({"data": data})["latent"].double()
    return float((wanted - found).abs().max()), float(wanted.abs().max())
