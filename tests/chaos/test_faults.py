"""A sample of the fault harness; docs/project/reliability.md has commands and figures of the full runs."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import image, planted, preload
from tests.chaos.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
DEADLINE_S = 170
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="kills and watches processes as Linux does"
    ),
]


def by_hand(name, *arguments, timeout_s=DEADLINE_S):
    """Figures of a program, started as a user would."""
    command = [sys.executable, "-m", f"tests.chaos.{name}", *map(str, arguments)]
    environment = {**os.environ, **preload.ONE_THREAD}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def figures():
    """Figures of a program that is run in a fork of one process for all tests here."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.serve"],
        cwd=ROOT, env=preload.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(*request):
        server.stdin.write(json.dumps([str(word) for word in request]) + "\n")
        server.stdin.flush()
        assert select.select([server.stdout], [], [], DEADLINE_S)[0], f"{request}: no answer"
        found = json.loads(server.stdout.readline())
        assert "failed" not in found, found
        return found

    with server:
        try:
            yield ask
        finally:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture(scope="module")
def preloaded():
    """Skips where the library cannot be built or loaded."""
    if why := preload.missing_tools():
        pytest.skip(why)


def test_faults_at_some_calls_of_a_scenario_break_no_promise(figures, preloaded):
    scenarios = ("commit", "resume", "compact", "gc", "repair", "import")
    named = [word for name in scenarios for word in ("--scenario", name)]

    found = figures("enumerate", "--points", 3, *named)

    assert found["wrong"] == []
    assert found["unfired"] == 0
    assert found["points"] >= 3 * len(scenarios)


# What shows each, and as what: a power cut, or a fault where the protocol is bad.
CAUGHT_BY = {
    "no-fsync": (["--points", 0, "--cuts", 1], "torn"),
    "no-folder-fsync": (["--points", 0, "--cuts", 1], "lost"),
    "in-place": (["--fault", "kill", "--op", "write"], "torn"),
    "manifest-first": (["--fault", "kill", "--op", "rename"], "dangling"),
    "short-write": (["--fault", "short"], "torn"),
    "fsync-again": (["--fault", "EIO", "--op", "fsync"], "torn"),
    "lock-by-pid": (["--fault", "kill", "--op", "fsync", "--deadline-s", 1], "hung"),
    "swallowed": (["--fault", "EIO", "--op", "pwrite"], "torn"),
}


def test_every_protocol_known_to_be_bad_has_its_case():
    assert {*CAUGHT_BY} == {*planted.PROTOCOLS} - {"none"}
    assert len(CAUGHT_BY) == 8


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_bad_protocol_is_caught(figures, preloaded, name):
    arguments, kind = CAUGHT_BY[name]

    found = figures("enumerate", "--scenario", "commit", "--planted", name, "--first", *arguments)

    assert kind in found["kinds"], found


STRACE_NAMES = {
    "mkdirat": "mkdir", "pwrite64": "pwrite", "renameat": "rename", "renameat2": "rename", "linkat": "link",
    "unlinkat": "unlink", "symlinkat": "symlink",
}  # fmt: skip
TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,sync,syncfs,rename,"
    "renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,mkdir,mkdirat,ftruncate,truncate,"
    "fallocate,copy_file_range,sendfile,splice,flock,chmod,fchmod,fchmodat,utimensat"
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_library_sees_every_call_that_the_system_sees(preloaded, tmp_path, scenario):
    """A call that the library misses is a point that is never tried."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace, which is not on PATH")
    listed = by_hand("enumerate", "--list", "--scenario", scenario)["calls"][scenario]
    root = tmp_path / "root"
    root.mkdir()
    program = (
        "import os, sys; from pathlib import Path; from tests.chaos.scenarios import SCENARIOS, nothing\n"
        "root, scenario = Path(sys.argv[1]), SCENARIOS[sys.argv[2]]\n"
        "scenario.prepare(root); scenario.recipe\n"
        "try: os.mkdir('/proc/begin')\n"  # a mark in the trace
        "except OSError: pass\n"
        "scenario.run(root, nothing)\n"
    )
    log = tmp_path / "strace"
    tracer = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={TRACED}"]
    command = [*tracer, sys.executable, "-c", program, str(root), scenario]
    environment = {**os.environ, **preload.ONE_THREAD}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace is not allowed to trace here")
    assert done.returncode == 0, done.stderr

    lines = log.read_text().partition('mkdir("/proc/begin"')[2].splitlines()[1:]
    seen = [op for line in lines if str(root) in line and (op := written(line))]

    assert sorted(seen) == sorted(op for op, _ in listed if op != "close-written")


def written(line):
    """Name of a traced call that writes; empty for one that only reads."""
    call = re.match(r"\d+ +(\w+)\(", line)
    if call is None:  # the end of one that was traced already, after another thread's
        return ""
    op = call[1]
    if op in ("open", "openat", "creat"):
        if "O_CREAT" in line or op == "creat":
            return "create"
        return "open-write" if "O_WRONLY" in line or "O_RDWR" in line else ""
    if op == "unlinkat" and "AT_REMOVEDIR" in line:
        return "rmdir"
    return STRACE_NAMES.get(op, op)


@pytest.mark.parametrize(
    ("arguments", "sound"),
    [
        pytest.param(["resume"], True, id="resume"),
        pytest.param(["commit", "--planted", "no-folder-fsync"], False, id="folders-not-synced"),
    ],
)
def test_a_power_cut_on_ext4_takes_what_was_not_synced_and_nothing_else(figures, preloaded, arguments, sound):
    if why := image.refused():
        pytest.skip(why)

    found = figures("image", "--scenario", *arguments)

    assert found["images"] > 5
    assert (found["wrong_count"] == 0) is sound, found


def test_flipped_bits_and_changed_shards_are_found_and_not_served(figures):
    found = figures("flips", "--count", 100)

    assert found["wrong"] == []
    assert (found["found_and_named"], found["shards_named"]) == (100, 5)


def test_damaged_and_forged_files_are_no_crash(figures):
    found = figures("fuzz", "--count", 200)

    assert found["wrong"] == []


def test_eight_writers_with_kills_make_one_sound_cache(figures):
    found = figures("writers", "--rounds", 1)

    assert found["wrong"] == []
    assert found["killed"] > 0
    assert found["encodes_per_record"] < 1.5  # a few kills in one short round cost more than in many


def test_a_tree_killed_at_random_resumes_and_leaves_nothing_behind(figures):
    found = figures("trees", "--runs", 1, "--cycles", 1)

    assert found["wrong"] == []
    assert found["killed_before_the_end"] == 1


LONGER = {
    "faults": ("enumerate", "--points", 20),
    "reads": ("enumerate", "--points", 10, "--reads"),
    "power": ("enumerate", "--points", 0, "--cuts", 3),
    "images": ("image",),
    "flips": ("flips", "--count", 1_000),
    "fuzz": ("fuzz", "--count", 10_000),
    "writers": ("writers", "--rounds", 20),
    "trees": ("trees", "--runs", 10, "--cycles", 10),
}
"""Minutes each. Everything there is takes hours: docs/project/reliability.md has those commands."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LONGER)
def test_longer_runs_of_each_program_break_no_promise(preloaded, name):
    if name == "images" and (why := image.refused()):
        pytest.skip(why)

    found = by_hand(*LONGER[name], timeout_s=1800)

    assert found["wrong"] == []
    assert found.get("encodes_per_record", 1) <= 1.1
