"""Measure the shape of the package: `./run measure`. Figures as a table, or as JSON with --json.

Counts are taken from the source text and from one training run in a temporary folder. Definitions:

- lines: all lines of `src/stoker/**/*.py`, with docstrings, comments and blank lines.
- imported by one: modules that exactly one other module of the package imports, anywhere in its text.
- import depth: the longest chain of imports between modules of one folder; a cycle counts as one module.
- cycles: groups of modules that import each other, with imports inside functions, without those for types.
- ways: modules that call the primitive themselves instead of the one in `runtime/`.
- words: of README.md, docs/*.md and docstrings (`tools/words.py`).
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from words import LONG, figures_of, totals

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "stoker"
EXTRAS = ("extras",)
"""Folders that the core does without."""

WAYS = {
    "call with a timeout in a thread": r"ThreadPoolExecutor\(|threading\.Thread\(",
    # `psutil.Process` only looks at a process that is there.
    "run a child process": (
        r"subprocess\.(Popen|run)\(|os\.fork\(|(?<!psutil)\.Process\(|create_subprocess_"
    ),
    "lock a file": r"fcntl\.(flock|lockf)\(",
    "check disk space": r"statvfs\(|disk_usage\(",
    # `obstore.rename` names an object at a store; `Storage.rename` calls `runtime.files.rename`.
    "write atomically": r"\bos\.(replace|rename|link)\(|(?<!\bobstore)(?<!_storage)\.rename\(",
}
TRAIN = """
import sys
from pathlib import Path
import h5py, numpy as np
values = np.random.default_rng(0).standard_normal((12, 6, 32, 2)).astype("float32")
with h5py.File("data.hdf5", "w") as file:
    file["u"] = values
Path("train.yaml").write_text('''
data: {files: data.hdf5, fields: {data: "u: n t x c"}, splits: {train: 0.7, val: 0.3}}
latent: {dim: 16, tokens: 4}
encoder: {patch_size: 8}
model: {width: 16, depth: 1, heads: 2}
training: {epochs: 1, batch_size: 4}
''')
from stoker.cli.main import app
try:
    app(["train", "train.yaml", "--json"])
except SystemExit as end:
    if end.code:
        raise
print("MODULES", *sorted(name for name in sys.modules if name.split(".")[0] == "stoker"))
"""


def module_name(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports; not those imported for types alone."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    if full in known or child.module in known:
                        yield full if full in known else child.module
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names if alias.name in known)
            yield from visit(child)

    return visit(tree)


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, those that are imported first (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def depth(graph: dict[str, set[str]], package: str) -> int:
    """Return the length of the longest chain of imports inside a package."""
    inside = {name for name in graph if name.startswith(f"stoker.{package}.")}
    part = {name: graph[name] & inside for name in inside}
    home: dict[str, int] = {}
    length: list[int] = []
    for at, group in enumerate(components(part)):
        home.update(dict.fromkeys(group, at))
        below = {home[other] for name in group for other in part[name]} - {at}
        length.append(1 + max((length[other] for other in below), default=0))
    return max(length, default=0)


def comment_share(texts: dict[str, str]) -> float:
    """Return the share of lines that are a comment and nothing else."""
    comments = total = 0
    for text in texts.values():
        total += text.count("\n")
        lines = text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
                comments += 1
    return comments / total


def loaded_by_train() -> list[str]:
    """Return the modules that `stoker train` on one HDF5 file has loaded when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TRAIN],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("MODULES ")), None)
    if line is None:
        raise SystemExit(f"measure: the training run failed\n{done.stderr[-2000:]}")
    return line.split()[1:]


def measure(*, train: bool) -> dict[str, object]:
    """Return every figure by name."""
    paths = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = {name: set(imports(tree, set(trees))) - {name} for name, tree in trees.items()}
    users = Counter(other for others in graph.values() for other in others)
    lines = {name: text.count("\n") for name, text in texts.items()}
    extra = {name for name in lines if name.split(".")[1:2] and name.split(".")[1] in EXTRAS}
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    figures: dict[str, object] = {
        "lines": sum(lines.values()),
        "lines without extras": sum(count for name, count in lines.items() if name not in extra),
        "modules": len(lines),
        "median lines of a module": int(statistics.median(lines.values())),
        "modules imported by one other": sum(count == 1 for count in users.values()),
        "import depth in precompute / loader / store": [
            depth(graph, name) for name in ("precompute", "loader", "store")
        ],
        "import cycles": sum(len(group) > 1 for group in components(graph)),
        "public class names used twice or more": sum(count > 1 for count in classes.values()),
        "share of comment lines": round(comment_share(texts), 4),
    }
    for way, pattern in WAYS.items():
        users_of = [
            n for n, t in texts.items() if re.search(pattern, t) and not n.startswith("stoker.runtime")
        ]
        figures[f"modules that {way} by themselves"] = len(users_of)
    for kind, found in totals(figures_of()).items():
        figures[f"mean words of a sentence in {kind}"] = round(found.mean, 1)
        figures[f"sentences over {LONG} words in {kind}"] = len(found.long)
        figures[f"phrases to avoid in {kind}"] = len(found.avoided)
    if train:
        figures["modules loaded by `stoker train`"] = len(loaded_by_train())
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the shape of the package.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-train", action="store_true", help="leave out the training run")
    words = parser.parse_args()
    figures = measure(train=not words.no_train)
    if words.json:
        print(json.dumps(figures, indent=2))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {' / '.join(map(str, value)) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
