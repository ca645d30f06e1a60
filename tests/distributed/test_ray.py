"""Precompute on a Ray cluster of two nodes: the records of one machine, whatever is killed meanwhile.

Everything runs in processes of its own: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from stoker.store import open_cache
from stoker.store.storage import attach_mirror
from tests.store.s3_server import an_s3_server, missing

pytest.importorskip("ray", reason="Ray is an extra: pip install 'stoker[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BURGERS = ROOT.parent / "shared/data/pde_exponax/1D_Burgers_Sols_Nu0.01.hdf5"
LONG_S = 240.0
"""Against hangs only: a cluster starts in seconds, on a busy machine in half a minute."""


class TwoNodes:
    """A cluster in a process of its own."""

    def __init__(self, environment, *words):
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "two_nodes.py"), "1", *map(str, words)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = self.process.stdout.readline().strip()
        if not self.address and self.process.wait(60) == 2:
            pytest.skip("mount namespaces are not permitted here")
        assert self.address, "no cluster"

    def kill_a_node(self):
        """End the second node as a power cut would, as far as processes of one machine can."""
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"

    def close(self):
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=60)
        for one in processes_of(self.environment):  # what Ray leaves behind at times
            with suppress(psutil.NoSuchProcess):
                one.kill()


def processes_of(environment):
    """Processes of the clusters that have their files where this environment says."""
    return [
        one
        for one in psutil.process_iter(["environ", "status"])
        if (one.info["environ"] or {}).get("RAY_TMPDIR") == environment["RAY_TMPDIR"]
    ]


@contextmanager
def an_environment():
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets: 107 bytes at most
    Path(folder, "ray").mkdir()
    yield {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-of-the-tests-0123456789abcdef",
        "RAY_TMPDIR": folder,
        "HOME": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def environment():
    with an_environment() as found:
        yield found


@contextmanager
def nodes(environment, *words):
    cluster = TwoNodes(environment, *words)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def cluster(environment):
    """For tests that leave it whole."""
    with nodes(environment) as cluster:
        yield cluster


@contextmanager
def running(environment, **given):
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_on_ray.py"), json.dumps(given)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def run(environment, **given):
    """Run to the end; exit code, report, and what was said."""
    with running(environment, **given) as process:
        out, said = process.communicate(timeout=LONG_S)
    return process.returncode, None if process.returncode else last_line(out), said


def last_line(out):
    """The report; Ray itself prints to standard output when a node is lost."""
    return json.loads(out.splitlines()[-1])


def calls(folder):
    """How often each sample was encoded; the zeros that fill up a short group are not samples."""
    path = Path(folder, "calls")
    found = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        numbers = [int(word) for word in line.split()[1:]]
        found.update(set(numbers) - ({0} if numbers[0] else set()))
    return found


def is_still(folder):
    """Whether nothing is being encoded: a call takes a tenth of a second."""
    before = sum(calls(folder).values())
    time.sleep(3.0)
    return sum(calls(folder).values()) == before


def wait_for(what, limit_s=LONG_S):
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


def same_records(path, others):
    one, two = open_cache(Path(path)), open_cache(Path(others))
    assert one.fingerprint == two.fingerprint
    assert one.indices.tolist() == two.indices.tolist() != []
    for number in one.indices.tolist():
        for name, value in one[number].items():
            assert torch.equal(value, two[number][name]), (number, name)


def workers(folder):
    """Calls by the number of the process, in the order in which they came."""
    return Counter(int(line.split()[0]) for line in Path(folder, "calls").read_text().splitlines())


def alone(environment, tmp_path, samples, **given):
    """The cache that one machine makes of the same."""
    (tmp_path / "alone").mkdir()
    code, report, said = run(environment, folder=str(tmp_path / "alone"), samples=samples, **given)
    assert code == 0, said
    return report["path"]


@pytest.mark.skipif(not BURGERS.exists(), reason=f"{BURGERS} is not there")
def test_real_data_on_two_nodes_gives_the_records_of_one_machine(cluster, environment, tmp_path):
    paths = []
    for engine in (["--engine", "ray", "--address", cluster.address], []):
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "stoker",
                    "precompute",
                    str(ROOT / "configs/train_burgers_32dim.yaml"),
                ),
                *(
                    f"data.files={BURGERS}",
                    f"training.latent_cache_dir={tmp_path}/caches{len(engine)}",
                    "--json",
                ),
                *engine,
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
        assert done.returncode == 0, done.stderr
        caches = json.loads(done.stdout)["caches"]
        assert [cache["encoded"] for cache in caches] == [cache["count"] for cache in caches]
        paths.append([cache["path"] for cache in caches])

    assert len(paths[0]) == 2  # train and val
    for one, two in zip(*paths, strict=True):
        same_records(one, two)


def test_both_nodes_work_and_no_record_depends_on_which(cluster, environment, tmp_path):
    """The encoder's output depends on the shape of its batch, so a cut group would show in every record."""
    code, report, said = run(
        environment,
        folder=str(tmp_path),
        samples=203,
        run=7,
        sleep_s=0.1,
        faults={"50": "raise"},
        max_quarantined=0.1,
        ray={"address": cluster.address, "slice": 1.0},
    )

    assert code == 0, said
    assert (report["records"], report["encoded"], report["quarantined"]) == (202, 202, 1)
    assert "sample 50" in said
    busy = set(re.findall(r"\((\w{6})\) (?:prepare|read|encode)", said))  # workers, as progress names them
    assert len(busy) == 2, said
    assert sum(calls(tmp_path).values()) <= 1.1 * 202  # an idle worker may take what another has begun
    same = alone(environment, tmp_path, 203, run=7, faults={"50": "raise"}, max_quarantined=0.1)
    same_records(report["path"], same)


def test_a_node_killed_midway_costs_a_little_work(tmp_path):
    with an_environment() as environment:  # a cluster takes all processes of its environment along
        with (
            nodes(environment) as cluster,
            running(
                environment, folder=str(tmp_path), samples=1400, sleep_s=0.1, ray={"address": cluster.address}
            ) as process,
        ):
            wait_for(lambda: len(calls(tmp_path)) > 600)
            cluster.kill_a_node()
            out, said = process.communicate(timeout=LONG_S)

        assert process.returncode == 0, said
        assert "go to another worker" in said
        report = last_line(out)
        assert (report["records"], report["encoded"]) == (1400, 1400)
        encoded = calls(tmp_path)
        assert len(encoded) == 1400
        assert sum(encoded.values()) <= 1.1 * 1400
        same_records(report["path"], alone(environment, tmp_path, 1400))


def test_a_killed_driver_takes_its_tasks_along_and_is_resumed(cluster, environment, tmp_path):
    given = {"folder": str(tmp_path), "samples": 1000, "ray": {"address": cluster.address}}
    with running(environment, sleep_s=0.1, **given) as process:
        wait_for(lambda: len(calls(tmp_path)) > 400)
        process.kill()
        process.wait()
    wait_for(lambda: is_still(tmp_path), limit_s=60.0)  # tasks must not outlive their driver for long
    assert len(calls(tmp_path)) < 1000

    code, report, said = run(environment, **given)

    assert code == 0, said
    assert report["records"] == 1000
    assert report["reused"] > 200
    assert sum(calls(tmp_path).values()) <= 1.25 * 1000


def test_ctrl_c_seals_what_is_encoded_and_the_next_run_goes_on(cluster, environment, tmp_path):
    given = {"folder": str(tmp_path), "samples": 1000, "ray": {"address": cluster.address}}
    with running(environment, sleep_s=0.1, **given) as process:
        wait_for(lambda: len(calls(tmp_path)) > 200)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG_S)

    assert process.returncode == 130, said
    encoded = sum(calls(tmp_path).values())
    (stored,) = map(int, re.findall(r"(\d+) of 1,000 records are stored", said))
    assert encoded - 32 <= stored <= encoded  # what two encoders have in hand is let go

    code, report, said = run(environment, **given)

    assert code == 0, said
    assert (report["reused"], report["encoded"]) == (stored, 1000 - stored)
    assert sum(calls(tmp_path).values()) == 1000 + encoded - stored


def test_a_worker_that_is_ten_times_as_slow_is_relieved_by_the_other(cluster, environment, tmp_path):
    """What it has left is cut anew when the other has nothing: its share would take 50 s, the other's 5 s.

    Without that it ends with the time of its task, after 30 calls, and makes half of the other 20.
    """
    ray = {"address": cluster.address}
    code, report, said = run(environment, folder=str(tmp_path), samples=400, sleep_s=0.1, slow=True, ray=ray)

    assert code == 0, said
    slow = int((tmp_path / "slow").read_text())
    assert len(calls(tmp_path)) == 400
    assert 100 <= sum(workers(tmp_path).values()) <= 1.1 * 100  # a call that it has begun may be made twice
    assert workers(tmp_path)[slow] < 32
    same_records(report["path"], alone(environment, tmp_path, 400))


def test_a_frozen_worker_is_given_up_ended_and_replaced(cluster, environment, tmp_path):
    """It hears nothing, Ray included, and would keep its place for ever."""
    timeouts = {"start": 20.0, "open": 5.0, "read": 5.0, "encode": 5.0, "write": 5.0}
    ray = {"address": cluster.address}
    given = {"folder": str(tmp_path), "samples": 400, "timeouts": timeouts, "ray": ray}
    with running(environment, sleep_s=0.1, **given) as process:
        wait_for(lambda: len(calls(tmp_path)) > 100)
        encoder = psutil.Process(next(iter(workers(tmp_path))))
        (frozen,) = (one for one in encoder.parents() if one.cmdline()[0].startswith("ray::"))
        frozen.suspend()
        out, said = process.communicate(timeout=LONG_S)

    assert process.returncode == 0, said
    assert re.search(r"said nothing for \d+ s in stage", said)
    assert last_line(out)["records"] == 400
    assert sum(calls(tmp_path).values()) <= 1.1 * 400
    wait_for(lambda: not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE, limit_s=30.0)


@pytest.mark.parametrize(("times", "code"), [("once", 0), ("always", 5)])
def test_an_encoder_that_hangs_is_started_again_and_named(cluster, environment, tmp_path, times, code):
    found, report, said = run(
        environment,
        folder=str(tmp_path),
        samples=80,
        hang=[41, times],
        timeouts={"encode": 10.0},
        ray={"address": cluster.address, "max_retries": 1},
    )

    assert found == code, said
    assert "lost at samples 40-43: it made no progress for 10 s" in said
    if code:
        assert "3 encoders in a row ended at samples 40-43" in said
    else:
        assert report["records"] == 80


@pytest.mark.parametrize("place", ["file", "s3"])
def test_nodes_fill_a_cache_at_an_address_by_mirrors_of_their_own(tmp_path, monkeypatch, place):
    """The second node has another disk at the path of the driver's mirror."""
    mirror, other = tmp_path / "mirror", tmp_path / "other"
    mirror.mkdir()
    other.mkdir()
    with ExitStack() as stack:
        environment = stack.enter_context(an_environment())
        url, variables = f"file://{tmp_path}/there", {}
        if place == "s3":
            if reason := missing():
                pytest.skip(reason)
            server = stack.enter_context(an_s3_server())
            url, variables = f"s3://{server.bucket}/caches", server.variables()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cluster = stack.enter_context(nodes(environment | variables, mirror, other))
        code, report, said = run(
            environment | variables,
            folder=str(tmp_path),
            samples=200,
            sleep_s=0.1,
            url=url,
            mirror_dir=str(mirror),
            ray={"address": cluster.address, "slice": 1.0},
        )

        assert code == 0, said
        assert (report["records"], report["encoded"]) == (200, 200)
        assert sum(calls(tmp_path).values()) <= 1.1 * 200
        assert [*other.glob("*/c/*/shard-*")], "the second node stored nothing"
        here = attach_mirror(f"{url}/c", tmp_path / "third")
        same_records(here, alone(environment, tmp_path, 200))


@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGKILL], ids=["end", "Ctrl-C", "kill"])
def test_a_cluster_of_our_own_ends_with_us_whatever_ends_us(tmp_path, end):
    with an_environment() as environment:
        given = {"folder": str(tmp_path), "samples": 400, "ray": {"num_cpus": 1}}
        with running(environment, sleep_s=0.1, **given) as process:
            wait_for(lambda: len(calls(tmp_path)) > 40)
            assert len(processes_of(environment)) > 3  # ours, Ray's, and workers
            if end is not None:
                process.send_signal(end)
            out, said = process.communicate(timeout=LONG_S)

        assert process.returncode == {None: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[end], said
        wait_for(lambda: not processes_of(environment), limit_s=60.0)
        if end is None:
            same_records(last_line(out)["path"], alone(environment, tmp_path, 400))
        else:
            code, report, said = run(environment, **given)
            assert code == 0, said
            assert report["reused"] > 0
            assert report["records"] == 400
            wait_for(lambda: not processes_of(environment), limit_s=60.0)


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        pytest.param({"num_gpus": 8, "wait": 1.0}, 6, "num_gpus=8", id="no-such-node"),
        pytest.param({"address": "127.0.0.1:9"}, 5, "no Ray cluster answers at 127.0.0.1:9", id="no-cluster"),
    ],
)
def test_what_cannot_work_is_said_and_not_waited_for(cluster, environment, tmp_path, changed, code, words):
    found, _, said = run(
        environment, folder=str(tmp_path), samples=8, ray={"address": cluster.address, **changed}
    )

    assert (found, words in said) == (code, True), said
    assert not (tmp_path / "calls").exists()


def test_a_wrong_token_is_named(cluster, environment, tmp_path):
    wrong = {**environment, "RAY_AUTH_TOKEN": "another-token-0123456789abcdef012345"}
    code, _, said = run(
        wrong, folder=str(tmp_path), samples=8, ray={"address": cluster.address, "connect": 5.0}
    )

    assert (code, "RAY_AUTH_TOKEN" in said) == (5, True), said
