"""A lock has one holder at a time, ends with it however it ends, and says who it is."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import FormatError, ReadOnlyError
from stoker.runtime import locks
from stoker.runtime.locks import FileLock, lock_folder, lock_holder, lock_range, try_lock

HOLD = """
import sys, time
from pathlib import Path
from stoker.runtime.locks import FileLock, lock_range
{take}
print("held", flush=True)
time.sleep(60)
"""
WHOLE = "lock = FileLock(Path(sys.argv[1]), shared={shared}); assert lock.acquire()"
RANGE = "with_ = lock_range(Path(sys.argv[1]), 2, 4, timeout_s=0); assert with_.__enter__()"


@contextmanager
def holder(path: Path, take: str = WHOLE.format(shared=False)):
    """A process that has the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(take=take), str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def is_free(path: Path) -> bool:
    with FileLock(path) as lock:
        return lock.acquire()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        assert not is_free(path)
        process.send_signal(signal.SIGKILL)
        process.wait()

        assert is_free(path)


def test_those_that_wait_are_told_who_has_it(tmp_path: Path) -> None:
    with holder(tmp_path / ".claim-train") as process, lock_folder(tmp_path, "train") as got:
        assert not got
        assert lock_holder(tmp_path, "train") == f"process {process.pid} on {os.uname().nodename}"


@pytest.mark.parametrize(
    ("text", "said"),
    [("4711\n", "process 4711"), ("\x1b[2J rm -rf", "another process"), ("", "another process")],
)
def test_of_what_a_lock_file_says_only_a_process_is_shown(tmp_path: Path, text: str, said: str) -> None:
    """The number alone is what `stoker data fetch` wrote before locks were signed in one way."""
    (tmp_path / "lock").write_text(text)

    assert FileLock(tmp_path / "lock").holder() == said


def test_a_lock_that_is_given_back_in_time_is_got(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process, FileLock(path) as lock:
        begin = time.monotonic()
        assert not lock.acquire(timeout_s=0.2)
        assert 0.2 <= time.monotonic() - begin < 5

        process.kill()
        assert lock.acquire(timeout_s=10)


@pytest.mark.parametrize(
    ("ours", "theirs", "got"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_shared_locks_go_together(tmp_path: Path, ours: bool, theirs: bool, got: bool) -> None:
    path = tmp_path / "lock"
    with holder(path, WHOLE.format(shared=theirs)), FileLock(path, shared=ours) as lock:
        assert lock.acquire() is got


def test_two_locks_of_one_process_keep_each_other_out(tmp_path: Path) -> None:
    """Locks of `fcntl(F_SETLK)` would not: threads would get them twice."""
    path = tmp_path / "lock"
    with FileLock(path) as first, FileLock(path) as second:
        assert first.acquire()
        assert not second.acquire()
        first.release()
        assert second.acquire()


def _outlive(path: Path, pipe: multiprocessing.connection.Connection, lock: FileLock) -> None:
    pipe.send(is_free(path))
    pipe.recv()
    lock.release()  # the parent's, so this does nothing
    pipe.send(is_free(path))
    pipe.recv()


def test_a_forked_child_neither_keeps_a_lock_nor_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ours, theirs = multiprocessing.Pipe()
    lock = FileLock(path)
    assert lock.acquire()
    child = multiprocessing.get_context("fork").Process(target=_outlive, args=(path, theirs, lock))
    child.start()

    assert ours.recv() is False, "fork left it with the parent"
    lock.release()
    assert is_free(path), "the child lives, and must not keep it"
    assert lock.acquire()
    ours.send(None)
    assert ours.recv() is False, "the child must not give back what the parent holds"
    ours.send(None)
    child.join()
    lock.release()


def test_a_child_that_is_given_the_file_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert lock.acquire()
    with subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()]) as child:
        lock.release()
        assert not is_free(path)
        child.kill()
    assert is_free(path)


def test_a_lock_file_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would hold one lock: on the file that was removed, and on the one made after it."""
    path, flock, removed = tmp_path / "lock", fcntl.flock, list[int]()

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            removed.append(path.stat().st_ino)
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with FileLock(path) as lock:
        assert lock.acquire(timeout_s=5)
        assert os.fstat(lock.fileno()).st_nlink
        assert not is_free(path)


@pytest.mark.parametrize("number", locks.NO_LOCKS_ERRNOS)
def test_where_there_are_no_locks_everybody_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    path = tmp_path / "lock"

    with FileLock(path) as first, FileLock(path) as second, lock_range(path, 0, 1, timeout_s=0) as got:
        assert first.acquire()
        assert second.acquire()
        assert got
        assert not try_lock(first.fileno(), without_locks=False)


def test_another_error_of_locking_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    before = {*locks._OPEN}

    with FileLock(tmp_path / "lock") as lock, pytest.raises(OSError, match="Input/output"):
        lock.acquire()
    assert not locks._OPEN - before, "the file is closed"


@pytest.mark.parametrize("make", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: str) -> None:
    path = tmp_path / "lock"
    if make == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif make == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = {*locks._OPEN}

    with FileLock(path) as lock, pytest.raises(FormatError, match="not a regular file"):
        lock.acquire()
    assert not (tmp_path / "elsewhere").exists()
    assert not locks._OPEN - before, "the file is closed"


def _refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Files cannot be made; root may do anything in a folder that is only marked read-only."""
    opened = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)


def test_a_folder_that_cannot_be_written_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refusing(monkeypatch, errno.EROFS)

    with pytest.raises(ReadOnlyError), lock_folder(tmp_path, "train"):
        pass


def test_on_a_full_disk_a_folder_can_still_be_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refusing(monkeypatch, errno.ENOSPC)

    with lock_folder(tmp_path, "gc") as got:
        assert got


def test_a_lock_file_that_cannot_be_signed_locks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with FileLock(tmp_path / "lock") as lock:
        assert lock.acquire()
        assert not is_free(tmp_path / "lock")
        assert lock.holder() == "another process"


def test_no_file_is_made_where_it_only_matters_whether_somebody_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path, create=False) as lock:
        assert lock.acquire()
        assert not path.exists()
    with holder(path), FileLock(path, create=False) as lock:
        assert not lock.acquire()


def test_ranges_of_a_file_are_locked_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_bytes(bytes(8))
    with (
        holder(path, RANGE) as process,
        lock_range(path, 0, 2, timeout_s=0) as before,
        lock_range(path, 3, 5, timeout_s=0) as across,
        lock_range(path, 4, 8, timeout_s=0) as after,
        lock_range(path, 4, 5, timeout_s=0) as own,
    ):
        assert (before, across, after, own) == (True, False, True, False)
        process.kill()
        process.wait()
        with lock_range(path, 2, 4, timeout_s=10) as freed:
            assert freed
    with lock_range(tmp_path / "removed", 0, 1, timeout_s=0) as got:
        assert got


def test_a_holder_that_has_not_signed_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    signing = threading.Timer(0.05, lambda: path.write_text("process 17 on box"))
    signing.start()

    assert FileLock(path).holder() == "process 17 on box"

    signing.join()
    (tmp_path / "none").touch()
    assert FileLock(tmp_path / "none").holder() == "another process"
