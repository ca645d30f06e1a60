from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import pytest

from stoker.errors import ConfigError, Interrupted
from stoker.plan import MEMORY_LEDGER, Resources
from stoker.run.context import FILE, Run, last_step_s
from stoker.run.loaders import make_loader, make_val_loader
from stoker.run.plan import plan_config
from stoker.run.precompute import fill_caches
from stoker.run.train import loop_settings, prepare, train_config, train_prepared
from stoker.schema import Json, canonical_json
from tests.conftest import write_burgers
from tests.run.conftest import Configure


class Events:
    """What the loop told, and a SIGTERM after the first epoch if wanted."""

    def __init__(self, *, stop: bool = False) -> None:
        self.kinds: list[str] = []
        self.stop = stop

    def __call__(self, kind: str, facts: Mapping[str, Json]) -> None:
        self.kinds.append(kind)
        if kind == "epoch" and self.stop:
            os.kill(os.getpid(), signal.SIGTERM)


def test_training_beats_persistence_and_reports_both(configure: Configure) -> None:
    result = train_config(Run(configure("training.epochs=8", "model.width=32", "training.lr=1e-2")))

    report = result.report
    assert report.val_nrmse is not None
    assert report.persistence_nrmse is not None
    assert report.val_nrmse < report.persistence_nrmse
    assert result.pictures == ["runs/burgers1d/curves.png", "runs/burgers1d/report.html"]
    assert result.to_json()["caches"][0]["split"] == "train"  # type: ignore[index,call-overload]


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(
    configure: Configure, tmp_path: Path
) -> None:
    whole = train_config(Run(configure("training.run_dir=whole")))
    with pytest.raises(Interrupted):
        train_config(Run(configure()), on_event=Events(stop=True))
    events = Events()

    resumed = train_config(Run(configure()), on_event=events)

    assert "resume" in events.kinds
    assert resumed.report.steps == whole.report.steps
    assert resumed.report.val_nrmse == whole.report.val_nrmse


def test_a_run_writes_nothing_into_its_folder_once_it_is_done(configure: Configure) -> None:
    """By then it may be another run's."""
    diary = Run(configure()).run_dir / FILE
    told: list[bool] = []

    def another_takes_over(kind: str, _facts: Mapping[str, Json]) -> None:
        if kind == "done":
            told.append(json.loads(diary.read_text())["finished"])
            diary.write_text("another's")

    train_config(Run(configure()), on_event=another_takes_over)

    assert told == [True]
    assert diary.read_text() == "another's"


def test_a_run_killed_after_its_last_step_is_finished_when_it_is_taken_up(configure: Configure) -> None:
    first = train_config(Run(configure("training.epochs=1")))
    diary = Run(configure()).run_dir / FILE
    diary.write_text(canonical_json({**json.loads(diary.read_text()), "finished": False}))

    again = train_config(Run(configure("training.epochs=1")))

    assert (again.report.steps, again.first_batch_s) == (first.report.steps, 0.0)
    assert again.report.val_nrmse == first.report.val_nrmse
    assert json.loads(diary.read_text())["finished"] is True


def test_a_finished_run_begins_anew(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stoker")
    train_config(Run(configure()))
    assert "begins anew" not in caplog.text
    events = Events()

    again = train_config(Run(configure()), on_event=events)

    assert "resume" not in events.kinds
    assert again.report.steps == 12
    assert "checkpoints.previous" in caplog.text


@pytest.mark.parametrize("change", ["training.lr=1e-4", "latent.dim=6", "model.width=32", "training.seed=5"])
def test_other_settings_never_resume_an_interrupted_run(configure: Configure, change: str) -> None:
    with pytest.raises(Interrupted):
        train_config(Run(configure()), on_event=Events(stop=True))
    events = Events()

    train_config(Run(configure(change)), on_event=events)

    assert "resume" not in events.kinds


def test_another_tier_or_batch_free_setting_still_resumes(configure: Configure) -> None:
    with pytest.raises(Interrupted):
        train_config(Run(configure()), on_event=Events(stop=True))
    events = Events()

    train_config(Run(configure("training.tier=disk")), on_event=events)

    assert "resume" in events.kinds


def test_the_time_of_a_step_is_not_thinned_by_the_steps_of_earlier_sessions(configure: Configure) -> None:
    """The diary says what the steps that were timed took, however many sessions there were."""
    with pytest.raises(Interrupted):
        train_config(Run(configure()), on_event=Events(stop=True))
    epochs: list[Mapping[str, Json]] = []

    resumed = train_config(
        Run(configure()), on_event=lambda kind, facts: epochs.append(facts) if kind == "epoch" else None
    )

    assert len(epochs) == 1
    assert last_step_s(Run(configure()), resumed.caches[0].fields) == resumed.report.step_s
    state = json.loads((newest(Run(configure()).run_dir / "checkpoints") / "state.json").read_text())
    progress = state["state"]["progress"]
    assert (resumed.report.steps, progress["timed"]) == (12, 11)  # the pass of one step was broken off
    assert resumed.report.step_s == pytest.approx(progress["step_s"] / 11)


def newest(checkpoints: Path) -> Path:
    return max(checkpoints.glob("last-*"))


def test_a_run_leaves_the_time_of_its_step(configure: Configure) -> None:
    schema = fill_caches(Run(configure()), ["train"])[0].fields
    assert last_step_s(Run(configure()), schema) is None

    train_config(Run(configure()))

    assert 0 < (last_step_s(Run(configure()), schema) or 0) < 60


def test_the_time_of_a_step_counts_for_no_other_work(configure: Configure) -> None:
    train_config(Run(configure("training.max_steps=2")))

    assert plan_config(Run(configure())).plan.step_s is not None
    for change in ("model.width=32", "training.batch_size=8", "latent.dim=4"):
        assert plan_config(Run(configure(change))).to_json()["predicted_stall"] is None, change


def test_a_damaged_diary_is_no_diary(configure: Configure) -> None:
    schema = train_config(Run(configure("training.max_steps=2"))).caches[0].fields
    (Run(configure()).run_dir / "run.json").write_text("{")

    assert last_step_s(Run(configure()), schema) is None
    train_config(Run(configure("training.max_steps=2")))


def test_startup_times_add_up(configure: Configure) -> None:
    startup = train_config(Run(configure("training.max_steps=2")), started=None).to_json()["startup"]

    assert isinstance(startup, dict)
    assert 0 < startup["cache_s"] <= startup["total_s"]  # type: ignore[operator]
    assert 0 < startup["first_batch_s"] <= startup["total_s"]  # type: ignore[operator]


def test_the_validation_split_is_refused_for_training(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.split is 'valid'.*data\.split=train"):
        train_config(Run(configure("data.split=valid")))
    assert not (tmp_path / "data").exists()


def test_validation_rolls_out_whole_trajectories_whatever_training_takes(configure: Configure) -> None:
    config = configure("training.start_every=4", "training.time_stride=2", "training.max_steps=2")
    loader = make_val_loader(Run(config), prepare(Run(config)).caches[1].cache)

    starts = sorted({int(start) for batch in loader for start in batch.index[:, 1]})
    report = train_config(Run(config)).report

    assert starts == [0, 2, 4, 6]
    assert report.rollout_persistence_nrmse is not None
    assert report.persistence_nrmse is not None
    assert report.rollout_persistence_nrmse > report.persistence_nrmse


def test_validation_is_planned_into_the_memory_that_training_leaves(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has filled anything when the other is planned, so both see the same free memory."""
    config = configure("training.reserve_bytes=0")
    train_cache, val_cache = (result.cache for result in prepare(Run(config)).caches)
    size = make_loader(Run(config), train_cache).plan.rows[1].bytes
    free = Resources(host_bytes=size + 8, host_total_bytes=2**40, host_limit="machine memory")
    monkeypatch.setattr("stoker.loader.design.probe", lambda **_: free)
    monkeypatch.setattr(MEMORY_LEDGER, "_claims", WeakSet())  # without what other tests still hold

    assert make_val_loader(Run(config), val_cache).plan.tier == "host"
    loader = make_loader(Run(config), train_cache)
    assert loader.plan.tier == "host"
    assert make_val_loader(Run(config), val_cache).plan.tier == "disk"
    del loader
    assert make_val_loader(Run(config), val_cache).plan.tier == "host"


def test_settings_reach_the_loader_and_the_loop(configure: Configure) -> None:
    config = configure(
        "training.time_stride=2", "training.rollout_horizon=3", "training.grad_clip=null",
        "training.early_stop_patience=4", "training.checkpoint_every=2",
    )  # fmt: skip

    batch = next(iter(make_loader(Run(config), prepare(Run(config)).caches[0].cache)))
    settings = loop_settings(Run(config), 7, resume=False)

    assert tuple(batch.z0.shape) == (16, 4, 8)
    assert batch.future is not None
    assert tuple(batch.future.shape) == (16, 2, 4, 8)
    assert (settings.stride, settings.patience, settings.checkpoint_every) == (2, 4, 14)
    assert settings.grad_clip is None


def test_parameters_arrive_as_conditions(configure: Configure, tmp_path: Path) -> None:
    for nu in (0.01, 0.1):
        write_burgers(tmp_path / f"sols_Nu{nu}.h5", nu=nu, samples=10)

    result = train_config(Run(configure("data.files=sols_*.h5", "data.seed=1", "training.max_steps=2")))

    loader = make_loader(Run(configure()), result.caches[0].cache)
    values = {round(float(v), 3) for batch in loader for v in batch.cond["Nu"][:, 0]}
    assert values == {0.01, 0.1}


def test_without_a_free_gpu_the_device_is_the_cpu(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Run(configure("training.device=auto")).device == "cpu"
    assert Run(configure("training.device=cuda:1")).device == "cuda:1"


@pytest.mark.parametrize("cached_before", [True, False], ids=["second run", "first run"])
def test_damage_met_while_training_is_repaired_and_counted(configure: Configure, cached_before: bool) -> None:
    overrides = ("training.tier=disk", "precompute.workers=1", "verify.spot_check=3")
    sound = train_config(
        Run(configure(*overrides, "training.latent_cache_dir=sound", "training.run_dir=sound"))
    )
    config = configure(*overrides)
    if cached_before:
        prepare(Run(config))
    prepared = prepare(Run(config))
    cache = prepared.caches[0].cache
    shard = cache.path / cache.index.shards[0].file
    with shard.open("r+b") as file:
        file.seek(cache.shard(0).columns["latent"].offset + 7)
        file.write(b"\xff")

    result = train_prepared(Run(config), prepared, started=time.monotonic())

    assert result.repaired == 1
    assert result.to_json()["repaired"] == 1
    assert sound.spot_check is not None
    assert sound.spot_check.wanted == 3
    assert not sound.spot_check.different
    assert result.report.val_nrmse == sound.report.val_nrmse
    assert not list(cache.path.parent.parent.glob(".workers/*"))
