"""A stuck or crashed encoder under the command line: ended, started again, resumed, or given up by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import h5py
import pytest

from stoker.cli import process
from stoker.cli.process import file_call
from tests.kit import forked
from tests.kit.as_python import START_CODE

STOKER = [sys.executable, "-m", "stoker"]
DEADLINE_S = 120

BREAK_ENCODER = """\
import os, signal, sys, time

ASKED = []

def noting(number, handler, set_handler=signal.signal):
    def noted(*args):
        try:
            handler(*args)
        finally:
            ASKED.append(number)

    return set_handler(number, noted if callable(handler) else handler)

def wait_until_asked():
    limit = time.monotonic() + 100
    while not ASKED and time.monotonic() < limit:
        time.sleep(0.02)

def broken(self, batch, /):
    calls = len(open("calls").read()) if os.path.exists("calls") else 0
    open("calls", "a").write("x")
    exec(FAULTS.get(calls, FAULTS.get("any", "")))
    return whole(self, batch)

if "stoker.cli.main" in sys.orig_argv:  # neither workers nor the guardian load an encoder
    signal.signal = noting
    from stoker.encoders.grid import GridEncoder
    from stoker.encoders.protocol import EncodeBatchSize
    whole = GridEncoder.encode
    GridEncoder.encode = broken
    if "to" in FAULTS:
        GridEncoder.to = lambda self, device: exec(FAULTS["to"])
    GridEncoder.encode_batch_size = lambda self, schema: EncodeBatchSize(samples=2, steps=None)
"""

NEVER_ENDS = """\

if "stoker.cli.main" in sys.orig_argv:
    import atexit, time
    from stoker.runtime import signals
    signals.EXIT_S = 1.0
    atexit.register(time.sleep, 600)
"""

SEALS_AT_ONCE = """\

import glob, signal, time

def wait_for_shards(count):
    while len(glob.glob("data/latent_cache/burgers1d_train/*/shard-*")) < count:
        time.sleep(0.02)

if sys.argv[0] == "-m":
    from stoker.store.write import RecordWriter
    append = RecordWriter.append

    def append_and_seal(self, *args, **more):
        append(self, *args, **more)
        self.commit()

    RecordWriter.append = append_and_seal
"""

KILLED_BETWEEN_GROUPS = """\

if sys.argv[0] == "-m":
    from stoker.precompute.loop import PrecomputeLoop
    adjust = PrecomputeLoop._adjust

    def killed(self, waited_s, elapsed_s, groups):
        adjust(self, waited_s, elapsed_s, groups)
        # Each process encodes one group, and makes its first call twice.
        if groups and (encoded := len(open("calls").read()) // 2) <= 4:
            wait_for_shards(encoded)
            os.kill(os.getpid(), signal.SIGKILL)

    PrecomputeLoop._adjust = killed
"""

KILLED_AS_ITS_ENCODER_STARTS = """\

if sys.argv[0] == "-m":
    from stoker.precompute import run
    from stoker.precompute.encoder_processes import _Device
    run.FEW_GROUPS = 0  # which would be encoded without a child
    start = _Device.start

    def killed(self, *given):
        if not os.path.exists("begun"):
            open("begun", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, *given)

    _Device.start = killed
"""

SLOW_DISK = """\

if sys.argv[0] == "-m":
    import time
    from stoker.precompute.loop import WriteThread
    from stoker.store.write import RecordWriter
    append = RecordWriter.append

    def late(self, *args, **more):
        time.sleep(0 if self.rows else 3)
        append(self, *args, **more)

    RecordWriter.append = late
    WriteThread._room = lambda self, encoded: not self._waiting_bytes
"""

FAULTS = {
    "hang": "import time; time.sleep(600)",
    "holds-the-lock": "import re; re.match('(a*)*b', 'a' * 60)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "sigkill": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "sigstop": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "lost-device": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
}


def broken_encoder(project: Path, faults: dict[int | str, str], *, in_forks: bool = False) -> dict[str, str]:
    """An environment in which the encoder does what `faults` says at each call, counted over restarts.

    Groups are of two samples, so that there are six. Each process makes its first call twice.
    """
    folder = project / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"FAULTS = {faults!r}\n{BREAK_ENCODER}")
    if in_forks:
        return {**os.environ, START_CODE: str(folder / "sitecustomize.py")}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def add_to_site(project: Path, text: str) -> None:
    with (project / "site" / "sitecustomize.py").open("a") as file:
        file.write(text)


def precompute(project: Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    words = ["precompute", "c.yaml", "--splits", "train", "precompute.timeouts.encode=1", *args]
    run = forked.run if START_CODE in env else subprocess.run
    return run(
        [*STOKER, *words],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def records(project: Path) -> dict[int, bytes]:
    from stoker import open_cache

    cache = open_cache(project / "data/latent_cache/burgers1d_train")
    return {int(number): cache[int(number)]["latent"].numpy().tobytes() for number in cache.indices}


@pytest.mark.slow
def test_faults_of_the_encoder_are_survived(project: Path) -> None:
    calls = (1, 4, 8, 13, 19, 20)  # each at another group, since an unsealed one is encoded again
    env = broken_encoder(project, dict(zip(calls, FAULTS.values(), strict=True)))

    done = precompute(project, env, "--json")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Starting it again") == len(FAULTS)
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["caches"][0]["records"] == 12
    survived = records(project)
    whole = project / "whole"
    whole.mkdir()
    (whole / "raw").symlink_to(project / "raw")
    (whole / "c.yaml").write_text((project / "c.yaml").read_text())
    assert precompute(whole, broken_encoder(whole, {})).returncode == 0
    assert survived == records(whole)


@pytest.mark.parametrize(
    ("fault", "exit_code", "words"),
    [
        pytest.param("hang", 5, "sitecustomize.py", id="hang", marks=pytest.mark.slow),
        pytest.param("segfault", 1, "SIGSEGV", id="segfault"),
    ],
)
def test_an_encoder_that_never_works_is_given_up_with_stage_sample_and_stack(
    project: Path, fault: str, exit_code: int, words: str
) -> None:
    env = broken_encoder(project, {"any": FAULTS[fault]})

    done = precompute(project, env, "--json")

    assert done.returncode == exit_code, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == exit_code
    assert 'stage "encode"' in answer["error"]
    assert "sample 0" in answer["error"]
    assert "failure 3 there" in answer["error"]
    assert words in answer["error"]
    assert "sitecustomize.py" in answer["error"]  # the stack


@pytest.mark.slow
def test_an_encoder_that_hangs_on_its_way_to_the_device_is_given_up_as_well(project: Path) -> None:
    env = broken_encoder(project, {"to": FAULTS["hang"]})

    done = precompute(project, env, "--json")

    assert done.returncode == 5, done.stderr
    error = json.loads(done.stdout)["error"]
    assert 'made no progress for 1 s in stage "start" while the encoder was tried or brought' in error
    assert "sitecustomize.py" in error  # the stack


@pytest.mark.slow
@pytest.mark.parametrize("ending", [0, 4])
def test_a_command_that_is_done_and_does_not_end_is_ended_with_its_own_exit_code(
    project: Path, ending: int
) -> None:
    """As when a thread waits for storage in the kernel."""
    env = broken_encoder(project, {})
    add_to_site(project, NEVER_ENDS)
    if ending:
        damage_one_sample(project / "raw" / "burgers1d_train.h5")

    done = precompute(project, env, "--json", "precompute.max_quarantined=0")

    assert done.returncode == ending, done.stderr
    assert ("caches" in json.loads(done.stdout)) == (ending == 0)
    assert "Starting it again" not in done.stderr


def damage_one_sample(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["tensor"][3, 0, 0] = float("nan")


def test_an_error_of_the_command_itself_is_passed_on_at_once(project: Path) -> None:
    done = precompute(project, broken_encoder(project, {}, in_forks=True), "latent.dimm=1")

    assert done.returncode == 3
    assert done.stderr.count("latent.dimm") == 1


@pytest.mark.slow
def test_the_child_ends_when_the_guardian_is_killed(project: Path) -> None:
    env = broken_encoder(project, {"any": "import time; time.sleep(0.3)"})
    words = ["precompute", "c.yaml", "--splits", "train"]
    running = subprocess.Popen([*STOKER, *words], cwd=project, env=env, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + DEADLINE_S
        while not (project / "calls").exists():
            assert time.monotonic() < limit
            time.sleep(0.05)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert children
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(DEADLINE_S)

    limit = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < limit, "the encoding process outlived its guardian"
        time.sleep(0.05)


class Begun:
    """A command in a process group of its own, in its second call of the encoder."""

    def __init__(self, project: Path, env: dict[str, str], *words: str, under: tuple[str, ...] = ()) -> None:
        popen = forked.Popen if START_CODE in env else subprocess.Popen
        self.process = popen(
            [*under, *STOKER, "precompute", "c.yaml", "--splits", "train", *words],
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        limit = time.monotonic() + DEADLINE_S
        while not (project / "calls").exists() or len((project / "calls").read_text()) < 2:
            assert time.monotonic() < limit
            time.sleep(0.05)

    def end(self, limit_s: float = DEADLINE_S) -> tuple[int, str]:
        """Exit code and what it said."""
        try:
            _, said = self.process.communicate(timeout=limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, said

    def assert_interrupted(self, limit_s: float = DEADLINE_S) -> None:
        """It ends, and nothing of it is started again."""
        code, said = self.end(limit_s)
        assert code == 130, said
        assert said.endswith("interrupted; the same command resumes\n")
        assert "again" not in said


WAITS = {0: "", "any": "wait_until_asked()"}
"""From the second call on, until the process has handled a signal: what is sent comes while it encodes."""
HANGS = {
    0: "",
    "any": "import ctypes; lock, m = ctypes.PyDLL(None).pthread_mutex_lock, bytes(64); lock(m); lock(m)",
}
"""In C, with the interpreter's lock, where no signal handler of Python's runs."""


@pytest.mark.parametrize("whole_group", [False, True], ids=["guardian", "group"])
def test_one_signal_seals_and_resumes(project: Path, whole_group: bool) -> None:
    """Sent to the whole group, as `timeout` and Slurm do, it reaches the child twice."""
    begun = Begun(project, broken_encoder(project, WAITS, in_forks=True))

    if whole_group:
        os.killpg(begun.process.pid, signal.SIGTERM)
    else:
        begun.process.send_signal(signal.SIGINT)

    code, said = begun.end()
    assert code == 130, said
    assert "records are stored" in said
    assert "Run it again" in said


def test_a_closed_terminal_ends_the_command_for_good(project: Path) -> None:
    begun = Begun(project, broken_encoder(project, WAITS, in_forks=True))

    os.killpg(begun.process.pid, signal.SIGHUP)

    begun.assert_interrupted()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(project: Path) -> None:
    begun = Begun(project, broken_encoder(project, {"any": "import time; time.sleep(0.3)"}), under=("nohup",))

    os.killpg(begun.process.pid, signal.SIGHUP)

    code, said = begun.end()
    assert code == 0, said


def test_an_encoder_that_hangs_is_not_started_again_once_the_command_was_asked_to_end(project: Path) -> None:
    env = broken_encoder(project, HANGS, in_forks=True)
    begun = Begun(project, env, "precompute.timeouts.encode=1")

    begun.process.send_signal(signal.SIGTERM)

    begun.assert_interrupted(60)


@pytest.mark.slow
def test_a_second_signal_ends_what_hangs_with_the_interpreters_lock(project: Path) -> None:
    begun = Begun(project, broken_encoder(project, HANGS), "precompute.timeouts.encode=3600")

    begun.process.send_signal(signal.SIGINT)
    time.sleep(1)
    begun.process.send_signal(signal.SIGINT)

    begun.assert_interrupted(60)


@pytest.mark.slow
def test_what_an_overwrite_has_encoded_before_a_crash_is_kept(project: Path) -> None:
    env = broken_encoder(project, {12: f"wait_for_shards(4)\n{FAULTS['sigkill']}"})
    add_to_site(project, SEALS_AT_ONCE)
    assert precompute(project, env).returncode == 0
    assert len((project / "calls").read_text()) == 7

    done = precompute(project, env, "precompute.overwrite=true")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Starting it again") == 1
    assert len((project / "calls").read_text()) == 7 + 6 + 3  # the fifth group of the second run was killed
    assert len(records(project)) == 12


@pytest.mark.slow
def test_failures_between_groups_that_are_far_apart_do_not_add_up(project: Path) -> None:
    env = broken_encoder(project, {})
    add_to_site(project, SEALS_AT_ONCE + KILLED_BETWEEN_GROUPS)

    done = precompute(project, env)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("between two groups. Starting it again") == 4
    assert len((project / "calls").read_text()) == 4 * 2 + 3


def test_a_kill_while_the_encoders_child_starts_is_survived(project: Path) -> None:
    env = broken_encoder(project, {})
    add_to_site(project, KILLED_AS_ITS_ENCODER_STARTS)

    done = precompute(project, env, "--json")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Starting it again") == 1
    assert json.loads(done.stdout)["caches"][0]["records"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_is_slower_than_the_encoder_may_be_kills_nobody(project: Path, workers: int) -> None:
    env = broken_encoder(project, {})
    add_to_site(project, SLOW_DISK)

    done = precompute(project, env, f"training.num_workers={workers}")

    assert done.returncode == 0, done.stderr
    assert "again" not in done.stderr
    assert len((project / "calls").read_text()) == 7


def test_a_process_that_cannot_be_started_is_one_line(project: Path) -> None:
    words = [*STOKER, "precompute", "c.yaml", "--json"]

    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 5; exec "$@"', "sh", *words],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 6, done.stderr
    assert "cannot be started" in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_another_system_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["stoker", "train", "c.yaml"])

    with pytest.raises(SystemExit) as stop:
        process.main()

    assert stop.value.code == 3
    assert "needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_during_the_imports_is_an_interrupt(project: Path, number: int) -> None:
    env = broken_encoder(project, {})
    add_to_site(project, f"\nif 'stoker.cli.main' in sys.orig_argv: os.kill(os.getpid(), {number:d})\n")

    done = precompute(project, env, "--json")

    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 130
    assert done.stderr == "interrupted; the same command resumes\n"


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the kernel does not say")
def test_a_process_that_was_stopped_waits_for_no_storage() -> None:
    """Else it would be ended, ten minutes after somebody stopped it to look at it."""
    busy = subprocess.Popen([sys.executable, "-c", "print(end='.', flush=True)\nwhile True: pass"], stdout=-1)
    try:
        assert busy.stdout is not None
        assert busy.stdout.read(1) == b"."
        time.sleep(0.2)  # until it is past the call that wrote this
        busy.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED)
        assert file_call(busy.pid) is None
    finally:
        busy.kill()
        busy.communicate()
