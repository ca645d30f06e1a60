"""Commands run in this process."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from typer.testing import CliRunner

from stoker.cli.main import app


def run(*args: str, exit_code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout, result.stderr


def run_json(*args: str, exit_code: int = 0) -> dict[str, Any]:
    stdout, _ = run(*args, "--json", exit_code=exit_code)
    lines = stdout.splitlines()
    assert len(lines) == 1, stdout
    return json.loads(lines[0])


class Screen(io.StringIO):
    """A terminal, as far as a program can tell."""

    def isatty(self) -> bool:
        return True


def strip_ansi(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
