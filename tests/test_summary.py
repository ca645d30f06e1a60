"""The page that a run of the tests leaves: counts, reasons and failures, whatever became of the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kit import forked as subprocess

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- the last run of test-all begins here -->", "<!-- the last run of test-all ends here -->"
TESTS = """
import pytest

def test_passes(): ...

@pytest.mark.parametrize("x", [1, 2])
def test_fails(x): assert x == 3, "a | b"

@pytest.mark.skip(reason="no such machine")
def test_is_skipped(): ...

@pytest.fixture
def bad():
    yield
    raise ValueError("while it is taken down")

def test_fails_at_its_end(bad): ...
"""


def run(
    folder: Path, *words: str, page: str = f"# Page\n{BEGIN}\nold\n{END}\nafter\n"
) -> tuple[int, str, str]:
    for name, text in {
        "tests/store/test_a.py": TESTS,
        "tests/store/test_b.py": "import pytest\npytest.importorskip('no_such_package')",
        "tests/loader/test_c.py": "import pytest\n@pytest.mark.slow\ndef test_c(): ...",
        "tests/test_d.py": "def test_d(): ...",
        "pytest.ini": "[pytest]\nmarkers = slow: slow\naddopts = --import-mode=importlib",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "page.md").write_text(page)
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tools.test_summary"),
        *("--summary", "page.md", *words),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, (folder / "page.md").read_text(), done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_is_counted_by_area_with_reasons_and_failures(tmp_path: Path, workers: str) -> None:
    code, page, said = run(tmp_path, "-n", workers, "--dist", "worksteal", "-m", "slow or not slow")

    assert code == 1, said
    assert page.startswith("# Page\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "old" not in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in line.split("|")[1:5]] for line in lines[1:]] == [
        ["loader", "1", "0", "0"],
        ["store", "1", "3", "2"],
        ["whole package", "1", "0", "0"],
        ["all", "3", "3", "2"],
    ]
    for fact in ("exit code 1", "commit ", "Python 3.", "torch ", "1 × no such machine", "no_such_package"):
        assert fact in page
    for test in ("test_fails[1]", "test_fails[2]", "test_fails_at_its_end"):
        assert f"- `tests/store/test_a.py::{test}`: " in page
    assert "while it is taken down" in page
    assert "Not all tests" not in page


def test_what_was_selected_and_an_import_that_fails_are_said(tmp_path: Path) -> None:
    (tmp_path / "tests/loader").mkdir(parents=True)
    (tmp_path / "tests/loader/test_e.py").write_text("import gone_for_good")

    code, page, said = run(tmp_path, "tests/loader", "-m", "slow")

    assert code == 2, said
    assert "Not all tests: `pytest tests/loader -m slow`" in page
    assert "gone_for_good" in page
    assert "| loader | 0 | 1 | 0 |" in page


def test_a_page_without_a_place_is_refused_before_anything_runs(tmp_path: Path) -> None:
    code, page, said = run(tmp_path, page="# Page\n")

    assert code == pytest.ExitCode.USAGE_ERROR
    assert "page.md has no place for a summary" in said
    assert page == "# Page\n"
