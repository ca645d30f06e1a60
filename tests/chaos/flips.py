"""Single flipped bits, and shards that are swapped, cut, stretched or foreign: found, named, never served.

`python -m tests.chaos.flips --count 10000` prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.errors import FormatError, StokerError
from stoker.schema import QUANTIZED_DTYPES
from stoker.store import Cache, open_cache
from tests.chaos import program
from tests.chaos.scenarios import MIXED
from tests.store.fakes import FakeSource, expected, make_cache, same_bits

FOREIGN = FakeSource(MIXED.fields, MIXED.parts, salt={"a": "other"})


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def served_wrongly(cache: Cache) -> list[int]:
    """Numbers of records that a reader is given and that are not what was stored."""
    wrong: list[int] = []
    for number in cache.indices.tolist():
        try:
            record = cache[number]
        except StokerError:
            continue
        if not same_bits(record, expected(MIXED, cache.recipe, number)):
            wrong.append(number)
    return wrong


def look(cache: Cache) -> tuple[set[str], list[int]]:
    """Files that a fresh process names as damaged, and records that it serves wrongly."""
    named = {record.shard for record in Cache(cache.path, cache.recipe, cache.index).verify().bad}
    served = served_wrongly(Cache(cache.path, cache.recipe, cache.index))
    try:
        served += served_wrongly(open_cache(cache.path, require_complete=False))
    except FormatError as error:
        named.add(Path(str(error).split()[0]).name)
    return named, served


def flips(cache: Cache, count: int, chance: random.Random) -> dict[str, Any]:
    """Flip one bit at a time, anywhere in shards, index and recipe."""
    good = files_of(cache)
    files, sizes = [*good], [len(data) for data in good.values()]
    found, by_file, wrong = 0, Counter[str](), list[str]()
    for _ in range(count):
        # Half of them by size, half by file: the index is small beside the shards.
        path = chance.choices(files, sizes)[0] if chance.random() < 0.5 else chance.choice(files)
        bit = chance.randrange(len(good[path]) * 8)
        flip(path, bit)
        named, served = look(cache)
        restore(cache, good)
        found += named == {path.name}
        by_file[path.name.split("-")[0]] += 1
        if named != {path.name}:
            wrong.append(f"bit {bit} of {path.name}: named {sorted(named)}")
        if served:
            wrong.append(f"bit {bit} of {path.name}: records {served} were served")
    return {"flips": count, "found_and_named": found, "by_file": dict(by_file), "wrong": wrong}


def files_of(cache: Cache) -> dict[Path, bytes]:
    """Shards, index and recipe as they are."""
    paths = [*sorted(cache.path.glob("shard-*")), cache.path / "index.json", cache.path / "recipe.json"]
    return {path: path.read_bytes() for path in paths}


def restore(cache: Cache, good: Mapping[Path, bytes]) -> None:
    """Put everything back; a reader may have made the index again."""
    for path, data in good.items():
        if path.read_bytes() != data:
            path.write_bytes(data)
    assert {*cache.path.glob("[a-z]*")} >= {*good}


def swap(a: Path, b: Path, _foreign: bytes, _chance: random.Random) -> None:
    """Exchange two shards."""
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def cut(a: Path, _b: Path, _foreign: bytes, chance: random.Random) -> None:
    """Cut a shard short."""
    data = a.read_bytes()
    a.write_bytes(data[: chance.randrange(len(data))])


def stretch(a: Path, _b: Path, _foreign: bytes, chance: random.Random) -> None:
    """Append bytes to a shard."""
    a.write_bytes(a.read_bytes() + chance.randbytes(chance.choice((1, 4096))))


def foreign(a: Path, _b: Path, foreign_bytes: bytes, _chance: random.Random) -> None:
    """Put another cache's shard in its place."""
    a.write_bytes(foreign_bytes)


def copy(a: Path, b: Path, _foreign: bytes, _chance: random.Random) -> None:
    """Put another shard of the same cache in its place."""
    a.write_bytes(b.read_bytes())


def zeros(a: Path, _b: Path, _foreign: bytes, chance: random.Random) -> None:
    """A hole of whole sectors, as after a lost write."""
    data = bytearray(a.read_bytes())
    at = chance.randrange(len(data) // 512) * 512
    if not any(data[at : at + 512]):
        at = 0  # padding, which is zero anyway: the header instead
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    a.write_bytes(data)


CHANGES: list[Callable[[Path, Path, bytes, random.Random], None]] = [swap, cut, stretch, foreign, copy, zeros]


def swaps(cache: Cache, foreign_bytes: bytes, count: int, chance: random.Random) -> dict[str, Any]:
    """Exchange, cut or replace a shard, then open, read and verify."""
    good = files_of(cache)
    shards = [path for path in good if path.name.startswith("shard-")]
    found, by_change, wrong = 0, Counter[str](), list[str]()
    for _ in range(count):
        change = chance.choice(CHANGES)
        a, b = chance.sample(shards, 2)
        change(a, b, foreign_bytes, chance)
        changed = {path.name for path in shards if path.read_bytes() != good[path]}
        named, served = look(cache)
        restore(cache, good)
        by_change[change.__name__] += 1
        found += named == changed
        if named != changed:
            wrong.append(f"{change.__name__} of {a.name}: named {sorted(named)}, changed {sorted(changed)}")
        if served:
            wrong.append(f"{change.__name__} of {a.name}: records {served} were served")
    return {"shards_changed": count, "shards_named": found, "by_change": dict(by_change), "wrong": wrong}


def run(argv: Sequence[str]) -> program.Figures:
    """Flip as many bits as the arguments ask for, and change a twentieth as many shards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=10_000, help="bits; a twentieth as many shards are changed"
    )
    parser.add_argument("--dtype", choices=QUANTIZED_DTYPES, help="of storage; default: as the source has it")
    parser.add_argument("--seed", type=int, default=0)
    arguments, begun = parser.parse_args(argv), time.monotonic()
    logging.getLogger("stoker").setLevel(logging.CRITICAL)
    chance = random.Random(arguments.seed)
    with program.workplace() as base:
        cache = make_cache(base / "ours", MIXED, dtype=arguments.dtype)
        other = make_cache(base / "theirs", FOREIGN, dtype=arguments.dtype)
        theirs = (other.path / other.index.shards[0].file).read_bytes()
        found = flips(cache, arguments.count, chance)
        more = swaps(cache, theirs, arguments.count // 20, chance)
    wrong = found.pop("wrong") + more.pop("wrong")
    return program.figures({**found, **more}, wrong, begun)


if __name__ == "__main__":
    sys.exit(program.main(run))
