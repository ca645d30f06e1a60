"""Question: what does it cost to take over a folder of small files, next to one sequential read of them?

The files are npz with moments and flipped moments, as mar writes them, 1,000 to a folder. `read_s`: one process
opens, reads and closes each file in the order of their names, and does nothing with the bytes. `adopt_s`:
`stoker.adopt` with everything that it does (list, digest, read again, verify, store). `again_s`: the same call when all
is there. Pages are dropped before `read_s` and `adopt_s` where `--cold` is given; else they are in memory. `parse_s`:
`numpy.load` of all files in one process, what a script that copies them needs at least. `list_mib`, `adopt_mib`: memory
that the main process takes for the list alone, and at most in all, above that of the imports; `workers_mib`: the
largest of its children.

    python benchmarks/adopt.py [--quick] [--save] [--files 1000000] [--cold] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure import publish

SHAPE = (8, 8, 8)
IN_FOLDER = 1000


def make(root: Path, count: int) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for number in range(count):
        folder = root / f"n{number // IN_FOLDER:08d}"
        if number % IN_FOLDER == 0:
            folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"{number:08d}.JPEG.npz")
        if not paths[-1].exists():
            values = generator.standard_normal((2, *SHAPE)).astype(np.float32)
            np.savez(paths[-1], moments=values[0], moments_flip=values[1])
    return paths


def drop(paths: list[Path]) -> None:
    """Have the kernel forget the pages of every file."""
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def peak_mib() -> float:
    """Return the most memory that this program had; `ru_maxrss` would count that of the program that began it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def adopt_in_this_process(root: str, caches: str) -> dict[str, Any]:
    import stoker
    import stoker.extras.adopt.run
    import stoker.precompute.engine
    from stoker.extras.adopt.layouts import LAYOUTS
    from stoker.extras.adopt.listing import make_listing

    before = peak_mib()
    with tempfile.TemporaryDirectory() as place:
        begin = time.perf_counter()
        len(make_listing(Path(root), LAYOUTS["mar"], Path(place), "x"))
        list_s, listed = time.perf_counter() - begin, peak_mib()
    begin = time.perf_counter()
    cache = stoker.adopt(root, caches, name="x", layout="mar", progress=False)
    adopt_s = time.perf_counter() - begin
    begin = time.perf_counter()
    assert len(stoker.adopt(root, caches, name="x", layout="mar", progress=False)) == len(cache)
    again_s = time.perf_counter() - begin
    return {
        "list_s": round(list_s, 2),
        "adopt_s": round(adopt_s, 2),
        "again_s": round(again_s, 2),
        "list_mib": round(listed - before, 1),
        "adopt_mib": round(peak_mib() - before, 1),
        "workers_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
    }


def measure(root: Path, count: int, *, cold: bool) -> dict[str, Any]:
    paths = make(root / "features", count)
    if cold:
        drop(paths)
    begin = time.perf_counter()
    size = sum(len(path.read_bytes()) for path in paths)
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for path in paths:
        with np.load(path) as arrays:
            for name in arrays.files:
                arrays[name]
    parse_s = time.perf_counter() - begin
    if cold:
        drop(paths)
    with tempfile.TemporaryDirectory(dir=root) as caches:
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(root / "features"), caches],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = json.loads(done.stdout)
    return {
        "files": count,
        "mib": round(size / 2**20, 1),
        "cold": cold,
        "read_s": round(read_s, 2),
        "parse_s": round(parse_s, 2),
        **found,
        "adopt_to_read": round(found["adopt_s"] / read_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="keep the files here, for the next run")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(adopt_in_this_process(*arguments.child)))
        return
    counts = [2_000] if arguments.quick else [arguments.files // 10, arguments.files]
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as place:
            root = Path(place) if arguments.folder is None else arguments.folder / str(count)
            rows.append(measure(root, count, cold=arguments.cold))
    publish("adopt", rows, save=arguments.save)


if __name__ == "__main__":
    main()
