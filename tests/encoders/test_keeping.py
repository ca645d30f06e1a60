"""Raw fields beside latents: in the record, in the recipe, in windows, and never a condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.encoders.grid import GridEncoder
from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.encoders.wrappers import keep_fields
from stoker.errors import ConfigError, EncoderError
from stoker.loader import Loader, Mixture, Windows
from stoker.sources.hdf5 import HDF5Source
from stoker.store import Cache, load_recipe
from stoker.train.operator import cond_widths
from tests.loader.caches import Arrays


@pytest.fixture
def source(burgers: Path) -> HDF5Source:
    return HDF5Source([burgers])


def encoder() -> GridEncoder:
    return GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=4, dim=8)


def make(source: HDF5Source, folder: Path, **settings: Any) -> Cache:
    return stoker.precompute(source, encoder(), folder, name="c", workers=0, progress=None, **settings)


class Doubling:
    """Twice `data`, as `z`."""

    independent_steps = True

    def schema(self, sample_schema: Any) -> Any:
        return {"z": sample_schema["data"]}

    def encode_batch_size(self, sample_schema: Any) -> Any:
        return EncodeBatchSize(samples=2)

    def encode(self, batch: Any, /) -> Any:
        return {"z": batch["data"] * 2}

    def to(self, device: torch.device) -> None:
        pass

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def identity(self) -> dict[str, Any]:
        return {"class": "tests.Doubling", "config": {}, "weights": "", "version": 1}


def test_records_hold_the_raw_field_as_it_was_read(source: HDF5Source, tmp_path: Path) -> None:
    plain, kept = make(source, tmp_path), make(source, tmp_path, keep=("data",))

    assert plain.fingerprint != kept.fingerprint
    assert [*kept.schema] == sorted(["data", *plain.schema])
    assert kept.recipe.entries["encoder"]["config"]["fields"] == ["data"]
    for number in range(len(source)):
        assert torch.equal(kept[number]["data"], torch.from_numpy(source.read(number)["data"]))
        assert torch.equal(kept[number]["latent"], plain[number]["latent"])
    assert load_recipe(kept.path).schema["data"].kept
    assert make(source, tmp_path, keep="data").fingerprint == kept.fingerprint


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_windows_give_it_at_both_states_with_its_axes(source: HDF5Source, tmp_path: Path, tier: str) -> None:
    cache = make(source, tmp_path, keep=("data",), dtype={"latent": "float16"})
    plain = make(source, tmp_path, dtype={"latent": "float16"})

    for batch in Loader(cache, batch_size=7, windows=Windows(stride=2, horizon=2), tier=tier, shuffle=True):
        for row, (number, start) in enumerate(batch.index.tolist()):
            raw = torch.from_numpy(source.read(number)["data"])
            assert torch.equal(batch.cond["data0"][row], raw[start])
            assert torch.equal(batch.cond["data1"][row], raw[start + 2])
            assert torch.equal(batch.z1[row], plain[number]["latent"][start + 2])
        assert batch.cond.keys() == {"data0", "data1", *(plain.schema.keys() - {"latent"})}
        assert "data0" not in cond_widths(batch)
        assert "data1" not in cond_widths(batch)


def test_the_states_are_cut_from_the_encoded_field_whatever_it_is_called(tmp_path: Path) -> None:
    """`data` is what windows take by default where no field is called `latent`, and here it is raw."""
    values = torch.arange(2 * 6 * 3, dtype=torch.float32).reshape(2, 6, 3)
    source = Arrays({"data": values, "mask": torch.ones(2, 4)}, timed=("data",))

    cache = stoker.precompute(
        source, Doubling(), tmp_path, name="c", workers=0, progress=None, keep=["data", "mask"]
    )
    batch = next(iter(Loader(cache, batch_size=4, windows=Windows(), shuffle=False)))

    assert torch.equal(batch.z0, values[0, :4] * 2)
    assert torch.equal(batch.cond["data1"], values[0, 1:5, :, None])
    assert torch.equal(batch.cond["mask"], torch.ones(4, 4, 1))
    assert cond_widths(batch) == {}


def test_it_is_stored_packed_like_any_other_field(source: HDF5Source, tmp_path: Path) -> None:
    cache = make(source, tmp_path, keep="data", dtype={"data": "int8"})

    assert cache.schema["data"].quantized
    assert cache.schema["data"].kept
    batch = next(iter(Loader(cache, batch_size=3, windows=Windows(), shuffle=False)))
    assert torch.equal(batch.cond["data1"][2], cache[0]["data"][3])


def test_names_that_cannot_be_kept_are_refused(source: HDF5Source, tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match=r"keep names 'fields', samples have only .*data"):
        make(source, tmp_path, keep="fields")
    scalar = next(name for name, field in source.schema().items() if not field.shape)
    with pytest.raises(EncoderError, match=f"keep names '{scalar}', which the encoder hands on"):
        make(source, tmp_path, keep=scalar)


def test_nothing_to_keep_changes_nothing() -> None:
    inner = encoder()

    assert keep_fields(inner, ()) is inner
    assert keep_fields(None, "data") is None
    assert isinstance(keep_fields(inner, "data"), Encoder)


def test_windows_cannot_be_cut_from_a_kept_field(source: HDF5Source, tmp_path: Path) -> None:
    cache = make(source, tmp_path, keep="data")

    with pytest.raises(ConfigError, match=r"'data' is not a field with time.*latent"):
        Loader(cache, batch_size=3, windows=Windows(field="data"), shuffle=True)


def test_in_a_mixture_raw_fields_stay_with_their_own_cache(source: HDF5Source, tmp_path: Path) -> None:
    """Padded to those of another grid they would pass for conditions."""
    kept = make(source, tmp_path / "kept", keep="data", dtype={"latent": "int8"})
    plain = make(source, tmp_path / "plain")

    for batch in Mixture([kept, plain], 4, mode="round_robin", windows=Windows(), names=["a", "b"]):
        with_raw = {"data0", "data1"} & batch.cond.keys()
        own = batch.task == "a"
        assert with_raw == ({"data0", "data1"} if own else set())
        assert not {"data0", "data1"} & batch.mask.keys()
        if own:
            number, start = batch.index[0].tolist()
            assert torch.equal(batch.cond["data1"][0], kept[number]["data"][start + 1])
            assert torch.equal(batch.z1[0], kept[number]["latent"][start + 1])
