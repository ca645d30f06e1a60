"""Count words per sentence, long sentences and phrases to avoid, in docs, docstrings and messages of errors.

`python tools/words.py` lists sentences of more than 30 words and phrases to avoid, with places. It exits
with 1 if there are any, or if a kind of text has more than 15 words a sentence. `--table` prints figures.

Sentences are those of running text: code blocks, comments, tables, headings, doctests and sections of
arguments are left out, and inline code counts as one word. In a message, a value counts as one word.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG = 30
"""Words of a sentence above which it is long."""
MEAN = 15.0
"""Words of a sentence on average, at most."""
NOT_COUNTED = ("CHANGELOG.md", "LOG.md")
"""Files of docs/ that record what was written then; those of docs/design/ do too."""
AVOID = (
    r"mend(?:s|ed|ing)?", r"[Bb]eside", r"goes on", r"went on", r"is none", r"are none", r"anew",
    r"[Ww]hoever", r"[Nn]obody", r"shall", r"dear", r"as \w+ as may", r"nothing to do with", r"by itself",
    r"lies? at", r"means? to hold", r"belongs? into",
    r"(?<![Tt]here )is no (?!longer|more)\w+", r"whole(?=[.,;:)]| or | and )",
)  # fmt: skip
"""Phrases to avoid, as patterns of words."""
AVOID_PATTERN = re.compile(rf"\b(?:{'|'.join(AVOID)})\b")
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'`*]*\s+(?=[A-Z`\[(*\"])")
COMMENT = re.compile(r"^<!--.*?-->", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):")


@dataclass(slots=True)
class WordFigures:
    """Figures of some text."""

    sentences: int = 0
    words: int = 0
    long: list[str] = field(default_factory=list[str])
    """Each long sentence, after its place."""
    avoided: list[str] = field(default_factory=list[str])
    """Each phrase to avoid, after its place."""

    @property
    def mean(self) -> float:
        """Mean words of a sentence."""
        return self.words / self.sentences if self.sentences else 0.0

    def add(self, place: str, paragraph: str) -> None:
        """Count the sentences of a paragraph."""
        text = re.sub(r"<!--.*?-->", "", paragraph)
        text = re.sub(r"``?[^`]+``?", "CODE", text)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        for sentence in re.split(rf"{SENTENCE_END.pattern}| · ", text):
            words = re.findall(r"[A-Za-z0-9][\w'./^-]*", sentence)
            if len(words) < 3:  # a label, not a sentence
                continue
            self.sentences += 1
            self.words += len(words)
            if len(words) > LONG:
                self.long.append(f"{place}: {' '.join(sentence.split())}")
        self.avoided += [f"{place}: {match[0]}" for match in AVOID_PATTERN.finditer(text)]

    def merge(self, other: WordFigures) -> None:
        """Add the figures of other text."""
        self.sentences += other.sentences
        self.words += other.words
        self.long += other.long
        self.avoided += other.avoided


def markdown_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each paragraph and list item of a Markdown file."""
    found: list[str] = []
    first, fenced = 1, False
    seen = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate([*seen.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        item = re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        skipped = fence or fenced or re.match(r"\s*(?:#|\||<|$)", line) is not None
        if found and (skipped or item):
            yield first, " ".join(found)
            found = []
        if not skipped:
            first = first if found else number
            found.append(line[item.end() :] if item else line)


def docstring_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the paragraphs of all docstrings, also those of fields and constants."""
    for node in ast.walk(ast.parse(text)):
        if not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            continue
        for paragraph in re.split(r"\n\s*?(?:\n|(?=- ))", inspect.cleandoc(node.value.value)):
            lines = paragraph.splitlines()
            is_table = len(lines) > 2 and sum(bool(re.search(r"\S {2,}\S", line)) for line in lines) > 1
            if not (
                is_table
                or paragraph.startswith(("    ", "Example:", "\b"))
                or SECTION.match(paragraph.strip())
                or re.search(r">>>|\||├", paragraph)
            ):
                yield node.lineno, paragraph


LOGS = ("info", "warning", "error", "note")
"""Methods that write a line of the log."""


def messages(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of messages, values as one word: of errors, their hints, and log lines."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if not (name.endswith("Error") or name in LOGS):
            continue
        for value in [*node.args[:1], *(one.value for one in node.keywords if one.arg == "hint")]:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node.lineno, value.value
            elif isinstance(value, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "VALUE" for one in value.values)
                yield node.lineno, "".join(map(str, parts))


def figures_of(root: Path = ROOT) -> dict[str, WordFigures]:
    """Return the figures of README.md, of each page of docs/, and of docstrings and messages by package."""
    found: dict[str, WordFigures] = {}
    documents = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    for path in documents:
        if path.name not in NOT_COUNTED and path.parent.name != "design":
            name = str(path.relative_to(root))
            for line, paragraph in markdown_paragraphs(path.read_text(encoding="utf-8")):
                found.setdefault(name, WordFigures()).add(f"{name}:{line}", paragraph)
    for path in sorted((root / "src" / "stoker").rglob("*.py")):
        place, parts = path.relative_to(root), path.relative_to(root / "src" / "stoker").parts
        name = f"src/stoker/{parts[0]}" if len(parts) > 1 else "src/stoker/*.py"
        text = path.read_text(encoding="utf-8")
        for line, paragraph in docstring_paragraphs(text):
            found.setdefault(name, WordFigures()).add(f"{place}:{line}", paragraph)
        for line, message in messages(text):
            found.setdefault(f"{name}, messages", WordFigures()).add(f"{place}:{line}", message)
    return found


def totals(found: dict[str, WordFigures]) -> dict[str, WordFigures]:
    """Return the figures of all documents, of all docstrings and of all messages."""
    sums = {kind: WordFigures() for kind in ("README and docs", "docstrings", "messages")}
    for name, figures in found.items():
        kind = "messages" if name.endswith("messages") else "docstrings"
        sums[kind if name.startswith("src") else "README and docs"].merge(figures)
    return sums


def main() -> None:
    """Print what is wrong, and figures if they are asked for."""
    parser = argparse.ArgumentParser(description="Count words per sentence and phrases to avoid.")
    parser.add_argument("--table", action="store_true", help="print figures by file and package")
    parser.add_argument("names", nargs="*", help="only files and packages whose name contains one of these")
    given = parser.parse_args()
    found = {
        name: figures
        for name, figures in figures_of().items()
        if not given.names or any(part in name for part in given.names)
    }
    rows = {**(found if given.table else {}), **totals(found)}
    width = max(map(len, rows))
    print(f"{'':<{width}}  sentences  mean words  over {LONG}  to avoid")
    for name, one in rows.items():
        counts = f"{one.sentences:>9}  {one.mean:>10.1f}  {len(one.long):>7}  {len(one.avoided):>8}"
        print(f"{name:<{width}}  {counts}")
    wrong = [text for one in found.values() for text in (*one.avoided, *one.long)]
    wrong += [
        f"{kind}: {one.mean:.1f} words a sentence" for kind, one in totals(found).items() if one.mean > MEAN
    ]
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
