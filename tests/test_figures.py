"""Figures on pages are those of saved results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import figures

HEAD = {"benchmark": "speed", "cpu": "a CPU"}
ROWS = [
    {"workload": "images", "role": "dataloader", "contender": "DataLoader, 2 workers", "later_s": 2.5},
    {"workload": "images", "role": "stoker", "contender": "Stoker", "later_s": 0.2},
    {"workload": "pde", "role": "stoker", "contender": "Stoker", "later_s": 0.4},
]
PAGE = """\
An epoch takes <!--fig speed images,stoker later_s .2f-->0.20<!--/fig--> s
on <!--fig speed head cpu-->a CPU<!--/fig-->, and a DataLoader takes
it <!--fig speed images,dataloader/images,stoker later_s .0f-->12<!--/fig--> times as long.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "speed.jsonl").write_text("\n".join(map(json.dumps, [HEAD, *ROWS])) + "\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    return tmp_path


def run(root: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["figures.py", *words])
    with pytest.raises(SystemExit) as ended:
        figures.main(root)
    return int(ended.value.code or 0)


def test_a_page_with_the_figures_of_its_results_passes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(root, monkeypatch) == 0


@pytest.mark.parametrize("changed", ["page", "result"])
def test_a_changed_number_fails_and_write_puts_it_right(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    page, result = root / "docs" / "page.md", root / "benchmarks" / "results" / "speed.jsonl"
    if changed == "page":
        page.write_text(PAGE.replace("0.20", "0.02"))
    else:
        result.write_text(result.read_text().replace("0.2}", "0.3}"))

    assert run(root, monkeypatch) == 1
    assert "docs/page.md:1" in capsys.readouterr().out

    assert run(root, monkeypatch, "--write") == 0
    assert run(root, monkeypatch) == 0
    assert ("0.30" in page.read_text()) == (changed == "result")
    assert "0.02" not in page.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("speed images later_s", "2 rows"),
        ("speed images,nothing later_s", "0 rows"),
        ("speed images,stoker first_s", "no first_s"),
        ("speed images,stoker", "expected a file"),
        ("speed images,stoker later_s .2d", "'d'"),
        ("speed images,stoker/pde,stoker/pde,stoker later_s", "two rows"),
    ],
)
def test_a_figure_that_names_nothing_fails_and_is_not_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    page = root / "docs" / "page.md"
    page.write_text(f"A <!--fig {words}-->7<!--/fig-->\n")

    assert run(root, monkeypatch, "--write") == 1

    assert told in capsys.readouterr().out
    assert page.read_text() == f"A <!--fig {words}-->7<!--/fig-->\n"


def test_without_a_result_a_figure_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = root / "docs" / "page.md"
    page.write_text("A <!--fig later head cpu-->5<!--/fig-->\n")

    assert run(root, monkeypatch, "--write") == 0

    assert page.read_text() == "A <!--fig later head cpu-->(not measured)<!--/fig-->\n"


def test_a_figure_that_begins_a_line_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markdown would take the line for HTML."""
    (root / "docs" / "page.md").write_text("<!--fig speed head cpu-->a CPU<!--/fig-->\n")

    assert run(root, monkeypatch) == 1


def test_figures_in_code_are_examples(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "docs" / "page.md").write_text("```\n<!--fig speed head cpu-->another<!--/fig-->\n```\n")

    assert run(root, monkeypatch) == 0


def test_snippets_of_a_result_are_right_as_they_are(root: Path) -> None:
    page = root / "docs" / "page.md"
    page.write_text(" ".join(["A", *figures.snippets("speed", root)]))

    assert page.read_text().count("<!--fig") == 3
    assert figures.check_page(page, root)[1] == []


def test_the_pages_of_the_repository_have_the_figures_of_its_results() -> None:
    assert [line for page in figures.pages(figures.ROOT) for line in figures.check_page(page)[1]] == []
