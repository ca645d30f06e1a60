"""`kill -9` of the service, its workers and their jobs at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.storm import Report, Storm, blow

pytestmark = pytest.mark.chaos


def check(report: Report, jobs: int, kills: int) -> None:
    assert report.jobs >= jobs
    assert report.kills["service"] + report.kills["worker"] == kills
    assert report.lost == []
    assert report.twice == []
    assert report.overlapping == []
    assert report.incomplete == []
    assert report.gaps == 0
    assert report.overdue_s < 60.0  # a job is taken away from a dead worker


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    storm = Storm(jobs=4, kills=2, workers=1, every_s=0.2, limit_s=100.0)

    check(blow(storm, f"sqlite:///{tmp_path}/stoker.db", tmp_path / "state"), 4, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_kills_under_two_hundred_jobs_lose_nothing(url: str, tmp_path: Path) -> None:
    check(blow(Storm(jobs=200, kills=100, limit_s=1000.0), url, tmp_path / "state"), 200, 100)
