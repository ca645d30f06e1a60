"""Hand a run's figures to its trackers without ever waiting for one of them.

Each tracker is a process, and the pipe to it is the bounded queue: a line that does not fit is dropped and
counted, never waited for. So a tracker that is slow, hangs or crashes costs the run nothing but a remark;
when the run is over it has a deadline to finish, after which it is killed.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from stoker.monitor.trackers import Ending, TrackedRun, Tracker, make_tracker
from stoker.runtime.processes.child import LIGHT, Child
from stoker.runtime.processes.entry import Connection
from stoker.schema import Json

PIPE_BYTES = 1 << 20
"""Lines that wait in a pipe: some thousand rows of a dozen figures."""
END_S = 60.0
"""Seconds that all trackers together have to finish once the run is over."""
LAST_BYTES = 2000
"""Of a tracker's log, to find its last line."""


class Tracking:
    """The trackers of one run; close it with `end`."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        say: Callable[[str], None],
        *,
        end_s: float = END_S,
    ) -> None:
        """Start a process for each name; `say` gets a line about whatever goes wrong with one."""
        self._end_s = end_s
        self._pipes = [_Pipe(name, run.folder / f"tracker-{name}.log", say) for name in names]
        start: dict[str, Json] = {
            "name": run.name,
            "folder": str(run.folder),
            "settings": dict(run.settings),
            "resumed": run.resumed,
        }
        for pipe in self._pipes:
            pipe.send({"start": start})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass figures on, as far as they are numbers; returns at once."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for pipe in self._pipes if finite else ():
            pipe.send({"step": step, "values": dict(finite)})

    def end(self, status: Ending) -> None:
        """Tell how the run ended, and wait for all trackers together; what is not done by then is killed."""
        deadline_s = time.monotonic() + self._end_s
        for pipe in self._pipes:
            pipe.close(status, deadline_s)
        for pipe in self._pipes:
            pipe.finish(deadline_s, self._end_s)


class _Pipe:
    """One tracker's process."""

    def __init__(self, name: str, log: Path, say: Callable[[str], None]) -> None:
        self._name, self._log, self._say = name, log, say
        self._sent = self._dropped = 0
        self._ended = self._told = False
        theirs, ours = os.pipe()
        self._stdin = os.fdopen(ours, "wb", buffering=0)
        try:
            with log.open("ab") as out:
                self._child = Child(
                    "stoker.monitor.tracking:track",
                    what=f"a process for tracker {name}",
                    arguments={"name": name},
                    shared=[theirs],
                    output=out.fileno(),
                    modules=LIGHT,  # the process stays as long as the run
                    death_signal=None,  # it reports the end of a run that was killed
                )
        except BaseException:
            self._stdin.close()
            raise
        finally:
            os.close(theirs)
        with suppress(OSError):  # a user's quota of pipe memory; the ordinary 64 KiB do as well
            fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._stdin.fileno(), False)

    def send(self, row: Mapping[str, Json]) -> bool:
        """Whether a line went into the pipe whole; half a line would spoil the next, so it ends the pipe."""
        if self._ended:
            return False
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._sent += 1
        try:
            written = self._stdin.write(line)
        except BrokenPipeError:
            return self._gone()
        if written == len(line):
            return True
        self._dropped += 1
        if self._dropped == 1:
            self._say(
                f"tracker {self._name} does not keep up: figures are dropped, the run continues ({self._log})"
            )
        if written:
            self._stop_sending()
        return False

    def close(self, status: Ending, deadline_s: float) -> None:
        """Say how the run ended, as soon as there is room for that, and close the pipe."""
        if not self._ended:
            select.select([], [self._stdin], [], max(0.0, deadline_s - time.monotonic()))
            self.send({"end": status})
        self._stop_sending()

    def finish(self, deadline_s: float, all_s: float) -> None:
        """Wait for the process until then, and say what it did not do."""
        if not self._child.wait(deadline_s - time.monotonic()):
            self._child.stop(0.0)
            self._say(f"tracker {self._name} was not done {all_s:g} s after the run: ended ({self._log})")
        elif self._child.exit and self._child.exit.code and not self._dropped:
            self._gone()
        self._child.close()
        if self._dropped:
            self._say(f"tracker {self._name}: {self._dropped} of {self._sent} rows dropped ({self._log})")

    def _stop_sending(self) -> None:
        self._ended = True
        with suppress(OSError):
            self._stdin.close()

    def _gone(self) -> bool:
        """Say once that the process failed, in its own last words."""
        if not self._told:
            self._told = True
            self._say(
                f"tracker {self._name} failed, the run continues: {_last_line(self._log)} ({self._log})"
            )
        self._stop_sending()
        return False


def _last_line(log: Path) -> str:
    """The last line of a log, or that it is empty."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "its log cannot be read"


def serve(tracker: Tracker, lines: Iterable[str], log: TextIO) -> int:
    """Hand lines to a tracker; returns how many rows it failed to keep."""
    failed = 0
    for text in lines:
        row: Mapping[str, Any] = json.loads(text)
        if "start" in row:
            facts: dict[str, Any] = row["start"]
            folder = Path(facts.pop("folder"))
            tracker.start(TrackedRun(folder=folder, **facts))
        elif "end" in row:
            tracker.end(row["end"])
            return failed
        else:
            try:
                tracker.log(row["step"], row["values"])
            except Exception as error:  # noqa: BLE001 (code of others; one row lost is no reason to lose all)
                failed += 1
                print(f"step {row['step']}: {type(error).__name__}: {error}", file=log, flush=True)
    tracker.end("killed")
    return failed


def track(connection: Connection) -> int:
    """Run a tracker, in the child; 0 where it kept everything.

    A run that was killed closes the pipe without a last word, and its tracker then reports that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the run, which then says how it ended
    try:
        with os.fdopen(connection.shared[0], encoding="utf-8") as lines:
            failed = serve(make_tracker(connection.arguments["name"]), lines, sys.stderr)
    except Exception as error:  # noqa: BLE001 (the edge of the process: its last line is what the run repeats)
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if failed:
        print(f"{failed} rows were not kept", file=sys.stderr)  # noqa: T201
    return 1 if failed else 0
