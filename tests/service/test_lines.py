"""What a job's process writes, read by a worker that may be another than before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.service.journal import CHUNK_BYTES, LINE_BYTES, Line, end_line, parse, read_lines
from tests.kit.amount import example_count


def line(kind: str = "batch", **data: object) -> bytes:
    return json.dumps({"kind": kind, "data": data}).encode() + b"\n"


def test_whole_lines_are_read_once_each_from_wherever_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_lines(path, 0) == ([], 0)

    path.write_bytes(line(batch=1) + line(batch=2) + b'{"kind": "ba')
    first, position = read_lines(path, 0)
    assert read_lines(path, position) == ([], position)
    with path.open("ab") as file:
        file.write(b'tch", "data": {"batch": 3}}\n')
    then, end = read_lines(path, position)

    assert [found.data["batch"] for found in first + then] == [1, 2, 3]
    assert end == path.stat().st_size


def test_a_line_cut_off_by_a_kill_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(batch=1) + b'{"kind": "metr')

    end_line(path)
    end_line(path)
    with path.open("ab") as file:
        file.write(line("started", epoch=0))

    kinds = [(found.kind, found.data) for found in read_lines(path, 0)[0]]
    assert kinds == [
        ("batch", {"batch": 1}),
        ("progress", {"unreadable": '{"kind": "metr', "unreadable_bytes": 14}),
        ("started", {"epoch": 0}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"kind": "batch"}',
        b'{"kind": "exec", "data": {}}',
        b'{"kind": "batch", "data": []}',
        b'{"kind": "metrics", "data": {"epoch": -1}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_line_is_noted_not_dropped(text: bytes) -> None:
    noted = parse(text)

    assert noted.kind == "progress"
    assert noted.data["unreadable_bytes"] == len(text)


def test_numbers_that_json_has_not_become_null() -> None:
    read = parse(
        b'{"kind": "metrics", "data": {"epoch": 1, "val_loss": NaN, "stall": 1e999, "x": -Infinity}}'
    )

    assert read.data == {"epoch": 1, "val_loss": None, "stall": None, "x": None}


def test_values_that_no_column_takes_are_set_aside() -> None:
    read = parse(line("progress", progress="half", tier="d" * 99, message="a\0b", epoch=2**40, other=[1]))

    assert read.data == {
        "unreadable_progress": "'half'",
        "tier": "d" * 20,
        "message": "a�b",
        "unreadable_epoch": "1099511627776",
        "other": [1],
    }


def test_a_line_longer_than_any_is_noted_and_passed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * (2 * CHUNK_BYTES + LINE_BYTES) + b"\n" + line(batch=7))
    found: list[Line] = []
    position, before = 0, -1
    while position != before:
        before = position
        lines, position = read_lines(path, position)
        found += lines

    assert found[-1].data == {"batch": 7}
    assert sum(one.data.get("unreadable_bytes", 0) for one in found) == 2 * CHUNK_BYTES + LINE_BYTES


_VALUE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
)
_DATA = st.dictionaries(st.sampled_from(["epoch", "val_loss", "progress", "message", "tier"]), _VALUE)
_METRICS = st.builds(lambda data: json.dumps({"kind": "metrics", "data": data}).encode(), _DATA)


@settings(max_examples=example_count(100), deadline=None)
@given(st.binary(max_size=60) | _METRICS)
def test_nothing_that_a_process_writes_stops_its_worker(text: bytes) -> None:
    json.dumps(parse(text).data, allow_nan=False)
