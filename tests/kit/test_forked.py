"""A forked Python is what a Python of its own would be, as far as tests look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked
from tests.kit.as_python import START_CODE
from tests.kit.import_once import READ_AT_START

ABOUT = """
import json, os, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path,
    "name": __name__, "folder": os.getcwd(),
    "environment": dict(os.environ), "stdin": sys.stdin.read(), "umask": os.umask(0),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "signals": {str(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "main": sys.modules["__main__"].__dict__["__name__"], "tests": [n for n in sys.modules if n == "tests"],
    "threads": len(os.listdir("/proc/self/task")),
}))
print("err", file=sys.stderr)
sys.exit(7)
"""


def both(words: list[str], **named: Any) -> tuple[Any, Any]:
    command = [sys.executable, *words]
    return subprocess.run(command, **named), forked.run(command, **named)


@pytest.mark.parametrize("how", ["code", "script", "module", "without warnings"])
def test_it_finds_what_a_python_of_its_own_finds(tmp_path: Path, how: str) -> None:
    (tmp_path / "about.py").write_text(ABOUT)
    words = {
        "code": ["-c", ABOUT],
        "script": [str(tmp_path / "about.py")],
        "module": ["-m", "about"],
        "without warnings": ["-W", "ignore", "-c", "import warnings; warnings.warn('unseen')" + ABOUT],
    }[how]
    env = {**os.environ, "PYTHONPATH": f"/nowhere{os.pathsep}relative", "OWN": "1"}
    ignored = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell has its background jobs ignore it
    try:
        own, fork = both(
            [*words, "a", "-b"], cwd=tmp_path, env=env, input="in", capture_output=True, text=True
        )
    finally:
        signal.signal(signal.SIGQUIT, ignored)

    assert own.returncode == fork.returncode == 7
    assert own.stderr == fork.stderr == "err\n"
    assert json.loads(fork.stdout) == json.loads(own.stdout)


def test_what_a_module_of_stoker_prints_is_the_same(tmp_path: Path) -> None:
    own, fork = both(["-m", "stoker", "--version"], cwd=tmp_path, capture_output=True)

    assert fork.returncode == own.returncode == 0
    assert fork.stdout == own.stdout
    assert fork.stderr == own.stderr == b""


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('x')",
        "import warnings; warnings.warn('seen')",
        "import sys; sys.exit('said')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "import ctypes; ctypes.string_at(0)",
        "1 +",
    ],
)
def test_it_ends_as_a_python_of_its_own_does(code: str) -> None:
    own, fork = both(["-c", code], capture_output=True, text=True)

    assert fork.returncode == own.returncode
    assert fork.stdout == own.stdout
    assert [*map(str.strip, fork.stderr.splitlines()[-1:])] == [*map(str.strip, own.stderr.splitlines()[-1:])]


def test_it_is_sent_signals_and_waited_for() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print(1, flush=True)\n"
        "signal.pause()"
    )
    with forked.Popen([sys.executable, "-c", code], stdout=forked.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        assert process.poll() is None
        with pytest.raises(forked.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 9
        process.kill()  # nobody is there any more
    with forked.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(forked.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.2)
    with pytest.raises(forked.CalledProcessError):
        forked.run([sys.executable, "-c", "exit(1)"], check=True)


def test_two_forks_draw_different_random_numbers_and_share_no_state() -> None:
    code = "import random, sys; print(random.random()); assert not hasattr(sys, 'mine'); sys.mine = 1"
    drawn = {
        forked.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(3)
    }

    assert len(drawn) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-X", "dev", "-c", "pass"], {}),
        (["-c", "pass"], {"env": {**os.environ, "OMP_NUM_THREADS": "7"}}),
        (["-c", "pass"], {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "site")}}),
        (["-c", "pass"], {"preexec_fn": lambda: None}),
    ],
    ids=["an option", "a variable that libraries read", "a sitecustomize", "a function before it starts"],
)
def test_what_a_fork_cannot_be_is_started_by_itself(
    words: list[str], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    if "PYTHONPATH" in named.get("env", {}):
        named = {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    with forked.Popen([sys.executable, *words], **named) as process:
        assert process.child is None
    assert process.returncode == 0


def test_what_is_loaded_before_a_fork_is_there() -> None:
    """The preloaded process leaves out what it cannot import: a module of a new name would only cost time."""
    assert not [name for name in forked.MODULES if find_spec(name) is None]


def test_the_usual_is_forked() -> None:
    others = {name: value for name, value in os.environ.items() if not name.startswith(READ_AT_START)}
    with forked.Popen([sys.executable, "-c", "pass"], env={**others, **forked.AT_START}) as process:
        assert process.child is not None
    assert process.returncode == 0


def test_what_a_guardian_starts_is_a_fork_of_it(tmp_path: Path) -> None:
    """With the answer, the exit code and the parent that a started one has."""
    (tmp_path / "start.py").write_text(
        "import os, sys\n"
        "if 'stoker.cli.main' in sys.orig_argv:\n"
        "    open('child', 'w').write(f'{sys.orig_argv[1:]} {sys.path[0]} {os.getppid()} ')\n"
        "    open('descriptors', 'w').write(' '.join(sorted(os.listdir('/proc/self/fd'))))\n"
        "    assert 'torch' in sys.modules\n"
    )
    words = ["-m", "stoker", "plan", "none.yaml", "--json"]
    own = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True)
    env = {**os.environ, START_CODE: str(tmp_path / "start.py")}

    with forked.Popen([sys.executable, *words], cwd=tmp_path, env=env, stdout=-1, stderr=-1) as fork:
        said = fork.communicate()

    assert fork.returncode == own.returncode == 3
    assert said == (own.stdout, own.stderr)
    assert own.stdout
    found = (tmp_path / "child").read_text()
    assert f"{['-P', '-m', 'stoker.cli.main', *words[2:]]} " in found
    assert found.endswith(f" {fork.pid} ")
    assert str(tmp_path) not in found
    assert len((tmp_path / "descriptors").read_text().split()) == 3 + 3 + 2  # of the guardian, and those open
