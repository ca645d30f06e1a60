"""Laws of looking after caches, over random caches: what must stay, stays; what is done once is done."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.store import Cache, WriterSettings, make_recipe, open_cache, open_folder
from stoker.store.gc import DAY_S, GcPolicy, collect
from stoker.store.maintain import compact
from stoker.store.storage import idle_seconds
from tests.kit.amount import example_count
from tests.store.fakes import RAGGED, SCHEMA, FakeSource, assert_whole, batch_of, expected, fill, same_bits
from tests.store.kill_points import make_old

PARTS = [("a", 11), ("b", 5)]
LAWS = settings(
    max_examples=example_count(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example empties the folder first
)


@st.composite
def writers(draw: st.DrawFn) -> list[tuple[list[int], str, list[int]]]:
    """What each of several writers stored: numbers of one part, its device, and those it marked."""
    drawn: list[tuple[list[int], str, list[int]]] = []
    for _ in range(draw(st.integers(1, 7))):
        low, high = draw(st.sampled_from([(0, 10), (11, 15)]))
        numbers = draw(st.lists(st.integers(low, high), min_size=1, max_size=6, unique=True))
        marked = draw(st.lists(st.sampled_from(numbers), unique=True))
        drawn.append((numbers, draw(st.sampled_from(["cpu", "tpu"])), marked))
    return drawn


def described(cache: Cache) -> dict[int, Any]:
    """For each sample: bits, whether it is marked, environment and conversion error's bound."""
    found: dict[int, Any] = {}
    for number in cache.indices.tolist():
        place = cache._find(number)
        assert place is not None
        shard, local = cache.shard(place[0]), number - cache.recipe.parts[0].count * (number > 10)
        record = {name: value.flatten().tolist() for name, value in cache[number].items()}
        found[number] = (record, local in shard.marked, shard.described("environment"))
    return found


@LAWS
@given(
    written=writers(),
    schema=st.sampled_from([SCHEMA, RAGGED]),
    dtype=st.sampled_from([None, "float16"]),
    full=st.integers(1, 9),
    indexed=st.booleans(),
)
def test_compacting_changes_nothing_but_the_number_of_shards(
    tmp_path: Path, written: Any, schema: Any, dtype: Any, full: int, indexed: bool
) -> None:
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    source = FakeSource(schema, PARTS)
    folder = open_folder(tmp_path, "x", make_recipe(source, None, dtype=dtype))
    for numbers, device, marked in written:
        writer = folder.writer(WriterSettings(device=device))
        writer.append(numbers, batch_of(source, numbers), marked=marked)
        writer.commit()
        if indexed:
            folder.finish()
    before = folder.finish()
    shard_bytes = full * (1156 if schema is SCHEMA else 60)

    report = compact(folder.path, shard_bytes=shard_bytes)
    after = open_cache(folder.path, require_complete=False)
    again = compact(folder.path, shard_bytes=shard_bytes)
    last = open_cache(folder.path, require_complete=False)

    assert described(after) == described(before)
    assert (after.statistics, after.index.error) == (before.statistics, before.index.error)
    assert all(same_bits(after[n], expected(source, after.recipe, n)) for n in after.indices.tolist())
    assert after.verify().ok
    assert report.shards_after <= report.shards_before
    assert (report.written < report.merged) or (report.written == report.merged == 0)
    assert (again.merged, again.written, last.index.generation) == (0, 0, after.index.generation)
    del folder, before, after, last
    collect(tmp_path)
    assert described(open_cache(tmp_path / "x", require_complete=False)).keys() == {
        n for numbers, _, _ in written for n in numbers
    }


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four complete caches and an unfinished one under each of two names."""
    root = tmp_path_factory.mktemp("templates")
    for name in ("x", "y"):
        for i in range(5):
            source = FakeSource(parts=[("a", 2 + 3 * i)], settings={"i": i, "name": name})
            folder = open_folder(root, name, make_recipe(source, None))
            fill(folder, source, range(len(source) - (i == 2)))
            folder.finish()
    return root


def policies() -> st.SearchStrategy[GcPolicy]:
    return st.builds(
        GcPolicy,
        keep=st.none() | st.integers(0, 4),
        max_bytes=st.none() | st.integers(0, 400_000),
        older_than_s=st.none() | st.floats(0, 60 * DAY_S),
        force=st.booleans(),
    )


@LAWS
@given(ages=st.lists(st.floats(0.01, 60), min_size=10, max_size=10), policy=policies())
def test_what_goes_is_what_the_policy_and_the_protections_allow(
    tmp_path: Path, templates: Path, ages: list[float], policy: GcPolicy
) -> None:
    root = tmp_path / "cache"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(templates, root)
    folders = sorted(root.glob("*/*"))
    caches = {path: open_index(path) for path in folders}  # which is a use
    for folder, days in zip(folders, ages, strict=True):
        make_old(folder, days)
    # Ages are measured against the clock, here a clock that stands still: two folders of the same age would
    # change places when the second is looked at much later than the first, and one could cross a bound.
    now = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[idle_seconds.__module__].time, "time", lambda: now)
        assert_policy_is_kept(root, policy, folders, caches)


def assert_policy_is_kept(
    root: Path, policy: GcPolicy, folders: list[Path], caches: dict[Path, tuple[int, bool]]
) -> None:
    unused = {path: idle_seconds(path) for path in folders}
    size = {path: sum(p.stat().st_size for p in path.iterdir()) for path in folders}

    planned = collect(root, policy, dry_run=True)
    done = collect(root, policy)

    assert [item.path for item in planned.removed] == [item.path for item in done.removed]
    assert [item.path for item in planned.kept] == [item.path for item in done.kept]
    gone = [Path(item.path) for item in done.removed if item.kind == "fingerprint"]
    assert all(path.exists() != (path in gone) for path in folders)
    assert done.bytes_removed == sum(size[path] for path in gone)
    assert gone == sorted(gone, key=lambda path: -unused[path]) or policy.max_bytes is not None
    for name in ("x", "y"):
        ranked = sorted(  # complete ones first, then those that were used last
            (path for path in folders if path.parent.name == name),
            key=lambda p: (caches[p][1], -unused[p], caches[p][0]),
            reverse=True,
        )
        newest = max((path for path in ranked if caches[path][1]), key=lambda p: caches[p][0])
        assert policy.force or newest not in gone
        assert not {*ranked[: policy.keep or 0]} & {*gone}
        asked = policy.keep is not None and policy.max_bytes is None and policy.older_than_s is None
        for path in ranked[policy.keep :] if asked else ():
            assert path in gone or (not policy.force and (path == newest or unused[path] < DAY_S))
    assert policy.force or all(unused[path] >= DAY_S for path in gone)
    if policy.older_than_s is not None and policy.max_bytes is None:
        assert all(unused[path] > policy.older_than_s for path in gone)
    if policy.max_bytes is not None and policy.older_than_s is None and gone:
        assert done.bytes_left + size[gone[-1]] > policy.max_bytes, "one more went than was needed"
    assert collect(root, policy).removed == []


def open_index(path: Path) -> tuple[int, bool]:
    """Sequence, and whether it is complete."""
    cache = open_cache(path, require_complete=False)
    return cache.index.sequence, cache.complete


def test_the_laws_are_about_caches_that_hold_something(templates: Path) -> None:
    complete = [open_index(path)[1] for path in sorted(templates.glob("*/*"))]
    assert complete.count(True) == 8
    assert_whole(open_cache(templates / "x"), FakeSource(parts=[("a", 14)], settings={"i": 4, "name": "x"}))
