from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stoker.encoders.grid import GridEncoder
from stoker.encoders.protocol import Encoder
from stoker.encoders.wrappers import FieldStatistics, NormalizedEncoder, fit_statistics
from stoker.errors import EncoderError, RecordError
from stoker.schema import Field, Sample, Schema
from stoker.sources.protocol import SourceIdentity


class Arrays:
    """A source over `(n, T, H, W, C)` in memory, that notes what was read."""

    def __init__(self, data: np.ndarray[Any, Any], dtype: str | None = None) -> None:
        self.data, self.dtype = data, dtype or str(data.dtype)
        self.reads: list[tuple[int, int | None, int | None]] = []

    def __len__(self) -> int:
        return len(self.data)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        self.reads.append((number, start, stop))
        return {"data": self.data[number, start:stop]}

    def schema(self) -> Schema:
        return {"data": Field(shape=self.data.shape[1:], dtype=self.dtype, time=True)}

    def runs(self) -> Sequence[range]:
        return [range(len(self.data))]

    def keys(self) -> Sequence[str]:
        return [str(number) for number in range(len(self.data))]

    def identity(self) -> SourceIdentity:
        return SourceIdentity(kind="arrays/1", parts=())


def arrays(n: int = 5, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).normal(size=(n, 6, 1, 8, 2))
    return (values * [2.0, 0.001] + [100.0, 0.0]).astype(np.float32)


def test_statistics_are_those_of_all_values_per_channel() -> None:
    data = arrays()

    found = fit_statistics(Arrays(data), "data")

    exact = data.astype(np.float64).reshape(-1, 2)
    np.testing.assert_allclose(found.shift, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.scale, exact.std(0), rtol=1e-6)


def test_minmax_maps_the_training_range_to_one() -> None:
    data = arrays()

    found = fit_statistics(Arrays(data), "data", "minmax")
    scaled = NormalizedEncoder(None, found).encode({"data": torch.from_numpy(data)})["data"]

    assert (float(scaled.min()), float(scaled.max())) == (0.0, pytest.approx(1.0))


def test_pieces_give_the_same_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit_statistics(Arrays(arrays()), "data")
    monkeypatch.setattr("stoker.encoders.wrappers.PIECE_BYTES", 150)
    source = Arrays(arrays())

    pieced = fit_statistics(source, "data")

    assert (0, 4, 6) in source.reads
    assert pieced == whole


def test_a_constant_channel_is_only_shifted() -> None:
    data = np.full((3, 2, 1, 4, 1), 0.1, dtype=np.float32)

    found = fit_statistics(Arrays(data), "data")

    assert found.scale == (1.0,)
    assert found.shift == (pytest.approx(0.1),)


def test_bfloat16_travels_as_bits_and_is_read_as_numbers() -> None:
    bits = torch.tensor([1.0, 3.0]).bfloat16().view(torch.uint16).numpy().reshape(1, 2, 1, 1, 1)

    assert fit_statistics(Arrays(bits, "bfloat16"), "data").shift == (2.0,)


def test_nan_names_the_sample() -> None:
    data = arrays()
    data[3, 0, 0, 0, 0] = np.nan

    with pytest.raises(RecordError, match="sample 3"):
        fit_statistics(Arrays(data), "data")


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(EncoderError, match="'u'"):
        fit_statistics(Arrays(arrays()), "u")


def grid() -> GridEncoder:
    return GridEncoder(channels=2, grid=(1, 8), patch=(1, 2), tokens=4, dim=4)


def statistics(**changes: Any) -> FieldStatistics:
    settings: dict[str, Any] = {
        "field": "data", "method": "standard", "shift": (100.0, 0.0), "scale": (2.0, 0.5), "digest": "d",
    }  # fmt: skip
    return FieldStatistics(**{**settings, **changes})


def test_the_inner_encoder_sees_normalised_values() -> None:
    data = torch.from_numpy(arrays())
    encoder = NormalizedEncoder(grid(), statistics())
    before = data.clone()

    record = encoder.encode({"data": data, "nu": torch.ones(5)})

    assert isinstance(encoder, Encoder)
    expected = grid().encode({"data": (data - torch.tensor([100.0, 0.0])) / torch.tensor([2.0, 0.5])})
    torch.testing.assert_close(record["latent"], expected["latent"])
    assert torch.equal(data, before)
    assert record["nu"].tolist() == [1.0] * 5


def test_schema_and_group_are_those_of_the_inner_encoder() -> None:
    schema = Arrays(arrays()).schema()
    encoder = NormalizedEncoder(grid(), statistics())

    assert encoder.schema(schema) == grid().schema(schema)
    assert encoder.encode_batch_size(schema) == grid().encode_batch_size(schema)
    assert NormalizedEncoder(None, statistics()).schema(schema) == schema


def test_scalars_are_normalised_too() -> None:
    encoder = NormalizedEncoder(None, statistics(field="nu", shift=(1.0,), scale=(2.0,)))

    assert encoder.encode({"nu": torch.tensor([1.0, 5.0])})["nu"].tolist() == [0.0, 2.0]


def test_other_channels_than_fitted_are_refused() -> None:
    with pytest.raises(EncoderError, match="2 channels"):
        NormalizedEncoder(None, statistics()).schema({"data": Field(shape=(6, 3), dtype="float32")})


def test_the_identity_is_the_rule_and_the_samples_not_the_numbers() -> None:
    first = NormalizedEncoder(grid(), statistics()).identity()

    assert first == NormalizedEncoder(grid(), statistics(shift=(100.0000001, 0.0))).identity()
    for other in (
        NormalizedEncoder(grid(), statistics(digest="e")),
        NormalizedEncoder(grid(), statistics(method="minmax")),
        NormalizedEncoder(None, statistics()),
    ):
        assert other.identity() != first


def test_other_training_samples_have_another_digest() -> None:
    assert fit_statistics(Arrays(arrays()), "data").digest == fit_statistics(Arrays(arrays()), "data").digest
    assert (
        fit_statistics(Arrays(arrays()), "data").digest
        != fit_statistics(Arrays(arrays(seed=1)), "data").digest
    )


def test_weights_hold_the_numbers_and_the_inner_weights() -> None:
    assert set(NormalizedEncoder(grid(), statistics()).weights()) == {
        "normalize.shift", "normalize.scale", "project", "position",
    }  # fmt: skip


def test_padding_of_ragged_samples_stays_zeros() -> None:
    statistics = fit_statistics(Arrays(arrays() + 7.0), "data")
    data = torch.ones(2, 4, *arrays().shape[2:])
    data[0, 1:] = 0

    found = NormalizedEncoder(None, statistics).encode({"data": data, "data.lengths": torch.tensor([1, 4])})

    assert found["data"][0, :1].all()
    assert not found["data"][0, 1:].any()
    assert found["data"][1].all()
