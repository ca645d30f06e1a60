"""Every module can be imported, unless an optional package is missing, and does nothing then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kit import forked as subprocess

SRC = Path(__file__).parents[1] / "src"
SHORT_WAITS = Path(__file__).parent / "chaos" / "short_waits" / "sitecustomize.py"
IMPORT_ALL = """
import importlib, sys
missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "stoker").partition(".")[0] == "stoker":
            raise
        missing.append(name)
print(len(missing), *missing)
"""


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    modules = [
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((SRC / "stoker").rglob("*.py"))
        if path.stem != "__main__"
    ]

    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    count, *missing = done.stdout.split()
    assert int(count) <= 10, missing
    assert len(done.stdout.splitlines()) == 1, "an import printed something"
    assert not [*tmp_path.iterdir()]


def test_the_waits_that_slow_tests_shorten_have_these_names() -> None:
    code = f"import runpy, sys; sys.orig_argv.append('serve'); runpy.run_path({str(SHORT_WAITS)!r})"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "STOKER_SHORT_WAITS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
