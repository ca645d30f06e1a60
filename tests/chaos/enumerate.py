"""Kill, fail or cut short every file system call of a scenario, one run each, and look at what is left.

`python -m tests.chaos.enumerate --points all` prints its figures as JSON. A point is a scenario, a call of
its clean run and a fault; each runs in a process of its own, forked from this one, which never opens a cache.
The process that was killed stays a zombie until the next one has finished, so that its number seems alive, as
one that was given to another process would.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import gc
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.chaos import children, planted, power, preload, program
from tests.chaos.checks import Promises, broken, not_finished, silence
from tests.chaos.scenarios import SCENARIOS, Promise

ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EINTR")
STICKY = ("EIO", "ENOSPC", "EROFS")
DEADLINE_S = 20.0
EXPLAINED = {
    "ENOSPC": "ResourceError",
    "EDQUOT": "ResourceError",
    "EACCES": "ReadOnlyError",
    "EROFS": "ReadOnlyError",
}
"""The error that a user must be shown, since space and leave are his to give."""
EXPLAINED_AT = ("create", "write", "pwrite", "ftruncate", "mkdir", "rename", "link", "fsync", "unlink")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One fault at one call."""

    scenario: str
    at: int
    """Place of the call in the clean run, from 1."""
    op: str
    fault: str
    """`kill`, `short`, an errno, or an errno with `+` when it stays."""

    def __str__(self) -> str:
        return f"{self.scenario}, {self.fault} at call {self.at} ({self.op})"

    def arm(self) -> None:
        """Tell the library."""
        if self.fault in ("kill", "short"):
            preload.fault(self.at, preload.KILL if self.fault == "kill" else preload.SHORT)
        else:
            error = getattr(errno, self.fault.removesuffix("+"))
            preload.fault(self.at, preload.ERRNO, error=error, sticky=self.fault.endswith("+"))


@dataclasses.dataclass(slots=True, kw_only=True)
class Tally:
    """Figures of one scenario."""

    points: Counter[str] = dataclasses.field(default_factory=Counter)
    """By fault."""
    unfired: int = 0
    carried_on: int = 0
    """Runs that ended well in spite of the fault."""
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, point: str, fault: str, wrong: Sequence[str]) -> None:
        """Count one point."""
        self.points[fault] += 1
        self.wrong += [f"{point}: {text}" for text in wrong]


def promising(say: children.Say) -> Promise:
    """Promises go to the parent, and among the recorded calls."""

    def promise(kind: str, numbers: Sequence[int] = ()) -> None:
        preload.mark(json.dumps([kind, [*numbers]]))
        say([kind, [*numbers]])

    return promise


class Bench:
    """Runs one scenario again and again, each time in a fresh copy of the state it begins from."""

    def __init__(
        self,
        name: str,
        base: Path,
        patch: Callable[[], None] = planted.none,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name, self.scenario = name, SCENARIOS[name]
        _ = self.scenario.recipe, self.scenario.source.record(0)  # made once here, not in every child
        self._base = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
        self._patch, self._deadline_s = patch, deadline_s
        self._begin = self._base / "begin"
        self._begin.mkdir()
        self._without_faults(lambda say: self.scenario.prepare(self._begin))
        self._count = 0

    def _without_faults(self, function: Callable[[children.Say], object]) -> None:
        ended = children.run(function, deadline_s=DEADLINE_S)
        if ended.code != 0:
            raise RuntimeError(f"{self.name}: a process without faults failed: {ended}")

    def _fresh(self, state: power.State | None = None) -> Path:
        """A folder in the state that the scenario begins from, or in another."""
        self._count += 1
        root = self._base / str(self._count)
        if state is None:
            shutil.copytree(self._begin, root)
        else:
            root.mkdir()
            power.make(state, root)
        return root

    def _run(self, root: Path, say: children.Say) -> None:
        silence()
        self._patch()
        self.scenario.run(root, promising(say))

    def clean_run(self, *, keep_data: bool = False) -> tuple[list[preload.Call], power.Disk]:
        """Calls of a run without faults, and the disk before it."""
        root = self._fresh()
        disk = power.Disk(root)
        preload.arm(root, keep_data=keep_data)
        self._without_faults(functools.partial(self._run, root))
        preload.disarm()
        shutil.rmtree(root)
        return preload.calls(), disk

    def points(self, *, reads: bool = False) -> list[Point]:
        """Every fault at every call that writes (or, with `reads`, that only reads)."""
        found: list[Point] = []
        for call in self.clean_run()[0]:
            if call.op == "mark" or call.writes is reads:
                continue
            faults = [*ERRNOS, *(f"{name}+" for name in STICKY)]
            if not reads:
                faults.insert(0, "kill")
            if call.op in ("write", "pwrite", "read") and call.result > 1:
                faults.append("short")
            found += [Point(scenario=self.name, at=call.sequence, op=call.op, fault=f) for f in faults]
        return found

    def try_point(self, point: Point, tally: Tally) -> None:
        """Run to the fault, then look at what is left, run again and look again."""
        root = self._fresh()
        # What an earlier process left unsynced must not be promised by the next one without syncing it.
        disk = power.Disk(root) if point.op == "fsync" or point.fault == "kill" else None
        preload.arm(root, keep_data=disk is not None)
        point.arm()
        ended = children.run(functools.partial(self._run, root), deadline_s=self._deadline_s, reap=False)
        tally.unfired += not preload.fired()
        tally.carried_on += ended.code == 0
        if disk is None:
            preload.disarm()
        else:
            preload.fault(0, 0)  # goes on recording: the next process is watched too
        wrong = self._wrong_end(point, ended) + self._afterwards(root, Promises.of(self.scenario, ended.said))
        ended.reap()
        if disk is not None:
            preload.disarm()
            promised = disk.apply_all(preload.calls())
            wrong += self._after_cut(disk.after_cut("least", random.Random(0)), promised)
        tally.add(str(point), point.fault, wrong)
        shutil.rmtree(root)

    def _wrong_end(self, point: Point, ended: children.Ended) -> list[str]:
        """What is wrong with how the faulted process itself ended."""
        if ended.hung:
            return [f"hung: not done after {self._deadline_s:g} s"]
        if point.fault == "kill":
            return [] if ended.signal == signal.SIGKILL else [f"not killed: {ended.error or ended.code}"]
        if ended.code == 0:
            return []
        if not {"StokerError", "OSError"} & {*ended.bases}:
            return [f"strange error: {ended.error or ended}"]
        wanted = EXPLAINED.get(point.fault.removesuffix("+"))
        if point.op in EXPLAINED_AT and wanted and wanted not in ended.bases:
            return [f"unexplained: {ended.error} ({ended.place})"]
        return []

    def _afterwards(self, root: Path, promises: Promises) -> list[str]:
        def look(say: children.Say) -> None:
            silence()
            say({"wrong": broken(self.scenario, root, promises)})
            self._patch()
            self.scenario.run(root, promising(lambda value: None))
            preload.disarm()
            say({"wrong": not_finished(self.scenario, root)})

        ended = children.run(look, deadline_s=self._deadline_s)
        wrong = [text for value in ended.said if isinstance(value, dict) for text in value.get("wrong", ())]
        if ended.hung:
            wrong.append(f"hung: the next run was not done after {self._deadline_s:g} s")
        elif ended.code != 0:
            wrong.append(f"not resumed: {ended.error or ended}")
        return wrong

    def _after_cut(self, state: power.State, promised: Sequence[str]) -> list[str]:
        """What is wrong in a state that a power cut left, after such promises."""
        root = self._fresh(state)
        wrong = self._afterwards(root, Promises.of(self.scenario, [json.loads(text) for text in promised]))
        shutil.rmtree(root)
        return [f"after a power cut: {text}" for text in wrong]

    def cut_everywhere(self, tally: Tally, *, some: int, seed: int, first: bool) -> None:
        """A power cut after every call: the least that it may leave, every name, and `some` parts between."""
        calls, disk = self.clean_run(keep_data=True)
        for at, kind, state, promised in power.cuts(disk, calls, some=some, seed=seed):
            where = f"{self.name}, power cut ({kind}) after call {at} ({calls[at - 1].op})"
            tally.add(where, "power", self._after_cut(state, promised))
            if first and tally.wrong:
                return


def chosen(bench: Bench, arguments: argparse.Namespace) -> list[Point]:
    """The points asked for: all, or so many of them at random."""
    points = [
        point
        for point in bench.points(reads=arguments.reads)
        if (not arguments.fault or point.fault in arguments.fault)
        and (not arguments.op or point.op in arguments.op)
    ]
    if arguments.points == "all":
        return points
    return random.Random(arguments.seed).sample(points, min(int(arguments.points), len(points)))


def each(arguments: argparse.Namespace, base: Path) -> Iterator[tuple[str, Tally]]:
    """Run what was asked for, scenario by scenario."""
    for name in arguments.scenario or SCENARIOS:
        tally = Tally()
        bench = Bench(name, base, planted.PROTOCOLS[arguments.planted], arguments.deadline_s)
        if arguments.points != "0":
            for point in chosen(bench, arguments):
                bench.try_point(point, tally)
                if arguments.first and tally.wrong:
                    break
        if arguments.cuts and not (arguments.first and tally.wrong):
            bench.cut_everywhere(tally, some=arguments.cuts, seed=arguments.seed, first=arguments.first)
        yield name, tally


def kind_of(finding: str) -> str:
    """The kind of a finding, as `lost` or `corrupt served`."""
    return finding.split(": ", 1)[1].removeprefix("after a power cut: ").split(":")[0]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", default="all", help="all, or how many of each scenario, at random")
    parser.add_argument("--fault", action="append", help="only this fault: kill, short, EIO, EIO+ (it stays)")
    parser.add_argument("--op", action="append", help="only at calls of this name, as fsync")
    parser.add_argument(
        "--cuts", type=int, default=0, help="power cuts too; so many random ones at each call"
    )
    parser.add_argument(
        "--reads", action="store_true", help="fault the calls that read, not those that write"
    )
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS])
    parser.add_argument("--planted", default="none", choices=[*planted.PROTOCOLS], help="a bad protocol")
    parser.add_argument("--first", action="store_true", help="stop a scenario at its first finding")
    parser.add_argument("--list", action="store_true", help="only list the calls that write, of a clean run")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def run(argv: Sequence[str]) -> program.Figures:
    """Try the points that the arguments ask for."""
    arguments, begun = parsed(argv), time.monotonic()
    torch.save(torch.zeros(1), buffer := io.BytesIO())  # imports what each child would have to
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    gc.freeze()  # a collection in a child would copy every page that it shares with this process
    figures: dict[str, Any] = {"points": 0, "unfired": 0, "carried_on": 0, "by_scenario": {}}
    by_fault: Counter[str] = Counter()
    wrong: list[str] = []
    with program.workplace() as base:
        if arguments.list:
            runs = {name: Bench(name, base).clean_run()[0] for name in arguments.scenario or SCENARIOS}
            listed = {
                name: [[c.op, Path(c.path).name] for c in calls if c.writes] for name, calls in runs.items()
            }
            return program.figures({"calls": listed}, wrong, begun)
        for name, tally in each(arguments, base):
            by_fault.update(tally.points)
            figures["by_scenario"][name] = tally.points.total()
            figures["points"] += tally.points.total()
            figures["unfired"] += tally.unfired
            figures["carried_on"] += tally.carried_on
            wrong += tally.wrong
    wrong += [f"{figures['unfired']} points: unfired"] * (figures["unfired"] > 0)
    kinds = Counter(map(kind_of, wrong))
    return program.figures({**figures, "by_fault": dict(by_fault), "kinds": dict(kinds)}, wrong, begun)


if __name__ == "__main__":
    preload.ensure("tests.chaos.enumerate")
    sys.exit(program.main(run))
