"""Check that figures on pages are those of the saved results, or write them there.

    python tools/figures.py            exit 1, with a line for each figure that differs from its result
    python tools/figures.py --write    write the figures of the results into the pages
    python tools/figures.py NAME       print a snippet for every number of benchmarks/results/NAME.jsonl

A figure on a page stands between two comments, which readers do not see:

    <!--fig headline images,stoker later_epoch_s .2f-->0.21<!--/fig--> s

The words are, in order:
- the file in benchmarks/results/, without `.jsonl`;
- values that pick one row, separated by commas, with `_` for spaces and without commas of their own. `head`
  is the first line, with commit and hardware. Two rows give a ratio: `images,dataloader/images,stoker`;
- the key of the number;
- a format of Python, which may be left out.

A figure whose file is not there reads `(not measured)`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOT_MEASURED = "(not measured)"
FIGURE = re.compile(r"<!--fig (?P<words>[^>]*?) ?-->(?P<text>.*?)<!--/fig-->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


class FigureError(Exception):
    """A figure names a row or a number that its file does not have."""


def read_rows(name: str, root: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a result, the first line first; None if there is no such file."""
    path = root / "benchmarks" / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None


def as_value(value: object) -> str:
    """Return the text by which a row is picked."""
    return str(value).replace(",", "").replace(" ", "_")


def pick_row(rows: list[dict[str, Any]], values: str) -> dict[str, Any]:
    """Return the one row that has all these values, whatever their keys.

    Raises:
        FigureError: No row or several rows have them.
    """
    if values == "head":
        return rows[0]
    wanted = set(values.split(","))
    found = [row for row in rows[1:] if wanted <= {*map(as_value, row.values())}]
    if len(found) != 1:
        raise FigureError(f"{len(found)} rows have the values {values}, expected 1")
    return found[0]


def figure_text(words: str, root: Path = ROOT) -> str:
    """Return the text of a figure.

    Raises:
        FigureError: The words are not those of a figure, or name nothing.
    """
    name, values, key, form = [*words.split(), "", "", ""][:4]
    if not key or len(words.split()) > 4:
        raise FigureError("expected a file, values of a row, a key, and perhaps a format")
    rows = read_rows(name, root)
    if rows is None:
        return NOT_MEASURED
    numbers: list[Any] = []
    for one in values.split("/"):
        row = pick_row(rows, one)
        if key not in row:
            raise FigureError(f"the row {one} has no {key}, only {', '.join(row)}")
        numbers.append(row[key])
    if len(numbers) > 2:
        raise FigureError("a ratio has two rows")
    number = numbers[0] / numbers[1] if len(numbers) == 2 else numbers[0]
    return "none" if number is None else format(number, form)


def pages(root: Path) -> list[Path]:
    """Return all pages that may show figures."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").glob("*.md")])


def check_page(path: Path, root: Path = ROOT) -> tuple[str, list[str]]:
    """Return a page's text with the figures of the results, and a line for each that was another."""
    page, differences = path.read_text(encoding="utf-8"), list[str]()
    fences = [match.span() for match in FENCED.finditer(page)]

    def replaced(match: re.Match[str]) -> str:
        if any(begin <= match.start() < end for begin, end in fences):
            return match[0]
        place = f"{path.relative_to(root)}:{page.count(chr(10), 0, match.start()) + 1}: {match['words']}"
        try:
            if page[page.rfind("\n", 0, match.start()) + 1 : match.start()].strip() == "":
                raise FigureError("a figure must not begin a line: Markdown would take the line for HTML")
            text = figure_text(match["words"], root)
        except (FigureError, ValueError, TypeError) as error:
            differences.append(f"{place}: {error}")
            return match[0]
        if text != match["text"]:
            differences.append(f"{place}: the page has {match['text']!r}, the result {text!r}")
        return f"<!--fig {match['words']}-->{text}<!--/fig-->"

    return FIGURE.sub(replaced, page), differences


def snippets(name: str, root: Path = ROOT) -> Iterator[str]:
    """Yield a figure for every number of a result, with the values that pick its row."""
    for row in (read_rows(name, root) or [])[1:]:
        texts = [one for one in row.values() if isinstance(one, str)]
        counts = [one for one in row.values() if isinstance(one, int)]
        for key, number in row.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            for values in (texts, [*texts, *counts]):  # the shorter one, if it tells this row from others
                words = f"{name} {','.join(map(as_value, values))} {key}"
                with suppress(FigureError):
                    yield f"<!--fig {words}-->{figure_text(words, root)}<!--/fig-->"
                    break


def main(root: Path = ROOT) -> None:
    """Check, write or print."""
    parser = argparse.ArgumentParser(description="Compare figures on pages with saved results.")
    parser.add_argument("name", nargs="?", help="a result: print a snippet for each of its numbers")
    parser.add_argument(
        "--write", action="store_true", help="write the figures of the results into the pages"
    )
    words = parser.parse_args()
    if words.name:
        if read_rows(words.name, root) is None:
            sys.exit(f"benchmarks/results/{words.name}.jsonl: no such file")
        print("\n".join(snippets(words.name, root)))
        return
    wrong: list[str] = []
    for path in pages(root):
        text, differences = check_page(path, root)
        if words.write and text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            _, differences = check_page(path, root)  # what cannot be written stays wrong
        wrong += differences
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
