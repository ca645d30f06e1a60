"""`stoker train` on records without time: one field is learned from the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import stoker
from stoker.config import load_config
from stoker.errors import ConfigError, Interrupted
from stoker.run.context import Run
from stoker.run.profile import profile_config
from stoker.run.supervised import SCALE_RECORDS, make_learner, measure_scales
from stoker.run.train import train_config
from stoker.run.validate import validate_config
from stoker.schema import Json
from stoker.store import Cache
from stoker.train.config import TrainConfig, TrainReport

SAMPLES = 200


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Points in a plane, with what can be learned of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        at = torch.randn(2, generator=torch.Generator().manual_seed(number))
        return {
            "at": at,
            "image": (at[0] > 0).to(torch.uint8) * torch.full((3, 12, 10), 200, dtype=torch.uint8),
            "constant": torch.ones(3),
            "sum": at.sum(),
            "both": torch.stack([1000 * at[0], at[1]]),
            "side": int(at[0] > 0) + int(at[1] > 0),
            "right": at[0] > 0,
            "count": 5000 + number,
            "words": torch.arange(number % 3),
        }


class Steps(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((6, 4), float(number)), "y": number % 2}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "points.yaml"
    path.write_text(
        f"data: {{dataset: '{__name__}:Points', splits: {{train: 0.8, val: 0.2}}}}\n"
        "encoder: {kind: identity}\n"
        "training: {latent_cache_dir: caches, run_dir: run, device: cpu, batch_size: 32, epochs: 8}\n"
        "model: {width: 32, depth: 1, heads: 2}\n"
        "precompute: {workers: 0}\n"
    )
    return path


def learned(settings: Path, *overrides: str, **options: Any) -> TrainReport:
    return train_config(Run(load_config(settings, list(overrides))), **options).report


def test_a_number_is_predicted_better_than_by_its_mean(settings: Path) -> None:
    report = learned(settings, "training.target=sum", "training.lr=0.003")

    assert report.target == "sum"
    assert report.val_nrmse is not None
    assert report.persistence_nrmse == pytest.approx(1, abs=0.05)
    assert report.val_nrmse < 0.4
    assert report.accuracy is None
    assert (report.tier, report.epochs, report.steps) == ("host", 8, 8 * -(-report.steps // 8))


def test_numbers_of_other_sizes_count_alike(settings: Path) -> None:
    """One is a thousand times the other, so the error alone says nothing of the small one."""
    learned(settings, "training.target=both", "training.inputs=at", "training.epochs=12")
    cache = stoker.open_cache(next(Path("caches").glob("*_train/*")))
    config = TrainConfig(device="cpu", width=32, depth=1, heads=2)
    learner = make_learner([cache], "both", ["at"], config)
    learner.model.load_state_dict(_weights(Path("run")))
    batch = next(iter(stoker.Loader(cache, 64)))

    guess = learner.model(batch) * learner.scaled.std + learner.scaled.mean

    errors = (guess - batch["both"]).std(0) / batch["both"].std(0)
    assert errors.max() < 0.6


@pytest.mark.parametrize("target", ["side", "right"])
def test_classes_are_named_more_often_than_by_the_most_common(settings: Path, target: str) -> None:
    report = learned(settings, f"training.target={target}")

    assert report.accuracy is not None
    assert report.baseline_accuracy is not None
    assert report.accuracy > report.baseline_accuracy + 0.2
    assert report.val_nrmse is None


def test_whole_numbers_that_are_no_classes_are_predicted_as_numbers(settings: Path) -> None:
    report = learned(settings, "training.target=count", "training.epochs=1")

    assert report.accuracy is None
    assert report.val_nrmse is not None


def test_images_alone_suffice(settings: Path) -> None:
    report = learned(settings, "training.target=right", "training.inputs=image")

    assert report.accuracy == 1.0


def _weights(run: Path, kind: str = "last") -> dict[str, Tensor]:
    return load_file(max((run / "checkpoints").glob(f"{kind}-*")) / "model.safetensors")


def test_a_run_that_is_asked_to_stop_goes_on_with_the_same_weights(settings: Path) -> None:
    """Bit for bit, on one CPU; its log has each line once."""
    whole = learned(settings, "training.target=side", "training.run_dir=whole")
    heard: list[str] = []

    def stop(kind: str, facts: Mapping[str, Json]) -> None:
        heard.append(kind)
        if kind == "step" and facts["step"] == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        learned(settings, "training.target=side", on_event=stop)
    with Path("run/metrics.jsonl").open("a") as lines:  # as a kill later on would leave it
        lines.write('{"kind": "epoch", "step": 18, "epoch": 3}\n')
    again = learned(settings, "training.target=side", on_event=stop)

    assert "resume" in heard
    assert again.steps == whole.steps
    assert again.accuracy == whole.accuracy
    for name, weight in _weights(Path("whole")).items():
        assert torch.equal(_weights(Path("run"))[name], weight), name
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    epochs = [row["epoch"] for row in rows if row["kind"] == "epoch"]
    assert epochs == sorted({*epochs})


def test_a_finished_run_is_kept_aside_when_another_begins(settings: Path) -> None:
    for seed in (0, 1):
        learned(settings, "training.target=side", "training.epochs=1", f"training.seed={seed}")

    assert {path.name for path in Path("run").iterdir()} >= {
        "checkpoints", "checkpoints.previous", "metrics.jsonl", "metrics.previous.jsonl", "curves.png",
        "report.html",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], r"none with time.*training\.target=count"),
        (["training.target=sun"], r"'sun'.*is not a field.*sum"),
        (["training.target=sum", "training.inputs=[at,sum]"], "'sum', which is the target"),
        (["training.target=sum", "training.inputs=[words]"], r"'words'.*Expected some of at"),
        (["training.target=words"], r"'words'.*fixed shape"),
        (["training.target=sum", "training.inputs=[]"], "no other field"),
        (["training.target=sum", "training.use_inverse_losses=true"], "use_inverse_losses"),
        (["training.target=sum", "precompute.wait=false"], "complete cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_anything_is_encoded(
    settings: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        learned(settings, *overrides)

    assert not [*Path().glob("caches/*/*/shard-*")]


def test_a_target_is_refused_where_records_have_time(settings: Path) -> None:
    steps = [f"data.dataset={__name__}:Steps", "data.torch.time=[x]"]
    with pytest.raises(ConfigError, match=r"'y', and x has time"):
        learned(settings, *steps, "training.target=y")


def test_the_number_of_a_tuples_field_may_stand_without_quotes(settings: Path) -> None:
    settings.write_text(settings.read_text().replace("training: {", "training: {target: 1, "))

    assert load_config(settings).training.target == "1"


def test_validate_says_what_is_predicted_from_what(settings: Path) -> None:
    rows = validate_config(settings, ["training.target=sum"]).rows
    (row,) = [row for row in rows if row.check == "target"]

    assert (row.status, "at" in row.detail, "words" in row.detail) == ("pass", True, False)


def test_profile_times_the_steps_of_the_same_network(settings: Path) -> None:
    found = profile_config(Run(load_config(settings, ["training.target=sum"])), steps=2)

    assert found.loop.compute_s > 0


def test_scales_are_those_of_the_records(tmp_path: Path) -> None:
    class Many(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 2 * SCALE_RECORDS + 7

        def __getitem__(self, number: int) -> dict[str, Any]:
            draw = np.random.default_rng(number)
            return {"few": draw.normal(3, 2, (2,)), "many": draw.normal(-1, 5, (80, 60)), "one": 4.0}

    cache: Cache = stoker.precompute(Many(), None, tmp_path, name="many", workers=0)
    scales = measure_scales(cache, ["few", "many", "one"])

    assert scales["few"].mean.shape == (2,)
    torch.testing.assert_close(scales["few"].std, torch.full((2,), 2.0), atol=0.3, rtol=0)
    torch.testing.assert_close(scales["many"].mean, torch.tensor(-1.0), atol=0.05, rtol=0)
    torch.testing.assert_close(scales["many"].std, torch.tensor(5.0), atol=0.05, rtol=0)
    assert (float(scales["one"].mean), float(scales["one"].std)) == (4, 1)  # a constant is not divided by 0
