"""Hostile names, and secrets: nothing is read as a command, nothing is shown."""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.launch.box import KEY, SECRET, Box, replace_by_recorder
from tests.launch.conftest import model
from tests.launch.test_script import ORDER

PIECES = (
    "$(touch evil)", "`touch evil`", "; touch evil;", "&& touch evil", "| touch evil", "'", '"', "\\", "\n",
    " ", "$HOME", "${IFS}", "*", "?", "[a]", "{a,b}", "~", "#", "!", "!!", "<", ">", "&", "(", ")", "\t",
    "\r", "é", "\u202e", "\U0001f525", "$'\\n'", "\x01", "\x7f", "\x1b[31m", "-rf", "--", "=", "EOF",
    "%s", "\\0", "a",
)  # fmt: skip
NAMES = 12
"""Hostile names in one script."""


def hostile(draw: random.Random) -> str:
    text = "".join(draw.choices(PIECES, k=draw.randint(1, 6)))
    return text.replace("\x01", "") or "x"


def hostile_round(box: Box, draw: random.Random, script_path: Path) -> None:
    """One script with twelve hostile names, run; every argument has to arrive as it was."""
    names = [f"x{hostile(draw)}" for _ in range(NAMES)]
    repo, config, constraints, up, cache, run_dir, cache_dir, folder, work, *rest = names
    overrides, install = tuple(f"{name}={name}" for name in rest[:2]), (rest[2],)
    workdir = box.root / f"w{work}"
    (workdir / "code" / folder).mkdir(parents=True)
    one = model(
        box, commit="a" * 40, repo=repo, config=config, overrides=overrides, install=install, folder=folder,
        constraints=constraints, upload=f"far:{up}", cache=f"far:{cache}", run_dir=run_dir,
        cache_dir=cache_dir, workdir=str(workdir), target="box",
    )  # fmt: skip
    script = one.render()
    script_path.write_text(script)
    checked = subprocess.run(["bash", "-n", str(script_path)], capture_output=True, timeout=60)
    assert checked.stderr == b""

    code, output = box.run(script)

    assert code == 0, (names, output)
    calls = box.calls()
    assert box.stokers() == [[word, config, *overrides] for word in ORDER], names
    assert next(call for call in calls if call[0] == "git" and "fetch" in call)[-2:] == [repo, "a" * 40]
    (pip,) = [call for call in calls if "pip" in call]
    assert pip[-3:] == ["-c", constraints, install[0]]
    copies = [call[-2:] for call in calls if call[:2] == ["rclone", "copy"] and "-uv" in call]
    assert copies == [
        [f"far:{cache}", f"./{cache_dir}"],
        [f"far:{up}/run/run", f"./{run_dir}"],
        [f"./{cache_dir}", f"far:{cache}"],
    ], names
    assert not (box.root / "evil").exists()
    assert not list(workdir.rglob("evil"))
    shutil.rmtree(workdir)


def test_a_hostile_command_is_run_as_it_stands(box: Box) -> None:
    draw, one = random.Random(11), model(box, target="box")
    for number in range(20):
        text = hostile(draw)
        command = f"printf %s {shlex.quote(text)} >../said{number}"

        code, output = box.run(
            one.model_copy(update={"command": command, "overrides": (f"a={number}",)}).render()
        )

        assert code == 0, output
        assert (box.workdir / f"said{number}").read_bytes().decode() == text
    assert not list(box.root.rglob("evil"))


def hostile_names(box: Box, count: int, seed: int) -> None:
    replace_by_recorder(box, "git")
    draw, scripts = random.Random(seed), box.root / "scripts"
    scripts.mkdir()
    for number in range(-(-count // NAMES)):
        hostile_round(box, draw, scripts / f"{number}.sh")
    if shutil.which("shellcheck") is not None:
        # SC2100 takes a value like x-rf, which is assigned as it is, for a sum that was meant.
        words = ["shellcheck", "-S", "warning", "-e", "SC2100", *sorted(map(str, scripts.iterdir()))]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900)
        assert done.stdout == ""


def test_hostile_names_stay_arguments(box: Box) -> None:
    hostile_names(box, 60, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_hostile_names_stay_arguments(box: Box, seed: int) -> None:
    hostile_names(box, 2000, seed=100 + seed)


@pytest.mark.parametrize("target", ["vast", "slurm"])
def test_shellcheck_finds_nothing(box: Box, target: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    draw = random.Random(3)
    words = tuple(f"a={hostile(draw)}" for _ in range(2))
    path = box.root / "s.sh"
    path.write_text(model(box, target=target, overrides=words, gpus=2, secrets=("GIT_TOKEN",)).render())

    done = subprocess.run(
        ["shellcheck", "-S", "warning", str(path)], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == ""


class Onlooker(threading.Thread):
    """Reads the arguments of every process of a machine, as anybody there may."""

    def __init__(self, box: Box) -> None:
        super().__init__(daemon=True)
        self._mark, self.seen, self.done = f"BOX={box.root}".encode(), set[bytes](), threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.look()

    def look(self) -> None:
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (place / "environ").read_bytes():
                    self.seen.add((place / "cmdline").read_bytes())
            except OSError:
                continue


def test_a_secret_is_in_no_output_script_or_argument(box: Box) -> None:
    script = model(box, secrets=("PLANTED", "GIT_TOKEN")).render()
    box.environment["GIT_TOKEN"] = SECRET
    box.answers = [500]
    onlooker = Onlooker(box)
    box.when_asked = onlooker.look
    onlooker.start()

    _, output = box.run(script, fail="?train?c.yaml:exit${IFS}1")

    onlooker.done.set()
    onlooker.join(60)
    assert any(b"curl" in words for words in onlooker.seen), "it looked"
    texts = [script, output, box.log(), str(box.calls()), str(onlooker.seen)]
    assert not [text for text in texts if SECRET in text or KEY in text]


def test_a_token_reaches_git_without_being_an_argument(box: Box) -> None:
    replace_by_recorder(box, "git")
    script = model(box, commit="a" * 40, secrets=("GIT_TOKEN",)).render()

    box.run(script)

    (call,) = [call for call in box.calls() if call[0] == "git" and "fetch" in call]
    helper = next(word for word in call if word.startswith("credential.helper=!"))
    asked = subprocess.run(
        ["sh", "-c", helper.removeprefix("credential.helper=!") + " get"],
        env={"GIT_TOKEN": SECRET, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.stdout == f"username=git\npassword={SECRET}\n"
    assert SECRET not in str(box.calls())
