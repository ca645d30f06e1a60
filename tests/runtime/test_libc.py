"""Calls of the C library do what their names say, with what the kernel shows as the witness."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.runtime import libc

PAGE = mmap.PAGESIZE


def test_a_hole_gives_its_blocks_back_and_reads_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 64 * PAGE)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    before = os.fstat(fd).st_blocks

    libc.punch_hole(fd, PAGE, 33 * PAGE)
    os.close(fd)

    assert before - path.stat().st_blocks >= 32 * PAGE // 512
    assert path.read_bytes() == b"x" * PAGE + bytes(32 * PAGE) + b"x" * 31 * PAGE


def test_a_refused_hole_is_an_error_with_its_number(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="gives no part of a file back") as caught:
        libc.punch_hole(fd, 0, PAGE)
    os.close(fd)
    assert caught.value.errno


def test_files_are_mapped_over_reserved_addresses(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(PAGE) + b"b" * PAGE)
    fd = os.open(path, os.O_RDONLY)
    address = libc.reserve_addresses(1 << 40)  # more than any machine has: addresses alone are taken

    libc.map_file_at(address + PAGE, PAGE, fd, PAGE)
    with pytest.raises(OSError):
        libc.map_file_at(address, PAGE, -1, 0)
    os.close(fd)

    assert ctypes.string_at(address + PAGE, PAGE) == b"b" * PAGE
    pages = np.zeros(1, np.uint8)
    assert libc.resident_pages(address + PAGE, PAGE, pages.ctypes.data)
    assert pages[0] & 1
    libc.unmap(address, 1 << 40)
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_a_child_ends_with_its_parent() -> None:
    child = "from stoker.runtime.libc import tie_to_parent; import os, signal, sys, time\n"
    child += "tie_to_parent(signal.SIGKILL, int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys, os, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while _lives(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_whose_parent_is_gone_does_not_begin() -> None:
    program = "from stoker.runtime.libc import tie_to_parent; tie_to_parent(9, 1); print(1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b""
