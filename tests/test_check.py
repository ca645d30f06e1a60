"""Each rule of tools/check.py sees what breaks it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("check", ROOT / "tools" / "check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load()
LONG = "def f():\n" + "    x = 1\n" * 51
WIDE = "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(check.PUBLIC_METHODS + 1))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a/b.py", "x = 1\n" * 951),
        ("a/b.py", LONG),
        ("a/b.py", "async " + LONG),
        ("a/b.py", WIDE),
        ("a/utils.py", ""),
        ("a/b.py", "pickle.loads(data)"),
        ("a/b.py", "cloudpickle.loads(data)"),
        ("a/entry.py", "pickle.load(file)"),
        ("a/b.py", "run(x, shell=True)"),
        ("a/b.py", "raise NotImplementedError"),
        ("a/b.py", "x = 1  # TODO"),
        ("a/b.py", "torch.load(path)"),
        ("a/b.py", "import httpx"),
        ("a/http.py", "from urllib.request import urlopen"),
        ("a/b.py", "os.environ['A']"),
        ("b.py", "os.getenv('A')"),
        ("a/b.py", "from concurrent.futures import Future"),
        ("a/b.py", "threading.Thread(target=f)"),
        ("a/b.py", "Thread(target=f, daemon=False)"),
        ("a/b.py", "raise ConfigError(f'epochs is {n}. Expected at least 1')"),
    ],
)
def test_a_rule_of_the_source_is_broken(path: str, text: str) -> None:
    assert len([*check.source_violations(Path(path), text)]) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a/b.py", "x = 1\n" * 900),
        ("a/b.py", LONG.replace("    x = 1\n", '    """Doc."""\n', 1)),
        ("a/entry.py", "cloudpickle.loads(data)"),
        ("a/b.py", "torch.load(path, weights_only=True)"),
        ("runtime/http.py", "import httpx"),
        ("cli/b.py", "os.environ['A']"),
        ("runtime/child.py", "os.environ"),
        ("a/b.py", "threading.Thread(target=f, daemon=True)"),
    ],
)
def test_what_the_rules_allow(path: str, text: str) -> None:
    assert not [*check.source_violations(Path(path), text)]


def test_dead_links_are_found_and_living_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A *title*\n# A title\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[x](other.md) [x](other.md#a-title-1) [x](https://a.org/b) [x](gone.md) [x](#gone)"
        "[x](other.md#no-heading)\n# Here\n[x](#here)\n```\n[x](in-code.md)\n```\n"
    )

    assert [line.split(":")[0] for line in check.dead_links(page)] == [
        "gone.md", "#gone", "other.md#no-heading",
    ]  # fmt: skip


def test_a_map_that_does_not_match_its_folder_is_found(tmp_path: Path) -> None:
    for name in ("__init__.py", "a.py", "b.py", "new.py"):
        (tmp_path / name).touch()
    readme = tmp_path / "README.md"
    readme.write_text(
        "`c.py` is said to be gone.\n\n| file | x |\n|---|---|\n| `a.py`, `b.py` | `d.py` |\n| `old.py` | |\n"
    )

    assert [*check.map_errors(readme)] == ["new.py is not in the map", "old.py: no such file"]


def test_a_picture_without_words_is_found() -> None:
    page = '![](a.png) ![A curve](b.png) <img src="c.png"> <img src="d.png" alt="A">\n```\n![](e.png)\n```\n'

    assert [*check.pictures_without_words(page)] == [
        "![](a.png): no alternative text",
        '<img src="c.png">: no alternative text',
    ]


def test_a_page_that_code_names_and_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs/how-to").mkdir(parents=True)
    (tmp_path / "docs/how-to/a.md").write_text("# A\n## One rule\n")
    code = (
        """See docs/how-to/a.md, docs/how-to/b.md. docs_url('how-to/a#one-rule') docs_url("how-to/a#two")"""
    )

    assert [*check.dead_mentions(code + ' docs_url("how-to/c")', tmp_path)] == [
        "docs/how-to/b.md: no such page",
        "how-to/a#two: no such heading",
        "how-to/c: no such page",
    ]


def test_a_fault_without_a_test_and_a_test_that_is_gone_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def test_there(): ...\n")
    table = "| one | x | `a:there` |\n" * 41

    assert not [*check.missing_tests(table, tmp_path)]
    assert [*check.missing_tests(table + "| two | x | `a:gone`, `b:gone` |\n", tmp_path)] == [
        "a:gone: no such test", "b:gone: no such test",
    ]  # fmt: skip
    assert [*check.missing_tests(table + "| three | x | |\n", tmp_path)] == ["no test: | three | x | |"]
    assert [*check.missing_tests("", tmp_path)] == ["0 faults: is it still a table?"]


def test_the_repository_is_looked_through(tmp_path: Path) -> None:
    for folder in ("src/stoker/runtime", "docs", "tests"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "golden")
        )
    (tmp_path / "src/stoker/runtime/bad.py").write_text("x = 1  # FIXME\n")
    (tmp_path / "docs/bad.md").write_text("[x](gone.md)\n")
    for name, before, after in [
        ("tests/test_guarantees.py", "def test_no_code_in_data", "def skip_no_code_in_data"),
        ("docs/project/reliability-matrix.md", "`cli/", "`clj/"),
    ]:
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(before, after, 1))

    found = [
        line for line in check.violations(tmp_path) if "../" not in line
    ]  # pages link to what was not copied

    assert {line.split(":")[0] for line in found} == {
        "src/stoker/runtime/bad.py",
        "src/stoker/runtime/README.md",
        "docs/bad.md",
        "docs/project/reliability-matrix.md",
        "tests/test_guarantees.py",
    }
