"""Commands in this process: help, JSON keys, flags, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer import Context
from typer.main import get_command

from stoker.cli import output
from stoker.cli.main import GROUPS, app
from tests.cli.commands import run, run_json

GROUP: Any = get_command(app)
TOP: dict[str, Any] = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}


def inside(command: Any) -> dict[str, Any]:
    """The commands of a group by name; of a command itself, without one."""
    if not hasattr(command, "list_commands"):
        return {"": command}
    return {
        name: command.get_command(Context(command), name) for name in command.list_commands(Context(command))
    }


COMMANDS = {
    f"{name} {sub}".strip(): command
    for name, above in TOP.items()
    for sub, command in inside(above).items()
    if not command.hidden
}
"""Those of a group under both names."""

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference" / "cli.md"
HELP = DOCS.with_name("cli-help.md")


def test_these_are_the_commands() -> None:
    assert list(TOP) == [
        *("demo", "init", "validate"),
        *("precompute", "train", "plan", "profile", "bench"),
        *("cache", "data"),
        *("launch", "serve", "job"),
        "compat",
    ]
    inside = {
        name: list(command.list_commands(Context(command))) for name, command in TOP.items() if name in GROUPS
    }
    assert inside == {
        "cache": [
            "ls",
            "show",
            "get",
            "why",
            "verify",
            "compact",
            "gc",
            "push",
            "pull",
            "export",
            "adopt",
            "import-pt",
        ],
        "data": ["inspect", "stage", "fetch"],
        "job": [
            *("submit", "list", "show", "logs", "cancel", "pause", "resume", "continue", "clone", "tag"),
            *("files", "download", "delete", "login", "datasets", "register", "generate", "check", "forget"),
        ],
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_an_example(name: str) -> None:
    text = COMMANDS[name].help or ""

    assert "Example:" in text
    assert f"stoker {name}" in text
    assert len(text.splitlines()[0]) <= 50, "the list of commands would cut it"
    assert all(getattr(p, "help", None) for p in COMMANDS[name].params), "a parameter without help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_debug(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}

    assert {"--json", "--debug"} <= options


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_docs(name: str) -> None:
    assert f"$ stoker {name}" in DOCS.read_text()
    assert f"## stoker {name}\n```text\nUsage: stoker {name}" in HELP.read_text(), "run tools/cli_page.py"


def test_every_exit_code_is_in_the_docs() -> None:
    page = DOCS.read_text()

    for code in (0, 1, 2, 3, 4, 5, 6, 130):
        assert f"| {code} |" in page


def test_precompute_reports_each_cache(project: Path) -> None:
    first = run_json("precompute", "c.yaml")["caches"]
    second = run_json("precompute", "c.yaml")["caches"]

    assert [cache["name"] for cache in first] == ["burgers1d_train", "burgers1d_val"]
    wanted = {
        "name", "path", "fingerprint", "records", "encoded", "reused", "quarantined", "bytes", "seconds",
        "encode_seconds",
    }  # fmt: skip
    assert wanted <= first[0].keys()
    assert [(c["records"], c["encoded"], c["reused"]) for c in first] == [(12, 12, 0), (4, 4, 0)]
    assert [(c["records"], c["encoded"], c["reused"]) for c in second] == [(12, 0, 12), (4, 0, 4)]
    assert first[0]["path"].endswith(first[0]["fingerprint"])


def test_precompute_without_json_says_what_happened(project: Path) -> None:
    first, _ = run("precompute", "c.yaml")
    second, _ = run("precompute", "c.yaml")

    assert "12 of 12 encoded" in first
    assert "12 records ready, nothing to encode" in second
    assert "\x1b" not in first + second, "colors in a pipe"


def test_flags_are_settings(project: Path) -> None:
    report = run_json(
        "precompute", "--config", "c.yaml", "--splits", "train,val", "--device", "cpu", "--workers", "0",
        "--limit", "3", "--manifest", "m/manifest.json", "data.root=raw",
        "training.latent_cache_dir=elsewhere", "training.latent_cache_dtype=float32", "latent.dim=6",
        "latent.tokens=2", "precompute.max_quarantined=0",
    )["caches"]  # fmt: skip

    assert [(cache["name"], cache["records"]) for cache in report] == [
        ("burgers1d_train", 3),
        ("burgers1d_val", 3),
    ]
    assert report[0]["path"].startswith("elsewhere/")
    assert report[0]["fields"]["latent"] == {
        "shape": [9, 2, 6],
        "dtype": "float32",
        "time": True,
        "ragged": False,
    }
    manifest = json.loads(Path("m/manifest.json").read_text())
    assert manifest["summary"]["burgers1d_train"]["num_samples"] == 3
    assert {"generated_at", "cache_dir", "caches"} <= manifest.keys()


def test_settings_without_effect_say_so(project: Path) -> None:
    _, notes = run("precompute", "c.yaml", "training.pin_memory=true")

    assert "pin_memory has no effect" in notes


def test_overwrite_encodes_again(project: Path) -> None:
    run("precompute", "c.yaml")

    again = run_json("precompute", "c.yaml", "--overwrite", "--splits", "val")["caches"]

    assert [(cache["name"], cache["encoded"]) for cache in again] == [("burgers1d_val", 4)]


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(["c.yaml", "data.limit=8", "--limit", "8"], id="flag-and-setting"),
        pytest.param(["c.yaml", "--config", "c.yaml"], id="file-and-flag"),
        pytest.param(["c.yaml", "latent.dim=8", "latent.dim=8"], id="setting-twice"),
        pytest.param(["latent.dim=8"], id="no-file"),
    ],
)
def test_one_setting_given_both_ways_is_refused(project: Path, args: list[str]) -> None:
    _, message = run("precompute", *args, exit_code=3)

    assert [line.split()[0] for line in message.splitlines()] == ["error:", "hint:"]
    assert not (project / "data").exists()


def test_plan_refuses_a_file_for_the_cache_folder(project: Path) -> None:
    (project / "file").touch()

    for folder in ("file", "file/below"):
        _, message = run("plan", "c.yaml", f"training.latent_cache_dir={folder}", exit_code=3)
        assert "file is not a folder" in message


def test_plan_says_where_and_why(project: Path) -> None:
    before = run_json("plan", "c.yaml")
    run("precompute", "c.yaml")
    after = run_json("plan", "c.yaml")

    assert {"tiers", "bytes", "reason", "predicted_stall"} <= after.keys()
    assert after["tiers"] == {"device": 0, "host": 12, "disk": 0, "encode": 0} == before["tiers"]
    assert (before["missing"], after["missing"]) == (12, 0)
    assert before["reason"].startswith("12 records to be encoded first")
    notes = [next(row["note"] for row in p["rows"] if row["tier"] == "encode") for p in (before, after)]
    assert notes[0].startswith("12 are encoded first, and counted above as stored; storing them takes")
    assert notes[1] == "nothing is missing"


def test_packed_latents_are_encoded_planned_and_trained_on(project: Path) -> None:
    wide = ["latent.dim=32", "latent.tokens=4"]
    packed = [*wide, "training.latent_cache_dtype=int8", "precompute.max_error=0.01"]
    run("precompute", "c.yaml", *wide)
    assert "training.latent_cache_dtype=int8 would take" in run("plan", "c.yaml", *wide)[0]

    made = run_json("precompute", "c.yaml", *packed, "precompute.keep=data")["caches"][0]
    shown = run_json("cache", "show", made["path"])
    trained = run_json("train", "c.yaml", *packed, "precompute.keep=data", "training.max_steps=2")

    assert made["fields"]["latent"]["packed"] is True
    assert made["fields"]["data"]["kept"] is True
    assert 0.001 < shown["error"]["latent"]["max"] < 0.01
    assert "int8 + scales" in run("cache", "show", made["path"])[0]
    assert trained["cache_reused"] is True
    assert trained["physical_nrmse"] is not None
    assert trained["reconstruction_nrmse"] is not None
    assert run_json("cache", "verify", made["path"])["ok"] is True


def test_plan_shows_every_tier(project: Path) -> None:
    table, _ = run("plan", "c.yaml", "training.tier=disk")

    for word in ("device", "host", "disk", "encode", "records", "load/batch", "stall"):
        assert word in table


@pytest.mark.draws
def test_train_reports_and_leaves_its_pictures(project: Path) -> None:
    report = run_json("train", "c.yaml")

    wanted = {
        "tier", "stall", "epochs", "steps", "val_nrmse", "persistence_nrmse", "run_dir", "startup",
        "cache_reused",
    }  # fmt: skip
    assert wanted <= report.keys()
    assert {"cache_s", "first_batch_s", "total_s"} <= report["startup"].keys()
    assert (report["epochs"], report["steps"], report["cache_reused"]) == (2, 2 * 6, False)
    assert report["epoch_steps"] == 6
    assert (project / report["run_dir"] / "curves.png").stat().st_size > 0
    assert (project / report["run_dir"] / "report.html").stat().st_size > 0


def test_a_run_that_waits_longer_than_it_may_ends_with_5(project: Path) -> None:
    """Everything is written as usual; what failed is the budget."""
    stdout, stderr = run("train", "c.yaml", "--max-stall", "0.000001%", exit_code=5)

    assert "NRMSE" in stdout
    verdict = stderr.splitlines()[-1]
    assert re.match(r"stall .* steps waited .* for data, .* The limit is .*%\. \S+", verdict)
    assert (project / "runs" / "burgers1d" / "report.html").is_file()

    report = run_json("train", "c.yaml", "training.max_stall=1.0")
    assert report["over_budget"] is None
    assert set(report["stall_parts"]) <= {"fetch", "read", "gather", "copy", "transform", "wait"}


def test_plan_knows_the_stall_once_a_step_was_timed(project: Path) -> None:
    assert run_json("plan", "c.yaml")["predicted_stall"] is None

    run("train", "c.yaml")

    said = run_json("plan", "c.yaml")
    assert 0 <= said["predicted_stall_low"] <= said["predicted_stall"] <= said["predicted_stall_high"] <= 1
    assert "likely" in said["reason"]


def test_a_path_with_an_equals_sign_is_a_path(project: Path) -> None:
    (project / "nu=0.1").mkdir()
    (project / "c.yaml").rename(project / "nu=0.1" / "c.yaml")

    assert run_json("precompute", "nu=0.1/c.yaml", "latent.dim=4")["caches"][0]["records"] == 12
    assert run_json("cache", "why", "nu=0.1/c.yaml", "latent.dim=4")["same"] is True


def test_a_manifest_that_cannot_be_written_is_refused_before_the_work(project: Path) -> None:
    _, message = run("precompute", "c.yaml", "--manifest", "c.yaml/m.json", exit_code=3)

    assert "c.yaml is not a folder" in message
    assert not (project / "data").exists()


def test_an_absent_split_names_those_that_are_there(project: Path) -> None:
    (project / "raw" / "burgers1d_val.h5").rename(project / "raw" / "burgers1d_test.h5")

    _, message = run("train", "c.yaml", exit_code=3)

    assert 'split "val" has no file' in message
    assert "train, test" in message


def test_precompute_goes_without_val_and_says_so(project: Path) -> None:
    (project / "raw" / "burgers1d_val.h5").unlink()

    stdout, notes = run("precompute", "c.yaml", "--json")

    assert [cache["name"] for cache in json.loads(stdout)["caches"]] == ["burgers1d_train"]
    assert "only train is encoded" in notes


def test_a_run_cut_short_says_how_much_of_an_epoch_it_was(project: Path) -> None:
    part, _ = run("train", "c.yaml", "training.max_steps=3")
    whole, _ = run("train", "c.yaml", "training.epochs=2")

    assert "3 steps of the 6 of an epoch" in part
    assert "2 epochs, 12 steps" in whole


def test_a_resumed_run_says_what_is_different_now() -> None:
    said: list[str] = []

    output.events(said.append)("resume", {"step": 5, "epoch": 2, "changed": {"threads": [2, 4]}})

    assert said == ["resumed at step 5, epoch 2; threads was 2, is 4"]


def test_the_demo_makes_its_data_and_finds_its_cache_again(project: Path) -> None:
    quick = ["training.max_steps=4", "training.epochs=1"]

    first = run_json("demo", *quick)
    text, _ = run("demo", *quick)

    assert {"data_s", "encode_s", "val_nrmse", "startup", "tier"} <= first.keys()
    assert first["cache_reused"] is False
    assert (project / "data/demo/burgers.hdf5").is_file()
    for words in ("1  data", "2  cache", "3  plan", "4  train", "nothing to encode", "runs/demo/curves.png"):
        assert words in text
