from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError, ResourceError, StalledError
from stoker.plan import resources
from stoker.plan.resources import (
    cpu_share,
    device_memory,
    disk_space,
    host_memory,
    machine_memory,
    memory_now,
    probe,
)
from stoker.runtime.threads import call_within

MIB, GIB = 2**20, 2**30
MEMINFO = """MemTotal:       1000 kB
MemFree:         100 kB
MemAvailable:    {available} kB
Active(anon):    200 kB
Inactive(anon):  100 kB
Active(file):    300 kB
Unevictable:      50 kB
Dirty:            20 kB
Writeback:         5 kB
SUnreclaim:       25 kB
KernelStack:       0 kB
PageTables:        0 kB
Percpu:            0 kB
HugePages_Total:   0
Hugetlb:         {hugetlb} kB
"""


def fake_proc(root: Path, *, limit_kib: int | None = None, quota: str = "max 100000") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "cg/job").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(available=900, hugetlb=0))
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "proc/self/mountinfo").write_text("31 23 0:28 / /cg rw - cgroup2 cgroup rw\n")
    (root / "cg/job/memory.max").write_text("max" if limit_kib is None else str(limit_kib * 1024))
    (root / "cg/job/memory.stat").write_text(f"active_anon {100 * 1024}\n")
    (root / "cg/job/cpu.max").write_text(quota)
    return root / "proc"


def test_memory_that_cannot_be_reclaimed_is_not_free() -> None:
    found = machine_memory(MEMINFO.format(available=900, hugetlb=0))

    assert found.usable_bytes == (1000 - 200 - 100 - 50 - 20 - 5 - 25) * 1024


def test_the_kernels_own_estimate_is_believed_when_it_is_lower() -> None:
    """Some memory is in none of the lines: a driver's, or another file system's cache."""
    assert machine_memory(MEMINFO.format(available=300, hugetlb=0)).usable_bytes == 300 * 1024


def test_huge_pages_set_aside_are_not_free() -> None:
    assert machine_memory(MEMINFO.format(available=900, hugetlb=500)).usable_bytes == 100 * 1024


@pytest.mark.parametrize(
    ("limit_kib", "usable_kib", "decided"),
    [
        pytest.param(None, 600, "machine memory", id="no-group-limit"),
        pytest.param(400, 300, "cgroup v2 memory.max of /job", id="group-is-tighter"),
        pytest.param(900, 600, "machine memory", id="lower-limit-with-more-room"),
        pytest.param(5000, 600, "machine memory", id="group-allows-more-than-there-is"),
    ],
)
def test_the_tightest_limit_decides_and_is_named(
    limit_kib: int | None, usable_kib: int, decided: str, tmp_path: Path
) -> None:
    proc = fake_proc(tmp_path, limit_kib=limit_kib)

    found = host_memory(proc, tmp_path)

    assert (found.usable_bytes, found.label) == (usable_kib * 1024, decided)


def test_a_system_without_groups_has_the_machines_memory(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, limit_kib=10)
    (proc / "self/cgroup").unlink()

    assert host_memory(proc, tmp_path).label == "machine memory"


@pytest.mark.parametrize(
    ("quota", "affinity", "cpus"),
    [
        pytest.param("150000 100000", 4, 1.5, id="quota"),
        pytest.param("800000 100000", 4, 4.0, id="affinity"),
        pytest.param("max 100000", 3, 3.0, id="no-quota"),
    ],
)
def test_cpus_are_the_tighter_of_quota_and_affinity(
    quota: str, affinity: int, cpus: float, tmp_path: Path
) -> None:
    assert cpu_share(fake_proc(tmp_path, quota=quota), tmp_path, affinity).cpus == cpus


def test_probe_tells_the_truth_about_this_process(tmp_path: Path) -> None:
    found = probe(path=tmp_path / "not" / "made" / "yet")

    stat = os.statvfs(tmp_path)
    assert 0 < found.host_bytes <= found.host_total_bytes
    assert found.host_limit
    assert 0 < found.cpus <= len(os.sched_getaffinity(0))
    assert found.disk_bytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.1)
    assert found.disk_inodes is None or found.disk_inodes > 0
    assert (found.device, found.device_bytes) == ("cpu", 0)
    assert json.loads(json.dumps(found.to_json()))["host_limit"] == found.host_limit


def test_ranks_of_a_node_share_its_cpus_and_not_the_one_copy_in_memory() -> None:
    alone, shared = probe(), probe(local_world_size=4)

    assert shared.cpus == alone.cpus / 4
    assert shared.host_bytes == pytest.approx(alone.host_bytes, rel=0.1)
    assert alone.disk_bytes is None


def test_affinity_counts_in_a_real_process() -> None:
    one = {min(os.sched_getaffinity(0))}
    code = "from stoker.plan import probe; print(probe().cpus)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: os.sched_setaffinity(0, one),
    )

    assert float(done.stdout) <= 1.0


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, int]]:
    """A control group with a limit of 256 MiB, and the version it is of."""
    mine = Path("/proc/self/cgroup").read_text()
    for version, base in ((1, Path("/sys/fs/cgroup/memory")), (2, Path("/sys/fs/cgroup"))):
        if version == 2 and "memory" not in _text(base / "cgroup.subtree_control").split():
            continue
        folder = base / f"stoker-test-{os.getpid()}"
        try:
            folder.mkdir()
            limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
            (folder / limit).write_text(str(256 * MIB))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder, version
        folder.rmdir()
        return
    pytest.skip(f"no writable memory control group here; ours: {mine!r}")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


CHILD = """
import json, mmap, os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from stoker.plan import probe
def look():
    found = probe()
    return [found.host_bytes, found.host_total_bytes, found.host_limit]
before = look()
block = bytearray(os.urandom(1 << 20)) * 64              # 64 MiB that cannot be reclaimed
with_anonymous = look()
del block
file = Path(sys.argv[2], "big")                          # 64 MiB of page cache, which can
with file.open("wb") as out:
    for _ in range(64):
        out.write(os.urandom(1 << 20))
    out.flush(); os.fsync(out.fileno())
file.read_bytes()
with_cache = look()
print(json.dumps([before, with_anonymous, with_cache]))
"""


def test_a_real_memory_group_is_the_limit(memory_group: tuple[Path, int], tmp_path: Path) -> None:
    """Free memory of the machine says nothing inside a group; and page cache in it counts as free."""
    folder, version = memory_group

    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    before, with_anonymous, with_cache = json.loads(done.stdout)
    assert before[1] == 256 * MIB
    assert before[2].startswith(f"cgroup v{version} memory.")
    assert folder.name in before[2]
    assert before[0] < 256 * MIB
    assert before[0] - with_anonymous[0] == pytest.approx(64 * MIB, rel=0.2)
    assert with_cache[0] == pytest.approx(before[0], abs=16 * MIB)


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "", "mps"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="cpu, cuda or cuda:0"):
        device_memory(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ResourceError, match=r"cuda:3 .* cuda:0\b"):
        device_memory("cuda:3")


def test_gpu_memory_is_what_the_driver_says_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold most of it, so the total says nothing."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    found = probe(device="cuda:1")

    assert (found.device_bytes, found.device_total_bytes, found.device_name) == (11, 100, "GPU 1")


def test_what_torch_keeps_of_freed_tensors_is_free_for_a_new_loader_and_left_to_a_running_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader that is made again finds the memory of the one before; a look amid training takes nothing."""
    import torch

    kept = [40 * GIB]

    def give_back() -> None:
        kept[0] = 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB + kept[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (75 * GIB - kept[0], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    found = probe(device="cuda:0")
    assert found.device_bytes == 75 * GIB

    kept[0] = 40 * GIB
    assert memory_now(found).device_bytes == 35 * GIB
    assert kept[0] == 40 * GIB


@pytest.mark.gpu
def test_a_real_gpu_has_memory() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA device")

    found = probe(device="cuda")

    assert 0 < found.device_bytes <= found.device_total_bytes
    assert found.device_name


def test_a_file_system_without_an_inode_limit_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = os.statvfs(tmp_path)
    unlimited = os.statvfs_result((*stat[:5], 0, 0, 0, *stat[8:]))
    monkeypatch.setattr(resources.os, "statvfs", lambda _: unlimited)

    assert disk_space(tmp_path)[1] is None


def test_a_file_system_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang(_: Any) -> None:
        time.sleep(5)

    monkeypatch.setattr(resources.os, "statvfs", hang)
    monkeypatch.setattr(resources, "DISK_TIMEOUT_S", 0.05)

    with pytest.raises(StalledError, match=r"the file system of .* did not answer within 0.05 s"):
        disk_space(tmp_path)


def test_errors_of_the_question_pass_through() -> None:
    def fail() -> None:
        raise OSError("device gone")

    with pytest.raises(OSError, match="device gone"):
        call_within(1.0, fail, "it")


def test_asking_needs_no_torch_on_a_cpu() -> None:
    code = "import sys; from stoker.plan import probe; probe(); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
