from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError, DivergedError, Interrupted, RecordError, ResourceError, StaleStateError
from stoker.monitor.meter import StallMeter
from stoker.train.config import TrainConfig, TrainReport
from stoker.train.loop import learning_rate
from stoker.train.run import train
from stoker.train.state import MetricsLog, load_checkpoint
from tests.kit import forked as subprocess
from tests.train.fakes import FakeBatch, FakeLoader, waves

SMALL: dict[str, Any] = {
    "epochs": 3, "width": 8, "depth": 1, "heads": 2, "lr": 0.01, "log_every": 1, "checkpoint_every": 2,
}  # fmt: skip
STEPS = 18
"""6 trajectories of 8 windows, 8 a batch, 3 epochs."""

Sink = Callable[[str, Mapping[str, Any]], None]


class Stopped(Exception):
    """Stands for a kill: raised in the middle of a run, past every handler."""


def run(folder: Path, *, sink: Sink | None = None, samples: int = 6, **changes: Any) -> TrainReport:
    nu = {"nu": torch.linspace(0, 1, 6)}
    loader = FakeLoader(waves(samples), cond=nu)
    val = FakeLoader(waves(2, seed=1), shuffle=False, cond=nu)
    return train(loader, val, TrainConfig(**{**SMALL, **changes}), folder, on_event=sink)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("last-*"))[-1]
    return dict(load_checkpoint(newest).model)


def at_step(step: int, act: Callable[[], object]) -> Sink:
    def sink(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step" and facts["step"] == step:
            act()

    return sink


def die() -> None:
    raise Stopped


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.mark.draws
def test_training_beats_persistence_and_leaves_everything(tmp_path: Path) -> None:
    seen: list[str] = []

    report = run(tmp_path / "r", epochs=25, checkpoint_every=100, sink=lambda kind, facts: seen.append(kind))

    assert report.val_nrmse is not None
    assert report.persistence_nrmse is not None
    assert report.val_nrmse < 0.5 * report.persistence_nrmse
    assert report.rollout_nrmse is not None
    assert (report.epochs, report.steps) == (25, 150)
    assert "first_batch_s" in report.startup
    assert set(seen) == {"ready", "start", "step", "epoch", "checkpoint", "best", "done"}
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<svg" in page
    fetched = re.findall(r"(?:src|href|url)\W{1,3}https?:", page.replace("xlink:href", "href"))
    assert not fetched  # it needs nothing from anywhere
    assert (tmp_path / "r" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_equal_settings_give_equal_weights(whole: Path, tmp_path: Path) -> None:
    run(tmp_path)

    assert same(weights(tmp_path), weights(whole))


@pytest.mark.parametrize(
    ("every", "step"), [(1, 1), (1, 2), (1, 6), (1, 7), (1, 18), (4, 5), (4, 12), (4, 13), (6, 12), (6, 17)]
)
def test_killed_at_any_step_a_run_resumes_to_the_same_bits(
    whole: Path, tmp_path: Path, step: int, every: int
) -> None:
    with pytest.raises(Stopped):
        run(tmp_path, checkpoint_every=every, sink=at_step(step, die))
    report = run(tmp_path, checkpoint_every=every, resume=True)

    assert same(weights(tmp_path), weights(whole))
    assert (report.steps, report.epochs) == (STEPS, 3)
    rows = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"step"' in line]
    assert sum('"kind": "step"' in line for line in rows) == STEPS
    assert sum('"kind": "epoch"' in line for line in rows) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_of_that_very_step(
    whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with pytest.raises(Interrupted, match=f"{number.name} after step 9 in epoch 2.*resume=True"):
        run(tmp_path, checkpoint_every=1000, sink=at_step(9, lambda: os.kill(os.getpid(), number)))
    assert (tmp_path / "checkpoints" / "last-000000009").is_dir()

    run(tmp_path, resume=True)

    assert same(weights(tmp_path), weights(whole))


@pytest.mark.parametrize("pass_number", [1, 3])
def test_a_signal_during_validation_is_heeded_and_validation_done_again(
    whole: Path, tmp_path: Path, pass_number: int
) -> None:
    class Signals(FakeLoader):
        passes = 0

        def __iter__(self) -> Iterator[FakeBatch]:
            self.passes += 1
            if self.passes == pass_number:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__iter__()

    nu = {"nu": torch.linspace(0, 1, 6)}
    val = Signals(waves(2, seed=1), shuffle=False, cond=nu)
    with pytest.raises(Interrupted):
        train(FakeLoader(waves(), cond=nu), val, TrainConfig(**SMALL), tmp_path)
    report = run(tmp_path, resume=True)

    assert same(weights(tmp_path), weights(whole))
    assert report.epochs == 3
    assert report.val_nrmse is not None


def test_a_resumed_run_that_is_done_only_reports(whole: Path, tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path, resume=True)

    assert (again.steps, again.val_nrmse) == (first.steps, first.val_nrmse)
    assert same(weights(tmp_path), weights(whole))


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_taken(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path, checkpoint_every=1, sink=at_step(9, die))
    newest = sorted((tmp_path / "checkpoints").glob("last-*"))[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    seen: list[tuple[str, Mapping[str, Any]]] = []

    run(tmp_path, resume=True, sink=lambda kind, facts: seen.append((kind, facts)))

    assert seen[0][0] == "skip"
    assert newest.name in seen[0][1]["why"]
    assert same(weights(tmp_path), weights(whole))


def test_resume_without_a_checkpoint_begins(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, resume=True)

    assert same(weights(tmp_path), weights(whole))


def test_a_new_run_moves_the_earlier_one_aside(tmp_path: Path) -> None:
    (tmp_path / "checkpoints-of-mine").mkdir()
    for epochs in (1, 2, 1):
        run(tmp_path, epochs=epochs)

    kinds = [row["kind"] for row in MetricsLog(tmp_path / "metrics.jsonl").rows()]
    assert kinds == ["start", *["step"] * 6, "epoch"]
    assert (tmp_path / "metrics.previous.jsonl").exists()
    assert list((tmp_path / "checkpoints.previous").glob("last-*12"))
    assert list((tmp_path / "checkpoints.previous-1").glob("last-*06")), "the one before is kept as well"
    assert len(MetricsLog(tmp_path / "metrics.previous-1.jsonl").rows()) == 8
    assert (tmp_path / "checkpoints-of-mine").is_dir()


def test_resuming_with_another_operator_is_refused(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)

    with pytest.raises(StaleStateError, match=r"'width': 8.*'width': 16"):
        run(tmp_path, width=16, resume=True)


def test_resuming_with_other_settings_says_which(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    seen: dict[str, Mapping[str, Any]] = {}

    report = run(tmp_path, resume=True, sink=seen.__setitem__, epochs=2)

    assert seen["resume"]["changed"] == {"epochs": [1, 2]}
    assert seen["resume"]["row"]["epoch"] == 1, "whoever was killed before it was told is told now"
    assert (report.epochs, report.steps) == (2, 12)


def test_resuming_under_other_numerics_says_which(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    seen: dict[str, Mapping[str, Any]] = {}
    torch.set_float32_matmul_precision("high")

    try:
        run(tmp_path, resume=True, sink=seen.__setitem__, epochs=2, amp=True)
    finally:
        torch.set_float32_matmul_precision("highest")

    assert seen["resume"]["changed"] == {
        "epochs": [1, 2],
        "amp": [None, True],
        "dtype": ["float32", "bfloat16"],
        "float32_matmul": ["ieee", "tf32"],
    }


def test_the_log_says_how_each_session_computed(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    run(tmp_path, epochs=2, resume=True, amp=True)

    starts = [row for row in MetricsLog(tmp_path / "metrics.jsonl").rows() if row["kind"] == "start"]

    assert [(row["step"], row["dtype"], row["float32_matmul"]) for row in starts] == [
        (0, "float32", "ieee"),
        (6, "bfloat16", "ieee"),
    ]
    assert starts[0]["threads"] == 1
    assert starts[0]["torch"] == torch.__version__
    assert "From step 6 on" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("epochs", "every"), [(3, 1), (40, 6)])
def test_a_short_run_has_about_forty_points(tmp_path: Path, epochs: int, every: int) -> None:
    run(tmp_path, epochs=epochs, log_every=None, checkpoint_every=1000)

    steps = [row["step"] for row in MetricsLog(tmp_path / "metrics.jsonl").rows() if row["kind"] == "step"]

    assert steps == list(range(every, 6 * epochs + 1, every))


def test_two_trainings_in_one_folder_are_not_let_at_it(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(ConfigError, match=r"process \d+ on .* is training in .*training\.run_dir"):
            run(tmp_path, epochs=1)

    report = run(tmp_path, sink=at_step(5, second))

    assert report.steps == STEPS
    assert not (tmp_path / "checkpoints.previous").exists()


def test_what_a_kill_left_half_written_is_swept_by_the_next_run(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    (tmp_path / ".metrics.jsonl.0a1b2c3d.part").write_text("{")
    half = tmp_path / "checkpoints" / ".last-000000012.0a1b2c3d.part"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")

    run(tmp_path, epochs=2, resume=True)

    assert not list(tmp_path.rglob("*.part"))


def test_a_run_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")

    for folder in (tmp_path / "runs", tmp_path / "runs" / "mine"):
        with pytest.raises(ConfigError, match="a file is in its way"):
            run(folder)


def test_patience_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="patience is 2, but nothing is validated"):
        train(FakeLoader(waves()), None, TrainConfig(**SMALL, patience=2), tmp_path)


def test_max_steps_ends_in_the_middle_of_a_pass_and_can_go_on(tmp_path: Path) -> None:
    report = run(tmp_path, max_steps=8)
    assert (report.steps, report.epochs) == (8, 1)
    assert report.val_nrmse is not None

    report = run(tmp_path, max_steps=12, resume=True)
    assert (report.steps, report.epochs) == (12, 2)


def test_nan_in_a_sample_stops_before_it_reaches_a_weight(tmp_path: Path) -> None:
    latent = waves()
    loader = FakeLoader(latent)

    def poison(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step" and facts["step"] == 7:
            latent[4, 3] = float("nan")

    with pytest.raises(DivergedError, match=r"epoch 2, step \d+, first at sample 4, time step [23]"):
        train(loader, None, TrainConfig(**SMALL), tmp_path, on_event=poison)

    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(tmp_path).values())


def test_nan_in_the_first_batches_is_blamed_on_its_sample(tmp_path: Path) -> None:
    """Scales learnt from it would make every example NaN, and the first one would be blamed."""
    latent = waves()
    latent[4, 3] = float("nan")

    with pytest.raises(DivergedError, match=r"sample 4, time step [23] holds a NaN .*cache\[4\]"):
        train(FakeLoader(latent), None, TrainConfig(**SMALL), tmp_path)
    nu = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, float("inf")])
    with pytest.raises(DivergedError, match=r"sample 5, time step \d holds"):
        train(FakeLoader(waves(), cond={"nu": nu}), None, TrainConfig(**SMALL), tmp_path)


def test_an_empty_validation_loader_is_refused(tmp_path: Path) -> None:
    """The error over nothing is 0, which no epoch could better."""
    with pytest.raises(ConfigError, match="validation loader has no batch"):
        train(FakeLoader(waves()), FakeLoader(waves(2, 1)), TrainConfig(**SMALL), tmp_path)


def test_training_without_validation(tmp_path: Path) -> None:
    report = train(FakeLoader(waves()), None, TrainConfig(**SMALL), tmp_path)

    assert (report.val_nrmse, report.persistence_nrmse, report.rollout_nrmse) == (None, None, None)
    assert report.epochs == 3


def test_early_stop_ends_after_patience_epochs_without_progress(tmp_path: Path) -> None:
    report = run(tmp_path, epochs=50, patience=2, lr=1e-30)

    assert report.epochs == 3


def test_a_pass_that_is_shorter_than_was_thought_is_an_epoch(tmp_path: Path) -> None:
    class Longer(FakeLoader):
        hoped = 1

        def __len__(self) -> int:
            return super().__len__() + self.hoped

        def __iter__(self) -> Iterator[FakeBatch]:
            self.hoped = 0
            yield from super().__iter__()
            self.hoped = 1

    report = train(Longer(waves()), None, TrainConfig(**SMALL), tmp_path)
    assert (report.epochs, report.steps) == (3, STEPS)
    ends = [row["step"] for row in MetricsLog(tmp_path / "metrics.jsonl").rows() if row["kind"] == "epoch"]
    assert ends == [6, 12, 18]


def test_a_run_stopped_at_the_very_end_of_a_pass_does_not_serve_more_of_it(
    whole: Path, tmp_path: Path
) -> None:
    """Beside a filling it may be longer by then, since quarantined samples are tried again."""

    class Filling(FakeLoader):
        hoped = 0

        def __len__(self) -> int:
            return super().__len__() + self.hoped

        def __iter__(self) -> Iterator[FakeBatch]:
            self.hoped = 0
            yield from super().__iter__()

        def state_dict(self) -> dict[str, Any]:
            ended = self.position == super().__len__()
            return {"epoch": self.epoch + 1, "position": 0} if ended else super().state_dict()

    nu = {"nu": torch.linspace(0, 1, 6)}
    val = FakeLoader(waves(2, seed=1), shuffle=False, cond=nu)
    stop = at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="after step 6 in epoch 1"):
        train(Filling(waves(), cond=nu), val, TrainConfig(**SMALL), tmp_path, on_event=stop)
    longer = Filling(waves(), cond=nu)
    longer.hoped = 1

    report = train(longer, val, TrainConfig(**SMALL, max_steps=STEPS, resume=True), tmp_path)

    assert (report.epochs, report.steps) == (3, STEPS)
    ends = [row["step"] for row in MetricsLog(tmp_path / "metrics.jsonl").rows() if row["kind"] == "epoch"]
    assert ends == [6, 12, 18]
    assert same(weights(tmp_path), weights(whole))


def test_unrolled_training_over_a_future(tmp_path: Path) -> None:
    loader = FakeLoader(waves(), horizon=3)

    report = train(
        loader, FakeLoader(waves(2, seed=1), horizon=3, shuffle=False), TrainConfig(**SMALL), tmp_path
    )

    assert report.rollout_nrmse is not None


def test_stall_and_tier_come_from_the_meter(tmp_path: Path) -> None:
    meter = StallMeter()

    class Metered(FakeLoader):
        def __iter__(self) -> Iterator[FakeBatch]:
            for batch in super().__iter__():
                time.sleep(0.002)
                meter.waited(0.002)
                meter.handed(100, len(batch.z0), "host")
                yield batch
            meter.ended()

    report = train(Metered(waves()), None, TrainConfig(**SMALL), tmp_path, meter=meter)

    assert report.tier == "host"
    assert report.stall is not None
    assert 0 < report.stall < 1


def test_an_empty_loader_is_an_error_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        train(FakeLoader(waves(1, 3)), None, TrainConfig(**SMALL), tmp_path)


def test_a_batch_with_other_conditions_is_refused(tmp_path: Path) -> None:
    val = FakeLoader(waves(2), shuffle=False)

    with pytest.raises(RecordError, match="conditions"):
        train(FakeLoader(waves(), cond={"nu": torch.zeros(6)}), val, TrainConfig(**SMALL), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cuda"):
        run(tmp_path, device="cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0}, {"epochs": "3"}, {"epochs": 2.5}, {"max_steps": 0}, {"patience": 0},
        {"log_every": 0}, {"rollout_samples": -1}, {"lr": 0.0}, {"lr": float("nan")}, {"lr": None},
        {"lr": "1e-3"}, {"grad_clip": float("inf")}, {"weight_decay": -1.0}, {"warmup": 2.0},
        {"width": 10, "heads": 4},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"TrainConfig\.{next(iter(changes))} .*(Expected|Use)"):
        TrainConfig(**changes)


def test_the_rate_never_leaves_its_bounds() -> None:
    config = TrainConfig(lr=0.5)

    rates = [learning_rate(step, 100, peak=config.lr, warmup=config.warmup) for step in range(100)]

    assert max(rates) == 0.5
    assert min(rates) > 0
    assert rates.index(0.5) == 4


CHILD = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from stoker.train.config import TrainConfig
from stoker.train.run import train
from tests.train.fakes import FakeLoader, waves

config = TrainConfig(epochs=6, width=8, depth=1, heads=2, checkpoint_every=4, log_every=1, resume=True)
val = FakeLoader(waves(2, seed=1), shuffle=False)
train(FakeLoader(waves()), val, config, Path(sys.argv[1]), on_event=lambda kind, _: print(kind, flush=True))
"""


@pytest.mark.slow
@pytest.mark.chaos
def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    chance = random.Random(0)
    config = TrainConfig(epochs=6, width=8, depth=1, heads=2)
    train(FakeLoader(waves()), FakeLoader(waves(2, seed=1), shuffle=False), config, tmp_path / "plain")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "killed"), str(Path(__file__).parents[2])]

    kills = 0
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(chance.randrange(4, 25)):
                child.stdout.readline()
            time.sleep(chance.uniform(0, 0.02))
            kills += child.poll() is None
            child.kill()
    subprocess.run(command, check=True, timeout=90, stdout=subprocess.DEVNULL)

    assert kills
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "plain"))


def test_lines_and_checkpoints_that_were_moved_aside_belong_together(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    run(tmp_path, epochs=2)
    finished = MetricsLog(tmp_path / "metrics.jsonl").rows()
    (tmp_path / "stall-rank1.previous.jsonl").write_text("{}")  # of a run with more ranks, before

    for _ in range(2):  # both die before their first checkpoint
        with pytest.raises(Stopped):
            run(tmp_path, sink=at_step(1, die))

    assert MetricsLog(tmp_path / "metrics.previous.jsonl").rows() == finished
    assert [path.name for path in (tmp_path / "checkpoints.previous").glob("last-*12")]
    assert not (tmp_path / "stall-rank1.previous.jsonl").exists()


def test_the_gpu_that_is_trained_on_is_made_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the next step fails, since the GPU is not there."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)

    with pytest.raises(Exception, match=r"(?i)cuda|nvidia"):
        run(tmp_path / "run", device="cuda:1")

    assert set(used) == {torch.device("cuda:1")}
