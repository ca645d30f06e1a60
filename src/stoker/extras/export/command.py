"""The command that writes a cache as files of other libraries."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import BadValueError, CachePath, CommandOutput, ProgressLine, cli_command, size
from stoker.cli.output import table
from stoker.units import format_bytes, format_count, format_seconds


def numbers_between(text: str) -> range:
    """Return `A:B` as numbers.

    >>> numbers_between("10:20")
    range(10, 20)
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise BadValueError(f"{text!r} is not a range", "Write two numbers, as 0:1000")
    return range(int(first), int(last))


@cli_command
def export(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    outlet: CommandOutput,
    path: CachePath,
    out: Annotated[str, typer.Argument(metavar="DIR", help="A folder that does not exist, or is empty.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors or tensordict.")],
    records: Annotated[
        range | None,
        typer.Option(
            parser=numbers_between, metavar="A:B", help="Sample indices from A on and below B; default: all."
        ),
    ] = None,
    fields: Annotated[
        str | None, typer.Option(metavar="X,Y", help="Fields of the records; default: all.")
    ] = None,
    ragged: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="nested or pad; needed where records differ in length."),
    ] = None,
    packed: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="What int8 and float8 with scales become, or refuse."),
    ] = "float32",
    file_size: Annotated[
        int, typer.Option(parser=size, metavar="4GB", help="Of a safetensors file, at most.")
    ] = cast(int, "4GiB"),
) -> None:
    """Write a cache as files of other libraries.

    Plain safetensors, or the memory-mapped layout that TensorDict.load_memmap reads; records in order of
    index, every byte verified on the way, DIR appears complete or not at all. Exit code 4 when a record is
    damaged, 6 when the disk has no room.

    \b
    Example:
      stoker cache export data/latent_cache/burgers1d_train burgers --to safetensors
      stoker cache export data/latent_cache/burgers1d_train burgers --to tensordict --records 0:1000
    """
    from stoker.extras.export.run import ExportSettings, export_cache

    wanted: Any = {"to": to, "ragged": ragged, "packed": packed}  # checked by ExportSettings
    settings = ExportSettings(
        **wanted,
        fields=None if fields is None else [name.strip() for name in fields.split(",")],
        records=None if records is None else (records.start, records.stop),
        file_bytes=file_size,
    )
    with ProgressLine(outlet) as progress:

        def listen(done: int, total: int) -> None:
            progress.tell(f"{format_bytes(done)} of {format_bytes(total)} written")

        report = export_cache(path, out, settings, progress=listen)
    outlet.show(report, render_export)


def render_export(report: Any, console: Console) -> None:
    """Print what was written, and what is missing from it."""
    files = format_count(len(report.files), "file")
    rows = [
        ("records", format_count(report.records)),
        ("fields", escape(", ".join(f"{name} {f['dtype']}" for name, f in report.fields.items()))),
        ("written", f"{format_bytes(report.bytes)} in {files}, {format_seconds(report.seconds)}"),
        ("folder", escape(report.path)),
    ]
    if report.quarantined:
        count = len(report.quarantined)
        rows.append(("not in it", f"{format_count(count)} quarantined samples, named in manifest.json"))
    table(console, rows)
