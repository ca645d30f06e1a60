"""A map never says that a block is here whose bytes are not."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import CorruptError
from stoker.store.mirror import MirrorFolder
from stoker.store.mirror_blocks import HERE, BlockMap, new_map
from stoker.store.remote import FolderRemote
from stoker.store.storage import make_root, open_storage
from tests.kit.amount import example_count

NAME = "shard-00-000000.safetensors"
BLOCK, BLOCKS = 4096, 40


class KilledError(BaseException):
    """The process ends here."""


def mirrored(folder: Path, truth: bytes, limit: int | None) -> MirrorFolder:
    """A mirror of one object, in blocks of `BLOCK` bytes."""
    place = folder / "there" / "x" / "y"
    place.mkdir(parents=True)
    (place / NAME).write_bytes(truth)
    make_root(folder / "here", f"file://{folder / 'there'}", limit)
    mirror = open_storage(folder / "here" / "x" / "y").mirror
    assert mirror is not None
    return mirror


STEP = st.one_of(
    st.tuples(st.just("fetch"), st.integers(0, BLOCKS - 1), st.integers(1, 12)),
    st.tuples(st.just("kill"), st.integers(0, BLOCKS - 1), st.integers(1, 12)),
    st.tuples(st.just("read"), st.integers(0, BLOCKS - 1), st.integers(1, 12)),
    st.tuples(st.just("free"), st.integers(0, BLOCKS), st.integers(1, 12)),
    st.tuples(st.just("mend"), st.integers(0, BLOCKS - 1), st.integers(1, 12)),
)


@settings(max_examples=example_count(20), deadline=None)
@given(
    steps=st.lists(STEP, max_size=14), limit=st.sampled_from([None, 6 * BLOCK, 30 * BLOCK]), cut=st.integers()
)
def test_a_map_never_says_that_bytes_are_here_that_are_not(
    steps: list[tuple[str, int, int]], limit: int | None, cut: int
) -> None:
    truth = random.Random(7).randbytes(BLOCKS * BLOCK - 100)
    chance = random.Random(cut)
    whole: Callable[..., None] = FolderRemote.read

    def killed(self: FolderRemote, name: str, begin: int, end: int, **how: object) -> None:
        sink = how.pop("sink")

        def some(piece: bytes) -> None:
            sink(piece[: chance.randrange(len(piece) + 1)])  # type: ignore[operator]
            raise KilledError

        whole(self, name, begin, end, sink=some, **how)

    with tempfile.TemporaryDirectory() as folder, patch("stoker.store.mirror.BLOCK_BYTES", BLOCK):
        mirror = mirrored(Path(folder), truth, limit)
        for step, at, count in steps:
            begin, end = at * BLOCK, min(len(truth), (at + count) * BLOCK)
            if step == "fetch":
                mirror.ensure(NAME, [(begin, end)])
            elif step == "kill":
                with patch.object(FolderRemote, "read", killed), suppress(KilledError):
                    mirror.ensure(NAME, [(begin, end)])
            elif step == "read":
                out = bytearray(end - begin)
                mirror.open(NAME).read_into(begin, memoryview(out))
                assert out == truth[begin:end]
            elif step == "free":
                mirror.root.space.free(at * BLOCK)
            else:
                mirror.open(NAME).refetch(begin, end - begin)
            check(Path(folder) / "here" / "x" / "y", truth)


def check(folder: Path, truth: bytes, name: str = NAME) -> None:
    """What the map on disk says of the bytes on disk, as another process would find them."""
    path = folder / f".map-{name}"
    if path.exists():
        blocks, data = BlockMap(path), (folder / name).read_bytes()
        for block in np.flatnonzero(blocks.state == HERE).tolist():
            begin, end = blocks.extent(block, block + 1)
            assert data[begin:end] == truth[begin:end], f"block {block}"


@pytest.mark.parametrize("change", ["short", "other", "empty"])
def test_a_map_that_is_none_is_refused(tmp_path: Path, change: str) -> None:
    data = new_map(10 * BLOCK, block_bytes=BLOCK)
    path = tmp_path / "map"
    path.write_bytes({"short": data[:-1], "other": b"x" + data[1:], "empty": b""}[change])

    with pytest.raises(CorruptError, match="map of blocks"):
        BlockMap(path)


def test_a_map_keeps_the_version_that_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "map").write_bytes(new_map(5, etag='"abc-3"', whole=True))

    blocks = BlockMap(tmp_path / "map")

    assert (blocks.etag, blocks.size, blocks.holds(0, 1)) == ('"abc-3"', 5, True)


def test_every_change_that_takes_blocks_away_can_be_told_from_every_other(tmp_path: Path) -> None:
    """By who has the map open, and by who opens the one that was made in its place."""
    path, generations = tmp_path / "map", list[int]()
    for _ in range(3):
        path.write_bytes(new_map(10 * BLOCK, block_bytes=BLOCK, whole=True))
        mine, other = BlockMap(path), BlockMap(path)
        for blocks in (mine, other, mine):
            generations.append(mine.generation)
            blocks.drop(0, 1)
        path.unlink()

    assert len({*generations}) == len(generations)
