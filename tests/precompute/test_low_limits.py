"""Under low limits precompute completes, or refuses with figures before it begins; nothing is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
COUNT, WIDTH = 120, 1 << 14  # samples of 1 MiB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")]

Groups = Callable[..., list[Path]]


@pytest.fixture
def control_groups() -> Iterator[Groups]:
    """Makes control groups (v1) below our own with some settings; skips where that is not allowed."""
    made: list[Path] = []

    def make(controller: str, **settings: int) -> list[Path]:
        base = Path("/sys/fs/cgroup") / controller
        own = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
               if controller in line.split(":")[1].split(",")]  # fmt: skip
        if not own or not base.is_dir():
            pytest.skip(f"there is no controller {controller!r} of control groups v1 here")
        group = base / own[0].strip("/") / f"stoker-test-{os.getpid()}"
        try:
            group.mkdir()
            made.append(group)
            for name, value in settings.items():
                (group / f"{controller}.{name}").write_text(str(value))
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        return [group]

    yield make
    for group in made:
        with suppress(OSError):
            group.rmdir()


def run(folder: Path, before: str = ":", *, group: int = 4, workers: int = 1, width: int = WIDTH,
        count: int = COUNT, namespace: bool = False, copies: str = "") -> tuple[int, dict]:  # fmt: skip
    """Start it in a shell, after `before`; exit code and what it said."""
    script = Path(__file__).with_name("limited.py")
    given = f'"{folder}" {count} {width} {group} {workers} {copies}'
    command = f'{before} && exec "{sys.executable}" "{script}" {given}'
    outer = ["unshare", "-m"] if namespace else []
    done = subprocess.run(
        [*outer, "bash", "-c", command],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}


def joined(groups: list[Path]) -> str:
    return " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)


def started(folder: Path) -> list[str]:
    """Signs that reading or writing began."""
    return [str(p) for p in folder.rglob("*") if p.name.startswith("shard-") or p.parent.name == ".workers"]


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> dict:
    code, said = run(tmp_path_factory.mktemp("unlimited"))
    assert (code, said["records"]) == (0, COUNT)
    return said


def test_with_64_descriptors(tmp_path: Path, unlimited: dict) -> None:
    code, said = run(tmp_path, "ulimit -n 64", workers=2)

    assert (code, said) == (0, unlimited)


def test_with_2_mib_of_shared_memory(tmp_path: Path, unlimited: dict) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a mount of our own needs root and unshare")

    code, said = run(tmp_path, "mount -t tmpfs -o size=2m tmpfs /dev/shm", namespace=True)

    assert (code, said) == (0, unlimited)


def test_with_32_processes_and_threads(tmp_path: Path, unlimited: dict, control_groups: Groups) -> None:
    groups = control_groups("pids", max=32)

    code, said = run(tmp_path, joined(groups), workers=0)

    assert (code, said["records"], said["digest"]) == (0, COUNT, unlimited["digest"])


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_with_256_mib_of_memory(
    tmp_path: Path, unlimited: dict, control_groups: Groups, workers: int
) -> None:
    """The machine has far more, which is what a program without an eye for control groups would count on."""
    groups = control_groups("memory", limit_in_bytes=256 * MIB)

    code, said = run(tmp_path, joined(groups), workers=workers)

    assert (code, said.get("records"), said.get("digest")) == (0, COUNT, unlimited["digest"]), said
    assert "oom_kill 1" not in (groups[0] / "memory.oom_control").read_text()


def test_automatic_workers_whose_samples_take_much_memory_end_with_all_records(
    tmp_path: Path, control_groups: Groups
) -> None:
    """One worker may be killed: what it holds can double after it was measured. It is not started again."""
    groups = control_groups("memory", limit_in_bytes=2304 * MIB)

    code, said = run(tmp_path, joined(groups), group=1, workers=0, width=48 * WIDTH, count=32, copies="8")

    assert (code, said.get("records")) == (0, 32), said
    assert said["lost"] <= 1


def test_a_group_that_memory_cannot_hold_is_refused_before_anything_is_read(
    tmp_path: Path, control_groups: Groups
) -> None:
    groups = control_groups("memory", limit_in_bytes=256 * MIB)

    code, said = run(tmp_path, joined(groups), group=32, width=8 * WIDTH)

    assert (code, said["error"]) == (6, "ResourceError"), said
    assert "memory.limit_in_bytes" in said["text"]
    assert ", 256 MiB in all)" in said["text"]
    assert "one group of 32 samples need" in said["text"]
    assert started(tmp_path) == []
