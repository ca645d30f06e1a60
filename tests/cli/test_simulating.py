"""`stoker plan --simulate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import run, run_json

WORDS = ("records=1e6", "record_bytes=100kB", "batch=64", "step=20ms", "host_memory=200GB")


def test_a_simulation_needs_no_configuration_and_prints_every_way() -> None:
    shown, _ = run("plan", "--simulate", *WORDS, "encode=2ms", "read=5ms")
    found = run_json("plan", "--simulate", *WORDS, "encode=2ms", "read=5ms")

    assert found["fastest"] in {"host", "disk"}
    assert {way["name"] for way in found["ways"]} == {"encode", "disk", "host"}
    assert f"fastest: {found['fastest']} (all records" in shown
    assert "no price given" in shown
    assert "does not fit" not in shown


def test_markdown_is_of_two_tables() -> None:
    shown, _ = run("plan", "--simulate", *WORDS, "--markdown")

    assert [line.strip("|-") for line in shown.splitlines() if line.startswith("|--")] == ["", ""]
    assert "\n| host | " in shown


def test_a_key_typed_wrong_is_one_line_and_exit_code_3() -> None:
    _, said = run("plan", "--simulate", *WORDS, "nods=2", exit_code=3)

    assert said.strip() == "error: nods is not a key of a simulation (did you mean nodes?)"


def test_flags_of_a_simulation_are_refused_without_it(project: Path) -> None:
    _, said = run("plan", "c.yaml", "--markdown", exit_code=3)

    assert "--simulate" in said


def test_a_configuration_gives_counts_sizes_and_speeds_and_words_win(project: Path) -> None:
    found = run_json(
        "plan", "--simulate", "c.yaml", "step=5ms", "nodes=1", "training.batch_size=8", "read=7ms"
    )
    scenario = found["scenario"]

    assert (scenario["records"], scenario["batch"]) == (12, 8)
    assert scenario["read_s"] == 0.007
    assert scenario["encode_s"] > 0
    assert scenario["raw_bytes"] > scenario["record_bytes"] > 0
    assert scenario["examples"] > scenario["records"]
    assert any("samples here" in line for line in found["taken"])
    assert not list(Path("data").rglob(".simulate-*"))


@pytest.mark.parametrize(
    ("words", "shuffle", "partition", "said"),
    [
        ((), True, "global", []),
        (("training.partition=static",), True, "static", ["partition=static, of training.partition=static"]),
        (("training.shuffle=block",), "block", "global", ["shuffle=block, of training.shuffle=block"]),
        (("training.shuffle=false",), False, "global", ["shuffle=false, of training.shuffle=false"]),
        (("training.shuffle=block", "shuffle=true"), True, "global", []),
    ],
)
def test_the_order_of_a_configuration_is_simulated(
    project: Path, words: tuple[str, ...], shuffle: bool | str, partition: str, said: list[str]
) -> None:
    found = run_json(
        "plan", "--simulate", "c.yaml", "step=5ms", "encode=1ms", "read=1ms", "write=1ms", *words
    )

    assert (found["scenario"]["shuffle"], found["scenario"]["partition"]) == (shuffle, partition)
    assert [line for line in found["taken"] if line.startswith(("shuffle=", "partition="))] == said


def test_a_way_is_named_by_the_setting_that_gives_it() -> None:
    found = run_json("plan", "--simulate", *WORDS, "gpus=2", "nodes=2", "gpu_memory=80GB")

    remarks = {way["name"]: way["remark"] for way in found["ways"]}
    assert remarks["static"].startswith("training.partition=static: each of 4 ranks")


@pytest.mark.draws
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "plan.svg"

    run("plan", "--simulate", *WORDS, "--picture", str(path))

    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize("words", [("a.yaml", "b.yaml"), ("training.tier=host",)])
def test_one_configuration_at_most_and_settings_only_with_one(words: tuple[str, ...]) -> None:
    _, said = run("plan", "--simulate", *WORDS, *words, exit_code=3)

    assert "one CONFIG at most" in said


def test_words_of_a_simulation_are_not_taken_for_settings(project: Path) -> None:
    """Several keys are last words of settings too, which messages are otherwise given the names of."""
    _, alone = run("plan", "--simulate", exit_code=3)
    _, store = run("plan", "--simulate", *WORDS, "store=s3", exit_code=3)
    _, order = run("plan", "--simulate", *WORDS, "shuffle=foo", exit_code=3)
    _, forgotten = run("plan", "nodes=8", "c.yaml", exit_code=3)

    assert alone.startswith(
        "error: a simulation needs records=, record_bytes=, batch=, step=, host_memory=\nhint: Give"
    )
    assert store.startswith("error: store=s3 is reached over the network, whose rate is not known")
    assert order.startswith("error: shuffle: 'foo' is unknown\nhint: Expected true")
    assert forgotten.startswith("error: nodes=8 belongs to --simulate, which is not given")
