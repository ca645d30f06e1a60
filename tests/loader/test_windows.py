from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError
from stoker.loader.batch import Windows, number_examples, time_field
from stoker.schema import Field

LATENT = Field(shape=(9, 4), dtype="float32", time=True)


def naive(lengths: list[int], windows: Windows) -> list[tuple[int, int]]:
    """Every start whose last row is still inside the trajectory, found by trying them all."""
    return [
        (record, start)
        for record, length in enumerate(lengths)
        for start in range(0, length, windows.start_every)
        if start + windows.horizon * windows.stride < length
    ]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    stride=st.integers(1, 4),
    horizon=st.integers(1, 4),
    every=st.integers(1, 5),
)
def test_windows_are_those_that_trying_every_start_finds(
    lengths: list[int], stride: int, horizon: int, every: int
) -> None:
    windows = Windows(stride=stride, horizon=horizon, start_every=every)
    expected = naive(lengths, windows)
    if not expected:
        with pytest.raises(ConfigError, match="longest trajectory"):
            number_examples(np.array(lengths), len(lengths), windows)
        return

    examples = number_examples(np.array(lengths), len(lengths), windows)
    ids = np.arange(examples.count)
    records, starts = examples.locate(ids, examples.first)
    on_torch = examples.locate(torch.from_numpy(ids), torch.from_numpy(examples.first))

    assert list(zip(records.tolist(), starts.tolist(), strict=True)) == expected
    assert [part.tolist() for part in on_torch] == [records.tolist(), starts.tolist()]


def test_at_every_start_the_count_is_what_stride_and_horizon_leave() -> None:
    assert Windows(stride=3, horizon=4).count(101) == 101 - 4 * 3


@pytest.mark.parametrize("setting", ["stride", "horizon", "start_every"])
def test_numbers_below_one_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        Windows(**{setting: -1 if setting == "horizon" else 0})


def test_the_field_with_time_is_found_or_asked_for() -> None:
    scalar = Field(shape=(), dtype="float32")

    assert time_field({"nu": scalar, "u": LATENT}, None) == "u"
    assert time_field({"time": LATENT, "latent": LATENT}, None) == "latent"
    assert time_field({"time": LATENT, "latent": LATENT}, "time") == "time"
    with pytest.raises(ConfigError, match="Leave windows= out"):
        time_field({"nu": scalar}, None)
    with pytest.raises(ConfigError, match=r"Windows\(field"):
        time_field({"a": LATENT, "b": LATENT}, None)
    with pytest.raises(ConfigError, match="nu"):
        time_field({"nu": scalar, "u": LATENT}, "nu")


def test_the_hint_for_windows_without_time_works_as_it_is_written(tmp_path: Path) -> None:
    dataset: Any = torch.rand(3, 6, 4)
    windows = stoker.Windows(horizon=2)
    module = torch.nn.Linear(4, 2).eval().requires_grad_(False)
    settings: dict[str, Any] = {
        "shuffle": True,
        "cache_dir": tmp_path,
        "windows": windows,
        "precompute": {"workers": 0},
    }
    with pytest.raises(ConfigError) as raised:
        stoker.cached(dataset, module, **settings)

    assert "time=['data']" in str(raised.value)
    names = {"stoker": stoker, "module": module}
    encoder = eval('stoker.ModuleEncoder(module, time="steps")', names)
    assert 'stoker.ModuleEncoder(module, time="steps")' in str(raised.value)
    batch = next(iter(stoker.cached(dataset, encoder, time=["data"], **settings)))
    assert batch.z0.shape[-1] == 2
