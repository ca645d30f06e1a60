from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.run import bench
from tests.cli.commands import run, run_json

pytestmark = pytest.mark.draws


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LEAST_S", 0.01)


def test_bench_of_a_configuration_and_of_its_cache(project: Path) -> None:
    run("precompute", "c.yaml")

    stdout, _ = run("bench", "c.yaml", "--seconds", "0.1")
    of_cache = run_json(
        "bench", "data/latent_cache/burgers1d_train", "--seconds", "0.1", "--picture", "b.png"
    )

    for what in ("host", "disk, cold", "of its limit", "gather", "leave tier=auto", "runs/bench.png"):
        assert what in stdout, what
    assert (project / "runs" / "bench.png").is_file()
    assert (project / "b.png").is_file()
    assert "windows" in of_cache["cache"]
    assert set(of_cache["tiers"]["host"]) == {"what", "bytes_s", "scatter", "limit", "fraction", "batch_s"}


def test_bench_of_a_cache_at_an_address(project: Path) -> None:
    """It fetches into a folder of its own, of which nothing is left."""
    run("precompute", "c.yaml", "--splits", "train")
    run("cache", "push", "data/latent_cache/burgers1d_train", f"file://{project}/store")

    found = run_json("bench", f"file://{project}/store/burgers1d_train", "--seconds", "0.2")
    _, said = run("bench", f"file://{project}/store/none", "--seconds", "0.1", exit_code=4)

    assert set(found["limits"]) == {"copy", "gather", "store", "store, kept"}
    (tier,) = found["tiers"].values()
    assert tier["limit"] == "store, kept"
    assert tier["fraction"] == pytest.approx(tier["bytes_s"] / found["limits"]["store, kept"]["bytes_s"])
    assert "first epoch takes about" in found["advice"]
    assert "there is no cache at file://" in said
    assert not list((project / ".stoker" / "mirror").glob(".bench-*"))


def test_bench_of_the_machine_alone(project: Path) -> None:
    assert list(run_json("bench", "--seconds", "0.1")["limits"]) == ["copy", "gather"]


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        pytest.param(
            ["c.yaml", "--batch-size", "8"], 3, "training.batch_size=8", id="a-batch-size-of-its-own"
        ),
        pytest.param(
            ["c.yaml"], 3, "run `stoker precompute` with the same settings first", id="nothing-there"
        ),
        pytest.param(["a", "b"], 3, "expected one CONFIG", id="two"),
        pytest.param(["training.tier=disk"], 3, "go with a CONFIG", id="settings-alone"),
        pytest.param(["--seconds", "0"], 3, "more than 0", id="no-time"),
    ],
)
def test_what_cannot_be_measured_is_said(project: Path, words: list[str], exit_code: int, said: str) -> None:
    stdout, _ = run("bench", *words, "--json", exit_code=exit_code)

    assert said in json.loads(stdout)["error"]
