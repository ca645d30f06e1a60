"""The mesh encoder: fields on any points `(T, N, C)` become `(T, L, D)`, without seeing any data first.

Each sample is put in the unit box of its points and described by the cosine waves of that box, the longest
first. The fit is by least squares. A small penalty that grows with the frequency permits fewer points than
waves. A token holds some consecutive waves of all channels, mixed by a seeded rotation. All
of it is linear in the values, so `decode` is exact arithmetic: the waves at any points. What waves as long
as these cannot show is lost; training reports that error as `reconstruction_nrmse`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.arguments import NAME, PATH, check, or_none, several, whole
from stoker.encoders.protocol import EncodeBatchSize, SampleShapes, schema_of
from stoker.encoders.weights import digest_weights, load_weights, orthonormal, rounded
from stoker.errors import EncoderError, arg
from stoker.schema import SHAPE_SUFFIX, Field, Json, Schema
from stoker.units import MIB

VERSION = 1
"""Bumped by hand when the same settings and weights would encode to other numbers."""
MESH_ENCODER = "stoker.MeshEncoder"
"""The class in the identity."""
RIDGE = 1e-6
"""Penalty, relative to the largest diagonal entry of the normal matrix. Points on a line or ring cannot tell
some waves apart; without a penalty these would get huge weights that cancel. Errors (NRMSE) of two synthetic
fields: 0.0055 and 0.0060 with 1e-6, 0.0049 and 0.0066 with 1e-8."""
MOST_WAVES = 4096
"""Waves at most: the fit holds and factorizes a square matrix of them in float64, 128 MiB."""
CHUNK_BYTES = 32 * MIB
"""Waves at points that are held at a time."""

_FIELDS = several(NAME, "a list of names of fields, as ('u',)")


@dataclass(kw_only=True, slots=True, eq=False)
class MeshEncoder:
    """Frozen encoder of particles and meshes; satisfies `Encoder`.

    All fields of time and points named are joined along channels in this order. Coordinates are the field
    `coords`; without one they are those of the first step of `moving`. Its other steps then count as
    displacement from there, so that particles keep their waves while they move. The record holds `latent`
    `(T, L, D)` float32, the coordinates as `coords`, and every other field of the sample.

    Nothing depends on other samples or on global random state. Points are sorted by their coordinates first,
    so their order in the sample does not matter, unless two points coincide. Time and memory, for
    `M = L * (D // C)` waves: `N * M**2` products a sample and `N * M` for each step and channel; `8 * M**2`
    bytes and 32 MiB. `M` is at most 4,096.

    Raises:
        EncoderError: A setting is out of range, or the checkpoint holds other weights.

    Examples:
        >>> import h5py, numpy, stoker
        >>> with h5py.File("heat.h5", "w") as file:
        ...     for number, points in enumerate((50, 60)):
        ...         file[f"{number}/coords"] = numpy.random.rand(points, 2)
        ...         file[f"{number}/fields/u"] = numpy.random.rand(5, points, 1)
        >>> source = stoker.MeshSource("heat.h5")
        >>> encoder = stoker.MeshEncoder.for_source(source, tokens=4, dim=8)
        >>> record = stoker.precompute(source, encoder, "caches", name="heat")[0]
        >>> record["latent"].shape, encoder.decode(record["latent"], record["coords"]).shape
        (torch.Size([5, 4, 8]), torch.Size([5, 50, 1]))
    """

    fields: tuple[str, ...]
    """Fields to encode, `(T, N, c)` or `(T, N)`."""
    channels: int
    """Channels of all of them together, C."""
    space: int
    """Coordinates of a point, 1 to 3."""
    tokens: int
    """Tokens in a time step, L."""
    dim: int
    """Numbers in a token, D: at least `channels`, best a multiple."""
    coords: str = "coords"
    """Field with the coordinates, `(N, space)`."""
    moving: str | None = None
    """The one of `fields` that holds positions, for samples without `coords`."""
    seed: int = 0
    """Decides the rotation, by a generator of its own."""
    checkpoint: str | Path | None = None
    """Safetensors file with `project` and `waves` to use in place of these."""
    _weights: dict[str, Tensor] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings, then make or load the weights."""
        check({"fields": (self.fields, _FIELDS), "coords": (self.coords, NAME)}, EncoderError)
        counts = ("channels", "tokens", "dim", "space")
        check({name: (getattr(self, name), whole(least=1)) for name in counts}, EncoderError)
        check({"seed": (self.seed, whole(least=0))}, EncoderError)
        check({"checkpoint": (self.checkpoint, or_none(PATH))}, EncoderError)
        self.fields = tuple(self.fields)
        if self.space > 3:
            raise EncoderError(f"space is {self.space}", hint="Expected 1, 2 or 3")
        if not self.fields or (self.moving is not None and self.moving not in self.fields):
            raise EncoderError(f"moving is {self.moving!r}, which must be one of fields {list(self.fields)}")
        if self.dim < self.channels:
            raise EncoderError(
                f"a token of {self.dim} numbers cannot hold one wave of {self.channels} channels",
                hint=f"Use {arg('dim', self.channels)} or more",
            )
        if self.waves > MOST_WAVES:
            raise EncoderError(
                f"{self.tokens} tokens of {self.dim // self.channels} waves are {self.waves}, and at most "
                f"{MOST_WAVES} are fitted",
                hint=f"Use fewer {arg('tokens')}, or a smaller {arg('dim')}",
            )
        held = self.dim // self.channels * self.channels
        shapes = {"project": (held, self.dim), "waves": (self.waves, self.space)}
        if self.checkpoint is not None:
            self._weights = load_weights(self.checkpoint, shapes)
        else:
            project = seeded_rotation(held, self.dim, self.seed)
            self._weights = {"project": project, "waves": lowest_waves(self.waves, self.space)}

    @classmethod
    def for_source(
        cls,
        source: SampleShapes,
        *,
        tokens: int = 16,
        dim: int = 32,
        seed: int = 0,
        checkpoint: str | Path | None = None,
    ) -> MeshEncoder:
        """Return an encoder for all fields of time and points that the samples of a source have.

        Coordinates are the field `coords`, else the field `positions`, whose points then move.

        Args:
            source: What will be encoded.
            tokens: Tokens in a time step.
            dim: Numbers in a token.
            seed: Decides the rotation.
            checkpoint: Safetensors file with weights to use in place of the seeded ones.

        Raises:
            EncoderError: Samples have no such field, or no coordinates.
        """
        return mesh_encoder_for(schema_of(source), tokens=tokens, dim=dim, seed=seed, checkpoint=checkpoint)

    @property
    def waves(self) -> int:
        """Waves that a field is described by, M."""
        return self.tokens * (self.dim // self.channels)

    @property
    def independent_steps(self) -> bool:
        """False: coordinates may be those of the first step, so each call needs the complete sample."""
        return False

    def schema(self, sample_schema: Schema) -> Schema:
        """Return `latent` `(T, L, D)`, `coords` `(N, space)`, float32, and the fields that are not encoded.

        Raises:
            EncoderError: A field is missing, or has other axes, channels or coordinates.
        """
        channels = 0
        for name in self.fields:
            field = sample_schema.get(name)
            if field is None or field.axes != ("t", "p") or not field.floating or len(field.shape) > 2:
                raise EncoderError(
                    f"field {name!r} is {None if field is None else field.shape}, the mesh encoder takes "
                    "floats of time and points, (T, N, C)",
                    hint=f"Samples have such fields: {', '.join(point_fields(sample_schema)) or 'none'}",
                )
            channels += field.shape[1] if len(field.shape) > 1 else 1
        if channels != self.channels:
            raise EncoderError(
                f"fields {', '.join(self.fields)} have {channels} channels together, this encoder takes "
                f"{self.channels}",
                hint=f"Give channels={channels}",
            )
        place = sample_schema.get(self.coords if self.moving is None else self.moving)
        wanted = ("p",) if self.moving is None else ("t", "p")
        if place is None or place.axes != wanted or place.shape[1:] != (self.space,):
            raise EncoderError(
                f"coordinates {(self.moving or self.coords)!r} are {None if place is None else place.shape}, "
                f"this encoder takes {self.space} numbers a point"
            )
        gone = {*self.fields, *(name + SHAPE_SUFFIX for name in self.fields), self.coords}
        passed = {name: field for name, field in sample_schema.items() if name not in gone}
        if "latent" in passed:
            raise EncoderError(
                "samples have a field 'latent' already, which is what this encoder would write"
            )
        latent = Field(shape=(-1, self.tokens, self.dim), dtype="float32", time=True, ragged=True)
        coords = Field(shape=(-1, self.space), dtype="float32", ragged=True, axes=("p",))
        return {"latent": latent, "coords": coords, **passed}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return one sample a call, since samples differ in size."""
        return EncodeBatchSize(samples=1)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode one sample: each field `(1, T * N, c)` with its sizes, `latent` `(1, T, L, D)`."""
        steps, points = (int(size) for size in batch[self.fields[0] + SHAPE_SUFFIX][0])
        parts = {name: batch[name][0].reshape(steps, points, -1).float() for name in self.fields}
        if self.moving is None:
            coords = batch[self.coords][0].float()
        else:
            coords = parts[self.moving][0].clone()
            parts[self.moving] = parts[self.moving] - coords
        values = torch.cat([parts[name] for name in self.fields], dim=-1)
        with torch.inference_mode(), torch.autocast(values.device.type, enabled=False):
            found = self._fit(values, coords)
            waves = found.reshape(steps, self.tokens, -1)
            latent = waves.float() @ self._weights["project"]
        gone = {*self.fields, *(name + SHAPE_SUFFIX for name in self.fields), self.coords}
        passed = {name: value for name, value in batch.items() if name not in gone}
        return {"latent": latent[None], "coords": coords[None], **passed}

    def decode(self, latents: Tensor, coords: Tensor, at: Tensor | None = None) -> Tensor:
        """Return fields `(..., N, C)` float32 of latents `(..., L, D)` of a sample.

        Channels are those of `fields`, one after another; with `moving`, displacement in place of positions.

        Args:
            latents: As stored.
            coords: Coordinates of the sample's points, `(N, space)`: `coords` of its record.
            at: Other points of the same domain to evaluate at; None: its own.
        """
        return PointDecoder(self._weights, self.channels)(latents, coords, at)

    def to(self, device: torch.device) -> None:
        """Move weights to `device`."""
        self._weights = {name: tensor.to(device) for name, tensor in self._weights.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return `project` `(numbers held, D)` and `waves` `(M, space)`, float32."""
        return self._weights

    def identity(self) -> dict[str, Json]:
        """Return settings and weights, without the seed or the checkpoint's path: weights show these."""
        config: dict[str, Json] = {
            "fields": list(self.fields),
            "channels": self.channels,
            "space": self.space,
            "tokens": self.tokens,
            "dim": self.dim,
            "coords": self.coords,
            "moving": self.moving,
        }
        digest = digest_weights(self._weights)
        return {"class": MESH_ENCODER, "config": config, "weights": digest, "version": VERSION}

    def _fit(self, values: Tensor, coords: Tensor) -> Tensor:
        """Weights of the waves `(T, M, C)`, float64, for values `(T, N, C)` at coordinates `(N, space)`."""
        steps, points, channels = values.shape
        waves, unit = self._weights["waves"].double(), unit_box(coords, coords)
        # Rounding depends on the order of sums, so points are summed in the order of their coordinates.
        order = torch.arange(points, device=coords.device)
        for axis in reversed(range(self.space)):
            order = order[torch.argsort(coords[order, axis], stable=True)]
        unit = unit[order]
        flat = values.index_select(1, order).permute(1, 0, 2).reshape(points, -1).double()
        damping = penalty(waves)
        normal = waves.new_zeros((len(waves), len(waves)))
        right = waves.new_zeros((len(waves), flat.shape[1]))
        count = max(1, CHUNK_BYTES // (8 * len(waves)))
        for at in range(0, points, count):
            basis = waves_at(unit[at : at + count], waves) * damping
            normal.addmm_(basis.T, basis)
            right.addmm_(basis.T, flat[at : at + count])
        normal.diagonal().add_(RIDGE * float(normal.diagonal().max()))
        found = torch.cholesky_solve(right, torch.linalg.cholesky(normal)) * damping[:, None]
        return found.view(len(waves), steps, channels).permute(1, 0, 2)


class PointDecoder:
    """Latents of a `MeshEncoder` back to fields at points."""

    def __init__(self, weights: Mapping[str, Tensor], channels: int) -> None:
        self._channels = channels
        self._waves = weights["waves"].detach().cpu().double()
        # Of a rotation the transpose; the pseudo-inverse also undoes what a checkpoint holds.
        self._inverse = torch.linalg.pinv(weights["project"].detach().cpu().double()).float()

    def __call__(self, latents: Tensor, coords: Tensor, at: Tensor | None = None) -> Tensor:
        """As `MeshEncoder.decode`."""
        return self.at(latents, self.basis(coords, at))

    def basis(self, coords: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the waves at a sample's points, or at other points, `(N, M)` float32; see `at`."""
        return waves_at(unit_box(coords, coords if at is None else at), self._waves).float()

    def at(self, latents: Tensor, basis: Tensor) -> Tensor:
        """Return fields `(..., N, C)` float32 of latents `(..., L, D)`, at the points of `basis`."""
        if self._inverse.device != latents.device:
            self._inverse = self._inverse.to(latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            held = latents.float() @ self._inverse
            found = held.reshape(*latents.shape[:-2], len(self._waves), self._channels)
            return basis.to(latents.device) @ found


def point_fields(schema: Schema) -> list[str]:
    """Return the names of the float fields of time and points, in the order of the schema."""
    return [name for name, f in schema.items() if f.axes == ("t", "p") and f.floating and not f.kept]


def mesh_encoder_for(
    schema: Schema, *, tokens: int, dim: int, seed: int = 0, checkpoint: str | Path | None = None
) -> MeshEncoder:
    """Return the `MeshEncoder` of all fields of time and points that samples of `schema` have.

    Args:
        schema: Fields of the samples.
        tokens, dim, seed, checkpoint: As for `MeshEncoder`.

    Raises:
        EncoderError: Samples have no such field, or no coordinates.
    """
    names = sorted(point_fields(schema))
    moving = None if "coords" in schema else "positions"
    place = schema.get("coords" if moving is None else moving)
    if not names or place is None or len(place.shape) != 2:
        shown = {name: field.shape for name, field in schema.items()}
        raise EncoderError(
            "the mesh encoder takes fields of time and points, (T, N, C), and a field 'coords' (N, d) or "
            f"'positions' (T, N, d). Samples have {shown}",
            hint="Read them with data.arrays.layout=mesh or particles",
        )
    sizes = [schema[name].shape[1] if len(schema[name].shape) > 1 else 1 for name in names]
    return MeshEncoder(
        fields=tuple(names),
        channels=sum(sizes),
        space=place.shape[1],
        tokens=tokens,
        dim=dim,
        moving=moving,
        seed=seed,
        checkpoint=checkpoint,
    )


def unit_box(coords: Tensor, points: Tensor) -> Tensor:
    """Return `points` `(n, space)` in the box of `coords`, `[0, 1]` along each axis, float64."""
    exact = coords.double()
    low, high = exact.amin(0), exact.amax(0)
    size = high - low
    return torch.where(size > 0, (points.double() - low) / torch.where(size > 0, size, 1.0), 0.5)


def waves_at(unit: Tensor, waves: Tensor) -> Tensor:
    """Return cosine waves at points of the unit box, `(N, M)` float64; `waves` `(M, space)`: half waves."""
    angles = torch.pi * unit[:, None, :] * waves[None]
    return torch.cos(angles).prod(-1)


def penalty(waves: Tensor) -> Tensor:
    """Return the factor of each wave before the fit, `(M,)`: short waves count less than long ones."""
    return 1.0 / (1.0 + waves.square().sum(1))


def lowest_waves(count: int, space: int) -> Tensor:
    """Return the `count` longest cosine waves of the unit box: half waves on each axis, `(count, space)`.

    >>> lowest_waves(4, 2).tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """
    most = 1
    while most**space < 4 * count:
        most += 1
    every = sorted(itertools.product(range(most), repeat=space), key=lambda k: (sum(n * n for n in k), k))
    return torch.tensor(every[:count], dtype=torch.float32, device="cpu")


def seeded_rotation(rows: int, dim: int, seed: int) -> Tensor:
    """Return orthonormal rows `(rows, dim)`, float32, the same for a seed on every machine."""
    return rounded(np.ascontiguousarray(orthonormal(np.random.PCG64(seed), dim, rows).T))
