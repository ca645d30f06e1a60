"""The commands demo, bench and profile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import (
    CommandOutput,
    cli_command,
    config_and_overrides,
    end_on_stall,
    load_settings,
    refuse_ranks,
    tell_settings,
)
from stoker.cli.output import Cells, bold, table
from stoker.errors import ConfigError, StalledError
from stoker.plugins import load_extension
from stoker.runtime.signals import started_ns
from stoker.units import format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from stoker.profile.result import Profile
    from stoker.run.bench import BenchFigure, BenchJob, BenchResult, EncodeBench


# ----------------------------------------------------------------------------------------------------------
# The command that does the whole job on data it makes: a simulation, or rows of a database.


@cli_command
def demo(
    out: CommandOutput,
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
    refuse_ranks("demo")
    given = list(words or [])
    kinds = [word for word in given if "=" not in word]
    if kinds not in ([], ["radio"]):
        raise ConfigError(
            f"a demo of {' '.join(kinds)} is not known", hint="Expected radio, or key=value alone"
        )
    overrides = [word for word in given if "=" in word]
    if kinds:
        load_extension("demo.radio")(out, overrides, database)
        return
    if database is not None:
        raise ConfigError(
            "--database is for the rows of `stoker demo radio`", hint="Leave it out, or add radio"
        )
    from stoker.cli import output
    from stoker.run.demo import run_demo

    result = run_demo(overrides, started=started_ns() / 1e9, on_event=output.events(out.note))
    out.show(result, output.demo)
    end_on_stall(out, result.train)


# ----------------------------------------------------------------------------------------------------------
# The command that compares a cache with the limits of the machine.


PICTURE = Path("runs/bench.png")
BATCH_SIZE = 256


@cli_command
def bench(
    out: CommandOutput,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[encode] [CONFIG | CACHE] [KEY=VALUE]",
            help="Settings, or a cache's folder or URL: serve its batches. Left out: the machine alone.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long to measure, in all; filling slow tiers may take as long again.")
    ] = 20.0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Examples in a batch of a CACHE; default: {BATCH_SIZE}, or all it has."),
    ] = None,
    picture: Annotated[Path, typer.Option(help="Where to draw the figures.")] = PICTURE,
) -> None:
    """Measure this machine and how fast tiers serve.

    First its limits: copying and gathering in memory, reading from disk, copying to a GPU. Then how fast each
    tier serves the batches of a cache, and what part of its limit that is. Of a cache at a URL: what plain
    parallel requests get, and what a first epoch does. The cache is only read; all that is written is the
    picture, and of a URL a temporary copy of what was fetched.

    \b
    Example:
      stoker bench configs/train_burgers_32dim.yaml
      stoker bench data/latent_cache/burgers1d_train --seconds 10
      stoker bench s3://bucket/caches/burgers1d_train
      stoker bench encode configs/train_burgers_32dim.yaml
    """
    if words and words[0] == "encode":
        out.show(_encode(words[1:]), show_encode)
        return
    from stoker.run.bench import run_bench

    with _job(words or [], batch_size) as job:
        result = run_bench(job, seconds=seconds, picture=picture)
    out.show(result, show_bench)


def _encode(words: list[str]) -> EncodeBench:
    from stoker.config import load_config
    from stoker.run.bench import bench_encode
    from stoker.run.context import Run

    return bench_encode(Run(load_config(*config_and_overrides(words))))


def show_encode(result: EncodeBench, console: Console) -> None:
    """Print the sizes that were tried, and the setting."""
    found = result.found
    rows: list[Cells] = [bold("samples a call", "a call", "samples/s", "of the fastest", "noise")]
    best = max((trial.samples_s for trial in found.trials), default=1.0)
    rows += [
        (
            str(one.samples),
            format_seconds(one.call_s),
            f"{one.samples_s:.4g}",
            format_percent(one.samples_s / best),
            format_percent(one.noise) if one.rounds > 1 else "-",
        )
        for one in found.trials
    ]
    if found.trials:
        table(console, rows, fixed=5, right=range(5), gap=2)
    console.print(escape(f"{found.device}: {found.why}"))
    settled = result.settled
    now = "auto, nothing known yet" if settled is None else f"{result.in_force} ({settled.where})"
    console.print(escape(f"in force: {now}; the fixed rule gives {result.fixed_rule}"))
    console.print(escape(result.setting))


def _job(words: list[str], batch_size: int | None) -> AbstractContextManager[BenchJob | None]:
    from stoker.config import load_config
    from stoker.run.bench import job_of_cache, job_of_config, job_of_url
    from stoker.run.context import Run
    from stoker.store.remote import is_url

    if len(words) == 1 and is_url(words[0]):
        return job_of_url(words[0], batch_size or BATCH_SIZE, or_all=batch_size is None)

    paths, overrides = tell_settings(words)
    if len(paths) > 1 or (overrides and not (paths and paths[0].suffix in (".yaml", ".yml"))):
        raise ConfigError(
            f"expected one CONFIG with settings, one CACHE, or nothing, found {', '.join(words)}",
            hint="Settings are written key=value and go with a CONFIG",
        )
    if paths and paths[0].is_dir():
        return nullcontext(job_of_cache(paths[0], batch_size or BATCH_SIZE, or_all=batch_size is None))
    if batch_size is not None:
        raise ConfigError(
            f"--batch-size {batch_size} is for a CACHE",
            hint=f"Write training.batch_size={batch_size} after a CONFIG",
        )
    if not paths:
        return nullcontext()
    return nullcontext(job_of_config(Run(load_config(paths[0], overrides))))


def show_bench(result: BenchResult, console: Console) -> None:
    """Print tiers with their limits, the limits, and what to do."""
    console.print(escape(result.machine))
    if result.cache:
        console.print(escape(result.cache))
    console.print()
    rows: list[Cells] = []
    if result.tiers:
        rows.append(bold("tier", "serves", "a batch", "of its limit", ""))
        rows += [(name, *_figures(figure), _note(figure)) for name, figure in result.tiers.items()]
        rows.append(("",))
    rows.append(bold("limit of this machine", "at most", "", "", ""))
    rows += [(name, format_rate(f.bytes_s), "", "", _note(f)) for name, f in result.limits.items()]
    table(console, rows, fixed=4, right=range(1, 4), gap=2)
    console.print("", escape(result.advice), sep="\n")
    if result.picture is not None:
        console.print(escape(f"{result.picture} · {format_seconds(result.seconds)}"))


def _figures(figure: BenchFigure) -> Cells:
    fraction = "-" if figure.fraction is None else format_percent(figure.fraction)
    batch = "-" if figure.batch_s is None else format_seconds(figure.batch_s)
    return (format_rate(figure.bytes_s), batch, fraction)


def _note(figure: BenchFigure) -> str:
    scattered = f", rounds differ by {format_percent(figure.scatter)}" if figure.scatter > 0.2 else ""
    return escape(figure.what + scattered)


# ----------------------------------------------------------------------------------------------------------
# The command that says where the time of a training goes: somebody's own script, or a configuration.


PAGE = Path("runs/profile.html")


@cli_command
def profile(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
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
    most = None if budget is None else _budget(budget)
    prices = _prices(price or [])
    from stoker.plan.resources import require_writable
    from stoker.profile.result import write_page

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
    out.show(found, show_profile)
    out.note(str(page))
    if most is not None and found.loop.stall > most:
        stall = format_percent(found.loop.stall)
        out.note(f"stall {stall}, and --budget allows {format_percent(most)}. {found.verdict}")
        raise typer.Exit(StalledError.exit_code)


def _of_config(
    out: CommandOutput,
    path: Path,
    overrides: list[str],
    asked: tuple[int, float | None, Mapping[str, float], float],
) -> Profile:
    from stoker.run.context import Run
    from stoker.run.profile import profile_config
    from stoker.runtime.libc import keep_freed_memory

    keep_freed_memory()  # as where caches are filled: without it an encoder's time may double
    config = load_settings(out, path, overrides)
    steps, price_per_hour, prices, timeout_s = asked
    return profile_config(
        Run(config), steps=steps, price_per_hour=price_per_hour, prices=prices, timeout_s=timeout_s
    )


def _budget(text: str) -> float:
    """Return the largest stall of `stall=2%`, or of `2%` alone."""
    name, _, value = text.rpartition("=")
    try:
        most = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        most = -1.0
    if name not in ("", "stall") or not 0 <= most <= 1:
        raise ConfigError(
            f"--budget {text} is not understood", hint="Expected a part of the time, as 2% or 0.02"
        )
    return most


def _prices(words: list[str]) -> dict[str, float]:
    """Return prices by name, of `H100=2.59`."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name or found[name] <= 0:
            raise ConfigError(
                f"--price {word} is not understood", hint="Expected a GPU and a price, as H100=2.59"
            )
    return found


def show_profile(result: Profile, console: Console) -> None:
    """Print the loop as it is, each stage and tier, other GPUs, stragglers, the verdict."""
    from stoker.profile.result import gpu_rows, stage_rows, straggler_lines, tier_rows

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
        console.print(escape(result.elsewhere_note))
    for line in (*straggler_lines(result), *result.remarks):
        console.print(escape(line))
    console.print(escape(result.verdict))
