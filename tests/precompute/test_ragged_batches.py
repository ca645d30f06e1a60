"""Ragged samples that are padded and encoded together: the records, their bits, and what can go wrong."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import stoker
from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import EncoderError
from stoker.precompute import EncodeFiller, PrecomputeSettings, run_precompute
from stoker.precompute import run as run_module
from stoker.precompute.arena import LoadedBatch, ReadTask
from stoker.precompute.by_length import LengthGatherer
from stoker.precompute.encode import TOLERANCE, distance
from stoker.schema import Field
from stoker.store import make_recipe, open_cache
from tests.kit import forked as subprocess
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.ragged_once import FIELDS, LENGTHS, PlacedEncoder, RaggedData, length_of

ROOT = Path(__file__).parents[2]
COUNTS = (40, 63)


def run(source: Any, encoder: Any, folder: Path, **settings: Any) -> Any:
    settings = {"workers": 0, "progress": None, "max_quarantined": 1.0, **settings}
    return run_precompute(source, encoder, folder, name="c", settings=PrecomputeSettings(**settings))


def records(cache: Any) -> dict[int, dict[str, torch.Tensor]]:
    return {number: cache[number] for number in cache.indices.tolist()}


def assert_same_bits(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for number, record in expected.items():
        for name, value in record.items():
            assert torch.equal(found[number][name], value), (number, name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """Records of one run in one process."""
    return records(run(RaggedData(COUNTS), PlacedEncoder(), tmp_path_factory.mktemp("whole")).cache)


class Tokens(Dataset[dict[str, Any]]):
    """Sequences of 1 to 40 tokens."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        return {"tokens": rng.integers(0, 50, int(rng.integers(1, 41))), "label": index}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.layers(self.embed(tokens), src_key_padding_mask=~keep)
        weights = keep[..., None] / keep.sum(1)[:, None, None]
        return states, (states * weights).sum(1)


def test_records_equal_those_of_samples_encoded_alone_within_the_tolerance(tmp_path: Path) -> None:
    source = stoker.TorchSource(Tokens())
    settings: dict[str, Any] = {"field": "tokens", "output": ("states", "mean"), "mask": "keep"}
    together = stoker.ModuleEncoder(Transformer(), encode_batch=6, lengths=(8, 16, 32), **settings)

    alone = run(source, stoker.ModuleEncoder(Transformer(), **settings), tmp_path).cache
    batched = run(source, together, tmp_path).cache

    assert len(alone) == len(batched) == 90
    for number in range(90):
        assert int(batched[number]["label"]) == number
        for name in ("states", "mean"):
            assert distance(batched[number][name], alone[number][name]) <= TOLERANCE, (number, name)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"workers": None}, id="head start"),
        pytest.param({"workers": 1}, id="one worker"),
        pytest.param({"workers": 2, "always_in_child": True}, id="two workers, encoder in a child"),
        pytest.param({"workers": 2, "devices": ("cpu", "cpu")}, id="two encoders"),
        pytest.param({"workers": 1, "memory_bytes": 2000}, id="little memory"),
        pytest.param({"by_blocks": True}, id="blocks"),
    ],
)
def test_bits_do_not_depend_on_who_reads_and_encodes(
    settings: dict[str, Any], whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("always_in_child"):
        monkeypatch.setattr(run_module, "FEW_GROUPS", 0)

    report = run(RaggedData(COUNTS, run=3), PlacedEncoder(), tmp_path, **settings)

    assert (report.encoded, report.quarantined) == (sum(COUNTS), 0)
    assert_same_bits(records(report.cache), whole)


def test_every_call_of_a_length_has_one_shape_and_the_rest_are_encoded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "FEW_GROUPS", 1000)  # the encoder is called here, and counts
    encoder = PlacedEncoder()

    cache = run(RaggedData(COUNTS), encoder, tmp_path).cache

    lengths = [length_of(number) for number in range(sum(COUNTS))]
    alone = {(1, length, 5) for length in lengths if length > LENGTHS[-1] or not length}
    assert (1, 0, 5) in alone, "some samples are empty"
    assert set(encoder.calls) - {(1, 4, 5), (2, 8, 5)} >= alone
    together = [shape for shape in encoder.calls if shape not in alone]
    assert set(together[2:]) <= {(4, length, 5) for length in LENGTHS}
    assert len(encoder.calls) < len(lengths) * 0.7
    for number, length in enumerate(lengths):
        assert cache[number]["latent"].shape == (length, 3)
        data = torch.from_numpy(RaggedData(COUNTS).read(number)["data"])
        assert torch.allclose(cache[number]["sum"], data.sum(), atol=1e-4), "each record is its sample's"


@pytest.mark.timeout(120)
def test_killed_at_random_moments_and_resumed_no_record_differs(whole: Any, tmp_path: Path) -> None:
    def start(delay_s: float) -> Any:
        arguments = [tmp_path, sum(COUNTS), 2, delay_s]
        command = [sys.executable, "-m", "tests.precompute.ragged_once", *map(str, arguments)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    chance = random.Random(1)
    for _ in range(3):
        before = len([*tmp_path.glob("c/*/shard-*.safetensors")])
        process = start(0.03)
        limit = time.monotonic() + 30
        while len([*tmp_path.glob("c/*/shard-*.safetensors")]) <= before and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()

    process = start(0.0)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    stored, encoded = map(int, out.split())
    assert stored == sum(COUNTS)
    assert encoded < stored, "nothing survived the kills, so the test proves nothing"
    source = RaggedData((sum(COUNTS) // 3, sum(COUNTS) - sum(COUNTS) // 3))
    assert_same_bits(
        records(open_cache(tmp_path / "c")), records(run(source, PlacedEncoder(), tmp_path / "one").cache)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_named_and_the_bits_of_others_stay(workers: int, whole: Any, tmp_path: Path) -> None:
    unread, refused = {3, 50}, {11, 12, 77}
    source = RaggedData(COUNTS, faults=dict.fromkeys(unread, "raise"))
    assert not any(length_of(number) == 0 for number in unread | refused)

    report = run(source, PlacedEncoder(raises=refused), tmp_path, workers=workers)

    failures = report.cache.quarantined
    assert {number: failures[number].stage for number in failures} == {
        **dict.fromkeys(unread, failures[3].stage),
        **dict.fromkeys(refused, "encode"),
    }
    assert "does not like that sample" in failures[11].error
    rest = {number: record for number, record in whole.items() if number not in unread | refused}
    assert_same_bits(records(report.cache), rest)

    again = run(RaggedData(COUNTS), PlacedEncoder(), tmp_path, workers=workers, retry_quarantined=True)
    assert again.encoded == 5
    assert_same_bits(records(again.cache), whole)


def test_a_source_that_grows_keeps_its_records_and_gives_those_of_a_fresh_run(tmp_path: Path) -> None:
    run(RaggedData((30, 20)), PlacedEncoder(), tmp_path)

    grown = run(RaggedData((30, 47, 20)), PlacedEncoder(), tmp_path)  # the second part is longer

    assert grown.adopted >= 50
    assert grown.encoded == 97 - grown.adopted
    fresh = run(RaggedData((30, 47, 20)), PlacedEncoder(), tmp_path / "fresh").cache
    assert_same_bits(records(grown.cache), records(fresh))
    assert not any(len(grown.cache.shard(i).marked) for i in range(len(grown.cache.index.shards)))


def test_single_records_are_encoded_on_demand_with_the_same_bits(whole: Any, tmp_path: Path) -> None:
    cache = run(RaggedData(COUNTS), PlacedEncoder(), tmp_path).cache
    assert isinstance(cache.filler, EncodeFiller)
    check = cache.filler.spot_check(cache, 20)
    check.start()
    report = check.finish(60)
    assert (report.checked, report.different, report.failed) == (20, [], [])

    for path in cache.path.glob("shard-*"):
        path.unlink()
    cache.filler.fill([7, 60], 30.0)
    found = open_cache(tmp_path / "c", require_complete=False)
    for number in (7, 60):
        assert torch.equal(found[number]["latent"], whole[number]["latent"])


def test_a_call_without_room_is_halved_and_its_records_are_marked(tmp_path: Path) -> None:
    halved = run(RaggedData(COUNTS), PlacedEncoder(shows=False, oom_above=2), tmp_path / "a").cache
    entire = run(RaggedData(COUNTS), PlacedEncoder(shows=False), tmp_path / "b").cache

    marked = np.concatenate([halved.shard(i).marked for i in range(len(halved.index.shards))])
    together = [n for n in range(sum(COUNTS)) if 0 < length_of(n) <= LENGTHS[-1]]
    assert len(marked) == len(together)
    for number, record in records(entire).items():
        assert distance(halved[number]["latent"], record["latent"]) <= TOLERANCE


class Halving(PlacedEncoder):
    """Every second row of the input; it says how many these are."""

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = super().encode(batch)
        found["latent"] = found["latent"][:, ::2]
        found["latent.lengths"] = (batch["data.lengths"] + 1) // 2
        return found


def test_an_encoder_may_say_how_long_its_output_is(tmp_path: Path) -> None:
    short = run(RaggedData((50,)), Halving(), tmp_path / "a").cache
    entire = run(RaggedData((50,)), PlacedEncoder(), tmp_path / "b").cache

    for number in range(50):
        assert torch.equal(short[number]["latent"], entire[number]["latent"][::2])


def test_lengths_beyond_the_output_are_refused(tmp_path: Path) -> None:
    class Short(PlacedEncoder):
        def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found = super().encode(batch)
            return found | {"latent": found["latent"][:, :1]}

    with pytest.raises(EncoderError, match=r"lengths of the encoder's output 'latent'.*latent\.lengths"):
        run(RaggedData((50,)), Short(), tmp_path)


def test_an_encoder_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    class Noisy(PlacedEncoder):
        def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found = super().encode(batch)
            return found | {"sum": found["sum"] + torch.rand(())}

    with pytest.raises(EncoderError, match="random"):
        run(RaggedData((50,)), Noisy(), tmp_path)


def test_samples_wait_no_longer_than_the_encoder_is_idle(tmp_path: Path) -> None:
    """The last sample hangs in its source for seconds: those before it are encoded meanwhile."""

    class Slow(RaggedData):
        def read(self, number: int, start: Any = None, stop: Any = None) -> Any:
            if number == 6:
                time.sleep(3.0)
            return super().read(number, start, stop)

    encoder = PlacedEncoder(lengths=(64,), samples=8)

    run(Slow((7,)), encoder, tmp_path, workers=1)

    together = [at for at, shape in zip(encoder.at, encoder.calls, strict=True) if shape == (8, 64, 5)]
    assert together[-1] - together[0] > 1.5, "the first call did not wait for the last sample"


class Dying(PlacedEncoder):
    """Its process is killed in a call of several samples, once."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(self.calls) > 3 and len(batch["data"]) == 4 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(batch)


def test_an_encoder_process_that_is_killed_costs_no_record(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = run(RaggedData(COUNTS), Dying(tmp_path / "died"), tmp_path, workers=1, devices=("cpu", "cpu"))

    assert (tmp_path / "died").exists()
    assert "killed by signal 9" in caplog.text
    assert (report.encoded, report.quarantined) == (sum(COUNTS), 0)
    assert_same_bits(records(report.cache), whole)


def gatherer(lengths: list[int], **limits: Any) -> tuple[LengthGatherer, list[LoadedBatch]]:
    source = RaggedData((len(lengths) // 2, len(lengths) - len(lengths) // 2))
    recipe = make_recipe(source, PlacedEncoder(samples=limits.pop("samples", 3)))
    samples: list[LoadedBatch] = []
    for number, length in enumerate(lengths):
        arrays = {"data": np.full((1, length, 5), number, np.float32), "nu": np.full(1, number, np.float32)}
        work = ReadTask(key=number, part=int(number >= len(lengths) // 2), numbers=range(number, number + 1))
        samples.append(LoadedBatch(work=work, arrays=arrays))
    limits = {"limit_bytes": 1 << 20, **limits}
    return LengthGatherer(recipe, FIELDS, **limits), samples


@given(st.lists(st.integers(0, 40), min_size=2, max_size=60), st.randoms(), st.integers(1, 3000))
def test_a_sample_has_one_row_and_shape_in_whatever_order_samples_come(
    lengths: list[int], chance: random.Random, limit_bytes: int
) -> None:
    places: list[dict[int, Any]] = []
    for shuffled, limits in ((False, {}), (True, {"limit_bytes": limit_bytes})):
        gathered, samples = gatherer(lengths, **limits)
        if shuffled:
            chance.shuffle(samples)
        for sample in samples:
            gathered.add(sample)
        gathered.flush()
        found: dict[int, Any] = {}
        for call in gathered.ready:
            assert len(call.works) == sum(number >= 0 for number in call.members)
            for row, number in enumerate(call.members):
                own = call.arrays["data.lengths"][row]
                assert not call.arrays["data"][row, own:].any(), "zeros behind the end"
                if number < 0:
                    assert own == 1
                    continue
                assert number not in found, "each sample is encoded once"
                assert own == lengths[number]
                assert (call.arrays["data"][row, :own] == number).all()
                found[number] = (row, call.arrays["data"].shape)
        assert sorted(found) == [*range(len(lengths))], "no sample is lost"
        assert not len(gathered)
        assert not gathered.waiting_bytes
        places.append(found)
    assert places[0] == places[1]


def test_what_waits_is_bounded_in_bytes_and_in_samples() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 9, 17], 2000, p=[0.9, 0.09, 0.01]).tolist()
    gathered, samples = gatherer(lengths, samples=64, limit_bytes=2000)
    for sample in samples:
        gathered.add(sample)
        assert gathered.waiting_bytes <= 2000

    gathered, samples = gatherer(lengths, samples=64, most_read=100)
    read_at = {}
    for at, sample in enumerate(samples):
        gathered.add(sample)
        read_at[sample.work.numbers[0]] = at
        for call in gathered.ready:
            assert all(at - read_at[number] <= 101 for number in call.members if number >= 0)
        gathered.ready.clear()
        assert len(gathered) <= 101


def test_lengths_are_part_of_the_recipe_only_where_there_are_some() -> None:
    source = RaggedData((9,))
    alone = make_recipe(source, PlacedEncoder(samples=1, lengths=()))
    together = make_recipe(source, PlacedEncoder())

    assert alone.entries["group"] == {"samples": 1, "steps": None}
    assert together.entries["group"] == {"samples": 4, "steps": None, "lengths": [8, 16, 32]}
    assert together.encode_batch == EncodeBatchSize(samples=4, lengths=LENGTHS)
    assert make_recipe(source, PlacedEncoder(), encode_batch=9).encode_batch.samples == 9


@pytest.mark.parametrize("lengths", [(8, 8), (16, 8), (0, 4)])
def test_lengths_that_do_not_ascend_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(EncoderError, match="ascend"):
        EncodeBatchSize(samples=2, lengths=lengths)


def test_lengths_for_samples_that_have_one_length_are_refused(tmp_path: Path) -> None:
    class Fixed(FakeEncoder):
        def encode_batch_size(self, sample_schema: Any) -> EncodeBatchSize:
            return EncodeBatchSize(samples=2, lengths=(8,))

    with pytest.raises(EncoderError, match="do not differ in length"):
        run(FakeSource((4,)), Fixed(), tmp_path)


def test_the_batch_size_of_a_module_follows_from_the_largest_length() -> None:
    schema = {"x": Field(shape=(-1, 256), dtype="float32", ragged=True)}
    encoder = stoker.ModuleEncoder(nn.Linear(256, 256), field="x", lengths=(64, 2048))

    size = encoder.encode_batch_size(schema)

    assert size == EncodeBatchSize(samples=2, lengths=(64, 2048))
    assert size.samples * math.prod((2048, 256)) * 4 * 2 <= 8 << 20
