"""The command that does the whole job on data it makes: a simulation, or rows of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import edge
from stoker.cli.flags import Debug, Json
from stoker.cli.runs import judge
from stoker.cli.together import refuse_ranks
from stoker.errors import ConfigError
from stoker.precompute.guarded import started_ns
from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.demo_radio import RadioResult


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(demo)


def demo(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[radio] [KEY=VALUE]",
            help="What to do it on, and settings, as training.epochs=3; default: a simulation.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Of radio: sqlite:///FILE or postgresql://...; default: data/demo/radio.db."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Do the whole job on generated data.

    Simulates Burgers' equation, encodes, plans and trains; needs no download. A second run finds its cache.
    With `radio` it makes 4,030 rows of a database, and trains a network that finds transmitters.

    \b
    Example:
      stoker demo
      stoker demo training.epochs=5
      stoker demo radio --database postgresql:///lab
    """
    with edge(as_json=as_json, debug=debug) as out:
        refuse_ranks("demo")
        given = list(words or [])
        kinds = [word for word in given if "=" not in word]
        if kinds not in ([], ["radio"]):
            raise ConfigError(f"a demo of {' '.join(kinds)} is not known. Expected radio, or key=value alone")
        overrides = [word for word in given if "=" in word]
        if kinds:
            from stoker.pipeline.demo_radio import DATABASE, run_radio

            out.show(run_radio(overrides, database=database or DATABASE, say=out.note), show_radio)
            return
        if database is not None:
            raise ConfigError("--database is for the rows of `stoker demo radio`. Leave it out, or add radio")
        from stoker.cli import render
        from stoker.pipeline.demo import run_demo

        result = run_demo(overrides, started=started_ns() / 1e9, on_event=render.events(out.note))
        out.show(result, render.demo)
        judge(out, result.train)


def show_radio(result: RadioResult, console: Console) -> None:
    """The four steps and the figure that matters."""
    from stoker.cli import render

    console.print(escape(result.machine), "", sep="\n", soft_wrap=True)
    rows: list[render.Cells] = [
        ("1  data", escape(result.data_line), format_seconds(result.data_s), escape(result.database))
    ]
    for number, cache in enumerate(result.caches):
        rows += render.cache_rows("" if number else "2  cache", cache, named=True)
    size = f"{format_bytes(result.record_bytes)} each"
    held = f"{format_count(result.plan.records, 'record')} of {size} on the {result.plan.plan.tier} tier"
    stall = (
        f"{format_count(result.steps, 'step')}, stall {format_percent(result.stall)}, loss {result.loss:.3f}"
    )
    rows += [
        ("3  plan", held, "", escape(render.held(result.plan))),
        ("4  train", stall, format_seconds(result.train_s), escape(result.run_dir)),
    ]
    render.table(console, rows, gap=2)
    near, far = result.trained, result.untrained
    console.print()
    console.print(
        f"position error {format_count(near.mean_m)} m (median {format_count(near.p50_m)} m), untrained "
        f"{format_count(far.mean_m)} m · loss from the cache {result.losses[0]:.6f}, from the database "
        f"{result.losses[1]:.6f}",
        soft_wrap=True,
    )
