"""`torchrun ... -m stoker`: training and precompute over real processes, and what a kill does to them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import stoker
from tests.cli.conftest import project
from tests.conftest import write_burgers
from tests.distributed.launch import LONG_S, rank_process, rank_processes, torchrun, wait_until
from tests.test_guarantees import shared_and_private_bytes

__all__ = ["project"]
pytestmark = pytest.mark.timeout(3 * LONG_S)
ENDLESS = "training.epochs=100000"
SAMPLES = 10_000


def alone(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker", *words], cwd=cwd, capture_output=True, text=True, timeout=LONG_S
    )


def metrics(project: Path) -> list[dict[str, Any]]:
    path = project / "runs" / "burgers1d" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(project: Path) -> list[float]:
    return [row["loss"] for row in metrics(project) if row["kind"] in ("step", "epoch")]


def weights(project: Path) -> dict[str, torch.Tensor]:
    newest = max((project / "runs" / "burgers1d" / "checkpoints").glob("last-*[0-9]"))
    return load_file(newest / "model.safetensors")


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_ranks_train_while_caches_are_filled_as_one_process_does(project: Path) -> None:
    """Batches are small: an epoch has more of them than are read before it to learn scales."""
    words = ("train", "c.yaml", "--no-wait", "--json")
    with torchrun(2, "-m", "stoker", *words, "training.batch_size=2", cwd=project) as launcher:
        out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err
    report, both = json.loads(out), losses(project)

    one = alone(*words, "training.batch_size=4", "training.latent_cache_dir=another", cwd=project)

    single = json.loads(one.stdout)
    assert not single["cache_reused"]
    assert sum(cache["encoded"] for cache in single["caches"]) == 16
    for key in ("epoch_steps", "val_nrmse", "persistence_nrmse", "rollout_nrmse"):
        assert report[key] == pytest.approx(single[key], rel=1e-3), key
    assert len(both) >= 2
    assert both == pytest.approx(losses(project), rel=1e-3)


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert answer["exit_code"] == 5, (answer, err)
    assert re.search(
        r"rank 1 of 2 ended without a message.*rank 0 waited .* at .+\. All ranks end", answer["error"]
    )
    assert re.search(r"rank 1: .*the command was killed by SIGKILL", err)
    cache = stoker.open_cache(project / "data" / "latent_cache" / "burgers1d_train")
    assert cache.verify().ok
    assert weights(project), "the last checkpoint is whole"


@pytest.mark.slow
def test_the_example_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "ddp.py"

    with torchrun(2, str(script), str(tmp_path / "cache"), cwd=tmp_path) as launcher:
        out, err = launcher.communicate(timeout=LONG_S)

    assert launcher.returncode == 0, err
    found = re.fullmatch(r"2 ranks, 1000 examples evaluated, mean squared error (\S+)\n", out)
    assert found is not None, out
    assert float(found[1]) < 0.1


HOLDER = """
import os, sys, time
from pathlib import Path
import stoker, torch
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
loader = stoker.Loader(folder, 64, shuffle=True, tier="host", rank=rank, world_size=2)
seen = sum(len(batch["index"]) for batch in loader)
Path(f"ready-{rank}").write_text(f"{os.getpid()} {seen}")
until = time.monotonic() + 120
while not Path("measured").exists() and time.monotonic() < until:
    time.sleep(0.05)
"""


def test_two_ranks_on_one_node_hold_one_copy_of_the_cached_bytes(tmp_path: Path) -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(2048, 16, 256))
    size = 2048 * 16 * 256 * 4
    source = stoker.TorchSource(dataset, version="random")
    cache = stoker.precompute(source, None, tmp_path / "cache", name="r", workers=0)
    (tmp_path / "holder.py").write_text(HOLDER)
    notes = [tmp_path / f"ready-{rank}" for rank in range(2)]

    with torchrun(2, "holder.py", str(cache.path), cwd=tmp_path) as launcher:
        wait_until(lambda: all(note.exists() and note.read_text() for note in notes), launcher)
        told = [list(map(int, note.read_text().split())) for note in notes]
        figures = [shared_and_private_bytes(pid, cache.path) for pid, _ in told]
        (tmp_path / "measured").touch()
        _, err = launcher.communicate(timeout=LONG_S)

    assert launcher.returncode == 0, err
    assert [seen for _, seen in told] == [1024, 1024]
    assert all(rss >= 0.95 * size for _, rss in figures), "the cache is not mapped: the test proves nothing"
    assert sum(pss for pss, _ in figures) <= 1.1 * size


def precomputed(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    cache = stoker.open_cache(folder / "data" / "latent_cache" / "burgers1d_train")
    return {number: cache[number] for number in cache.indices.tolist()}


WORDS = ("precompute", "c.yaml", "precompute.workers=1", "--splits", "train", "--json")


@contextmanager
def held(launcher: subprocess.Popen[str], rank: int) -> Generator[None]:
    """A rank in the middle of encoding, its reader stopped; of the ranks on a machine the first encodes."""
    stopped: dict[psutil.Process, int] = {}

    def caught() -> bool:
        for reader, owner in rank_processes(launcher, "stoker.precompute.worker"):
            if reader not in stopped:
                reader.suspend()
                stopped[reader] = owner
        return rank in stopped.values()

    try:
        wait_until(caught, launcher)
        time.sleep(3)  # workers come first; by now the rank waits for the first sample
        for reader, owner in stopped.items():
            if owner != rank:
                reader.resume()
        yield
    finally:
        for reader, owner in stopped.items():
            with suppress(psutil.NoSuchProcess):
                reader.kill() if owner == rank else reader.resume()


@pytest.mark.slow
@pytest.mark.chaos
def test_a_rank_killed_while_encoding_costs_no_record(project: Path) -> None:
    """Its guardian starts it again; every group is stored as one process would have stored it."""
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=SAMPLES)
    with torchrun(2, "-m", "stoker", *WORDS, cwd=project) as launcher:
        with held(launcher, 0):
            rank_process(launcher, 0).kill()
        out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err
    assert "the encoding process was killed by SIGKILL" in err
    (told,) = json.loads(out)["caches"]
    assert (told["records"], told["complete"]) == (SAMPLES, True)

    one = alone(*WORDS, "training.latent_cache_dir=other", cwd=project)

    assert one.returncode == 0, one.stderr
    whole = stoker.open_cache(project / "other" / "burgers1d_train")
    for number, record in precomputed(project).items():
        for name, value in record.items():
            assert torch.equal(value, whole[number][name]), (number, name)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_ranks_that_die_with_their_guardians_leave_the_rest_to_the_next_run(project: Path) -> None:
    """`torchrun` ends the others then; the next run, of any size, goes on with what is missing."""
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=SAMPLES)
    for ranks in (4, 2):
        with torchrun(ranks, "-m", "stoker", *WORDS, cwd=project) as launcher:
            with held(launcher, 0):
                rank_process(launcher, 0).parent().kill()
            launcher.communicate(timeout=LONG_S)
            assert launcher.returncode != 0
    words = ("train", "c.yaml", "training.max_steps=4", "--json")
    with torchrun(4, "-m", "stoker", *words, cwd=project) as last:
        out, err = last.communicate(timeout=2 * LONG_S)

    assert last.returncode == 0, err
    assert json.loads(out)["caches"][0]["records"] == SAMPLES
    assert len(precomputed(project)) == SAMPLES


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_of_four_ranks_one_that_is_killed_or_stopped_ends_three(
    project: Path, number: signal.Signals
) -> None:
    words = ("train", "c.yaml", ENDLESS, "training.batch_size=8", "training.rank_deadline=20")
    with torchrun(4, "-m", "stoker", *words, cwd=project) as launcher:
        wait_until(lambda: any(row["kind"] == "epoch" for row in metrics(project)), launcher)
        rank_process(launcher, 2).send_signal(number)
        begun = time.monotonic()
        _, err = launcher.communicate(timeout=LONG_S)

    assert time.monotonic() - begun < 20 + 10 + 45, "deadline, a look at who is gone, torchrun's own grace"
    assert err.count("rank 2 of 4 ended without a message") >= 1
