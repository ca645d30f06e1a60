from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_config, make_config
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
    assert config.precompute.workers == 8
    assert config.training.tier == "auto"
    assert (config.training.time_stride, config.training.rollout_horizon) == (2, 3)
    assert config.training.use_inverse_losses is False


def test_what_means_nothing_any_more_is_noted_once(tmp_path: Path) -> None:
    path = write(tmp_path, EARLIER_FILE)

    notes = load_config(path).notes

    assert "training.batch_size counts windows" in notes[0]
    assert [note.split(" has no effect")[0] for note in notes[1:]] == [
        f"{path}: training.use_parallel_encoding",
        f"{path}: training.pin_memory",
        f"{path}: training.prefetch_factor",
    ]


@pytest.mark.parametrize(
    ("setting", "tier", "workers"),
    [
        pytest.param("training.force_ram_preload=true", "host", None, id="preload"),
        pytest.param("training.force_ram_preload=false", "auto", None, id="no-forced-preload"),
        pytest.param("training.force_legacy_loader=true", "disk", None, id="legacy"),
        pytest.param("training.use_preloaded_cache=false", "disk", None, id="no-preload"),
        pytest.param("training.use_preloaded_cache=true", "auto", None, id="preload-by-default"),
        pytest.param("training.use_parallel_encoding=false", "auto", None, id="not-in-workers"),
        pytest.param("training.use_parallel_encoding=true", "auto", None, id="parallel"),
        pytest.param("training.num_workers=0", "auto", 0, id="no-workers"),
    ],
)
def test_switches_set_what_they_meant(setting: str, tier: str, workers: int | None) -> None:
    config = load_config(None, [setting])

    assert (config.training.tier, config.precompute.workers) == (tier, workers)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["data.patch_size=4", "encoder.patch_size=4"], id="two-names"),
        pytest.param(["training.num_workers=4", "precompute.workers=4"], id="workers-and-workers"),
        pytest.param(["precompute.identity=full", "identity=full"], id="identity"),
        pytest.param(["training.force_ram_preload=true", "training.tier=disk"], id="switch-against-setting"),
        pytest.param(
            ["training.force_ram_preload=true", "training.force_legacy_loader=true"], id="two-switches"
        ),
        pytest.param(["training.force_ram_preload=yes please"], id="no-switch-position"),
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

    config = load_config(path, ["encoder.patch_size=4", "training.tier=disk", "precompute.workers=1"])

    assert (config.encoder.patch_size, config.training.tier, config.precompute.workers) == (4, "disk", 1)


def test_workers_read_whoever_encodes_and_the_command_line_lifts_what_the_file_says(tmp_path: Path) -> None:
    """The earlier switch kept the encoder out of the loader's workers; it never meant fewer workers."""
    both = write(tmp_path, "training: {num_workers: 8, use_parallel_encoding: false}\n")

    assert load_config(both).precompute.workers == 8
    assert load_config(both, ["training.num_workers=2"]).precompute.workers == 2
    assert load_config(both, ["training.use_parallel_encoding=true"]).precompute.workers == 8
    alone = write(tmp_path, "training: {num_workers: 0, use_parallel_encoding: false}\n")
    assert load_config(alone).precompute.workers == 0
    assert load_config(alone, ["training.use_parallel_encoding=true"]).precompute.workers is None
    assert load_config(alone, ["training.num_workers=3"]).precompute.workers == 3


def test_agreeing_switch_and_setting_are_accepted() -> None:
    config = load_config(None, ["training.force_ram_preload=true", "training.tier=host"])

    assert config.training.tier == "host"


LATENT_CACHE_FILE = """
seed: 42
data: {task: burgers1d, root: raw, patch_size: 1, download: false}
latent: {dim: 32, tokens: 16}
operator: {pdet: {hidden_dim: 64}}
training:
  batch_size: 16
  num_workers: 8
  use_parallel_encoding: false
  time_stride: 2
  compile: true
  lr: 3.0e-4
  latent_cache_dir: null
  latent_cache_dtype: null
stages:
  operator: {epochs: 25, optimizer: {name: adamw, lr: 1.0e-3, weight_decay: 0.03}}
  diff_residual: {epochs: 8}
checkpoint: {dir: checkpoints}
logging: {wandb: {enabled: true}}
"""


def test_an_earlier_file_means_what_it_meant(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, LATENT_CACHE_FILE), ["training.batch_size=4"], earlier=True)

    training = config.training
    assert (training.batch_trajectories, training.start_every, training.time_stride) == (4, 2, 2)
    assert (training.epochs, training.lr, training.weight_decay, training.seed) == (25, 1e-3, 0.03, 42)
    assert (training.latent_cache_dir, training.latent_cache_dtype) == ("data/latent_cache", None)
    assert config.precompute.workers == 8
    assert make_config(config.to_dict(), where="run folder").to_dict() == config.to_dict()


def test_what_belonged_to_other_programs_is_said_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, LATENT_CACHE_FILE)

    notes = load_config(path, earlier=True).notes

    (left,) = (note for note in notes if "no effect here" in note)
    for name in ("operator", "checkpoint", "logging", "data.download", "training.compile"):
        assert f" {name}," in left or f" {name} (" in left, name
    assert "stages.diff_residual" in left
    assert "hidden_dim" not in left
    assert any("stages.operator.optimizer.lr 0.001 is used, not training.lr 0.0003" in note for note in notes)


def test_a_slip_is_an_error_in_an_earlier_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {cache_dir: x, batch_size: 8}\nlogging: {wandb: false}\n")

    with pytest.raises(ConfigError, match=r"training\.cache_dir .*latent_cache_dir"):
        load_config(path, earlier=True)
    with pytest.raises(ConfigError, match=r"batch_sise"):
        load_config(write(tmp_path, "seed: 1"), ["training.batch_sise=2"], earlier=True)


def test_without_a_batch_size_the_earlier_default_is_said(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "training: {time_stride: 3}"), earlier=True)

    assert (config.training.batch_trajectories, config.training.start_every) == (16, 3)
    assert any("16 trajectories" in note for note in config.notes)


def test_a_command_of_today_names_the_one_that_reads_an_earlier_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stoker compat train --config .*earlier\.yaml"):
        load_config(write(tmp_path, LATENT_CACHE_FILE))
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, "training: {learning_rates: 1}"))
    assert "compat" not in str(raised.value)


def test_earlier_stages_that_there_are_now_are_trained(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        data: {task: burgers1d, root: raw}
        stages:
          operator: {epochs: 25}
          decoder: {epochs: 3, patience: 2, optimizer: {lr: 2.0e-4, weight_decay: 0.1}}
          distill: {epochs: 4}
          consistency:
        """,
    )

    config = load_config(path, ["stages.decoder.epochs=5", "training.epochs=9"], earlier=True)

    operator, decoder, consistency = config.stages
    assert (operator.name, operator.epochs, config.training.epochs) == ("operator", None, 9)
    assert (decoder.name, decoder.epochs, decoder.early_stop_patience, decoder.lr) == ("decoder", 5, 2, 2e-4)
    assert consistency.name == "consistency"
    (left,) = (note for note in config.notes if "no effect here" in note)
    assert "stages.distill" in left
    assert "stages.decoder.optimizer.weight_decay" in left
    assert "epochs" not in left
