"""The start-up script, really run: every step in its order, and every failure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from stoker.errors import ConfigError
from stoker.extras.launch.script import ONSTART_BYTES
from tests.launch.box import Box
from tests.launch.conftest import model

ORDER = ["fetch", "validate", "precompute", "train"]


def test_every_step_runs_in_order_and_the_machine_is_stopped(box: Box) -> None:
    script = model(box).render()

    code, output = box.run(script)

    assert code == 0, output
    assert box.stokers() == [[word, "c.yaml", "training.epochs=1"] for word in ORDER]
    steps = [line.split()[-1] for line in output.splitlines() if line.startswith("stoker-launch: step")]
    assert list(dict.fromkeys(steps)) == [
        "environment", "code", "dependencies", "fetch", "cache", "resume", "validate", "precompute", "train",
    ]  # fmt: skip
    assert (box.workdir / "code" / "c.yaml").exists()
    assert (box.workdir / "exit_code").read_text() == "0\n"
    assert box.stopped()
    assert len(box.asked) == 1
    uploads = [call for call in box.calls() if call[:2] == ["rclone", "copy"]]
    assert uploads[-1][-3:] == ["--", f"{box.workdir}/run.log", f"far:{box.root}/up/run"]


@pytest.mark.parametrize(
    ("fail", "step", "wanted"),
    [
        pytest.param("", "code", 128, id="code"),
        pytest.param("-m?pip:exit${IFS}7", "dependencies", 7, id="dependencies"),
        pytest.param("venv:exit${IFS}9", "dependencies", 9, id="venv"),
        pytest.param("stoker?data?fetch:exit${IFS}3", "fetch", 3, id="fetch"),
        pytest.param("rclone?mkdir:exit${IFS}4", "cache", 4, id="cache"),
        pytest.param("up/run/run:exit${IFS}4", "resume", 4, id="resume"),
        pytest.param("stoker?validate:exit${IFS}6", "validate", 6, id="validate"),
        pytest.param("?precompute:exit${IFS}4", "precompute", 4, id="precompute"),
        pytest.param("?train?c.yaml:exit${IFS}5", "train", 5, id="train"),
        pytest.param("?train?c.yaml:kill${IFS}-9${IFS}$$", "train", 137, id="killed"),
        pytest.param("run.log:exit${IFS}8", "upload", 1, id="upload"),
    ],
)
def test_a_step_that_fails_is_named_its_code_kept_and_the_machine_stopped(
    box: Box, fail: str, step: str, wanted: int
) -> None:
    one = model(box)
    if step == "code":
        one = one.model_copy(update={"commit": "0" * 40})

    code, output = box.run(one.render(), fail=fail)

    assert code == wanted, output
    assert f"stoker-launch: step {step} failed with exit code" in output
    assert box.stopped()
    assert (box.workdir / "exit_code").read_text() == f"{wanted}\n"
    assert step not in ORDER or box.commands()[-1] == step, "it went on"


def test_a_missing_program_that_cannot_be_installed_fails_the_environment(box: Box) -> None:
    one = model(box)
    (box.root / "bin" / "git").unlink()

    code, output = box.run(one.render())

    assert code == 100, output
    assert "step environment failed with exit code 100" in output
    assert ["apt-get", "update", "-qq"] in box.calls()
    assert box.stopped()


def test_what_is_missing_is_installed_by_the_names_of_packages(box: Box) -> None:
    one = model(box)
    for name in ("git", "curl"):
        (box.root / "bin" / name).unlink()

    box.run(one.render(), fail="update:exit${IFS}0 ensurepip:exit${IFS}1")

    assert ["apt-get", "install", "-qqy", "git", "curl", "python3-venv"] in box.calls()


def test_a_folder_that_cannot_be_made_is_a_failure_that_stops_the_machine(box: Box) -> None:
    one = model(box)
    box.workdir.write_text("in the way")

    code, output = box.run(one.render())

    assert code == 1
    assert "step environment failed" in output
    assert box.stopped()


def test_stopping_is_tried_again_and_its_failure_is_told(box: Box) -> None:
    script = model(box).render()
    box.answers = [500, 503]
    assert box.run(script)[0] == 0
    assert len(box.asked) == 3

    box.answers = [500] * 5
    code, output = box.run(script)

    assert code == 1
    assert "step stop failed" in output


def test_without_auto_shutdown_nothing_is_stopped(box: Box) -> None:
    assert box.run(model(box, auto_shutdown=False).render(), fail="?train?c.yaml:exit${IFS}5")[0] == 5
    assert box.asked == []


def test_a_run_that_has_finished_is_not_run_again_unless_it_is_another(box: Box) -> None:
    """A provider starts a machine again after a failure of its own."""
    one = model(box)
    script = one.render()
    assert box.run(script)[0] == 0

    code, output = box.run(script)

    assert code == 0
    assert "finished before" in output
    assert box.commands() == []
    assert [call[1] for call in box.calls() if call[0] == "rclone"] == ["copy"], "the log went up once more"
    assert len(box.asked) == 2, "it was stopped again"
    other = one.model_copy(update={"overrides": ("training.epochs=2",)})
    assert box.run(other.render())[0] == 0
    assert box.commands() == ORDER


def test_a_failure_is_not_taken_for_a_finished_run(box: Box) -> None:
    script = model(box).render()
    assert box.run(script, fail="?train?c.yaml:exit${IFS}5")[0] == 5

    assert box.run(script)[0] == 0

    assert box.commands() == ORDER


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_are_as_many_as_gpus(box: Box, gpus: int) -> None:
    assert box.run(model(box, gpus=gpus, grace=120).render())[0] == 0

    runs = [call[1:] for call in box.calls() if "stoker.extras.launch.ranks" in call]
    start = ["-m", "stoker.extras.launch.ranks", str(gpus), "85"]
    assert [run[:5] for run in runs] == [[*start, "precompute"], [*start, "train"]]


def test_a_command_runs_in_place_of_the_steps_of_stoker(box: Box) -> None:
    command = """echo "at $PWD: $(python -V) '$PYTHONUNBUFFERED'" && touch 'a b'"""

    code, output = box.run(model(box, command=command, gpus=2).render())

    assert code == 0, output
    assert box.commands() == ["fetch"]
    steps = [line.split()[-1] for line in output.splitlines() if line.startswith("stoker-launch: step")]
    assert list(dict.fromkeys(steps)) == [
        "environment", "code", "dependencies", "fetch", "cache", "resume", "command",
    ]  # fmt: skip
    assert f"at {box.workdir}/code:  '1'" in output, "in the code's folder, and no buffer hides its lines"
    assert ["python", "-V"] in box.calls(), "python is that of the virtual environment"
    assert (box.workdir / "code" / "a b").exists()
    assert box.stopped()


def test_a_command_that_fails_gives_its_exit_code_and_its_cache_is_sent(box: Box) -> None:
    one = model(box, command="mkdir -p data/cache runs/a; exit 7")

    code, output = box.run(one.render())

    assert code == 7, output
    assert "stoker-launch: step command failed with exit code 7" in output
    pushed = [call[1:] for call in box.calls() if call[0] == "rclone"][-3:]
    assert [call[0] for call in pushed] == ["copy", "sync", "copy"]
    assert pushed[-1][-3:] == ["--", "./data/cache", f"far:{box.root}/cache"]
    assert {"-u", ".{staged/**,tmp-*}"} <= set(pushed[-1])
    assert box.stopped()


def test_the_cache_of_a_command_is_sent_without_a_place_for_uploads(box: Box) -> None:
    one = model(box, command="mkdir -p data/cache; sleep 3", upload=None, upload_minutes=0.01)

    code, output = box.run(one.render())

    assert code == 0, output
    sent = [call for call in box.calls() if call[:2] == ["rclone", "copy"] and call[-1].startswith("far:")]
    assert len(sent) > 1, "while it runs, and at the end"
    assert not [call for call in box.calls() if call[:2] == ["rclone", "sync"]]


def test_a_command_sees_no_variables_of_the_script(box: Box) -> None:
    one = model(box, command='echo "seen: $API $CACHE $DIR $RUN."')

    code, output = box.run(one.render())

    assert code == 0, output
    assert "seen:    ." in output


def test_no_cache_is_sent_before_it_was_pulled(box: Box) -> None:
    one = model(box, command="exit 0")
    (box.workdir / "code/data/cache").mkdir(parents=True)

    box.run(one.render(), fail="stoker?data?fetch:exit${IFS}3")

    assert not [call for call in box.calls() if call[-1].endswith("/cache")]


def test_variables_of_the_first_process_reach_the_steps(box: Box) -> None:
    script = model(box, secrets=("PLANTED", "RCLONE_CONFIG_B2_TYPE")).render()
    evil = "$(touch evil)`touch evil`'\"\n;x"
    pairs = {
        "PLANTED": evil, "OTHER": "no", "CONTAINER_ID": "88", "PATH": "/from/the/image",
        "RCLONE_CONFIG_B2_KEY": evil, "RCLONE_CONFIG_B2X_KEY": "no", "PLANTED_TOO": "no",
    }  # fmt: skip
    (box.root / "environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in pairs.items()) + b"\0")
    show = box.root / "show"
    names = " ".join(name for name in pairs)
    show.write_text(f'for n in {names}; do printf "%s=%s\\0" $n "${{!n-none}}"; done >$BOX/seen\n')

    assert box.run(script, fail=f"?train?c.yaml:bash${{IFS}}{show}")[0] == 0

    seen = dict(pair.split("=", 1) for pair in (box.root / "seen").read_text().split("\0")[:-1])
    assert seen.pop("PATH") == f"{box.root}/bin:/from/the/image"
    assert seen == {
        "PLANTED": evil, "OTHER": "none", "CONTAINER_ID": "88", "RCLONE_CONFIG_B2_KEY": evil,
        "RCLONE_CONFIG_B2X_KEY": "none", "PLANTED_TOO": "none",
    }  # fmt: skip
    assert box.asked[-1][1] == "/v0/instances/88/"
    assert not list(box.root.rglob("evil"))


def test_a_script_that_the_provider_would_cut_is_refused(box: Box) -> None:
    one = model(box)
    assert len(one.render().encode()) < ONSTART_BYTES
    long = one.model_copy(update={"overrides": tuple(f"a.b{n}={'é' * 20}" for n in range(40))})

    with pytest.raises(ConfigError, match="the provider takes 4,048"):
        long.render()
    assert long.model_copy(update={"target": "box"}).render()


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": "-c.yaml"}, {"overrides": ("--help",)}, {"overrides": ("x",)}, {"repo": "--upload-pack=x"},
        {"repo": "a\0b"}, {"config": "\udcff"}, {"commit": "main"}, {"commit": "$(x)" + "a" * 36},
        {"name": "a b"}, {"name": "../x"}, {"secrets": ("A;B",)}, {"secrets": ("A B",)}, {"workdir": "here"},
        {"gpus": 0}, {"gpus": "2; x"}, {"stall_minutes": float("nan")}, {"install": ("-e", ".")},
        {"target": "other"}, {"secrets": ("A*",)}, {"upload_minutes": 0.0}, {"command": "a\0b"},
    ],
)  # fmt: skip
def test_what_no_command_should_get_is_refused(box: Box, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(box, **({"commit": "a" * 40} | wrong))
