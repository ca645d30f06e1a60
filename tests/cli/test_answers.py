"""How commands answer: JSON, exit codes, colors, widths, one line for what is wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import typer

from stoker.cli import output
from stoker.cli.command import command_output, console
from stoker.cli.command import run as run_app
from stoker.cli.main import app, main
from stoker.config import load_config
from stoker.run.caches import inspect_cache
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.validate import validate_config
from tests.cli.commands import Screen, run, run_json, strip_ansi


def test_of_a_wrong_name_the_hint_is_the_nearest_one(project: Path) -> None:
    _, message = run("train", "c.yaml", "training.latent_cache_dirr=x", exit_code=3)

    fact, hint = message.splitlines()
    assert "training.latent_cache_dirr" in fact
    assert "training.latent_cache_dir?" in hint


def test_a_failure_with_json_is_one_object_too(project: Path) -> None:
    report = run_json("cache", "show", "nowhere", exit_code=4)

    assert report["exit_code"] == 4
    assert "nowhere" in report["error"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_place_that_may_not_be_used_is_not_blamed_on_space(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stop, command_output(as_json=True, debug=False):
        raise OSError(number, os.strerror(number), "/data/x")

    message = json.loads(capsys.readouterr().out)["error"]
    assert stop.value.exit_code == 1
    assert message.startswith(f"/data/x: {os.strerror(number)}")
    assert "space" not in message.lower()
    assert "name another place" in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 6),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"), 6),
        (torch.OutOfMemoryError("CUDA out of memory"), 6),
        (RuntimeError("no"), 1),
    ],
)
def test_memory_that_ran_out_is_no_error_to_report(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    with pytest.raises(typer.Exit) as stop, command_output(as_json=True, debug=False):
        raise error

    told = json.loads(capsys.readouterr().out)
    assert stop.value.exit_code == told["exit_code"] == code
    assert ("report it" in told["hint"]) == (code == 1)


def test_a_missing_argument_is_described_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_app(app, ["cache", "why", "--json"])

    assert stop.value.code == 2
    hint = json.loads(capsys.readouterr().out)["hint"]
    assert "A: A cache, a recipe's folder, or a CONFIG file" in hint
    assert "nearest cache" in hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["cache", "why", "--json"], "Missing argument", id="missing"),
        pytest.param(["train", "c.yaml", "--nosuch", "--json"], "No such option: --nosuch", id="option"),
        pytest.param(["cache", "verify", "x", "--subset", "q", "--json"], "--subset", id="value"),
        pytest.param(["nosuch", "--json"], "No such command 'nosuch'", id="command"),
    ],
)
def test_a_command_typed_wrong_answers_in_json_too(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_app(app, words)

    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert len(shown.out.splitlines()) == 1
    assert (stop.value.code, answer["exit_code"]) == (2, 2)
    assert said in answer["error"]
    assert said in shown.err


def test_without_json_a_command_typed_wrong_names_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_app(app, ["cache", "gc"])

    shown = capsys.readouterr()
    assert (stop.value.code, shown.out) == (2, "")
    assert shown.err.splitlines()[0] == "error: Missing argument 'CACHE_DIR'"
    assert "stoker cache gc --help" in shown.err


def test_a_tier_that_cannot_hold_the_records_is_a_lack_of_resources(project: Path) -> None:
    _, message = run(
        "plan", "c.yaml", "training.tier=host", "training.reserve_bytes=999999999999999", exit_code=6
    )

    assert "host memory" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_lack_of_resources(project: Path) -> None:
    _, message = run("plan", "c.yaml", "training.device=cuda", exit_code=6)

    assert "device cuda is not there" in message
    assert "training.device=cpu" in message


def test_a_sample_that_cannot_be_encoded_makes_the_cache_incomplete(project: Path) -> None:
    with h5py.File(project / "raw" / "burgers1d_train.h5", "r+") as file:
        file["tensor"][3, 0, 0] = np.nan

    _, message = run("precompute", "c.yaml", "--splits", "train", exit_code=4)
    allowed = run_json("precompute", "c.yaml", "precompute.max_quarantined=0.5", "--splits", "train")
    text, _ = run("precompute", "c.yaml", "precompute.max_quarantined=0.5", "--splits", "train")

    assert "1" in message
    assert "quarantined" in message
    assert allowed["caches"][0]["quarantined"] == 1
    assert "sample 3" in text


def test_no_colors_in_a_pipe_or_with_no_color(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in "".join(run("validate", "c.yaml"))

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[3" not in "".join(run("validate", "c.yaml"))


def test_what_a_library_prints_does_not_spoil_the_json(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatty(*args: Any, **more: Any) -> Any:
        print("hello from below")  # noqa: T201 - a library that prints is what this is about
        return plan_config(*args, **more)

    monkeypatch.setattr("stoker.run.plan.plan_config", chatty)

    assert run_json("plan", "c.yaml")["records"] == 12


def test_sigterm_is_an_interrupt_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("stoker.cli.main.run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert stop.value.code == 130


def test_debug_shows_where_an_error_came_from(project: Path) -> None:
    _, brief = run("cache", "show", "nowhere", exit_code=4)
    _, full = run("cache", "show", "nowhere", "--debug", exit_code=4)

    assert "Traceback" not in brief
    assert "Traceback" in full


def test_without_color_nothing_but_text_is_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    result = plan_config(Run(load_config("c.yaml")))
    shown: list[str] = []
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        screen = Screen()
        output.plan(result, console(screen))
        shown.append(screen.getvalue())

    assert "\x1b[1m" in shown[0]
    assert "\x1b" not in shown[1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_loses_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Words move to another line; figures and paths stay whole."""
    run("precompute", "c.yaml")
    monkeypatch.setenv("COLUMNS", str(columns))
    cache = "data/latent_cache/burgers1d_train"
    summary = inspect_cache(Path(cache))
    screen = Screen()

    output.inspect(summary, console(screen))
    output.plan(plan_config(Run(load_config("c.yaml"))), console(screen))
    output.validate(validate_config("c.yaml"), console(screen))

    text = strip_ansi(screen.getvalue())
    assert "…" not in text
    assert summary.path in text
    for figure in ("(9, 4, 8)", "float16", "load/batch", "one copy for all processes of this node;"):
        assert figure in text.replace("\n  ", " ")
    header, _, host = [line for line in text.splitlines() if line.startswith(("tier", "device", "host"))][:3]
    assert host[: header.index("records") + len("records")].split() == ["host", "12"], "not below its name"


def test_a_bound_that_a_dtype_does_not_keep_is_answered_with_the_settings(project: Path) -> None:
    settings = ("training.latent_cache_dtype=int8", "precompute.max_error=1e-4", "--splits", "train")

    _, stderr = run("precompute", "c.yaml", *settings, exit_code=1)

    assert "0.0001 is allowed\nhint: Store it wider, as with training.latent_cache_dtype=float16" in stderr
    assert "or raise precompute.max_error" in stderr


def test_what_a_user_or_a_library_wrote_is_not_put_in_other_words(project: Path) -> None:
    foreign = "fit=1 order=desc tier='host' preset=well dtype=None"
    (project / "own.py").write_text(
        f"class Own:\n    def __init__(self, word):\n        raise TypeError({foreign!r})\n"
    )
    (project / "own.yaml").write_text("{}")
    own = ("data.dataset=own.py:Own", "data.task=own", f'data.torch.arguments={{word: "{foreign}"}}')

    _, of_a_path = run("cache", "show", foreign, exit_code=4)
    _, of_a_file = run("precompute", "own.yaml", f'data.files="{foreign}"', "data.task=own", exit_code=3)
    _, of_a_library = run("precompute", "own.yaml", *own, exit_code=3)

    assert foreign in of_a_path
    assert foreign in of_a_file
    assert foreign in of_a_library.partition("TypeError")[2]
