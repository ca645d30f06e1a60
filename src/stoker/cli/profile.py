"""The command that says where the time of somebody's own training script goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import edge
from stoker.cli.flags import Debug, Json
from stoker.cli.render import table
from stoker.errors import ConfigError, StalledError
from stoker.units import format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.profile.result import Profile

PAGE = Path("runs/profile.html")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(profile)


def profile(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", readable=False, help="A Python script that trains.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments, after `--`.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to time of each kind.")] = 50,
    budget: Annotated[
        str | None, typer.Option(metavar="stall=2%", help="Waiting longer than this is exit code 5.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="What the machine costs an hour.")] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds that the script may take.")] = 600.0,
    page: Annotated[Path, typer.Option(help="Where to write the page.")] = PAGE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a training script waits for.

    Runs it until its first DataLoader was timed: its own batches, then one at hand, then a made-up one. Then
    single samples are read, and what each tier would make of it is predicted.

    \b
    Example:
      stoker profile train.py
      stoker profile train.py --budget stall=2% -- --epochs 1
    """
    with edge(as_json=as_json, debug=debug) as out:
        most = None if budget is None else _budget(budget)
        from stoker.profile.page import write_page
        from stoker.profile.run import profile_script

        found = profile_script(
            script, arguments or [], steps=steps, price_per_hour=price_per_hour, timeout_s=timeout
        )
        write_page(found, page)
        out.show(found, show)
        out.note(str(page))
        if most is not None and found.loop.stall > most:
            stall = format_percent(found.loop.stall)
            out.note(f"stall {stall}, and --budget allows {format_percent(most)}. {found.verdict}")
            raise typer.Exit(StalledError.exit_code)


def _budget(text: str) -> float:
    """The largest stall of `stall=2%`, or of `2%` alone."""
    name, _, value = text.rpartition("=")
    try:
        most = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        most = -1.0
    if name not in ("", "stall") or not 0 <= most <= 1:
        raise ConfigError(f"--budget {text} is not understood. Expected a part of the time, as 2% or 0.02")
    return most


def show(result: Profile, console: Console) -> None:
    """The loop as it is, each tier, stragglers, the verdict."""
    from stoker.profile.page import table as rows_of

    table(console, [tuple(map(escape, row)) for row in rows_of(result)], fixed=4)
    for number, seconds in result.loop.stragglers():
        console.print(escape(f"sample {number:,} takes {format_seconds(seconds)}"))
    console.print(escape(result.verdict), soft_wrap=True)
