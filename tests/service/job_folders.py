"""Folders of jobs as a worker makes them, and their processes run to the end, or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from safetensors.torch import load_file

from stoker.extras.radio.demo import TABLE, RadioSpec, write_radio
from stoker.service.folders import JobFile
from tests.conftest import write_burgers

SMALL = RadioSpec(rows=300, seed=3)


OPERATOR = {
    "latent.tokens": 4, "latent.dim": 8, "model.width": 16, "model.depth": 1, "model.heads": 2,
}  # fmt: skip
"""Settings under which simulations as small as these can be trained on."""


def radio_dataset(folder: Path, spec: RadioSpec = SMALL, url: str = "") -> dict[str, Any]:
    """A registered set of radio rows, made."""
    url = url or f"sqlite:///{folder}/radio.db"
    write_radio(url, spec)
    id = str(spec.dataset_id)
    return {"id": id, "name": "lab", "kind": "radio", "spec": {"url": url, "table": TABLE, "set": id}}


def burgers_dataset(folder: Path) -> dict[str, Any]:
    """A registered file of simulations."""
    path = write_burgers(folder / "burgers.hdf5")
    return {"id": "b" * 36, "name": "burgers", "kind": "hdf5", "spec": {"path": str(path)}}


def images_dataset(folder: Path, count: int = 12) -> dict[str, Any]:
    """Registered images: dark and light ones, in noise."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for place, name in enumerate(("dark", "light")):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 120, (40, 40, 3)) + 130 * place
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / name / f"{number}.png")
    return {"id": "i" * 36, "name": "shades", "kind": "images", "spec": {"path": str(folder / "images")}}


def make_job(
    folder: Path, dataset: dict[str, Any], *, name: str = "job", again: bool = False, **config: Any
) -> Path:
    """The folder of a job; `again`: the next attempt at one that is there."""
    small = {"settings": OPERATOR} if dataset["kind"] == "hdf5" else {}
    own, config = folder / name, {"accelerator": "cpu", "num_workers": 1, "epochs": 3, **small, **config}
    (own / "checkpoints").mkdir(parents=True, exist_ok=True)
    told = [line["data"] for line in lines(own, "metrics")]
    JobFile(
        id=name, name=name, kind="training", attempt=2 if again else 1, epochs=config["epochs"],
        epoch=told[-1]["epoch"] if told else 0, checkpoint=told[-1].get("checkpoint") if told else None,
        config={"dataset_ids": [dataset["id"]], **config}, datasets=[dataset], dataset_ids=[dataset["id"]],
        caches=str(folder / "caches"), data=str(folder / "data"), limits={},
    ).write(own / "job.json")  # fmt: skip
    return own


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The process of a job."""
    command = [sys.executable, "-m", "stoker.service.child", str(folder)]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, limit_s: float = 120.0) -> int:
    """Run a job's process to its end; its exit status."""
    return start(folder).wait(limit_s)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a job's process and its workers as a machine does that runs out of memory."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def wait_for(folder: Path, kind: str, count: int = 1, limit_s: float = 60.0) -> None:
    """Until a job has said so much."""
    deadline = time.monotonic() + limit_s
    while len(lines(folder, kind)) < count:
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()
        time.sleep(0.005)


def lines(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Whole lines that a job has written."""
    path = folder / "events.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    found = [json.loads(text) for text in whole.split(b"\n") if text.strip()]
    return [line for line in found if kind in ("", line["kind"])]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    newest = max((folder / "checkpoints").glob("last-?????????"))
    return load_file(newest / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_sound(path: Path) -> bool:
    """Whether an HDF5 file can be opened."""
    with h5py.File(path):
        return True
