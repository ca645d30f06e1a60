"""`torchrun ... -m stoker`: training and precompute over real processes, and what a kill does to them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stoker
from tests.cli.conftest import project
from tests.scale.launch import LONG_S, rank_process, torchrun, wait_until

__all__ = ["project"]
pytestmark = pytest.mark.timeout(3 * LONG_S)
ENDLESS = "training.epochs=100000"


def alone(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker", *words], cwd=cwd, capture_output=True, text=True, timeout=LONG_S
    )


def metrics(project: Path) -> list[dict[str, Any]]:
    path = project / "runs" / "burgers1d" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weights(project: Path) -> dict[str, torch.Tensor]:
    newest = max((project / "runs" / "burgers1d" / "checkpoints").glob("last-*[0-9]"))
    return load_file(newest / "model.safetensors")


def test_two_ranks_train_as_one_process_with_twice_the_batch(project: Path) -> None:
    with torchrun(2, "-m", "stoker", "train", "c.yaml", "--json", cwd=project) as launcher:
        out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err
    report, both = json.loads(out), weights(project)
    rows = metrics(project)

    one = alone("train", "c.yaml", "training.batch_size=32", "--json", cwd=project)

    single = json.loads(one.stdout)
    assert [row["kind"] for row in rows].count("epoch") == 2, "only rank 0 writes"
    assert err.count("epoch 1 ·") == 1, "only rank 0 speaks"
    assert report["epoch_steps"] == single["epoch_steps"] == 3
    assert single["cache_reused"]
    assert sum(cache["encoded"] for cache in report["caches"]) == 16
    for key in ("val_nrmse", "persistence_nrmse", "rollout_nrmse", "rollout_persistence_nrmse"):
        assert report[key] == pytest.approx(single[key], rel=1e-3), key
    for name, value in weights(project).items():
        torch.testing.assert_close(both[name], value, rtol=0.02, atol=2e-3)


def test_a_run_of_two_ranks_goes_on_alone_over_the_same_global_batches(project: Path) -> None:
    """SIGTERM to one rank ends all at one step; the same command, without torchrun, takes it from there."""
    words = ("train", "c.yaml", "training.epochs=12")
    with torchrun(2, "-m", "stoker", *words, cwd=project) as launcher:
        wait_until(lambda: any(row["kind"] == "epoch" for row in metrics(project)), launcher)
        rank_process(launcher, 1).send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=LONG_S)
    stopped = re.search(r"a signal to another rank after step (\d+)", err)
    assert stopped is not None, err

    one = alone(*words, "--json", cwd=project)

    assert f"resumed at step {stopped[1]}," in one.stderr
    report = json.loads(one.stdout)
    assert (report["epoch_steps"], report["steps"]) == (3, 36), "32 examples a step, as they were begun with"
    assert [row["epoch"] for row in metrics(project) if row["kind"] == "epoch"] == list(range(1, 13))


@pytest.mark.chaos
def test_a_killed_rank_ends_the_other_with_a_message_that_names_it(project: Path) -> None:
    with torchrun(2, "-m", "stoker", "train", "c.yaml", ENDLESS, "--json", cwd=project) as launcher:
        wait_until(lambda: any(row["kind"] == "epoch" for row in metrics(project)), launcher)
        rank_process(launcher, 1).kill()
        begun = time.monotonic()
        out, err = launcher.communicate(timeout=LONG_S)

    assert launcher.returncode != 0
    assert time.monotonic() - begun < 60
    answer = json.loads(out)
    assert answer["exit_code"] == 5
    assert re.search(
        r"rank 1 of 2 ended without a word.*rank 0 waited .* at .+\. All ranks end", answer["error"]
    )
    assert "rank 1: the command was killed by SIGKILL" in err
    cache = stoker.open_cache(project / "data" / "latent_cache" / "burgers1d_train")
    assert cache.verify().ok
    assert weights(project), "the last checkpoint is whole"
