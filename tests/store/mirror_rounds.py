"""Processes that read or fill one cache at an address until somebody kills them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from stoker.schema import Field
from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.storage import attach_mirror
from stoker.units import MIB
from tests.store.fakes import FakeSource, expected, fill

SCHEMA = {"latent": Field(shape=(64, 64, 16), dtype="float32", time=True)}
SOURCE = FakeSource(SCHEMA, [("a", 60)])
REPOSITORY = Path(__file__).parents[2]


def read(url: str, mirror_dir: str, seed: int) -> None:
    """Read records at random, each compared with what it should be, for ever."""
    draw = random.Random(seed)
    while True:
        cache = open_cache(attach_mirror(f"{url}/x", mirror_dir))
        for _ in range(40):
            number = draw.randrange(len(cache))
            wanted = expected(SOURCE, cache.recipe, number)
            assert torch.equal(cache[number]["latent"], wanted["latent"]), f"record {number} is wrong"


def write(url: str, mirror_dir: str, seed: int) -> None:
    """Fill what is missing in an order of one's own, a few records a shard."""
    folder = open_folder(attach_mirror(url, mirror_dir), "x", make_recipe(SOURCE, None, dtype=None))
    missing = folder.missing().tolist()
    random.Random(seed).shuffle(missing)
    for begin in range(0, len(missing), 4):
        fill(folder, SOURCE, sorted(missing[begin : begin + 4]), shard_bytes=MIB)
        folder.finish()
    folder.finish()  # the one that stored the last shard may have been killed before its index


def storm(kind: str, url: str, mirror_dirs: list[Path], *, seconds: float, seed: int) -> list[str]:
    """Keep a process at each mirror running and kill them at random; returns errors of those that ended."""
    draw, failed = random.Random(seed), list[str]()

    def start(mirror_dir: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.store.mirror_rounds", kind, url, str(mirror_dir)]
        command.append(str(draw.randrange(1 << 30)))
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    running = [(mirror_dir, start(mirror_dir)) for mirror_dir in mirror_dirs]
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            time.sleep(draw.uniform(0.5, 3.0))
            i = draw.randrange(len(running))
            mirror_dir, child = running[i]
            child.send_signal(signal.SIGKILL)
            _, said = child.communicate(timeout=60)
            if child.returncode not in (-signal.SIGKILL, 0):
                failed.append(said)
            running[i] = (mirror_dir, start(mirror_dir))
    finally:
        for _, child in running:
            child.kill()
            _, said = child.communicate(timeout=60)
            if child.returncode not in (-signal.SIGKILL, 0):
                failed.append(said)
    return failed


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
