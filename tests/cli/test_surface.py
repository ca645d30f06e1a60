"""What people type first: short help, groups of commands, errors with a hint, questions before a deletion."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest
import typer

from stoker.cli.command import command_output
from stoker.errors import ConfigError, FormatError, arg
from tests.cli.commands import run, run_json, strip_ansi

STOKER = [sys.executable, "-m", "stoker"]
CACHE = "data/latent_cache"
WAIT_S = 60.0


def typed(*words: str, answer: str = "") -> tuple[int, str]:
    """Run a command on a terminal and give one answer; its exit code and what it showed."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [*STOKER, *words], stdin=slave, stdout=slave, stderr=slave, close_fds=True, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no thread runs here
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while select.select([master], [], [], WAIT_S)[0]:
        try:
            piece = os.read(master, 4096)
        except OSError:
            break
        shown += piece
        if answer and b"[y/N]" in shown:
            os.write(master, answer.encode() + b"\n" * answer.isalpha())
            answer = ""
    os.close(master)
    return child.wait(WAIT_S), shown.decode()


def caches(folder: Path) -> int:
    return len([*folder.glob(f"{CACHE}/*/*/recipe.json")])


@pytest.fixture
def several(project: Path) -> Path:
    """A train cache of two recipes."""
    for dim in (8, 6):
        run("precompute", "c.yaml", f"latent.dim={dim}", "--splits", "train")
    assert caches(project) == 2
    return project


@pytest.mark.parametrize(
    "words", [["-h"], ["cache", "-h"], ["cache", "gc", "-h"], ["job", "submit", "-h"], ["launch", "-h"]]
)
def test_h_is_help(words: list[str]) -> None:
    assert run(*words)[0].startswith("Usage: stoker")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["verify", "x"], "stoker cache verify"),
        (["inspect", "x"], "stoker cache show"),
        (["fetch"], "stoker data fetch"),
        (["trian"], "train"),
    ],
)
def test_a_name_that_is_elsewhere_or_typed_wrong_is_found(words: list[str], meant: str) -> None:
    done = subprocess.run([*STOKER, *words], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such command")
    assert meant in done.stderr


def test_an_error_is_a_fact_and_a_hint_in_color_on_a_terminal_alone(tmp_path: Path) -> None:
    words = ["cache", "show", str(tmp_path / "nowhere")]
    done = subprocess.run([*STOKER, *words], capture_output=True, text=True, check=False)
    code, shown = typed(*words)

    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "hint:"]
    assert (code, done.returncode) == (4, 4)
    assert "\x1b[" in shown
    assert re.findall(r"\x1b\]8;;(.*?)\x1b", shown) == [FormatError("").docs, ""]
    assert strip_ansi(re.sub("\x1b\\]8;;.*?\x1b\\\\", "", shown)).split() == done.stderr.split()


def test_lines_printed_while_a_screen_is_drawn_stay_and_the_screen_goes(project: Path) -> None:
    code, sent = typed("train", "c.yaml", "training.epochs=3")
    terminal = pyte.Screen(80, 200)  # as `pty` has it, and high enough for all
    pyte.Stream(terminal).feed(sent)
    shown = [line.rstrip() for line in terminal.display]

    assert code == 0
    assert [line.split()[1] for line in shown if re.match(r"epoch \d took", line)] == ["1", "2", "3"]
    assert not [line for line in shown if "step 0 of" in line or " left" in line]


def test_json_of_an_error_has_fact_hint_and_a_url(tmp_path: Path) -> None:
    told = run_json("cache", "show", str(tmp_path / "nowhere"), exit_code=4)

    assert told["docs"] == FormatError("").docs

    assert told["error"] == f"{told['fact']}. {told['hint']}"
    assert "nowhere" in told["fact"]


def test_a_hint_that_was_given_apart_is_not_cut_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), command_output(as_json=False, debug=False):
        raise ConfigError("/data/Exp. Big/x.h5 is missing", hint=f"Name another. Or set {arg('workers', 0)}")

    assert capsys.readouterr().err.splitlines() == [
        "error: /data/Exp. Big/x.h5 is missing",
        "hint: Name another. Or set precompute.workers=0",
    ]


def test_a_group_alone_shows_its_commands() -> None:
    done = subprocess.run([*STOKER, "cache"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "verify" in done.stderr
    assert "error:" not in done.stderr


def test_ls_lists_every_recipe_of_a_name_the_newest_first(several: Path) -> None:
    found = run_json("cache", "ls", CACHE)["caches"]

    assert len({cache["name"] for cache in found}) == 1
    assert [cache["fields"]["latent"]["shape"][-1] for cache in found] == [6, 8]


def test_without_a_terminal_nothing_is_deleted_unless_yes_is_given(several: Path) -> None:
    told = run_json("cache", "gc", CACHE, "--keep", "1", "--force", exit_code=3)

    assert "--yes" in told["hint"]
    assert caches(several) == 2
    assert len(run_json("cache", "gc", CACHE, "--keep", "1", "--force", "--yes")["removed"]) >= 1
    assert caches(several) == 1


def test_where_nothing_would_go_nobody_is_asked(several: Path) -> None:
    assert run_json("cache", "gc", CACHE)["removed"] == []


@pytest.mark.parametrize(
    ("answer", "left", "ends"), [("n", 2, 0), ("y", 1, 0), ("\x04", 2, 130), ("\x03", 2, 130)]
)
def test_on_a_terminal_the_answer_decides(several: Path, answer: str, left: int, ends: int) -> None:
    code, shown = typed("cache", "gc", CACHE, "--keep", "1", "--force", answer=answer)

    assert code == ends, shown
    assert "[y/N]" in shown
    assert caches(several) == left


def test_ls_finds_the_caches_of_the_folder_it_is_in(
    several: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_json("cache", "ls") == run_json("cache", "ls", CACHE)

    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    assert "stoker cache ls FOLDER" in run_json("cache", "ls", exit_code=4)["hint"]


def test_a_shell_completes_commands_of_groups() -> None:
    environment = {
        **os.environ,
        "_STOKER_COMPLETE": "complete_bash",
        "COMP_WORDS": "stoker cache ver",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from stoker.cli.process import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.split() == ["verify"], done.stderr
