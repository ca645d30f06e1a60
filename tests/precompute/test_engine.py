"""What a run stores: the same records whoever reads them, nothing left out, and nothing done twice."""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import threading
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.config.names import in_settings
from stoker.errors import (
    ConfigError,
    EncoderError,
    IncompleteError,
    MissingRecordError,
    RecordError,
    ResourceError,
    SourceError,
)
from stoker.precompute import PrecomputeSettings, engine, precompute, run_precompute
from stoker.precompute.progress import LineProgress
from stoker.precompute.run import encode_here
from stoker.precompute.workers import Worker
from stoker.runtime.processes.child import LIGHT, TORCH
from stoker.sources.arrays import ArraySource
from stoker.sources.files import confine_sources
from stoker.sources.splits import SplitOf
from stoker.sources.torch_dataset import TorchSource
from stoker.store import open_cache, recipe
from stoker.store.storage import exclusive_use
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import (
    ConfinedSource,
    FakeSource,
    ManySource,
    MeetingSource,
    RaggedSource,
    sample_values,
)


def run(source, encoder, folder, name="c", **settings):
    settings = {"workers": 1, "progress": None, "max_quarantined": 0.9, **settings}
    return run_precompute(source, encoder, folder, name=name, settings=PrecomputeSettings(**settings))


def records(cache):
    return {number: {k: v.clone() for k, v in cache[number].items()} for number in cache.indices.tolist()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for number, record in a.items():
        for name, value in record.items():
            assert torch.equal(value, b[number][name]), (number, name)


@pytest.fixture
def no_workers(monkeypatch):
    def refuse(*_):
        raise AssertionError("a reader was started")

    monkeypatch.setattr(Worker, "__init__", refuse)


def test_workers_are_confined_to_what_their_process_is(tmp_path):
    confine_sources(["/data/x"])
    try:
        cache = run(ConfinedSource((10,)), FakeEncoder(), tmp_path, workers=1, max_quarantined=0.0).cache
    finally:
        confine_sources(None)

    assert len(cache) == 10


def test_records_are_the_same_for_any_number_of_workers(tmp_path):
    """Parts of 10 and 7 with groups of 4: short groups at both ends, and an encoder that shows the shape."""
    results = []
    for workers in (0, 1, 4, None):
        source = FakeSource((10, 7), run=3)
        encoder = FakeEncoder(by_shape=True)
        report = run(source, encoder, tmp_path / str(workers), workers=workers)
        assert set(encoder.calls) == {(4, 6, 5)}
        assert (report.records, report.encoded, report.reused) == (17, 17, 0)
        results.append(records(report.cache))

    for other in results[1:]:
        assert_same(results[0], other)
    expected = torch.from_numpy(sample_values(3, 6, 5)) @ FakeEncoder().weight * (1 + 0.5 + 1.5)
    assert torch.allclose(results[0][3]["latent"], expected, atol=1e-5)


def test_resume_encodes_only_the_missing_and_changes_no_bit(tmp_path):
    encoder = FakeEncoder(by_shape=True)
    whole = run(FakeSource((23,)), encoder, tmp_path / "whole")
    first = run(FakeSource((23,), faults={5: "raise", 6: "raise", 17: "raise"}), encoder, tmp_path / "c")
    assert (first.records, first.quarantined) == (20, 3)

    second = run(FakeSource((23,)), encoder, tmp_path / "c", retry_quarantined=True)

    assert (second.encoded, second.reused, second.quarantined) == (3, 20, 0)
    assert_same(records(whole.cache), records(second.cache))


def test_a_source_is_asked_once_who_it_is(tmp_path, monkeypatch):
    """A Dataset of many values takes seconds to answer."""
    asked = []
    answer = FakeSource.identity
    monkeypatch.setattr(FakeSource, "identity", lambda source: asked.append(1) or answer(source))
    run(FakeSource((10, 7)), FakeEncoder(), tmp_path, workers=0)
    assert len(asked) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_is_in_use_no_longer_than_its_cache(tmp_path, workers):
    """Not until the garbage collector comes by: `cache gc` would pass it over, and descriptors add up."""
    gc.collect()
    gc.disable()
    try:
        report = run(FakeSource((10, 7)), FakeEncoder(), tmp_path, workers=workers)
        path = report.cache.path
        with exclusive_use(path) as nobody:
            assert not nobody
        del report
        with exclusive_use(path) as nobody:
            assert nobody
    finally:
        gc.enable()


def test_a_complete_cache_returns_at_once(tmp_path, no_workers):
    run(FakeSource((9,)), FakeEncoder(), tmp_path, workers=0)
    encoder = FakeEncoder()

    report = run(FakeSource((9,)), encoder, tmp_path)

    assert (report.encoded, report.reused, encoder.calls) == (0, 9, [])


def test_progress_may_be_switched_on_with_true(tmp_path):
    assert len(precompute(FakeSource((9,)), FakeEncoder(), tmp_path, name="c", workers=0, progress=True)) == 9


@pytest.mark.parametrize("place", ["{}/caches", "file://{}/caches"], ids=["path", "address"])
def test_overwrite_encodes_again(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)  # where an address has its mirror
    cache_dir = place.format(tmp_path)
    run(FakeSource((9,)), FakeEncoder(), cache_dir, workers=0)
    before = {*(tmp_path / "caches").glob("c/*/shard-*")}

    report = run(FakeSource((9,)), FakeEncoder(), cache_dir, workers=0, overwrite=True)

    assert (report.encoded, report.records) == (9, 9)
    assert before.isdisjoint((tmp_path / "caches").glob("c/*/shard-*"))


def test_added_parts_are_encoded_and_the_rest_adopted(tmp_path):
    run(FakeSource((9,)), FakeEncoder(), tmp_path, workers=0)

    report = run(FakeSource((9, 6)), FakeEncoder(), tmp_path, workers=0)

    assert (report.adopted, report.encoded, report.records) == (9, 6, 15)


def test_samples_are_stored_as_they_are_without_an_encoder(tmp_path):
    caches = [run(FakeSource((9,)), None, tmp_path, name=f"r{r}", workers=r).cache for r in (0, 2)]

    for cache in caches:
        for number in range(9):
            assert np.array_equal(cache[number]["data"].numpy(), sample_values(number, 6, 5))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_quarantined_and_everything_else_is_stored(tmp_path, workers):
    source = FakeSource((12,), faults={1: "nan", 5: "shape", 9: "raise"})

    report = run(source, FakeEncoder(), tmp_path, workers=workers)

    failures = dict(report.cache.quarantined)
    assert {n: (f.stage, f.attempts, f.kind) for n, f in failures.items()} == {
        1: ("check", 1, "sample"),
        5: ("check", 1, "sample"),
        9: ("read", 2, "sample"),
    }
    assert "part0.h5: OSError: truncated at sample 9" in failures[9].error
    assert report.records == 9
    with pytest.raises(MissingRecordError, match="truncated"):
        report.cache[9]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_read_at_once_are_the_same_and_bad_ones_are_named(tmp_path, workers):
    """Groups of 4: three hold a bad one, and are read again one by one; the others are not."""
    faults = {5: "shape", 9: "raise", 14: "nan"}
    single = run(FakeSource((22,), faults=faults), FakeEncoder(), tmp_path, name="s", workers=workers)
    source = ManySource((22,), faults=faults)
    many = run(source, FakeEncoder(), tmp_path, name="m", workers=workers)

    assert_same(records(many.cache), records(single.cache))
    stages = [
        {n: (f.stage, f.error) for n, f in dict(report.cache.quarantined).items()}
        for report in (many, single)
    ]
    assert stages[0] == stages[1]
    assert stages[0].keys() == faults.keys()
    if not workers:
        alone = {asked for asked in source.asked if isinstance(asked, int)}
        assert alone == {*range(4, 16)}
        assert {range(4), range(16, 20), range(20, 22)} <= {*source.asked} - alone


def test_a_passing_error_is_retried_within_the_run(tmp_path):
    source = FakeSource((8,), faults={2: "raise-once"}, marker=str(tmp_path))

    report = run(source, FakeEncoder(), tmp_path / "c")

    assert (report.records, report.quarantined) == (8, 0)


def test_a_passing_failure_is_tried_again_by_the_next_run_and_the_samples_own_is_not(tmp_path):
    faults = {1: "eio", 6: "raise"}
    first = run(FakeSource((8,), faults=faults), FakeEncoder(), tmp_path)
    assert {n: f.kind for n, f in first.cache.quarantined.items()} == {1: "transient", 6: "sample"}

    second = run(FakeSource((8,)), FakeEncoder(), tmp_path)

    assert (second.encoded, second.records, second.quarantined) == (1, 7, 1)


def test_nan_is_stored_when_allowed(tmp_path):
    report = run(FakeSource((8,), faults={1: "nan"}), FakeEncoder(), tmp_path, nan="allow")

    assert (report.records, report.quarantined) == (8, 0)
    assert bool(report.cache[1]["latent"].isnan().any())


@pytest.mark.parametrize("count", [8, 80])  # of 80 the first 64 end the run
def test_samples_set_aside_for_nan_are_stored_by_what_the_error_says(tmp_path, count):
    def again(**changes):
        source = FakeSource((count,), faults=dict.fromkeys(range(count), "nan"))
        return run(source, FakeEncoder(), tmp_path, workers=0, **{"max_quarantined": 0.0, **changes})

    with pytest.raises(IncompleteError) as raised:
        again()

    hints = dict(re.findall(r"\b(nan|retry_quarantined)=('allow'|True)", str(raised.value)))
    assert again(**{name: ast.literal_eval(value) for name, value in hints.items()}).records == count
    assert {"precompute.nan=allow", "precompute.retry_quarantined=true"} <= {
        word.strip(",.") for word in in_settings(raised.value).split()
    }


def test_the_error_says_nothing_of_allowing_nan_where_it_is_allowed(tmp_path):
    with pytest.raises(IncompleteError) as raised:
        run(FakeSource((8,), faults={3: "shape"}), None, tmp_path, workers=0, max_quarantined=0, nan="allow")

    assert "nan=" not in str(raised.value)


def test_an_error_of_many_samples_is_listed_once(tmp_path):
    faults = dict.fromkeys((2, 3, 5, 7), "nan")
    with pytest.raises(IncompleteError) as raised:
        run(FakeSource((8,), faults=faults), None, tmp_path, workers=0, max_quarantined=0)

    assert str(raised.value).count("part0.h5") == 1
    assert "2, 3, 5, 7" in str(raised.value)


def test_a_record_that_comes_out_nan_is_quarantined(tmp_path):
    report = run(FakeSource((8,)), FakeEncoder(nan_at=6), tmp_path, workers=0)

    assert {n: f.stage for n, f in report.cache.quarantined.items()} == {6: "encode"}
    assert "part0.h5" in report.cache.quarantined[6].error


def test_too_many_quarantined_fails_after_everything_else_is_stored(tmp_path):
    source = FakeSource((50,), faults={7: "raise", 8: "nan"})

    with pytest.raises(IncompleteError) as caught:
        run(source, FakeEncoder(), tmp_path, max_quarantined=0.01)

    assert caught.value.exit_code == 4
    for text in (
        "48 of 50",
        "sample 7 (read",
        "truncated at sample 7",
        "sample 8 (check",
        "retry_quarantined=True",
        "max_quarantined=0.",
    ):
        assert text in str(caught.value)
    cache = open_cache(tmp_path / "c")
    assert len(cache) == 48
    assert cache.complete
    with pytest.raises(IncompleteError):
        run(source, FakeEncoder(), tmp_path, max_quarantined=0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_whose_first_samples_all_fail_ends_with_their_error(tmp_path, workers):
    source = FakeSource((3000,), faults=dict.fromkeys(range(3000), "shape"))

    with pytest.raises(IncompleteError, match="expected float32") as caught:
        run(source, FakeEncoder(), tmp_path, workers=workers, max_quarantined=0.01)

    assert caught.value.exit_code == 4
    assert "max_quarantined" in str(caught.value)
    assert "precompute.retry_quarantined=true" in in_settings(caught.value)
    (failures,) = tmp_path.glob("c/*/failures-*.jsonl")
    assert 30 < len(failures.read_text().splitlines()) < 600


@pytest.mark.parametrize(
    ("bad", "allowed"), [(range(200), 0.9), (range(1, 200), 0.01)], ids=["allowed", "one-is-good"]
)
def test_a_run_goes_on_past_bad_samples_that_are_allowed_or_not_all(tmp_path, bad, allowed):
    source = FakeSource((300,), faults=dict.fromkeys(bad, "shape"))

    with suppress(IncompleteError):
        run(source, FakeEncoder(), tmp_path, workers=0, max_quarantined=allowed)

    assert len(open_cache(tmp_path / "c")) == 300 - len(bad)


class Picky(torch.utils.data.Dataset):
    """Every tenth item cannot be read."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index % 10 == 7:
            raise ValueError("torn")
        return torch.ones(2) * index


@pytest.mark.parametrize(("way", "workers"), [("split", 1), ("subset", 0)])
def test_a_quarantined_sample_is_named_by_the_datasets_own_index(tmp_path, way, workers):
    if way == "split":
        source = SplitOf(TorchSource(Picky(), version="1"), "val", splits={"train": 0.5, "val": 0.5})
        own = [int(key) for key in source.keys()]  # noqa: SIM118 - not a dictionary
    else:
        own = list(range(99, 39, -1))
        source = TorchSource(torch.utils.data.Subset(Picky(), own))

    cache = precompute(source, None, tmp_path, name="c", workers=workers, max_quarantined=0.9)

    bad = {number: index for number, index in enumerate(own) if index % 10 == 7}
    assert cache.quarantined.keys() == bad.keys()
    for number, index in bad.items():
        assert re.search(rf"\b{index}\b.*torn", cache.quarantined[number].error)


def test_the_encoders_error_on_one_sample_costs_that_sample_alone(tmp_path):
    whole = run(FakeSource((12,)), FakeEncoder(), tmp_path / "a", workers=0)

    report = run(FakeSource((12,)), FakeEncoder(raises=6), tmp_path / "b", workers=0)

    assert {n: f.stage for n, f in report.cache.quarantined.items()} == {6: "encode"}
    kept = records(whole.cache)
    del kept[6]
    assert_same(kept, records(report.cache))


def test_an_encoder_that_fails_on_anything_ends_the_run(tmp_path):
    encoder = FakeEncoder()
    encoder.weight = torch.zeros(4, 3)

    with pytest.raises(EncoderError, match="not the data"):
        run(FakeSource((12,)), encoder, tmp_path, workers=0)


def test_an_encoder_that_returns_what_it_did_not_declare_ends_the_run(tmp_path):
    encoder = FakeEncoder()
    encoder.weight = torch.zeros(5, 4)

    with pytest.raises(EncoderError, match=r"\(4, 6, 4\), its schema says float32 \(6, 3\)"):
        run(FakeSource((12,)), encoder, tmp_path, workers=0)


def test_out_of_memory_halves_inside_the_group_and_marks_its_records(tmp_path):
    whole = run(FakeSource((6,)), FakeEncoder(), tmp_path / "a", workers=0)
    encoder = FakeEncoder(oom_above=2)

    report = run(FakeSource((6,)), encoder, tmp_path / "b", workers=0)

    assert_same(records(whole.cache), records(report.cache))
    assert (2, 6, 5) in encoder.calls
    assert report.cache.shard(0).marked.tolist() == list(range(6))
    assert whole.cache.shard(0).marked.tolist() == []


def test_no_memory_for_one_sample_is_an_error_with_advice(tmp_path):
    with pytest.raises(ResourceError, match="single sample"):
        run(FakeSource((6,)), FakeEncoder(oom_above=0), tmp_path, workers=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_samples_go_one_by_one(tmp_path, workers):
    encoder = FakeEncoder(samples=1)

    cache = run(RaggedSource((9,)), encoder, tmp_path, workers=workers).cache

    for number in range(9):
        expected = torch.from_numpy(sample_values(number, 3 + number % 4, 5)) @ encoder.weight
        assert torch.allclose(cache[number]["latent"], expected, atol=1e-6)
    assert {shape[0] for shape in encoder.calls} == {1}


@pytest.mark.parametrize("memory_bytes", [1024**3, 4096 * 4])
def test_long_samples_are_cut_over_time_in_chunks_of_one_length(tmp_path, memory_bytes):
    """With little memory a slot holds one chunk, so a sample crosses in three; the bits are the same."""
    encoders = [FakeEncoder(samples=1, steps=400, by_shape=True) for _ in range(2)]
    settings = {"memory_bytes": memory_bytes}
    caches = [
        run(FakeSource((5,), steps=1000), encoder, tmp_path, name=f"r{r}", workers=r, **settings).cache
        for r, encoder in zip((0, 2), encoders, strict=True)
    ]

    assert_same(records(caches[0]), records(caches[1]))
    for encoder in encoders:
        assert set(encoder.calls) == {(1, 400, 5)}
        assert len(encoder.calls) == 15 + 1, "the first call is made twice"
    expected = torch.from_numpy(sample_values(4, 1000, 5)) @ encoders[0].weight * (1 + 0.125 + 100)
    assert torch.allclose(caches[0][4]["latent"], expected, rtol=1e-4, atol=1e-3)


def test_an_encoder_that_loses_time_steps_is_refused(tmp_path):
    """The rows that it did not give would be whatever was in memory."""
    encoder = FakeEncoder(samples=1, steps=400)
    encode = encoder.encode
    encoder.encode = lambda batch: {**encode(batch), "latent": encode(batch)["latent"][:, :-1]}

    with pytest.raises(EncoderError, match="latent"):
        run(FakeSource((5,), steps=1000), encoder, tmp_path, workers=0)


def test_what_an_earlier_run_allowed_is_refused_by_stricter_settings(tmp_path):
    def again(**changes):
        return run(FakeSource((6,)), FakeEncoder(nan_at=2), tmp_path, workers=0, **changes)

    again(nan="allow")

    with pytest.raises(RecordError, match="NaN"):
        again(nan="reject")
    run(FakeSource((7,)), FakeEncoder(), tmp_path, workers=0, dtype="float16")
    with pytest.raises(RecordError, match="max_error"):
        run(FakeSource((7,)), FakeEncoder(), tmp_path, workers=0, dtype="float16", max_error=1e-9)


class WrappingSource(FakeSource):
    """Says what failed as sources do: an error of its own, the system's behind it."""

    def read(self, number, start=None, stop=None):
        if number == 3:
            raise SourceError("x.h5: unreadable") from OSError(5, "Input/output error")
        return super().read(number, start, stop)


def test_a_failure_of_the_storage_is_passing_although_the_source_wraps_it(tmp_path):
    cache = run(WrappingSource((6,)), FakeEncoder(), tmp_path, workers=0, max_quarantined=0.5).cache

    assert cache.quarantined[3].kind == "transient"


def test_overwrite_does_not_take_records_from_a_sibling(tmp_path):
    run(FakeSource((6,)), FakeEncoder(), tmp_path, workers=0)
    run(FakeSource((6, 4)), FakeEncoder(), tmp_path, workers=0)

    report = run(FakeSource((6, 4)), FakeEncoder(), tmp_path, workers=0, overwrite=True)

    assert (report.encoded, report.adopted) == (10, 0)


def test_a_group_larger_than_the_memory_allowed_crosses_in_pieces(tmp_path):
    """Slots are 1 MiB, a group is 4 x 1.9 MiB."""
    source = FakeSource((6,), steps=100_000, faults={2: "raise"})

    a = run(source, None, tmp_path, name="a", workers=1, memory_bytes=2 * 1024**2).cache
    b = run(source, None, tmp_path, name="b", workers=0).cache

    assert_same(records(a), records(b))
    assert a.indices.tolist() == [0, 1, 3, 4, 5]


def test_a_source_that_cannot_be_pickled_says_what_to_do(tmp_path):
    source = FakeSource((6,))
    source.lock = threading.Lock()

    with pytest.raises(SourceError, match="workers=0"):
        run(source, FakeEncoder(), tmp_path)


def test_a_value_too_large_for_the_storage_dtype_names_the_sample(tmp_path):
    encoder = FakeEncoder()
    encoder.weight = encoder.weight * 1e6

    with pytest.raises(RecordError, match="sample"):
        run(FakeSource((6,)), encoder, tmp_path, workers=0, dtype="float16")


def test_a_full_disk_is_seen_before_the_first_sample(tmp_path, monkeypatch, no_workers):
    space = namedtuple("space", "cpus disk_bytes disk_inodes")
    monkeypatch.setattr(
        sys.modules["stoker.precompute.engine"], "probe", lambda **_: space(2.0, 1000, 100_000)
    )

    with pytest.raises(ResourceError, match=r"1000 B free, 6 records need"):
        run(FakeSource((6,)), FakeEncoder(), tmp_path)


def test_too_few_inodes_are_seen_before_the_first_sample(tmp_path, monkeypatch, no_workers):
    space = namedtuple("space", "cpus disk_bytes disk_inodes")
    monkeypatch.setattr(sys.modules["stoker.precompute.engine"], "probe", lambda **_: space(2.0, 10**12, 3))

    with pytest.raises(ResourceError, match="3 more files"):
        run(FakeSource((6,)), FakeEncoder(), tmp_path)


def test_an_empty_source_gives_an_empty_complete_cache(tmp_path):
    report = run(FakeSource((0,)), FakeEncoder(), tmp_path)

    assert (report.records, report.cache.complete) == (0, True)


def test_the_threads_of_torch_are_as_before(tmp_path):
    before = torch.get_num_threads()

    run(FakeSource((6,)), FakeEncoder(), tmp_path, workers=0)

    assert torch.get_num_threads() == before


def test_the_face_returns_a_complete_cache_that_says_why_a_sample_is_not_in_it(tmp_path):
    source = FakeSource((9,), faults={4: "eio"})

    cache = precompute(source, FakeEncoder(), tmp_path, name="c", max_quarantined=0.5, progress=None)

    assert cache.complete
    with pytest.raises(MissingRecordError, match=r"sample 4 was quarantined.*Input/output error"):
        cache[4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": -1},
        {"max_quarantined": 2},
        {"memory_bytes": 0},
        {"nan": "alow"},
        {"identity": "fast"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError):
        PrecomputeSettings(**wrong)


def test_two_threads_fill_one_cache_once(tmp_path):
    """The second waits for the claim and finds the cache complete."""
    reports = []
    source = FakeSource((24,), delay_s=0.02)
    threads = [
        threading.Thread(target=lambda: reports.append(run(source, FakeEncoder(), tmp_path, workers=1)))
        for _ in range(2)
    ]

    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)

    assert sorted(report.encoded for report in reports) == [0, 24]
    assert not list(Path(tmp_path).rglob("*.txt"))


def test_two_groups_are_read_by_two_workers(tmp_path):
    (tmp_path / "notes").mkdir()
    source = MeetingSource((8,), marker=tmp_path / "notes")

    run(source, FakeEncoder(), tmp_path, workers=2)

    assert len(source.workers()) == 2
    assert len(list((tmp_path / "notes").iterdir())) == 8


def test_a_log_ends_with_what_the_run_came_to(tmp_path):
    out = io.StringIO()

    run(FakeSource((20,)), FakeEncoder(), tmp_path, workers=0, progress=LineProgress(out, first_s=0))

    lines = out.getvalue().splitlines()
    assert "/20 " in lines[-2]
    assert lines[-1].startswith("c  20 of 20 encoded, 0:00:")


def test_a_log_ends_with_what_this_run_encoded_and_what_was_there(tmp_path):
    run(FakeSource((20,), faults=dict.fromkeys((3, 9), "shape")), None, tmp_path, workers=0)
    out = io.StringIO()

    settings = {"retry_quarantined": True, "progress": LineProgress(out, first_s=0)}
    run(FakeSource((20,)), None, tmp_path, workers=0, **settings)

    assert out.getvalue().splitlines()[-1].startswith("c  2 of 20 encoded, 18 reused, 0:00:")


def test_a_run_too_short_for_a_line_says_nothing(tmp_path):
    out = io.StringIO()

    run(FakeSource((20,)), FakeEncoder(), tmp_path, workers=1, progress=LineProgress(out, first_s=60))

    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("workers", "encoded", "started"),
    [(1, True, [LIGHT, TORCH]), (1, False, [LIGHT]), (0, True, [TORCH]), (0, False, [])],
)
def test_what_children_are_forked_from_starts_while_a_large_file_is_digested(
    tmp_path, monkeypatch, workers, encoded, started
):
    np.save(tmp_path / "x.npy", np.zeros((4, 8), np.float32))
    source = ArraySource(tmp_path / "x.npy", layout="rows")
    linear = stoker.ModuleEncoder(torch.nn.Linear(8, 2), field="data", output="y", version="1")
    encoder = linear if encoded else None
    happened = []
    digest = recipe._digest
    monkeypatch.setattr(recipe, "LARGE_BYTES", 0)
    monkeypatch.setattr(recipe, "SETTLED_S", -1.0)
    monkeypatch.setattr(recipe, "_digest", lambda *a, **k: happened.append("digest") or digest(*a, **k))
    monkeypatch.setattr(engine, "preload", happened.append)

    run(source, encoder, tmp_path / "c", workers=workers)
    assert happened == [*started, "digest"]

    run(source, encoder, tmp_path / "c", workers=workers)
    assert happened == [*started, "digest"], "a known file starts nothing"


def test_an_engine_that_encodes_elsewhere_starts_nothing_here(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.zeros((4, 8), np.float32))
    source = ArraySource(tmp_path / "x.npy", layout="rows")
    happened = []
    monkeypatch.setattr(recipe, "LARGE_BYTES", 0)
    monkeypatch.setattr(engine, "preload", happened.append)

    precompute(source, None, tmp_path / "c", name="c", workers=1, progress=None, engine=encode_here)

    assert len(open_cache(tmp_path / "c" / "c")) == 4
    assert not happened
