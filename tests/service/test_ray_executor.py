"""Jobs on a Ray cluster, and on a stand-in that speaks its job API: the same from claim to end.

The stand-in runs in the plain tests; a real cluster, with a token and on the loopback interface, in the slow.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from stoker.errors import ConfigError, ResourceError, StalledError
from stoker.extras.ray import jobs as ray
from stoker.extras.ray.jobs import RayExecutor, RayJobs, RayProcess, ray_token
from stoker.service.database import Database, State
from stoker.service.executor import JobLimits, LocalExecutor, RayTarget
from stoker.service.folders import JobFile, JobFolder, StateFolder
from tests.service.one_node import TOKEN, OneNode
from tests.service.serve import STAND_IN
from tests.service.test_workers import Bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def node() -> Iterator[OneNode]:
    opened = OneNode()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """The dashboard of a Ray cluster of one node."""
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'ray[default]'")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets: 107 bytes at most
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": folder,
    }
    port, dashboard = _free_port(), _free_port()
    words = ["start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
    words += [f"--dashboard-port={dashboard}", "--object-store-memory=100000000", "--disable-usage-stats"]
    # Its agent, which starts jobs, takes a fixed port by default, which another cluster may have.
    words += [f"--dashboard-agent-listen-port={_free_port()}", f"--dashboard-agent-grpc-port={_free_port()}"]
    try:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words]
        subprocess.run(command, env=environment, check=True, timeout=170, stdout=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{dashboard}"
        soon(lambda: _runs_jobs(RayJobs(address, TOKEN)))
        yield address
    finally:
        for one in psutil.process_iter(["environ"]):
            if (one.info["environ"] or {}).get("RAY_TMPDIR") == folder:
                one.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _runs_jobs(jobs: RayJobs) -> bool:
    """Whether it has run one: the command that starts a cluster ends before the dashboard takes jobs."""
    with suppress(ResourceError):
        jobs.submit("first", "true", gpus=0.0)
        return jobs.info("first")["status"] == "SUCCEEDED"
    return False


@pytest.fixture(
    params=["stand-in", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def jobs(request: pytest.FixtureRequest) -> RayJobs:
    if request.param == "ray":
        return RayJobs(request.getfixturevalue("real"), TOKEN)
    return RayJobs(request.getfixturevalue("node").address, TOKEN)


def executor(jobs: RayJobs) -> RayExecutor:
    target = RayTarget(address=jobs.address, python=sys.executable)
    return RayExecutor(target, jobs, LocalExecutor())


@pytest.fixture
def bench(embedded: Database, tmp_path: Path, jobs: RayJobs, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A worker whose jobs run on the cluster."""
    monkeypatch.setattr(ray, "LOOK_S", 0.1)
    state = StateFolder(tmp_path / "state")
    state.make()
    bench = Bench(embedded, state, JobLimits(grace_s=20.0))
    bench.worker.executor = executor(jobs)
    return bench


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """Of a job that takes its time."""
    made = JobFolder(tmp_path / "job")
    made.make()
    told = JobFile(
        id="7", name="n", kind="training", attempt=1, epochs=600, epoch=0, checkpoint=None,
        config={"epoch_s": 0.1}, datasets=[], dataset_ids=[], caches="", data="", limits={},
    )  # fmt: skip
    told.write(made.job_file)
    return made


def soon(what, limit_s: float = 150.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def starts(folder: JobFolder) -> int:
    path = folder.path / "witness.txt"
    return path.read_text().count("start") if path.exists() else 0


def test_a_job_runs_there_pauses_at_a_checkpoint_and_goes_on(bench: Bench) -> None:
    job = bench.make(epochs=6, epoch_s=0.3)
    bench.attempt(lambda: bench.jobs.pause(job.id))
    paused = bench.jobs.get(job.id)
    bench.jobs.resume(job.id)
    bench.attempt()

    assert (paused.state, paused.message) == (State.PAUSED, "paused with a checkpoint")
    done = bench.jobs.get(job.id)
    assert (done.state, done.exit_code) == (State.COMPLETED, 0)
    assert [row["epoch"] for row in bench.jobs.metrics(job.id)] == [1, 2, 3, 4, 5, 6]
    assert bench.witness(job.id) == ["start", "start", "end"]


def test_a_job_whose_worker_died_is_watched_by_the_next_and_not_run_twice(
    folder: JobFolder, jobs: RayJobs
) -> None:
    first = executor(jobs).lock(folder)
    run = first.start(STAND_IN, JobLimits())
    soon(lambda: starts(folder))
    first.release()  # as the end of its process does

    second = executor(jobs).lock(folder)
    again = second.start(STAND_IN, JobLimits())

    assert again.submission == run.submission
    again.terminate()
    soon(lambda: again.poll() is not None)
    second.release()
    assert (again.poll(), starts(folder)) == (75, 1)


def test_what_does_not_stop_is_killed(folder: JobFolder, jobs: RayJobs) -> None:
    told = JobFile.read(folder.job_file)
    told.config["deaf"] = True
    told.write(folder.job_file)
    lock = executor(jobs).lock(folder)
    run = lock.start(STAND_IN, JobLimits())
    soon(lambda: starts(folder))

    run.terminate()
    time.sleep(1.0)
    assert run.poll() is None
    run.kill()
    soon(lambda: run.poll() is not None)

    assert run.poll() == ray.KILLED
    pid = int((folder.path / "witness.txt").read_text().split()[1])
    soon(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_submission_whose_answer_was_lost_is_sent_once(folder: JobFolder, node: OneNode) -> None:
    node.drop_answers = 1
    lock = executor(RayJobs(node.address, TOKEN)).lock(folder)
    run = lock.start(STAND_IN, JobLimits())
    soon(lambda: starts(folder))

    assert list(node.processes) == [run.submission]
    assert starts(folder) == 1


def test_a_cluster_that_is_gone_loses_the_attempt_and_nobody_starts_another_in_the_dark(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "SILENT_S", 0.5)
    monkeypatch.setattr(ray, "LOOK_S", 0.1)
    node = OneNode()
    jobs = RayJobs(node.address, TOKEN)
    lock = executor(jobs).lock(folder)
    run: RayProcess = lock.start(STAND_IN, JobLimits())
    soon(lambda: starts(folder))
    node.hang_up()
    soon(lambda: run.poll() is not None)
    lock.release()

    assert run.poll() == ray.KILLED
    with pytest.raises(StalledError, match=r"names stoker-7-1-.*, which may still run"):
        executor(jobs).lock(folder)  # the process does run, out of our sight
    for process in node.processes.values():
        process.kill()
        process.wait(30)


def test_a_newer_submission_ends_the_older_process(folder: JobFolder, node: OneNode) -> None:
    """Where a cluster could not be heard, this is what keeps two attempts from going on side by side."""
    run = executor(RayJobs(node.address, TOKEN)).lock(folder).start(STAND_IN, JobLimits())
    soon(lambda: starts(folder))
    folder.submission.write_text("stoker-7-2")

    assert node.processes[run.submission].wait(30) == ray.OVERTAKEN


def test_a_node_that_does_not_see_the_folder_runs_nothing(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "SIGHT_S", 0.0)
    code = ray.main([str(folder.path), "stoker-7-1", STAND_IN.target])

    assert (code, starts(folder)) == (ray.UNSEEN, 0)
    assert "names nothing and not stoker-7-1" in capfd.readouterr().err
    run = RayProcess.__new__(RayProcess)
    run._folder = folder
    assert run._exit_status({"status": "FAILED", "driver_exit_code": code}) == code
    assert "storage that service and cluster share" in folder.log.read_text()


def test_a_cluster_that_wants_another_token_says_so(folder: JobFolder, node: OneNode) -> None:
    jobs = RayJobs(node.address, "another")

    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN"):
        jobs.check()
    with pytest.raises(ResourceError, match="RAY_AUTH_TOKEN"):  # the job waits, and does not fail
        executor(jobs).lock(folder).start(STAND_IN, JobLimits())


def test_the_token_comes_from_where_ray_takes_it(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("at home\n")
    (tmp_path / "named").write_text("by path")
    home = {"HOME": str(tmp_path)}

    assert ray_token({}) is None
    assert ray_token(home) == "at home"
    assert ray_token({**home, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "named")}) == "by path"
    assert ray_token({**home, "RAY_AUTH_TOKEN": "here"}) == "here"


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that says the same to everybody, and what it was told."""
    told: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    told.append(connection.recv(65536))
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", told
    listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
    ],
)
def test_a_garbled_answer_of_the_cluster_is_one_that_did_not_come(answer: bytes) -> None:
    with answering(answer) as (address, _), pytest.raises(ResourceError, match=address):
        RayJobs(address, TOKEN).info("job")


def test_the_token_does_not_follow_a_redirect() -> None:
    with answering(b"HTTP/1.1 200 OK\r\n\r\n{}") as (other, told):
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {other}/api/jobs/job\r\nContent-Length: 0\r\n\r\n"
        with answering(redirect.encode()) as (address, _), pytest.raises(ResourceError):
            RayJobs(address, TOKEN).info("job")

        assert told == []
