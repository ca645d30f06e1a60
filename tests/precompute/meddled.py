"""A source whose file changes; worker processes import this module, so it leaves torch alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py

from stoker.sources.hdf5 import HDF5Source


class Meddled:
    """A source that has something done to its file when sample 5 is read, before or after."""

    def __init__(self, path: Path, how: str, when: str) -> None:
        self.inner = HDF5Source(path, preset="pdebench")
        self.path, self.how, self.when = path, how, when

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, number: int, start: int | None = None, stop: int | None = None):
        if number == 5 and self.when == "before":
            self.meddle()
        sample = self.inner.read(number, start, stop)
        if number == 5 and self.when == "after":
            self.meddle()
        return sample

    def meddle(self) -> None:
        if self.how == "written":
            with h5py.File(self.path.with_name("copy.h5"), "r+") as file:
                file["tensor"][11] = 3
            self.path.write_bytes(self.path.with_name("copy.h5").read_bytes())
        elif self.how == "replaced":
            os.replace(self.path.with_name("other.h5"), self.path)
        elif self.how == "keeping times":
            status = self.path.stat()
            with self.path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\1\2\3\4")
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif self.how == "touched":
            os.utime(self.path, (1, 1))
        elif self.how == "same bytes":
            shutil.copy(self.path, self.path.with_name("new.h5"))
            os.replace(self.path.with_name("new.h5"), self.path)
