"""The command that imports an earlier cache of `.pt` files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, cli_command
from stoker.cli.output import some, table
from stoker.errors import ConfigError, IncompleteError
from stoker.units import format_count, format_seconds

if TYPE_CHECKING:
    from stoker.extras.import_pt.run import ImportResult


@cli_command
def import_pt(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    path: Annotated[
        Path, typer.Argument(metavar="DIR", readable=False, help="The folder with sample_00000.pt and so on.")
    ],
    out_dir: Annotated[str, typer.Option("--out", help="The cache folder to write to.")],
    name: Annotated[str, typer.Option(help="Name of the cache, as burgers1d_train.")],
    dtype: Annotated[str | None, typer.Option(help="Storage dtype; default: as in the files.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Samples there should be; default: up to the highest number.")
    ] = None,
    nan: Annotated[str, typer.Option(help="reject or allow samples with NaN or infinities.")] = "reject",
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit code 0 although samples are missing or broken.")
    ] = False,
) -> None:
    """Import an earlier cache of .pt files.

    Each file is read in a limited process of its own. Stopped at any moment, the same command resumes. Exit
    code 4 when a sample is missing or broken.

    \b
    Example:
      stoker cache import-pt old_cache/burgers1d_train --out data/latent_cache --name burgers1d_train
    """
    from stoker.extras.import_pt.run import ImportSettings
    from stoker.extras.import_pt.run import import_pt as run_import
    from stoker.store.remote import local_path

    if nan not in ("reject", "allow"):
        raise ConfigError(f"--nan is {nan!r}, expected reject or allow")
    settings = ImportSettings(dtype=dtype, count=count, nan="allow" if nan == "allow" else "reject")
    result = run_import(path, local_path(out_dir, "--out"), name=name, settings=settings)
    lacking = result.failures and not allow_missing
    out.show(result, render, exit_code=IncompleteError.exit_code if lacking else 0)


def render(result: ImportResult, console: Console) -> None:
    """Print what was stored, and every sample that was not."""
    cache = result.cache
    counts = f"{format_count(result.imported)} imported, {format_count(result.reused)} there before, "
    counts += f"{format_count(len(result.failures))} missing or broken"
    table(
        console,
        [
            (escape(cache.name), counts, format_seconds(result.seconds)),
            ("", escape(str(cache.path))),
        ],
    )
    some(console, [f"  sample {f['number']:,}: {f['error']}" for f in result.failures], "not imported")
    lines = [
        f"  {name}: in {format_count(count)} file{'s' * (count > 1)}"
        for name, count in result.left_out.items()
    ]
    some(console, lines, "left out, since no field can hold text, lists or nothing")
    if result.ignored:
        files = "1 other file" if result.ignored == 1 else f"{format_count(result.ignored)} other files"
        console.print(f"{files} ignored")
    console.print(escape(f"stoker.open_cache({str(cache.path)!r}) serves what is there"), soft_wrap=True)
    if result.failures:
        console.print("once the files are fixed, the same command makes a cache of all", soft_wrap=True)
