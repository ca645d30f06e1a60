"""What the encoder is shown, and that records outlive the memory they were made in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.arena import private_arrays
from stoker.precompute.encode import GroupEncoder
from stoker.precompute.parcel import Parcel
from stoker.precompute.queue import GroupWork
from stoker.schema import Field
from stoker.store import make_recipe
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource, sample_values


@pytest.mark.parametrize("encoder", [None, FakeEncoder()], ids=["identity", "passes-nu-through"])
def test_records_do_not_lie_in_the_slot_that_the_next_group_overwrites(encoder):
    source = FakeSource((4,))
    schema = source.schema()
    group_encoder = GroupEncoder(encoder, make_recipe(source, encoder), schema, device="cpu", nan="reject")
    arrays = private_arrays(schema, {name: (4, *field.shape) for name, field in schema.items()})
    arrays["nu"][:] = [1, 2, 3, 4]
    arrays["data"][:] = 5
    work = GroupWork(key=0, part=0, numbers=range(4))

    encoded = group_encoder.encode(Parcel(work=work, arrays=arrays), [0, 1, 2, 3], lambda _: False)
    for array in arrays.values():
        array[:] = -1

    assert encoded is not None
    assert encoded.records["nu"].tolist() == [1, 2, 3, 4]
    if encoder is None:
        assert bool((encoded.records["data"] == 5).all())


class RaggedTime(FakeSource):
    """`data` (3 + number, W), ragged along time."""

    def schema(self):
        data = Field(shape=(-1, self.width), dtype="float32", ragged=True, time=True)
        return {"data": data, "nu": Field(shape=(), dtype="float32")}

    def read(self, number, start=None, stop=None):
        return {"data": sample_values(number, 3 + number, self.width), "nu": np.float32(number)}


def test_ragged_samples_are_cut_over_time_and_the_last_chunk_is_padded(tmp_path):
    encoder = FakeEncoder(samples=1, steps=4, by_shape=True)
    settings = PrecomputeSettings(readers=0, progress=None)

    cache = run_precompute(RaggedTime((7,)), encoder, tmp_path, name="c", settings=settings).cache

    assert set(encoder.calls) == {(1, 4, 5)}
    for number in range(7):
        expected = torch.from_numpy(sample_values(number, 3 + number, 5)) @ encoder.weight * (1 + 0.125 + 1)
        assert torch.allclose(cache[number]["latent"], expected, atol=1e-5)
