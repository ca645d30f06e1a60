"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fetch.servers import Files, serving


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.extras.fetch.run.PAUSE_S", 0.02)


@pytest.fixture
def files() -> Iterator[Files]:
    with serving() as served:
        yield served
