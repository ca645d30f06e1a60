"""Measure the CPU seconds of each test and fixture, child processes included.

    python -m pytest -p tools.test_time --cpu-times FOLDER -n 2 tests/store
    python tools/test_time.py FOLDER [--top 60]

CPU time says what a test costs also on a machine that does other work. Each process of pytest appends lines
of JSON to a file of its own in FOLDER; the second command prints the most expensive folders, tests, fixtures.
Children that were given to another parent (daemons) are not counted after that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def descendants_s(root: int) -> float:
    """Return the CPU seconds of all living processes below `root`, and of children that these have reaped."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            line = Path(entry.path, "stat").read_text()
        except OSError:  # it has ended
            continue
        fields = line.rpartition(")")[2].split()  # the name in parentheses may hold spaces
        pid, parent = int(entry.name), int(fields[1])
        used[pid] = sum(int(field) for field in fields[11:15]) * TICK_S
        children[parent].append(pid)
    total, below = 0.0, list(children[root])
    while below:
        pid = below.pop()
        total += used[pid]
        below.extend(children[pid])
    return total


class Meter:
    """Appends one line for each test and each fixture to a file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("a")
        self.own_s = 0.0  # what measuring itself has used

    def now(self) -> float:
        """Return the CPU seconds of this process and all below it so far."""
        begin = time.process_time()
        reaped = os.times()
        total = (
            begin + reaped.children_user + reaped.children_system + descendants_s(os.getpid()) - self.own_s
        )
        self.own_s += time.process_time() - begin
        return total

    def note(self, kind: str, name: str, begin: tuple[float, float]) -> None:
        """Append what has been used since `begin`."""
        cpu_s, wall_s = self.now() - begin[0], time.monotonic() - begin[1]
        line = {"kind": kind, "name": name, "cpu_s": round(cpu_s, 4), "wall_s": round(wall_s, 4)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Measure a test with its fixtures."""
        begin = (self.now(), time.monotonic())
        result = yield
        self.note("test", item.nodeid, begin)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """Measure the making of a fixture's value."""
        begin = (self.now(), time.monotonic())
        result = yield
        self.note("fixture", f"{fixturedef.func.__module__}:{fixturedef.argname}", begin)
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that switches measuring on."""
    parser.addoption("--cpu-times", type=Path, help="a folder for the CPU seconds of tests and fixtures")


def pytest_configure(config: pytest.Config) -> None:
    """Start to measure, also in a worker of xdist."""
    folder = config.getoption("--cpu-times")
    if folder is not None:
        config.pluginmanager.register(Meter(folder))


def report(folder: Path, top: int) -> None:
    """Print the most expensive folders, files, tests and fixtures."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open()]
    for title, kind, shorten in (
        ("folders", "test", lambda name: "/".join(name.split("::")[0].split("/")[:2])),
        ("files", "test", lambda name: name.split("::")[0]),
        ("tests, all parameters together", "test", lambda name: name.split("[")[0]),
        ("tests", "test", lambda name: name),
        ("fixtures", "fixture", lambda name: name),
    ):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        for line in lines:
            if line["kind"] == kind:
                entry = sums[shorten(line["name"])]
                entry[0] += line["cpu_s"]
                entry[1] += line["wall_s"]
                entry[2] += 1
        print(f"\n{title}: {len(sums)}, {sum(entry[0] for entry in sums.values()):.0f} CPU s")
        for name, (cpu_s, wall_s, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:top]:
            print(f"{cpu_s:9.2f} CPU s {wall_s:9.2f} s {count:5d}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--top", type=int, default=60)
    given = parser.parse_args()
    report(given.folder, given.top)
