"""Mixtures over real processes: the sequence of one process, also from a state of more ranks."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stoker.loader import Mixture, Windows
from stoker.store import open_cache
from tests.cli.conftest import project
from tests.conftest import write_burgers
from tests.distributed.launch import LONG_S, rank_process, torchrun, wait_until
from tests.distributed.test_torchrun import alone, metrics, weights
from tests.loader.caches import trajectories, write_cache

__all__ = ["project"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(5 * LONG_S)]
EPOCHS, GLOBAL_BATCH = 2, 8
TWO = ("data.task=[burgers1d,wide]", "tasks.wide.encoder.patch_size=8")
RUN_DIR = "training.run_dir=runs/burgers1d"
"""Where `metrics` and `weights` look."""
MODES: dict[str, dict[str, Any]] = {
    "concat": {"mode": "concat", "mix": "batch"},
    "examples": {"mode": "concat", "mix": "example"},
    "weighted": {"mode": "weighted", "weights": [3.0, 1.0], "epoch_examples": 97},
    "round_robin": {"mode": "round_robin", "exhausted": "longest"},
}

SERVE = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from tests.distributed.test_mixtures import MODES, mixture_of, parts_of, steps
folders, stop, name = sys.argv[1].split(","), float(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
for mode in MODES:
    mixture = mixture_of(folders, mode, rank=rank, world_size=world_size)
    before = Path(f"{mode}.json")
    if before.exists():
        mixture.load_state_dict(json.loads(before.read_text()))
    dist.barrier()
    served, passes = {}, steps(mixture)
    for number in range(round(stop * len(mixture))):
        for part, values in parts_of(next(passes)).items():
            gathered = [torch.empty_like(values) for _ in range(world_size)]
            dist.all_gather(gathered, values.contiguous())
            served[f"{number:04}.{part}"] = torch.cat(gathered)
    states = [None] * world_size
    dist.all_gather_object(states, {**mixture.state_dict(), "loaders": None})
    assert all(state == states[0] for state in states)
    if rank == world_size - 1:
        save_file(served, f"{mode}.{name}.safetensors")
        before.write_text(json.dumps(mixture.state_dict()))
    dist.barrier()
dist.destroy_process_group()
"""


def mixture_of(folders: list[str], mode: str, *, rank: int = 0, world_size: int = 1) -> Mixture:
    """The same mixture for any number of ranks; caches alike where a batch holds examples of both."""
    chosen = [0, 1] if mode == "examples" else [0, 2]
    return Mixture(
        [open_cache(folders[place]) for place in chosen],
        GLOBAL_BATCH // world_size,
        names=["a", "b"],
        windows=Windows(field="latent"),
        seed=5,
        rank=rank,
        world_size=world_size,
        drop_last=True,
        tier="disk" if rank % 2 else "host",
        **MODES[mode],
    )


def steps(mixture: Mixture) -> Iterator[Any]:
    """Batches of all epochs, one after another."""
    while mixture.epoch < EPOCHS:
        yield from mixture


def parts_of(batch: Any) -> dict[str, torch.Tensor]:
    """All that a batch holds, as tensors that gloo takes."""
    masks = {f"mask.{name}": mask.to(torch.uint8) for name, mask in batch.mask.items()}
    return {"z0": batch.z0, "z1": batch.z1, "index": batch.index, "tasks": batch.tasks, **batch.cond, **masks}


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    whole = trajectories(13, 9)
    other = {**trajectories(10, 7, (2, 6)), "re": torch.arange(10, dtype=torch.int32)}
    del other["bc"]
    alike = {name: values[:7] + 1 for name, values in whole.items()}
    timed = ("latent", "time")
    return [
        str(write_cache(tmp_path / name, fields, timed=timed, shards=shards, name=name).path)
        for name, fields, shards in (("a", whole, (5, 7, 1)), ("b", alike, (2, 5)), ("c", other, ()))
    ]


def test_ranks_serve_the_sequence_of_one_process_and_a_state_goes_on_with_fewer(
    folders: list[str], tmp_path: Path
) -> None:
    """Four processes up to a part of the first epoch, two into the second one, and one to the end."""
    (tmp_path / "serve.py").write_text(SERVE)
    for ranks, part in ((4, 0.4), (2, 0.9)):
        words = ("serve.py", ",".join(folders), str(part), str(ranks))
        with torchrun(ranks, *words, cwd=tmp_path) as launcher:
            _, err = launcher.communicate(timeout=LONG_S)
        assert launcher.returncode == 0, err

    for mode in MODES:
        wanted = [parts_of(batch) for batch in steps(mixture_of(folders, mode))]
        found: list[dict[str, torch.Tensor]] = []
        for ranks in (4, 2):
            served: dict[str, dict[str, torch.Tensor]] = {}
            for key, values in sorted(load_file(tmp_path / f"{mode}.{ranks}.safetensors").items()):
                number, _, part = key.partition(".")
                served.setdefault(number, {})[part] = values
            found += served.values()
        last = mixture_of(folders, mode)
        last.load_state_dict(json.loads((tmp_path / f"{mode}.json").read_text()))
        assert last.epoch == 1, "the state lies in the second epoch"
        found += [parts_of(batch) for batch in steps(last)]

        assert len(found) == len(wanted), mode
        for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[part], other[part]) for part in one), (mode, step)


@pytest.fixture
def tasks(project: Path) -> Path:
    """A second task, on a grid of twice as many points; sizes that fill whole global batches of 32."""
    for split, samples in (("train", 8), ("val", 3)):
        write_burgers(project / "raw" / f"wide_{split}.h5", samples=samples, points=64, nu=0.1)
    return project


def test_ranks_train_on_several_tasks_as_one_process_with_the_whole_batch(tasks: Path) -> None:
    words = ("train", "c.yaml", "--json", *TWO)
    with torchrun(2, "-m", "stoker", *words, cwd=tasks) as launcher:
        out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err
    report = json.loads(out)
    assert [cache["records"] for cache in report["caches"]] == [12, 4, 8, 3]

    one = alone(*words, "training.batch_size=32", "training.run_dir=alone", cwd=tasks)

    assert one.returncode == 0, one.stderr
    single = json.loads(one.stdout)
    assert report["epoch_steps"] == single["epoch_steps"]
    for task, errors in single["tasks"].items():
        assert report["tasks"][task] == pytest.approx(errors, rel=1e-3), task


def test_a_run_on_several_tasks_goes_on_with_fewer_ranks(tasks: Path) -> None:
    """Begun by four, gone on with by two, ended by one; every leg but the last is ended by a signal."""
    words = ("train", "c.yaml", "training.epochs=40", "training.batch_size=8", *TWO, RUN_DIR)
    stopped = 0
    for ranks in (4, 2):
        with torchrun(ranks, "-m", "stoker", *words, cwd=tasks) as launcher:
            wait_until(lambda: any(row["step"] > stopped for row in metrics(tasks)), launcher)
            rank_process(launcher, 1).send_signal(signal.SIGTERM)
            _, err = launcher.communicate(timeout=LONG_S)
        said = re.search(r"a signal to another rank after step (\d+)", err)
        assert said is not None, err
        assert (f"resumed at step {stopped}," in err) == (stopped > 0)
        stopped = int(said[1])

    one = alone(*words, "--json", cwd=tasks)

    assert one.returncode == 0, one.stderr
    assert f"resumed at step {stopped}," in one.stderr
    report = json.loads(one.stdout)
    assert report["steps"] == 40 * report["epoch_steps"]
    epochs = [row["epoch"] for row in metrics(tasks) if row["kind"] == "epoch"]
    assert epochs == list(range(1, 41))
    assert weights(tasks)
