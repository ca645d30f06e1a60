from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "earlier.yaml"
    path.write_text(text)
    return path


EARLIER_FILE = """
data: {task: burgers1d, root: data/pdebench, split: train, patch_size: 1}
latent: {dim: 32, tokens: 16}
training:
  batch_size: 16
  num_workers: 8
  use_parallel_encoding: true
  use_inverse_losses: false
  pin_memory: true
  prefetch_factor: 4
  latent_cache_dir: data/latent_cache
  latent_cache_dtype: float16
  time_stride: 2
  rollout_horizon: 3
"""


def test_a_file_of_the_earlier_system_works(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EARLIER_FILE))

    assert config.encoder.patch_size == 1
    assert config.precompute.readers == 8
    assert config.training.tier == "auto"
    assert (config.training.time_stride, config.training.rollout_horizon) == (2, 3)


def test_what_means_nothing_any_more_is_noted_once(tmp_path: Path) -> None:
    path = write(tmp_path, EARLIER_FILE)

    notes = load_config(path).notes

    assert [note.split(" has no effect")[0] for note in notes] == [
        f"{path}: training.pin_memory",
        f"{path}: training.prefetch_factor",
    ]


@pytest.mark.parametrize(
    ("setting", "tier", "readers"),
    [
        pytest.param("training.force_ram_preload=true", "host", None, id="preload"),
        pytest.param("training.force_ram_preload=false", "auto", None, id="no-forced-preload"),
        pytest.param("training.force_legacy_loader=true", "disk", None, id="legacy"),
        pytest.param("training.use_preloaded_cache=false", "disk", None, id="no-preload"),
        pytest.param("training.use_preloaded_cache=true", "auto", None, id="preload-by-default"),
        pytest.param("training.use_parallel_encoding=false", "auto", 0, id="sequential"),
        pytest.param("training.use_parallel_encoding=true", "auto", None, id="parallel"),
        pytest.param("training.num_workers=0", "auto", 0, id="no-workers"),
    ],
)
def test_switches_set_what_they_meant(setting: str, tier: str, readers: int | None) -> None:
    config = load_config(None, [setting])

    assert (config.training.tier, config.precompute.readers) == (tier, readers)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["data.patch_size=4", "encoder.patch_size=4"], id="two-names"),
        pytest.param(["training.num_workers=4", "precompute.readers=4"], id="workers-and-readers"),
        pytest.param(["precompute.identity=full", "identity=full"], id="identity"),
        pytest.param(["training.force_ram_preload=true", "training.tier=disk"], id="switch-against-setting"),
        pytest.param(
            ["training.force_ram_preload=true", "training.force_legacy_loader=true"], id="two-switches"
        ),
        pytest.param(
            ["training.use_parallel_encoding=false", "precompute.readers=2"], id="sequential-readers"
        ),
        pytest.param(["training.force_ram_preload=yes please"], id="no-switch-position"),
        pytest.param(["training.use_inverse_losses=true"], id="not-offered"),
        pytest.param(["training.lambda_inv_enc=0.1"], id="not-offered-by-weight"),
    ],
)
def test_contradictions_are_errors(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="command line: "):
        load_config(None, overrides)


def test_both_names_are_in_the_message(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {patch_size: 4}\nencoder: {patch_size: 2}\n")

    with pytest.raises(ConfigError, match=r"data.patch_size and encoder.patch_size are the same setting"):
        load_config(path)


def test_the_command_line_overrides_an_earlier_name_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {patch_size: 1}\ntraining: {force_ram_preload: true, num_workers: 8}\n")

    config = load_config(path, ["encoder.patch_size=4", "training.tier=disk", "precompute.readers=1"])

    assert (config.encoder.patch_size, config.training.tier, config.precompute.readers) == (4, "disk", 1)


def test_sequential_encoding_beside_workers_reads_here_and_says_so(tmp_path: Path) -> None:
    """Earlier files set both: the workers then belonged to the data loader."""
    config = load_config(write(tmp_path, "training: {num_workers: 8, use_parallel_encoding: false}\n"))

    assert config.precompute.readers == 0
    assert "training.num_workers has no effect" in config.notes[0]
    assert "training.use_parallel_encoding=false" in config.notes[0]


def test_agreeing_switch_and_setting_are_accepted() -> None:
    config = load_config(None, ["training.force_ram_preload=true", "training.tier=host"])

    assert config.training.tier == "host"
