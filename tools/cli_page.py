"""Write the page of commands: the help of each, as a terminal shows it.

python tools/cli_page.py > docs/reference/cli-help.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

HEAD = """# Help of every command

What `stoker COMMAND --help` prints. [cli.md](cli.md) explains the commands and shows their output.
"""


def commands(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the help of a command and of all below it."""
    yield context.command_path, command.get_help(context)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if not below.hidden:
                yield from commands(below, type(context)(below, info_name=name, parent=context))


def page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"
    import typer

    from stoker.cli.main import app

    top = typer.main.get_command(app)
    context = top.make_context("stoker", ["--help-not-asked"], resilient_parsing=True)
    parts = (f"## {path}\n```text\n{text.rstrip()}\n```\n" for path, text in commands(top, context))
    return "\n".join((HEAD, *parts))


if __name__ == "__main__":
    print(page(), end="")
