from __future__ import annotations

import pytest

from stoker.config import load_config
from stoker.config.kinds import KINDS, TAKEN_BY
from stoker.config.models import DataConfig
from stoker.errors import ConfigError
from stoker.pipeline.kinds import BUILDERS


def test_without_a_kind_data_is_hdf5_as_before() -> None:
    config = load_config(None, ["data.files=raw/a.h5", "data.preset=pdebench"])

    assert (config.data.kind, config.encoder.kind) == ("hdf5", "grid")


def test_every_kind_has_a_builder_and_shared_settings_name_kinds_and_settings() -> None:
    assert set(BUILDERS) == set(KINDS)
    assert set(TAKEN_BY) <= set(DataConfig.model_fields)
    assert {kind for kinds in TAKEN_BY.values() for kind in kinds} <= set(KINDS)


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'data\.kind is "hdf6"\. Expected .*hdf5'):
        load_config(None, ["data.kind=hdf6"])
