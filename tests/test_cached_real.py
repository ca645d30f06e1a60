"""Files that others published, through a Dataset of a few lines: dtypes, odd sizes and values come out right.

And a Dataset with augmentation in it: refused, then trained on with the augmentation behind the cache.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

import stoker
from stoker.errors import SourceError
from stoker.transforms import Noise


class Darcy(Dataset[tuple[Tensor, Tensor]]):
    """neuraloperator's Darcy set: permeability as bool, pressure as float32."""

    def __init__(self, path: Path) -> None:
        data = torch.load(path, weights_only=True)
        self.x, self.y = data["x"], data["y"]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.x[number], self.y[number]


class BurgersSet(Dataset[dict[str, Tensor]]):
    """neuraloperator's Burgers set: float64 throughout, and one viscosity for all."""

    def __init__(self, path: Path) -> None:
        self.data = torch.load(path, weights_only=True)

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self.data["x"][number], "u": self.data["y"][number], "visc": self.data["visc"][0]}


class Steps(Dataset[dict[str, Any]]):
    """A MATLAB file of the PINNs collection, cut into pairs of neighboring times; space comes first."""

    def __init__(self, path: Path, name: str, time: str) -> None:
        file = read_mat(path)
        self.u, self.t = file[name], file[time].ravel()

    def __len__(self) -> int:
        return self.u.shape[1] - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "u0": self.u[:, number],
            "u1": self.u[:, number + 1],
            "t": self.t[number],
            "first": number == 0,
        }


def read_mat(path: Path) -> dict[str, NDArray[np.float64]]:
    """Matrices of doubles in a MATLAB 5 file: header, then elements of type, size and bytes."""
    data, found = path.read_bytes()[128:], dict[str, NDArray[np.float64]]()
    for kind, body in elements(data):
        matrix = next(iter(elements(zlib.decompress(body))))[1] if kind == 15 else body
        (_, flags), (_, dims), (_, name), (number, values), *_ = elements(matrix)
        dtype = {9: "<f8", 7: "<f4", 6: "<u4", 5: "<i4", 4: "<u2", 3: "<i2", 2: "u1", 1: "i1"}[number]
        shape = np.frombuffer(dims, "<i4")
        if flags[0] == 6 and len(values) == np.prod(shape) * np.dtype(dtype).itemsize:
            found[name.decode()] = np.frombuffer(values, dtype).astype("f8").reshape(shape, order="F")
    return found


def elements(data: bytes) -> list[tuple[int, bytes]]:
    """Type and bytes of each element; small ones keep both in eight bytes, and larger ones are padded."""
    found, place = list[tuple[int, bytes]](), 0
    while place + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, place)
        if kind >> 16:
            found.append((kind & 0xFFFF, data[place + 4 : place + 4 + (kind >> 16)]))
            place += 8
        else:
            found.append((kind, data[place + 8 : place + 8 + size]))
            place += 8 + (size if kind == 15 else (size + 7) // 8 * 8)
    return found


def whole(dataset: Dataset[Any], folder: Path, **settings: Any) -> dict[str, Tensor]:
    """All of a Dataset, through a cache, in one batch."""
    loader = stoker.cached(
        dataset,
        cache_dir=folder,
        device="cpu",
        batch_size=len(dataset),  # type: ignore[arg-type]
        shuffle=False,
        precompute={"workers": 0},
        **settings,
    )
    return next(iter(loader))


def test_a_set_of_bool_and_float_pairs(shared_data: Path, tmp_path: Path) -> None:
    dataset = Darcy(shared_data / "pde_neuralop" / "darcy_train_16.pt")

    batch = whole(dataset, tmp_path)

    assert batch[0].dtype == torch.bool
    assert batch[0].shape == (1000, 16, 16)
    assert torch.equal(batch[0], dataset.x)
    assert torch.equal(batch[1], dataset.y)


def test_a_set_of_float64_is_rounded_once(shared_data: Path, tmp_path: Path, caplog: Any) -> None:
    dataset = BurgersSet(shared_data / "pde_neuralop" / "burgers_train_16.pt")
    assert dataset.data["y"].dtype == torch.float64

    batch = whole(dataset, tmp_path, time=("u",), windows=stoker.Windows(stride=1, horizon=1))

    assert "float64 is read as float32: u, visc, x" in caplog.text
    assert batch.z0.shape == (800, 16)  # type: ignore[attr-defined]
    records = whole(dataset, tmp_path, time=("u",))
    assert records["u"].shape == (800, 17, 16)
    assert torch.equal(records["u"], dataset.data["y"].float())
    assert torch.equal(records["visc"], dataset.data["visc"].float().expand(800, 1))


@pytest.mark.parametrize(
    ("path", "name", "time", "shape"),
    [
        ("appendix/Data/burgers_shock.mat", "usol", "t", (256, 100)),
        ("main/Data/KdV.mat", "uu", "tt", (512, 201)),
    ],
)
def test_a_matlab_file_of_odd_sizes(
    shared_data: Path, tmp_path: Path, path: str, name: str, time: str, shape: tuple[int, int]
) -> None:
    dataset = Steps(shared_data / "pde_pinns" / path, name, time)
    assert dataset.u.shape == shape

    batch = whole(dataset, tmp_path)

    assert batch["u0"].shape == (shape[1] - 1, shape[0])
    np.testing.assert_array_equal(batch["u1"].numpy(), dataset.u[:, 1:].T.astype("f4"))
    np.testing.assert_array_equal(batch["t"].numpy(), dataset.t[:-1])
    assert batch["first"].dtype == torch.bool
    assert batch["first"].sum() == 1


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """A line through noisy points; `noisy` draws its noise anew whenever an item is read."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 200)[number : number + 1].repeat(4)
        return (x + torch.randn(4) / 50 if self.noisy else x), x[:1] * 3 - 1


def trained(folder: Path) -> tuple[float, Tensor]:
    loader = stoker.cached(
        Augmented(noisy=False), cache_dir=folder, device="cpu", batch_size=20, seed=3,
        transforms=[Noise(std=1 / 50, fields=["0"])], precompute={"workers": 0},
     shuffle=True)  # fmt: skip
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = torch.tensor(0.0)
    seen = []
    for _ in range(20):
        for batch in loader:
            loss = (model(batch[0]) - batch[1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(batch[0].clone())
    assert not torch.equal(torch.cat(seen[:10]).sort(0)[0], torch.cat(seen[10:20]).sort(0)[0])  # drawn anew
    return loss.item(), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_augmentation_is_refused_in_the_dataset_and_repeats_bit_for_bit_behind_the_cache(
    tmp_path: Path,
) -> None:
    with pytest.raises(SourceError, match=r"field '0' changes when it is read again.*transforms=\[\.\.\.\]"):
        stoker.cached(Augmented(noisy=True), cache_dir=tmp_path, shuffle=True)

    (loss, weights), (_, again) = trained(tmp_path / "a"), trained(tmp_path / "b")

    assert loss < 0.01
    assert torch.equal(weights, again)
