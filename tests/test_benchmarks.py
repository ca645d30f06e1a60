"""Benchmarks that need hardware run their twins here, so that they work when the hardware is there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_the_cpu_and_trains_alike() -> None:
    done = subprocess.run(
        [sys.executable, "gpu_serve.py", "--device", "cpu", "--quick"],
        cwd=ROOT / "benchmarks",
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert {row["part"] for row in rows} == {"gather", "kernel", "load", "host", "train", "encode"}
    trained = [row for row in rows if row["part"] == "train"]
    assert len(trained) == 6
    for row in trained:
        assert row["steps_compared"] == 10
        assert row["curve_apart"] < 1e-6, "the batches are not those of the DataLoader"


def test_the_gpu_probe_runs_on_the_cpu() -> None:
    parts = ["serving", "static_transforms", "order"]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_probe.py", "--device", "cpu", *parts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:.:benchmarks", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert {fact["part"] for fact in facts} == {*parts}
    assert all(fact["ok"] for fact in facts), facts


def run_quickly(name: str, *words: str, cwd: Path, timeout: float = 170) -> list[dict[str, Any]]:
    """Rows of a benchmark's quick run, without the line of the hardware."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


def test_the_headline_benchmark_trains_every_contender_on_the_same_examples(tmp_path: Path) -> None:
    _, *rows = run_quickly("headline", "--only", "features", cwd=tmp_path)

    measured = {row["role"]: row for row in rows if "losses" in row}
    assert {"dataloader", "tensor", "stoker"} <= measured.keys()
    for row in measured.values():
        assert row["losses"][-1] == pytest.approx(measured["dataloader"]["losses"][-1], rel=0.1)
        low, high = row["later_epoch_range"]
        assert 0 < low <= row["later_epoch_s"] <= high
        assert 0 < row["stall"] < 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", ["images", "pde"])
def test_the_headline_benchmark_runs_with_an_encoder(tmp_path: Path, workload: str) -> None:
    _, *rows = run_quickly("headline", "--only", workload, cwd=tmp_path, timeout=500)

    measured = {row["role"]: row for row in rows if "losses" in row}
    assert {"dataloader", "by_hand", "tensor", "stoker"} <= measured.keys()


@pytest.mark.slow
def test_batches_and_losses_are_the_same_over_ranks_and_after_a_kill(tmp_path: Path) -> None:
    rows = {row["run"]: row for row in run_quickly("determinism", cwd=tmp_path)}

    assert all(row["equal_batches"] for row in rows.values())
    assert rows["1 rank, killed and resumed"]["largest_difference"] == 0
    assert rows["2 ranks"]["largest_difference"] < 1e-3


@pytest.mark.draws
@pytest.mark.parametrize("name", ["headline", "determinism"])
def test_pictures_of_results_have_a_title_and_each_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pictures

    head = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpu": None, "torch": "2.13.0"}
    epochs = {"first_epoch_s": 3.21, "first_epoch_range": [3, 4], "later_epoch_range": [0.9, 2.0]}
    rows: list[dict[str, Any]] = [
        {"workload": workload, "role": role, "contender": "x", "runs": 5, "later_epoch_s": later, **epochs}
        for workload in ("images", "pde", "features")
        for role, later in (("dataloader", 1.98), ("other", 1.5), ("stoker", 0.987))
    ]
    if name == "determinism":
        run = {"ranks": 1, "losses": [1.0, 0.5], "equal_losses": 2, "killed_after": None}
        rows = [
            {"run": "1 rank", **run, "largest_difference": 0.0},
            {"run": "2 ranks", **run, "equal_losses": 1, "largest_difference": 1.25e-7},
            {"run": "1 rank, killed and resumed", **run, "killed_after": 1, "largest_difference": 0.0},
        ]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, [head, *rows])))
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)

    getattr(pictures, f"draw_{name}")(tmp_path / "a.svg")

    for file in ("a.svg", "a-dark.svg"):
        text = (tmp_path / file).read_text()
        assert "<title>" in text
        told = {"headline": ["3.21", "0.987", "a CPU"], "determinism": ["1.2e-07", "bit for bit"]}[name]
        assert all(one in text for one in told)
    assert (tmp_path / "a.svg").read_text() != (tmp_path / "a-dark.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_session_says_so_and_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "run", "gpu", str(tmp_path / "out")], capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 2
    assert "GPU" in done.stderr
    assert not (tmp_path / "out").exists()


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  *is_available*) exit 0 ;;
  *{failing}*) echo '{said}'; exit {code} ;;
  *) echo '{{"part": "fake"}}' ;;
esac
"""


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")
@pytest.mark.parametrize(
    ("failing", "said", "code", "ends_with"),
    [
        ("nothing", "", 0, 0),
        ("test_transforms", "", 1, 1),
        ("gpu_probe.py kernel", "", 3, 1),
        ("--only load", "the kernel failed; batches are cast in plain torch", 0, 1),
    ],
    ids=["all is well", "a test fails", "a probe fails", "a kernel was replaced"],
)
def test_a_gpu_session_saves_its_results_and_fails_where_a_step_did(
    tmp_path: Path, failing: str, said: str, code: int, ends_with: int
) -> None:
    """With an interpreter that only pretends."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(failing=failing.replace(" ", "\\ "), said=said, code=code))
    python.chmod(0o755)

    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu_session.sh", str(tmp_path / "out")],
        env={**os.environ, "PYTHON": str(python), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == ends_with, done.stdout + done.stderr
    summary = (tmp_path / "out" / "summary.txt").read_text()
    steps = [line.split()[0] for line in summary.splitlines() if " rc=" in line]
    assert {"env", "kernel", "t_tier", "t_cuda", "t_ways", "t_encoders", "t_pressure", "claims"} <= set(steps)
    assert {"b_gather", "b_train"} <= set(steps)
    assert summary.splitlines()[-1].startswith("failed: " if ends_with else "all steps passed")
    assert ("plain torch" in summary) == ("plain torch" in said)
    facts = (tmp_path / "out" / "facts.jsonl").read_text().splitlines()
    assert len(facts) >= len(steps) - 1
    assert (tmp_path / "out" / "logs.tar.gz").stat().st_size
    assert not list(tmp_path.glob("stoker-gpu-session-*"))


def test_a_session_on_a_gpu_gives_tables_and_says_what_was_reached(tmp_path: Path) -> None:
    """Also of steps that were cut off in the middle of a line."""
    head = {"benchmark": "gpu_serve", "commit": "abc", "when": "2026-11-29", "gpu": "a GPU"}
    gathered = {"part": "gather", "workload": "W3", "batch_MiB": 147.0, "of_copy": 0.67}
    served = {"part": "serving", "ok": True, "way": "crops", "waits_for_the_device": 0.25}
    wrong = {"part": "kernel", "ok": False, "side": 225}
    (tmp_path / "b_gather.jsonl").write_text("\n".join(map(json.dumps, [head, gathered])) + '\n{"part": "ga')
    (tmp_path / "serving.jsonl").write_text("\n".join(map(json.dumps, [served, wrong])))

    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_tables.py", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    results = [json.loads(line) for line in (tmp_path / "gpu_serve.jsonl").read_text().splitlines()]
    assert results == [head, gathered]
    probed = [json.loads(line) for line in (tmp_path / "gpu_probe.jsonl").read_text().splitlines()]
    assert probed == [{**head, "benchmark": "gpu_probe"}, served, wrong]
    tables = (tmp_path / "tables.md").read_text()
    assert "a GPU" in tables
    assert "| W3 | 147.0 | 0.67 |" in tables
    first, *others = done.stdout.splitlines()
    assert first.startswith("not ok: kernel")
    assert any("0.67 (goal 0.85)" in line for line in others)
    assert any("crops 0.25" in line for line in others)


def test_the_packing_benchmark_compares_with_first_fit(tmp_path: Path) -> None:
    rows = {row["packing"]: row for row in run_quickly("packing", cwd=tmp_path)}

    assert rows["stoker"]["used"] > rows["first fit"]["used"] > rows["next fit"]["used"]
    assert rows["stoker, 8 ranks"]["batches"] - rows["stoker"]["batches"] < 8


THIRD_PARTY = ROOT / "benchmarks" / "third_party"


def originals() -> Any:
    """The table of benchmarks that others wrote."""
    spec = importlib.util.spec_from_file_location("originals", THIRD_PARTY / "originals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["originals"] = module
    spec.loader.exec_module(module)
    return module.ORIGINALS


def test_each_benchmark_of_others_has_an_adapter_that_compiles_and_a_line_in_the_readme() -> None:
    readme = (THIRD_PARTY / "README.md").read_text()

    for name, original in originals().items():
        adapter = THIRD_PARTY / f"{name}.py"
        assert compile(adapter.read_text(), adapter, "exec")
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{name}.py`"))
        assert original.url in line
        assert original.revision[:7] in line
        assert f"run.py {name} " in line


@pytest.mark.parametrize("name", ["spdl_ipc", "torch_dataloader"])
def test_an_adapter_says_how_to_use_it_without_the_original(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, THIRD_PARTY / f"{name}.py", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "--original" in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_original_that_somebody_changed_is_named_in_the_results(tmp_path: Path) -> None:
    original = originals()["spdl_ipc"]
    main = tmp_path / original.main
    main.parent.mkdir()
    main.write_text("changed")
    code = "import pathlib, shared, sys; print(shared.state_of('spdl_ipc', pathlib.Path(sys.argv[1])))"

    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=THIRD_PARTY,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert "modified: sha256" in done.stdout, done.stderr[-2000:]


def test_a_command_runs_with_a_memory_limit_or_the_reason_is_told(tmp_path: Path) -> None:
    code = """
import os, sys
from memory_limit import memory_group, run_in
with memory_group(200 << 20) as group:
    if isinstance(group, str):
        print("no group", group)
        sys.exit()
    word = "bytearray(400 << 20).count(1)"
    print(run_in(group, [sys.executable, "-c", word], os.environ).returncode, group.exists())
print(group.exists())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=THIRD_PARTY, capture_output=True, text=True, timeout=100
    )

    assert done.stdout.startswith("no group no limit:") or done.stdout.split() == ["-9", "True", "False"]


def third_party(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(THIRD_PARTY / words[0]), *map(str, words[1:])]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["run", "s3_connector"])
def test_help_of_benchmarks_of_others_needs_nothing_of_theirs(name: str) -> None:
    done = third_party(f"{name}.py", "--help")

    assert done.returncode == 0, done.stderr
    for option in ("--original", "--save", "--quick", *(["--only"] if name == "run" else [])):
        assert option in done.stdout


@pytest.mark.parametrize("name", ["run.py", "s3_connector.py"])
def test_a_folder_that_is_not_a_checkout_is_refused_before_anything_is_made(
    name: str, tmp_path: Path
) -> None:
    words = ["s3_connector"] if name == "run.py" else []
    done = third_party(name, *words, "--original", tmp_path / "nowhere", "--work", tmp_path / "work")

    original = originals()["s3_connector"]
    assert done.returncode == 2
    for fact in (str(tmp_path / "nowhere"), original.main, original.url, original.revision):
        assert fact in done.stderr
    assert not (tmp_path / "work").exists()
