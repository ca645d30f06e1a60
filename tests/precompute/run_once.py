"""A precompute run as a program: `run_once.py FOLDER SAMPLES WORKERS DELAY [STEPS]`.

Shards are sealed after a fifth of a second instead of half a minute, so that a kill finds some.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

from stoker.errors import Interrupted, StokerError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.store import Folder, WriterSettings
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


def seal_early():
    whole = Folder.writer
    Folder.writer = lambda folder, settings=None: whole(
        folder, replace(settings or WriterSettings(), commit_after_s=0.2)
    )


def main(folder, samples, workers, delay_s, steps=6):
    seal_early()  # not when imported: tests are collected in one process
    source = FakeSource((int(samples),), delay_s=float(delay_s), run=3, steps=int(steps))
    settings = PrecomputeSettings(workers=int(workers), progress=None)
    try:
        report = run_precompute(source, FakeEncoder(by_shape=True), folder, name="c", settings=settings)
    except (StokerError, Interrupted) as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{report.records} {report.encoded} {peak_kib}\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(*sys.argv[1:]))
