"""Commands in this process: help, JSON keys, flags, messages."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import typer
from typer.main import get_command
from typer.testing import CliRunner

from stoker.cli.edge import edge
from stoker.cli.main import app, main
from stoker.errors import StalledError
from stoker.pipeline.plan import plan_config

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
DOCS = Path(__file__).parent.parent.parent / "docs" / "cli.md"


def run(*args: str, exit_code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout, result.stderr


def run_json(*args: str, exit_code: int = 0) -> dict[str, Any]:
    stdout, _ = run(*args, "--json", exit_code=exit_code)
    lines = stdout.splitlines()
    assert len(lines) == 1, stdout
    return json.loads(lines[0])


def test_these_are_the_commands() -> None:
    assert list(COMMANDS) == ["demo", "precompute", "plan", "train", "inspect", "verify", "validate", "why"]


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
    page = DOCS.read_text()

    assert f"## stoker {name}" in page
    assert f"$ stoker {name}" in page


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
    assert "\x1b" not in first + second, "colours in a pipe"


def test_flags_of_the_earlier_script_become_settings(project: Path) -> None:
    report = run_json(
        "precompute", "--config", "c.yaml", "--tasks", "burgers1d", "--splits", "train", "val",
        "--root", "raw",
        "--cache-dir", "elsewhere", "--cache-dtype", "float32", "--latent-dim", "6", "--latent-len", "2",
        "--device", "cpu", "--batch-size", "4", "--no-parallel", "--limit", "3",
        "--manifest", "m/manifest.json", "precompute.max_quarantined=0",
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


def test_flags_without_effect_say_so(project: Path) -> None:
    _, notes = run("precompute", "c.yaml", "--batch-size", "4", "--pin-memory")

    assert "--batch-size has no effect" in notes
    assert "pin_memory has no effect" in notes


def test_overwrite_encodes_again(project: Path) -> None:
    run("precompute", "c.yaml")

    again = run_json("precompute", "c.yaml", "--overwrite", "--splits", "val")["caches"]

    assert [(cache["name"], cache["encoded"]) for cache in again] == [("burgers1d_val", 4)]


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(["c.yaml", "latent.dim=8", "--latent-dim", "8"], id="flag-and-setting"),
        pytest.param(["c.yaml", "--config", "c.yaml"], id="file-and-flag"),
        pytest.param(["c.yaml", "--no-parallel", "--num-workers", "2"], id="flags-that-contradict"),
        pytest.param(
            ["c.yaml", "--parallel", "--num-workers", "0"], id="flags-that-contradict-the-other-way"
        ),
        pytest.param(["c.yaml", "latent.dim=8", "latent.dim=8"], id="setting-twice"),
        pytest.param(["latent.dim=8"], id="no-file"),
    ],
)
def test_one_setting_given_both_ways_is_refused(project: Path, args: list[str]) -> None:
    _, message = run("precompute", *args, exit_code=3)

    assert len(message.splitlines()) == 1
    assert not (project / "data").exists()


def test_plan_says_where_and_why(project: Path) -> None:
    before = run_json("plan", "c.yaml")
    run("precompute", "c.yaml")
    after = run_json("plan", "c.yaml")

    assert {"tiers", "bytes", "reason", "predicted_stall"} <= after.keys()
    assert after["tiers"] == {"device": 0, "host": 12, "disk": 0, "encode": 0} == before["tiers"]
    assert (before["missing"], after["missing"]) == (12, 0)
    assert before["reason"].startswith("12 records are to be encoded first")


def test_plan_shows_every_tier(project: Path) -> None:
    table, _ = run("plan", "c.yaml", "training.tier=disk")

    for word in ("device", "host", "disk", "encode", "records", "load/batch", "stall"):
        assert word in table


def test_train_reports_and_leaves_its_pictures(project: Path) -> None:
    report = run_json("train", "c.yaml")

    wanted = {
        "tier", "stall", "epochs", "steps", "val_nrmse", "persistence_nrmse", "run_dir", "startup",
        "cache_reused",
    }  # fmt: skip
    assert wanted <= report.keys()
    assert {"cache_s", "first_batch_s", "total_s"} <= report["startup"].keys()
    assert (report["epochs"], report["steps"], report["cache_reused"]) == (2, 2 * 6, False)
    assert (project / report["run_dir"] / "curves.png").stat().st_size > 0
    assert (project / report["run_dir"] / "report.html").stat().st_size > 0


def test_plan_knows_the_stall_once_a_step_was_timed(project: Path) -> None:
    assert run_json("plan", "c.yaml")["predicted_stall"] is None

    run("train", "c.yaml")

    assert 0 <= run_json("plan", "c.yaml")["predicted_stall"] <= 1


def test_inspect_shows_the_cache(project: Path) -> None:
    run("precompute", "c.yaml")

    summary = run_json("inspect", "data/latent_cache/burgers1d_train")

    assert {
        "fingerprint", "records", "fields", "shards", "bytes", "complete", "quarantined", "statistics",
    } <= summary.keys()  # fmt: skip
    assert (summary["records"], summary["complete"], summary["quarantined"]) == (12, True, [])
    text, _ = run("inspect", "data/latent_cache/burgers1d_train")
    assert summary["fingerprint"] in text
    assert "latent" in text


def flip_a_record_byte(project: Path) -> None:
    shard = next((project / "data/latent_cache/burgers1d_train").glob("*/shard-*"))
    content = bytearray(shard.read_bytes())
    content[8192] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)


def test_verify_names_the_damaged_record(project: Path) -> None:
    run("precompute", "c.yaml")
    assert run_json("verify", "data/latent_cache/burgers1d_train") == {"records": 12, "ok": True, "bad": []}

    flip_a_record_byte(project)
    report = run_json("verify", "data/latent_cache/burgers1d_train", exit_code=4)

    assert report["ok"] is False
    assert {"index", "shard", "why"} == report["bad"][0].keys()
    text, _ = run("verify", "data/latent_cache/burgers1d_train", exit_code=4)
    assert f"sample {report['bad'][0]['index']}" in text


def test_verify_of_a_subset_reads_fewer_records(project: Path) -> None:
    run("precompute", "c.yaml")

    assert 0 < run_json("verify", "data/latent_cache/burgers1d_train", "--subset", "0.25")["records"] < 12


def test_validate_has_a_row_for_each_thing(project: Path) -> None:
    report = run_json("validate", "c.yaml")

    checks = {row["check"].split()[0]: row["status"] for row in report["rows"]}
    assert {"config", "data", "encoder", "cache", "memory", "disk", "gpu"} == checks.keys()
    assert set(checks.values()) <= {"pass", "warn"}
    assert all({"check", "status", "detail"} == row.keys() for row in report["rows"])
    text, _ = run("validate", "c.yaml")
    assert "0 failed" in text


def test_validate_prints_the_settings_in_force(project: Path) -> None:
    text, _ = run("validate", "c.yaml", "latent.dim=6", "--print-config")
    (project / "again.yaml").write_text(text)

    printed = run_json("validate", "again.yaml", "--print-config")

    assert printed["latent"] == {"dim": 6, "tokens": 4}
    assert printed["precompute"]["readers"] == 0


@pytest.mark.parametrize(
    ("override", "check", "exit_code"),
    [
        pytest.param("latent.dimm=3", "config", 3, id="unknown-setting"),
        pytest.param("data.root=nowhere", "data", 3, id="no-files"),
        pytest.param("encoder.patch_size=5", "encoder", 3, id="patch-does-not-divide"),
        pytest.param("training.reserve_bytes=999999999999999", "memory", 6, id="no-memory"),
    ],
)
def test_validate_fails_with_the_code_of_what_failed(
    project: Path, override: str, check: str, exit_code: int
) -> None:
    report = run_json("validate", "c.yaml", override, "training.tier=host", exit_code=exit_code)

    assert check in {row["check"].split()[0] for row in report["rows"] if row["status"] == "fail"}


def test_validate_shows_disk_also_when_memory_does_not_suffice(project: Path) -> None:
    report = run_json(
        "validate", "c.yaml", "training.reserve_bytes=999999999999999", "training.tier=host", exit_code=6
    )

    assert [row["check"] for row in report["rows"]][-3:] == ["gpu", "memory", "disk"]


def test_validate_shows_memory_also_when_the_disk_does_not_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalled(path: Path) -> tuple[int, int]:
        if "latent_cache" in str(path):
            raise StalledError(f"{path} does not answer")
        return 1 << 30, 1 << 20

    monkeypatch.setattr("stoker.plan.resources.disk_space", stalled)
    rows = run_json("validate", "c.yaml", exit_code=6)["rows"]

    assert {row["check"]: row["status"] for row in rows[-2:]} == {"memory": "pass", "disk": "fail"}


@pytest.mark.parametrize("command", ["precompute", "train", "plan"])
@pytest.mark.parametrize(
    "override", ["data.files=nowhere.h5", "encoder.checkpoint=nowhere.safetensors", "encoder.patch_size=5"]
)
def test_a_setting_that_names_what_is_not_there_exits_with_3(
    project: Path, command: str, override: str
) -> None:
    run(command, "c.yaml", override, exit_code=3)


def test_why_compares_settings_with_the_nearest_cache(project: Path) -> None:
    run("precompute", "c.yaml", "--splits", "train")
    assert run_json("why", "c.yaml")["same"] is True

    text = (project / "c.yaml").read_text().replace("dim: 8", "dim: 6")
    (project / "other.yaml").write_text(text)
    report = run_json("why", "other.yaml")

    assert report["same"] is False
    assert {"entry", "a", "b"} <= report["differences"][0].keys()
    entries = {d["entry"]: (d["a"], d["b"]) for d in report["differences"]}
    assert entries["encoder.config.dim"] == (6, 8)
    shown, _ = run("why", "other.yaml", "c.yaml")
    assert "encoder.config.dim" in shown
    assert "6  ->  8" in shown


def test_a_wrong_name_is_one_line_with_the_nearest_one(project: Path) -> None:
    _, message = run("train", "c.yaml", "training.latent_cache_dirr=x", exit_code=3)

    assert len(message.splitlines()) == 1
    assert "did you mean training.latent_cache_dir?" in message


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


def test_a_failure_with_json_is_one_object_too(project: Path) -> None:
    report = run_json("inspect", "nowhere", exit_code=4)

    assert report["exit_code"] == 4
    assert "nowhere" in report["error"]


def test_a_tier_that_cannot_hold_the_records_is_a_lack_of_resources(project: Path) -> None:
    _, message = run(
        "plan", "c.yaml", "training.tier=host", "training.reserve_bytes=999999999999999", exit_code=6
    )

    assert "host memory" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_lack_of_resources(project: Path) -> None:
    run("plan", "c.yaml", "training.device=cuda", exit_code=6)


def test_a_sample_that_cannot_be_encoded_makes_the_cache_incomplete(project: Path) -> None:
    with h5py.File(project / "raw" / "burgers1d_train.h5", "r+") as file:
        file["tensor"][3, 0, 0] = np.nan

    _, message = run("precompute", "c.yaml", "--splits", "train", exit_code=4)
    allowed = run_json("precompute", "c.yaml", "precompute.max_quarantined=0.5", "--splits", "train")
    text, _ = run("precompute", "c.yaml", "precompute.max_quarantined=0.5", "--splits", "train")

    assert "1" in message
    assert "quarantined" in message
    assert allowed["caches"][0]["quarantined"] == 1
    assert "sample 3" in text


def test_no_colours_in_a_pipe_or_with_no_color(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in "".join(run("validate", "c.yaml"))

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[3" not in "".join(run("validate", "c.yaml"))


def test_what_a_library_prints_does_not_spoil_the_json(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatty(*args: Any, **more: Any) -> Any:
        print("hello from below")  # noqa: T201 - a library that prints is what this is about
        return plan_config(*args, **more)

    monkeypatch.setattr("stoker.pipeline.plan.plan_config", chatty)

    assert run_json("plan", "c.yaml")["records"] == 12


def test_sigterm_is_an_interrupt_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("stoker.cli.main.app", lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(typer.Exit) as stop, edge(as_json=False, debug=False):
            main()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert stop.value.exit_code == 130


def test_debug_shows_where_an_error_came_from(project: Path) -> None:
    _, brief = run("inspect", "nowhere", exit_code=4)
    _, full = run("inspect", "nowhere", "--debug", exit_code=4)

    assert "Traceback" not in brief
    assert "Traceback" in full


def test_the_demo_makes_its_data_and_finds_its_cache_again(project: Path) -> None:
    quick = ["training.max_steps=4", "training.epochs=1"]

    first = run_json("demo", *quick)
    text, _ = run("demo", *quick)

    assert {"data_s", "encode_s", "val_nrmse", "startup", "tier"} <= first.keys()
    assert first["cache_reused"] is False
    assert (project / "data/demo/burgers.hdf5").is_file()
    for words in ("1  data", "2  cache", "3  plan", "4  train", "nothing to encode", "runs/demo/curves.png"):
        assert words in text
