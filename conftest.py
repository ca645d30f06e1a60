"""What pytest collects, and how fast: every worker of a run imports all of it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem, DoctestModule

import stoker  # noqa: F401 - first, else pytest imports `stoker.errors` a second time for its examples

DONT_WRITE_BYTECODE = sys.dont_write_bytecode

NEEDED_BY = {
    "mfusepy": ["tests/chaos/away_fuse.py"],
    "ray": [
        "tests/distributed/two_nodes.py",
        "src/stoker/extras/ray/engine.py",
    ],
    "triton": ["tests/loader/kernels/interpreted.py", "src/stoker/loader/triton_gather.py"],
}
"""Packages, and the modules that need them: not searched for doctests where the package is not installed."""

collect_ignore = [
    path for package, paths in NEEDED_BY.items() if find_spec(package) is None for path in paths
]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are more workers than cores, and tensors are small
gc.disable()  # while modules are imported and tests are collected there is next to nothing to free
sys.dont_write_bytecode = False  # asserts are rewritten, and modules compiled, once and not in every run


def pytest_collection_finish() -> None:
    """Give the setting back before tests run: they write modules again within a second.

    The garbage collector need not look at modules and tests again and again.
    """
    sys.dont_write_bytecode = DONT_WRITE_BYTECODE
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def folder_of_an_example(request: pytest.FixtureRequest) -> None:
    """Run each doctest in an empty folder of its own, so that it can name files as a user does."""
    if isinstance(request.node, DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Search only files with examples for doctests: the search imports a module and looks at all it holds."""
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found
