"""The command `stoker data fetch`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, Debug, Json, Overrides, ProgressLine, command_output
from stoker.cli.output import some
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.extras.fetch.run import FetchProgress, FetchReport, FileResult, Listener


def fetch(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|MANIFEST", readable=False, help="YAML file with the settings, or a JSON manifest."
        ),
    ],
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", readable=False, help="Folder to fetch into; default: fetch.folder."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring files here, checked and resumed.

    From rclone remotes, http(s) and folders, several at once, each verified before it gets its name. A file
    that fails is named and does not stop the others; the exit code is then not 0.

    \b
    Example:
      stoker data fetch configs/train_burgers_32dim.yaml
      stoker data fetch files.json --to data/pdebench
    """
    with command_output(as_json=as_json, debug=debug) as out:
        from stoker.extras.fetch.run import fetch as fetch_all
        from stoker.extras.launch.script import without_secrets

        with listening(out) as listen:
            report = fetch_all(config, overrides or [], folder=to, redact=without_secrets, listen=listen)
        out.show(report, render)
        if report.exit_code:
            raise typer.Exit(report.exit_code)


@contextmanager
def listening(out: CommandOutput) -> Generator[Listener]:
    """Print the result of each file when it is done, and how far the others are."""
    from stoker.extras.fetch.run import FileResult

    with ProgressLine(out) as progress:

        def listen(what: FetchProgress | FileResult | str) -> None:
            if isinstance(what, str):
                out.note(what)
            elif isinstance(what, FileResult):
                out.note(_line(what))
            else:
                progress.tell(*_progress(what))

        yield listen


def _progress(now: FetchProgress) -> list[str]:
    total = "" if now.total is None else f" of {format_bytes(now.total)}"
    lines = [f"{now.done} of {now.count} files, {format_bytes(now.bytes)}{total}"]
    for name, at, size in now.running:
        share = f" {at / size:.0%} of {format_bytes(size)}" if size else f" {format_bytes(at)}"
        lines.append(f"  {name}{share}")
    return lines


def _line(file: FileResult) -> str:
    if file.status == "failed":
        return f"{file.name}: failed: {file.why} (from {file.source}, {file.tries} tries)"
    if file.status == "present":
        return f"{file.name}: there already, {format_bytes(file.bytes)}"
    kept = f", {format_bytes(file.resumed)} of it from before" if file.resumed else ""
    checked = file.verified or "nothing declared to compare it with"
    return f"{file.name}: {format_bytes(file.bytes)} in {format_seconds(file.seconds)}{kept} ({checked})"


def render(report: FetchReport, console: Console) -> None:
    """Print how many files were fetched, and which failed."""
    there = len(report.files) - len(report.failed)
    size = format_bytes(sum(file.bytes for file in report.files if file.status != "failed"))
    came = format_bytes(sum(file.received for file in report.files))
    console.print(
        f"{there} of {format_count(len(report.files), 'file')} in {escape(str(report.folder))}: "
        f"{size}, {came} received, {format_seconds(report.seconds)}",
        soft_wrap=True,
    )
    lines = [f"  {file.name}: {file.why}" for file in report.failed]
    some(console, lines, f"{len(lines)} failed:")
