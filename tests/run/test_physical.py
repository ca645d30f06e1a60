"""Training reports errors in physical space, and what the encoder itself loses beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.run import physical
from stoker.run.build import build_jobs
from stoker.run.context import Run
from stoker.run.physical import physical_space
from stoker.run.precompute import fill_caches
from stoker.run.train import train_config
from tests.run.conftest import Configure

SMALL = ("training.max_steps=4", "latent.dim=6")


def lost(configure: Configure, *settings: str) -> float:
    """What records of the validation set lose, over the samples that are compared (all four)."""
    (job,) = build_jobs(Run(configure(*settings)).for_task("burgers1d"), ["val"])
    (cache,) = (result.cache for result in fill_caches(Run(configure(*settings)), ["val"]))
    encoder: Any = job.encoder
    raw = torch.stack([torch.from_numpy(job.source.read(n)["data"]) for n in range(4)]).double()
    back = torch.stack([encoder.decode(cache[n]["latent"]) for n in range(4)]).double()
    return float((back - raw).norm() / raw.norm())


def test_training_reports_both_spaces_and_what_the_encoder_loses(configure: Configure) -> None:
    result = train_config(Run(configure(*SMALL)))

    report = result.report
    assert report.physical_nrmse is not None
    assert report.physical_persistence_nrmse is not None
    assert report.physical_rollout_nrmse is not None
    # the field moves as much as it does in latent space, where the position features are part of the norm
    assert report.physical_persistence_nrmse == pytest.approx(report.persistence_nrmse, rel=0.3)
    assert report.reconstruction_nrmse == pytest.approx(lost(configure, *SMALL), rel=1e-6)
    assert result.to_json()["reconstruction_nrmse"] == report.reconstruction_nrmse
    page = (report.run_dir / "report.html").read_text()
    assert "physical NRMSE" in page
    assert "encoder's own error" in page


EXIT_WHILE_MEASURING = """
import sys
import torch
from stoker import open_cache
from stoker.run import physical
def measure(self):
    for _ in range(60):
        torch.randn(500, 500) @ torch.randn(500, 500)
physical._Reconstruction._measure = measure
physical.physical_space(open_cache(sys.argv[1]))
"""


def test_a_program_that_ends_while_it_is_measured_is_no_abort(configure: Configure) -> None:
    """As when the first step fails: the error counts, not a thread that ends inside torch."""
    (cache,) = (result.cache for result in fill_caches(Run(configure(*SMALL)), ["val"]))
    words = [sys.executable, "-c", EXIT_WHILE_MEASURING, str(cache.path)]
    subprocess.run(words, timeout=60, check=True)


@pytest.mark.slow
def test_it_needs_no_raw_data_and_kept_fields_stand_in_for_it(configure: Configure, tmp_path: Path) -> None:
    before = train_config(Run(configure(*SMALL))).report
    kept = train_config(Run(configure(*SMALL, "precompute.keep=data", "training.run_dir=kept"))).report
    shutil.rmtree(tmp_path / "raw")

    after = train_config(Run(configure(*SMALL, "training.run_dir=after"))).report
    kept_after = train_config(
        Run(configure(*SMALL, "precompute.keep=data", "training.run_dir=kept-after"))
    ).report

    assert after.physical_nrmse == before.physical_nrmse == kept.physical_nrmse
    assert after.reconstruction_nrmse is None
    assert kept_after.reconstruction_nrmse == kept.reconstruction_nrmse
    assert kept.reconstruction_nrmse == pytest.approx(before.reconstruction_nrmse, rel=1e-2)


def test_fields_come_in_units_of_the_data(configure: Configure) -> None:
    config = configure("data.normalize=true", "latent.dim=8", "training.latent_cache_dtype=float32")
    (job,) = build_jobs(Run(config).for_task("burgers1d"), ["val"])
    (cache,) = (result.cache for result in fill_caches(Run(config), ["val"]))

    space = physical_space(cache)

    assert space is not None
    raw = torch.from_numpy(job.source.read(1)["data"])
    assert torch.allclose(space.decode(cache[1]["latent"]), raw, atol=1e-5)
    found = space.reconstruction()
    assert found is not None
    assert found < 1e-5


def test_without_a_decoder_there_are_no_such_errors(configure: Configure) -> None:
    report = train_config(Run(configure("encoder.kind=identity", "training.max_steps=2"))).report

    assert report.physical_nrmse is None
    assert "physical" not in (report.run_dir / "report.html").read_text()


def test_weights_that_are_gone_cost_the_figures_alone(configure: Configure) -> None:
    config = configure(*SMALL)
    fill_caches(Run(config), ["train", "val"])
    shutil.rmtree(Path(config.training.latent_cache_dir) / "encoders")

    report = train_config(Run(config)).report

    assert report.val_nrmse is not None
    assert report.physical_nrmse is None


def test_raw_data_that_does_not_answer_costs_one_figure(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(physical, "WAIT_S", 0.1)
    monkeypatch.setattr(physical._Reconstruction, "_measure", lambda _: gate.wait(30))

    report = train_config(Run(configure(*SMALL))).report

    assert report.physical_nrmse is not None
    assert report.reconstruction_nrmse is None
    gate.set()
