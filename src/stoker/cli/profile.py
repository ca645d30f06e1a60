"""The command that says where the time of a training goes: somebody's own script, or a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import Edge, edge
from stoker.cli.flags import Debug, Json
from stoker.cli.render import bold, table
from stoker.cli.runs import load_settings
from stoker.errors import ConfigError, StalledError
from stoker.units import format_percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.profile.result import Profile

PAGE = Path("runs/profile.html")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(profile)


def profile(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    what: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT | CONFIG", readable=False, help="What trains: Python, or settings."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE | ARGUMENTS", help="Settings; of a script its own, after `--`."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to time of each kind.")] = 50,
    budget: Annotated[
        str | None, typer.Option(metavar="stall=2%", help="Waiting longer than this is exit code 5.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="What the machine costs an hour.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="H100=2.59", help="What another GPU costs; may be repeated.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds that it may take.")] = 600.0,
    page: Annotated[Path, typer.Option(help="Where to write the page.")] = PAGE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a training waits for.

    A script runs until its first DataLoader was timed: its own batches, then one at hand, then a made-up
    one. A configuration's training is timed so, and every stage of some samples: open, read, encode, write.
    What each tier, and other GPUs, would make of it is predicted.

    \b
    Example:
      stoker profile train.py
      stoker profile train.py --budget stall=2% -- --epochs 1
      stoker profile configs/train_burgers_32dim.yaml training.tier=disk --price H100=2.59
    """
    with edge(as_json=as_json, debug=debug) as out:
        most = None if budget is None else _budget(budget)
        prices = _prices(price or [])
        from stoker.pipeline.folders import require_writable
        from stoker.profile.page import write_page

        require_writable(page.parent, "the folder of --page")
        if what.suffix.lower() in {".yaml", ".yml"}:
            found = _of_config(out, what, words or [], (steps, price_per_hour, prices, timeout))
        else:
            from stoker.profile.run import profile_script

            found = profile_script(
                what,
                words or [],
                steps=steps,
                price_per_hour=price_per_hour,
                prices=prices,
                timeout_s=timeout,
            )
        write_page(found, page, title=what.name)
        out.show(found, show)
        out.note(str(page))
        if most is not None and found.loop.stall > most:
            stall = format_percent(found.loop.stall)
            out.note(f"stall {stall}, and --budget allows {format_percent(most)}. {found.verdict}")
            raise typer.Exit(StalledError.exit_code)


def _of_config(
    out: Edge, path: Path, overrides: list[str], asked: tuple[int, float | None, Mapping[str, float], float]
) -> Profile:
    from stoker.pipeline.profile import profile_config
    from stoker.runtime.libc import keep_freed_memory

    keep_freed_memory()  # as where caches are filled: without it an encoder's time may double
    config = load_settings(out, path, overrides)
    steps, price_per_hour, prices, timeout_s = asked
    return profile_config(
        config, steps=steps, price_per_hour=price_per_hour, prices=prices, timeout_s=timeout_s
    )


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


def _prices(words: list[str]) -> dict[str, float]:
    """Prices by name, of `H100=2.59`."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name or found[name] <= 0:
            raise ConfigError(f"--price {word} is not understood. Expected a GPU and a price, as H100=2.59")
    return found


def show(result: Profile, console: Console) -> None:
    """The loop as it is, each stage and tier, other GPUs, stragglers, the verdict."""
    from stoker.profile.page import gpu_rows, stage_rows, straggler_lines, tier_rows

    for heading, rows, fixed in (
        (bold("", "a step", "stall", "an epoch", "cost"), tier_rows(result), 5),
        (bold("stage", "a sample", "part"), stage_rows(result), 3),
        (bold("GPU", "holds", "step at best", "stall", "an epoch", "cost"), gpu_rows(result), 6),
    ):
        if rows:
            right = range(1, fixed)
            table(
                console,
                [heading, *(tuple(map(escape, row)) for row in rows)],
                fixed=fixed,
                right=right,
                gap=2,
            )
            console.print()
    if result.elsewhere:
        console.print(escape(result.elsewhere_note), soft_wrap=True)
    for line in (*straggler_lines(result), *result.remarks):
        console.print(escape(line), soft_wrap=True)
    console.print(escape(result.verdict), soft_wrap=True)
