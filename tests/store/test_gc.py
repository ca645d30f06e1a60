"""Cleaning up removes what nobody needs, and nothing else."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from stoker.errors import ConfigError, FormatError
from stoker.store import Cache, Recipe, load_recipe, make_recipe, open_cache, open_folder
from stoker.store.gc import GcPolicy, GcReport, collect
from stoker.store.maintain import compact, repair
from stoker.store.storage import Storage, UsageLock, exclusive_use, idle_seconds
from tests.kit import forked as subprocess
from tests.store.fakes import FakeSource, assert_whole, batch_of, fill, make_cache
from tests.store.kill_points import make_old

ROOT = Path(__file__).parents[2]
FULL = 10 * 1156
CURRENT = FakeSource()


def recipe_number(i: int) -> FakeSource:
    """The same samples under another recipe."""
    return FakeSource(settings={"i": i})


def make_fingerprints(root: Path, count: int, *, days: float = 40) -> list[Path]:
    """Complete caches of one name, each newer than the one before, all unused for long."""
    paths: list[Path] = []
    for i in range(count):
        folder = open_folder(root, "x", make_recipe(recipe_number(i), None))
        fill(folder, recipe_number(i))
        paths.append(folder.finish().path)
    for i, path in enumerate(paths):
        make_old(path, days + count - i)
    return paths


def make_superseded(root: Path) -> Path:
    """A cache whose short shards were merged."""
    folder = open_folder(root, "x", make_recipe(CURRENT, None))
    for begin in range(0, 16, 3):
        fill(folder, CURRENT, range(begin, min(begin + 3, 16)))
    path = folder.finish().path
    compact(path, shard_bytes=FULL)
    return path


def gone(report: GcReport, kind: str = "fingerprint") -> list[str]:
    return [Path(item.path).name for item in report.removed if item.kind == kind]


def stays(report: GcReport) -> dict[str, str]:
    return {Path(item.path).name: item.reason for item in report.kept}


def snapshot(root: Path) -> dict[str, int]:
    return {
        str(p.relative_to(root)): p.stat().st_size
        for p in root.rglob("*")
        if p.is_file() and not p.name.startswith(".claim")
    }


def test_superseded_shards_go_and_the_records_stay(tmp_path: Path) -> None:
    path = make_superseded(tmp_path)
    before = snapshot(tmp_path)

    report = collect(tmp_path)

    cache = open_cache(path)
    assert_whole(cache, CURRENT)
    assert {shard.file for shard in cache.index.shards} == {p.name for p in path.glob("shard-*")}
    assert report.bytes_removed == sum(before[f"x/{path.name}/{name}"] for name in gone(report, "shard")) > 0
    assert collect(tmp_path).removed == []


def test_a_dry_run_says_exactly_what_the_real_run_does(tmp_path: Path) -> None:
    make_fingerprints(tmp_path, 3)
    make_superseded(tmp_path)
    (tmp_path / "encoders").mkdir()
    (tmp_path / "encoders" / f"{'0' * 64}.safetensors").write_bytes(b"weights")
    before = snapshot(tmp_path)
    policy = GcPolicy(older_than_s=30 * 86400.0, keep=1)

    planned = collect(tmp_path, policy, dry_run=True)
    assert snapshot(tmp_path) == before
    done = collect(tmp_path, policy)

    assert planned.removed == done.removed
    assert planned.kept == done.kept
    assert {item.kind for item in done.removed} == {"fingerprint", "shard", "weights"}
    freed = sum(before.values()) - sum(snapshot(tmp_path).values())
    # The index of the compacted cache has become shorter too.
    assert done.bytes_removed <= freed < done.bytes_removed + 4096


def test_the_last_good_copy_is_never_removed(tmp_path: Path) -> None:
    """A merged shard may rot before the shards that it was made of are removed."""
    path = make_superseded(tmp_path)
    cache = open_cache(path)
    new = next(shard for shard in cache.index.shards if len(shard.segments))
    data = bytearray((path / new.file).read_bytes())
    data[cache.shard(0).columns["latent"].offset] ^= 1
    (path / new.file).write_bytes(data)
    del cache

    report = collect(tmp_path)

    assert [reason for reason in stays(report).values() if "last good copy of sample" in reason]
    assert repair(path).ok
    assert_whole(open_cache(path), CURRENT)
    collect(tmp_path)
    assert_whole(open_cache(path), CURRENT)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(GcPolicy(), [], id="nothing-asked"),
        pytest.param(GcPolicy(keep=2), [0, 1], id="keep"),
        pytest.param(GcPolicy(keep=0), [0, 1, 2], id="the-newest-is-protected"),
        pytest.param(GcPolicy(keep=0, force=True), [0, 1, 2, 3], id="force"),
        pytest.param(GcPolicy(older_than_s=42.5 * 86400), [0, 1], id="older-than"),
        pytest.param(GcPolicy(older_than_s=0.0, keep=3), [0], id="older-than-and-keep"),
        pytest.param(GcPolicy(max_bytes=0), [0, 1, 2], id="max-size-0"),
        pytest.param(GcPolicy(max_bytes=0, keep=2), [0, 1], id="max-size-and-keep"),
        pytest.param(GcPolicy(max_bytes=1 << 40), [], id="large-enough"),
    ],
)
def test_fingerprints_go_as_the_policy_says(tmp_path: Path, policy: GcPolicy, expected: list[int]) -> None:
    paths = make_fingerprints(tmp_path, 4)

    report = collect(tmp_path, policy)

    assert gone(report) == [paths[i].name for i in expected]
    assert [path.exists() for path in paths] == [i not in expected for i in range(4)]


def test_a_size_removes_no_more_than_needed(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 4)
    sizes = [sum(p.stat().st_size for p in path.iterdir()) for path in paths]

    report = collect(tmp_path, GcPolicy(max_bytes=sum(sizes) - sizes[0] - 1))

    assert gone(report) == [paths[0].name, paths[1].name]
    assert report.bytes_left <= sum(sizes) - sizes[0] - 1


def test_adopted_shards_count_once(tmp_path: Path) -> None:
    """They are hard links: removing one of two folders frees nothing of them."""
    old = open_folder(tmp_path, "x", make_recipe(FakeSource(parts=[("a", 10)]), None))
    fill(old, FakeSource(parts=[("a", 10)]))
    old_path = old.finish().path
    grown = open_folder(tmp_path, "x", make_recipe(CURRENT, None))
    grown.adopt()
    fill(grown, CURRENT, grown.missing().tolist())
    grown.finish()
    del old, grown
    shard = max(path.stat().st_size for path in old_path.glob("shard-*"))
    make_old(old_path)

    report = collect(tmp_path, GcPolicy(keep=1))

    assert gone(report) == [old_path.name]
    assert report.bytes_removed < shard
    assert_whole(open_cache(tmp_path / "x"), CURRENT)


def test_what_was_used_today_stays(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 3)
    open_cache(paths[0])

    report = collect(tmp_path, GcPolicy(keep=0))

    assert gone(report) == [paths[1].name]
    assert stays(report)[paths[0].name].startswith("used ")


def test_the_one_used_last_is_kept_and_not_the_one_that_was_indexed_last(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 4)
    make_old(paths[1], -10)

    assert gone(collect(tmp_path, GcPolicy(keep=1))) == [paths[0].name, paths[2].name]
    assert open_cache(tmp_path / "x").path == paths[3], "what the name alone opens is protected"


def test_of_caches_used_at_the_same_instant_the_one_made_last_is_kept(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 6)
    instant = time.time() - 40 * 86400
    for path in paths:
        for one in (path / "recipe.json", path):
            os.utime(one, (instant, instant))

    assert {*gone(collect(tmp_path, GcPolicy(keep=1)))} == {path.name for path in paths[:-1]}


def test_opening_notes_the_time_of_use_once_an_hour(tmp_path: Path) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    assert idle_seconds(path) > 86400
    open_cache(path)
    assert idle_seconds(path) < 60
    noted = (path / "recipe.json").stat().st_mtime_ns

    open_cache(path)

    assert (path / "recipe.json").stat().st_mtime_ns == noted


def test_a_folder_that_this_process_has_open_stays(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    cache = open_cache(paths[0])
    make_old(paths[0], 60)

    assert stays(collect(tmp_path, GcPolicy(keep=1)))[paths[0].name].startswith("in use")
    assert_whole(cache, recipe_number(0))
    del cache
    assert gone(collect(tmp_path, GcPolicy(keep=1))) == [paths[0].name]


HOLDER = """
import sys, time
from pathlib import Path
from stoker.store import load_recipe, open_cache, open_folder
path = Path(sys.argv[1])
if sys.argv[2] == "reader":
    held = open_cache(path)
elif sys.argv[2] == "writer":
    held = open_folder(path.parent.parent, path.parent.name, load_recipe(path))
else:
    from stoker.runtime.locks import lock_folder
    held = lock_folder(path, "encode")
    held.__enter__()
print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("kind", ["reader", "writer", "claim"])
def test_what_another_process_uses_stays_until_that_is_killed(tmp_path: Path, kind: str) -> None:
    paths = make_fingerprints(tmp_path, 2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(paths[0]), kind], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    make_old(paths[0], 60)

    report = collect(tmp_path, GcPolicy(keep=1))
    holder.kill()
    holder.wait(10)
    holder.stdout.close()

    reason = stays(report)[paths[0].name]
    assert reason.startswith("claimed (encode) by process" if kind == "claim" else "in use")
    assert gone(collect(tmp_path, GcPolicy(keep=1))) == [paths[0].name]


def test_superseded_shards_stay_while_an_earlier_generation_may_be_open(tmp_path: Path) -> None:
    path = make_superseded(tmp_path)
    reader = open_cache(path)

    report = collect(tmp_path)

    assert gone(report, "shard") == []
    assert all(reason.startswith("in use") for reason in stays(report).values())
    assert_whole(reader, CURRENT)


def test_nobody_opens_a_folder_while_things_are_removed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    monkeypatch.setattr("stoker.store.storage.WAIT_S", 0.05)

    with exclusive_use(path) as nobody:
        assert nobody
        with pytest.raises(Exception, match="clean-up"):
            UsageLock(path)
    UsageLock(path)


def test_a_file_system_without_locks_counts_as_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    paths = make_fingerprints(tmp_path, 2)
    monkeypatch.setattr("fcntl.flock", no_locks)

    fill(open_folder(tmp_path, "y", make_recipe(CURRENT, None)), CURRENT)
    open_cache(paths[1])
    report = collect(tmp_path, GcPolicy(keep=1))

    assert gone(report) == []
    assert "no locks" in stays(report)[paths[0].name]


def test_a_removal_that_was_cut_short_is_finished_and_never_opened(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    left = paths[0].rename(paths[0].with_name(f".gone-{paths[0].name}-0a"))

    assert open_cache(tmp_path / "x").path == paths[1]
    report = collect(tmp_path)

    assert gone(report, "leftover") == [left.name]
    assert not left.exists()


def test_weights_go_with_the_last_recipe_that_names_them(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    (tmp_path / "encoders").mkdir()
    names = {path: load_recipe(path).fingerprint * 4 for path in paths}
    for name in names.values():
        (tmp_path / "encoders" / f"{name}.safetensors").write_bytes(b"w" * 100)
    (tmp_path / "encoders" / f".gone-{names[paths[1]]}.safetensors").write_bytes(b"w" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "weights", property(lambda recipe: recipe.fingerprint * 4))

        report = collect(tmp_path, GcPolicy(keep=1))

    assert gone(report, "weights") == [f"{names[paths[0]]}.safetensors"]
    assert [p.name for p in (tmp_path / "encoders").iterdir()] == [f"{names[paths[1]]}.safetensors"]


def test_temporaries_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    dead = path / ".tmp-00-index.json"
    dead.write_bytes(b"half")
    folder = open_folder(tmp_path, "x", load_recipe(path))
    dead.write_bytes(b"half")
    writer = folder.writer()
    source = recipe_number(0)
    writer.append([0], batch_of(source, [0]))

    report = collect(tmp_path)

    assert gone(report, "temporary") == [dead.name]
    assert len([*path.glob(".tmp-*")]) == 1
    writer.commit()


def test_links_are_followed_for_what_they_need_and_never_removed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    paths = make_fingerprints(tmp_path / "elsewhere", 2)
    (tmp_path / "cache" / "x").symlink_to(paths[0].parent)

    report = collect(tmp_path / "cache", GcPolicy(keep=0, force=True))

    assert report.removed == []
    assert all(path.exists() for path in paths)


def test_a_damaged_recipe_protects_its_folder_and_all_weights(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    (tmp_path / "encoders").mkdir()
    (tmp_path / "encoders" / f"{'0' * 64}.safetensors").write_bytes(b"weights")
    (paths[0] / "recipe.json").write_bytes(b"{}")
    make_old(paths[0])

    report = collect(tmp_path, GcPolicy(keep=0))

    assert report.removed == []
    assert "recipe cannot be read" in stays(report)[paths[0].name]


def test_what_is_no_cache_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no folder"):
        collect(tmp_path / "none")
    with pytest.raises(ConfigError, match="keep is -1"):
        GcPolicy(keep=-1)


def test_one_cache_is_no_cache_folder(tmp_path: Path) -> None:
    (path,) = make_fingerprints(tmp_path, 1)

    for folder in (path, path.parent):
        with pytest.raises(FormatError, match="is one cache"):
            collect(folder, GcPolicy(keep=0, force=True))
    assert not [*tmp_path.rglob(".claim-gc")]


def test_weights_count_before_another_recipe_goes_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_fingerprints(tmp_path, 3)
    monkeypatch.setattr(Recipe, "weights", property(lambda recipe: recipe.fingerprint * 4))
    (tmp_path / "encoders").mkdir()
    weights = tmp_path / "encoders" / f"{paths[0].name * 4}.safetensors"
    weights.write_bytes(bytes(100_000))
    limit = sum(snapshot(tmp_path).values()) - 100_000

    planned = collect(tmp_path, GcPolicy(max_bytes=limit), dry_run=True)
    done = collect(tmp_path, GcPolicy(max_bytes=limit))

    assert gone(done) == [paths[0].name]
    assert gone(done, "weights") == [weights.name]
    assert planned.removed == done.removed
    assert done.bytes_left <= limit


def test_a_claim_that_finds_no_room_keeps_nobody_from_making_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_fingerprints(tmp_path, 2)
    real = os.open

    def no_inodes(path: object, flags: int, *args: int, **named: int) -> int:
        if flags & os.O_CREAT and ".claim-" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, flags, *args, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", no_inodes)

    assert gone(collect(tmp_path, GcPolicy(keep=1))) == [paths[0].name]


def test_nothing_is_removed_from_a_sibling_whose_shards_are_being_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path, FakeSource(parts=[("a", 10)]))
    grown = open_folder(tmp_path, "x", make_recipe(CURRENT, None))
    seen: list[bool] = []
    real = Storage.link

    def watched(self: Storage, other: Storage, name: str) -> None:
        with exclusive_use(other.path) as nobody:
            seen.append(nobody)
        real(self, other, name)

    monkeypatch.setattr(Storage, "link", watched)

    assert grown.adopt() == 10
    assert seen == [False]


WORK = """
import sys, time
from pathlib import Path
from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.maintain import compact
from stoker.store.gc import GcPolicy, collect
from stoker.store.maintain import repair
from tests.store.fakes import FakeSource, assert_whole, batch_of, fill
root, kind = Path(sys.argv[1]), sys.argv[2]
source = FakeSource(parts=[("a", 24)])
recipe = make_recipe(source, None)
path = root / "x" / recipe.fingerprint
until, rounds = time.monotonic() + 3, 0
while time.monotonic() < until:
    rounds += 1
    if kind == "reader":
        assert_whole(open_cache(path), source)
    elif kind == "writer":
        folder = open_folder(root, "x", recipe)
        fill(folder, source, range(rounds % 20, rounds % 20 + 4))
        assert folder.finish().complete
    elif kind == "compact":
        compact(path, shard_bytes=10 * 1156)
    elif kind == "repair":
        assert repair(path).ok
    else:
        collect(root, GcPolicy(keep=1))
print(rounds)
"""


@pytest.mark.chaos
@pytest.mark.slow
def test_workers_writers_compact_repair_and_gc_at_once(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 24)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for begin in range(0, 24, 4):
        fill(folder, source, range(begin, begin + 4))
    path = folder.finish().path
    del folder
    kinds = ["reader", "writer", "compact", "gc", "repair", "gc"]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path), kind],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for kind in kinds
    ]  # fmt: skip
    for kind, child in zip(kinds, children, strict=True):
        stdout, stderr = child.communicate(timeout=120)
        assert child.returncode == 0, (kind, stderr[-3000:])
        assert int(stdout) > 0

    cache: Cache | None = open_cache(path)
    assert cache is not None
    assert_whole(cache, source)
    cache = None
    compact(path, shard_bytes=10 * 1156)
    collect(tmp_path)
    assert len([*path.glob("shard-*")]) == 3
    assert_whole(open_cache(path), source)


@pytest.mark.chaos
@pytest.mark.slow
def test_killed_at_every_writing_call_no_index_names_a_missing_shard(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.kill_points", "gc", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 20


def test_time_that_jumped_ahead_removes_nothing(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    future = time.time() + 86400 * 400
    os.utime(paths[0] / "recipe.json", (future, future))

    assert gone(collect(tmp_path, GcPolicy(keep=1))) == []


def test_an_empty_recipe_does_not_take_the_place_of_a_complete_one(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 2)
    empty = open_folder(tmp_path, "x", make_recipe(recipe_number(7), None)).path
    make_old(empty, 1.5)

    collect(tmp_path, GcPolicy(keep=1, force=True))

    left = [path for path in [*paths, empty] if path.exists()]
    assert left == [paths[1]]
    assert open_cache(left[0]).complete


FAILED_OVERWRITE = """
import os, signal, sys
from stoker.errors import StokerError
from stoker.precompute import precompute
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

class Failing(FakeEncoder):
    def encode(self, batch):
        if self.how == "killed" and len(self.calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuses" and bool(batch["nu"].any()) or self.how == "raises":
            raise ValueError("no")
        return super().encode(batch)

folder, how = sys.argv[1:]
settings = {"name": "x", "workers": 0, "progress": None}
source = FakeSource((16,))
precompute(source, FakeEncoder(by_shape=True), folder, **settings)
failing = Failing()
failing.how = ""
precompute(source, failing, folder, **settings)
failing = Failing()
failing.how = how
try:
    precompute(source, failing, folder, overwrite=True, **settings)
except StokerError:
    sys.exit(0)
"""


@pytest.mark.parametrize("how", ["raises", "refuses", "killed"])
def test_what_a_failed_overwrite_leaves_does_not_take_the_place_of_a_complete_cache(
    tmp_path: Path, how: str
) -> None:
    """The encoder fails on anything, or on every sample; or the process is killed half-way."""
    command = [sys.executable, "-c", FAILED_OVERWRITE, str(tmp_path), how]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.returncode == (-9 if how == "killed" else 0), ended.stderr
    assert len(list(tmp_path.glob("x/*/recipe.json"))) == 2

    collect(tmp_path, GcPolicy(keep=1, force=True))

    (left,) = (path.parent for path in tmp_path.glob("x/*/recipe.json"))
    assert len(open_cache(left)) == 16


def test_each_cache_is_listed_with_the_rule_that_decides(tmp_path: Path) -> None:
    paths = make_fingerprints(tmp_path, 3, days=9)  # unused for 12, 11 and 10 days
    oldest, middle, newest = (path.name for path in paths)

    def decided(keep: int | None = None, **policy: float) -> dict[str, tuple[bool, str]]:
        limits = GcPolicy(unprotected=True, keep=keep, **policy)  # type: ignore[arg-type]
        report = collect(tmp_path, limits, dry_run=True)
        return {one.fingerprint: (one.removed, one.rule) for one in report.caches}

    nothing = decided()
    assert [*nothing] == sorted(nothing)
    assert {removed for removed, _ in nothing.values()} == {False}
    by_age = decided(older_than_s=10.5 * 86400)
    assert [by_age[one][0] for one in (oldest, middle, newest)] == [True, True, False]
    assert "12 days" in by_age[oldest][1]
    assert "10 days" in by_age[newest][1]
    both = decided(keep=2, older_than_s=86400.0)
    assert [both[one][0] for one in (oldest, middle, newest)] == [True, False, False]
    assert "2" in both[middle][1]
    assert all(removed for removed, _ in decided(max_bytes=1).values())
    reader = open_cache(paths[0])
    make_old(paths[0], 12)
    assert decided(keep=0)[oldest] == (False, "in use: a process has it open")
    del reader


def test_what_is_decided_is_what_is_done(tmp_path: Path) -> None:
    make_fingerprints(tmp_path, 3)

    said = collect(tmp_path, GcPolicy(keep=1, unprotected=True), dry_run=True)
    done = collect(tmp_path, GcPolicy(keep=1, unprotected=True))

    fates = [[(one.fingerprint, one.removed, one.rule) for one in report.caches] for report in (said, done)]
    assert fates[0] == fates[1]
    for one in done.caches:
        assert (tmp_path / one.name / one.fingerprint).exists() is not one.removed
