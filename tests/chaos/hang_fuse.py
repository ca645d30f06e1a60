"""A file system of a few files whose answers fail to come: `python -m tests.chaos.hang_fuse FOLDER`.

Speaks the kernel's FUSE protocol on /dev/fuse with nothing but the standard library. The first word of a
file's name decides: `open-*` never answers an open, `read-*` never answers a read, `slow-*` answers each read
after a while. A request that the server has taken and does not answer cannot be interrupted: its process
survives SIGKILL until this server ends, which closes the device and so frees everybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading

NAMES = ("open-never", "read-never", "slow-steady")
SIZE = 64 * 1024
"""Bytes of each file, all of them the letter x."""
SLOW_S = 0.25
"""Time that one read of the slow file takes."""

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 34, 36, 38, 42
SILENT = {FORGET, BATCH_FORGET, INTERRUPT}
"""Requests to which no answer is expected."""
DIRECT_IO = 1
"""Each read reaches the server and waits there, not in the page cache, where a wait may be killed."""
HEAD = struct.Struct("<IIQQIIII")  # length, operation, unique, node, user, group, process, padding
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")


def attributes(node: int) -> bytes:
    """`struct fuse_attr` of the folder (1) or of a file."""
    mode, size = (0o40755, 0) if node == 1 else (0o100644, SIZE)
    return ATTR.pack(node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)


class Server:
    """Answers requests, or does not."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def run(self) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, operation, unique, node, *_ = HEAD.unpack_from(request)
            if operation in SILENT:
                continue
            self._handle(operation, unique, node, request[HEAD.size :])

    def _handle(self, operation: int, unique: int, node: int, body: bytes) -> None:
        name = NAMES[node - 2] if node > 1 else ""
        if operation == INIT:
            self._answer(unique, struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 0, 0, 1 << 16, 1, 0, 0, 0))
        elif operation == LOOKUP:
            wanted = body.rstrip(b"\0").decode()
            if wanted not in NAMES:
                self._answer(unique, error=errno.ENOENT)
                return
            found = NAMES.index(wanted) + 2
            self._answer(unique, struct.pack("<QQQQII", found, 0, 3600, 3600, 0, 0) + attributes(found))
        elif operation == GETATTR:
            self._answer(unique, struct.pack("<QII", 3600, 0, 0) + attributes(node))
        elif operation in (OPEN, OPENDIR):
            if not name.startswith("open"):
                self._answer(unique, struct.pack("<QII", 0, DIRECT_IO, 0))
        elif operation == READ:
            self._read(unique, name, *struct.unpack_from("<QQI", body)[1:])
        elif operation == STATFS:
            self._answer(unique, bytes(80))
        elif operation in (RELEASE, RELEASEDIR, FLUSH, ACCESS, READDIR, DESTROY):
            self._answer(unique)
        else:
            self._answer(unique, error=errno.ENOSYS)

    def _read(self, unique: int, name: str, offset: int, size: int) -> None:
        if name.startswith("read"):
            return
        data = b"x" * max(0, min(size, SIZE - offset))
        wait_s = SLOW_S if name.startswith("slow") else 0
        threading.Timer(wait_s, self._answer, (unique, data)).start()

    def _answer(self, unique: int, data: bytes = b"", *, error: int = 0) -> None:
        with contextlib.suppress(OSError):  # whoever asked is gone
            os.write(self._fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)


def main() -> None:
    """Mount at the folder given, say so, and serve until standard input ends."""
    folder = sys.argv[1]
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"hangs", folder.encode(), b"fuse.hangs", 0, options):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    threading.Thread(target=Server(fd).run, daemon=True).start()
    os.write(1, b"mounted\n")
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    libc.umount2(folder.encode(), 2)  # MNT_DETACH
    os._exit(0)


if __name__ == "__main__":
    main()
