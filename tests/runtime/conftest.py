"""Preloaded processes themselves are what is tested here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import import_once


@pytest.fixture(autouse=True, scope="module")
def real_preloaded_processes() -> Iterator[None]:
    """They start as those of a user's program do."""
    with import_once.real():
        yield
