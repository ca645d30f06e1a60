"""The start-up script, really run: every step, every failure, hostile names, secrets."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stoker.errors import ConfigError
from stoker.launch.script import ONSTART_BYTES, StartScript
from tests.launch.box import KEY, SECRET, Box, a_box, a_repository, is_running, replace_by_recorder, wait_for

ORDER = ["fetch", "validate", "precompute", "train"]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "box") as one:
        yield one


def model(box: Box, **more: Any) -> StartScript:
    repo = box.root / "repo"
    commit = more.pop("commit", None) or a_repository(repo, {"c.yaml": "training: {epochs: 1}\n"})
    settings: dict[str, Any] = {
        "target": "vast", "name": "run", "repo": str(repo), "commit": commit, "config": "c.yaml",
        "overrides": ("training.epochs=1",), "workdir": str(box.workdir), "fetch": True,
        "cache_dir": "data/cache", "run_dir": "runs/a", "upload": f"far:{box.root}/up",
        "cache": f"far:{box.root}/cache", "secrets": ("PLANTED", "RCLONE_CONFIG_FAR_TYPE"),
        "api": box.url, "pause": 0, "stall_minutes": 5.0, "grace": 20,
    }  # fmt: skip
    return StartScript(**(settings | more))


def test_every_step_runs_in_order_and_the_machine_is_stopped(box: Box) -> None:
    script = model(box).render()

    code, output = box.run(script)

    assert code == 0, output
    assert box.stokers() == ORDER
    assert [call[4:] for call in box.calls() if "stoker" in call] == [["c.yaml", "training.epochs=1"]] * 4
    steps = [line.split()[-1] for line in output.splitlines() if line.startswith("stoker-launch: step")]
    assert list(dict.fromkeys(steps)) == [
        "environment", "code", "dependencies", "fetch", "cache", "validate", "precompute", "train",
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
        pytest.param("pip:exit${IFS}7", "dependencies", 7, id="dependencies"),
        pytest.param("venv:exit${IFS}9", "dependencies", 9, id="venv"),
        pytest.param("stoker?fetch:exit${IFS}3", "fetch", 3, id="fetch"),
        pytest.param("rclone?mkdir:exit${IFS}4", "cache", 4, id="cache"),
        pytest.param("stoker?validate:exit${IFS}6", "validate", 6, id="validate"),
        pytest.param("stoker?precompute:exit${IFS}4", "precompute", 4, id="precompute"),
        pytest.param("stoker?train:exit${IFS}5", "train", 5, id="train"),
        pytest.param("stoker?train:kill${IFS}-9${IFS}$$", "train", 137, id="killed"),
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
    assert step not in ORDER or box.stokers()[-1] == step, "it went on"


def test_a_missing_program_that_cannot_be_installed_fails_the_environment(box: Box) -> None:
    one = model(box)
    (box.root / "bin" / "git").unlink()

    code, output = box.run(one.render())

    assert code == 100, output
    assert "step environment failed with exit code 100" in output
    assert ["apt-get", "update", "-qq"] in box.calls()
    assert box.stopped()


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
    assert box.run(model(box, auto_shutdown=False).render(), fail="stoker?train:exit${IFS}5")[0] == 5
    assert box.asked == []


def test_a_stall_ends_the_run_and_stops_the_machine(box: Box) -> None:
    script = model(box, stall_minutes=0.02).render()

    code, output = box.run(script, fail="stoker?train:exec${IFS}sleep${IFS}300")

    assert code == 5, output
    assert "stoker-launch: stall in step train" in output
    assert box.stopped()


def test_a_notice_lets_the_run_seal_and_then_stops(box: Box) -> None:
    """What a provider or Slurm sends before it takes the machine away."""
    sealing = box.root / "sealing"
    sealing.write_text(
        'trap "touch $BOX/sealed; exit 130" TERM\ntouch $BOX/begun\nwhile :; do sleep 0.05; done\n'
    )
    process = box.start(model(box).render(), fail=f"stoker?train:bash${{IFS}}{sealing}")
    wait_for((box.root / "begun").exists)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    assert (box.root / "sealed").exists()
    assert "signal in step train" in output
    assert box.stopped()


def test_what_ignores_the_notice_is_killed_after_its_grace(box: Box) -> None:
    deaf = box.root / "deaf"
    deaf.write_text('trap "" TERM\necho $$ >$BOX/pid\nwhile :; do sleep 0.05; done\n')
    process = box.start(model(box, grace=1).render(), fail=f"stoker?train:bash${{IFS}}{deaf}")
    pid = box.root / "pid"
    wait_for(lambda: pid.exists() and pid.read_text().strip())

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert not is_running(int(pid.read_text()))
    assert box.stopped()


def test_killed_at_any_step_the_next_start_goes_through(box: Box) -> None:
    script = model(box).render()
    for word in ("venv", "pip", "stoker?fetch", "mkdir", "stoker?precompute", "stoker?train"):
        process = box.start(script, fail=f"{word}:kill${{IFS}}-9${{IFS}}$PPID;exec${{IFS}}sleep${{IFS}}1")
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()
        assert process.returncode == -signal.SIGKILL
        for name in ("index.lock", "shallow.lock"):
            (box.workdir / "code" / ".git" / name).touch()

    code, output = box.run(script)

    assert code == 0, output
    assert box.stokers() == ORDER


def test_a_secret_is_in_no_output_script_or_argument(box: Box) -> None:
    script = model(box).render()

    _, output = box.run(script, fail="stoker?train:exit${IFS}1")

    texts = [script, output, box.log(), str(box.calls())]
    assert not [text for text in texts if SECRET in text or KEY in text]


def test_variables_of_the_first_process_reach_the_steps(box: Box) -> None:
    script = model(box).render().replace("/proc/1/environ", str(box.root / "environ"))
    evil = "$(touch evil)`touch evil`'\"\n;x"
    pairs = {"PLANTED": evil, "OTHER": "no", "CONTAINER_ID": "88", "CONTAINER_API_KEY": KEY}
    (box.root / "environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in pairs.items()) + b"\0")
    show = box.root / "show"
    show.write_text('printf "%s" "$PLANTED" >$BOX/planted; printf "%s" "${OTHER-none}" >$BOX/other\n')

    assert box.run(script, fail=f"stoker?train:bash${{IFS}}{show}")[0] == 0

    assert (box.root / "planted").read_text() == evil
    assert (box.root / "other").read_text() == "none"
    assert box.asked[-1][1] == "/instances/88/"
    assert not list(box.root.rglob("evil"))


PIECES = (
    "$(touch evil)", "`touch evil`", "; touch evil;", "&& touch evil", "| touch evil", "'", '"', "\\", "\n",
    " ", "$HOME", "${IFS}", "*", "?", "[a]", "{a,b}", "~", "#", "!", "!!", "<", ">", "&", "(", ")", "\t",
    "\r", "é", "\u202e", "\U0001f525", "$'\\n'", "\x01", "\x7f", "\x1b[31m", "-rf", "--", "=", "EOF",
    "%s", "\\0", "a",
)  # fmt: skip


def hostile(draw: random.Random) -> str:
    text = "".join(draw.choices(PIECES, k=draw.randint(1, 6)))
    return text.replace("\x01", "") or "x"


def hostile_round(box: Box, draw: random.Random, commit: str) -> int:
    """One script with nine hostile names, run; every argument has to arrive as it was."""
    names = [hostile(draw) for _ in range(9)]
    repo, config, constraints, *rest = (f"x{name}" for name in names)
    overrides, install = tuple(f"{name}={name}" for name in rest[:2]), (rest[2],)
    up, cache, run_dir = (f"far:{name}" for name in rest[3:5] + rest[5:])
    box.workdir.exists() and shutil.rmtree(box.workdir)
    one = model(
        box, commit=commit, repo=repo, config=config, overrides=overrides, install=install,
        constraints=constraints, upload=up, cache=cache, run_dir=run_dir, target="box",
    )  # fmt: skip
    script = one.render()
    path = box.root / "check.sh"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, timeout=60).stderr == b""

    code, output = box.run(script)

    assert code == 0, (names, output)
    calls = box.calls()
    want = [["-m", "stoker", word, config, *overrides] for word in ORDER]
    assert [call[1:] for call in calls if "stoker" in call] == want
    assert next(call for call in calls if call[0] == "git" and "fetch" in call)[-2:] == [repo, commit]
    (pip,) = [call for call in calls if "pip" in call]
    assert pip[-3:] == ["-c", constraints, install[0]]
    copies = [call[-2:] for call in calls if call[:2] == ["rclone", "copy"]]
    assert copies[0][0] == copies[1][1] == cache
    assert copies[2][1] == f"{up}/run"
    assert not (box.root / "evil").exists()
    assert not list(box.workdir.rglob("evil"))
    return len(names)


def hostile_names(box: Box, count: int) -> None:
    replace_by_recorder(box, "git")
    draw, done = random.Random(7), 0
    (box.workdir / "code").mkdir(parents=True)
    while done < count:
        done += hostile_round(box, draw, "a" * 40)


def test_hostile_names_stay_arguments(box: Box) -> None:
    hostile_names(box, 200)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_hostile_names_stay_arguments(box: Box) -> None:
    hostile_names(box, 10_000)


@pytest.mark.parametrize("target", ["vast", "box", "slurm"])
def test_shellcheck_finds_nothing(box: Box, target: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    draw = random.Random(3)
    words = tuple(f"a={hostile(draw)}" for _ in range(8))
    path = box.root / "s.sh"
    path.write_text(model(box, target=target, overrides=words, gpus=2).render())

    done = subprocess.run(
        ["shellcheck", "-S", "warning", str(path)], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": "-c.yaml"}, {"overrides": ("--help",)}, {"overrides": ("x",)}, {"repo": "--upload-pack=x"},
        {"repo": "a\0b"}, {"config": "\udcff"}, {"commit": "main"}, {"commit": "$(x)" + "a" * 36},
        {"name": "a b"}, {"name": "../x"}, {"secrets": ("A;B",)}, {"secrets": ("A B",)}, {"workdir": "here"},
        {"gpus": 0}, {"gpus": "2; x"}, {"stall_minutes": float("nan")}, {"install": ("-e", ".")},
        {"target": "other"},
    ],
)  # fmt: skip
def test_what_no_command_should_get_is_refused(box: Box, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(box, **({"commit": "a" * 40} | wrong))


def test_a_script_that_the_provider_would_cut_is_refused(box: Box) -> None:
    one = model(box)
    assert len(one.render().encode()) < ONSTART_BYTES
    long = one.model_copy(update={"overrides": tuple(f"a.b{n}={'é' * 20}" for n in range(40))})

    with pytest.raises(ConfigError, match="the provider takes 4,048"):
        long.render()
    assert long.model_copy(update={"target": "box"}).render()


def test_several_gpus_run_under_torchrun(box: Box) -> None:
    assert box.run(model(box, gpus=2).render())[0] == 0

    runs = [call[1:] for call in box.calls() if "torch.distributed.run" in call]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stoker"]
    assert [run[:8] for run in runs] == [[*start, "precompute"], [*start, "train"]]


def test_a_job_of_slurm_is_put_back_in_the_queue_on_preemption(box: Box) -> None:
    script = model(box, target="slurm", scratch=True).render()
    scontrol = box.root / "bin" / "scontrol"
    shutil.copy(box.root / "bin" / "apt-get", scontrol)
    scontrol.write_text(scontrol.read_text().replace("apt-get", "scontrol").replace("exit 100", "exit 0"))
    box.environment |= {"SLURM_JOB_ID": "4711", "SLURM_TMPDIR": str(box.root / "node local")}

    assert box.run(script)[0] == 0
    assert not [call for call in box.calls() if call[0] == "scontrol"]
    process = box.start(
        script, fail=f"stoker?train:touch${{IFS}}{box.root}/begun;exec${{IFS}}sleep${{IFS}}60"
    )
    wait_for((box.root / "begun").exists)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert box.calls()[-1] == ["scontrol", "requeue", "4711"]
    assert "#SBATCH --requeue" in script
    assert box.asked == []
    scratch = f"data.stage_dir={box.root}/node local/stoker"
    assert all(call[-2:] == ["data.stage=auto", scratch] for call in box.calls() if "stoker" in call)
