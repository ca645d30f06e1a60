"""What is written under a name is there whole, durable, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ReadOnlyError, ResourceError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import (
    PendingFile,
    create_file,
    dead_temporaries,
    remove_unfinished,
    replace_atomically,
    write_file,
)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was synced, in order."""
    names: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd))[1]
    )
    return names


def test_a_file_takes_its_name_once_it_is_durable(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"

    assert path.read_text() == "new"
    assert synced == [temporary.name, tmp_path.name]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_takes_its_name_once_its_files_are_durable(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "step-1"

    with replace_atomically(path) as temporary:
        temporary.mkdir()
        (temporary / "weights").write_bytes(b"w")

    assert [entry.name for entry in path.iterdir()] == ["weights"]
    assert synced == ["weights", temporary.name, tmp_path.name]


@pytest.mark.parametrize("folder", [False, True])
def test_a_block_that_raises_leaves_everything_as_it_was(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def make(temporary: Path) -> None:
        if folder:
            temporary.mkdir()
            temporary = temporary / "b"
        temporary.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replace_atomically(path) as temporary:
        make(temporary)

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_folder_that_holds_something_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "mine").touch()

    with pytest.raises(OSError, match=r"[Dd]irectory"), replace_atomically(path) as temporary:
        make(temporary)

    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert (path / "mine").exists()


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, ResourceError, r"inodes free\)\. What was finished is kept; make room"),
        (errno.EROFS, ReadOnlyError, "cannot be written: Read-only file system"),
        (errno.EIO, OSError, "Input/output error"),
    ],
)
def test_a_full_or_read_only_disk_is_named_and_anything_else_passes(
    tmp_path: Path, number: int, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says), explain_disk_errors(tmp_path / "a"):
        raise OSError(number, os.strerror(number))


WRITES = {
    "replace_atomically": """
with replace_atomically(path) as temporary:
    temporary.write_bytes(new)
""",
    "write_file": "write_file(path, new)",
    "PendingFile": """
pending = PendingFile(path.parent, path.name)
pending.write_at(0, new)
pending.commit()
""",
    "create_file": "create_file(path, new)",
}
KILLED = """
import os, sys
from pathlib import Path
from stoker.runtime.files import *
import stoker.runtime.libc, stoker.runtime.locks
path, new, left = Path(sys.argv[1]), b"new" * 1000, int(sys.argv[2])

def dying(name):
    real = getattr(os, name)
    def call(*args, **named):
        global left
        if not left:
            os.kill(os.getpid(), 9)
        left -= 1
        return real(*args, **named)
    setattr(os, name, call)

for name in ("open", "write", "pwrite", "fsync", "replace", "rename", "link", "unlink", "close"):
    dying(name)
{write}
os._exit(0)
"""


def _run(path: Path, write: str, calls: int) -> int:
    program = KILLED.format(write=WRITES[write])
    return subprocess.run([sys.executable, "-c", program, str(path), str(calls)], check=False).returncode


@pytest.mark.parametrize("write", [*WRITES])
def test_a_kill_before_any_call_leaves_the_old_file_or_the_new_one(tmp_path: Path, write: str) -> None:
    path, old, new = tmp_path / "a.json", b"old", b"new" * 1000
    seen = set[bytes]()
    for calls in range(40):
        path.unlink(missing_ok=True)
        if write != "create_file":
            path.write_bytes(old)
        ended = _run(path, write, calls)
        seen.add(path.read_bytes() if path.exists() else old)
        assert seen <= {old, new}, "neither half of it nor nothing"
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    else:
        raise AssertionError("it never got to its end")

    assert path.read_bytes() == new
    assert seen == {old, new}
    # What the kills left is found by those that clean up, and nothing else is.
    remove_unfinished(tmp_path)
    assert all(size in (0, 3000) for _, size in dead_temporaries(tmp_path, remove=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("write", [write_file, create_file])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, ResourceError), (errno.EROFS, ReadOnlyError)])
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, call: str, number: int, kind: type[Exception]
) -> None:
    real = getattr(os, call)

    def fail(*args: Any, **named: Any) -> Any:
        if call == "fsync" or args[1] & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind, match="a.json|" + re.escape(str(tmp_path))):
            write(tmp_path / "a.json", b"new")
    assert [*tmp_path.iterdir()] == []


def test_what_another_process_made_first_is_kept(tmp_path: Path) -> None:
    assert create_file(tmp_path / "token", b"first", mode=0o600)
    assert not create_file(tmp_path / "token", b"second")

    assert (tmp_path / "token").read_bytes() == b"first"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len([*tmp_path.iterdir()]) == 1


def test_a_temporary_whose_writer_lives_is_no_leftover(tmp_path: Path) -> None:
    pending = PendingFile(tmp_path, "shard")
    pending.write_at(0, b"x")
    (tmp_path / ".tmp-abc-pipe").mkdir()  # what is no file is not ours

    assert [*dead_temporaries(tmp_path, remove=True)] == []
    pending.commit()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".tmp-abc-pipe", "shard"]


def test_without_locks_no_temporary_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / ".tmp-abc-shard").write_bytes(b"x")
    monkeypatch.setattr(fcntl, "flock", refuse)

    assert [*dead_temporaries(tmp_path, remove=True)] == []
    pending = PendingFile(tmp_path, "other")
    pending.write_at(0, b"x")
    pending.commit()
    assert (tmp_path / "other").read_bytes() == b"x"
