"""Figures on docs/how-to/scale.md are those that its commands print."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stoker.extras.simulation.result import HEAD, Simulation, cells, encoding_cells, remarks
from stoker.extras.simulation.run import simulate
from stoker.extras.simulation.scenario import parse_scenario

PAGE = (Path(__file__).parent.parent / "docs" / "how-to" / "scale.md").read_text()
COMMAND = re.compile(r"```sh\n(stoker plan --simulate .*?)```", re.DOTALL)
SUMS = re.findall(r"```arithmetic\n(.*?)```", PAGE, re.DOTALL)
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip


def words_of(command: str) -> tuple[str, ...]:
    return tuple(shlex.split(command.replace("\\\n", " "))[3:])


@cache
def simulated(words: tuple[str, ...]) -> Simulation:
    return simulate(parse_scenario(words))


def examples() -> Iterator[tuple[tuple[str, ...], list[list[list[str]]]]]:
    """The words of each command, and the tables between it and the next section or command."""
    parts = re.split(r"(?=```sh\n)|^## ", PAGE, flags=re.MULTILINE)
    for part in parts:
        command = COMMAND.match(part)
        if command:
            lines = [line for line in part.splitlines() if line.startswith("|")]
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            tables: list[list[list[str]]] = []
            for row in rows:
                if set("".join(row)) == {"-"}:
                    continue
                if row[0] in ("way", "encoders"):
                    tables.append([])
                tables[-1].append(row)
            yield words_of(command[1]), tables


EXAMPLES = [(words, tables) for words, tables in examples() if tables]


@pytest.mark.parametrize(("words", "tables"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_tables_hold_what_their_command_prints(words: tuple[str, ...], tables: list[list[list[str]]]) -> None:
    found = simulated(words)
    head, *rows = encoding_cells(found)
    printed = {
        "encoders": {row[0]: dict(zip(head, row, strict=True)) for row in rows},
        "way": {way.name: dict(zip(HEAD, cells(way), strict=True)) for way in found.ways},
    }

    for (kind, *columns), *written in tables:
        for name, *figures in written:
            of = printed[kind][name]
            if figures[0] == "does not fit":
                assert of["encode"] == "does not fit", name
            else:
                assert figures == [of[column] for column in columns], name


def test_remarks_on_the_page_are_those_that_the_command_before_them_prints() -> None:
    quoted = 0
    for part in re.split(r"(?=```sh\n)", PAGE):
        command = COMMAND.match(part)
        for said in re.findall(r"`(filled [^`]+)`", part) if command else ():
            assert any(line.endswith(said) for line in remarks(simulated(words_of(command[1])))), said
            quoted += 1
    assert quoted


def test_every_section_with_figures_is_compared() -> None:
    assert len(EXAMPLES) >= 6
    assert sum(len(table) for _, tables in EXAMPLES for table in tables) >= 25
    for command in COMMAND.findall(PAGE):
        assert simulated(words_of(command)).fastest


@pytest.mark.parametrize("line", [line for block in SUMS for line in block.splitlines()])
def test_sums_are_right(line: str) -> None:
    text, _, rest = line.partition(" = ")
    written = float(rest.partition("#")[0])

    assert value(ast.parse(text, mode="eval").body) == pytest.approx(written, rel=0.01)


def value(node: ast.expr) -> float:
    """Of a sum of numbers."""
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp)
    return OPERATORS[type(node.op)](value(node.left), value(node.right))
