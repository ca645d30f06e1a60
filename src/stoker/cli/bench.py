"""The command that sets one's own cache beside the limits of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import edge
from stoker.cli.flags import Debug, Json, config_and_overrides, tell_settings
from stoker.cli.render import Cells, bold, table
from stoker.errors import ConfigError
from stoker.units import format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.bench import BenchResult, Figure, Job
    from stoker.pipeline.bench_encode import EncodeBench

PICTURE = Path("runs/bench.png")
BATCH_SIZE = 256


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(bench)


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[encode] [CONFIG | CACHE] [KEY=VALUE]",
            help="Settings, or a cache's folder: serve its batches. Left out: measure the machine alone.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure, in all.")] = 20.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"Examples in a batch of a CACHE; default: {BATCH_SIZE}.")
    ] = None,
    picture: Annotated[Path, typer.Option(help="Where to draw the figures.")] = PICTURE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and how fast tiers serve.

    First its limits: copying and gathering in memory, reading from disk, copying to a GPU. Then how fast each
    tier serves the batches of a cache, and what part of its limit that is. The cache is only read; all that
    is written is the picture.

    \b
    Example:
      stoker bench configs/train_burgers_32dim.yaml
      stoker bench data/latent_cache/burgers1d_train --seconds 10
      stoker bench encode configs/train_burgers_32dim.yaml
    """
    with edge(as_json=as_json, debug=debug) as out:
        if words and words[0] == "encode":
            out.show(_encode(words[1:]), show_encode)
            return
        from stoker.pipeline.bench import run_bench

        out.show(run_bench(_job(words or [], batch_size), seconds=seconds, picture=picture), show)


def _encode(words: list[str]) -> EncodeBench:
    from stoker.config import load_config
    from stoker.pipeline.bench_encode import bench_encode

    return bench_encode(load_config(*config_and_overrides(words)))


def show_encode(result: EncodeBench, console: Console) -> None:
    """The sizes that were tried, and the setting."""
    found = result.found
    rows: list[Cells] = [bold("samples a call", "a call", "samples/s", "of the fastest")]
    best = max((trial.samples_s for trial in found.trials), default=1.0)
    rows += [
        (
            str(one.samples),
            format_seconds(one.call_s),
            f"{one.samples_s:.4g}",
            format_percent(one.samples_s / best),
        )
        for one in found.trials
    ]
    if found.trials:
        table(console, rows, fixed=4, right=range(4), gap=2)
    console.print(escape(f"{found.device}: {found.why}"), soft_wrap=True)
    force = result.in_force
    now = "auto, nothing known yet" if force is None else f"{force.samples or result.fixed} ({force.where})"
    console.print(escape(f"in force: {now}; the fixed rule gives {result.fixed}"), soft_wrap=True)
    console.print(escape(result.setting), soft_wrap=True)


def _job(words: list[str], batch_size: int | None) -> Job | None:
    from stoker.config import load_config
    from stoker.pipeline.bench import job_of_cache, job_of_config

    paths, overrides = tell_settings(words)
    if len(paths) > 1 or (overrides and not (paths and paths[0].suffix in (".yaml", ".yml"))):
        raise ConfigError(
            f"expected one CONFIG with settings, one CACHE, or nothing, found {', '.join(words)}. "
            "Settings are written key=value and go with a CONFIG"
        )
    if paths and paths[0].is_dir():
        return job_of_cache(paths[0], batch_size or BATCH_SIZE)
    if batch_size is not None:
        raise ConfigError(
            f"--batch-size {batch_size} is of a CACHE. Write training.batch_size={batch_size} after a CONFIG"
        )
    if not paths:
        return None
    return job_of_config(load_config(paths[0], overrides))


def show(result: BenchResult, console: Console) -> None:
    """Tiers beside their limits, the limits, what to do."""
    console.print(escape(result.machine), soft_wrap=True)
    if result.cache:
        console.print(escape(result.cache), soft_wrap=True)
    console.print()
    rows: list[Cells] = []
    if result.tiers:
        rows.append(bold("tier", "serves", "a batch", "of its limit", ""))
        rows += [(name, *_figures(figure), _note(figure)) for name, figure in result.tiers.items()]
        rows.append(("",))
    rows.append(bold("limit of this machine", "at most", "", "", ""))
    rows += [(name, _rate(f.bytes_s), "", "", _note(f)) for name, f in result.limits.items()]
    table(console, rows, fixed=4, right=range(1, 4), gap=2)
    console.print("", escape(result.advice), sep="\n", soft_wrap=True)
    if result.picture is not None:
        console.print(escape(f"{result.picture} · {format_seconds(result.seconds)}"), soft_wrap=True)


def _figures(figure: Figure) -> Cells:
    fraction = "-" if figure.fraction is None else format_percent(figure.fraction)
    batch = "-" if figure.batch_s is None else format_seconds(figure.batch_s)
    return (_rate(figure.bytes_s), batch, fraction)


def _note(figure: Figure) -> str:
    scattered = f", rounds differ by {format_percent(figure.scatter)}" if figure.scatter > 0.2 else ""
    return escape(figure.what + scattered)


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.3g} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.3g} MB/s"
