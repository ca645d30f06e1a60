"""Injected faults happen where, and as often as, they were ordered."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.precompute import PrecomputeSettings, Timeouts, run_precompute
from stoker.store import make_recipe
from stoker.testing import Fault, FaultySource, check_source
from tests.precompute.fake_sources import FakeSource


def run(source, folder: Path, *, workers: int = 1, read_s: float = 30.0):
    settings = PrecomputeSettings(
        progress=None, workers=workers, max_quarantined=1.0, timeouts=Timeouts(open=read_s, read=read_s)
    )
    return run_precompute(source, None, folder, name="c", settings=settings)


def test_without_faults_it_is_the_source(tmp_path: Path) -> None:
    class Bounded(FakeSource):
        def read(self, number, start=None, stop=None):
            if not 0 <= number < len(self):
                raise IndexError(number)
            return super().read(number, start, stop)

    source = Bounded((6,))

    check_source(FaultySource(source, []))
    assert make_recipe(FaultySource(source, [Fault("hang", [1])]), None) == make_recipe(source, None)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("hang", "no progress|deadline|seconds"),
        ("kill", "SIGKILL|signal 9"),
        ("raise", "injected input/output error at sample 3"),
    ],
)
def test_a_sample_that_always_fails_is_quarantined_and_one_that_fails_once_is_not(
    tmp_path: Path, kind, why: str
) -> None:
    always = run(FaultySource(FakeSource((6,)), [Fault(kind, [3])]), tmp_path / "always", read_s=1.5)
    (tmp_path / "counts").mkdir()
    once = FaultySource(FakeSource((6,)), [Fault(kind, [3], attempts=1)], folder=tmp_path / "counts")
    mended = run(once, tmp_path / "once", read_s=1.5)

    assert [*always.cache.quarantined] == [3]
    assert re.search(why, always.cache.quarantined[3].error), always.cache.quarantined[3].error
    assert (mended.records, mended.quarantined) == (6, 0)
    assert [path.name for path in (tmp_path / "counts").iterdir()] == ["fault0-sample3-0"]


def test_a_slow_sample_is_late_and_right_and_a_corrupt_one_is_silently_wrong(tmp_path: Path) -> None:
    faults = [Fault("slow", {1}, seconds=0.01), Fault("corrupt", {2, 4})]
    report = run(FaultySource(FakeSource((6,)), faults), tmp_path, workers=0)

    sound = FakeSource((6,))
    wrong = [n for n in range(6) if not np.array_equal(report.cache[n]["data"], sound.read(n)["data"])]
    assert (report.records, report.quarantined, wrong) == (6, 0, [2, 4])


def test_what_cannot_be_injected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give folder="):
        FaultySource(FakeSource((6,)), [Fault("hang", [1], attempts=1)])
    with pytest.raises(ConfigError, match="'explode' is not known"):
        Fault("explode", [1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="attempts is 0"):
        Fault("hang", [1], attempts=0)
    with pytest.raises(ConfigError, match="would end the process that made"):
        FaultySource(FakeSource((6,)), [Fault("kill", [1])]).read(1)
