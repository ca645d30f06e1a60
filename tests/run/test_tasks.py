"""Several tasks in one configuration: each with its own caches, one operator, one report."""

from __future__ import annotations

import json
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from stoker.config import Config
from stoker.errors import ConfigError, DeviceError, Interrupted, SourceError
from stoker.precompute.background import SpotChecks
from stoker.run import precompute as module
from stoker.run.build import build_jobs
from stoker.run.caches import explain
from stoker.run.context import Run
from stoker.run.loaders import RunLoaders, serve
from stoker.run.plan import plan_config, plan_tasks
from stoker.run.precompute import precompute_config
from stoker.run.tasks import TaskLoader, TaskMixture
from stoker.run.train import prepare, train_config
from tests.conftest import write_burgers
from tests.run.conftest import Configure
from tests.run.test_train import Events
from tools.settings_page import describe_settings

TWO = "data.task=[burgers1d,long]"


@pytest.fixture
def two(configure: Configure, tmp_path: Path) -> Configure:
    """A second task of other lengths and another grid, whose encoder gives latents of the same size."""
    for split, samples in (("train", 6), ("val", 2)):
        path = write_burgers(
            tmp_path / "raw" / f"long_{split}.h5", samples=samples, steps=12, points=64, nu=0.1
        )
        with h5py.File(path, "a") as file:
            file.attrs["Re"] = 40.0
    own = (TWO, "tasks.long.encoder.patch_size=8")

    def make(*more: str) -> Config:
        given = {text.partition("=")[0] for text in more}
        return configure(*(text for text in own if text.partition("=")[0] not in given), *more)

    return make


def loaders(config: Config) -> RunLoaders:
    return serve(Run(config), [result.cache for result in prepare(Run(config)).caches])


def test_one_operator_is_trained_on_all_tasks_and_judged_on_each(two: Configure) -> None:
    config = two("training.epochs=3", "model.width=32", "training.lr=1e-2")

    result = train_config(Run(config))

    report = result.report
    assert list(report.tasks) == ["burgers1d", "long"]
    errors = [report.tasks[task]["val_nrmse"] for task in report.tasks]
    assert report.val_nrmse == pytest.approx(sum(error for error in errors if error is not None) / 2)
    for task in report.tasks:
        own = report.tasks[task]
        assert own["val_nrmse"] is not None
        assert own["persistence_nrmse"] is not None
        assert own["val_nrmse"] < own["persistence_nrmse"]
        assert own["rollout_persistence_nrmse"] is not None
    assert [cache.name for cache in result.caches] == [
        "burgers1d_train",
        "burgers1d_val",
        "long_train",
        "long_val",
    ]
    printed: Any = result.to_json()
    assert printed["tasks"]["long"]["val_nrmse"] == report.tasks["long"]["val_nrmse"]
    assert Run(config).run_dir == Path("runs/burgers1d+long")
    rows = [json.loads(line) for line in (Run(config).run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "val_nrmse/long" in [row for row in rows if row["kind"] == "epoch"][-1]
    page = (Run(config).run_dir / "report.html").read_text()
    assert "<h2>Tasks</h2>" in page
    assert "burgers1d" in page


def test_each_task_is_judged_in_physical_space_and_spot_checked(
    two: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpotChecks, "finish", partialmethod(SpotChecks.finish, 60.0))
    result = train_config(Run(two("training.max_steps=2", "verify.spot_check=2")))

    report = result.report
    for own in report.tasks.values():
        assert own["physical_nrmse"] is not None
        assert own["reconstruction_nrmse"] is not None
    by_itself = train_config(Run(two("data.task=long", "training.max_steps=2"))).report
    assert report.tasks["long"]["reconstruction_nrmse"] == by_itself.reconstruction_nrmse
    losses = [own["reconstruction_nrmse"] or 0.0 for own in report.tasks.values()]
    assert report.reconstruction_nrmse == pytest.approx(sum(losses) / 2)
    assert "encoder's own" in (report.run_dir / "report.html").read_text()
    assert result.spot_check is not None
    assert (result.spot_check.wanted, result.spot_check.checked) == (4, 4)
    assert not result.spot_check.different


@pytest.mark.slow
def test_an_interrupted_mixture_goes_on_and_ends_as_if_it_had_not_been(two: Configure) -> None:
    whole = train_config(Run(two("training.run_dir=whole")))
    with pytest.raises(Interrupted):
        train_config(Run(two()), on_event=Events(stop=True))
    events = Events()

    resumed = train_config(Run(two()), on_event=events)

    assert "resume" in events.kinds
    assert resumed.report.tasks == whole.report.tasks


def test_the_operator_sees_which_task_it_is_and_which_conditions_are_its_own(two: Configure) -> None:
    config = two()
    served = loaders(config)
    assert isinstance(served.train, TaskMixture)
    assert isinstance(served.val, dict)

    batches = list(served.train)

    for batch in batches:
        assert torch.equal(batch.cond["task"].argmax(1), batch.tasks)
        for name, mask in batch.mask.items():
            assert torch.equal(batch.cond[f"{name}?"].bool(), mask)
    assert {batch.task for batch in batches} == {"burgers1d", "long"}
    one = served.val["long"]
    assert isinstance(one, TaskLoader)
    assert {batch.task for batch in one} == {"long"}
    assert list(next(iter(one)).cond) == list(batches[0].cond)
    assert len(list(one)) == len(one)


def test_tasks_are_mixed_as_the_settings_say(two: Configure) -> None:
    config = two("training.mixture=weighted", "training.task_weights={burgers1d: 1, long: 3}")
    served = loaders(config)

    tasks = [batch.task for batch in served.train]  # type: ignore[union-attr]

    assert abs(tasks.count("long") - 3 * tasks.count("burgers1d")) < 4
    in_turn = two("training.mixture=round_robin")
    assert [batch.task for batch in loaders(in_turn).train][:3] == [  # type: ignore[union-attr]
        "burgers1d", "long", "burgers1d",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"training\.mixture=weighted"):
        two("training.task_weights={burgers1d: 1, long: 3}")


def test_tasks_that_one_operator_cannot_take_are_refused_before_anything_is_encoded(
    two: Configure, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"burgers1d \(4 tokens of 8 numbers\) and long \(2 tokens of 8 numbers\)"
    ):
        train_config(Run(two("tasks.long.latent.tokens=2")))
    assert not list((tmp_path / "data").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["task", "Re?"])
def test_a_condition_that_would_be_lost_under_one_of_ours_is_refused(
    two: Configure, tmp_path: Path, name: str
) -> None:
    for split in ("train", "val"):
        with h5py.File(tmp_path / "raw" / f"long_{split}.h5", "a") as file:
            file.attrs[name] = 1.0

    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        train_config(Run(two()))
    assert not list((tmp_path / "data").rglob("*.safetensors"))


@pytest.mark.slow
def test_several_tasks_are_trained_on_while_they_are_encoded(two: Configure) -> None:
    """Slow: four processes begin, each with torch. In the second epoch all caches are complete."""
    result = train_config(Run(two("precompute.wait=false", "training.epochs=2", "precompute.workers=1")))

    assert result.report.epochs == 2
    assert list(result.report.tasks) == ["burgers1d", "long"]
    assert [cache.cache.complete for cache in result.caches] == [True] * 4


def test_a_task_that_fails_leaves_the_others_alone(configure: Configure, caplog: Any) -> None:
    result = precompute_config(Run(configure("data.task=[nowhere,burgers1d]")))

    assert [cache.name for cache in result.caches] == ["burgers1d_train", "burgers1d_val"]
    assert [failure.task for failure in result.failed] == ["nowhere"]
    assert result.exit_code == SourceError.exit_code
    printed: Any = result.to_json()
    assert printed["failed"][0]["task"] == "nowhere"
    assert "task nowhere failed" in caplog.text


def test_one_task_alone_fails_as_ever(configure: Configure) -> None:
    with pytest.raises(SourceError):
        precompute_config(Run(configure("data.task=nowhere")))


@pytest.mark.parametrize("error", [Interrupted("SIGTERM"), DeviceError("the GPU is gone")])
def test_what_ends_the_process_ends_all_tasks(
    two: Configure, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked: list[str] = []

    def fail(run: Run, *_: Any, **__: Any) -> Any:
        asked.append(run.task)
        raise error

    monkeypatch.setattr(module, "fill_caches", fail)

    with pytest.raises(type(error)):
        precompute_config(Run(two()))
    assert asked == ["burgers1d"]


def test_every_task_is_planned_in_the_memory_that_the_others_leave(two: Configure) -> None:
    config = two()
    plans = plan_tasks(Run(config))
    alone = plan_config(Run(two("data.task=long")))

    printed: Any = plans.to_json()
    assert list(printed["tasks"]) == ["burgers1d", "long"]
    assert printed["tiers"]["host"] == 18
    assert printed["missing"] == 18
    assert printed["tasks"]["long"]["tiers"] == alone.plan.records_by_tier()
    assert "burgers1d: " in plans.to_json()["reason"]


def test_a_cache_of_any_task_explains_itself(two: Configure, tmp_path: Path) -> None:
    precompute_config(Run(two()))
    path = tmp_path / "c.yaml"
    path.write_text(two().to_yaml())

    for name in ("burgers1d_train", "long_train"):
        folder = tmp_path / "data" / "latent_cache" / name
        assert explain(next(folder.iterdir()), path).same
    changed = explain(next(folder.iterdir()), path, overrides=["tasks.long.encoder.seed=9"])
    assert any("encoder" in difference.entry for difference in changed.differences)


def test_equal_encoders_are_shared(two: Configure) -> None:
    run = Run(two("tasks.long.encoder.patch_size=4"))
    first, second = (build_jobs(part, ["train", "val"]) for part in run.parts())

    assert first[0].encoder is first[1].encoder
    assert first[0].encoder is not second[0].encoder
    again = build_jobs(run.for_task("long"), ["val"])
    assert again[0].encoder is second[0].encoder


def test_the_settings_of_a_mixture_are_described() -> None:
    text = describe_settings()

    for name in ("training.mixture", "training.task_weights", "`tasks`"):
        assert name in text
