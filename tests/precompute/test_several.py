"""Several caches in one pass over the source: those of separate runs, and each sample read once."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import stoker
from stoker.errors import ConfigError, EncoderError, IncompleteError, Interrupted
from stoker.precompute import PrecomputeReport, PrecomputeSettings
from stoker.precompute.engine import CacheWish, run_together
from stoker.precompute.progress import LineProgress, Snapshot
from stoker.store import open_cache
from tests.kit import forked as subprocess
from tests.precompute import fill_several
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource, RaggedSource
from tests.precompute.fill_several import Noted
from tests.precompute.ragged_once import PlacedEncoder, RaggedData
from tests.precompute.test_engine import assert_same, records
from tests.precompute.test_engine import run as run_alone
from tests.precompute.test_kill import wait_until

ROOT = Path(__file__).parents[2]


def fill(source: Any, encoders: dict[str, Any], folder: Path, **given: Any) -> dict[str, PrecomputeReport]:
    """The caches by name, with reports."""
    how = PrecomputeSettings(**{"workers": 0, "progress": None, "max_quarantined": 0.9, **given})
    wishes = [CacheWish(name=name, encoder=one, settings=how) for name, one in encoders.items()]
    return dict(zip(encoders, run_together(source, wishes, folder), strict=True))


def reads_of(path: Path) -> list[int]:
    """Samples that were read, in order."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check_alone(
    reports: dict[str, PrecomputeReport], encoders: dict[str, Any], source: Any, **given: Any
) -> None:
    """The caches have the fingerprints and bits that a run for each of them alone gives."""
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports.items():
            alone = run_alone(source, encoders[name], Path(folder), name=name, workers=0)
            assert report.fingerprint == alone.fingerprint
            assert [*report.cache.quarantined] == [*alone.cache.quarantined]
            assert_same(records(report.cache), records(alone.cache))


# ----------------------------------------------------------------------------------------------------------
# The same records.


@settings(max_examples=6, deadline=None)
@given(
    counts=st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    cut=st.booleans(),
)
def test_several_caches_have_the_bits_of_runs_alone_and_each_sample_is_read_once(
    counts: list[int], sizes: list[int], cut: bool
) -> None:
    """Encoders show the shape of a call; their batches end at other samples, and parts end within them."""
    encoders: dict[str, Any] = {str(i): FakeEncoder(samples=n, by_shape=True) for i, n in enumerate(sizes)}
    encoders |= {"raw": None} | ({"cut": FakeEncoder(samples=1, steps=4, by_shape=True)} if cut else {})
    with tempfile.TemporaryDirectory() as folder:
        source = Noted(counts, marker=f"{folder}/reads")
        reports = fill(source, encoders, Path(folder, "caches"))

        assert sorted(reads_of(Path(folder, "reads"))) == [*range(sum(counts))]
        check_alone(reports, encoders, FakeSource(counts))


@pytest.mark.parametrize(("workers", "in_child"), [(None, False), (2, False), (2, True)])
def test_workers_and_encoder_processes_change_no_bit_and_read_once(
    tmp_path: Path, workers: int | None, in_child: bool
) -> None:
    encoders = fill_several.encoders()
    source = Noted((50, 31), run=7, marker=str(tmp_path / "reads"))
    reports = fill(source, encoders, tmp_path / "caches", workers=workers, always_in_child=in_child)

    assert Counter(reads_of(tmp_path / "reads")) == Counter(range(81))
    assert [report.encoded for report in reports.values()] == [81, 81]
    assert not in_child or not any(one.calls for one in encoders.values())
    check_alone(reports, encoders, FakeSource((50, 31)))


def test_samples_of_differing_length_are_shared_too(tmp_path: Path) -> None:
    encoders = {name: FakeEncoder(samples=1, by_shape=True, ragged=True) for name in "ab"} | {"raw": None}
    for workers in (0, 1):
        reports = fill(RaggedSource((9,)), encoders, tmp_path / str(workers), workers=workers)
        check_alone(reports, encoders, RaggedSource((9,)))


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_samples_that_one_encoder_or_all_gather_by_length_are_shared_too(
    tmp_path: Path, workers: int | None
) -> None:
    encoders = {"a": PlacedEncoder(), "raw": None, "b": PlacedEncoder()}
    for some in (encoders, {"raw": None, "a": encoders["a"]}, {"a": encoders["a"], "raw": None}):
        folder = tmp_path / "_".join(some)
        reports = fill(RaggedData((40, 63)), some, folder, workers=workers)
        check_alone(reports, some, RaggedData((40, 63)))


class Cracking(FakeEncoder):
    """Its process is killed at sample 17, once."""

    def __init__(self, marker: Path) -> None:
        super().__init__(samples=4, by_shape=True)
        self.marker = marker

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if bool((batch["nu"] == np.float32(17) / np.float32(7)).any()) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(batch)


def test_an_encoder_process_that_is_lost_costs_no_sample_that_is_read_again(tmp_path: Path) -> None:
    encoders = {"a": FakeEncoder(samples=6, by_shape=True), "b": Cracking(tmp_path / "killed")}
    source = Noted((60,), marker=str(tmp_path / "reads"))
    reports = fill(source, encoders, tmp_path / "caches", workers=1, always_in_child=True)

    assert (tmp_path / "killed").exists()
    assert "encoder-0-cpu-1" in "".join(path.name for path in tmp_path.glob("caches/.workers/*-b.txt"))
    assert Counter(reads_of(tmp_path / "reads")) == Counter(range(60))
    check_alone(reports, encoders, FakeSource((60,)))


# ----------------------------------------------------------------------------------------------------------
# Only what is missing.


def test_a_cache_that_is_complete_is_not_encoded_again(tmp_path: Path) -> None:
    """As with another text encoder: only the text is new."""
    first = FakeEncoder(samples=4, by_shape=True)
    before = run_alone(FakeSource((20,)), first, tmp_path, name="a", workers=0).cache
    shards = {path: path.stat() for path in before.path.glob("shard-*")}
    first.calls.clear()
    encoders = {"a": first, "b": FakeEncoder(samples=6, by_shape=True), "c": FakeEncoder(samples=5)}

    reports = fill(FakeSource((20,)), encoders, tmp_path)

    assert [report.encoded for report in reports.values()] == [0, 20, 20]
    assert not any(shape[0] == 4 for shape in first.calls)
    assert {path: path.stat() for path in before.path.glob("shard-*")} == shards
    check_alone(reports, encoders, FakeSource((20,)))
    assert [report.encoded for report in fill(FakeSource((20,)), encoders, tmp_path).values()] == [0, 0, 0]
    again = fill(FakeSource((20,)), encoders, tmp_path, overwrite=True)
    assert [report.encoded for report in again.values()] == [20, 20, 20]


def test_what_each_cache_lacks_is_encoded_and_nothing_else(tmp_path: Path) -> None:
    """Other samples are missing in each; those that neither needs are not read."""
    encoders = {"a": FakeEncoder(samples=4, by_shape=True), "b": FakeEncoder(samples=6, by_shape=True)}
    counts = (12, 12, 12)
    fill(FakeSource(counts), encoders, tmp_path)
    for name, part in (("a", 0), ("b", 2)):
        cache = open_cache(tmp_path / name)
        for shard in cache.index.shards:
            if shard.part == part:
                (cache.path / shard.file).unlink()

    source = Noted(counts, marker=str(tmp_path / "reads"))
    reports = fill(source, encoders, tmp_path)

    assert [report.encoded for report in reports.values()] == [12, 12]
    assert sorted(reads_of(tmp_path / "reads")) == [*range(12), *range(24, 36)]
    check_alone(reports, encoders, FakeSource(counts))


def test_samples_that_another_cache_knows_are_copied(tmp_path: Path) -> None:
    """A part that is cut in two holds the same samples; each cache finds its own records again."""
    encoders = {"a": FakeEncoder(samples=4, by_shape=True), "b": FakeEncoder(samples=6, by_shape=True)}
    fill(FakeSource((24,)), encoders, tmp_path)
    reports = fill(FakeSource((12, 12)), encoders, tmp_path)

    assert [(report.encoded, report.adopted) for report in reports.values()] == [(0, 24), (0, 24)]
    check_alone(reports, encoders, FakeSource((12, 12)))


# ----------------------------------------------------------------------------------------------------------
# A quarantine for each cache.


@pytest.mark.parametrize("in_child", [False, True])
def test_a_sample_on_which_one_encoder_fails_is_stored_in_the_other_cache(
    tmp_path: Path, in_child: bool
) -> None:
    encoders = {"a": FakeEncoder(samples=4), "b": FakeEncoder(samples=6, raises=9)}
    reports = fill(FakeSource((20,)), encoders, tmp_path, workers=1, always_in_child=in_child)

    assert [report.quarantined for report in reports.values()] == [0, 1]
    assert reports["b"].cache.quarantined[9].stage == "encode"
    assert 9 in records(reports["a"].cache)
    check_alone(reports, encoders, FakeSource((20,)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_quarantined_in_every_cache(tmp_path: Path, workers: int) -> None:
    encoders = {"a": FakeEncoder(samples=4), "b": FakeEncoder(samples=6), "raw": None}
    source = FakeSource((20,), faults={7: "raise", 8: "nan"})
    reports = fill(source, encoders, tmp_path, workers=workers)

    for report in reports.values():
        assert [*report.cache.quarantined] == [7, 8]
        assert report.cache.quarantined[7].attempts == 2
    check_alone(reports, encoders, source)


def test_a_group_none_of_whose_samples_can_be_read_holds_up_no_cache(tmp_path: Path) -> None:
    """Batches of three and four: one batch is complete only because the rest of it will never come."""
    source = FakeSource((12,), faults=dict.fromkeys(range(4, 8), "raise"))
    encoders = {"a": FakeEncoder(samples=4, by_shape=True), "b": FakeEncoder(samples=3, by_shape=True)}
    reports = fill(source, encoders, tmp_path)

    assert [report.records for report in reports.values()] == [8, 8]
    check_alone(reports, encoders, source)


def test_a_sample_set_aside_in_one_cache_is_tried_for_another(tmp_path: Path) -> None:
    broken, sound = FakeSource((20,), faults={7: "raise"}), FakeSource((20,))
    encoders = {"a": FakeEncoder(samples=4), "b": FakeEncoder(samples=6)}
    run_alone(broken, encoders["a"], tmp_path, name="a", workers=0)
    for shard in (tmp_path / "a").glob("*/shard-*"):
        shard.unlink()  # so that both lack something
    reports = fill(sound, encoders, tmp_path)

    assert [*reports["a"].cache.quarantined] == [7]
    assert not reports["b"].cache.quarantined
    check_alone({"b": reports["b"]}, encoders, sound)
    again = fill(sound, encoders, tmp_path, retry_quarantined=True)
    assert [(report.encoded, report.records) for report in again.values()] == [(1, 20), (0, 20)]


class Watching(FakeEncoder):
    """Notes what it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given: list[dict[str, torch.Tensor]] = []

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.given.append({name: value.clone() for name, value in batch.items()})
        return super().encode(batch)


def test_an_encoder_is_given_zeros_for_samples_that_its_cache_has_set_aside(tmp_path: Path) -> None:
    """And at the end of a part: nothing of a batch before, whose memory is used again."""
    run_alone(FakeSource((21,)), FakeEncoder(samples=6, raises=9), tmp_path, name="b", workers=0)
    (shard,) = (tmp_path / "b").glob("*/shard-*")
    shard.unlink()
    watching = Watching(samples=6)
    fill(FakeSource((21,)), {"a": Watching(samples=4), "b": watching}, tmp_path)

    numbers = [sorted(round(float(nu) * 7) for nu in batch["nu"]) for batch in watching.given[-4:]]
    assert numbers == [[*range(6)], [0, 6, 7, 8, 10, 11], [*range(12, 18)], [0, 0, 0, 18, 19, 20]]
    assert not any(batch["data"][batch["nu"] == 0][1:].any() for batch in watching.given[-3:])


def test_too_many_failures_in_one_cache_are_an_error_after_all_are_stored(tmp_path: Path) -> None:
    encoders = {"a": FakeEncoder(samples=4), "b": FakeEncoder(samples=6, raises=9)}
    with pytest.raises(IncompleteError, match="19 of 20 samples stored, 1 quarantined"):
        fill(FakeSource((20,)), encoders, tmp_path, max_quarantined=0.0)
    assert open_cache(tmp_path / "a").complete
    assert len(open_cache(tmp_path / "b")) == 19


def test_an_encoder_that_fails_on_anything_leaves_what_the_others_stored(tmp_path: Path) -> None:
    class Broken(FakeEncoder):
        def encode(self, batch):
            raise ValueError("never works")

    with pytest.raises(EncoderError, match="never works"):
        fill(FakeSource((20,)), {"a": FakeEncoder(), "b": Broken()}, tmp_path)
    reports = fill(FakeSource((20,)), {"a": FakeEncoder(), "b": FakeEncoder(samples=6)}, tmp_path)
    assert reports["a"].encoded < 20 or reports["a"].reused == 0
    check_alone(reports, {"a": FakeEncoder(), "b": FakeEncoder(samples=6)}, FakeSource((20,)))


# ----------------------------------------------------------------------------------------------------------
# Kills, signals, other processes.


@pytest.mark.chaos
def test_killed_at_ten_random_moments_and_resumed_no_record_differs(tmp_path: Path) -> None:
    chance, samples = random.Random(0), 300
    caches, reads = tmp_path / "caches", tmp_path / "reads"

    def start(delay_s: float) -> Any:
        given = (caches, samples, chance.choice((0, 1)), delay_s, reads)
        command = [sys.executable, "-m", "tests.precompute.fill_several", *map(str, given)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for _ in range(10):
        process, before = start(0.02), len(reads_of(reads))
        wait_until(lambda n=before: len(reads_of(reads)) > n)
        time.sleep(chance.uniform(0, 0.6))
        process.kill()
        process.communicate()
    before = len(reads_of(reads))
    process = start(0)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert out.split() == [str(samples)] * 2
    assert 0 < len(reads_of(reads)) - before < samples, "nothing survived, so the test proves nothing"
    encoders = fill_several.encoders()
    with tempfile.TemporaryDirectory() as folder:
        for name, one in encoders.items():
            alone = run_alone(FakeSource((samples,)), one, Path(folder), name=name, workers=0)
            assert_same(records(open_cache(caches / f"c_{name}")), records(alone.cache))


def test_a_signal_commits_what_is_encoded_in_every_cache(tmp_path: Path) -> None:
    encoders = {"a": FakeEncoder(samples=4, by_shape=True), "b": FakeEncoder(samples=6, by_shape=True)}

    class Asking(FakeSource):
        def read(self, number, start=None, stop=None):
            if number == 30:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().read(number, start, stop)

    with pytest.raises(Interrupted, match=r"of 120 records are stored"):
        fill(Asking((60,)), encoders, tmp_path)
    stored = [len(open_cache(tmp_path / name, require_complete=False)) for name in "ab"]
    assert all(20 <= count <= 30 for count in stored)
    reports = fill(FakeSource((60,)), encoders, tmp_path)
    assert [report.encoded for report in reports.values()] == [60 - count for count in stored]
    check_alone(reports, encoders, FakeSource((60,)))


def test_calls_that_name_the_caches_in_another_order_do_not_wait_for_each_other(tmp_path: Path) -> None:
    encoders = {name: FakeEncoder(samples=4 + i, by_shape=True) for i, name in enumerate("abc")}
    orders = ["abc", "cba", "bac", "b", "ca"]
    together = threading.Barrier(len(orders))

    def one(order: str) -> dict[str, PrecomputeReport]:
        together.wait(30)
        chosen = {name: FakeEncoder(samples=4 + "abc".index(name), by_shape=True) for name in order}
        return fill(FakeSource((30,), delay_s=0.005), chosen, tmp_path)

    with ThreadPoolExecutor(len(orders)) as pool:
        done = list(pool.map(one, orders, timeout=60))

    encoded = Counter[str]()
    for reports in done:
        encoded.update({name: report.encoded for name, report in reports.items()})
        check_alone(reports, encoders, FakeSource((30,)))
    assert encoded == Counter(dict.fromkeys("abc", 30))


def test_the_progress_display_names_the_caches_and_counts_records_of_all(tmp_path: Path) -> None:
    seen: list[Snapshot] = []

    class Sink:
        interval_s = 0.0

        def update(self, snapshot: Snapshot) -> None:
            seen.append(snapshot)

        def note(self, text: str) -> None:
            pass

        def close(self) -> None:
            pass

    encoders = {"a": FakeEncoder(samples=4), "b": FakeEncoder(samples=6, raises=9)}
    fill(FakeSource((20,)), encoders, tmp_path, progress=Sink())

    assert {snapshot.name for snapshot in seen} == {"a, b"}
    assert (seen[-1].done, seen[-1].total, seen[-1].encoded, seen[-1].quarantined) == (40, 40, 39, 1)


# ----------------------------------------------------------------------------------------------------------
# The call of users.


def pictures(count: int = 12) -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.rand((3, 8, 8), generator=chance),
            "tokens": torch.randint(0, 50, (5,), generator=chance),
            "label": torch.tensor(number % 3),
        }
        for number in range(count)
    ]


def models() -> tuple[stoker.ModuleEncoder, stoker.ModuleEncoder]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae, text = torch.nn.Conv2d(3, 4, 2, 2), torch.nn.Embedding(50, 6)
    for module in (vae, text):
        module.eval().requires_grad_(False)
    return stoker.ModuleEncoder(vae, field="image"), stoker.ModuleEncoder(text, field="tokens")


def test_a_mapping_of_encoders_gives_the_caches_that_calls_alone_give(tmp_path: Path) -> None:
    vae, text = models()
    caches = stoker.precompute(
        pictures(), {"latents": vae, "text": text, "labels": ["label"]}, tmp_path, name="cats",
        fields={"latents": "latent", "text": "latent"}, dtype={"latents": "float16"},
        encode_batch={"text": 5}, progress=None,
    )  # fmt: skip

    assert [*caches] == ["latents", "text", "labels"]
    assert [cache.name for cache in caches.values()] == ["cats_latents", "cats_text", "cats_labels"]
    assert {key: [*cache.schema] for key, cache in caches.items()} == {
        "latents": ["latent"], "text": ["latent"], "labels": ["label"],
    }  # fmt: skip
    assert caches["latents"].schema["latent"].dtype == "float16"
    assert caches["text"].recipe.encode_batch.samples == 5
    given: Any = {"cache_dir": tmp_path / "alone", "progress": None}
    alone = [
        stoker.precompute(pictures(), vae, name="cats_latents", fields=["latent"], dtype="float16", **given),
        stoker.precompute(pictures(), text, name="cats_text", fields="latent", encode_batch=5, **given),
        stoker.precompute(pictures(), ["label"], name="cats_labels", **given),
    ]
    for one, cache in zip(alone, caches.values(), strict=True):
        assert one.fingerprint == cache.fingerprint
        assert_same(records(one), records(cache))
    assert [records(caches["labels"])[i]["label"].item() for i in range(4)] == [0, 1, 2, 0]


def test_a_cache_that_would_hold_mostly_raw_samples_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vae, text = models()
    given: Any = {"name": "c", "progress": None}
    stoker.precompute(pictures(), {"a": vae, "b": text}, tmp_path, fields={"a": "latent"}, **given)
    (warning,) = [text for text in caplog.messages if "hands on" in text]
    assert "c_b" in warning
    assert "image" in warning
    assert "fields=['latent']" in warning

    caplog.clear()
    stoker.precompute(pictures(), {"a": vae, "b": text}, tmp_path, fields="latent", **given)
    assert "hands on" not in caplog.text


def test_a_cache_of_several_encodes_damaged_records_again_alone(tmp_path: Path) -> None:
    vae, text = models()
    caches = stoker.precompute(pictures(), {"latents": vae, "text": text}, tmp_path, name="c", progress=None)
    cache = caches["latents"]
    whole = records(cache)
    shard = cache.path / cache.index.shards[0].file
    data = bytearray(shard.read_bytes())
    data[-9] ^= 255
    shard.write_bytes(data)

    loader = stoker.Loader(caches["latents"], batch_size=4)
    found = {int(i): image for batch in loader for i, image in zip(batch.index, batch["latent"], strict=True)}
    assert all(torch.equal(found[number], record["latent"]) for number, record in whole.items())


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"wait": False}, "wait=False"),
        ({"part": (0, 2)}, "part"),
        ({"engine": object()}, "engine"),
        ({"dtype": {"latent": "float16"}}, "dtype has an entry 'latent'.*'a': {'latent': 'float16'}"),
        ({"encode_batch": {"b": 3}}, "encode_batch has an entry 'b'; the encoders are a"),
    ],
)
def test_what_is_for_one_cache_alone_is_refused(tmp_path: Path, given: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        stoker.precompute(FakeSource((4,)), {"a": FakeEncoder()}, tmp_path, name="c", **given)
    assert not list(tmp_path.iterdir())


def test_no_encoder_and_fields_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoders are given by the keys"):
        stoker.precompute(FakeSource((4,)), {}, tmp_path, name="c")
    with pytest.raises(EncoderError, match="store field 'caption'; the sample has data, nu"):
        stoker.precompute(FakeSource((4,)), {"a": FakeEncoder(), "b": ["caption"]}, tmp_path, name="c")


@pytest.mark.parametrize("several", [True, False])
def test_after_an_edit_the_log_says_what_was_taken_from_earlier_caches(tmp_path: Path, several: bool) -> None:
    encoder = stoker.ModuleEncoder(torch.nn.Linear(2, 3), field="x", version="1")
    encoders: Any = {"one": encoder, "two": ["x"]} if several else encoder
    data = [{"x": torch.full((2,), float(n))} for n in range(20)]
    out = io.StringIO()

    for version in ("before", "after"):
        stoker.precompute(
            stoker.TorchSource(data, version=version), encoders, tmp_path, name="c", workers=0,
            progress=LineProgress(out, first_s=0),
        )  # fmt: skip
        data[3] = {"x": torch.full((2,), 99.0)}

    said = "2 of 40 records of 2 caches encoded, 38 adopted" if several else "1 of 20 encoded, 19 adopted"
    assert said in out.getvalue().splitlines()[-1]
    assert "reused" not in out.getvalue()
