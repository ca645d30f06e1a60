"""Two machines of two ranks: one folder or one each, the sequence of one process, and what a loss costs."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stoker
from stoker.loader import Windows
from stoker.store import open_cache
from tests.cli.conftest import project
from tests.conftest import write_burgers
from tests.distributed.launch import LONG_S, rank_processes, torchrun, wait_until
from tests.distributed.nodes import NODES, RANKS_A_NODE, Net, kill_node, launched, two_nodes
from tests.distributed.test_torchrun import alone, metrics, weights
from tests.kit.orders import in_order
from tests.test_guarantees import shared_and_private_bytes

__all__ = ["project"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * LONG_S)]
WORLD = NODES * RANKS_A_NODE
SAMPLES = 20_000
"""Of 32 points and 9 steps: more groups than there are ranks."""
KINDS = ("full", "block(16, 64)", f"static({WORLD})")
BATCH, SEED, EPOCHS = 4, 5, 2
TRAIN = ("train", "c.yaml", "--json")
SMALL = "training.batch_size=8"

SERVE = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from tests.distributed.test_nodes import BATCH, KINDS, loader_of, passes
from tests.kit.orders import in_order
folder, rank, world_size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
for place, kind in enumerate(KINDS):
    loader = loader_of(folder, kind, BATCH, rank=rank, world_size=world_size)
    save_file({f"{n:04}": v for n, v in enumerate(passes(loader))}, f"{place}-{rank}.safetensors")
    stopped = loader_of(folder, kind, BATCH, rank=rank, world_size=world_size)
    for number, _ in enumerate(stopped):
        if number == 4:
            break
    Path(f"{place}-{rank}.json").write_text(json.dumps(stopped.state_dict()))
    del stopped
Path(f"ready-{rank}").write_text(str(os.getpid()))
until = time.monotonic() + 120
while not Path("measured").exists() and time.monotonic() < until:
    time.sleep(0.05)
dist.destroy_process_group()
"""


def loader_of(
    folder: str | Path, kind: str, size: int, *, rank: int = 0, world_size: int = 1
) -> stoker.Loader:
    return stoker.Loader(
        open_cache(folder), size, windows=Windows(field="latent"), **in_order(kind), seed=SEED, rank=rank,
        world_size=world_size, drop_last=True, tier="host",
    )  # fmt: skip


def passes(loader: stoker.Loader) -> list[torch.Tensor]:
    """Of every batch of all passes: sample, start, and a bit of what lies there."""
    found: list[torch.Tensor] = []
    while loader.epoch < EPOCHS:
        for batch in loader:
            bits = batch.z0.reshape(len(batch.index), -1)[:, :4].double()
            found.append(torch.cat([batch.index.double().reshape(len(bits), -1), bits], 1))
    return found


@pytest.fixture(params=["shared", "apart"])
def net(request: pytest.FixtureRequest, project: Path) -> Generator[Net]:
    """Two machines on one project folder, or each on a copy of its own."""
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=SAMPLES)
    folders = [project, project]
    if request.param == "apart":
        folders = [project / "first", project / "second"]
        for folder in folders:
            folder.mkdir()
            shutil.copytree(project / "raw", folder / "raw")
            shutil.copy(project / "c.yaml", folder)
    with two_nodes(folders) as found:
        yield found


def cache_of(folder: Path) -> stoker.Cache:
    return stoker.open_cache(folder / "data" / "latent_cache" / "burgers1d_train")


def ended(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code and output of each machine's launcher."""
    found = [launcher.communicate(timeout=2 * LONG_S) for launcher in launchers]
    return [(one.returncode, *texts) for one, texts in zip(launchers, found, strict=True)]


def test_two_nodes_train_as_one_process_with_the_whole_batch(net: Net, project: Path) -> None:
    words = (*TRAIN, SMALL, "training.max_steps=12")
    with launched(net, "-m", "stoker", *words) as launchers:
        (code, out, err), (_, second_out, second_err) = ended(launchers)
    assert code == 0, (err, second_err)
    report = json.loads(out)
    apart = net.nodes[0].folder != net.nodes[1].folder

    assert not second_out
    assert report["caches"][0]["encoded"] == SAMPLES, "of those that share a folder, each group once"
    assert ("1 of 2 machines see the same data/latent_cache" in err) == apart
    one = alone(
        *TRAIN, "training.max_steps=12", f"training.batch_size={8 * WORLD}", "training.run_dir=alone",
        "training.latent_cache_dir=alone/cache", cwd=project,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    single = json.loads(one.stdout)
    assert report["epoch_steps"] == single["epoch_steps"]
    for key in ("val_nrmse", "rollout_nrmse"):
        assert report[key] == pytest.approx(single[key], rel=1e-3), key
    whole = stoker.open_cache(project / "alone" / "cache" / "burgers1d_train")
    for node in net.nodes:
        found = cache_of(node.folder)
        assert found.complete
        for number in range(0, SAMPLES, 397):
            for name, value in whole[number].items():
                assert torch.equal(found[number][name], value), (node.number, number, name)
    if not apart:
        writers = {path.name.split("-")[1] for path in cache_of(project).path.glob("shard-*.safetensors")}
        assert len(writers) == NODES, "one rank of each node encoded"


def test_the_global_batch_is_that_of_one_process_and_a_node_holds_one_copy(net: Net, project: Path) -> None:
    """Ranks side by side are the batch of one process; a state goes on with two ranks, and with one."""
    made = alone("precompute", "c.yaml", "--splits", "train", "data.limit=1500", cwd=project)
    assert made.returncode == 0, made.stderr
    for node in net.nodes:
        (node.folder / "serve.py").write_text(SERVE)
        if node.folder != project:
            shutil.copytree(project / "data", node.folder / "data")
    folder = next((project / "data" / "latent_cache" / "burgers1d_train").iterdir())
    relative = str(folder.relative_to(project))
    homes = {rank: net.nodes[rank // RANKS_A_NODE].folder for rank in range(WORLD)}
    notes = [homes[rank] / f"ready-{rank}" for rank in range(WORLD)]

    with launched(net, "serve.py", relative) as launchers:
        wait_until(lambda: all(note.exists() and note.read_text() for note in notes), launchers[0])
        copies = [
            [shared_and_private_bytes(int(notes[rank].read_text()), homes[rank] / relative) for rank in ranks]
            for ranks in (range(0, RANKS_A_NODE), range(RANKS_A_NODE, WORLD))
        ]
        for node in net.nodes:
            (node.folder / "measured").touch()
        assert all(code == 0 for code, _, _ in ended(launchers))

    size = sum(shard.bytes for shard in open_cache(folder).index.shards)
    for ranks in copies:
        # Ranks of static order have their part alone; each has mapped all in the other two orders.
        assert all(rss > 0.9 * size for _, rss in ranks), "not mapped, so this proves nothing"
        assert sum(pss for pss, _ in ranks) < 1.1 * size
    for place, kind in enumerate(KINDS):
        wanted = passes(loader_of(folder, kind, BATCH * WORLD))
        served = [load_file(homes[rank] / f"{place}-{rank}.safetensors") for rank in range(WORLD)]
        assert all(len(rank) == len(wanted) for rank in served)
        for step, batch in enumerate(wanted):
            assert torch.equal(torch.cat([rank[f"{step:04}"] for rank in served]), batch), (kind, step)
        if kind.startswith("static"):
            numbers = [{int(row[0]) for batch in rank.values() for row in batch} for rank in served]
            assert sum(map(len, numbers)) - len(set.union(*numbers)) < WORLD, "each holds its part alone"
        states = [json.loads((homes[rank] / f"{place}-{rank}.json").read_text()) for rank in range(WORLD)]
        for world_size in (2, 1):
            size_each = BATCH * WORLD // world_size
            loaders = [
                loader_of(folder, kind, size_each, rank=r, world_size=world_size) for r in range(world_size)
            ]
            for rank, loader in enumerate(loaders):
                loader.load_state_dict(states[rank])
            rest = [torch.cat(batches) for batches in zip(*map(passes, loaders), strict=True)]
            assert all(map(torch.equal, rest, wanted[-len(rest) :])), (kind, world_size)
            assert len(rest) > len(wanted) - 8


@pytest.mark.chaos
def test_a_node_lost_in_precompute_is_named_and_the_same_command_resumes(net: Net, project: Path) -> None:
    words = (*TRAIN, SMALL, "training.max_steps=4", "precompute.workers=1", "training.rank_deadline=60")
    with launched(net, "-m", "stoker", *words) as launchers:
        stopped: list[Any] = []

        def caught() -> bool:
            stopped.extend(p for p, _ in rank_processes(launchers[1], "stoker.precompute.worker"))
            for reader in stopped:
                reader.suspend()
            return bool(stopped)

        wait_until(caught, launchers[0])
        time.sleep(5)  # workers come first; by now all ranks are at the precompute
        kill_node(launchers[1])
        begun = time.monotonic()
        out, err = launchers[0].communicate(timeout=2 * LONG_S)
    took = time.monotonic() - begun

    answer = json.loads(out)
    assert launchers[0].returncode != 0
    assert answer["exit_code"] == 5, (answer, err)
    assert re.search(r"ranks? (2|3|2, 3) of 4 ended without a message", answer["error"]), answer
    assert took < LONG_S
    assert cache_of(net.nodes[0].folder).complete, "what the lost node had to do was done by those that live"

    with launched(net, "-m", "stoker", *words) as launchers:
        (code, out, err), (_, _, second_err) = ended(launchers)
    assert code == 0, (err, second_err)
    assert json.loads(out)["caches"][0]["reused"] == SAMPLES
    assert all(cache_of(node.folder).complete for node in net.nodes)


@pytest.mark.parametrize("net", ["shared"], indirect=True)
def test_a_run_of_two_nodes_goes_on_with_two_ranks_and_with_one(net: Net, project: Path) -> None:
    """The losses of every pass are those of a run that one process did from beginning to end."""
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=96)
    words = (*TRAIN, SMALL, "training.epochs=12")

    def passed(count: int) -> bool:
        return sum(row["kind"] == "epoch" for row in metrics(project)) >= count

    with launched(net, "-m", "stoker", *words) as launchers:
        wait_until(lambda: passed(1), launchers[0])
        _stop(launchers[1], rank=3)
        ended(launchers)
    assert not passed(12), "it was to be stopped before its end"
    with torchrun(2, "-m", "stoker", *words, cwd=project) as launcher:
        wait_until(lambda: passed(4), launcher)
        _stop(launcher, rank=1)
        launcher.communicate(timeout=LONG_S)
    assert not passed(12)
    last = alone(*words, cwd=project)
    assert last.returncode == 0, last.stderr
    rows, learnt = metrics(project), weights(project)

    shutil.move(project / "runs", project / "before")
    one = alone(*TRAIN, f"training.batch_size={8 * WORLD}", "training.epochs=12", cwd=project)

    assert one.returncode == 0, one.stderr
    for mine, theirs in zip(_passes(rows), _passes(metrics(project)), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3), mine["epoch"]
    for name, value in weights(project).items():
        torch.testing.assert_close(learnt[name], value, rtol=0.02, atol=2e-3)


def _passes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "epoch"]


def _stop(launcher: subprocess.Popen[str], *, rank: int) -> None:
    (found,) = (p for p, own in rank_processes(launcher, "stoker.cli.main") if own == rank)
    found.send_signal(signal.SIGTERM)
