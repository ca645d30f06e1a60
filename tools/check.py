"""Check the rules that no linter knows: print one line for each violation, and end with 1 where there is one.

    python tools/check.py

- source: sizes of modules, classes and functions; nothing dangerous or unfinished; who may read the
  environment, speak HTTP and start threads (CONTRIBUTING.md lists the rules);
- documentation: links lead to files and headings; docs/project/reliability-matrix.md names tests that exist;
- tests: one for each guarantee of docs/project/architecture.md.

Links to other hosts are not followed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODULE_LINES, FUNCTION_LINES, PUBLIC_METHODS = 950, 50, 21
UNFINISHED = re.compile(r"pickle\.loads?\(|shell=True|NotImplementedError|\bTODO\b|\bFIXME\b")
# Where a pickle is read: our own parent's, over a private descriptor; our driver's, on a cluster; a copy.
UNPICKLES = (
    "/worker.py",
    "/encoder_processes.py",
    "/torch_elsewhere.py",
    "extras/ray/task.py",
    "/entry.py",
    "service/worker.py",
    "testing.py",
)
SPEAKS_HTTP = re.compile(r"urllib\.(request|error)|http\.client import .*Conn|import (httpx|requests)\b")
ADVICE = re.compile(
    r"\. (Add|Ask|Check|Choose|Copy|Did you mean|Expected|Fix|Free|Give|Install|Leave|Make|Name|Remove|Run|"
    r"Set|Start|Use|Wait|Write)\b"
)
READ_THE_ENVIRONMENT = ("cli/", "service/", "extras/launch/", "extras/compat/", "extras/ray/job")
PASS_THE_ENVIRONMENT_ON = {"child.py", "entry.py"}
GUARANTEES = (
    "same_bytes_everywhere",
    "a_cache_is_complete_and_verified_or_says_what_is_missing",
    "every_wait_has_a_timeout",
    "nothing_is_dropped_silently",
    "one_copy_of_the_cached_bytes_per_node",
    "no_code_in_data",
    "the_key_is_right_and_explains_itself",
    "killed_at_any_instant_nothing_is_lost",
)

LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LISTED = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
NAMED_FILE = re.compile(r"`(\w+\.py)`")
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
NAMED_URL = re.compile(r"docs_url\([\"']([\w/-]+)(?:#([\w-]+))?[\"']\)")
NAMED_TEST = re.compile(r"`([\w/]+):(\w+)`")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of code: neither signature nor docstring, which may be as long as they need to be."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    begin = (first.end_lineno or first.lineno) + 1 if is_docstring else first.lineno
    return (function.end_lineno or begin) - begin + 1


def source_violations(path: Path, text: str) -> Iterator[str]:
    """Yield what is wrong in the text of a module; `path` is relative to the package."""
    tree = ast.parse(text)
    if (lines := text.count("\n")) > MODULE_LINES:
        yield f"{lines} lines, at most {MODULE_LINES}: does it hold more than one idea?"
    if path.stem in {"utils", "helpers", "common", "misc"}:
        yield "the name says nothing"
    unpickles = path.as_posix().endswith(UNPICKLES) and "cloudpickle.loads(" in text
    if (found := UNFINISHED.search(text)) and not unpickles:
        yield f"{found[0]}: dangerous or unfinished"
    if any("weights_only=True" not in call for call in re.findall(r"torch\.load\([^)]*\)", text)):
        yield "torch.load without weights_only=True"
    if path != Path("runtime/http.py") and (found := SPEAKS_HTTP.search(text)):
        yield f"{found[0]}: HTTP is spoken in runtime/http.py alone"
    for node in ast.walk(tree):
        yield from node_violations(path, node)


def node_violations(path: Path, node: ast.AST) -> Iterator[str]:
    """Yield what is wrong with one node of a module's tree."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if (lines := body_lines(node)) > FUNCTION_LINES:
            yield f"line {node.lineno}: {node.name} has {lines} lines of code, at most {FUNCTION_LINES}"
    elif isinstance(node, ast.ClassDef):
        public = [f for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
        if len(public) > PUBLIC_METHODS:
            yield f"line {node.lineno}: {node.name} has {len(public)} public methods of {PUBLIC_METHODS}"
    elif isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
        # A library that changes with the environment cannot be reasoned about. To pass ours on to a child
        # process is not to read a setting.
        if not path.as_posix().startswith(READ_THE_ENVIRONMENT) and path.name not in PASS_THE_ENVIRONMENT_ON:
            yield f"line {node.lineno}: the environment is read in the command line alone"
    # At its exit, the interpreter joins threads that are no daemons, and those of every ThreadPoolExecutor.
    elif isinstance(node, ast.ImportFrom) and node.module == "concurrent.futures":
        yield f"line {node.lineno}: threads of concurrent.futures are waited for by the exit"
    elif isinstance(node, ast.Call):
        yield from call_violations(node, ast.unparse(node.func).split(".")[-1])


def call_violations(node: ast.Call, name: str) -> Iterator[str]:
    """Yield what is wrong with one call of a function or class of that name."""
    if name == "Thread":
        daemon = {one.arg: ast.unparse(one.value) for one in node.keywords}.get("daemon")
        if daemon != "True":
            yield f"line {node.lineno}: a thread that is no daemon is waited for by the exit"
    # The command line, the service and JSON show fact and hint each in their way.
    elif name.endswith("Error") and node.args and (found := ADVICE.search(ast.unparse(node.args[0]))):
        yield f"line {node.lineno}: {found[0]!r} begins what to do: give that as hint="


def anchors(page: str) -> set[str]:
    """Return the anchor of every heading of a page, made as GitHub makes them.

    Lower case, spaces to hyphens, other punctuation dropped, `-1` for a repeat.
    """
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(path: Path) -> Iterator[str]:
    """Yield every link of a page that leads nowhere, and why."""
    for match in LINK.finditer(FENCED.sub("", path.read_text())):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = path.parent / target if target else path
        if not page.exists():
            yield f"{match['target']}: no such file"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
            yield f"{match['target']}: no such heading"


def pictures_without_words(page: str) -> Iterator[str]:
    """Yield the pictures of a page that a reader who cannot see them is told nothing about."""
    text = FENCED.sub("", page)
    yield from (f"{found}: no alternative text" for found in re.findall(r"!\[\s*\]\([^)]*\)", text))
    yield from (
        f"{tag}: no alternative text" for tag in re.findall(r"<img\b[^>]*>", text) if ' alt="' not in tag
    )


def dead_mentions(text: str, root: Path) -> Iterator[str]:
    """Yield the pages that code names and that are gone, by path or in a call of `docs_url`."""
    for name in sorted(set(NAMED_PAGE.findall(text))):
        if not (root / name).exists():
            yield f"{name}: no such page"
    for name, anchor in sorted(set(NAMED_URL.findall(text))):
        page = root / "docs" / f"{name}.md"
        if not page.exists():
            yield f"{name}: no such page"
        elif anchor and anchor not in anchors(page.read_text()):
            yield f"{name}#{anchor}: no such heading"


def map_errors(readme: Path) -> Iterator[str]:
    """Yield the modules that the map of a folder lacks, and those it lists that are gone."""
    listed = {name for row in LISTED.findall(readme.read_text()) for name in NAMED_FILE.findall(row)}
    there = {path.name for path in readme.parent.glob("*.py")} - {"__init__.py"}
    yield from (f"{name} is not in the map" for name in sorted(there - listed))
    yield from (f"{name}: no such file" for name in sorted(listed - there))


def missing_tests(table: str, tests: Path) -> Iterator[str]:
    """Yield the faults in docs/project/reliability-matrix.md without a test, and tests that are gone."""
    for path, name in sorted(set(NAMED_TEST.findall(table)) - {("path", "name")}):
        file = tests / f"{path}.py"
        if not (file.exists() and re.search(rf"^ *def test_{name}\(", file.read_text(), re.MULTILINE)):
            yield f"{path}:{name}: no such test"
    rows = [line for line in table.splitlines() if line.startswith("| ") and "what happens" not in line]
    if len(rows) <= 40:
        yield f"{len(rows)} faults: is it still a table?"
    yield from (f"no test: {row}" for row in rows if not NAMED_TEST.search(row))


def violations(root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each violation in the repository."""
    source = root / "src" / "stoker"
    for path in sorted(source.rglob("*.py")):
        for line in source_violations(path.relative_to(source), path.read_text()):
            yield f"{path.relative_to(root)}: {line}"
    for path in sorted(source.rglob("README.md")):
        yield from (f"{path.relative_to(root)}: {line}" for line in map_errors(path))
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *source.rglob("README.md")]):
        yield from (f"{path.relative_to(root)}: {line}" for line in dead_links(path))
        yield from (f"{path.relative_to(root)}: {line}" for line in pictures_without_words(path.read_text()))
    for path in sorted(
        [*source.rglob("*.py"), *(root / "examples").rglob("*.py"), *(root / "tools").glob("*.py")]
    ):
        yield from (f"{path.relative_to(root)}: {line}" for line in dead_mentions(path.read_text(), root))
    matrix = root / "docs" / "project" / "reliability-matrix.md"
    for line in missing_tests(matrix.read_text(), root / "tests"):
        yield f"{matrix.relative_to(root)}: {line}"
    guarantees = (root / "tests" / "test_guarantees.py").read_text()
    for name in GUARANTEES:
        if f"def test_{name}" not in guarantees:
            yield f"tests/test_guarantees.py: no test_{name}"


def main() -> int:
    """Check everything; return the exit code."""
    lines = list(violations())
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
