"""A job's process that trains nothing: what it does is in its job's configuration.

    epochs     epochs of its work (the job's own unless given), each `epoch_s` seconds
    fail_at    epoch in which it fails with a message; `silent` without one
    die_at     epoch in which it is killed by a signal, every time
    die_at_end it is killed by a signal once it has said that it is done
    hang_at_end  it goes on for ever after that
    quiet      it ends with status 0 and says no word of it
    deaf       it does not stop when asked
    full_at    epoch in which it finds the disk full, every time
    memory_mb  what it holds

It writes down when it starts and ends, so that two of one job at once are seen, and holds itself a lock as a
second witness.
"""

import fcntl
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from stoker.runtime.processes.entry import Connection
from stoker.service.executor import begin_job


def serve(connection: Connection) -> int:
    return main(begin_job(connection))


def run_code(connection: Connection) -> None:
    """Run what is written in `code.py` of the job's folder."""
    exec((begin_job(connection) / "code.py").read_text(), {})


def main(folder: Path) -> int:
    job = json.loads((folder / "job.json").read_text())
    config = job["config"]
    note(folder, f"start {os.getpid()} {job['attempt']}")
    witness = os.open(folder / "witness", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(folder, "OVERLAP")
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1) if not config.get("deaf") else None)
    ballast = bytes(range(256)) * (config.get("memory_mb", 0) * 4096)
    checkpoint = folder / "checkpoints" / "epoch"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if job["checkpoint"] is not None and not done:
        say(folder, "failed", error="its checkpoint is gone")
        return 1
    say(folder, "started", epoch=done, tier="host", message=f"from epoch {done} with {len(ballast):,} bytes")
    if done:  # a kill may have come between its checkpoint and its line
        tell(folder, job, done)
    for epoch in range(done + 1, job["epochs"] + 1):
        until = time.monotonic() + config.get("epoch_s", 0.0)
        while time.monotonic() < until:
            if stop:
                return 75
            time.sleep(0.005)
        if epoch == config.get("fail_at"):
            if not config.get("silent"):
                say(folder, "failed", error="the loss is not finite", message="failed")
            sys.stdout.write("last words\n")
            return 3
        if epoch == config.get("full_at"):
            return 74
        if epoch == config.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        temporary = checkpoint.with_suffix(".part")
        temporary.write_text(str(epoch))
        temporary.replace(checkpoint)
        tell(folder, job, epoch)
        if stop:
            return 75
    if config.get("quiet"):
        return 0
    say(folder, "completed", message="done", result=secrets.token_hex(8))
    note(folder, f"end {os.getpid()}")
    if config.get("hang_at_end"):
        time.sleep(600)
    if config.get("die_at_end"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def tell(folder: Path, job: dict, epoch: int) -> None:
    say(folder, "metrics", epoch=epoch, val_loss=1.0 / epoch, train_loss=2.0 / epoch,
        checkpoint="epoch", progress=epoch / job["epochs"])  # fmt: skip


def note(folder: Path, text: str) -> None:
    with (folder / "witness.txt").open("a") as file:
        file.write(text + "\n")


def say(folder: Path, kind: str, **data: object) -> None:
    with (folder / "events.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps({"kind": kind, "data": data}).encode() + b"\n")
