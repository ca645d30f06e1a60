"""Remedies in the words of the settings file."""

from __future__ import annotations

import shlex

import pytest

from stoker.config import load_config
from stoker.config.names import all_settings
from stoker.config.remedies import OTHER_NAMES, in_settings


@pytest.mark.parametrize(
    ("library", "settings"),
    [
        ("Use preset='well'", "Use data.preset=well"),
        ("patch (1, 5). Use patch=(1, 4), as", "patch (1, 5). Use 'encoder.patch_size=[1, 4]', as"),
        ("declare fields={'u': 'n t x'} (n sample)", "declare 'data.fields={u: n t x}' (n sample)"),
        ("read here with readers=0.", "read here with precompute.readers=0."),
        ("a smaller stride= or horizon=", "a smaller training.time_stride or training.rollout_horizon"),
        ("store it with dtype=None", "store it with training.latent_cache_dtype=null"),
        ("Loader(tier='host')", "Loader(training.tier=host)"),
    ],
)  # fmt: skip
def test_an_argument_becomes_the_setting_of_that_meaning(library: str, settings: str) -> None:
    assert in_settings(library) == settings


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("Expected data.split=train", id="a-setting-already"),
        pytest.param("static=True needs a GPU", id="no-setting"),
        pytest.param("seed=3 is meant for which", id="several-settings"),
        pytest.param("/data/tier=2/x.h5 and nu=0.1,tier=2 are names", id="in-a-path"),
        pytest.param("see --tier=host", id="a-flag"),
    ],
)
def test_everything_else_stays_as_it_is(message: str) -> None:
    assert in_settings(message) == message


def test_a_remedy_can_be_pasted_into_the_command() -> None:
    said = in_settings("Use patch=(1, 4), preset='well', fields={'u': 'n t x c'}")

    words = [word.strip(",") for word in shlex.split(said) if "=" in word]
    config = load_config(None, words)

    assert config.encoder.patch_size == (1, 4)
    assert config.data.preset == "well"
    assert config.data.fields == {"u": "n t x c"}


def test_every_other_name_leads_to_a_setting() -> None:
    assert set(OTHER_NAMES.values()) <= all_settings().keys()
