"""What reader processes print: taken from their pipes at once, and kept up to a bound.

A reader must never wait because it printed, and must not fill the disk either. So a thread empties the pipes,
also while the caller encodes, and each log keeps its beginning and its latest part. A pipe, unlike a file,
ends with us: a reader stuck in the kernel holds nothing of ours open.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from pathlib import Path

MAX_LOG_BYTES = 1024**2
"""A log is cut back to its first half when it has reached this size."""
_CHUNK_BYTES = 1 << 16
_CHUNKS = 16
"""Taken at a time, so that a flood keeps nobody else from the log; a pipe holds no more than these."""
_JOIN_S = 1.0


class Output:
    """The pipe of one reader, and the log it goes to; the file is made when there is something to keep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out_bytes = 0
        """Bytes that went by without being kept."""
        self._lock = threading.Lock()
        self._log = -1
        self._size = 0
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def handed_over(self) -> None:
        """The reader has the other end now; ours would keep the pipe from ending."""
        os.close(self.write_fd)
        self.write_fd = -1

    def drain(self) -> bool:
        """Keep what has arrived; False at the end of the pipe."""
        with self._lock:
            for _ in range(_CHUNKS if self.read_fd >= 0 else 0):
                try:
                    data = os.read(self.read_fd, _CHUNK_BYTES)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                self._keep(data)
            return self.read_fd >= 0

    def append(self, text: str) -> None:
        """Add something of ours to the log."""
        with self._lock:
            self._keep(text.encode(errors="replace"))

    def _keep(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk below a log ends no run
            if self._log < 0:
                self._log = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._size + len(data) > MAX_LOG_BYTES:
                keep = min(self._size, MAX_LOG_BYTES // 2)
                self.left_out_bytes += self._size - keep
                os.ftruncate(self._log, keep)
                note = f"\n... {self.left_out_bytes} bytes of output are left out here ...\n".encode()
                self._size = keep + os.write(self._log, note)
            self._size += os.write(self._log, data)

    def tail(self, size: int) -> str:
        """The end of the log, or nothing."""
        self.drain()
        with self._lock, suppress(OSError):
            if self._log >= 0:
                return os.pread(self._log, size, max(0, self._size - size)).decode(errors="replace").strip()
        return ""

    def close(self, *, keep: bool) -> None:
        """Let the descriptors go; the file too unless it is to be kept. Safe to call twice."""
        self.drain()
        with self._lock:
            for fd in (self.read_fd, self.write_fd, self._log):
                if fd >= 0:
                    os.close(fd)
            self.read_fd = self.write_fd = self._log = -1
        if not keep:
            self.path.unlink(missing_ok=True)


class Drain:
    """A thread that empties the pipes of all readers; started with the first of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._outputs: dict[int, Output] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="stoker-output", daemon=True)

    def add(self, output: Output) -> None:
        """Look after one more."""
        with self._lock:
            self._outputs[output.read_fd] = output
            self._epoll.register(output.read_fd, select.EPOLLIN)
        if not self._thread.is_alive():
            self._thread.start()

    def remove(self, output: Output) -> None:
        """Leave it alone from now on; to be called before it is closed."""
        with self._lock:
            if self._outputs.get(output.read_fd) is output:
                self._forget(output.read_fd)

    def _forget(self, fd: int) -> None:
        del self._outputs[fd]
        self._epoll.unregister(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._stop:
                    return
                output = self._outputs.get(fd)
                going = output is None or output.drain()
                with self._lock:  # the number may be another pipe's by now
                    if not going and self._outputs.get(fd) is output:
                        self._forget(fd)

    def close(self) -> None:
        """End the thread; safe to call twice."""
        if self._epoll.closed:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # else it is held by the disk, and will need them once more
            self._epoll.close()
            os.close(self._stop)
