"""Settings of single tasks, over those of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_config, make_config
from stoker.errors import ConfigError

FILE = """
data: {root: "raw/${data.task}", splits: {train: 0.5, val: 0.5}}
tasks:
  b: {data: {preset: well, fields: {u: n t x}}, encoder.patch_size: [8, 8]}
  a: {data.preset: pdebench, training: {batch_size: 7}}
training: {batch_trajectories: 3, run_dir: "runs/${data.task}"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    return path


def test_each_task_has_its_own_settings_over_those_of_all(file: Path) -> None:
    config = load_config(file)
    a, b = config.for_task("a"), config.for_task("b")

    assert config.data.tasks == ("b", "a")
    assert (a.data.tasks, b.data.tasks) == (("a",), ("b",))
    assert (a.data.preset, b.data.preset) == ("pdebench", "well")
    assert (a.encoder.patch_size, b.encoder.patch_size) == (4, (8, 8))
    assert b.data.fields == {"u": "n t x"}
    assert a.data.splits == b.data.splits == {"train": 0.5, "val": 0.5}
    assert (a.training.batch_size, a.training.batch_trajectories) == (7, None)
    assert b.training.batch_trajectories == 3


def test_another_setting_can_name_the_task(file: Path) -> None:
    config = load_config(file)

    assert config.for_task("a").data.root == "raw/a"
    assert config.training.run_dir == "runs/b+a"


def test_the_command_line_wins_in_a_task_too_and_picks_tasks(file: Path) -> None:
    config = load_config(file, ["tasks.b.encoder.patch_size=2", "tasks.b.encoder.seed=5", "data.task=b"])

    assert (config.for_task("b").encoder.patch_size, config.for_task("b").encoder.seed) == (2, 5)
    assert config.for_task("b").data.preset == "well"
    assert config.notes == (f"{file}: tasks.a has no effect: data.task is b",)


def test_settings_of_tasks_survive_being_written_and_read_again(file: Path) -> None:
    config = load_config(file)
    again = make_config(config.to_dict(), where="again")

    for task in ("a", "b"):
        assert again.for_task(task).encoder == config.for_task(task).encoder
        assert again.for_task(task).data.preset == config.for_task(task).data.preset


def test_a_task_without_settings_of_its_own_has_those_of_all() -> None:
    config = load_config(None, ["data.task=[a,b]"])

    assert config.for_task("a").data.tasks == ("a",)
    assert load_config(None).for_task("burgers1d").data.model_fields_set == set()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tasks.a.training.lr=1", "training.lr cannot be set for one task"),
        ("tasks.a.data.task=z", "data.task cannot be set for one task"),
        ("tasks.a.data.presett=well", "did you mean data.preset"),
        ("tasks.a.data.preset=3", "tasks.a: data.preset is 3. Expected pdebench or well"),
        ("tasks.a=3", "Expected settings, as tasks:"),
        ("tasks=3", "Expected settings by task, as tasks:"),
    ],
)
def test_what_no_task_can_have_is_refused(file: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(file, [override])


def test_a_block_of_a_misspelt_task_is_said_with_the_name_that_was_meant(file: Path) -> None:
    file.write_text("data: {task: [burgers1d, secnd]}\ntasks: {burgers1d: {}, second: {data: {limit: 5}}}")

    (note,) = load_config(file).notes

    assert "tasks.second has no effect: data.task is burgers1d, secnd" in note
    assert "Did you mean data.task second for secnd, or tasks.secnd here?" in note


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.task_weights.bb=2", "task_weights has bb, but data.task is b, a. Leave it out"),
        ("training.task_weights={a: 1}", "task_weights has no entry for b"),
        ("training.task_weights={bee: 1, a: 1}", "task_weights has bee"),
        (
            "training.mixture=concat",
            "task_weights need training.mixture=weighted, and training.mixture is concat",
        ),
    ],
)
def test_weights_that_do_not_fit_the_tasks_are_refused_at_once(file: Path, override: str, said: str) -> None:
    file.write_text(FILE + "training.mixture: weighted\ntraining.task_weights: {a: 1, b: 3}\n")
    assert load_config(file).training.task_weights == {"a": 1, "b": 3}
    assert load_config(file, ["data.task=a"]).data.tasks == ("a",)

    with pytest.raises(ConfigError, match=said):
        load_config(file, [override])


def test_a_misspelt_weight_is_answered_with_its_task() -> None:
    settings = {"data.task": ["burgers1d", "second"], "training.mixture": "weighted"}

    with pytest.raises(ConfigError, match=r"has secnd, .*\. Did you mean second\?"):
        make_config({**settings, "training.task_weights": {"burgers1d": 1, "secnd": 2}}, where="here")
