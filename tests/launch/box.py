"""A machine for start-up scripts: an empty folder, programs that record or fail, a provider on loopback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
KEY = "planted-instance-key-0123456789"
SECRET = "planted-secret-value-9876543210"
TOOLS = (
    "bash", "cat", "chmod", "cp", "date", "dirname", "env", "find", "git", "ln", "mkdir", "mv", "rm",
    "setsid", "sha256sum", "sleep", "tail", "tee", "timeout", "touch", "uname", "which",
)  # fmt: skip
RECORD = """#!/bin/bash
printf '%s\\0' "{name}" "$@" >>"$BOX/calls"; printf '\\1\\0' >>"$BOX/calls"
for fault in $FAIL; do
  case "{name} $*" in *${{fault%%:*}}*) exec bash -c "${{fault#*:}}";; esac
done
"""
"""`FAIL` holds `words:command` pairs without blanks; a call with these words does the command instead."""
KILL = """\
case $0 in *onstart.sh|bash)
  [ -e "$BOX/main" ] || echo $$ >"$BOX/main"
  set -T
  trap 'if [ $BASHPID = $$ ] && [ "$BASH_EXECUTION_STRING" != uploads ] && [ -e "$BOX/kill_at" ]; then
    n=; until [ "$n" ]; do read -r n <"$BOX/kill_at"; done; echo $((n - 1)) >"$BOX/kill_at"
    [ "$n" != 0 ] || { rm "$BOX/kill_at"; kill -9 $(<"$BOX/main") $$; }
  fi' DEBUG
esac
"""
"""Sourced by every bash (BASH_ENV): the power goes before the n-th command of the script or a function."""


@dataclass
class Box:
    """The machine."""

    root: Path
    environment: dict[str, str]
    answers: list[int] = field(default_factory=list)
    """Statuses of the provider's next answers; then 200."""
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Method, path, body, Authorization."""
    url: str = ""
    when_asked: Callable[[], None] = lambda: None
    """Called before the provider answers, while the command that asked waits."""

    @property
    def workdir(self) -> Path:
        return self.root / "work dir"

    def start(self, script: str, *, fail: str = "") -> subprocess.Popen[str]:
        for name in ("calls", "main"):
            (self.root / name).unlink(missing_ok=True)
        path = self.root / "onstart.sh"
        path.write_text(
            script.replace("i * 5", "i * 0").replace("/proc/1/environ", str(self.root / "environ"))
        )
        environment = self.environment | {"FAIL": fail}
        return subprocess.Popen(
            ["bash", str(path)],
            env=environment, cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str, *, fail: str = "", timeout: float = 170) -> tuple[int, str]:
        process = self.start(script, fail=fail)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def calls(self) -> list[list[str]]:
        """Every recorded call, in order, with its arguments."""
        path = self.root / "calls"
        data = path.read_bytes().decode() if path.exists() else ""
        return [call.split("\0")[:-1] for call in data.split("\1\0")[:-1]]

    def stokers(self) -> list[list[str]]:
        """The commands of stoker that ran, with their arguments; under torchrun or not."""
        found: list[list[str]] = []
        for call in self.calls():
            if "stoker" in call:
                words = call[call.index("stoker") + 1 :]
                found.append(words[1:] if words[:1] == ["data"] else words)
            elif "stoker.extras.launch.ranks" in call:
                found.append(call[call.index("stoker.extras.launch.ranks") + 3 :])
        return found

    def commands(self) -> list[str]:
        """Their names."""
        return [words[0] for words in self.stokers()]

    def clear(self) -> None:
        """End every process that this machine has, as when its power goes."""
        mark = f"BOX={self.root}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    os.kill(int(place.name), signal.SIGKILL)
            except OSError:
                continue

    def log(self) -> str:
        return (self.workdir / "run.log").read_text()

    def stopped(self) -> bool:
        return ("PUT", "/v0/instances/77/", '{"state":"stopped"}', f"Bearer {KEY}") in self.asked


@contextmanager
def a_box(root: Path, *, real: bool = False) -> Iterator[Box]:
    """A machine; `real`: its Python runs stoker, else it only records."""
    binaries = root / "bin"
    binaries.mkdir(parents=True)
    for tool in TOOLS:
        if found := shutil.which(tool):
            (binaries / tool).symlink_to(found)
    python = f'exec env PYTHONPATH={shlex.quote(str(SRC))} {shlex.quote(sys.executable)} "$@"'
    venv = 'case "$1 $2" in "-m pip") exit 0;; esac\n' + (python if real else "exit 0")
    _program(root / "venv-python", "python", venv)
    _program(
        binaries / "python3",
        "python3",
        'if [ "$1" = -c ]; then exit 0; fi\n'
        'mkdir -p "${@: -1}/bin" && cp "$BOX/venv-python" "${@: -1}/bin/python"',
    )
    far = shutil.which("rclone") if real else None
    _program(binaries / "rclone", "rclone", f'exec {far} "$@"' if far else "exit 0")
    _program(binaries / "apt-get", "apt-get", "exit 100")
    _program(binaries / "curl", "curl", f'exec {shutil.which("curl")} "$@"')
    environment = {
        "PATH": str(binaries), "BOX": str(root), "HOME": str(root), "LANG": "C.UTF-8",
        "CONTAINER_ID": "77", "CONTAINER_API_KEY": KEY, "PLANTED": SECRET,
        "RCLONE_CONFIG_FAR_TYPE": "local", "GIT_CONFIG_NOSYSTEM": "1",
    }  # fmt: skip
    box = Box(root=root, environment=environment)
    with _provider(box):
        yield box


def _program(path: Path, name: str, then: str) -> None:
    path.write_text(RECORD.format(name=name) + then + "\n")
    path.chmod(0o755)


def replace_by_recorder(box: Box, name: str) -> None:
    """Let a real tool only record."""
    path = box.root / "bin" / name
    path.unlink()
    _program(path, name, "exit 0")


@contextmanager
def _provider(box: Box) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            box.asked.append(("PUT", self.path, body, self.headers.get("Authorization") or ""))
            box.when_asked()
            self.send_response(box.answers.pop(0) if box.answers else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"success": True}).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    box.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def a_repository(path: Path, files: dict[str, str]) -> str:
    """A repository with these files; returns the commit."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git(path, "init", "-q", "-b", "main")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "a run")
    return git(path, "rev-parse", "HEAD").strip()


def git(where: Path, *words: str) -> str:
    own = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(where), *own, *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def wait_for(true: object, *, seconds: float = 60) -> None:
    """Until a function says so."""
    until = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
