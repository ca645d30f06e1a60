"""The trainer of whole records: broken off anywhere it ends with the same weights, and never begins anew."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.errors import ConfigError, CorruptError, DivergedError, Interrupted, StaleStateError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.run.fitting import FitReport, fit
from stoker.store import Cache
from stoker.train.config import Schedule, TrainConfig
from stoker.train.loop import learning_rate
from stoker.train.state import load_checkpoint, save_checkpoint
from tests.loader.caches import write_cache

ROWS, BATCH, STEPS = 60, 16, 4
SETTINGS = TrainConfig(epochs=3, lr=1e-2, warmup=0.2, save_every_s=0.0)


class Line:
    """A line through noise, with dropout, so that random state counts."""

    def __init__(self, width: int = 8, before_step: Callable[[int], None] = lambda _: None) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1))
        self.before_step = before_step
        self.steps = 0

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.steps += 1
        self.before_step(self.steps)
        return (self.model(batch["x"]).squeeze(-1) - batch["y"]).square()

    def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            found = [(self.model(batch["x"]).squeeze(-1) - batch["y"]).square() for batch in batches]
        self.model.train()
        return {"val_loss": float(torch.cat(found).mean())}

    @property
    def weights(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    return write_cache(tmp_path_factory.mktemp("fit"), {"x": x, "y": x.sum(1)})


def run(
    cache: Cache,
    folder: Path | None,
    lesson: Line | None = None,
    settings: TrainConfig = SETTINGS,
    **given: Any,
) -> tuple[Line, FitReport, list[tuple[str, Any]]]:
    lesson, events = lesson or Line(), list[tuple[str, Any]]()
    meter = StallMeter()
    train, val = Loader(cache, BATCH, meter=meter, shuffle=True), Loader(cache, BATCH, shuffle=False)
    report = fit(
        lesson, train, val, settings, folder=folder, meter=meter,
        on_event=lambda kind, facts: events.append((kind, dict(facts))), **given,
    )  # fmt: skip
    return lesson, report, events


def of(events: list[tuple[str, Any]], kind: str) -> list[Any]:
    return [facts for found, facts in events if found == kind]


def stop_before(step: int) -> Callable[[int], None]:
    return lambda now: signal.raise_signal(signal.SIGTERM) if now == step else None


def die_before(step: int) -> Callable[[int], None]:
    def die(now: int) -> None:
        if now == step:
            raise KeyError("a crash")

    return die


@pytest.mark.parametrize("end", [stop_before, die_before])
@pytest.mark.parametrize("step", [2, 4, 12])
def test_broken_off_at_any_step_it_ends_with_the_same_weights_and_figures(
    cache: Cache, tmp_path: Path, end: Callable[[int], Any], step: int
) -> None:
    whole, _, told = run(cache, tmp_path / "whole")
    with pytest.raises((Interrupted, KeyError)):
        run(cache, tmp_path / "broken", Line(before_step=end(step)))
    torch.manual_seed(99)

    again, report, later = run(cache, tmp_path / "broken")

    assert all(map(torch.equal, again.weights, whole.weights))
    untimed = ("stall", "samples_per_s", "seconds", "eval_seconds")
    figures = [{k: v for k, v in row.items() if k not in untimed} for row in of(told, "epoch")]
    assert {k: v for k, v in report.row.items() if k not in untimed} == figures[-1]
    assert [row["train_loss"] for row in of(later, "epoch")] == [row["train_loss"] for row in figures][
        -len(of(later, "epoch")) :
    ]
    assert end is die_before or again.steps == 3 * STEPS - step, "nothing that was done is done again"


def test_a_checkpoint_of_an_earlier_version_is_continued(cache: Cache, tmp_path: Path) -> None:
    """It lacks names that came later. Its batches, all of the last pass, still wait to be judged."""
    whole, _, _ = run(cache, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(cache, tmp_path / "old", Line(before_step=stop_before(3 * STEPS)))
    found = load_checkpoint(newest(tmp_path / "old")[0])
    known = ("step", "epoch", "batch", "examples", "sums", "best", "best_epoch", "epochs", "extended", "row")
    progress = {name: found.state["progress"][name] for name in known}
    state = {**found.state, "progress": progress, "settings": {"epochs": 3}}
    save_checkpoint(tmp_path / "old" / "checkpoints", "last", replace(found, state=state))

    again, report, events = run(cache, tmp_path / "old")

    assert again.steps == 0
    assert report.epochs == 3
    assert [row["epoch"] for row in of(events, "epoch")] == [3]
    assert all(map(torch.equal, again.weights, whole.weights))


def test_a_signal_while_it_is_judged_is_heeded_and_judging_done_again(cache: Cache, tmp_path: Path) -> None:
    class Stopped(Line):
        def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
            signal.raise_signal(signal.SIGINT)
            return super().judge(batches)

    whole, _, _ = run(cache, tmp_path / "whole")
    with pytest.raises(Interrupted, match="SIGINT after step 4 in epoch 1"):
        run(cache, tmp_path / "broken", Stopped())

    again, _, events = run(cache, tmp_path / "broken")

    assert [row["epoch"] for row in of(events, "epoch")] == [1, 2, 3]
    assert again.steps == 2 * STEPS
    assert all(map(torch.equal, again.weights, whole.weights))


def damage(folder: Path, name: str = "model.safetensors") -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def newest(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("last-*"), reverse=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(cache: Cache, tmp_path: Path) -> None:
    whole, _, _ = run(cache, tmp_path / "whole")
    run(cache, tmp_path / "hurt", settings=replace(SETTINGS, epochs=3))
    hurt = newest(tmp_path / "hurt")[0]
    damage(hurt)
    for best in (tmp_path / "hurt" / "checkpoints").glob("best-*12"):
        damage(best)

    again, _, events = run(cache, tmp_path / "hurt")

    assert any(hurt.name in skipped["why"] for skipped in of(events, "skip"))
    assert [resumed["epoch"] for resumed in of(events, "resume")] == [3], "it begins here"
    assert all(map(torch.equal, again.weights, whole.weights))


def test_it_fails_when_no_checkpoint_is_whole(cache: Cache, tmp_path: Path) -> None:
    run(cache, tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        damage(folder, "state.json")

    with pytest.raises(CorruptError, match="none of 3 checkpoints is complete"):
        run(cache, tmp_path)


def test_it_fails_when_checkpoints_are_gone_that_there_were(cache: Cache, tmp_path: Path) -> None:
    run(cache, tmp_path / "new", expected=False)

    with pytest.raises(CorruptError, match="none of 0 checkpoints"):
        run(cache, tmp_path / "gone", expected=True)


def test_the_figures_of_an_epoch_are_told_after_its_checkpoint(cache: Cache, tmp_path: Path) -> None:
    _, _, events = run(cache, tmp_path)

    kinds = [kind for kind, _ in events if kind in ("epoch", "checkpoint")]
    assert kinds == ["checkpoint", "epoch"] * 3
    row = of(events, "epoch")[-1]
    assert row["tier"] == "host"
    assert 0 <= row["stall"] <= 1
    assert row["samples_per_s"] > 0
    assert row["grad_norm"] > 0


def test_quick_epochs_are_not_saved_one_by_one_but_the_best_and_the_last_are(
    cache: Cache, tmp_path: Path
) -> None:
    rare = replace(SETTINGS, save_every_s=1e9, epochs=6)
    whole, _, told = run(cache, tmp_path / "whole", settings=replace(rare, save_every_s=0.0))
    _, report, events = run(cache, tmp_path / "rare", settings=rare)
    saved = [(kind, facts["step"]) for kind, facts in events if kind in ("best", "checkpoint")]
    assert saved == [("best", report.best_epoch * STEPS), ("checkpoint", 6 * STEPS)]
    best = [f"{name}/checkpoints/best-{report.best_epoch * STEPS:09d}" for name in ("whole", "rare")]
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in best}) == 1

    with pytest.raises(KeyError):
        run(cache, tmp_path / "killed", Line(before_step=die_before(14)), settings=rare)
    again, _, later = run(cache, tmp_path / "killed", settings=rare)
    assert all(map(torch.equal, again.weights, whole.weights)), "nothing was saved, so all is done again"
    assert len(of(told, "epoch")) == len(of(later, "epoch"))


def test_more_epochs_go_on_from_the_end_with_fresh_patience(cache: Cache, tmp_path: Path) -> None:
    """A bound that no epoch meets ends training after `patience` epochs, and again after an extension."""
    patient = replace(SETTINGS, epochs=9, patience=2, delta=1e9)
    _, first, _ = run(cache, tmp_path, settings=patient)
    again, more, events = run(cache, tmp_path, settings=replace(patient, epochs=10))

    assert (first.epochs, more.epochs) == (3, 5), "the first epoch is the best there was, whatever the bound"
    assert again.steps == 2 * STEPS
    assert of(events, "resume")[0]["row"]["epoch"] == 3


def test_a_finished_run_answers_again_without_a_step(cache: Cache, tmp_path: Path) -> None:
    whole, first, _ = run(cache, tmp_path)

    again, report, _ = run(cache, tmp_path)

    assert again.steps == 0
    assert report == first
    assert all(map(torch.equal, again.weights, whole.weights))


def test_the_first_loss_that_is_not_finite_ends_it_by_name(cache: Cache, tmp_path: Path) -> None:
    class Poisoned(Line):
        def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
            losses = super().losses(batch)
            return torch.where(batch["index"] == 11, torch.nan, losses)

    with pytest.raises(DivergedError, match=r"epoch 1, step \d, first at sample 11"):
        run(cache, tmp_path, Poisoned())
    assert not newest(tmp_path)


def test_a_checkpoint_of_another_network_is_refused(cache: Cache, tmp_path: Path) -> None:
    run(cache, tmp_path)

    with pytest.raises(StaleStateError, match=r"is of another network: 0\.bias"):
        run(cache, tmp_path, Line(width=9))


def test_the_rate_rises_then_falls_or_stays() -> None:
    def rates(schedule: Schedule) -> list[float]:
        return [learning_rate(step, 10, peak=1e-2, warmup=0.2, schedule=schedule) for step in range(10)]

    falls, stays = rates("cosine"), rates("constant")
    assert falls[0] < falls[1] == 1e-2 > falls[5] > falls[9]
    assert stays == [5e-3, *[1e-2] * 9]


def test_patience_needs_something_to_judge_by(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="patience is 1, and early stopping needs a validation set"):
        fit(Line(), Loader(cache, BATCH, shuffle=True), None, replace(SETTINGS, patience=1))

    report = fit(Line(), Loader(cache, BATCH, shuffle=True), None, SETTINGS)
    assert (report.epochs, report.best, report.best_epoch) == (3, None, 0)
