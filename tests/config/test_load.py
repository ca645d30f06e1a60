from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.config import Config, load_config, make_config
from stoker.errors import ConfigError

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold() -> None:
    config = load_config(None)

    assert config.to_dict() == Config().to_dict()
    assert config.notes == ()


def test_command_line_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {epochs: 3, lr: 1e-2}\n")

    config = load_config(path, ["training.lr=1e-4"])

    assert (config.training.epochs, config.training.lr, config.training.batch_size) == (3, 0.0001, 256)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        pytest.param("training.lr=1e-4", "training.lr", 1e-4, id="exponent"),
        pytest.param("data.files=[a.h5, b.h5]", "data.files", ("a.h5", "b.h5"), id="list"),
        pytest.param("data.files=data/*.h5", "data.files", "data/*.h5", id="glob"),
        pytest.param("data.files=*.h5", "data.files", "*.h5", id="not-yaml"),
        pytest.param("data.files=a=b.h5", "data.files", "a=b.h5", id="equals-in-value"),
        pytest.param("data.limit=null", "data.limit", None, id="null"),
        pytest.param("encoder.patch_size=[1, 4]", "encoder.patch_size", (1, 4), id="pair"),
        pytest.param(
            "data.splits={train: 0.5, val: 0.5}", "data.splits", {"train": 0.5, "val": 0.5}, id="map"
        ),
        pytest.param(
            "training.latent_cache_dtype=bf16", "training.latent_cache_dtype", "bfloat16", id="short"
        ),
        pytest.param(
            "training.latent_cache_dtype=null", "training.latent_cache_dtype", None, id="as-encoded"
        ),
        pytest.param("precompute.timeouts.read=2", "precompute.timeouts.read", 2.0, id="three-deep"),
        pytest.param("precompute.workers=0", "precompute.workers", 0, id="zero"),
        pytest.param("training.run_dir=7", "training.run_dir", "7", id="number-as-text"),
        pytest.param("data.split=[train, val]", "data.wanted_splits", ("train", "val"), id="splits"),
    ],
)
def test_override_values_are_yaml(text: str, name: str, expected: object) -> None:
    value: Any = load_config(None, [text])
    for part in name.split("."):
        value = getattr(value, part)

    assert value == expected
    assert type(value) is type(expected)


def test_one_entry_of_a_mapping_can_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {splits: {train: 0.8, val: 0.2}}\n")

    assert load_config(path, ["data.splits.val=0.1"]).data.splits == {"train": 0.8, "val": 0.1}


def test_a_setting_may_stand_for_another(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {run_dir: 'runs/${data.task}-${latent.dim}'}\n")

    assert load_config(path, ["data.task=kdv"]).training.run_dir == "runs/kdv-32"


UNKNOWN = [
    pytest.param(
        "training: {latent_cache_dirr: x}",
        "training.latent_cache_dirr is not a setting. Did you mean training.latent_cache_dir?",
        id="misspelt",
    ),
    pytest.param(
        "training: {cache_dir: x}",
        "training.cache_dir is not a setting. Did you mean training.latent_cache_dir?",
        id="shortened",
    ),
    pytest.param(
        "training: {task: x}", "training.task is not a setting. Did you mean data.task?", id="elsewhere"
    ),
    pytest.param(
        "precompute: {deadlines: {read: 7}}",
        "precompute.deadlines is not a setting. Did you mean precompute.timeouts?",
        id="renamed-section",
    ),
    pytest.param("trainin: {lr: 1}", "trainin is not a setting. Did you mean training?", id="section"),
    pytest.param("lr: 1", "lr is not a setting. Did you mean training.lr?", id="no-section"),
    pytest.param("qqq: 1", "qqq is not a setting. `stoker init --all`", id="nothing-near"),
    pytest.param("notes: [x]", "notes is not a setting", id="not-a-setting-of-ours"),
    pytest.param(
        "training: {num_worker: 1}",
        "training.num_worker is not a setting. Did you mean training.num_workers?",
        id="near-an-earlier-name",
    ),
]


@pytest.mark.parametrize(("text", "message"), UNKNOWN)
def test_unknown_name_is_refused_with_the_nearest(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert str(caught.value).startswith(f"{path}: {message}")
    assert caught.value.exit_code == 3


def test_all_unknown_names_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "latent: {dims: 1}\ntraining: {lrr: 1}\n")

    with pytest.raises(ConfigError) as caught:
        load_config(path, ["data.tusk=x"])

    assert caught.value.fact.splitlines() == [
        f"{path}: latent.dims, training.lrr are not settings",
        "command line: data.tusk is not a setting",
    ]
    assert caught.value.hint == "Did you mean latent.dim and training.lr and data.task?"


def test_many_unknown_names_are_shown_as_the_first_few_and_a_count(tmp_path: Path) -> None:
    path = write(tmp_path, "training:\n" + "".join(f"  odd{i}: 1\n" for i in range(10)))

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    (line,) = caught.value.fact.splitlines()
    assert "10 names" in line
    assert "training.odd2" in line
    assert "training.odd3" not in line
    assert "7 more" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "training.batch_size=abc",
            'training.batch_size is "abc". Expected a whole number of at least 1',
            id="text",
        ),
        pytest.param("training.batch_size=0", "training.batch_size is 0. Expected a whole", id="too-small"),
        pytest.param(
            "training.batch_size=1.5", "training.batch_size is 1.5. Expected a whole", id="fraction"
        ),
        pytest.param("training.epochs=true", "training.epochs is true. Expected a whole number", id="bool"),
        pytest.param(
            "training.lr=true", "training.lr is true. Expected a number above 0", id="bool-as-float"
        ),
        pytest.param("training.lr=.nan", "training.lr is NaN. Expected a number above 0", id="nan"),
        pytest.param("data.normalize=1", "data.normalize is 1. Expected true or false", id="number-as-bool"),
        pytest.param(
            "training.tier=vram",
            'training.tier is "vram". Expected auto, device, host, disk or encode',
            id="choice",
        ),
        pytest.param(
            "training.device=tpu", 'training.device is "tpu". Expected text like auto, cpu', id="device"
        ),
        pytest.param(
            "training.latent_cache_dtype=int4",
            'training.latent_cache_dtype is "int4". Expected float32, float16, bfloat16, int8 or '
            "float8_e4m3fn, or names, each with",
            id="dtype",
        ),
        pytest.param(
            "data.splits=[1]", "data.splits is [1]. Expected names, each with a number above 0", id="map"
        ),
        pytest.param("data.splits.val=-1", 'data.splits is {"val": -1}. Expected names', id="map-entry"),
        pytest.param(
            "precompute.timeouts.read=0",
            "precompute.timeouts.read is 0. Expected a number above 0",
            id="deep",
        ),
        pytest.param(
            "data.patch_size=x", 'data.patch_size is "x". Expected a whole number', id="earlier-name"
        ),
        pytest.param(
            "data.files=[]", "data.files is []. Expected text, or a list of text, or null", id="no-files"
        ),
        pytest.param(
            "precompute.max_quarantined=2",
            "precompute.max_quarantined is 2. Expected a number from 0",
            id="max",
        ),
        pytest.param(
            "training.time_stride=[4, 1]",
            "training.time_stride is [4, 1]. Expected the smaller number first, as [1, 4]",
            id="range-backwards",
        ),
        pytest.param(
            "training.rollout_horizon=[3, 2]", "training.rollout_horizon is [3, 2]. Expected", id="horizons"
        ),
        pytest.param("training.state_fields=[]", "training.state_fields is []. Expected one", id="no-fields"),
        pytest.param(
            "training.state_fields=[u, u]",
            'training.state_fields is ["u", "u"]. Expected',
            id="a-field-twice",
        ),
        pytest.param("training=3", "training is a section. Give one of its settings", id="section"),
        pytest.param("training.lr", "'training.lr' is not a setting. Expected key=value", id="no-value"),
    ],
)
def test_wrong_value_is_refused_with_what_was_expected(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])

    assert str(caught.value).startswith(f"command line: {message}")


def test_wrong_values_name_the_place_they_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {epochs: many}\n")

    with pytest.raises(ConfigError) as caught:
        load_config(path, ["training.lr=-1"])

    first, second = caught.value.fact.splitlines()
    assert first.startswith(f'{path}: training.epochs is "many"')
    assert second.startswith("command line: training.lr is -1")
    assert all("Expected" in line for line in (first, second))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: 1\nb: [1,\n", "line 3: not YAML", id="unclosed"),
        pytest.param("training:\n\tlr: 1\n", "line 2: not YAML", id="tab"),
        pytest.param(
            "training: {lr: 1}\ntraining: {lr: 2}\n", "line 2: not YAML: found duplicate key", id="twice"
        ),
        pytest.param("- 1\n", "holds a list", id="list"),
        pytest.param("training: 3\n", "training is 3. Expected settings below it", id="section-with-a-value"),
        pytest.param(
            "data: {root: '${data.nope}'}\n", "data.root: Interpolation key 'data.nope'", id="dangling"
        ),
        pytest.param("data:\n  root: ???\n", "data.root: Missing mandatory value", id="missing"),
        pytest.param("x: !!python/object/apply:os.system ['true']\n", "line 1: not YAML", id="code"),
        pytest.param(
            "training: {batch_size: 4, batch_trajectories: 2}\n", "training.batch_size counts", id="both"
        ),
        pytest.param("model: {width: 100, heads: 3}\n", "model.width 100 is not a multiple of", id="heads"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00training", b"\x89HDF\r\n\x1a\n\x00", b"a\x00b"])
def test_a_data_file_in_place_of_settings_is_named_as_such(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="not a text file") as caught:
        load_config(path)

    assert f"stoker init {path}" in caught.value.hint


def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, "")

    with pytest.raises(ConfigError, match=r"other.yaml: no such file\. .*train.yaml"):
        load_config(tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere" / "other.yaml")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "folder",
            r"given is a folder\. Expected a YAML file with settings\. There are: .*given/train\.yaml",
        ),
        ("pipe", r"given is a pipe\. Expected a YAML file"),
        ("device", r"/dev/null is a device\. Expected a YAML file"),
        ("link", r"given: a link to a file that is not there"),
        ("below-a-file", r"given/c\.yaml cannot be read: Not a directory"),
    ],
)
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path: Path, kind: str, said: str) -> None:
    path = tmp_path / "given"
    if kind == "folder":
        path.mkdir()
        write(path, "")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.touch()
        path /= "c.yaml"

    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_a_file_that_may_not_be_read_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "")
    denied = PermissionError(errno.EACCES, "Permission denied", str(path))
    monkeypatch.setattr("omegaconf.OmegaConf.load", lambda _path: raise_(denied))

    with pytest.raises(ConfigError, match=r"train\.yaml cannot be read: Permission denied"):
        load_config(path)


def test_a_folder_that_may_not_be_looked_into_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "stat", lambda *_args, **_more: raise_(denied))

    with pytest.raises(ConfigError, match=r"c\.yaml cannot be read: Permission denied"):
        load_config(tmp_path / "c.yaml")


def raise_(error: Exception) -> None:
    raise error


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    config = load_config(None, ["training.run_dir=~/runs", "encoder.checkpoint=~/w.safetensors"])

    assert config.training.run_dir == "/home/me/runs"
    assert config.encoder.checkpoint == "/home/me/w.safetensors"
    assert config.training.latent_cache_dir == "data/latent_cache"


def test_an_empty_file_alone_is_refused(tmp_path: Path) -> None:
    for text in ("", "# nothing\n"):
        with pytest.raises(ConfigError, match=r"train\.yaml is empty"):
            load_config(write(tmp_path, text))


def test_empty_files_and_empty_sections_are_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["training.lr=0.001"]).to_dict() == Config().to_dict()
    assert load_config(write(tmp_path, "training:\ndata:\n")).to_dict() == Config().to_dict()


@pytest.mark.parametrize(
    ("override", "where"), [("model.width=10", "command line"), ("training.lr=1", "train")]
)
def test_a_width_that_no_head_divides_is_blamed_on_whoever_gave_it(
    tmp_path: Path, override: str, where: str
) -> None:
    path = write(tmp_path, "model: {width: 30, heads: 4}\n")

    with pytest.raises(ConfigError, match=rf"{where}.*model\.width [13]0 is not a multiple"):
        load_config(path, [override])


def test_the_same_override_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"command line: training.lr is given twice"):
        load_config(None, ["training.lr=1", "training.lr=2"])


def test_the_command_line_may_count_batches_the_other_way(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {batch_size: 32}\n")

    config = load_config(path, ["training.batch_trajectories=4"])

    assert config.training.batch_trajectories == 4
    assert load_config(path).training.batch_size == 32


def test_a_null_on_the_command_line_leaves_the_files_way_of_counting_batches(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {batch_size: 32}\n")

    assert load_config(path, ["training.batch_trajectories=null"]).training.batch_size == 32


def test_one_setting_nested_and_dotted_in_a_file_is_an_error(tmp_path: Path) -> None:
    for text in ("training: {lr: 1e-3}\ntraining.lr: 1e-4\n", "training.lr: 1e-4\ntraining: {lr: 1e-3}\n"):
        path = write(tmp_path, text)

        with pytest.raises(ConfigError, match=r"training\.lr is given twice"):
            load_config(path)


def test_a_reference_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"command line: '\$\{' is not a value"):
        load_config(None, ["data.root=${"])


def test_settings_do_not_change_once_loaded() -> None:
    config = load_config(None)

    with pytest.raises(ValueError, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]


def test_settings_made_by_hand_are_checked_too() -> None:
    with pytest.raises(ValueError, match="lrr"):
        Config.model_validate({"training": {"lrr": 1.0}})


@pytest.mark.parametrize("overrides", [[], ["training.batch_trajectories=4", "data.splits={train: 1}"]])
def test_a_run_record_reads_back(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(None, overrides)
    (tmp_path / "record.yaml").write_text(config.to_yaml())

    assert make_config(config.to_dict(), where="run").to_dict() == config.to_dict()
    assert load_config(tmp_path / "record.yaml").to_dict() == config.to_dict()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load_without_a_note(path: Path) -> None:
    config = load_config(path, ["data.files=some.h5"])

    assert config.notes == ()
    assert config.where == str(path)


def test_a_patch_of_one_number_is_square_except_in_one_dimension() -> None:
    square = load_config(None, ["encoder.patch_size=4"]).encoder
    given = load_config(None, ["encoder.patch_size=[1, 8]"]).encoder
    grids = (1, 64), (64, 64), (16, 16, 16)

    assert [square.patch(grid) for grid in grids] == [(1, 4), (4, 4), (4, 4, 4)]
    assert given.patch((1, 64)) == (1, 8)


def test_an_order_that_is_none_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'training.partition is "foo".*global, static'):
        load_config(None, ["training.partition=foo"])


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("'0.5 %'", 0.005), ("0.02", 0.02), ("100%", 1.0)])
def test_a_share_of_time_may_be_written_in_per_cent(text: str, share: float) -> None:
    assert load_config(None, [f"training.max_stall={text}"]).training.max_stall == pytest.approx(share)


@pytest.mark.parametrize("text", ["two%", "200%", "2 percent"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.max_stall is .* Expected a number from 0 to 1"):
        load_config(None, [f"training.max_stall={text}"])


def test_a_folder_of_caches_is_answered_with_the_command_for_it(tmp_path: Path) -> None:
    cache = tmp_path / "latents" / "burgers1d_train" / "0123456789abcdef"
    cache.mkdir(parents=True)
    (cache / "recipe.json").write_text("{}")

    for folder in (cache, cache.parent, cache.parent.parent):
        with pytest.raises(ConfigError, match=rf"{folder} holds caches\. `stoker cache show {folder}`"):
            load_config(folder)


@pytest.mark.parametrize("url", ["s3://bucket/caches/train", "file:///caches/train"])
def test_a_url_is_answered_with_the_command_for_it(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"{url} is a URL\. `stoker cache show {url}`"):
        load_config(Path(url))


@pytest.mark.parametrize(("text", "size"), [("100MB", 100_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096)])
def test_bytes_may_have_a_unit(tmp_path: Path, text: str, size: int) -> None:
    path = write(tmp_path, f"training: {{mirror_bytes: {text}}}\n")

    assert load_config(path).training.mirror_bytes == size
    assert load_config(None, [f"training.reserve_bytes={text}"]).training.reserve_bytes == size


@pytest.mark.parametrize("text", ["many", "0", "0.5", "-1GB", "5 apples", "true"])
def test_what_is_no_number_of_bytes_is_refused_with_the_form_of_one(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected a number of bytes of at least 1, as 500MB"):
        load_config(None, [f"training.mirror_bytes={text}"])


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (["precompute.ray.address=auto"], r"Give precompute\.engine=ray \(--engine ray\)"),
        (["precompute.engine=local", "precompute.ray.num_gpus=1"], r"precompute\.engine=local has no use"),
        (["precompute.engine=ray", "precompute.wait=false"], "Leave one of them out"),
        (["precompute.engine=ray", "precompute.devices=[cpu,cpu]"], r"precompute\.ray\.num_gpus says"),
    ],
)
def test_a_setting_that_the_engine_has_no_use_for_is_refused(given: list[str], cure: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: precompute.*{cure}"):
        load_config(None, given)


def test_a_file_may_hold_the_settings_of_another_engine(tmp_path: Path) -> None:
    path = write(tmp_path, "precompute: {ray: {address: auto}}\n")

    (note,) = load_config(path).notes
    assert "precompute.ray.address has no effect" in note
    assert load_config(path, ["precompute.engine=local"]).notes == ()
    assert load_config(path, ["precompute.engine=ray"]).precompute.ray.address == "auto"
    both = write(tmp_path, "precompute: {engine: ray, wait: false}\n")
    assert load_config(both, ["precompute.wait=true"]).precompute.wait
    with pytest.raises(ConfigError, match=f"^{both}: precompute.wait is false"):
        load_config(both)
