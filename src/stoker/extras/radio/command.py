"""`stoker demo radio`: rows of a database, and a network that finds transmitters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from stoker.cli import output
from stoker.cli.command import CommandOutput
from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.extras.radio.demo import RadioResult


def demo_radio(out: CommandOutput, overrides: list[str], database: str | None) -> None:
    """Run the demo and print what came of it.

    Args:
        database: Its URL; None: a file of SQLite.
    """
    from stoker.extras.radio.demo import DATABASE, run_radio

    out.show(run_radio(overrides, database=database or DATABASE, say=out.note), show_radio)


def show_radio(result: RadioResult, console: Console) -> None:
    """Print the four steps and the figure that matters."""
    console.print(escape(result.machine), "", sep="\n", soft_wrap=True)
    rows: list[output.Cells] = [
        ("1  data", escape(result.data_line), format_seconds(result.data_s), escape(result.database))
    ]
    for number, cache in enumerate(result.caches):
        rows += output.cache_rows("" if number else "2  cache", cache, named=True)
    size = f"{format_bytes(result.record_bytes)} each"
    held = f"{format_count(result.plan.records, 'record')} of {size} on the {result.plan.plan.tier} tier"
    stall = (
        f"{format_count(result.steps, 'step')}, stall {format_percent(result.stall)}, loss {result.loss:.3f}"
    )
    rows += [
        ("3  plan", held, "", escape(output.held(result.plan))),
        ("4  train", stall, format_seconds(result.train_s), escape(result.run_dir)),
    ]
    output.table(console, rows, gap=2)
    near, far = result.trained, result.untrained
    console.print()
    console.print(
        f"position error {format_count(near.mean_m)} m (median {format_count(near.p50_m)} m), untrained "
        f"{format_count(far.mean_m)} m · loss from the cache {result.losses[0]:.6f}, from the database "
        f"{result.losses[1]:.6f}",
        soft_wrap=True,
    )
