"""One run of precompute, to be started under limits: `limited.py FOLDER COUNT WIDTH GROUP WORKERS [COPIES]`.

With `COPIES`, a sample takes 0.4 s, and so many times its size while it is read.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import StokerError
from stoker.precompute import PrecomputeSettings, run_precompute
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


class Scaled(FakeEncoder):
    """Keeps the size of samples, so that memory and disk have something to hold."""

    def schema(self, sample_schema):
        return sample_schema

    def encode_batch_size(self, sample_schema):
        return EncodeBatchSize(samples=self.samples, steps=None)

    def encode(self, batch):
        return {"data": batch["data"] * 2, "nu": batch["nu"]}


class Wasteful(FakeSource):
    """Takes more memory for a sample than the sample has."""

    def __init__(self, *parts, copies, **settings):
        super().__init__(*parts, **settings)
        self.copies = copies

    def read(self, number, start=None, stop=None):
        sample = super().read(number, start, stop)
        held = np.ones((self.copies, sample["data"].nbytes), np.uint8)
        time.sleep(0.4)
        return sample if held.all() else {}


def say(**facts) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")


def main() -> int:
    folder, count, width, group, workers = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    source = FakeSource((count,), steps=16, width=width, run=4)
    if len(sys.argv) > 6:
        source = Wasteful((count,), copies=int(sys.argv[6]), steps=16, width=width, run=1)
    settings = PrecomputeSettings(progress=None, workers=workers or None)
    try:
        report = run_precompute(source, Scaled(samples=group), folder, name="c", settings=settings)
    except StokerError as error:
        say(error=type(error).__name__, text=str(error))
        return error.exit_code
    digest = hashlib.sha256()
    for number in report.cache.indices.tolist():
        digest.update(report.cache[number]["data"].numpy().tobytes())
    say(records=report.records, lost=report.lost_workers, digest=digest.hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
