"""Rows of a database as bytes: the same for rows together and one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sources.sql.rows import (
    BOOL,
    FLOAT,
    INT,
    JsonText,
    Micros,
    NumberColumn,
    PickedNumbers,
    Spill,
    Text,
    pack_columns,
    pack_rows,
    unpack_row,
)

WHOLE = st.integers(-(2**63), 2**63 - 1)
LONG = st.binary(max_size=40)
VALUES: dict[str, Any] = {
    "whole": WHOLE,
    "float": st.floats(allow_nan=False),
    "truth": st.booleans(),
    "time": WHOLE.map(Micros),
    "text": LONG.map(Text),
    "json": LONG.map(JsonText),
    "picked": st.binary(max_size=5).map(lambda data: PickedNumbers(8 * data)),
    "blob": LONG,
    "null": st.none(),
}
COLUMNS = st.lists(st.sets(st.sampled_from([*VALUES]), min_size=1, max_size=3), min_size=1, max_size=5)


@st.composite
def tables(draw: Any) -> list[list[Any]]:
    """Return rows whose columns hold one to three kinds of values."""
    columns = [st.one_of([VALUES[name] for name in sorted(kinds)]) for kinds in draw(COLUMNS)]
    return draw(st.lists(st.tuples(*columns).map(list), min_size=1, max_size=40))


@settings(max_examples=150, deadline=None)
@given(rows=tables())
def test_rows_together_have_the_bytes_and_values_of_single_ones(rows: list[list[Any]]) -> None:
    single = [pack_rows([row]) for row in rows]
    packed = pack_rows(rows)
    assert bytes(packed.data) == b"".join(bytes(one.data) for one in single)
    assert packed.lengths.tolist() == [len(one.data) for one in single]
    assert packed.tags == [sum((one.tags[place] for one in single[1:]), single[0].tags[place])
                           for place in range(len(rows[0]))]  # fmt: skip

    spill = Spill()
    spill.append(packed.data, packed.lengths)
    spill.finish_writing()
    names = {f"c{place}": place != 1 for place in range(len(rows[0]))}
    order = np.arange(len(rows))[::-1]
    found = spill.columns(order, names)
    expected = [unpack_row(spill.row(int(number))) for number in order]

    assert [*found] == [name for name, wanted in names.items() if wanted]
    for place, name in enumerate(names):
        if name in found:
            assert found[name].tags == [row[place].tag for row in expected]
            values = [row[place].value for row in expected]
            assert found[name].values == values
            assert [*map(type, found[name].values)] == [*map(type, values)]
    spill.close()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_columns_of_numbers_are_packed_like_single_values(place: int) -> None:
    numbers = [NumberColumn(INT, np.arange(20)), NumberColumn(FLOAT, np.arange(20) / 4),
               NumberColumn(BOOL, np.arange(20) % 2 == 0)]  # fmt: skip
    columns: list[Any] = [*numbers[:place], [Text(b"a" * n) for n in range(20)], *numbers[place:]]
    rows = [*zip(*(c.values.tolist() if isinstance(c, NumberColumn) else c for c in columns), strict=True)]

    assert bytes(pack_columns(columns).data) == b"".join(bytes(pack_rows([row]).data) for row in rows)
