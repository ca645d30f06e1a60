"""The mesh encoder: linear in the values, blind to the order of points, and back to any points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker import ModuleEncoder
from stoker.encoders.mesh import MeshEncoder, mesh_encoder_for
from stoker.errors import EncoderError
from stoker.schema import Field, Schema, size_field
from stoker.testing import check_encoder

STATE = Field(shape=(-1, 2), dtype="float32", ragged=True, axes=("t", "p"))
EDGES = Field(shape=(-1, 2), dtype="int64", ragged=True, axes=("e",))
COORDS = Field(shape=(-1, 2), dtype="float32", ragged=True, axes=("p",))
MESH: Schema = {"coords": COORDS, "edges": EDGES, "u": STATE, "u.shape": size_field(STATE)}
PARTICLES: Schema = {
    "positions": STATE, "positions.shape": size_field(STATE),
    "velocities": STATE, "velocities.shape": size_field(STATE), "edges": EDGES,
}  # fmt: skip


def points(count: int, seed: int = 0) -> Tensor:
    return torch.rand((count, 2), generator=torch.Generator().manual_seed(seed))


def smooth(coords: Tensor, steps: int) -> Tensor:
    """Two channels of a smooth field `(T, N, 2)`."""
    time = torch.linspace(0, 1, steps)[:, None]
    x, y = coords[None, :, 0], coords[None, :, 1]
    return torch.stack([torch.sin(3 * x + time) * torch.cos(2 * y), torch.exp(-4 * (x - time) ** 2)], -1)


def sample(coords: Tensor, values: Tensor) -> dict[str, Tensor]:
    sizes = torch.tensor([values.shape[:2]])
    return {"coords": coords[None], "u": values.reshape(1, -1, 2), "u.shape": sizes}


def test_it_keeps_the_promises_of_an_encoder() -> None:
    check_encoder(mesh_encoder_for(MESH, tokens=4, dim=8), MESH)
    check_encoder(mesh_encoder_for(PARTICLES, tokens=3, dim=9), PARTICLES)


def test_smooth_fields_come_back_at_their_points_and_between_them() -> None:
    encoder = mesh_encoder_for(MESH, tokens=16, dim=16)
    coords, values = points(400), smooth(points(400), 6)

    record = encoder.encode(sample(coords, values))
    back = encoder.decode(record["latent"][0], record["coords"][0])
    between = 0.1 + 0.8 * points(50, seed=1)
    there = encoder.decode(record["latent"][0], coords, at=between)

    assert record["latent"].shape == (1, 6, 16, 16)
    assert (back - values).norm() / values.norm() < 0.01
    assert (there - smooth(between, 6)).norm() / values.norm() < 0.05


def test_the_order_of_points_and_a_fresh_encoder_give_the_same_bits() -> None:
    coords, values = points(400), smooth(points(400), 6)  # so many numbers that rounding would show
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))

    one = mesh_encoder_for(MESH, tokens=16, dim=32).encode(sample(coords, values))
    two = mesh_encoder_for(MESH, tokens=16, dim=32).encode(sample(coords[order], values[:, order]))

    assert torch.equal(one["latent"], two["latent"])


def test_particles_are_described_by_displacement_and_come_back() -> None:
    encoder = mesh_encoder_for(PARTICLES, tokens=8, dim=16)
    first = points(12)
    positions = first + 0.1 * smooth(first, 5) + 3.0
    sizes = torch.tensor([[5, 12]])
    flat = {"positions": positions.reshape(1, -1, 2), "velocities": smooth(first, 5).reshape(1, -1, 2)}

    record = encoder.encode(
        {**flat, "positions.shape": sizes, "velocities.shape": sizes, "edges": torch.zeros(1, 3, 2).long()}
    )
    displaced, velocities = encoder.decode(record["latent"][0], record["coords"][0]).split(2, dim=-1)

    assert torch.equal(record["coords"][0], positions[0])
    assert torch.allclose(record["coords"] + displaced, positions, atol=2e-3)
    assert torch.allclose(velocities, smooth(first, 5), atol=1e-2)
    assert record["edges"].shape == (1, 3, 2)


def test_a_checkpoint_stands_for_its_weights(tmp_path: Path) -> None:
    seeded = mesh_encoder_for(MESH, tokens=4, dim=8, seed=5)
    save_file(dict(seeded.weights()), tmp_path / "w.safetensors")

    loaded = mesh_encoder_for(MESH, tokens=4, dim=8, checkpoint=tmp_path / "w.safetensors")

    assert loaded.identity() == seeded.identity()
    assert loaded.identity() != mesh_encoder_for(MESH, tokens=4, dim=8, seed=6).identity()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dim": 1}, "2 channels"),
        ({"tokens": 4096}, "4096"),
        ({"space": 4}, "4"),
        ({"fields": "u"}, "fields is 'u'"),
        ({"channels": "1"}, "channels is '1'"),
        ({"dim": 1.5}, "dim is 1.5"),
        ({"seed": "1"}, "seed is '1'"),
        ({"coords": 5}, "coords is 5"),
        ({"checkpoint": 5}, "checkpoint is 5"),
        ({"moving": "x"}, "x"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], says: str) -> None:
    settings: dict[str, object] = {"fields": ("u",), "channels": 2, "space": 2, "tokens": 4, "dim": 8}
    with pytest.raises(EncoderError, match=says):
        MeshEncoder(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("schema", "fields"), [(MESH, ["u"]), (PARTICLES, ["positions", "velocities"])])
def test_it_is_made_for_a_source_without_counting_channels(schema: Schema, fields: list[str]) -> None:
    class Samples:
        def schema(self) -> Schema:
            return schema

    encoder = MeshEncoder.for_source(Samples(), tokens=4, dim=8)

    assert list(encoder.fields) == fields
    assert encoder.schema(schema)["latent"].shape == (-1, 4, 8)
    with pytest.raises(EncoderError, match="not a source"):
        MeshEncoder.for_source([1, 2])  # pyright: ignore[reportArgumentType]


def test_samples_without_points_are_refused() -> None:
    with pytest.raises(EncoderError, match="coords"):
        mesh_encoder_for({"data": Field(shape=(5, 8, 8, 1), dtype="float32", time=True)}, tokens=4, dim=8)


class Graph(nn.Module):
    """One round of messages along edges, then a mean and a maximum over points: two tokens a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((4, 6), generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, v: Tensor, edges: Tensor) -> Tensor:
        own = torch.cat([x, v], -1) @ self.weight
        own = own.index_add(2, edges[0, :, 1], own[:, :, edges[0, :, 0]])
        return torch.stack([own.mean(2), own.amax(2)], 2)


def test_a_graph_network_is_given_steps_points_and_edges() -> None:
    encoder = ModuleEncoder(Graph(), field=["positions", "velocities", "edges"], time="whole")

    check_encoder(encoder, PARTICLES)
    schema = encoder.schema(PARTICLES)
    assert schema == {"latent": Field(shape=(-1, 2, 6), dtype="float32", time=True, ragged=True)}


def test_a_network_that_keeps_points_is_told_to_pool() -> None:
    encoder = ModuleEncoder(nn.Identity(), field="positions", time="whole")

    with pytest.raises(EncoderError, match="pool"):
        encoder.schema(PARTICLES)
