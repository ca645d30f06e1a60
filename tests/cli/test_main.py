"""Commands in this process: help, JSON keys, flags, messages."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from stoker.cli import render
from stoker.cli.edge import console
from stoker.cli.edge import run as run_app
from stoker.cli.main import app, main
from stoker.config import load_config
from stoker.errors import StalledError
from stoker.pipeline.inspect import inspect_cache
from stoker.pipeline.plan import plan_config
from stoker.pipeline.validate import validate_config
from stoker.pipeline.why import Explanation
from stoker.precompute.space import needed_bytes
from stoker.schema import Field
from stoker.store import Difference
from stoker.units import MIB
from tests.conftest import write_burgers

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
    assert list(COMMANDS) == [
        "demo",
        "precompute",
        "plan",
        "train",
        "inspect",
        "verify",
        "compact",
        "gc",
        "import-pt",
        "stage",
        "bench",
        "validate",
        "why",
    ]


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
    notes = [next(row["note"] for row in p["rows"] if row["tier"] == "encode") for p in (before, after)]
    assert notes[0].startswith("12 are encoded first, and counted above as stored; storing them takes")
    assert notes[1] == "nothing is missing"


def test_packed_latents_are_encoded_planned_and_trained_on(project: Path) -> None:
    wide = ["latent.dim=32", "latent.tokens=4"]
    packed = [*wide, "training.latent_cache_dtype=int8", "precompute.max_error=0.01"]
    run("precompute", "c.yaml", *wide)
    assert "training.latent_cache_dtype=int8 would take" in run("plan", "c.yaml", *wide)[0]

    made = run_json("precompute", "c.yaml", *packed, "precompute.keep=data")["caches"][0]
    shown = run_json("inspect", made["path"])
    trained = run_json("train", "c.yaml", *packed, "precompute.keep=data", "training.max_steps=2")

    assert made["fields"]["latent"]["packed"] is True
    assert made["fields"]["data"]["kept"] is True
    assert 0.001 < shown["error"]["latent"]["max"] < 0.01
    assert "int8 + scales" in run("inspect", made["path"])[0]
    assert trained["cache_reused"] is True
    assert trained["physical_nrmse"] is not None
    assert trained["reconstruction_nrmse"] is not None
    assert run_json("verify", made["path"])["ok"] is True


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
    assert report["epoch_steps"] == 6
    assert (project / report["run_dir"] / "curves.png").stat().st_size > 0
    assert (project / report["run_dir"] / "report.html").stat().st_size > 0


def test_a_run_that_waits_longer_than_it_may_ends_with_5(project: Path) -> None:
    """Everything is written as usual; what failed is the budget."""
    stdout, stderr = run("train", "c.yaml", "--max-stall", "0.000001%", exit_code=5)

    assert "NRMSE" in stdout
    verdict = stderr.splitlines()[-1]
    assert re.match(r"stall .* were waited for data, .* At most .* was asked for\. \S+", verdict)
    assert (project / "runs" / "burgers1d" / "report.html").is_file()

    report = run_json("train", "c.yaml", "training.max_stall=1.0")
    assert report["over_budget"] is None
    assert set(report["stall_parts"]) <= {"read", "gather", "copy", "transform", "wait"}


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
    assert "12 of 12 stored\n" in text


def test_inspect_tells_what_is_quarantined_from_what_is_missing(project: Path) -> None:
    with h5py.File(project / "raw" / "burgers1d_train.h5", "r+") as file:
        file["tensor"][3, 0, 0] = np.nan
    run("precompute", "c.yaml", "--splits", "train", exit_code=4)

    text, _ = run("inspect", "data/latent_cache/burgers1d_train")

    assert "11 of 12 stored, 1 quarantined\n" in text


def test_the_folder_above_the_caches_names_them(project: Path) -> None:
    run("precompute", "c.yaml")

    error = run_json("inspect", "data/latent_cache", exit_code=4)["error"]

    assert "holds caches by name: burgers1d_train, burgers1d_val" in error
    assert error.endswith("Name one, as data/latent_cache/burgers1d_train")


def flip_a_record_byte(project: Path) -> None:
    shard = next((project / "data/latent_cache/burgers1d_train").glob("*/shard-*"))
    content = bytearray(shard.read_bytes())
    content[8192] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)


def test_verify_names_the_damaged_record(project: Path) -> None:
    run("precompute", "c.yaml")
    assert run_json("verify", "data/latent_cache/burgers1d_train") == {
        "records": 12, "ok": True, "bad": [], "unchecked": [],
    }  # fmt: skip

    flip_a_record_byte(project)
    report = run_json("verify", "data/latent_cache/burgers1d_train", exit_code=4)

    assert report["ok"] is False
    assert {"index", "shard", "why"} == report["bad"][0].keys()
    text, _ = run("verify", "data/latent_cache/burgers1d_train", exit_code=4)
    assert f"sample {report['bad'][0]['index']}" in text


def test_verify_of_a_subset_reads_fewer_records(project: Path) -> None:
    run("precompute", "c.yaml")

    report = run_json("verify", "data/latent_cache/burgers1d_train", "--subset", "0.25")
    text, _ = run("verify", "data/latent_cache/burgers1d_train", "--subset", "0.25")

    assert (report["records"], report["unchecked"][0]) == (3, "9 of 12 records")
    assert "3 of 3 records match" in text
    assert "not looked at: 9 of 12 records" in text


def test_validate_has_a_row_for_each_thing(project: Path) -> None:
    report = run_json("validate", "c.yaml")

    checks = {row["check"].split()[0]: row["status"] for row in report["rows"]}
    assert checks.keys() == {
        "config", "training", "data", "encoder", "cache", "windows", "run", "gpu", "memory", "disk",
    }  # fmt: skip
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
    ("override", "said"),
    [
        ("data.files=nowhere.h5", "nowhere.h5 does not exist"),
        ("encoder.checkpoint=nowhere.safetensors", "nowhere.safetensors: cannot be read as encoder weights"),
        ("encoder.patch_size=5", "patch (1, 5) does not divide grid"),
    ],
)
def test_a_setting_that_names_what_is_not_there_exits_with_3(
    project: Path, command: str, override: str, said: str
) -> None:
    _, message = run(command, "c.yaml", override, exit_code=3)

    assert said in message


@pytest.mark.parametrize(
    ("overrides", "check", "said"),
    [
        pytest.param(["training.rollout_horizon=9"], "windows", "training.rollout_horizon", id="window"),
        pytest.param(["data.task=[burgers1d,b]"], "data b_train", "no file for data.task 'b'", id="tasks"),
        pytest.param(["data.split=val"], "training", "data.split=train", id="split"),
        pytest.param(["data.split=[train,foo]"], "data", 'split "foo" has no file', id="later-split"),
        pytest.param(["training.run_dir=c.yaml/x"], "run folder", "c.yaml is not a folder", id="run-folder"),
        pytest.param(
            ["training.latent_cache_dir=c.yaml"], "disk", "c.yaml is not a folder", id="cache-folder"
        ),
    ],
)
def test_validate_fails_for_what_precompute_or_train_refuse(
    project: Path, overrides: list[str], check: str, said: str
) -> None:
    rows = run_json("validate", "c.yaml", *overrides, exit_code=3)["rows"]

    failed = [row for row in rows if row["status"] == "fail"]
    assert any(row["check"].startswith(check) and said in row["detail"] for row in failed), failed
    refusing = "precompute" if check == "data" else "train"
    _, message = run(refusing, "c.yaml", *overrides, exit_code=3)
    assert said in message
    assert len(message.splitlines()) == 1
    assert not (project / "data").exists(), "refused only after something was encoded"


def test_validate_finds_a_split_that_the_other_splits_encoder_does_not_fit(project: Path) -> None:
    write_burgers(project / "raw" / "burgers1d_val.h5", samples=4, points=64)

    rows = run_json("validate", "c.yaml", exit_code=3)["rows"]
    run("train", "c.yaml", exit_code=3)

    assert [row["check"] for row in rows if row["status"] == "fail"] == ["encoder burgers1d_val"]
    assert not list(project.glob("data/latent_cache/burgers1d_train/*/shard-*"))


@pytest.mark.parametrize(("spare", "exit_code"), [(0, 0), (-1, 6)])
def test_validate_and_precompute_ask_for_the_same_room(
    project: Path, monkeypatch: pytest.MonkeyPatch, spare: int, exit_code: int
) -> None:
    """Both caches must fit one after the other, with the reserve that precompute keeps."""
    record = {"latent": Field(shape=(9, 4, 8), dtype="float16"), "Nu": Field(shape=(), dtype="float32")}
    first, second = needed_bytes(record, 12), needed_bytes(record, 4)
    free = first + second + 16 * MIB + spare
    monkeypatch.setattr("stoker.plan.resources.disk_space", lambda path: (free, None))

    rows = run_json("validate", "c.yaml", exit_code=exit_code)["rows"]
    monkeypatch.setattr("stoker.plan.resources.disk_space", lambda path: (free - first, None))
    run("precompute", "c.yaml", "--splits", "val", exit_code=exit_code)

    assert {row["check"]: row["status"] for row in rows}["disk"] == ("fail" if exit_code else "pass")


def test_a_complete_cache_in_a_folder_that_cannot_be_written_is_no_failure(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("precompute", "c.yaml")
    monkeypatch.setattr(
        "stoker.pipeline.folders._obstacle", lambda path: "no" if "latent_cache" in str(path) else None
    )

    rows = run_json("validate", "c.yaml")["rows"]

    assert {row["status"] for row in rows} == {"pass"}


@pytest.mark.parametrize(
    ("command", "override", "cure"),
    [
        ("plan", "data.preset=well", "data.preset=pdebench"),
        ("train", "encoder.patch_size=5", "'encoder.patch_size=[1, 4]'"),
        ("validate", "encoder.patch_size=5", "'encoder.patch_size=[1, 4]'"),
        ("precompute", "latent.tokens=500", "latent.tokens="),
    ],
)
def test_a_cure_is_said_as_a_setting(project: Path, command: str, override: str, cure: str) -> None:
    stdout, message = run(command, "c.yaml", override, exit_code=3)

    assert f" {cure}" in stdout + message


def test_a_path_with_an_equals_sign_is_a_path(project: Path) -> None:
    (project / "nu=0.1").mkdir()
    (project / "c.yaml").rename(project / "nu=0.1" / "c.yaml")

    assert run_json("precompute", "nu=0.1/c.yaml", "latent.dim=4")["caches"][0]["records"] == 12
    assert run_json("why", "nu=0.1/c.yaml", "latent.dim=4")["same"] is True


def test_a_manifest_that_cannot_be_written_is_refused_before_the_work(project: Path) -> None:
    _, message = run("precompute", "c.yaml", "--manifest", "c.yaml/m.json", exit_code=3)

    assert "c.yaml is not a folder" in message
    assert not (project / "data").exists()


def test_why_takes_settings_as_the_other_commands_do(project: Path) -> None:
    run("precompute", "c.yaml", "--splits", "train")
    cache = "data/latent_cache/burgers1d_train"

    alone = run_json("why", "c.yaml", "latent.dim=6")
    beside = run_json("why", cache, "c.yaml", "latent.dim=6")
    _, message = run("why", cache, "latent.dim=6", exit_code=3)
    _, three = run("why", "c.yaml", cache, cache, exit_code=3)

    assert {d["entry"]: (d["a"], d["b"]) for d in alone["differences"]}["encoder.config.dim"] == (6, 8)
    assert {d["entry"]: (d["a"], d["b"]) for d in beside["differences"]}["encoder.config.dim"] == (8, 6)
    assert "latent.dim=6" in message
    assert "at most" in three


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


def test_why_shows_values_whole_but_for_digests(project: Path) -> None:
    part = {"name": "burgers1d_train_and_more.h5", "count": 10_000, "selection": [0, 9_000]}
    found = [Difference(entry="p", a=part, b=None, note="only in the first"),
             Difference(entry="d", a="0123456789abcdef" * 4, b="f" * 64, note="other bytes")]  # fmt: skip
    screen = Screen()

    render.why(Explanation(a="a", b="b", differences=tuple(found)), console(screen))

    text = " ".join(strip_ansi(screen.getvalue()).split())
    assert '{"name": "burgers1d_train_and_more.h5", "count": 10000, "selection": [0, 9000]}' in text
    assert "0123456789abcdef…89abcdef -> ffffffffffffffff…ffffffff" in text


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["plan", "--json"], "Missing argument 'CONFIG'", id="missing"),
        pytest.param(["train", "c.yaml", "--nosuch", "--json"], "No such option: --nosuch", id="option"),
        pytest.param(["verify", "x", "--subset", "q", "--json"], "--subset", id="value"),
        pytest.param(["nosuch", "--json"], "No such command 'nosuch'", id="command"),
    ],
)
def test_a_command_typed_wrong_answers_in_json_too(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_app(app, words)

    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert len(shown.out.splitlines()) == 1
    assert (stop.value.code, answer["exit_code"]) == (2, 2)
    assert said in answer["error"]
    assert said in shown.err


def test_without_json_a_command_typed_wrong_shows_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_app(app, ["plan"])

    shown = capsys.readouterr()
    assert (stop.value.code, shown.out) == (2, "")
    assert "Usage: stoker plan" in shown.err
    assert "Usage:" in shown.err


def test_a_tier_that_cannot_hold_the_records_is_a_lack_of_resources(project: Path) -> None:
    _, message = run(
        "plan", "c.yaml", "training.tier=host", "training.reserve_bytes=999999999999999", exit_code=6
    )

    assert "host memory" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_lack_of_resources(project: Path) -> None:
    _, message = run("plan", "c.yaml", "training.device=cuda", exit_code=6)

    assert "device cuda is not there" in message
    assert "training.device=cpu" in message


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
    monkeypatch.setattr("stoker.cli.main.run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert stop.value.code == 130


def test_debug_shows_where_an_error_came_from(project: Path) -> None:
    _, brief = run("inspect", "nowhere", exit_code=4)
    _, full = run("inspect", "nowhere", "--debug", exit_code=4)

    assert "Traceback" not in brief
    assert "Traceback" in full


class Screen(io.StringIO):
    """A terminal, as far as a program can tell."""

    def isatty(self) -> bool:
        return True


def test_without_colour_nothing_but_text_is_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    result = plan_config(load_config("c.yaml"))
    shown: list[str] = []
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        screen = Screen()
        render.plan(result, console(screen))
        shown.append(screen.getvalue())

    assert "\x1b[1m" in shown[0]
    assert "\x1b" not in shown[1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_loses_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Words move to another line; figures and paths stay whole."""
    run("precompute", "c.yaml")
    monkeypatch.setenv("COLUMNS", str(columns))
    cache = "data/latent_cache/burgers1d_train"
    summary = inspect_cache(Path(cache))
    screen = Screen()

    render.inspect(summary, console(screen))
    render.plan(plan_config(load_config("c.yaml")), console(screen))
    render.validate(validate_config("c.yaml"), console(screen))

    text = strip_ansi(screen.getvalue())
    assert "…" not in text
    assert summary.path in text
    for figure in ("(9, 4, 8)", "float16", "load/batch", "one copy for all processes of this node;"):
        assert figure in text.replace("\n  ", " ")
    header, _, host = [line for line in text.splitlines() if line.startswith(("tier", "device", "host"))][:3]
    assert host[: header.index("records") + len("records")].split() == ["host", "12"], "not below its name"


def strip_ansi(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_run_cut_short_says_how_much_of_an_epoch_it_was(project: Path) -> None:
    part, _ = run("train", "c.yaml", "training.max_steps=3")
    whole, _ = run("train", "c.yaml", "training.epochs=2")

    assert "3 steps of the 6 of an epoch" in part
    assert "2 epochs, 12 steps" in whole


def test_a_resumed_run_says_what_is_different_now() -> None:
    said: list[str] = []

    render.events(said.append)("resume", {"step": 5, "epoch": 2, "changed": {"threads": [2, 4]}})

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
