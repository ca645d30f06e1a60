"""Mistakes that a user makes on the command line (`mistakes.yaml`): each is told so that it can be put right.

Facts and hints are compared by the values and names that they must hold, not by their sentences. Where a hint
says what to type, that is typed, and has to succeed or to get further.
"""

from __future__ import annotations

import io
import json
import re
import resource
import shlex
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml

from stoker import errors
from stoker.cli.command import run as run_app
from stoker.cli.main import app
from tests.cli.commands import run
from tests.cli.conftest import SETTINGS
from tests.conftest import write_burgers

FILE = Path(__file__).with_name("mistakes.yaml")
MISTAKES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())
KEYS = {"name", "files", "setup", "env", "command", "exit", "says", "hint", "shows", "then", "then_exit"}
VARIABLES = ("VAST_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "STOKER_SERVER")
"""Of credentials and servers, which a developer may have set."""
GROUPS = frozenset(
    "bench cache compat data demo init job launch plan precompute profile serve train validate".split()  # noqa: SIM905
)
INTERNAL = re.compile(
    r"Traceback|File \"|site-packages|/src/stoker/|\bErrno\b|<class |object at 0x|unexpected [A-Z]|"
    + "|".join(rf"\b{name}\b" for name in vars(errors) if name.endswith("Error"))
)
"""Of the inside of the program, which no message shows."""
PYTHON = re.compile(r"\b(?:fields|table|columns|preset|patch|cache_dir|[a-z_]+)=(?=[ ,;.)]|$)", re.M)
"""An argument of the library that was left without its value."""


# ----------------------------------------------------------------------------------------------------------
# What entries need besides text files. Each function prepares the current folder.


def write_lab(_: Path) -> None:
    """A database with one table."""
    with sqlite3.connect("lab.db") as lab:
        lab.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, power REAL, name TEXT)")
        lab.executemany("INSERT INTO rows VALUES (?, ?, ?)", [(n, n / 2, "a") for n in range(20)])
    lab.close()


def write_odd_hdf5(_: Path) -> None:
    """A file in no known layout, an empty one, and a damaged one."""
    with h5py.File("odd.h5", "w") as file:
        file["u"] = np.zeros((20, 5, 8), np.float32)
    h5py.File("hollow.h5", "w").close()
    Path("broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"x" * 300)


def write_tar(_: Path) -> None:
    """Twenty samples of two members each."""
    with tarfile.open("one.tar", "w") as archive:
        for number in range(20):
            for kind, content in (("jpg", b"x"), ("cls", b"1")):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def write_bad_images(_: Path) -> None:
    """Ten images that cannot be read."""
    Path("pictures").mkdir()
    for number in range(10):
        Path(f"pictures/{number}.jpg").write_bytes(b"nope")


def copy_cache(made: Path) -> None:
    """A complete cache of the train split, and one of val."""
    shutil.copytree(made / "data", "data")


def damage_cache(made: Path) -> None:
    """The same with one byte changed."""
    copy_cache(made)
    (shard,) = Path("data").glob("**/burgers1d_train/*/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)


def hollow_cache(made: Path) -> None:
    """The same without its records."""
    copy_cache(made)
    for path in Path("data").glob("**/burgers1d_train/*/*"):
        if path.name != "recipe.json" and path.name != "sources.jsonl":
            path.unlink()


SETUPS: Mapping[str, Callable[[Path], None]] = {
    "lab": write_lab,
    "odd_hdf5": write_odd_hdf5,
    "tar": write_tar,
    "bad_images": write_bad_images,
    "cache": copy_cache,
    "damaged_cache": damage_cache,
    "hollow_cache": hollow_cache,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files, settings and a finished cache, which entries copy."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "raw").mkdir()
    write_burgers(folder / "raw" / "burgers1d_train.h5")
    write_burgers(folder / "raw" / "burgers1d_val.h5", samples=4, seed=1)
    (folder / "c.yaml").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("precompute", "c.yaml")
    return folder


@pytest.fixture
def prepared(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """The entry; the current folder holds what it needs."""
    mistake = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # `serve` does so for good, in this process
    for name, value in mistake.get("env", {}).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(made / "raw", "raw")
    shutil.copy(made / "c.yaml", "c.yaml")
    for name, content in mistake.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    if "setup" in mistake:
        SETUPS[mistake["setup"]](made)
    return mistake


def typed(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_app(app, shlex.split(words))
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def parts_of(stderr: str) -> tuple[str, str]:
    """Return fact and hint as they are shown; the lines before them are notes."""
    found = re.fullmatch(r"(?:.*\n)*?error: (?P<fact>(?:.*\n)+?)(?:hint: (?P<hint>(?:.*\n)+))?", stderr)
    assert found, stderr
    return found["fact"].strip(), (found["hint"] or "").strip()


def missing(words: Sequence[str], text: str) -> list[str]:
    return [str(word) for word in words if str(word) not in text]


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices that are not there are there")
@pytest.mark.parametrize("prepared", MISTAKES, indirect=True, ids=[one["name"] for one in MISTAKES])
def test_a_mistake_is_told_so_that_it_can_be_put_right(
    prepared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    says, hints = prepared["says"], prepared.get("hint", [])
    code, stdout, stderr = typed(prepared["command"], capsys)
    assert code == prepared["exit"], stdout + stderr
    assert not INTERNAL.search(stdout + stderr), stderr
    if "shows" in prepared:  # the answer is a report: what is wrong is a part of it
        assert not missing(prepared["shows"], stdout), stdout
    else:
        assert stdout == ""
        assert len(re.findall(r"^error: ", stderr, re.M)) == 1, stderr
        fact, hint = parts_of(stderr)
        assert hint or not hints, f"no hint: {stderr}"
        assert not missing(says, fact), f"not in the fact: {missing(says, fact)}\n{stderr}"
        assert not missing(hints, hint), f"not in the hint: {missing(hints, hint)}\n{stderr}"
        assert not PYTHON.search(f"{fact}\n{hint}"), stderr
        assert not fact.endswith((":", ",", "(")), stderr
        for text in (fact, hint):
            assert text.count("(") == text.count(")"), stderr

        again, stdout, _ = typed(f"{prepared['command']} --json", capsys)
        (line,) = stdout.splitlines()
        report = json.loads(line)
        assert again == report["exit_code"] == code
        assert {"error", "fact", "hint"} <= report.keys()
        assert not missing(says, report["fact"]), report
        assert not missing(hints, report["hint"]), report
        assert not INTERNAL.search(line)
    if "then" in prepared:
        commands = [prepared["then"]] if isinstance(prepared["then"], str) else prepared["then"]
        for place, command in enumerate(commands):
            last = place == len(commands) - 1
            code, stdout, stderr = typed(command, capsys)
            assert code == (prepared.get("then_exit", 0) if last else 0), stdout + stderr


def test_entries_are_well_formed_and_of_every_group() -> None:
    names = [one["name"] for one in MISTAKES]
    assert len(names) == len({*names}) >= 60
    assert [one["name"] for one in MISTAKES if one.keys() - KEYS] == []
    assert {one["command"].split()[0] for one in MISTAKES} >= GROUPS
