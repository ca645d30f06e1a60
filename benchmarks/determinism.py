"""Question: do ranks, a kill and a resume change what a model is trained on, or how its loss falls?

A latent operator is trained with DistributedDataParallel on windows of Burgers trajectories. Everything runs on CPUs
with gloo, one thread a rank, equal global batches. Runs: 1, 2 and 4 ranks; one rank that SIGKILL ends in the middle
and that continues from its last checkpoint; two ranks, killed, that continue as four. Every step notes the loss of the
global batch (mean over ranks in float64) and a digest of the bytes and indices of its examples, sorted by index.

Every run is compared with one rank, step by step. What is promised is equal batches. Losses of other numbers of ranks
differ, because gradients are added in another order. `largest_difference` says how far, relative to the loss of one
rank. Ends with an error if a batch differs, or if a run with one rank differs in any bit of a loss.

    python benchmarks/determinism.py [--save] [--quick]

`--save` also draws docs/images/determinism.svg and determinism-dark.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

import stoker
from headline_work import Operator, next_state_loss
from measure import publish
from pictures import draw_determinism
from stoker.run.demo import BurgersSpec, write_burgers

BATCH = 64
"""Examples of a global batch."""
CHECKPOINT_EVERY = 10
TIMEOUT_S = 200
RUNS = {
    "1 rank": (1, 0),
    "2 ranks": (2, 0),
    "4 ranks": (4, 0),
    "1 rank, killed and resumed": (1, 1),
    "2 ranks, killed, resumed as 4": (2, 4),
}
"""Ranks at first, and after a kill; 0: none is killed."""


def make_cache(folder: Path, *, is_quick: bool) -> None:
    """Simulate and encode."""
    spec = BurgersSpec(trajectories=8 if is_quick else 24, steps=41, points=128)
    source = stoker.HDF5Source(write_burgers(folder / "burgers.h5", spec), preset="pdebench")
    encoder = stoker.GridEncoder.for_source(source, tokens=16, dim=32)
    stoker.precompute(source, encoder, folder / "cache", name="burgers")


# ------------------------------------------------------------------------------------------------- every rank


def train(folder: Path, out: Path, steps: int) -> None:
    """One rank of a run, as a user's own script would have it; continues from a checkpoint that is there."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Operator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (cache,) = (folder / "cache" / "burgers").glob("[0-9a-f]*")
    loader = stoker.Loader(
        cache,
        BATCH // world_size,
        shuffle=True,
        windows=stoker.Windows(stride=1, horizon=1),
        rank=rank,
        world_size=world_size,
        drop_last=True,
    )
    step, checkpoint = 0, out.with_suffix(".pt")
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
    while step < steps:
        for batch in loader:
            loss = next_state_loss(model, (batch.z0.float(), batch.z1.float()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            note(out, step, loss.item(), batch)
            if step % CHECKPOINT_EVERY == 0 and rank == 0:
                state = {"step": step, "loader": json.dumps(loader.state_dict())}
                torch.save(
                    {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
                    checkpoint.with_suffix(".part"),
                )
                checkpoint.with_suffix(".part").replace(checkpoint)
            if step == steps:
                break
    dist.destroy_process_group()


def note(out: Path, step: int, loss: float, batch: Any) -> None:
    """Append loss and digest of the global batch; rank 0 writes."""
    own = [
        (tuple(index), xxhash.xxh3_64_hexdigest(z0.numpy().tobytes() + z1.numpy().tobytes()))
        for index, z0, z1 in zip(batch.index.tolist(), batch.z0, batch.z1, strict=True)
    ]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (loss, own))
    if dist.get_rank() == 0:
        examples = sorted(one for _, part in found for one in part)
        row = {
            "step": step,
            "loss": sum(loss for loss, _ in found) / len(found),
            "batch": xxhash.xxh3_64_hexdigest(json.dumps(examples).encode()),
            "examples": len(examples),
        }
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------------------------ the parent


def launch(folder: Path, out: Path, ranks: int, steps: int, *, kill_at: int | None = None) -> None:
    """Run `train` under torchrun to its end, or until a step is noted: then SIGKILL ends all of it."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [sys.executable, *words, __file__, "--rank", str(folder), str(out), str(steps)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=out.with_suffix(".log").open("a"),
    )
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > deadline or (kill_at is not None and read(out)[1] >= kill_at):
            break
        time.sleep(0.02)
    killed = process.poll() is None
    if killed:  # torchrun and its ranks: each is in a session of its own
        launcher = psutil.Process(process.pid)
        for one in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
    if killed != (kill_at is not None) or (not killed and process.returncode):
        raise SystemExit(f"{out.stem}: {out.with_suffix('.log').read_text()[-3000:]}")


def read(out: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """Rows by step, and the last step; of a step that ran twice, both must agree."""
    rows: dict[int, dict[str, Any]] = {}
    last = 0
    for line in out.read_text().splitlines() if out.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill
            row = json.loads(line)
            last = row.pop("step")
            if rows.setdefault(last, row)["batch"] != row["batch"]:
                raise SystemExit(f"{out.stem}: step {last} has another batch after the resume")
            rows[last] = row
    return rows, last


def run(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """One run to its end; its losses and digests by step."""
    ranks, later = RUNS[name]
    out = folder / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"
    killed_at = None
    if later:
        launch(folder, out, ranks, 100_000, kill_at=steps // 2 + CHECKPOINT_EVERY // 2)
        killed_at = read(out)[1]
    launch(folder, out, later or ranks, steps)
    rows = [row for step, row in sorted(read(out)[0].items()) if step <= steps]
    assert len(rows) == steps, (name, len(rows))
    assert {row["examples"] for row in rows} == {BATCH}
    return {
        "run": name,
        "ranks": ranks,
        "resumed_as": later or None,
        "killed_after": killed_at,
        "losses": [row["loss"] for row in rows],
        "batches": [row["batch"] for row in rows],
    }


def compare(row: dict[str, Any], base: dict[str, Any]) -> None:
    """Add to a row how it differs from one rank."""
    apart = [abs(a - b) / b for a, b in zip(row["losses"], base["losses"], strict=True)]
    row["equal_batches"] = row["batches"] == base["batches"]
    row["equal_losses"] = sum(a == b for a, b in zip(row["losses"], base["losses"], strict=True))
    row["largest_difference"] = max(apart)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="20 steps, without the runs of four ranks")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        folder, out, steps = arguments.rank
        train(Path(folder), Path(out), int(steps))
        return

    names = [name for name in RUNS if not arguments.quick or "4" not in name]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        folder = Path(made)
        make_cache(folder, is_quick=arguments.quick)
        rows = [run(folder, name, 20 if arguments.quick else 120) for name in names]
    for row in rows:
        compare(row, rows[0])
    digests = [row.pop("batches") for row in rows]
    for row, found in zip(rows, digests, strict=True):
        row["batches"] = xxhash.xxh3_64_hexdigest("".join(found).encode())
    publish("determinism", rows, save=arguments.save and not arguments.quick)
    for row in rows:
        if not row["equal_batches"]:
            raise SystemExit(f"{row['run']}: the batches are not those of one rank")
        if row["ranks"] == 1 and row["equal_losses"] < len(row["losses"]):
            raise SystemExit(f"{row['run']}: only {row['equal_losses']} losses are those of one rank")
        if row["losses"][-1] >= row["losses"][0]:
            raise SystemExit(f"{row['run']}: the loss does not fall")
    if arguments.save and not arguments.quick:
        draw_determinism()


if __name__ == "__main__":
    main()
