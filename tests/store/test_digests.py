"""Content decides; unchanged files are not read again; a damaged memo is nothing worse than none."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stoker.errors import ConfigError, SourceError
from stoker.sources.protocol import FileRef
from stoker.store import Digests, recipe
from stoker.store.recipe import sampled_offsets


@pytest.fixture
def file(tmp_path: Path) -> FileRef:
    path = tmp_path / "data.bin"
    path.write_bytes(b"abc" * 1000)
    return FileRef(name="data.bin", path=path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once, so that their digests are remembered: nobody can set a change time back."""
    monkeypatch.setattr(recipe, "SETTLED_S", -1.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were read."""
    seen: list[str] = []
    real = recipe._digest

    def counted(ref: FileRef, before: os.stat_result, *, sampled: bool) -> str:
        seen.append(ref.name)
        return real(ref, before, sampled=sampled)

    monkeypatch.setattr(recipe, "_digest", counted)
    return seen


def test_a_small_file_is_digested_in_full(file: FileRef) -> None:
    (found,) = Digests().files([file])

    assert found.digest == hashlib.sha256(b"abc" * 1000).hexdigest()
    assert (found.name, found.bytes, found.sampled) == ("data.bin", 3000, False)


@pytest.mark.usefixtures("settled")
def test_an_unchanged_file_is_read_once(file: FileRef, tmp_path: Path, reads: list[str]) -> None:
    first = Digests(tmp_path / "cache").files([file])

    assert Digests(tmp_path / "cache").files([file]) == first
    assert reads == ["data.bin"]


@pytest.mark.usefixtures("settled")
def test_a_large_file_is_announced_before_it_is_read(
    file: FileRef, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Digests(tmp_path / "cache", on_large_file=lambda: reads.append("announced"))

    digests.files([FileRef(name="small.bin", path=file.path)])
    monkeypatch.setattr(recipe, "LARGE_BYTES", 100)
    digests.files([file])
    digests.files([file])

    assert reads == ["small.bin", "announced", "data.bin"], "neither a small file nor a known one"


@pytest.mark.usefixtures("settled")
def test_a_changed_file_is_read_again(file: FileRef, tmp_path: Path, reads: list[str]) -> None:
    (first,) = Digests(tmp_path / "cache").files([file])
    before = file.path.stat()
    file.path.write_bytes(b"abd" * 1000)
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had been written

    (second,) = Digests(tmp_path / "cache").files([file])

    assert second.digest != first.digest
    assert len(reads) == 2


@pytest.mark.usefixtures("settled")
def test_another_file_of_equal_name_size_and_time_is_another(file: FileRef, tmp_path: Path) -> None:
    """As `cp -p`, `rsync -t` and `tar` make them."""
    (first,) = Digests(tmp_path / "cache").files([file])
    other = tmp_path / "other" / "data.bin"
    other.parent.mkdir()
    other.write_bytes(b"abd" * 1000)
    os.utime(other, ns=(0, file.path.stat().st_mtime_ns))

    (second,) = Digests(tmp_path / "cache").files([FileRef(name="data.bin", path=other)])

    assert second.digest == hashlib.sha256(b"abd" * 1000).hexdigest() != first.digest


def test_a_file_that_was_just_written_is_not_remembered(
    file: FileRef, tmp_path: Path, reads: list[str]
) -> None:
    """It could change again within one tick of its time stamp, however old its modification time claims."""
    os.utime(file.path, (1_000_000_000, 1_000_000_000))

    for _ in range(2):
        Digests(tmp_path / "cache").files([file])

    assert len(reads) == 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", [b"", b"{", b"\x00" * 100, None])
def test_a_damaged_memo_is_ignored(
    file: FileRef, tmp_path: Path, reads: list[str], damage: bytes | None
) -> None:
    first = Digests(tmp_path / "cache").files([file])
    memo = tmp_path / "cache" / ".digests"
    good = memo.read_bytes()
    memo.write_bytes(good.replace(first[0].digest[:8].encode(), b"00000000") if damage is None else damage)

    assert Digests(tmp_path / "cache").files([file]) == first
    assert len(reads) == 2
    assert memo.read_bytes() == good


def test_beyond_the_limit_files_are_sampled_each_on_its_own(
    file: FileRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So adding a file leaves the digests of those before it as they were."""
    monkeypatch.setattr(recipe, "FULL_BYTES", 5000)
    others = []
    for name in "xy":
        (tmp_path / name).write_bytes(name.encode() * 3000)
        others.append(FileRef(name=name, path=tmp_path / name))

    two = Digests().files([file, others[0]])
    three = Digests().files([file, *others])

    assert [f.sampled for f in three] == [False, True, True]
    assert three[:2] == two
    assert not any(f.sampled for f in Digests(identity="full").files([file, *others]))
    assert [f.digest for f in Digests(identity="full").files([file])] == [two[0].digest]
    monkeypatch.setattr(recipe, "FULL_BYTES", 2000)
    assert Digests().files([file])[0].sampled, "a first file above the limit"


def test_a_sampled_file_is_read_at_head_tail_and_seeded_blocks() -> None:
    assert sampled_offsets(10) == [0, 0]
    assert sampled_offsets(5 << 20) == [0, 4 << 20]
    offsets = sampled_offsets(100 << 30)
    assert len(offsets) == 258
    assert offsets == sorted(offsets) == sampled_offsets(100 << 30)
    assert offsets[-1] == (100 << 30) - (1 << 20)
    assert sampled_offsets(1 << 30)[1:4] == [149493890, 152267239, 161583596], (
        "positions are part of the format"
    )


def test_a_sampled_digest_sees_a_byte_in_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "FULL_BYTES", 0)
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    ref = FileRef(name="big", path=path)
    (before,) = Digests().files([ref])
    with path.open("r+b") as file:
        file.write(b"x")

    assert Digests().files([ref])[0].digest != before.digest


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("absent", "cannot be read"), ("fifo", "not a regular file")):
        with pytest.raises(SourceError, match=f"{name}.*{message}"):
            Digests().files([FileRef(name=name, path=tmp_path / name)])


def test_an_unknown_identity_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto' or 'full'"):
        Digests(identity="quick")  # type: ignore[arg-type]
