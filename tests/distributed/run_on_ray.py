"""A precompute run on a cluster, as a program: `run_on_ray.py SETTINGS`, a JSON object.

The encoder notes each of its calls in `<folder>/calls`, so that a test can count what was encoded twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from stoker.errors import Interrupted, StokerError
from stoker.precompute import LineProgress, PrecomputeSettings, run_precompute
from stoker.precompute.settings import as_timeouts
from stoker.store.storage import attach_mirror
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


class CountingEncoder(FakeEncoder):
    """Writes the samples of each call (`nu` is a seventh of the number) to a file.

    `slow`: the first process that encodes takes ten times as long for each call. `hang`: it hangs at this
    sample, `once` or `always`.
    """

    def __init__(self, folder, *, sleep_s=0.0, slow=False, hang=None):
        super().__init__(by_shape=True, sleep_s=sleep_s)
        self.folder, self.slow, self.hang = str(folder), slow, hang
        self.last = []

    def first(self, what):
        """Whether this process is the first to come here."""
        path = Path(self.folder, what)
        with suppress(FileExistsError), path.open("x") as file:
            file.write(str(os.getpid()))
        return path.read_text() == str(os.getpid())

    def encode(self, batch):
        numbers = [round(7 * value) for value in batch["nu"].tolist()]
        out = super().encode(batch)
        if self.slow and any(numbers) and self.first("slow"):
            time.sleep(9 * self.sleep_s)
        if self.hang and self.hang[0] in numbers and (self.first("hung") or self.hang[1] == "always"):
            time.sleep(3600)
        again, self.last = numbers == self.last, numbers  # the first call is made twice, and compared
        if any(numbers) and not again:  # nor when it is tried on zeros
            with (Path(self.folder) / "calls").open("a") as file:
                file.write(f"{os.getpid()} {' '.join(map(str, numbers))}\n")
        return out


def main(text):
    given = json.loads(text)
    folder = Path(given["folder"])
    faults = {int(number): what for number, what in given.get("faults", {}).items()}
    source = FakeSource((given["samples"],), run=given.get("run"), faults=faults)
    encoder = CountingEncoder(
        folder, sleep_s=given.get("sleep_s", 0.0), slow=given.get("slow"), hang=given.get("hang")
    )
    cache_dir = folder / "caches"
    if "url" in given:
        cache_dir = attach_mirror(given["url"], given["mirror_dir"])
    settings = PrecomputeSettings(
        progress=LineProgress(sys.stderr, every_s=2.0),
        timeouts=as_timeouts(given.get("timeouts")),
        max_quarantined=given.get("max_quarantined", 0.0),
    )
    engine = None
    if "ray" in given:
        from stoker.extras.ray.engine import RayEngine

        engine = RayEngine(**given["ray"])
    try:
        report = run_precompute(source, encoder, cache_dir, name="c", settings=settings, engine=engine)
    except (StokerError, Interrupted) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    finally:
        if engine is not None:
            engine.close()
    answer = {"path": report.path, "records": report.records, "encoded": report.encoded}
    sys.stdout.write(
        json.dumps({**answer, "reused": report.reused, "quarantined": report.quarantined}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
