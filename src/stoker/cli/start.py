"""The commands that begin a project: `stoker init`, and `stoker data inspect`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, cli_command
from stoker.cli.output import bold, table
from stoker.errors import ConfigError
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.run.look import Finding

METAVAR = "FILE|FOLDER|DATABASE-URL|MODULE:NAME [KEY=VALUE]..."
MEANT = "Raw data, a database, a torch Dataset or a cache; then settings that are known."
What = Annotated[list[str], typer.Argument(metavar=METAVAR, help=MEANT)]


def _looked_at(words: list[str]) -> Finding:
    """Return what is found in the data that was named, and the settings that were given with it.

    Raises:
        ConfigError: Several files, as a shell makes of a pattern.
    """
    from stoker.config.load import parse_overrides
    from stoker.run.look import look

    what = [word for word in words if not _SETTING.match(word) or Path(word).exists()]
    given = parse_overrides([word for word in words if word not in what])
    if not what:
        raise ConfigError(
            "only settings were named, and no data",
            hint=f"Name it first, as `stoker init data.h5 {words[0]}`",
        )
    if len(what) > 1:
        pattern = Path(what[0]).with_stem("*")
        raise ConfigError(
            f"{len(what)} files were named, from {what[0]} to {what[-1]}",
            hint=f"Name their folder, or quote a pattern: stoker init '{pattern}'",
        )
    return look(what[0], given)


_SETTING = re.compile(r"[a-z_]+\.[\w.]+\s*=")
"""What begins so is a setting; a URL has a `=` only later."""


@cli_command
def init(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    what: Annotated[list[str] | None, typer.Argument(metavar=METAVAR, help=MEANT)] = None,
    path: Annotated[Path, typer.Option("--out", readable=False, help="The file to write.")] = Path(
        "stoker.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON schema of settings, for editors, and write nothing."),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Print every setting as commented YAML, and write nothing.")
    ] = False,
    example: Annotated[
        str | None,
        typer.Option("--example", metavar="NAME", help="Write an example for public datasets, as pde_2d."),
    ] = None,
) -> None:
    """Look at data and write its settings.

    Says what it found, writes a configuration in which each line is explained, and names the next command.
    What does not follow from the data is marked as a guess.

    \b
    Example:
      stoker init data.h5
      stoker init images/ --out images.yaml
      stoker init sqlite:///measurements.db
      stoker init mymodule:MyDataset data.torch.arguments.root=raw
      stoker init --example burgers_32dim
      stoker init --schema > stoker.schema.json
    """
    if schema:
        from stoker.config.models import Config

        out.write(json.dumps(Config.model_json_schema(), indent=1) + "\n")
        return
    if every:
        from stoker.run.look import all_settings_yaml

        out.write(all_settings_yaml())
        return
    if example is None and not what:
        raise ConfigError(
            "no data was named",
            hint="Give a file, a folder, a database URL or a Dataset, as `stoker init data.h5`",
        )
    if example is not None and what:
        raise ConfigError(
            f"--example {example} and {what[0]} were both named",
            hint="Leave out the example: settings follow from the data",
        )
    if path.is_dir() or not path.parent.is_dir():
        fact = f"{path} is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(fact, hint="Name a file in a folder that is there, as --out stoker.yaml")
    if example is not None:
        _refuse_to_replace(path, force)
        _write_example(out, example, path)
        return
    from stoker.runtime.files import replace_atomically

    found = _looked_at(what or [])
    _refuse_to_replace(path, force)  # data that is not there comes first: it would be named in that file
    with replace_atomically(path) as temporary:
        temporary.write_text(found.to_yaml())
    out.show(found, show_finding)
    if found.trains:
        out.note(f"wrote {path}. Next: stoker train {path}")
    else:
        out.note(
            f"wrote {path}. Next: stoker precompute {path}, and then train in Python on "
            f"stoker.Loader({found.cache!r}, batch_size=64, shuffle=True)"
        )


def _refuse_to_replace(path: Path, force: bool) -> None:
    """Refuse to write over a file.

    Raises:
        ConfigError: It is there, and `force` was not given.
    """
    if path.exists() and not force:
        raise ConfigError(
            f"{path} exists", hint="Add --force to write over it, or name another file with --out"
        )


def _write_example(out: CommandOutput, name: str, path: Path) -> None:
    """Write an example that comes with Stoker, with its commands naming the file that is written.

    Raises:
        ConfigError: No example has that name.
    """
    from stoker.config.load import EXAMPLES
    from stoker.runtime.files import replace_atomically

    file = EXAMPLES / f"train_{name}.yaml"
    known = sorted(one.stem.removeprefix("train_") for one in EXAMPLES.glob("train_*.yaml"))
    if name not in known:
        raise ConfigError(f"no example is named {name!r}", hint=f"Choose one of {', '.join(known)}")
    text = file.read_text(encoding="utf-8").replace(f"configs/{file.name}", str(path))
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if out.as_json:
        out.write_json({"example": name, "path": str(path)})
    out.note(f"wrote {path}. Next: stoker train {path} data.files=FILE")


@cli_command
def data_inspect(out: CommandOutput, what: What) -> None:
    """Show what raw data holds.

    Layout, samples, fields, and the settings that `stoker init` would write. Nothing is written.

    \b
    Example:
      stoker data inspect data.h5
    """
    out.show(_looked_at(what), show_finding)


def show_finding(found: Finding, console: Console) -> None:
    """Print what was found, then the settings."""
    console.print(escape(f"{found.path}: {found.what}, {format_count(found.samples, 'sample')}"))
    rows = [bold("field", "dtype and shape")]
    rows += [(escape(name), escape(text)) for name, text in found.fields.items()]
    table(console, rows, fixed=2, gap=2)
    for fact in found.facts:
        console.print(escape(fact))
    for question in found.questions:
        console.print(escape(f"please check: {question}"))
