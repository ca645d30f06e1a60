"""Records that are not what source and encoder give now are named, with how far off they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.precompute import EncodeFiller, PrecomputeSettings, run_precompute
from stoker.precompute.background import SpotChecks
from stoker.precompute.encode import distance
from stoker.runtime import signals
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.store import Cache, Folder
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource, RaggedSource

SETTINGS = PrecomputeSettings(progress=None, workers=0, dtype="float16")


def make(folder: Path, source: FakeSource, encoder: FakeEncoder) -> Cache:
    return run_precompute(source, encoder, folder, name="c", settings=SETTINGS).cache


def filler_of(cache: Cache) -> EncodeFiller:
    assert isinstance(cache.filler, EncodeFiller)
    return cache.filler


def checked(cache: Cache, count: int = 50):
    check = filler_of(cache).spot_check(cache, count)
    check.start()
    return check.finish(60)


@pytest.mark.parametrize(
    ("source", "encoder"),
    [
        pytest.param(FakeSource((10, 12)), FakeEncoder(by_shape=True), id="groups"),
        pytest.param(RaggedSource((10, 12)), FakeEncoder(samples=1, ragged=True), id="ragged"),
        pytest.param(FakeSource((10, 12)), FakeEncoder(samples=1, steps=4), id="steps"),
    ],
)
def test_sound_records_agree_within_rounding(
    tmp_path: Path, source: FakeSource, encoder: FakeEncoder
) -> None:
    report = checked(make(tmp_path, source, encoder), 7)

    assert (report.wanted, report.checked, report.different, report.failed) == (7, 7, [], [])
    assert not list(tmp_path.glob(".workers/*"))


def test_a_record_that_differs_is_named_with_how_far_off_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An encoder whose code changed under the same version: no digest can see it."""
    cache = make(tmp_path, FakeSource((10,)), FakeEncoder())

    class Other(FakeEncoder):
        def encode(self, batch):
            records = super().encode(batch)
            odd = (batch["nu"] * 7).round() == 6
            records["latent"][odd] *= 1.5
            return records

    cache.filler = EncodeFiller(
        FakeSource((10,)), Other(), tmp_path, name="c", settings=SETTINGS, fingerprint=cache.fingerprint
    )

    report = checked(cache)

    (difference,) = report.different
    assert (difference.number, difference.field) == (6, "latent")
    assert difference.error == pytest.approx(1 / 3, rel=0.01)
    assert difference.limit < 0.001
    assert report.to_json()["different"][0]["index"] == 6
    assert "field 'latent' of sample 6 differs" in caplog.text
    assert "by 0.33 of its largest value" in caplog.text


def test_several_caches_are_compared_one_after_another(tmp_path: Path) -> None:
    caches = [make(tmp_path / name, FakeSource((10, 12)), FakeEncoder()) for name in ("a", "b")]
    checks = [filler_of(cache).spot_check(cache, count) for cache, count in zip(caches, (3, 4), strict=True)]

    report = SpotChecks(checks).finish(60)

    assert (report.wanted, report.checked, report.different, report.failed) == (7, 7, [], [])


def test_a_comparison_that_waits_for_another_does_not_begin_once_it_is_ended(tmp_path: Path) -> None:
    caches = [make(tmp_path / name, FakeSource((400,)), FakeEncoder()) for name in ("a", "b")]

    report = SpotChecks([filler_of(cache).spot_check(cache, 400) for cache in caches]).finish()

    assert report.wanted == 800
    assert report.checked < 800
    assert report.failed == []


def test_a_guardian_hears_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page says what the main thread does, which may be encoding meanwhile."""
    cache = make(tmp_path, FakeSource((10,)), FakeEncoder())
    page = HeartbeatPage.create()
    page.write("encode", 3, limit_s=9)
    before = page.look()
    monkeypatch.setattr(signals, "_page", page)

    report = checked(cache)

    assert report.checked == 10
    assert page.look() == before


def test_what_cannot_be_compared_is_said_and_quarantines_nothing(tmp_path: Path) -> None:
    source = FakeSource((10,))
    cache = make(tmp_path, source, FakeEncoder())
    source.faults = {4: "nan"}

    report = checked(cache)

    assert report.checked == 9
    assert [text.split(" (")[0] for text in report.failed] == ["c: sample 4"]
    assert Folder(cache.path, "c", cache.recipe).failures() == {}
    assert not list(cache.path.glob("failures-*"))


def test_a_source_that_changed_is_said(tmp_path: Path) -> None:
    source = FakeSource((10,))
    cache = make(tmp_path, source, FakeEncoder())
    source.steps = 7

    report = checked(cache)

    assert report.checked == 0
    assert "changed since the cache was made" in report.failed[0]


def test_distances() -> None:
    assert distance(torch.tensor([2, 3]), torch.tensor([2, 3])) == 0
    assert distance(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0
    assert distance(torch.tensor([1.0]), torch.tensor([float("nan")])) == float("inf")
    assert distance(torch.zeros(3), torch.zeros(2)) == float("inf")
