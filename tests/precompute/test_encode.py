"""What the encoder is shown, and that records outlive the memory they were made in."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import EncoderError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.arena import LoadedBatch, ReadTask, ReusedMemory, private_arrays
from stoker.precompute.encode import BatchEncoder
from stoker.schema import Field
from stoker.store import make_recipe
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import BadEnds, FakeSource, sample_values


@pytest.mark.parametrize("encoder", [None, FakeEncoder()], ids=["identity", "passes-nu-through"])
def test_records_do_not_lie_in_the_slot_that_the_next_group_overwrites(encoder):
    source = FakeSource((4,))
    schema = source.schema()
    group_encoder = BatchEncoder(encoder, make_recipe(source, encoder), schema, device="cpu", nan="reject")
    arrays = private_arrays(schema, {name: (4, *field.shape) for name, field in schema.items()})
    arrays["nu"][:] = [1, 2, 3, 4]
    arrays["data"][:] = 5
    work = ReadTask(key=0, part=0, numbers=range(4))

    encoded = group_encoder.encode(LoadedBatch(work=work, arrays=arrays), [0, 1, 2, 3], lambda _: False)
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
    settings = PrecomputeSettings(workers=0, progress=None)

    cache = run_precompute(RaggedTime((7,)), encoder, tmp_path, name="c", settings=settings).cache

    assert set(encoder.calls) == {(1, 4, 5)}
    for number in range(7):
        expected = torch.from_numpy(sample_values(number, 3 + number, 5)) @ encoder.weight * (1 + 0.125 + 1)
        assert torch.allclose(cache[number]["latent"], expected, atol=1e-5)


def test_an_encoder_is_called_with_its_gpu_as_the_current_one(monkeypatch):
    """Kernels of its own go there.."""
    entered = []

    class Current:
        def __init__(self, where):
            self.where = where

        def __enter__(self):
            entered.append(self.where)

        def __exit__(self, *_):
            entered.append(None)

    class Encoder(FakeEncoder):
        def encode(self, batch):
            assert entered == [GPU]
            return super().encode({name: value.cpu() for name, value in batch.items()})

    monkeypatch.setattr(torch.cuda, "device", Current)
    recipe = SimpleNamespace(encoded={}, encode_batch=EncodeBatchSize(samples=4))
    encoder = BatchEncoder(Encoder(), recipe, {}, device="cpu", nan="reject")
    encoder._device = GPU = SimpleNamespace(type="cuda")
    batch = {"data": Moving(torch.ones(4, 6, 5)), "nu": Moving(torch.ones(4))}

    assert encoder._output(batch)["latent"].shape == (4, 6, 3)
    assert entered == [GPU, None]


class Moving:
    """A tensor that can be moved to a GPU that is not there."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return self.tensor


class Counting(FakeEncoder):
    """Ends the run when more than half of the records ever begun are still in memory."""

    def encode(self, batch):
        if not self.calls:
            gc.freeze()  # what was there before is not looked at again and again
        records = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (1, 64, 3)]
        if len(records) > 12:  # 21 samples fail; threads may still hold what they had last
            raise EncoderError(f"{len(records)} records are held")
        return super().encode(batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 0},
        {"workers": 1},
        pytest.param({"workers": 1, "devices": ("cpu", "cpu")}, marks=pytest.mark.slow),
    ],
    ids=["here", "reader", "devices"],
)
def test_the_begun_record_of_a_sample_that_fails_later_is_let_go(tmp_path, settings):
    settings = PrecomputeSettings(progress=None, memory_bytes=4096 * 12, max_quarantined=1.0, **settings)
    source, encoder = BadEnds((24,), steps=64), Counting(samples=1, steps=16)

    try:
        report = run_precompute(source, encoder, tmp_path, name="c", settings=settings)
    finally:
        gc.unfreeze()

    assert (report.encoded, report.quarantined) == (3, 21)


def test_memory_is_used_again_once_no_record_lies_in_it() -> None:
    memory, shapes = ReusedMemory(), {"x": (4, 6)}
    schema = {"x": Field(shape=(6,), dtype="float16")}

    def batch(value: int) -> torch.Tensor:
        array = memory.arrays(schema, shapes)["x"]
        array[:] = value
        return torch.from_numpy(array)

    first, second = batch(1), batch(2)
    rows, places = list(first)[1:2], {first.data_ptr(), second.data_ptr()}

    del first
    third = batch(3)  # a row of the first is still there
    assert bool((rows[0] == 1).all())
    assert bool((second == 2).all())
    assert third.data_ptr() not in places

    del rows
    assert batch(4).data_ptr() in places
