"""docs/reliability-matrix.md says which test injects a fault: those tests must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "reliability-matrix.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+):(\w+)`", TABLE)) - {("path", "name")})


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[f"{path}:{name}" for path, name in NAMED])
def test_the_test_that_injects_a_fault_is_there(path: str, name: str) -> None:
    assert re.search(rf"^ *def test_{name}\(", (ROOT / "tests" / f"{path}.py").read_text(), re.MULTILINE)


def test_every_fault_has_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "what happens" not in line]
    assert len(rows) > 40
    assert not [row for row in rows if not re.search(r"`[\w/]+:\w+`", row)]
