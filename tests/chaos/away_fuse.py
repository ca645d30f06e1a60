"""A folder on a file system of its own, whose server can be stopped: `python away_fuse.py FOLDER MOUNT`.

While the process is stopped (SIGSTOP) no call on the mount comes back, as on a hard mount without its server.
Needs mfusepy and libfuse.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import mfusepy

TIMES = ("st_atime", "st_ctime", "st_mtime")
STATUS = ("st_gid", "st_ino", "st_mode", "st_nlink", "st_size", "st_uid")
SPACE = (
    "f_bavail",
    "f_bfree",
    "f_blocks",
    "f_bsize",
    "f_favail",
    "f_ffree",
    "f_files",
    "f_frsize",
    "f_namemax",
)


class Folder(mfusepy.Operations):
    """Everything as it is in the folder below."""

    use_ns = True

    def __init__(self, root):
        self.root = Path(root)

    def below(self, path):
        return self.root / path[1:]

    def getattr(self, path, fh=None):
        found = self.below(path).lstat()
        times = {name: getattr(found, f"{name}_ns") for name in TIMES}
        return {name: getattr(found, name) for name in STATUS} | times

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.below(path))]

    def open(self, path, flags):
        return os.open(self.below(path), flags & ~(os.O_NOFOLLOW | os.O_DIRECT))

    def create(self, path, mode, fi=None):
        return os.open(self.below(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def flush(self, path, fh):
        raise OSError(errno.ENOSYS, "the kernel asks no more, so that closing a file never waits")

    def fsync(self, path, datasync, fh):
        return 0

    def fsyncdir(self, path, datasync, fh):
        return 0

    def release(self, path, fh):
        os.close(fh)
        return 0

    def truncate(self, path, length, fh=None):
        os.truncate(self.below(path), length)

    def rename(self, old, new):
        self.below(old).rename(self.below(new))

    def link(self, target, source):
        self.below(target).hardlink_to(self.below(source))

    def unlink(self, path):
        self.below(path).unlink()

    def mkdir(self, path, mode):
        self.below(path).mkdir(mode)

    def rmdir(self, path):
        self.below(path).rmdir()

    def chmod(self, path, mode):
        self.below(path).chmod(mode)

    def utimens(self, path, times=None):
        os.utime(self.below(path), ns=times)

    def statfs(self, path):
        found = os.statvfs(self.below(path))
        return {name: getattr(found, name) for name in SPACE}


if __name__ == "__main__":
    mfusepy.FUSE(Folder(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False)
