"""Random sequences of write, compact, gc, repair and loss of the index, some killed half-way.

A process of its own, so that forking meets no threads: `python -m tests.store.keep_rounds DIR SEED ROUNDS`.
After each step every record that was stored before is there, bit for bit.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.gc import GcPolicy, collect
from stoker.store.maintain import compact, repair
from tests.store.fakes import FakeSource, expected, fill, same_bits
from tests.store.kill_points import killed_at

SOURCE = FakeSource(parts=[("a", 30), ("b", 11)])
RECIPE = make_recipe(SOURCE, None)
STEPS = ("write", "write", "write", "compact", "gc", "repair", "lose-index")
LAST_POINT = 60
"""Most operations make fewer writing calls than that, so that some are killed and some are not."""


def write(root: Path, numbers: list[int]) -> None:
    folder = open_folder(root, "x", RECIPE)
    fill(folder, SOURCE, numbers, shard_bytes=7 * 1156)
    folder.finish()


def step(name: str, root: Path, numbers: list[int]) -> Callable[[], object]:
    path = root / "x" / RECIPE.fingerprint
    if name == "compact":
        return lambda: compact(path, shard_bytes=10 * 1156)
    if name == "gc":
        return lambda: collect(root, GcPolicy(keep=1, max_bytes=0))
    if name == "repair":
        return lambda: repair(path)
    if name == "lose-index":
        return lambda: (path / "index.json").unlink(missing_ok=True)
    return lambda: write(root, numbers)


def stored(root: Path) -> set[int]:
    """What is stored, every record compared."""
    cache = open_cache(root / "x" / RECIPE.fingerprint, require_complete=False)
    for number in cache.indices.tolist():
        assert same_bits(cache[number], expected(SOURCE, RECIPE, number)), number
    return {*cache.indices.tolist()}


def main() -> None:
    """Do the rounds."""
    root, chance, rounds = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    kills = 0
    for _ in range(rounds):
        shutil.rmtree(root, ignore_errors=True)
        write(root, [0])
        known, done = stored(root), ["write"]
        for _ in range(12):
            name = chance.choice(STEPS)
            numbers = sorted(chance.sample(range(len(SOURCE)), chance.randrange(1, 9)))
            done.append(name)
            if chance.random() < 0.5:
                kills += killed_at(chance.randrange(1, LAST_POINT), step(name, root, numbers))
            else:
                step(name, root, numbers)()
                known |= {*numbers} if name == "write" else set()
            now = stored(root)
            assert now >= known, (done, known - now)
            known = now
        write(root, [*range(len(SOURCE))])
        compact(root / "x" / RECIPE.fingerprint, shard_bytes=10 * 1156)
        with suppress(FileNotFoundError):
            collect(root)
        assert stored(root) == {*range(len(SOURCE))}, done
        shards = [*root.glob("x/*/shard-*")]
        assert len(shards) == 5, (done, len(shards))
    sys.stdout.write(str(kills))


if __name__ == "__main__":
    main()
