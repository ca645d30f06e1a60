"""A process ends although storage hangs: no thread of ours is joined when the interpreter exits."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.kit import forked as subprocess

SCRIPT = """
import time
from pathlib import Path
from stoker.runtime import threads
from stoker.errors import StalledError
threads.EXIT_S = 0.2
big = Path("big")
big.write_bytes(bytes(64 << 20))
def hang(*_, **__):
    time.sleep(600)
try:
{work}
except StalledError as error:
    print("stalled", flush=True)
"""
WORK = {
    "rates": """
    from stoker.plan import rates
    rates.ANSWER_S, rates._reader = 0.5, hang
    rates._disk_rate(big)
""",
    "limits": """
    from stoker.plan import rates
    rates.ANSWER_S, rates._reader = 0.5, hang
    rates._read([(big, 0)], 4096, 2, 0.1, direct=False)
""",
    "opening for limits": """
    from stoker.plan import rates
    rates.ANSWER_S, rates._open = 0.5, hang
    rates._read([(big, 0)], 4096, 2, 0.1, direct=False)
""",
    "looking for limits": """
    from stoker.plan import rates
    rates.ANSWER_S, Path.stat = 0.5, hang
    rates.random_limit([big], 4096)
""",
    "mirror": """
    from stoker.store.mirror import MirrorRoot
    root = MirrorRoot.__new__(MirrorRoot)
    root.space = type("Space", (), {"limit_bytes": None})()
    for pool in (root.pool, root.ahead_pool):
        pool.submit(hang).result(0.5, "the store")
""",
}


@pytest.mark.parametrize("what", WORK)
def test_a_process_whose_storage_hangs_reports_it_and_ends(what: str, tmp_path: str) -> None:
    code = SCRIPT.replace("{work}", WORK[what])

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, "stalled\n"), done.stderr


WATCHED = """
import sys
from stoker.cli import process
process.STORAGE_S = 0.5
sys.argv = ["stoker", *sys.argv[1:]]
process.main()
"""
FIRST = """
import os, sys
if "stoker.cli.main" in sys.orig_argv:
    open(os.environ["READ_FIRST"]).readline()
"""


def watched(folder: Path, read_first: Path | str) -> subprocess.Popen[str]:
    """A command that first reads a line from somewhere, under a guardian that waits for half a second."""
    (folder / "sitecustomize.py").write_text(FIRST)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED, "plan", str(folder / "none.yaml"), "--json"],
        env={**os.environ, "PYTHONPATH": path, "READ_FIRST": str(read_first)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_command_whose_file_gives_no_answer_fails_and_names_it(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to waits for ever, as calls do on a mount without its server."""
    os.mkfifo(tmp_path / "fifo")

    with watched(tmp_path, tmp_path / "fifo") as command:
        answer, said = command.communicate(timeout=60)

    assert command.returncode == 5, said
    assert json.loads(answer)["exit_code"] == 5
    assert str(tmp_path / "fifo") in json.loads(answer)["error"]


def test_a_command_that_waits_for_another_program_is_let_be(tmp_path: Path) -> None:
    with watched(tmp_path, "/dev/stdin") as command:
        child = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        deadline = time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.5)  # several times what an answer may take
        answer, said = command.communicate("\n", timeout=60)

    assert command.returncode == 3, said
    assert "none.yaml" in json.loads(answer)["error"]


ENDS = """
import threading, time
from stoker.cli import command
from stoker.cli.main import app
command.EXIT_S = 0.3
threading.Thread(target=time.sleep, args=(600,)).start()
command.run(app, ["cache", "show", "none"])
"""


def test_a_thread_of_a_library_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """As those of the web server do in a request for data on a mount that does not answer."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 4, done.stderr
    assert "none" in done.stderr
