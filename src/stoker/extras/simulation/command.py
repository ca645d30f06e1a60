"""`stoker plan --simulate`: words in, tables out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, tell_settings
from stoker.cli.output import Cells, bold, table
from stoker.errors import ConfigError
from stoker.runtime.files import make_folder

if TYPE_CHECKING:
    from stoker.extras.simulation.result import Simulation


def knows(word: str) -> bool:
    """Return True if `word`, as `nodes=8`, is one of a simulation."""
    from stoker.extras.simulation.scenario import KEYS, PRICE_KEYS

    return word.partition("=")[0] in {*KEYS, *PRICE_KEYS}


def simulated(out: CommandOutput, words: list[str], *, as_markdown: bool, picture: Path | None) -> None:
    """Simulate what `words` say, and print it.

    Raises:
        ConfigError: There is more than one CONFIG, or an unknown word.
    """
    if picture is not None:
        from stoker.run.context import require_writable

        require_writable(picture.parent, "the folder of --picture")
    files, settings = tell_settings(words)
    overrides = [word for word in settings if "." in word.partition("=")[0]]
    asked = [word for word in settings if word not in overrides]
    if len(files) > 1 or (overrides and not files):
        found = ", ".join(map(str, files)) or f"{overrides[0]} and no CONFIG"
        raise ConfigError(f"found {found}. Expected words like nodes=8 gpus=8, and one CONFIG at most")
    if files:
        from stoker.config import load_config
        from stoker.extras.simulation.config import simulate_words
        from stoker.run.context import Run
        from stoker.runtime.libc import keep_freed_memory

        keep_freed_memory()  # as where caches are filled: without it an encoder's time may double

        found = simulate_words(asked, Run(load_config(files[0], overrides)))
    else:
        from stoker.extras.simulation.run import simulate
        from stoker.extras.simulation.scenario import parse_scenario

        found = simulate(parse_scenario(asked))
    if picture is not None:
        from stoker.extras.simulation.result import draw_simulation

        make_folder(picture.parent)
        draw_simulation(found, picture)
    if as_markdown and not out.as_json:
        from stoker.extras.simulation.result import markdown

        out.write(markdown(found) + "\n")
    else:
        out.show(found, show_simulation)


def show_simulation(found: Simulation, console: Console) -> None:
    """Encoders, ways, what limits each, which to take."""
    from stoker.extras.simulation.result import HEAD, cells, encoding_cells, remarks

    head, *rows = encoding_cells(found)
    table(console, [bold(*head), *[_plain(row) for row in rows]], fixed=6, right=(0, 1, 2, 4, 5), gap=2)
    console.print()
    rows = [cells(way) for way in found.ways]
    table(
        console, [bold(*HEAD), *[_plain(row) for row in rows]], fixed=len(HEAD), right=(2, 3, 5, 6, 7), gap=2
    )
    console.print()
    for line in remarks(found):
        console.print(escape(line), soft_wrap=True)
    console.print("", escape(found.reason), sep="\n", soft_wrap=True)
    if found.taken:
        console.print(escape(f"taken: {'; '.join(found.taken)}"), soft_wrap=True)


def _plain(row: tuple[str, ...]) -> Cells:
    return tuple(escape(cell) for cell in row)
