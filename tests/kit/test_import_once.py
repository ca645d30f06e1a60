"""A preloaded process that is forked from a template is what a started one would be, but for its parent."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.runtime.processes.child import TORCH, Child
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.preloaded import Preloaded, preloaded
from tests.kit import forked, import_once

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloaded processes are of Linux")
BARE = ("cloudpickle", "numpy.random")
PROGRAM = """
import time
from stoker.runtime.processes.child import Child
from stoker.runtime.processes.preloaded import preloaded
child = Child("time:sleep", what="a child", modules={modules})
print(preloaded({modules}).pid, flush=True)
time.sleep(600)
"""


def look(connection: Connection) -> None:
    main = sys.modules["__main__"]
    found = {
        "environment": dict(os.environ),
        "path": sys.path,
        "main": (main.__name__, getattr(main.__spec__, "name", None)),
        "torch": "torch" in sys.modules,
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "signals": {str(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folder": os.getcwd(),
        "umask": os.umask(0),
        "words": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
    }
    connection.socket.sendall(json.dumps(found).encode())


def seen_by_a_child(modules: tuple[str, ...]) -> Any:
    """What a child of a new preloaded process finds."""
    preloaded(modules).close()
    child = Child(look, what="a child", modules=modules)
    child.socket.settimeout(60)
    data = b""
    while piece := child.socket.recv(1 << 16):
        data += piece
    assert child.wait(60)
    child.close()
    preloaded(modules).close()
    return json.loads(data)


def words_of(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize("modules", [BARE, TORCH], ids=["bare", "torch"])
def test_children_find_what_those_of_a_started_one_find(
    modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "1")
    with import_once.real():
        expected = seen_by_a_child(modules)

    found = seen_by_a_child(modules)

    assert found == expected
    assert found["environment"]["OWN"] == "1"


def test_also_the_preloaded_process_of_a_program_is_forked_and_ends_with_it() -> None:
    command = [sys.executable, "-c", PROGRAM.format(modules=BARE)]
    before = import_once.surroundings()
    with forked.Popen(command, stdout=forked.PIPE) as program:
        try:
            assert program.stdout
            pid = int(program.stdout.readline())
            assert import_once.SERVER in words_of(pid)
            assert psutil.Process(pid).ppid() != program.pid, before
        finally:
            program.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "change", ["a variable that libraries read", "a limit", "another program", "nothing"]
)
def test_what_a_fork_cannot_be_is_started(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if change == "a variable that libraries read":
        monkeypatch.setenv("OMP_DYNAMIC", "true")
    elif change == "a limit":
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    elif change == "another program":
        monkeypatch.setattr(import_once, "SERVER", "another")
    server = Preloaded(BARE)
    try:
        server.start()
        assert isinstance(server._process, subprocess.Popen) == (change != "nothing")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        server.close()
