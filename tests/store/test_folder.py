"""One folder filled by any number of processes, some of which die."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stoker.errors import ConfigError, ReadOnlyError, RecordError
from stoker.store import Cache, Failure, Folder, make_recipe, open_cache, open_folder
from stoker.store.storage import Storage
from tests.kit import forked as subprocess
from tests.store.fakes import FakeSource, assert_whole, batch_of, fill, make_cache

ROOT = Path(__file__).parents[2]


def open_x(root: Path, source: FakeSource) -> Folder:
    return open_folder(root, "x", make_recipe(source, None))


def failure(number: int, kind: str = "sample", attempts: int = 2) -> Failure:
    return Failure(number=number, stage="encode", error="ValueError: odd", attempts=attempts, kind=kind)  # type: ignore[arg-type]


def test_a_folder_says_what_is_missing_until_it_is_complete(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_x(tmp_path, source)
    assert folder.missing().tolist() == [*range(16)]
    assert folder.complete() is None

    fill(folder, source, [*range(3), 12])
    half = folder.finish()
    assert (half.complete, len(half), folder.stored_count()) == (False, 4, 4)
    assert folder.missing().tolist() == [*range(3, 12), 13, 14, 15]
    assert folder.complete() is None
    fill(folder, source, folder.missing().tolist())

    cache = folder.finish()
    assert cache.complete
    assert cache.index.generation == half.index.generation + 1
    assert_whole(cache, source)
    found = open_x(tmp_path, source).complete()
    assert found is not None
    assert_whole(found, source)


def test_finishing_twice_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    before = (cache.path / "index.json").read_bytes()

    again = open_x(tmp_path, FakeSource()).finish()

    assert again.index.generation == cache.index.generation
    assert (cache.path / "index.json").read_bytes() == before


def test_winners_stay_when_a_record_is_stored_again(tmp_path: Path) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source)
    folder = open_x(tmp_path, source)
    for _ in range(3):  # whatever the names of the new shards
        fill(folder, source, [0, 1, 2])

    again = folder.finish()

    assert [shard.file for shard in again.index.shards[:2]] == [shard.file for shard in cache.index.shards]
    assert all(not len(shard.segments) for shard in again.index.shards[2:])
    assert len(again) == 16
    assert_whole(again, source)


def test_one_file_added_unchanged_parts_are_adopted_and_only_new_samples_are_missing(tmp_path: Path) -> None:
    before = FakeSource(parts=[("a", 10), ("c", 6)])
    after = FakeSource(parts=[("a", 10), ("b", 5), ("c", 6)])
    old = make_cache(tmp_path, before)
    folder = open_x(tmp_path, after)

    adopted = folder.adopt()

    assert adopted == 16
    assert folder.missing().tolist() == [*range(10, 15)]
    assert folder.adopt() == 0
    fill(folder, after, range(10, 15))
    cache = folder.finish()
    shutil.rmtree(old.path)  # links, so the sibling may go
    assert_whole(open_cache(cache.path), after)
    assert cache.index.sequence == old.index.sequence + 1


def test_adoption_lists_the_folder_equally_often_however_many_shards_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listings(root: Path, shard_bytes: int) -> int:
        before = FakeSource(parts=[("a", 24)])
        old = make_cache(root, before, shard_bytes=shard_bytes)
        after = FakeSource(parts=[("a", 24), ("b", 2)])
        folder = open_x(root, after)
        seen: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "sizes", lambda self: (seen.append(self.path), sizes(self))[1])
            assert folder.adopt() == 24
        assert len([*folder.path.glob("shard-*")]) == len(old.index.shards)
        return len(seen)

    sizes = Storage.sizes

    assert listings(tmp_path / "one", 1 << 20) == listings(tmp_path / "many", 1)


def test_shards_that_add_nothing_are_not_adopted(tmp_path: Path) -> None:
    make_cache(tmp_path, FakeSource(parts=[("a", 10)]))
    source = FakeSource()
    folder = open_x(tmp_path, source)
    fill(folder, source)

    assert folder.adopt() == 0
    assert len([*folder.path.glob("shard-*")]) == 2


def test_quarantined_samples_are_adopted_with_their_part(tmp_path: Path) -> None:
    before = FakeSource(parts=[("b", 4)])
    old = open_x(tmp_path, before)
    old.quarantine(failure(1))
    old.quarantine(failure(2, "transient"))
    fill(old, before, [0, 3])
    old.finish()
    folder = open_x(tmp_path, FakeSource(parts=[("a", 3), ("b", 4)]))

    assert folder.adopt() == 2

    assert folder.failures()[4].error == "ValueError: odd"
    assert folder.missing().tolist() == [0, 1, 2, 5]


def test_changed_parts_and_damaged_shards_are_not_adopted(tmp_path: Path) -> None:
    old = make_cache(tmp_path, FakeSource(salt={"b": "old"}))
    path = old.path / old.index.shards[0].file
    folder = open_x(tmp_path, FakeSource(salt={"b": "new"}))
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\0")

    assert folder.adopt() == 0


def test_adoption_copies_where_links_are_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    make_cache(tmp_path, FakeSource(parts=[("a", 10)]))
    monkeypatch.setattr(os, "link", no_link)
    folder = open_x(tmp_path, FakeSource())

    assert folder.adopt() == 10
    assert next(folder.path.glob("shard-*")).stat().st_nlink == 1


def test_quarantine_is_sticky_for_samples_and_retried_once_for_the_rest(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 4)])
    first = open_x(tmp_path, source)
    fill(first, source, [0])
    first.quarantine(failure(1))
    first.quarantine(failure(2, "transient"))
    first.quarantine(failure(2, "transient", attempts=3))

    assert first.missing(retry_transient=False).tolist() == [3]
    second = open_x(tmp_path, source)
    assert second.missing().tolist() == [2, 3]
    assert second.missing(retry_quarantined=True).tolist() == [1, 2, 3]
    second.quarantine(failure(2, "transient"))
    third = open_x(tmp_path, source)
    assert third.missing().tolist() == [3]
    assert (third.failures()[2].attempts, third.failures()[2].runs) == (3, 2)

    fill(third, source, [3])
    cache = third.finish()
    assert cache.complete
    assert len(cache) == 2
    assert [*cache.quarantined] == [1, 2]
    with pytest.raises(
        KeyError, match=r"sample 1 was quarantined in stage encode after 2 attempts: ValueError: odd"
    ):
        cache[1]


def test_a_stored_record_beats_a_failure(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 2)])
    folder = open_x(tmp_path, source)
    folder.quarantine(failure(1))
    fill(folder, source, [1, 0])

    assert folder.failures() == {}
    assert not folder.finish().quarantined


def test_a_torn_or_damaged_line_of_the_quarantine_is_ignored(tmp_path: Path) -> None:
    folder = open_x(tmp_path, FakeSource())
    for number in (1, 2, 3):
        folder.quarantine(failure(number))
    (path,) = folder.path.glob("failures-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"number":2', b'"number":7') + lines[2][:-10])

    assert [*folder.failures()] == [1]


def test_failures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = open_x(tmp_path, FakeSource())

    for wrong in (failure(16), failure(-1), failure(1, "odd")):
        with pytest.raises(RecordError):
            folder.quarantine(wrong)


def test_an_index_knows_what_was_sealed_while_another_was_written(tmp_path: Path) -> None:
    """Otherwise the slower of two processes would put an older view in place of a newer one."""
    source = FakeSource(parts=[("a", 4)])
    folder, other = open_x(tmp_path, source), open_x(tmp_path, source)
    fill(folder, source, [0, 1])
    held = threading.Event()

    def finish_later() -> None:
        with other.lock("index"):
            held.set()
            time.sleep(0.2)
            fill(other, source, [2, 3])

    thread = threading.Thread(target=finish_later)
    thread.start()
    assert held.wait(10)
    cache = folder.finish()
    thread.join(10)

    assert cache.complete


def test_a_claim_is_held_by_one_and_ends_with_its_holder(tmp_path: Path) -> None:
    folder, other = open_x(tmp_path, FakeSource()), open_x(tmp_path, FakeSource())

    with folder.lock() as mine, other.lock() as theirs, other.lock("compact") as another:
        assert (mine, theirs, another) == (True, False, True)
    with other.lock() as free:
        assert free


CHILD = """
import os, sys, time
from pathlib import Path
from tests.store.fakes import *
from stoker.store import make_recipe, open_folder

source = FakeSource(parts=[("a", 40), ("b", 24)])
folder = open_folder(Path(sys.argv[1]), "x", make_recipe(source, None))
mine = range(int(sys.argv[2]), 64, 2)
print("ready", flush=True)
sys.stdin.readline()
for begin in (0, 16):
    fill(folder, source, mine[begin : begin + 16], shard_bytes=9000)
    folder.quarantine(Failure(number=63, stage="read", error=sys.argv[2], attempts=1, kind="transient"))
    cache = folder.finish()
print(cache.index.generation, cache.complete, len(cache))
""".replace("from stoker.store import", "from stoker.store import Failure,")


def test_many_writers_at_once_leave_one_consistent_result(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [
        subprocess.Popen(
            [*command, str(i % 2)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for i in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    outputs = [child.communicate("go\n", timeout=60)[0].split() for child in children]

    assert all(child.returncode == 0 for child in children)
    assert max((int(o[0]), o[1], o[2]) for o in outputs)[1:] == ("True", "64")
    source = FakeSource(parts=[("a", 40), ("b", 24)])
    cache = open_cache(tmp_path / "x")
    assert_whole(cache, source)
    assert cache.verify().bad == []
    assert open_x(tmp_path, source).finish().index.generation == cache.index.generation


@pytest.mark.chaos
def test_killed_at_any_instant_nothing_is_lost_but_unsealed_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.store.kill_rounds", str(tmp_path), "0"]

    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)

    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 5, "too few kills to prove anything"
    source = FakeSource(parts=[("a", 120)])
    cache = open_x(tmp_path, source).finish()
    assert_whole(cache, source)
    assert cache.verify().bad == []


def test_temporaries_of_the_living_are_left_alone(tmp_path: Path) -> None:
    source = FakeSource()
    writer = open_x(tmp_path, source).writer()
    writer.append([0], batch_of(source, [0]))
    folder = open_x(tmp_path, source)
    (folder.path / ".tmp-0123-shard-dead-000000.safetensors").write_bytes(b"left behind")

    again = open_x(tmp_path, source)

    assert len([path for path in again.path.iterdir() if path.name.startswith(".tmp")]) == 1
    writer.commit()
    assert again.missing().tolist() == [*range(1, 16)]


def read_only(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where `path` is mounted read-only; root may write whatever its mode."""
    remount = f"mount --bind {path} {path} && mount -o remount,ro,bind {path} {path}"
    script = f"{remount} && exec {sys.executable} -c '{code}'"
    command = ["unshare", "-r", "-m", "sh", "-c", script]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command[:3], "true"], capture_output=True).returncode
    ):
        pytest.skip("mount namespaces are not allowed here")
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_a_read_only_cache_serves_and_refuses_writes_with_a_reason(tmp_path: Path) -> None:
    source = FakeSource()
    cache = make_cache(tmp_path, source)
    (cache.path / "index.json").unlink()
    code = f"""
from pathlib import Path
import pytest
from tests.store.fakes import *
from stoker.errors import ReadOnlyError
from stoker.store import *
source, root = FakeSource(), Path("{tmp_path}")
assert_whole(open_cache(root / "x"), source)
folder = open_folder(root, "x", make_recipe(source, None))
assert folder.missing().tolist() == []
failure = Failure(number=1, stage="s", error="e", attempts=1, kind="sample")
for act in (lambda: fill(folder, source), folder.finish, lambda: folder.quarantine(failure),
            lambda: open_folder(root, "other", make_recipe(source, None))):
    with pytest.raises(ReadOnlyError, match="cannot be"):
        act()
print("served")
""".replace("'", '"')

    result = read_only(tmp_path, code)

    assert result.stdout == "served\n", result.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        open_folder(tmp_path / "file", "x", make_recipe(FakeSource(), None))


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", ".hidden", "encoders", "a\nb", "x" * 200])
def test_names_that_are_not_plain_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        open_folder(tmp_path, name, make_recipe(FakeSource(), None))


def test_folders_are_private(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "new")

    assert {path.stat().st_mode & 0o777 for path in (cache.path, cache.path.parent, tmp_path / "new")} == {
        0o700
    }


def test_no_code_in_data(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)

    for path in tmp_path.rglob("*"):
        assert (
            path.is_dir()
            or path.name.startswith(".claim-")
            or path.suffix in {".safetensors", ".json", ".jsonl"}
        )
    torch.save({"x": os.system}, cache.path / "index.json")
    assert_whole(open_cache(cache.path), FakeSource())


def test_a_missing_shard_makes_its_records_missing(tmp_path: Path) -> None:
    cache: Cache = make_cache(tmp_path)
    (cache.path / cache.index.shards[1].file).unlink()
    folder = open_x(tmp_path, FakeSource())

    assert folder.complete() is None
    assert folder.missing().tolist() == [*range(10, 16)]
    assert (folder.finish().complete, len(folder.finish())) == (False, 10)


def test_a_cache_folder_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    for place in ("file", "file/below"):
        with pytest.raises(ReadOnlyError, match="is not a folder"):
            open_folder(tmp_path / place, "c", make_recipe(FakeSource(), None))
