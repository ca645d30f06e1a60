"""A first epoch while the cache is filled, as a program: `first_epoch.py FOLDER SAMPLES DELAY [RANK WORLD]`.

Prints `incomplete` or `complete` (what the call found), then a digest of each batch, as they come.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.loader.loader import Loader, is_filling
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.run_once import seal_early


def loader_of(folder: str | Path, samples: int, delay_s: float, **settings: Any) -> Loader:
    source = FakeSource((samples,), delay_s=delay_s, run=3)
    settings = {"shuffle": True, "batch_size": 5, "wait": False, **settings}
    return stoker.cached(source, FakeEncoder(by_shape=True), cache_dir=folder, name="c", **settings)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def digests(loader: Loader) -> list[str]:
    """Of one epoch, while it is served."""
    found: list[str] = []
    for batch in loader:
        digest = hashlib.sha256()
        for name in sorted(batch):
            digest.update(batch[name].numpy().tobytes())
        index = "-".join(map(str, batch["index"].tolist()))
        found.append(f"{digest.hexdigest()[:16]}:{index}")
        say(found[-1])
    return found


def main(folder: str, samples: str, delay_s: str, rank: str = "0", world: str = "1") -> int:
    seal_early()  # so that a kill finds something
    if world != "1":
        meeting = Path(folder).with_suffix(".meeting")
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", rank=int(rank), world_size=int(world)
        )
    loader = loader_of(folder, int(samples), float(delay_s), rank=int(rank), world_size=int(world))
    say("incomplete" if is_filling(loader) else "complete")
    digests(loader)
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
