"""How far a long command is: a line kept up to date on a terminal, else one every ten seconds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stoker.cli import command
from stoker.cli.command import CommandOutput, ProgressLine


def test_without_a_terminal_lines_come_every_so_often_and_the_last_ones_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])

    with ProgressLine(CommandOutput(as_json=False, debug=False)) as progress:
        for now in range(25):
            clock[0] = float(now)
            progress.tell(f"{now} of 25", "all well")
        progress.tell("25 of 25", last=True)

    told = capsys.readouterr().err.splitlines()
    assert told == ["11 of 25", "all well", "22 of 25", "all well", "25 of 25"]


def test_on_a_terminal_one_line_is_shown_and_taken_away_when_the_command_fails() -> None:
    out, screen = CommandOutput(as_json=False, debug=False), io.StringIO()
    out.notes = Console(file=screen, force_terminal=True, width=80)

    def fail() -> None:
        with ProgressLine(out) as progress:
            progress.tell("3 of [7] files", "one.h5")
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    shown = screen.getvalue()
    assert "3 of [7] files  one.h5" in shown
    assert shown.endswith("\x1b[2K"), "the line is taken away"
