from __future__ import annotations

import pytest

from stoker.errors import ConfigError
from stoker.plan.tiers import MEMORY_GIB, gpu_table, say_gpus
from stoker.units import GIB


def test_records_follow_from_bytes_and_what_is_left_to_the_model() -> None:
    unseen, seen = (gpu_table(1e6, 10**9, model_bytes=model) for model in (None, GIB))

    assert [row.gpu for row in unseen] == list(MEMORY_GIB)
    for row, other in zip(unseen, seen, strict=True):
        assert row.records == int(row.memory_bytes * 0.5) // 10**6
        assert other.records == (int(row.memory_bytes * 0.98) - GIB) // 10**6
        assert row.records * 1e6 <= row.usable_bytes


def test_half_the_bytes_are_twice_the_records_and_a_small_set_fits_whole() -> None:
    assert all(
        abs(half.records - 2 * whole.records) <= 1
        for half, whole in zip(gpu_table(5e5, 10**9), gpu_table(1e6, 10**9), strict=True)
    )
    assert say_gpus(10, 5).endswith("half of each left to the model: all on " + ", ".join(MEMORY_GIB))
    assert [row.share for row in gpu_table(10, 5, model_bytes=10**15)] == [0.0] * len(MEMORY_GIB)
    with pytest.raises(ConfigError, match="5 records of 0 bytes"):
        gpu_table(0, 5)
