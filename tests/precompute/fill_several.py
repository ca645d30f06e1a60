"""Two caches in one call, as a program: `fill_several.py FOLDER SAMPLES WORKERS DELAY READS`.

Each sample that is read is a line of the file READS. Shards are committed early, so that a kill finds some.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import stoker
from stoker.errors import Interrupted, StokerError
from stoker.store import Folder, WriterSettings
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


class Noted(FakeSource):
    """Notes what is read, in whatever process."""

    def read(self, number, start=None, stop=None):
        fd = os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{number}\n".encode())
        os.close(fd)
        return super().read(number, start, stop)


def encoders():
    return {"a": FakeEncoder(samples=4, by_shape=True), "b": FakeEncoder(samples=6, by_shape=True)}


def main(folder, samples, workers, delay_s, reads):
    whole = Folder.writer
    Folder.writer = lambda folder, settings=None: whole(
        folder, replace(settings or WriterSettings(), commit_after_s=0.1)
    )
    source = Noted((int(samples),), delay_s=float(delay_s), marker=reads)
    try:
        caches = stoker.precompute(
            source, encoders(), folder, name="c", workers=int(workers), progress=None, max_quarantined=0.0
        )
    except (StokerError, Interrupted) as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(" ".join(str(len(cache)) for cache in caches.values()) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(*sys.argv[1:]))
