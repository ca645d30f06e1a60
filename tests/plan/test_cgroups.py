from __future__ import annotations

from pathlib import Path

import pytest

from stoker.plan.resources import CpuLimit, cpu_limits, memory_limits, read_stat, unreclaimable

GIB = 2**30
NO_LIMIT_V1 = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mount(point: str, *, version: int, controllers: str = "", top: str = "/") -> str:
    kind = "cgroup2 cgroup rw" if version == 2 else f"cgroup cgroup rw,{controllers}"
    return f"30 23 0:28 {top} {point} rw,relatime - {kind}"


V2 = mount("/sys/fs/cgroup", version=2)
V1_MEMORY = mount("/sys/fs/cgroup/memory", version=1, controllers="memory")


def limits(root: Path, cgroup: str, *mounts: str) -> list[tuple[int, int]]:
    found = memory_limits(cgroup, "\n".join(mounts), root)
    return [(limit.limit_bytes, limit.usable_bytes) for limit in found]


def test_version_2_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
            # with page cache counted the group looks full, and is not
            "sys/fs/cgroup/job/memory.current": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"active_anon {GIB}\ninactive_anon 0\nfile {6 * GIB}\n"
            f"slab_unreclaimable {GIB}\nfile_dirty {GIB}\n",
        },
    )

    assert limits(root, "0::/job\n", V2) == [(8 * GIB, 5 * GIB)]


def test_every_ancestor_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/a/memory.max": f"{4 * GIB}",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/c/memory.max": f"{6 * GIB}",
            "sys/fs/cgroup/a/b/c/memory.stat": f"active_anon {GIB}",
            "sys/fs/cgroup/a/memory.stat": f"active_anon {3 * GIB}",
        },
    )

    assert limits(root, "0::/a/b/c\n", V2) == [(6 * GIB, 5 * GIB), (4 * GIB, GIB)]


def test_memory_high_throttles_before_max_kills(tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/fs/cgroup/j/memory.max": "max", "sys/fs/cgroup/j/memory.high": f"{GIB}"})

    found = memory_limits("0::/j\n", V2, root)

    assert [limit.label for limit in found] == ["cgroup v2 memory.high of /j"]


def test_version_1_counts_the_groups_below_and_the_kernel(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{8 * GIB}",
            "sys/fs/cgroup/memory/job/memory.kmem.usage_in_bytes": f"{GIB}",
            "sys/fs/cgroup/memory/job/memory.stat": "cache 5\nactive_anon 5\nunevictable 5\n"
            f"total_cache {4 * GIB}\ntotal_active_anon {GIB}\ntotal_inactive_anon {GIB}\n"
            f"total_unevictable {GIB}\ntotal_dirty {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )

    found = memory_limits("4:memory:/job\n", V1_MEMORY, root)

    assert [(limit.usable_bytes, limit.label) for limit in found] == [
        (3 * GIB, "cgroup v1 memory.limit_in_bytes of /job")
    ]


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/job/memory.max": "max\n",
        },
    )

    assert limits(root, "4:memory:/\n0::/job\n", V1_MEMORY, V2) == []


def test_hybrid_machines_have_both_versions(tmp_path: Path) -> None:
    """Version 1 controllers, and version 2 mounted beside them at `unified` without any."""
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/unified/job/cgroup.controllers": "hugetlb",
            "sys/fs/cgroup/unified/memory.max": f"{3 * GIB}",
        },
    )
    cgroup = "9:name=systemd:/\n4:memory,hugetlb:/job\n1:cpu,cpuacct:/\n0::/job\n"

    assert limits(root, cgroup, V1_MEMORY, mount("/sys/fs/cgroup/unified", version=2)) == [
        (2 * GIB, 2 * GIB),
        (3 * GIB, 3 * GIB),
    ]


@pytest.mark.parametrize(
    ("top", "path"),
    [
        pytest.param("/docker/abc", "/docker/abc", id="bind-mounted-from-the-group"),
        pytest.param("/", "/", id="own-namespace"),
        pytest.param("/", "/../../other", id="outside-the-namespace"),
        pytest.param("/docker/abc", "/docker/xyz", id="not-below-the-mount"),
    ],
)
def test_containers_see_their_own_group_at_the_mount(top: str, path: str, tmp_path: Path) -> None:
    # what lies beside the mount is not ours
    root = tree(tmp_path, {"sys/fs/cgroup/memory.max": f"{GIB}", "sys/fs/memory.max": "1"})

    assert limits(root, f"0::{path}\n", mount("/sys/fs/cgroup", version=2, top=top)) == [(GIB, GIB)]


def test_a_later_mount_hides_an_earlier_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"new/memory.max": f"{GIB}", "old/memory.max": f"{2 * GIB}"})

    assert limits(root, "0::/\n", mount("/old", version=2), mount("/new", version=2)) == [(GIB, GIB)]


def test_mount_points_may_hold_spaces(tmp_path: Path) -> None:
    root = tree(tmp_path, {"my cgroup/memory.max": f"{GIB}"})

    assert limits(root, "0::/\n", mount("/my\\040cgroup", version=2)) == [(GIB, GIB)]


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "::::", "4:memory"])
def test_unreadable_texts_mean_no_limit(text: str, tmp_path: Path) -> None:
    assert memory_limits(text, text, tmp_path) == []
    assert cpu_limits(text, text, tmp_path) == []


def test_usable_is_never_negative(tmp_path: Path) -> None:
    root = tree(tmp_path, {"c/memory.max": "100", "c/memory.stat": "active_anon 200"})

    assert limits(root, "0::/\n", mount("/c", version=2)) == [(100, 0)]


def test_anonymous_memory_that_is_locked_counts_once() -> None:
    """It is in `anon` and in `unevictable`; the lists hold each page once."""
    stat = read_stat("anon 30\nshmem 5\nactive_anon 10\ninactive_anon 5\nunevictable 20\nfile 1000\n")

    assert unreclaimable(stat) == 35
    assert unreclaimable({"anon": 30, "shmem": 5, "slab_reclaimable": 99}) == 35


@pytest.mark.parametrize(
    ("files", "cgroup", "expected"),
    [
        pytest.param({"c/job/cpu.max": "150000 100000\n"}, "0::/job", [1.5], id="v2"),
        pytest.param({"c/job/cpu.max": "max 100000\n"}, "0::/job", [], id="v2-unlimited"),
        pytest.param(
            {"c/cpu.max": "50000 100000", "c/job/cpu.max": "200000 100000"},
            "0::/job",
            [2.0, 0.5],
            id="nested",
        ),
        pytest.param(
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            "1:cpu,cpuacct:/job",
            [3.0],
            id="v1",
        ),
        pytest.param(
            {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            "1:cpu,cpuacct:/job",
            [],
            id="v1-unlimited",
        ),
    ],
)
def test_cpu_quotas(files: dict[str, str], cgroup: str, expected: list[float], tmp_path: Path) -> None:
    mounts = [mount("/c", version=2), mount("/cpu", version=1, controllers="cpu,cpuacct")]

    found: list[CpuLimit] = cpu_limits(cgroup, "\n".join(mounts), tree(tmp_path, files))

    assert [limit.cpus for limit in found] == expected
