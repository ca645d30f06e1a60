import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from stoker.config import load_config
from stoker.errors import ConfigError, ResourceError, SourceError, StalledError
from stoker.run import staging
from stoker.run.build import build_source
from stoker.run.context import Run
from stoker.run.precompute import precompute_config
from stoker.run.staging import (
    OriginalFile,
    is_staged,
    look_at,
    prune_staged,
    stage_config,
    stage_file,
    stage_task,
)
from stoker.runtime import files as runtime_files
from stoker.runtime.files import paths_of
from stoker.runtime.mounts import Mount

LOCAL = Mount(point="/", kind="ext4", source="/dev/sda")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "RESERVE_BYTES", 0)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "far" / "nfs-like name"
    folder.mkdir(parents=True)
    for split, count in (("train", 6), ("val", 2)):
        with h5py.File(folder / f"burgers1d_{split}.h5", "w") as file:
            file["data"] = np.random.default_rng(count).standard_normal((count, 5, 16, 1)).astype("f4")
    return folder


def settings(files: Path, tmp_path: Path, *more: str):
    given = [
        f"data.root={files}",
        "data.fields={data: 'n t x c'}",
        "data.task=burgers1d",
        f"training.latent_cache_dir={tmp_path}/cache",
        "encoder.kind=identity",
        "precompute.workers=0",
        *more,
    ]
    return load_config(None, given)


def test_the_kind_of_storage_is_asked_for_the_mount_not_the_path(
    files: Path, tmp_path: Path, monkeypatch
) -> None:
    config = settings(files, tmp_path, "data.stage=auto")
    monkeypatch.setattr(staging, "storage_of", lambda _: LOCAL)
    assert not stage_task(Run(config).for_task("burgers1d")).staged

    far = Mount(point=str(files), kind="fuse.sshfs", source="host:/x")
    monkeypatch.setattr(staging, "storage_of", lambda path: far if files in path.parents else LOCAL)
    result = stage_task(Run(config).for_task("burgers1d"))
    assert result.staged
    assert "fuse.sshfs" in result.reason
    monkeypatch.setattr(staging, "storage_of", lambda _: far)
    assert "name local storage with data.stage_dir" in stage_task(Run(config).for_task("burgers1d")).reason


def test_a_cache_made_from_copies_is_the_cache_of_the_files(files: Path, tmp_path: Path) -> None:
    plain = precompute_config(Run(settings(files, tmp_path)))
    config = settings(files, tmp_path, "data.stage=always", f"data.stage_dir={tmp_path}/near")
    report = stage_config(Run(config)).tasks[0]

    assert report.staged
    assert report.copied_bytes == report.bytes == sum(file.stat().st_size for file in files.iterdir())
    assert stage_config(Run(config)).tasks[0].copied_bytes == 0
    source = build_source(Run(config).for_task("burgers1d"), "train")
    paths = [ref.path for part in source.identity().parts for ref in part.files]
    assert all(path.is_relative_to(tmp_path / "near") for path in paths)
    assert source.identity().parts[0].name == "burgers1d_train.h5"
    again = precompute_config(Run(config))
    assert [one.cache.fingerprint for one in again.caches] == [one.cache.fingerprint for one in plain.caches]
    assert [one.encoded for one in again.caches] == [0, 0]


def test_a_changed_or_added_file_is_not_served_from_an_old_copy(files: Path, tmp_path: Path) -> None:
    config = settings(files, tmp_path, "data.stage=always")
    stage_config(Run(config))
    with h5py.File(files / "burgers1d_train.h5", "a") as file:
        file["data"][0] = 7
    source = build_source(Run(config).for_task("burgers1d"), "train")
    assert source.read(0)["data"][0, 0, 0, 0] == 7
    result = stage_config(Run(config)).tasks[0]
    assert 0 < result.copied_bytes < result.bytes
    assert build_source(Run(config).for_task("burgers1d"), "train").read(0)["data"][0, 0, 0, 0] == 7


def test_a_stopped_copy_goes_on_and_damage_in_it_is_found(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(10_500))
    original, objects = look_at(path), tmp_path / "objects"
    objects.mkdir()
    reads = iter(range(5))

    def stop(*piece: Any) -> bytes:
        next(reads)
        return real(*piece)

    real = staging.read_piece
    monkeypatch.setattr(staging, "read_piece", stop)
    with pytest.raises(StopIteration):
        stage_file(original, objects, timeout_s=20)
    monkeypatch.setattr(staging, "read_piece", real)
    part, _ = paths_of(objects / original.object)
    assert part.stat().st_size == 5000
    with part.open("r+b") as file:  # a block that did not reach the disk
        file.seek(3100)
        file.write(b"torn")
    assert stage_file(original, objects, timeout_s=20) == 7500
    assert (objects / original.object).read_bytes() == path.read_bytes()
    assert is_staged(original, objects)
    assert sorted(file.suffix for file in objects.iterdir()) == ["", ".json", ".lock"]


def test_a_copy_that_does_not_read_back_gets_no_name(tmp_path: Path, monkeypatch) -> None:
    path, objects = tmp_path / "a.bin", tmp_path / "objects"
    path.write_bytes(os.urandom(3500))
    objects.mkdir()
    original, real = look_at(path), runtime_files.PartialFile.keep

    def keep(one: runtime_files.PartialFile) -> None:
        real(one)
        part, _ = paths_of(objects / original.object)
        if part.exists():
            with part.open("r+b") as file:  # a disk that does not keep what it was given
                file.seek(2500)
                file.write(b"torn")

    monkeypatch.setattr(runtime_files.PartialFile, "keep", keep)
    with pytest.raises(SourceError, match="does not read back"):
        stage_file(original, objects, timeout_s=20)
    assert not is_staged(original, objects)
    monkeypatch.setattr(runtime_files.PartialFile, "keep", real)
    assert stage_file(original, objects, timeout_s=20) == 1500
    assert (objects / original.object).read_bytes() == path.read_bytes()


def test_a_file_that_changes_meanwhile_is_no_copy(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(3000))
    original, real = look_at(path), staging.read_piece

    def read(*piece: Any) -> bytes:
        os.utime(path, ns=(1, 1))
        return real(*piece)

    monkeypatch.setattr(staging, "read_piece", read)
    (tmp_path / "o").mkdir()
    with pytest.raises(SourceError, match="changed while it was staged"):
        stage_file(original, tmp_path / "o", timeout_s=20)
    path.write_bytes(bytes(2000))
    with pytest.raises(SourceError, match=r"ends at byte 2,000, it had 3,000"):
        stage_file(original, tmp_path / "o", timeout_s=20)


def test_a_read_that_stalls_ends_in_time(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(3000))
    never = threading.Event()
    monkeypatch.setattr(os, "pread", lambda *_: never.wait(30))
    (tmp_path / "o").mkdir()
    with pytest.raises(StalledError, match=r"staging .*a\.bin.*did not arrive within 0\.3 s"):
        stage_file(look_at(path), tmp_path / "o", timeout_s=0.3)
    never.set()


@contextmanager
def locked(folder: Path) -> Iterator[tuple[OriginalFile, Path]]:
    """A file of 3,000 bytes that another process stages into a folder, and gets nowhere."""
    path, objects = folder / "a.bin", folder / "o"
    path.write_bytes(bytes(3000))
    objects.mkdir()
    original = look_at(path)
    fd = os.open(objects / f"{original.object}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield original, objects
    os.close(fd)


def test_others_wait_for_the_one_that_copies_while_it_gets_on(tmp_path: Path) -> None:
    with (
        locked(tmp_path) as (original, objects),
        pytest.raises(StalledError, match="staged by another process, which has made no progress"),
    ):
        stage_file(original, objects, timeout_s=0.3)

    copied: list[int] = []
    threads = [
        threading.Thread(target=lambda: copied.append(stage_file(original, objects, timeout_s=20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(copied) == [0, 0, 0, 3000]


def test_a_copy_that_is_renamed_while_another_looks_at_it_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.suffix == ".part" or exists(path))  # a moment ago
    with locked(tmp_path) as (original, objects), pytest.raises(StalledError):
        stage_file(original, objects, timeout_s=0.3)


def test_no_room_is_said_before_anything_is_copied(files: Path, tmp_path: Path, monkeypatch) -> None:
    config = settings(files, tmp_path, "data.stage=always")
    real = os.statvfs(tmp_path)

    def statvfs(**changed: int) -> object:
        named = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
        return lambda _: type("Statvfs", (), {**named, **changed})

    monkeypatch.setattr(staging.os, "statvfs", statvfs(f_bavail=0))
    with pytest.raises(ResourceError, match=r"has 0 B free, staging 2 files needs"):
        stage_config(Run(config))
    far = Mount(point=str(files), kind="nfs4", source="host:/x")
    monkeypatch.setattr(staging, "storage_of", lambda path: far if files in path.parents else LOCAL)
    assert not stage_task(Run(config).for_task("burgers1d"), mode="auto").staged
    monkeypatch.setattr(staging.os, "statvfs", statvfs(f_files=100, f_favail=3))
    with pytest.raises(ResourceError, match="room for 3 more files"):
        stage_config(Run(config))


def test_never_means_never_and_says_so(files: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Give data\.stage=auto"):
        stage_config(Run(settings(files, tmp_path)))
    precompute_config(Run(settings(files, tmp_path)))
    assert not (tmp_path / "cache" / ".staged").exists()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two days from now: what is made in the test was not used since."""
    past = time.time() + 2 * 86400
    monkeypatch.setattr(staging, "time", SimpleNamespace(time=lambda: past, monotonic=time.monotonic))


def test_copies_of_files_that_changed_or_are_gone_are_pruned(files: Path, tmp_path: Path, later) -> None:
    """And those of unchanged files stay, of whatever set; a dry run removes nothing."""
    config = settings(files, tmp_path, "data.stage=always")
    stage_config(Run(config))
    folder = tmp_path / "cache" / ".staged"
    assert prune_staged(folder).removed == []
    (files / "burgers1d_val.h5").touch()
    (files / "burgers1d_extra.h5").write_bytes(b"more")
    (files / "burgers1d_extra.h5").rename(files / "burgers1d_test.h5")
    stage_file(look_at(files / "burgers1d_test.h5"), folder / "objects", timeout_s=5)
    (files / "burgers1d_test.h5").unlink()
    before = sorted(path for path in folder.rglob("*"))

    shown = prune_staged(folder, dry_run=True)
    assert sorted(folder.rglob("*")) == before
    report = prune_staged(folder)

    assert report.removed == shown.removed
    assert [item.kind for item in report.removed] == ["view", "copy", "copy"]
    said = " ".join(item.reason for item in report.removed)
    assert "burgers1d_val.h5 has changed since" in said
    assert "burgers1d_test.h5 is gone" in said
    assert is_staged(look_at(files / "burgers1d_train.h5"), folder / "objects")
    assert len([path for path in (folder / "objects").iterdir() if not path.name.endswith(".lock")]) == 2
    assert not any((folder / "views").iterdir())
    assert prune_staged(folder).removed == []
    assert stage_config(Run(config)).tasks[0].copied_bytes == (files / "burgers1d_val.h5").stat().st_size


def test_what_may_still_be_read_is_not_pruned(files: Path, tmp_path: Path, monkeypatch) -> None:
    stage_config(Run(settings(files, tmp_path, "data.stage=always")))
    folder = tmp_path / "cache" / ".staged"
    original = look_at(files / "burgers1d_val.h5")
    (files / "burgers1d_val.h5").touch()

    report = prune_staged(folder)
    assert report.removed == []
    assert [item.reason.partition(";")[0] for item in report.kept] == ["used in the last day"] * 2

    fd = os.open(folder / "objects" / f"{original.object}.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    locked = prune_staged(folder, dry_run=True, force=True)
    os.close(fd)
    assert [(item.kind, item.reason.partition(";")[0]) for item in locked.kept] == [
        ("copy", "being copied now")
    ]

    files.rename(files.with_name("unmounted"))
    assert prune_staged(folder, force=True).removed == []
    files.with_name("unmounted").rename(files)
    assert [item.kind for item in prune_staged(folder, force=True).removed] == ["view", "copy"]


def test_what_is_left_of_a_copy_is_pruned_and_foreign_folders_are_not(tmp_path: Path, later) -> None:
    objects = tmp_path / "staged" / "objects"
    objects.mkdir(parents=True)
    for ending in ("part", "journal", "lock"):
        (objects / f"{'a' * 32}.{ending}").write_bytes(b"x")

    assert prune_staged(tmp_path / "none").removed == []
    (item,) = prune_staged(tmp_path / "staged").removed
    assert (item.kind, item.bytes, item.reason) == ("copy", 2, "a copy that was never finished")
    assert list(objects.iterdir()) == []
    with pytest.raises(SourceError, match="holds no staged copies"):
        prune_staged(tmp_path)


def test_the_command_prints_json(files: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from stoker.cli.main import app

    (tmp_path / "c.yaml").write_text(settings(files, tmp_path, "data.stage=always").to_yaml())
    result = CliRunner().invoke(app, ["data", "stage", str(tmp_path / "c.yaml"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["tasks"][0]
    assert found["staged"] is True
    assert found["files"] == 2
    (files / "burgers1d_val.h5").touch()
    pruned = CliRunner().invoke(
        app, ["data", "stage", str(tmp_path / "c.yaml"), "--prune", "--dry-run", "--json"]
    )
    assert [item["kind"] for item in json.loads(pruned.stdout)["kept"]] == ["view", "copy"]
    assert CliRunner().invoke(app, ["data", "stage", str(tmp_path / "c.yaml"), "--dry-run"]).exit_code == 2
