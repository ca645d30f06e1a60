"""Ranks that train while the cache is filled, killed and begun again, also with another number of ranks."""

from __future__ import annotations

import random
import shutil
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked as subprocess

ROOT = Path(__file__).parents[2]
SAMPLES, GLOBAL = 160, 8


def start(tmp_path: Path, folder: Path, delay_s: float, kind: str, state: Path, world: int) -> list[Any]:
    """The ranks, each with a file of what it says."""
    state.with_suffix(".meeting").unlink(missing_ok=True)
    ranks: list[Any] = []
    for rank in range(world):
        words = (folder, SAMPLES, delay_s, kind, state, GLOBAL // world, rank, world)
        command = [sys.executable, "-m", "tests.precompute.ranks_filling", *map(str, words)]
        with said(tmp_path, rank).open("w") as out, errors(tmp_path, rank).open("w") as err:
            ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, text=True))
    return ranks


def said(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"said-{rank}.txt"


def errors(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"errors-{rank}.txt"


def steps(tmp_path: Path, world: int) -> tuple[list[str], int, list[list[str]]]:
    """What each rank found, the step that they began at, and the samples of each global batch since."""
    by_rank = [said(tmp_path, rank).read_text().split("\n")[:-1] for rank in range(world)]
    founds, begun = [own[0] for own in by_rank if own], {own[1] for own in by_rank if len(own) > 1}
    assert len(begun) <= 1
    batches = [[line.split() for line in own[2:] if line != "end"] for own in by_rank]
    shared = [[*chain.from_iterable(step)] for step in zip(*batches, strict=False)]
    return founds, int(begun.pop()) if begun else -1, shared


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["plain parts", "ragged own"])
def test_ranks_killed_in_mid_fill_continue_with_the_batches_of_one_rank(tmp_path: Path, kind: str) -> None:
    """In one folder, and where each node has a disk of its own and fills its own cache (`own`)."""
    alone = start(tmp_path, tmp_path / "alone", 0.0, kind, tmp_path / "alone.state", 1)
    assert alone[0].wait(60) == 0, errors(tmp_path, 0).read_text()
    (found,), _, expected = steps(tmp_path, 1)
    assert found == "incomplete"
    assert len(expected) == SAMPLES // GLOBAL

    if "own" in kind:  # rank 1 finds its cache complete, the others do not
        shutil.copytree(tmp_path / "alone-0", tmp_path / "cache-1")
    chance, state, folder = random.Random(0), tmp_path / "ranks.state", tmp_path / "cache"
    served, in_mid_fill = dict[int, list[str]](), 0
    for turn, world in enumerate((2, 4, 1, 2)):
        last = turn == 3
        ranks = start(tmp_path, folder, 0.0 if last else 0.03, kind, state, world)
        lines = chance.randrange(4, 7)
        while not last and any(rank.poll() is None for rank in ranks):
            if said(tmp_path, 0).read_text().count("\n") >= lines:
                break
            time.sleep(0.005)
        for rank in ranks:
            if not last:
                rank.kill()
        ends = [rank.wait(90) for rank in ranks]
        text = "\n".join(errors(tmp_path, rank).read_text() for rank in range(world))
        assert "Traceback" not in text or not last, text
        assert not last or ends == [0] * world, text
        found, begun, batches = steps(tmp_path, world)
        assert len({*found}) <= 1, "ranks did not agree on the order"
        in_mid_fill += found[:1] == ["incomplete"] and bool(batches) and begun > 0
        for number, batch in enumerate(batches, begun):
            assert sorted(batch) == sorted(expected[number]), (turn, number)
            served[number] = batch
    assert [*served] == [*range(len(expected))]
    assert in_mid_fill, "no run continued in mid-fill, so the test proves little"
