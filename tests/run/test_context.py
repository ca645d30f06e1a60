"""A run of several tasks: what each has of its own, what all share, and what is asked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.distributed.ranks import Ranks
from stoker.errors import ConfigError
from stoker.run import context
from stoker.run.build import build_jobs
from stoker.run.context import Run
from tests.run.conftest import Configure


class Played(Ranks):
    """A rank that hears itself alone, and counts how often it asks."""

    def __init__(self, world_size: int = 1, nodes: int = 1) -> None:
        self.world_size, self.num_nodes = world_size, nodes
        self.asked: list[str] = []

    def all_gather(self, text: str, what: str) -> list[str]:
        self.asked.append(what)
        return [text]


def test_a_task_has_its_own_settings_in_the_folder_of_the_whole_run(configure: Configure) -> None:
    run = Run(configure("data.task=[a,b]", "tasks={b: {data: {limit: 3}}}"))
    a, b = run.parts()

    assert [part.task for part in (a, b)] == ["a", "b"]
    assert (a.config.data.limit, b.config.data.limit) == (None, 3)
    assert a.run_dir == b.run_dir == run.run_dir == Path("runs/a+b")
    assert a.encoders is b.encoders is run.encoders
    assert a.tasks == ("a",)
    assert a.for_task("a") is a


def test_what_costs_a_look_is_asked_once_for_all_tasks(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look() -> tuple[str, str]:
        looks.append("device")
        return "cpu", ""

    monkeypatch.setattr(context, "automatic_device", look)
    ranks = Played(world_size=2, nodes=2)
    run = Run(configure("data.task=[a,b]", "training.device=auto"), ranks=ranks)

    assert [one.device for one in (run, *run.parts())] == ["cpu"] * 3
    assert [part.nodes for part in run.parts()] == [[0], [0]]
    assert looks == ["device"]
    assert len(ranks.asked) == 2, "both ranks of a node leave a mark and look once, whatever the tasks"


def test_other_settings_of_training_leave_the_run_as_it_was(configure: Configure) -> None:
    run = Run(configure("training.rollout_horizon=1"))

    longer = run.parts()[0].with_training(rollout_horizon=4)

    assert (run.windows.horizon, longer.windows.horizon) == (1, 4)
    assert longer.run_dir == run.run_dir
    assert longer.encoders is run.encoders


def test_splits_of_one_reading_share_one_encoder(configure: Configure) -> None:
    run = Run(configure()).parts()[0]

    (first,), (again,) = build_jobs(run, ["train"]), build_jobs(run, ["val"])

    assert first.encoder is again.encoder


def test_a_run_folder_at_a_url_is_refused(configure: Configure) -> None:
    run: Any = Run(configure("training.run_dir=s3://bucket/runs"))

    with pytest.raises(ConfigError, match=r"training\.run_dir"):
        _ = run.run_dir
