"""What a path, text or dict is answered with where a dataset, a source or a cache is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import StackDataset

import stoker
from stoker.errors import ConfigError, StokerError

TAKERS: dict[str, Callable[[Any, Path], object]] = {
    "cached": lambda given, folder: stoker.cached(given, cache_dir=folder, shuffle=True),
    "precompute": lambda given, folder: stoker.precompute(given, None, folder, name="x"),
    "TorchSource": lambda given, _: stoker.TorchSource(given),
    "Loader": lambda given, _: stoker.Loader(given, shuffle=True),
    "Mixture": lambda given, _: stoker.Mixture(given),
    "member": lambda given, _: stoker.Mixture([given]),
}
GIVEN = ["data/x.h5", Path("data/x.h5"), b"data/x.h5", bytearray(b"x"), {"u": [1, 2]}, "", "https://a.org/x"]


@pytest.mark.parametrize("given", GIVEN, ids=repr)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_dataset_source_or_cache_is_refused_before_anything_is_made(
    tmp_path: Path, taker: str, given: object
) -> None:
    with pytest.raises(StokerError) as raised:
        TAKERS[taker](given, tmp_path)

    assert (repr(given) if given == "" or not isinstance(given, str | Path) else str(given)) in str(
        raised.value
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("as_path", [str, Path])
def test_the_hint_for_an_hdf5_file_works_as_it_is_written(
    tmp_path: Path, burgers: Path, as_path: Callable[[Path], Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        stoker.cached(as_path(burgers), cache_dir=tmp_path / "c", shuffle=True)

    made = evaluated(r"stoker\.HDF5Source\('.*?'\)", str(raised.value))
    assert (
        len(stoker.cached(made, cache_dir=tmp_path / "c", precompute={"workers": 0}, shuffle=True).dataset)
        == 12
    )


def test_the_hint_for_a_dict_of_arrays_works_as_it_is_written(tmp_path: Path) -> None:
    dataset = {"u": torch.zeros(4, 3), "v": torch.ones(4)}
    with pytest.raises(ConfigError) as raised:
        stoker.cached(dataset, cache_dir=tmp_path, shuffle=True)  # pyright: ignore[reportArgumentType]

    assert "torch.utils.data.StackDataset(**dataset)" in str(raised.value)
    stacked: Any = StackDataset(**dataset)  # pyright: ignore[reportArgumentType]
    cache = stoker.cached(stacked, cache_dir=tmp_path, precompute={"workers": 0}, shuffle=True).dataset
    assert {*cache.schema} == {"u", "v"}


@pytest.mark.parametrize("taker", ["Loader", "member"])
def test_the_hint_for_a_dataset_names_what_takes_one(tmp_path: Path, taker: str) -> None:
    with pytest.raises(ConfigError, match=r"stoker\.(TorchSource|cached)\(dataset"):
        TAKERS[taker](torch.utils.data.TensorDataset(torch.zeros(4, 3)), tmp_path)


def test_a_dict_by_number_is_a_dataset(tmp_path: Path) -> None:
    loader = stoker.cached({0: 1.0, 1: 2.0}, cache_dir=tmp_path, precompute={"workers": 0}, shuffle=True)  # pyright: ignore[reportArgumentType]

    assert len(loader.dataset) == 2


def evaluated(pattern: str, text: str) -> Any:
    found = re.search(pattern, text)
    assert found is not None, text
    return eval(found[0], {"stoker": stoker})
