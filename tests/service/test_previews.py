"""What the page of a data set shows of samples: values, pictures, and why one cannot be read."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from stoker.errors import SourceError
from stoker.schema import Field, Schema
from stoker.service.previews import SIDE, describe_samples, encode_png, viridis
from stoker.service.probes import PROBES, probe
from stoker.service.views import histograms
from tests.service.job_folders import burgers_dataset, images_dataset


def decoded(src: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2])))


def samples(kind: str, spec: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    return PROBES["samples"](kind, spec, **{"pictures": True, **given})


def test_images_have_thumbnails_and_a_broken_one_its_error(tmp_path: Path) -> None:
    spec = images_dataset(tmp_path)["spec"]
    (tmp_path / "images" / "dark" / "1.png").write_bytes(b"no image")

    found = samples("images", spec, limit=3)

    assert [one["key"] for one in found] == ["dark/0", "dark/1", "dark/2"]
    assert found[0]["class"] == "dark"
    (picture,) = found[0]["pictures"]
    assert "dark" in picture["alt"]
    image = decoded(picture["src"])
    assert image.size == (picture["width"], picture["height"])
    assert max(image.size) <= SIDE
    assert "1.png" in found[1]["error"]
    assert "values" not in found[1]
    assert found[2]["pictures"]
    assert "pictures" not in samples("images", spec, limit=1, pictures=False)[0]


def test_fields_have_plots_with_their_range(tmp_path: Path) -> None:
    spec = burgers_dataset(tmp_path)["spec"]

    (found,) = samples("hdf5", spec, limit=1)

    (picture,) = found["pictures"]
    image = decoded(picture["src"]).convert("RGB")
    assert max(image.size) <= SIDE
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 20, "it has a range of colors"
    values = found["values"]["data"]
    assert f"{values['min']:.4g}" in picture["alt"]
    assert values["min"] < values["mean"] < values["max"]


def test_fields_in_two_dimensions_have_a_plot_for_some_steps(tmp_path: Path) -> None:
    path = tmp_path / "2D.h5"
    steps, size = 11, 20
    with h5py.File(path, "w") as file:
        for number in range(2):
            group = file.create_group(f"{number:04d}")
            data = np.ones((steps, size, size, 2), np.float32) * np.arange(steps)[:, None, None, None]
            data[0, 3, 4, 0] = np.nan
            group["data"] = data
            group["grid/x"] = group["grid/y"] = np.linspace(0, 1, size, dtype=np.float32)
            group["grid/t"] = np.linspace(0, 1, steps, dtype=np.float32)

    found = samples("hdf5", {"path": str(path)})[0]

    assert [one["caption"] for one in found["pictures"]] == [
        "data_0, step 0",
        "data_0, step 5",
        "data_0, step 10",
    ]
    first, _, last = (decoded(one["src"]).convert("RGB") for one in found["pictures"])
    assert first.getpixel((0, 0)) == (0x44, 0x01, 0x54)
    assert last.getpixel((0, 0)) == (0xFD, 0xE7, 0x25)
    assert first.getpixel((4, 3)) == (128, 128, 128), "what is not finite is gray"
    assert found["values"]["data"]["not_finite"] == 1


def test_large_samples_are_read_at_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = burgers_dataset(tmp_path)["spec"]
    monkeypatch.setattr("stoker.service.previews.MOST_BYTES", 1000)
    few = samples("hdf5", spec)[0]
    monkeypatch.setattr("stoker.service.previews.MOST_BYTES", 10)
    none = samples("hdf5", spec)[0]

    assert len(few["pictures"]) == 3
    assert few["read"].startswith("steps 0, ")
    assert "too much to show" in none["error"]


def test_reading_samples_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, wide, high = tmp_path / "2D.h5", 2000, 7500
    data = np.ones((2, wide, high, 1), np.float32)
    with h5py.File(path, "w") as file:
        for number in range(2):
            group = file.create_group(f"{number:04d}")
            group.create_dataset("data", data=data, chunks=(1, 400, high, 1), compression=1)
            for name, count in (("x", wide), ("y", high), ("t", 2)):
                group[f"grid/{name}"] = np.linspace(0, 1, count, dtype=np.float32)
    monkeypatch.setattr("stoker.service.probes.MEMORY_BYTES", 100 << 20)

    for what in ("samples", "check"):
        with pytest.raises(SourceError, match="memory"):
            probe(what, "hdf5", {"path": str(path)})


class Slow:
    """A source of which each sample takes a second of a clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def keys(self) -> list[str]:
        """Names of the samples."""
        return [str(number) for number in range(len(self))]

    def __len__(self) -> int:
        return 20

    def schema(self) -> Schema:
        """One number."""
        return {"x": Field(shape=(2,), dtype="float32")}

    def read(self, _number: int) -> dict[str, Any]:
        """Read one."""
        self.now += 1.0
        return {"x": np.zeros(2, np.float32)}


def test_samples_are_read_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = Slow()
    monkeypatch.setattr("stoker.service.previews.time", source)
    monkeypatch.setattr("stoker.service.previews.READ_S", 5.5)

    found = describe_samples(source, 10, 2, pictures=False)

    assert [one["number"] for one in found] == [*range(2, 12)]
    assert ["error" in one for one in found] == [False] * 6 + [True] * 4
    assert all("not read" in str(one["error"]) for one in found[6:])
    assert all("values" not in one for one in found[6:])


def test_a_png_is_read_as_it_was_written() -> None:
    levels = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    palette = viridis()

    found = np.asarray(Image.open(io.BytesIO(encode_png(levels, palette))).convert("RGB"))

    assert (found == palette[levels]).all()


def test_columns_of_numbers_have_histograms() -> None:
    rows = [{"id": "a", "x": float(n % 10), "flag": True, "same": 1, "none": None} for n in range(100)]
    rows[3]["x"] = float("nan")

    (one,) = histograms(rows)

    assert (one["name"], one["rows"]) == ("x", 99)
    assert max(bar["height"] for bar in one["bars"]) == 32
    assert histograms([]) == []
