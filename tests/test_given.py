"""What a path, text or dict is answered with where a dataset, a source or a cache is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


# ----------------------------------------------------------------------------------------------------------
# Arguments of the wrong kind.


def _module(**given: Any) -> stoker.ModuleEncoder:
    return stoker.ModuleEncoder(torch.nn.Linear(2, 2), **{"field": "x", "version": "1", **given})


def _remote(**given: Any) -> stoker.RemoteEncoder:
    return stoker.RemoteEncoder("http://a", **{"model": "m", "revision": "1", "dim": 3, **given})


def _precompute(folder: Path, **given: Any) -> object:
    settings = {"name": "x", "workers": 0, "progress": None, **given}
    return stoker.precompute([{"x": torch.ones(2)}] * 3, _module(), folder, **settings)


PRECOMPUTE: dict[str, list[Any]] = {
    "name": [5, None, ""],
    "dtype": [5, ["float16"]],
    "encode_batch": ["8", 0, 1.5, True],
    "workers": ["2", -1, True],
    "max_quarantined": ["1%", -0.1, 5, None, float("nan")],
    "retry_quarantined": ["no", 1],
    "overwrite": ["no", None],
    "max_error": ["0.1", -1],
    "part": [5, (1,), (2, 2), ("0", "1")],
    "fields": [5, [5]],
    "keep": [5, [None]],
    "variants": ["2"],
    "augment": [5, [5]],
    "variant_seed": ["1", None],
    "progress": ["no", 5],
    "wait": ["no", 0],
    "engine": ["ray"],
}
MADE: dict[str, tuple[Callable[..., object], dict[str, list[Any]]]] = {
    "precompute": (_precompute, PRECOMPUTE),
    "module": (
        lambda _, **given: _module(**given),
        {
            "field": [5, [5]],
            "output": [None],
            "encode_batch": ["8", 0],
            "lengths": ["64", ["64"], 64],
            "mask": [5],
        },
    ),
    "remote": (
        lambda _, **given: _remote(**given),
        {
            "dim": ["3", 0, True],
            "in_flight": ["8"],
            "timeout_s": ["60", 0],
            "retries": ["4", -1],
            "headers": ["key"],
            "layers": ["8"],
            "lengths": [5],
            "field": [5],
            "files": [5],
        },
    ),
    "source": (
        lambda _, **given: stoker.TorchSource([1.0], **given),
        {"time": ["u", 5], "text": [5], "version": [1.5]},
    ),
}
CALLS = [
    (what, name, value) for what, (_, own) in MADE.items() for name, values in own.items() for value in values
]


@pytest.mark.parametrize(("what", "name", "value"), CALLS, ids=repr)
def test_an_argument_of_the_wrong_kind_is_named_with_its_value(
    tmp_path: Path, what: str, name: str, value: Any
) -> None:
    with pytest.raises(StokerError) as raised:
        MADE[what][0](tmp_path, **{name: value})

    assert name in raised.value.fact
    assert repr(value) in raised.value.fact
    assert raised.value.hint
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "value", [{"wait": "no"}, {"name": 5}, {"cache_dir": 5}, {"text": 5}, {"workers": "2"}]
)
def test_cached_refuses_them_too(tmp_path: Path, value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(value))):
        stoker.cached([1.0, 2.0], **{"cache_dir": tmp_path, **value})

    assert not [*tmp_path.iterdir()]


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    net, data = torch.nn.Linear(2, 2), [{"x": torch.ones(2)}] * 3
    encoders = [stoker.ModuleEncoder(net, field="x", encode_batch=size) for size in (None, np.int64(2))]

    caches = [
        stoker.precompute(
            data, one, tmp_path, name="x", encode_batch=size, workers=np.int32(0), progress=None
        )
        for one, size in zip(encoders, (np.int64(2), None), strict=True)
    ]

    assert caches[0].fingerprint == caches[1].fingerprint
