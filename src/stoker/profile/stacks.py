"""What the code does while samples are read: the stack of the thread that reads, looked at every millisecond.

Sampling slows what is watched by less than counting calls does, and sees time spent in files and databases.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

EVERY_S = 0.001
SWITCH_S = 0.0005
"""How soon a thread that computes lets the one that looks in; Python's own is longer than the interval."""
Line: TypeAlias = tuple[str, int, str]
"""File, number of the line, function."""
Stack: TypeAlias = tuple[Line, ...]
"""From the outermost call inwards."""
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclass(slots=True)
class Stacks:
    """How often each stack was seen."""

    seen: Counter[Stack] = field(default_factory=Counter[Stack])

    @property
    def total(self) -> int:
        """Looks in all."""
        return self.seen.total()

    def hottest(self) -> tuple[Line, float] | None:
        """The innermost line of the user's own code that most time passes in, and its part; None: none."""
        lines: Counter[Line] = Counter()
        for stack, count in self.seen.items():
            own = [line for line in stack if not _of_library(line[0])]
            if own or stack:
                lines[(own or stack)[-1]] += count
        if not lines:
            return None
        line, count = lines.most_common(1)[0]
        return line, count / self.total


def watch(work: Callable[[], None]) -> Stacks:
    """Do `work`, and say where its time went."""
    stacks, over = Stacks(), threading.Event()
    thread, base = threading.get_ident(), len(_stack(inspect.currentframe()))

    def look() -> None:
        while not over.wait(EVERY_S):
            frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  the documented way
            found = _stack(frame)[base + 1 :]  # below us, and below the call of `work`
            if found:
                stacks.seen[found] += 1

    looker = threading.Thread(target=look, daemon=True, name="profile")
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    looker.start()
    try:
        work()
    finally:
        over.set()
        looker.join()
        sys.setswitchinterval(before)
    return stacks


def time_samples(read: Callable[[int], object], numbers: Sequence[int]) -> dict[int, float]:
    """Seconds that each sample takes."""
    took: dict[int, float] = {}
    for number in numbers:
        begin = time.perf_counter()
        read(number)
        took[number] = time.perf_counter() - begin
    return took


def source_of(line: Line) -> str:
    """A line as it is written, and where."""
    text = linecache.getline(line[0], line[1]).strip()
    return (
        f"`{text}` ({Path(line[0]).name}:{line[1]})"
        if text
        else f"{line[2]} ({Path(line[0]).name}:{line[1]})"
    )


def _stack(frame: FrameType | None) -> Stack:
    found: list[Line] = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def _of_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or file.startswith("<")
