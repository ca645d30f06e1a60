"""An HDF5 source that notes which rows each process has decoded; imported by workers, so without torch."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.sources import hdf5_open
from stoker.sources.hdf5 import HDF5Source


class CountedHDF5(HDF5Source):
    """Writes a line `process first stop` to `log` for each piece of a dataset that it reads."""

    def __init__(self, path, log, **settings):
        super().__init__(path, **settings)
        self.log = str(log)

    def __getstate__(self):
        return {**super().__getstate__(), "log": self.log}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.log = state["log"]
        fetch = hdf5_open.fetch

        def counted(dataset, selection, out):
            with Path(self.log).open("a") as file:
                file.write(f"{os.getpid()} {selection[0].start} {selection[0].stop}\n")
            fetch(dataset, selection, out)

        hdf5_open.fetch = counted  # in a reader's process, which nobody else shares


def decoded_rows(log):
    """Rows decoded, by process."""
    found = {}
    for line in Path(log).read_text().splitlines():
        process, first, stop = map(int, line.split())
        found.setdefault(process, []).extend(range(first, stop))
    return found
