"""Stages, inverse losses and drawn strides as settings ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stoker
from stoker.config import load_config
from stoker.errors import ConfigError
from stoker.run.build import build_jobs
from stoker.run.context import Run, kept_fields, stages_of, with_epochs
from stoker.run.train import train_config
from tests.run.conftest import Configure

THREE = "stages=[{name: operator, epochs: 1}, {name: decoder, epochs: 1}, {name: consistency, epochs: 1}]"


def test_stages_are_a_list_or_a_mapping_and_take_the_rest_from_training() -> None:
    listed = load_config(None, ["training.lr=0.01", "training.epochs=7", "stages=[operator, decoder]"])
    mapped = load_config(None, ["stages={operator: {epochs: 3}, decoder_finetune: {lr: 0.5}}"])

    assert [(s.name, s.epochs, s.lr) for s in stages_of(listed)] == [
        ("operator", 7, 0.01),
        ("decoder", 7, 0.01),
    ]
    assert (stages_of(mapped)[0].name, stages_of(mapped)[0].epochs) == ("operator", 3)
    assert stages_of(mapped)[1].lr == 0.5
    assert load_config(None, [f"stages={json.dumps(listed.to_dict()['stages'])}"]).stages == listed.stages
    assert stages_of(with_epochs(listed, "decoder", 2))[1].epochs == 2
    assert stages_of(with_epochs(listed, "decoder", 2))[0].epochs == 7


@pytest.mark.parametrize(
    ("stages", "fact"),
    [
        ("[diffusion]", "consistency"),
        ("[operator, distill]", "distill"),
        ("[operater]", "operator, decoder, consistency"),
        ("[{name: operator, epoch: 3}]", "epoch"),
        ("[{name: operator, epochs: 0}]", "entry 0: epochs: 0 is given"),
        ("{operator: 3}", "entry 0: 3 is given"),
        ("[{name: operator, horizon: 3}]", "entry 0: horizon is 3.*consistency"),
        ("[operator, {name: consistency, freeze_operator: false}]", "entry 1: freeze_operator is false"),
        ("[operator, {name: decoder, lambda_consistency: 2}]", "entry 1: lambda_consistency is 2"),
        ("[decoder]", "operator first"),
        ("[operator, operator]", "each once"),
    ],
)
def test_stages_that_cannot_be_done_are_refused_by_name(stages: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        stages_of(load_config(None, [f"stages={stages}"]))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (["training.use_inverse_losses=true"], (1.0, 0.1)),
        (["training.use_inverse_losses=true", "training.lambda_inv_enc=0.5"], (0.5, 0.1)),
        (["training.lambda_inv_dec=2"], (0.0, 2.0)),
        (["training.use_inverse_losses=false", "training.lambda_inv_dec=2"], (0.0, 0.0)),
        ([], (0.0, 0.0)),
    ],
)
def test_inverse_losses_have_weights_and_keep_the_raw_field(
    settings: list[str], weights: tuple[float, float]
) -> None:
    config = load_config(None, settings)

    (stage,) = stages_of(config)
    assert (stage.lambda_inv_enc, stage.lambda_inv_dec) == weights
    assert kept_fields(Run(config)) == (("data",) if any(weights) else ())


def test_a_run_in_stages_goes_from_settings_to_figures_of_each(configure: Configure) -> None:
    result = train_config(Run(configure(THREE, "training.time_stride=[1, 2]")))

    found = result.to_json()
    stages = found["stages"]
    assert isinstance(stages, list)
    assert [stage["name"] for stage in stages] == ["operator", "decoder", "consistency"]  # type: ignore[index,call-overload]
    assert stages[-1]["val_nrmse"] == found["val_nrmse"]  # type: ignore[index,call-overload]
    cache = stoker.open_cache(result.caches[0].cache.path)
    batch = next(iter(stoker.Loader(cache, 4, windows=stoker.Windows(), shuffle=True)))
    assert batch.input_fields["data"].shape == (4, 1, 32, 1)


def test_one_stage_after_another_with_epochs_of_their_own(configure: Configure, tmp_path: Path) -> None:
    config = configure(THREE)
    with pytest.raises(ConfigError, match="--stage operator"):
        train_config(Run(config), stage="decoder")
    first = train_config(Run(config), stage="operator")
    longer = with_epochs(config, "decoder", 2)
    second = train_config(Run(longer), stage="decoder")
    third = train_config(Run(config))

    assert not first.report.finished
    assert [stage["epochs"] for stage in second.report.stages] == [1, 2]
    assert [stage["epochs"] for stage in third.report.stages] == [1, 2, 1]
    assert third.report.finished


def test_what_has_no_field_to_decode_to_says_so(configure: Configure) -> None:
    on = "training.use_inverse_losses=true"
    with pytest.raises(ConfigError, match="grid"):
        train_config(Run(configure(on, "encoder.kind=identity")))
    with pytest.raises(ConfigError, match=r"data\.normalize"):
        train_config(Run(configure(on, "training.transforms=[{kind: normalize}]")))
    with pytest.raises(ConfigError, match="stages="):
        train_config(Run(configure()), stage="decoder")


def test_caches_of_runs_without_a_decoder_are_those_they_were(configure: Configure) -> None:
    plain, staged = (
        build_jobs(Run(configure(*own)).for_task("burgers1d"), ["train"])[0].encoder
        for own in ((), ("stages=[operator]",))
    )

    assert plain is not None
    assert staged is not None
    assert plain.identity() == staged.identity()
