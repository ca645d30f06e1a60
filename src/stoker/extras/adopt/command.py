"""The commands that take over features on disk: `cache adopt`, and `cache import-pt` for one layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, cli_command
from stoker.cli.output import some, table
from stoker.errors import ConfigError, IncompleteError
from stoker.schema import Json, JsonResult
from stoker.units import format_count, format_seconds

if TYPE_CHECKING:
    from stoker.extras.adopt.run import AdoptResult

Out = Annotated[str, typer.Option("--out", help="The cache folder to write to.")]
Dtype = Annotated[str | None, typer.Option(help="Storage dtype; default: as in the files.")]
Nan = Annotated[str, typer.Option(help="reject or allow samples with NaN or infinities.")]


@cli_command
def adopt(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", readable=False, help="Where the features are; or one file.")
    ],
    out_dir: Out,
    name: Annotated[str, typer.Option(help="Name of the cache, as imagenet_latents.")],
    layout: Annotated[
        str,
        typer.Option(metavar="NAME|PATTERN", help="A layout, or a pattern as '{key}_{label:int}.npy'."),
    ] = "auto",
    dtype: Dtype = None,
    ragged: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y:1:2", help="Fields whose axis 0 varies, or these axes; default: as files show."
        ),
    ] = None,
    nan: Nan = "reject",
    zeros: Annotated[str, typer.Option(help="reject or allow samples with a field of zeros.")] = "reject",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read; default: automatic.")
    ] = None,
    allow_bad: Annotated[
        bool, typer.Option("--allow-bad", help="Exit code 0 although files are bad.")
    ] = False,
) -> None:
    """Take over features that exist on disk.

    Nothing is encoded and no file is changed. Stopped at any moment, the same command continues. Files that
    are unreadable, cut short, NaN, zeros, of another shape, of the same key or without their partner are
    named, with exit code 4; the others are stored.

    \b
    Example:
      stoker cache adopt vae-sd --out data/latent_cache --name imagenet_latents
      stoker cache adopt features --out caches --name f --layout '{split}/{key}_{label:int}.npy'
    """
    from stoker.extras.adopt.run import AdoptSettings, run_adopt
    from stoker.extras.adopt.source import AdoptRules

    chosen: Any = {"nan": nan, "zeros": zeros}  # checked by AdoptSettings
    settings = AdoptSettings(
        layout=layout, dtype=dtype, rules=AdoptRules(**chosen, ragged=_axes(ragged)), workers=workers
    )
    result = run_adopt(folder, out_dir, name=name, settings=settings)
    out.show(result, render, exit_code=IncompleteError.exit_code if result.bad and not allow_bad else 0)


def _axes(ragged: str | None) -> dict[str, tuple[int, ...]]:
    """Return the axes that vary by field, of `tokens,latent:1:2`."""
    found: dict[str, tuple[int, ...]] = {}
    for one in (ragged or "").split(",") if ragged else ():
        name, *axes = one.strip().split(":")
        if not name or not all(axis.isdecimal() for axis in axes):
            raise ConfigError(
                f"--ragged has {one.strip()!r}", hint="Expected a field, or its axes: latent:1:2"
            )
        found[name] = tuple(map(int, axes)) or (0,)
    return found


def render(result: AdoptResult, console: Console, options: str = "--ragged, --nan or --zeros") -> None:
    """Print what was stored, how, and every file that was not.

    Args:
        result: What was stored.
        console: Where it is printed.
        options: Those of the command that take more files.
    """
    from stoker.extras.adopt.run import one_line

    counts = f"{format_count(result.adopted)} of {format_count(result.count)} adopted"
    counts += f" ({format_count(result.new)} new), {format_count(len(result.bad), 'file')} bad"
    table(
        console,
        [
            (escape(result.name), counts, format_seconds(result.seconds)),
            ("layout", escape(one_line(f"{result.layout}, since {result.why}"))),
            ("", escape(str(result.path))),
        ],
    )
    some(console, [f"  {bad}" for bad in result.bad], "bad files")
    _rest(result, console)
    if result.bad:
        console.print(
            f"next: fix these files, or take those that are right with {options}, and run the command again",
            soft_wrap=True,
        )


def _rest(result: AdoptResult, console: Console) -> None:
    if result.left_out:
        names = ", ".join(result.left_out)
        console.print(escape(f"left out, since no field can hold text, lists or nothing: {names}"))
    if result.ignored:
        few = ", ".join(result.ignored_names)
        files = "1 other file" if result.ignored == 1 else f"{format_count(result.ignored)} other files"
        console.print(escape(f"{files} ignored: {few}" + (", ..." if result.ignored > 5 else "")))
    served = f"stoker.open_cache({str(result.path)!r}) serves what is there"
    console.print(escape(served if result.adopted else "the cache is empty"), soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult(JsonResult):
    """Result of `import-pt`, in the keys that scripts rely on."""

    result: AdoptResult

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        from stoker.run.caches import list_quarantined

        result = self.result
        missing = {bad.number for bad in result.bad if not os.path.lexists(result.folder / bad.file)}
        broken = [failure for failure in list_quarantined(result.cache) if failure["number"] not in missing]
        return {
            "name": result.name,
            "path": str(result.path),
            "fingerprint": result.fingerprint,
            "records": result.adopted,
            "count": result.count,
            "imported": result.new,
            "reused": result.adopted - result.new,
            "missing": [*sorted(number for number in missing if number is not None)],
            "broken": [*broken],
            "ignored": result.ignored,
            "left_out": dict(result.left_out),
            "seconds": result.seconds,
        }


@cli_command
def import_pt(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    path: Annotated[
        Path, typer.Argument(metavar="DIR", readable=False, help="The folder with sample_00000.pt and so on.")
    ],
    out_dir: Out,
    name: Annotated[str, typer.Option(help="Name of the cache, as burgers1d_train.")],
    dtype: Dtype = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Samples there should be; default: up to the highest number.")
    ] = None,
    nan: Nan = "reject",
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit code 0 although samples are missing or broken.")
    ] = False,
) -> None:
    """Import an earlier cache of .pt files.

    The same as `stoker cache adopt --layout sample-pt --zeros allow`. Exit code 4 when a sample is missing or
    broken.

    \b
    Example:
      stoker cache import-pt old_cache/burgers1d_train --out data/latent_cache --name burgers1d_train
    """
    from stoker.extras.adopt.run import AdoptSettings, run_adopt
    from stoker.extras.adopt.source import AdoptRules

    if nan not in ("reject", "allow"):
        raise ConfigError(f"--nan is {nan!r}, expected reject or allow")
    settings = AdoptSettings(
        layout="sample-pt",
        dtype=dtype,
        rules=AdoptRules(nan="allow" if nan == "allow" else "reject", zeros="allow"),
        count=count,
    )
    result = run_adopt(path, out_dir, name=name, settings=settings)
    lacking = result.bad and not allow_missing
    out.show(
        ImportResult(result=result),
        lambda shown, console: render(shown.result, console, "--nan"),
        exit_code=IncompleteError.exit_code if lacking else 0,
    )
