"""The earlier script's timeouts are timeouts now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stoker.cli.command import PrecomputeFlags, SeveralWords, Splits, Words, spread_flags
from stoker.extras.compat.command import CompatFlags, EarlierPrecomputeFlags

DEADLINES = "precompute.timeouts."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"hdf5_timeout": 9}, {"open": "9", "read": "9"}, id="hdf5"),
        pytest.param(
            {"dataloader_timeout": 30}, {"start": "30", "open": "30", "read": "30"}, id="dataloader"
        ),
        pytest.param(
            {"hdf5_timeout": 9, "dataloader_timeout": 30},
            {"start": "30", "open": "9", "read": "9"},
            id="the-file's-own-wins",
        ),
        pytest.param({"cache_write_timeout": 0.5}, {"write": "0.5"}, id="cache-write"),
        pytest.param({"watchdog_timeout": 120}, {"encode": "120"}, id="watchdog"),
    ],
)
def test_each_timeout_becomes_the_deadline_that_does_what_it_says(given, expected):
    settings = dict(setting.split("=") for setting in EarlierPrecomputeFlags(**given).settings([]))

    assert settings == {f"{DEADLINES}{stage}": value for stage, value in expected.items()}


@pytest.mark.parametrize(
    ("kind", "typed", "expected"),
    [
        (PrecomputeFlags, "--splits a --devices all --workers 0", {"devices": "all", "workers": 0}),
        (
            EarlierPrecomputeFlags,
            "--splits a --tasks x y --no-parallel",
            {"tasks": ["x", "y"], "parallel": False},
        ),
        (CompatFlags, "--tasks x --tasks y --batch-size 3 c.yaml", {"tasks": ["x", "y"], "batch_size": 3}),
    ],
)
def test_each_field_is_a_flag_that_arrives_as_it_was_typed(kind, typed, expected):
    app, found = typer.Typer(), []

    def command(words: Words = None, *, splits: Splits = None, flags: object) -> None:
        found.append(flags)

    command.__annotations__["flags"] = kind
    app.command(cls=SeveralWords)(spread_flags(command))

    result = CliRunner().invoke(app, typed.split())

    assert result.exit_code == 0, result.output
    assert found == [kind(**expected)]


def test_a_flag_that_the_earlier_script_did_not_have_is_refused_there():
    app = typer.Typer()

    @app.command()
    @spread_flags
    def command(flags: CompatFlags) -> None: ...

    assert CliRunner().invoke(app, ["--engine", "ray"]).exit_code == 2


READER_HANGS = """\
import sys
if any("stoker.precompute.worker" in word for word in sys.orig_argv):
    import h5py, time
    whole = h5py.File.__init__
    def hanging(self, *args, **kwargs):
        time.sleep(3600)
    h5py.File.__init__ = hanging
"""


@pytest.mark.slow
@pytest.mark.chaos
def test_hdf5_timeout_ends_workers_that_hang_in_opening_a_file(project: Path) -> None:
    (project / "site").mkdir()
    (project / "site" / "sitecustomize.py").write_text(READER_HANGS)
    path = os.pathsep.join([str(project / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [
        "compat",
        "precompute",
        "c.yaml",
        "--splits",
        "train",
        "--num-workers",
        "1",
        "--hdf5-timeout",
        "0.5",
        "--json",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "stoker", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 4, done.stderr
    assert 'made no progress for 0.5 s in stage "open"' in json.loads(done.stdout)["error"]
