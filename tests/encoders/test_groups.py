from __future__ import annotations

import pytest

from stoker.encoders.protocol import EncodeBatchSize, fixed_batch_size
from stoker.schema import Field

KIB_256 = Field(shape=(64, 1024), dtype="float32", time=True)


@pytest.mark.parametrize(
    ("field", "cut", "group"),
    [
        pytest.param(KIB_256, True, EncodeBatchSize(samples=32), id="8-mib-a-call"),
        pytest.param(Field(shape=(), dtype="int8"), True, EncodeBatchSize(samples=256), id="tiny"),
        pytest.param(
            Field(shape=(16, 2**20), dtype="float32", time=True),
            True,
            EncodeBatchSize(samples=1),
            id="64-mib",
        ),
        pytest.param(
            Field(shape=(32, 2**20), dtype="float32", time=True),
            True,
            EncodeBatchSize(samples=1, steps=2),
            id="cut",
        ),
        pytest.param(
            Field(shape=(32, 2**20), dtype="float32", time=True),
            False,
            EncodeBatchSize(samples=1),
            id="not-independent",
        ),
        pytest.param(
            Field(shape=(2, 2**25), dtype="float32", time=True),
            True,
            EncodeBatchSize(samples=1, steps=1),
            id="one-step",
        ),
        pytest.param(
            Field(shape=(-1, 3), dtype="float32", ragged=True), True, EncodeBatchSize(samples=1), id="ragged"
        ),
    ],
)
def test_the_group_follows_from_the_schema(field: Field, cut: bool, group: EncodeBatchSize) -> None:
    assert fixed_batch_size({"data": field}, {}, cut_time=cut) == group
