"""Kill an operation at every system call that writes, in forked children; check after each what is left.

A process of its own, so that forking meets no threads: `python -m tests.store.kill_points OPERATION FOLDER`.
Prints how many points there were; each is proven to have fired by the child's signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.gc import GcPolicy, collect
from stoker.store.maintain import compact, repair
from tests.store.fakes import FakeSource, expected, fill, same_bits

WRITING = ("open", "pwrite", "write", "ftruncate", "fsync", "rename", "replace", "unlink", "rmdir", "utime")
SOURCE = FakeSource(parts=[("a", 24), ("b", 8)])
SHARD_BYTES = 10 * 1156


def killed_at(point: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed at its `point`-th writing call; whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [point]

        def counting(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*args: Any, **named: Any) -> Any:
                writes = name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if writes:
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **named)

            return call

        for name in WRITING:
            setattr(os, name, counting(name))
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def make_old(folder: Path, days: float = 40) -> None:
    """Give a folder the times of long ago."""
    for path in [*folder.iterdir(), folder]:
        past = path.stat().st_mtime - days * 86400
        os.utime(path, (past, past))


def prepare(root: Path) -> None:
    """A cache of many short shards, and an older recipe of the same name."""
    old = FakeSource(parts=[("a", 8)], salt={"a": "old"})
    folder = open_folder(root, "x", make_recipe(old, None))
    fill(folder, old)
    folder.finish()
    make_old(folder.path)
    folder = open_folder(root, "x", make_recipe(SOURCE, None))
    for begin in range(0, len(SOURCE), 5):
        fill(folder, SOURCE, range(begin, min(begin + 5, len(SOURCE))))
        folder.finish()


def assert_served(root: Path, damaged: set[int]) -> None:
    """Every record but the damaged ones comes back as it was written."""
    cache = open_cache(root / "x" / make_recipe(SOURCE, None).fingerprint, require_complete=False)
    for number in range(len(SOURCE)):
        if number not in damaged:
            assert same_bits(cache[number], expected(SOURCE, cache.recipe, number)), number


def operation(name: str, root: Path) -> tuple[Callable[[Path], object], set[int]]:
    """What to do with a copy of `root`, and which samples are damaged in it."""
    path = root / "x" / make_recipe(SOURCE, None).fingerprint
    relative = path.relative_to(root)
    if name == "compact":
        return lambda work: compact(work / relative, shard_bytes=SHARD_BYTES), set()
    if name == "compress":
        return lambda work: compact(work / relative, shard_bytes=SHARD_BYTES, compression="zstd"), set()
    if name == "gc":
        compact(path, shard_bytes=SHARD_BYTES)
        return lambda work: collect(work, GcPolicy(keep=1)), set()
    cache = open_cache(path)
    first, second = (path / cache.index.shards[i].file for i in (0, 1))
    lost = {0, int(cache.index.shards[1].segments[0, 1])}
    offset = cache.shard(0).columns["latent"].offset
    data = bytearray(first.read_bytes())
    data[offset] ^= 1  # sample 0
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-100])
    for _, begin, count in cache.index.shards[1].segments.tolist():
        lost |= {*range(begin, begin + count)}
    return lambda work: repair(work / relative), lost


def main() -> None:
    """Kill at every point, run again, look."""
    name, root = sys.argv[1], Path(sys.argv[2])
    prepare(root / "whole")
    work_on, damaged = operation(name, root / "whole")
    point = 0
    while True:
        point += 1
        copy = root / "copy"
        shutil.copytree(root / "whole", copy)
        fired = killed_at(point, lambda: work_on(copy))
        assert_served(copy, damaged)
        work_on(copy)
        assert_served(copy, damaged)
        hidden = [path.name for path in copy.rglob(".*") if path.name.startswith((".tmp-", ".gone-"))]
        if name not in ("compact", "compress"):  # the next writer of the folder sweeps their temporary files
            assert not hidden, hidden
        assert work_on(copy) is not None
        shutil.rmtree(copy)
        if not fired:
            break
    sys.stdout.write(str(point - 1))


if __name__ == "__main__":
    main()
