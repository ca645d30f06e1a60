"""Fingerprints of caches as released: another one means that somebody's cache is encoded again."""

from __future__ import annotations

import pytest

from tests.pins import fingerprints, golden, identities

GOLDEN = golden.load("fingerprints")
IDENTITIES = golden.load("identities")


@pytest.mark.parametrize("case", fingerprints.CASES)
def test_a_cache_keeps_its_fingerprint(case: str) -> None:
    made = golden.plain(fingerprints.CASES[case]())

    assert made["recipe"] == GOLDEN[case]["recipe"]
    assert made["fingerprint"] == GOLDEN[case]["fingerprint"]


@pytest.mark.parametrize("case", identities.CASES)
def test_an_encoder_or_source_keeps_its_identity(case: str) -> None:
    assert identities.CASES[case]() == IDENTITIES[case]


def test_every_golden_value_is_compared() -> None:
    assert set(GOLDEN) == set(fingerprints.CASES)
    assert set(IDENTITIES) == set(identities.CASES)
