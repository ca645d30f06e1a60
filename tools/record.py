"""Record commands in a real terminal as an animated picture: docs/images/terminal.svg.

    pip install pyte; python tools/record.py [--out PICTURE]

The commands of `SESSION` run in a pseudo-terminal, in an empty folder with the demo's data. A frame is what
the terminal showed at that moment, at the speed at which it came. Pauses of more than `LONGEST_PAUSE_S` are
shortened to that. Readers who ask for less motion see the last frame.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SESSION = (
    "stoker init burgers.hdf5",
    "stoker train stoker.yaml training.epochs=2",
    "stoker train stoker.yaml training.epochs=2 training.lr=3e-4 training.run_dir=runs/lr  # other settings",
)
COLUMNS, ROWS = 104, 30
LONGEST_PAUSE_S, FRAME_S, KEY_S, END_S, TIMEOUT_S = 1.0, 0.1, 0.03, 5.0, 180.0
CELL, LINE, MARGIN = 8.0, 18, 14  # of a character of 13.3 px, in px
TEXT, GROUND = "#d8d4cf", "#1f1b19"
COLORS = {
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
}
Frame = tuple[float, tuple[str, ...]]
"""Seconds since the beginning, and the lines that are shown, as SVG text."""


def output_of(command: str, folder: Path) -> Iterator[tuple[float, bytes]]:
    """Run a command in a pseudo-terminal; yield what it prints, and when, in seconds from its start.

    Raises:
        SystemExit: The command failed, or took longer than `TIMEOUT_S`.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    child = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    begin = time.monotonic()
    while True:
        ended = child.poll() is not None  # what it started may keep the terminal open
        if not select.select([ours], [], [], 0.2)[0]:
            if ended:
                break
            if time.monotonic() - begin > TIMEOUT_S:
                child.kill()
                sys.exit(f"{command}: not done after {TIMEOUT_S:g} s")
            continue
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        yield time.monotonic() - begin, data
    os.close(ours)
    if child.wait():
        sys.exit(f"{command}: ended with {child.returncode}")


def shown_lines(screen: Any) -> tuple[str, ...]:
    """Return what a terminal shows as lines of SVG text, without the empty ones at its end."""
    lines: list[str] = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        while cells and cells[-1].data == " ":
            cells.pop()
        spans: list[str] = []
        for (color, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            text = escape("".join(cell.data for cell in run), quote=False)
            shade = COLORS.get(
                color, f"#{color}" if color != "default" else ""
            )  # 256 colors come as hex digits
            look = f' fill="{shade}"' if shade else ""
            look += ' font-weight="bold"' if bold else ""
            spans.append(f"<tspan{look}>{text}</tspan>" if look else text)
        lines.append("".join(spans))
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines)


def record(folder: Path) -> list[Frame]:
    """Run the session; return its frames, each different from the one before."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = [(0.0, ())]
    clock = 0.0

    def show() -> None:
        lines = shown_lines(screen)
        if lines == frames[-1][1]:
            return
        if clock - frames[-1][0] < FRAME_S and len(frames) > 1:
            frames[-1] = (frames[-1][0], lines)
        else:
            frames.append((clock, lines))

    for command in SESSION:
        stream.feed(b"\x1b[1;32m$\x1b[0m ")
        for key in command:
            stream.feed(key.encode())
            clock += KEY_S
            show()
        clock += 0.4
        stream.feed(b"\r\n")
        before = 0.0
        for at, data in output_of(command, folder):
            clock += min(at - before, LONGEST_PAUSE_S)
            before = at
            stream.feed(data)
            show()
        clock += LONGEST_PAUSE_S
    return [*frames, (clock + END_S, ())]


def picture(frames: list[Frame]) -> str:
    """Return the frames as an SVG that shows one after the other, for ever."""
    width, height = round(COLUMNS * CELL + 2 * MARGIN), ROWS * LINE + 2 * MARGIN
    total = frames[-1][0]
    styles, groups = [], []
    for number, ((begin, lines), (end, _)) in enumerate(pairwise(frames)):
        a, b = 100 * begin / total, 100 * end / total
        last = number == len(frames) - 2
        seen, gone = f"{a + 0.001:.3f}%,{b:.3f}%", f"{b + 0.001:.3f}%,100%"
        after = "" if last else f"{gone}{{visibility:hidden}}"
        styles.append(
            f"@keyframes f{number}{{0%,{a:.3f}%{{visibility:hidden}}{seen}{{visibility:visible}}{after}}}"
            f"#f{number}{{visibility:{'visible' if last else 'hidden'};"
            f"animation:f{number} {total:.2f}s step-end infinite}}"
        )
        rows = "".join(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * row + 13}">{line}</text>'
            for row, line in enumerate(lines)
            if line
        )
        groups.append(f'<g id="f{number}">{rows}</g>')
    still = "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>Terminal: {escape('; '.join(SESSION), quote=False)}</title>"
        f"<style>text{{font:13.3px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"fill:{TEXT}}}{''.join(styles)}{still}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def main() -> None:
    """Record the session."""
    from stoker.run.demo import BurgersSpec, write_burgers

    parser = argparse.ArgumentParser(description="Record commands in a terminal as an animated picture.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/terminal.svg")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        write_burgers(Path(folder, "burgers.hdf5"), BurgersSpec())
        frames = record(Path(folder))
    out.write_text(picture(frames), encoding="utf-8")
    print(f"{out}: {len(frames)} frames, {frames[-1][0]:.1f} s, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
