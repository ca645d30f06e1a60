"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fetch.servers import Files, serving


@pytest.fixture
def files() -> Iterator[Files]:
    with serving() as served:
        yield served
