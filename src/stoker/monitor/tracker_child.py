"""The process of one tracker: takes lines of JSON from standard input until they end.

Standard output and error are the tracker's log. A run that was killed closes the pipe without a last word,
and its tracker then reports that.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from stoker.monitor.trackers import TrackedRun, Tracker, make_tracker


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


def main(name: str) -> int:
    """Run the tracker of a name; 0 where it kept everything."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the run, which then says how it ended
    try:
        failed = serve(make_tracker(name), sys.stdin, sys.stderr)
    except Exception as error:  # noqa: BLE001 (the edge of the process: its last line is what the run repeats)
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if failed:
        print(f"{failed} rows were not kept", file=sys.stderr)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
