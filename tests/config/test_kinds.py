from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.config import load_config
from stoker.config.models import DataConfig
from stoker.config.sections import KINDS, TAKEN_BY
from stoker.errors import ConfigError, SourceError
from stoker.plugins import plugins_of
from stoker.run.build import build_source
from stoker.run.context import Run


def test_without_a_kind_data_is_hdf5_as_before() -> None:
    config = load_config(None, ["data.files=raw/a.h5", "data.preset=pdebench"])

    assert (config.data.kind, config.encoder.kind) == ("hdf5", "grid")


def test_every_kind_has_a_builder_and_shared_settings_name_kinds_and_settings() -> None:
    assert set(plugins_of("stoker.sources")) == set(KINDS)
    assert set(TAKEN_BY) <= set(DataConfig.model_fields)
    assert {kind for kinds in TAKEN_BY.values() for kind in kinds} <= set(KINDS)


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'data\.kind is "hdf6"\. Expected .*hdf5'):
        load_config(None, ["data.kind=hdf6"])


def test_kinds_made_of_files_build_their_split(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "flow.h5", "w") as file:
        for n in range(10):
            file[f"t{n}/u"] = np.full((3 + n, 2), n, "f4")
    given = [f"data.files={tmp_path}/flow.h5", "data.kind=arrays", "data.fields={u: 'u: t c'}"]
    config = load_config(None, given)
    whole = [build_source(Run(config).for_task("flow"), split) for split in ("train", "val", "test")]

    assert [len(source) for source in whole] == [6, 1, 3]
    assert whole[0].schema()["u"].ragged
    assert ([*Run(config).tasks], config.encoder.kind) == (["flow"], "identity")


def test_a_kind_made_of_files_needs_them_and_refuses_settings_of_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.kind=tar reads data\.files"):
        build_source(Run(load_config(None, ["data.kind=tar"])).for_task("a"), "train")
    with pytest.raises(ConfigError, match=r"data\.parquet is given, but data\.kind=tar has no use for it"):
        load_config(None, ["data.kind=tar", "data.files=a.tar", "data.parquet.key=id"])
    with pytest.raises(SourceError, match=r"a\.tar does not exist"):
        build_source(
            Run(load_config(None, ["data.kind=tar", f"data.files={tmp_path}/a.tar"])).for_task("a"), "train"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_stored_as_they_are_but_for_latents_of_the_grid_encoder(kind: str) -> None:
    given = [f"data.kind={kind}"]

    for encoder in ("identity", "features"):
        config = load_config(None, [*given, f"encoder.kind={encoder}"])
        assert config.training.latent_cache_dtype is None
    assert load_config(None, [*given, "encoder.kind=grid"]).training.latent_cache_dtype == "float16"
    asked = load_config(None, [*given, "encoder.kind=identity", "training.latent_cache_dtype=bfloat16"])
    assert asked.training.latent_cache_dtype == "bfloat16"
    expected = "float16" if kind == "hdf5" else None
    assert load_config(None, given).training.latent_cache_dtype == expected


def test_each_task_has_the_storage_dtype_of_its_own_encoder() -> None:
    config = load_config(
        None, ["data.task=[flow, rows]", "tasks={rows: {data: {kind: sql}}, flow: {data: {root: d}}}"]
    )

    found = {task: config.for_task(task).training.latent_cache_dtype for task in ("flow", "rows")}
    assert found == {"flow": "float16", "rows": None}
