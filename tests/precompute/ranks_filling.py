"""A rank that trains while the cache is filled, as a program.

`ranks_filling.py FOLDER SAMPLES DELAY KIND STATE BATCH RANK WORLD` prints `incomplete` or `complete`, then
the samples of each batch with a digest of each record. Rank 0 keeps a checkpoint in STATE after each step of
all ranks, and every rank begins from it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.loader.loader import is_filling
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource, RaggedSource
from tests.precompute.first_epoch import say
from tests.precompute.run_once import seal_early


def texts(batch: Any) -> list[str]:
    """`index:digest` of each record of a batch."""
    found: list[str] = []
    for place, number in enumerate(batch["index"].tolist()):
        digest = hashlib.sha256()
        for name in sorted(batch.keys() - {"index"}):
            digest.update(batch[name][place].numpy().tobytes())
        found.append(f"{number}:{digest.hexdigest()[:8]}")
    return found


def main(
    folder: str, samples: int, delay_s: float, kind: str, state: str, size: int, rank: int, world: int
) -> int:
    seal_early()
    if world > 1:
        meeting = Path(state).with_suffix(".meeting")
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    ragged = "ragged" in kind
    source = (RaggedSource if ragged else FakeSource)((samples,), delay_s=delay_s, run=3)
    encoder = FakeEncoder(samples=1 if ragged else 4, by_shape=True, ragged=ragged)
    place = f"{folder}-{rank}" if "own" in kind else folder
    part = {"part": (rank, world)} if "parts" in kind else {}
    loader = stoker.cached(
        source, encoder, cache_dir=place, name="c", batch_size=size, shuffle=True, wait=False, drop_last=True,
        rank=rank, world_size=world, precompute=part,
    )  # fmt: skip
    say("incomplete" if is_filling(loader) else "complete")
    kept, step = Path(state), 0
    if kept.exists():
        place_, step = pickle.loads(kept.read_bytes())
        loader.load_state_dict(place_)
    say(str(step))
    for batch in loader:
        say(" ".join(texts(batch)))
        step += 1
        if world > 1:
            torch.distributed.barrier()
        if rank == 0:
            new = kept.with_suffix(".new")
            new.write_bytes(pickle.dumps((loader.state_dict(), step)))
            os.replace(new, kept)
        if world > 1:
            torch.distributed.barrier()
    say("end")
    return 0


if __name__ == "__main__":
    folder, samples, delay_s, kind, state, size, rank, world = sys.argv[1:]
    sys.exit(main(folder, int(samples), float(delay_s), kind, state, int(size), int(rank), int(world)))
