"""What scripts rely on of every command: its exit code, and the keys of the JSON object that it prints."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import torch
from typer.testing import CliRunner

from tests.conftest import write_burgers
from tests.pins.names import app, open_cache

SETTINGS = """\
data: {task: burgers1d, root: raw}
latent: {dim: 8, tokens: 4}
model: {width: 16, depth: 1, heads: 2}
training: {epochs: 2, batch_size: 16, num_workers: 0, device: cpu}
"""
CACHES = "data/latent_cache"
CACHE = f"{CACHES}/burgers1d_train"
QUICK = ("training.max_steps=2", "training.epochs=1")
SIMULATED = ("records=1e6", "record_bytes=100kB", "batch=64", "step=20ms", "host_memory=200GB")
ALONE = ("--splits", "train")


def project() -> None:
    """Write settings and raw files of three kinds to the working directory."""
    Path("raw").mkdir()
    write_burgers(Path("raw/burgers1d_train.h5"))
    write_burgers(Path("raw/burgers1d_val.h5"), samples=4, seed=1)
    Path("c.yaml").write_text(SETTINGS)
    write_burgers(Path("raw/broken_train.h5"))
    with h5py.File("raw/broken_train.h5", "a") as file:
        file["tensor"][3, 0, 0] = np.nan
    Path("raw/torn_train.h5").write_bytes(Path("raw/burgers1d_train.h5").read_bytes()[:900])
    Path("broken.yaml").write_text(SETTINGS.replace("burgers1d", "broken"))
    Path("torn.yaml").write_text(SETTINGS.replace("burgers1d", "torn"))
    Path("typo.yaml").write_text(SETTINGS.replace("tokens", "token"))
    Path("unread.yaml").write_text("data: [\n")
    Path("pt").mkdir()
    for number in range(3):
        latent = torch.full((3, 2, 4), float(number))
        sample = {"latent": latent, "params": {"nu": torch.tensor(0.5)}, "bc": None}
        torch.save(sample, f"pt/sample_{number:05d}.pt")


def repository() -> None:
    """Commit the settings, with the folder itself as the remote that a machine clones from."""
    for words in (
        ("init", "-q", "-b", "main"),
        ("add", "c.yaml"),
        ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "commit", "-qm", "a"),
        ("init", "-q", "--bare", "far"),
        ("remote", "add", "origin", "far"),
        ("push", "-q", "origin", "main"),
    ):
        subprocess.run(["git", *words], check=True, timeout=60)


def manifest() -> None:
    """Name a file of a folder, with its digest, for `fetch`."""
    content = Path("raw/burgers1d_val.h5").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    entry = {"from": os.path.abspath("raw/burgers1d_val.h5"), "bytes": len(content), "sha256": digest}
    Path("files.json").write_text(json.dumps({"files": {"a.h5": entry}}))


def flip() -> None:
    """Change one bit of a record."""
    cache = open_cache(CACHE)
    record = cache[7]["latent"].numpy().tobytes()
    for shard in cache.path.glob("shard-*"):
        data = bytearray(shard.read_bytes())
        if (at := data.find(record)) >= 0:
            data[at + 8] ^= 1
            shard.write_bytes(data)


def lose_recipe() -> None:
    """Remove the file that says what the records are."""
    (open_cache(CACHE).path / "recipe.json").unlink()


def cut_short() -> None:
    """Write the cache again, then cut a shard in the middle."""
    shutil.rmtree(CACHES)
    CliRunner().invoke(app, ["precompute", "c.yaml", *ALONE])
    (shard,) = open_cache(CACHE).path.glob("shard-*")
    os.truncate(shard, shard.stat().st_size // 2)


Step = tuple[str, ...] | Callable[[], None]
STEPS: tuple[Step, ...] = (
    project,
    # Settings and words that are wrong.
    ("precompute", "nowhere.yaml"),
    ("precompute", "typo.yaml"),
    ("precompute", "unread.yaml"),
    ("precompute", "c.yaml", "latent.dim=wide"),
    ("precompute", "c.yaml", "training.latent_cache_dirr=x"),
    ("precompute", "c.yaml", "--nothing-like-it"),
    ("precompute",),
    ("train", "c.yaml", "data.root=nowhere"),
    ("train", "nowhere.yaml"),
    ("plan", "nowhere.yaml"),
    ("plan", "c.yaml", "training.tier=cloud"),
    ("validate", "nowhere.yaml"),
    ("validate", "typo.yaml"),
    ("cache", "show", "nowhere"),
    ("cache", "verify", "nowhere"),
    (
        "cache",
        "verify",
    ),
    ("cache", "compact", "nowhere"),
    ("cache", "gc", "--yes", "nowhere"),
    ("cache", "why", "nowhere.yaml"),
    ("cache", "export", "nowhere", "out", "--to", "safetensors"),
    ("cache", "push", "nowhere", "file:///nowhere"),
    ("cache", "pull", "nowhere"),
    ("data", "stage", "nowhere.yaml"),
    ("profile", "nowhere.yaml"),
    ("bench", "nowhere"),
    ("data", "fetch", "nowhere.yaml"),
    ("cache", "import-pt", "nowhere", "--out", CACHES, "--name", "old"),
    ("launch", "vast", "nowhere.yaml", "--dry-run"),
    ("launch", "nowhere", "c.yaml"),
    ("job", "list"),
    ("no-such-command",),
    # Data that cannot be read.
    ("precompute", "broken.yaml", *ALONE),
    ("precompute", "broken.yaml", "precompute.max_quarantined=0.5", *ALONE),
    ("precompute", "torn.yaml", *ALONE),
    ("cache", "show", f"{CACHES}/broken_train"),
    # What is there for.
    ("plan", "c.yaml"),
    ("validate", "c.yaml"),
    ("cache", "why", "c.yaml"),
    ("precompute", "c.yaml"),
    ("precompute", "c.yaml"),
    ("precompute", "c.yaml", "--overwrite", "--splits", "val"),
    ("precompute", "c.yaml", "--manifest", "m.json"),
    ("plan", "c.yaml"),
    ("plan", "c.yaml", "training.tier=disk"),
    ("validate", "c.yaml"),
    ("train", "c.yaml", *QUICK),
    ("train", "c.yaml", "training.epochs=1"),
    ("train", "c.yaml", "training.run_dir=runs/b", "--max-stall", "0.000001%", *QUICK),
    ("cache", "show", CACHE),
    ("cache", "show", CACHES),
    ("cache", "show", f"{CACHES}/burgers1d_val"),
    ("cache", "verify", CACHE),
    ("cache", "verify", CACHE, "--subset", "0.5"),
    ("cache", "verify", CACHE, "--repair"),
    ("cache", "why", "c.yaml"),
    ("cache", "why", CACHE, "c.yaml", "latent.dim=6"),
    ("cache", "why", CACHE, f"{CACHES}/burgers1d_val"),
    ("cache", "export", CACHE, "out", "--to", "safetensors", "--records", "2:6"),
    ("cache", "export", CACHE, "out2", "--to", "paper"),
    ("cache", "push", CACHE, "file://{here}/away"),
    ("cache", "pull", "file://{here}/away/burgers1d_train", "back"),
    ("cache", "pull", "file://{here}/away/nothing", "back"),
    ("data", "stage", "c.yaml", "data.stage=always", "data.stage_dir=staged"),
    ("data", "stage", "c.yaml", "data.stage=always", "data.stage_dir=staged", "--prune", "--dry-run"),
    ("cache", "import-pt", "pt", "--out", CACHES, "--name", "old"),
    ("cache", "import-pt", "pt", "--out", CACHES, "--name", "more", "--count", "4"),
    ("plan", "--simulate", *SIMULATED),
    ("plan", "--simulate", *SIMULATED, "nods=2"),
    ("launch", "vast", "c.yaml", "--dry-run"),
    repository,
    ("launch", "vast", "c.yaml", "--dry-run"),
    ("launch", "script", "c.yaml"),
    manifest,
    ("data", "fetch", "files.json", "--to", "fetched"),
    ("data", "fetch", "files.json", "--to", "fetched"),
    ("compat", "validate", "--config", "c.yaml"),
    ("compat", "precompute", "--config", "c.yaml"),
    ("bench", CACHE, "--seconds", "0.2"),
    # Damage, and what is done about it.
    flip,
    ("cache", "verify", CACHE),
    ("cache", "show", CACHE),
    ("cache", "verify", CACHE, "--repair"),
    ("cache", "verify", CACHE, "--repair", "--config", "c.yaml", "latent.dim=4"),
    ("cache", "verify", CACHE, "--repair", "--config", "c.yaml"),
    ("cache", "verify", CACHE),
    ("cache", "compact", CACHE),
    ("cache", "compact", CACHE, "--compression", "zstd"),
    ("cache", "compact", CACHE, "--compression", "gzip"),
    ("precompute", "c.yaml", "latent.dim=4", *ALONE),
    ("cache", "gc", "--yes", CACHES, "--keep", "1", "--dry-run"),
    ("cache", "gc", "--yes", CACHES),
    ("cache", "gc", "--yes", CACHES, "--keep", "0", "--force"),
    ("precompute", "c.yaml", *ALONE),
    lose_recipe,
    ("cache", "verify", CACHE),
    ("cache", "show", CACHE),
    ("cache", "show", CACHES),
    cut_short,
    ("cache", "verify", CACHE),
    ("demo", *QUICK),
)
"""Commands of one project, in turn, and what happens to it between them."""
LONG_STEPS: tuple[Step, ...] = (
    project,
    ("precompute", "c.yaml", *ALONE),
    ("profile", "c.yaml", "--steps", "2"),
    ("train", "c.yaml", "verify.spot_check=2", *QUICK),
)
"""The same of those that take long."""


BY_CHANCE = ("stall_parts.", "stragglers[]", "kept[]", "removed[]")
"""Beginnings of paths that are there or not by how fast a command runs, and how old files are by then."""


def paths(value: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of all keys, those of a list's entries as one."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield f"{above}.{key}".removeprefix(".")
            yield from paths(below, f"{above}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for one in value:
            yield from paths(one, f"{above}[]")


def invoke(words: tuple[str, ...]) -> dict[str, Any]:
    """Run one command with `--json`; return its exit code and the sorted paths of its keys."""
    here = [word.replace("{here}", os.getcwd()) for word in words]
    result = CliRunner().invoke(app, [*here, "--json"])
    lines = result.stdout.splitlines()
    if not lines:
        return {"exit": result.exit_code, "keys": None}
    assert len(lines) == 1, f"{words} printed more than one line: {result.stdout}"
    keys = {key for key in paths(json.loads(lines[0])) if not key.startswith(BY_CHANCE)}
    return {"exit": result.exit_code, "keys": sorted(keys)}


def run_all(steps: tuple[Step, ...] = STEPS) -> dict[str, Any]:
    """Run commands in a folder of their own; return what each did, by its words and its turn."""
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="stoker-pins-") as folder, chdir(folder):
        for name, step in named(steps):
            if callable(step):
                step()
            else:
                found[name] = invoke(step)
    return found


def named(steps: tuple[Step, ...]) -> Iterator[tuple[str, Step]]:
    """Yield each step with its name: the words, and which time it is that they are said."""
    times: dict[str, int] = {}
    for step in steps:
        if callable(step):
            yield step.__name__, step
            continue
        words = " ".join(step)
        times[words] = times.get(words, 0) + 1
        yield words if times[words] == 1 else f"{words} ({times[words]})", step


def names(steps: tuple[Step, ...]) -> list[str]:
    """Return the names of the commands among the steps."""
    return [name for name, step in named(steps) if not callable(step)]
