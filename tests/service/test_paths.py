"""No path that a request may write leads out of the roots."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stoker.errors import ConfigError, PathRefusedError, SourceError
from stoker.service.database import Database
from stoker.service.datasets import Datasets, Registration
from stoker.service.executor import NO_ROOM, STOPPED
from stoker.service.probes import PROBES, probe
from stoker.service.security import DataAccess, Roots
from stoker.sources.files import confine_sources, find_files
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.hdf5_open import open_file
from stoker.sources.images import images_below, read_file
from stoker.sources.sql.databases import connect_read_only
from tests.kit.amount import example_count
from tests.service.job_folders import (
    burgers_dataset,
    finish,
    images_dataset,
    lines,
    make_job,
    radio_dataset,
)

SECRET = "outside"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root among other things, with links of every kind in it."""
    top = tmp_path_factory.mktemp("paths")
    root = top / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "data.h5").write_text("inside")
    (root / "a" / "b" / "ünï code.h5").write_text("inside")
    (top / "secret.txt").write_text(SECRET)
    (top / "root2").mkdir()
    (top / "root2" / "secret.txt").write_text(SECRET)
    (top / "link-to-root").symlink_to(root)
    (root / "out").symlink_to(top)
    (root / "file-out").symlink_to(top / "secret.txt")
    (root / "up").symlink_to("..")
    (root / "a" / "inner").symlink_to("b")
    (root / "etc").symlink_to("/etc")
    (root / "proc").symlink_to("/proc/self/root")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    return top


def test_a_folder_beside_a_root_is_not_in_it_for_being_called_alike(place: Path) -> None:
    (place / "root-old").mkdir()

    with pytest.raises(PathRefusedError, match="outside the folders"):
        Roots([place / "root"]).check(str(place / "root-old" / "a" / "data.h5"))


def escapes(place: Path) -> Iterator[str]:
    """Ways out that were tried on others."""
    root = place / "root"
    targets = ["secret.txt", "root2/secret.txt", "etc/passwd", "../../../../../../../etc/passwd"]
    climbs = [
        "..",
        "../",
        "./..",
        ".//..",
        "a/..",
        "a/../..",
        "a/b/../../..",
        "a/./../..",
        "..//",
        "a//..//..",
    ]
    for target in targets:
        for climb in climbs:
            yield f"{climb}/{target}"
            yield f"{root}/{climb}/{target}"
            yield f"{climb}/{target}\0.h5"
    for link in ("out", "up", "etc", "proc", "loop", "out/..", "a/inner", "a/inner/..", "file-out/.."):
        yield from (link, f"{root}/{link}", f"{link}/", f"./{link}", f"{root}/./{link}", f"a/../{link}")
        yield from (f"{link}/{target}" for target in (*targets, "secret.txt", "passwd"))
    for text in (
        "..\\secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "%252e%252e/secret.txt",
        "..%c0%af",
        "．．/secret.txt",
        "‥/secret.txt",
        "..;/secret.txt",
        "....//secret.txt",
        ".../secret.txt",
        "file:///etc/passwd",
        "~/secret.txt",
        "~root/.bashrc",
        "$HOME/x",
        "`id`",
        "|id",
        "C:\\secret.txt",
        "\\\\host\\share",
        "//etc/passwd",
        "///etc/passwd",
        "/",
        "//",
        "/.",
        "/..",
        "",
        " ",
        ".. /x",
        "file-out",
        "pipe",
        "a/data.h5/",
        "a/data.h5/..",
        "a/data.h5/x",
        "/proc/self/environ",
        "/proc/self/cwd/secret.txt",
        "/proc/1/root/etc/passwd",
        "/dev/null",
        "/dev/stdin",
        "/dev/fd/0",
        "/etc/passwd",
        "a\nb",
        "a\rb",
        "a\x7fb",
        "a\x1bb",
        "a\u202eb",
        "a\u2028b",
        "x" * 5000,
        "\ud800",
    ):
        yield from (text, f"{root}/../{text}", f"{place}/{text}")
    yield from (f"{place}/root2/secret.txt", f"{place}/secret.txt", f"{root}2/secret.txt", f"{place}/root2")


def test_no_path_leads_out(place: Path) -> None:
    roots = Roots([place / "root"])
    tried = list(dict.fromkeys(escapes(place)))
    inside = place / "root"

    refused = 0
    for path in tried:
        try:
            real = roots.check(path)
            assert real == inside or inside in real.parents, path
            assert os.path.realpath(real) == str(real), path
            assert real.is_dir() or real.read_text() == "inside", path
        except PathRefusedError:
            refused += 1

    assert len(tried) >= 250
    assert refused >= len(tried) - 6, "a few only name the root or a file in it in an odd way"


PIECES = [
    "..",
    ".",
    "",
    "a",
    "b",
    "out",
    "up",
    "etc",
    "root",
    "root2",
    "secret.txt",
    "a/inner",
    "/",
    "data.h5",
]


@hypothesis.settings(max_examples=example_count(60), deadline=None)
@hypothesis.given(parts=st.lists(st.sampled_from(PIECES), max_size=9))
def test_no_combination_leads_out(place: Path, parts: list[str]) -> None:
    roots = Roots([place / "root"])
    inside = place / "root"
    for path in ("/".join(parts), f"{inside}/{'/'.join(parts)}", f"{place}/{'/'.join(parts)}"):
        try:
            found = roots.check(path)
        except PathRefusedError:
            continue
        assert found.resolve() == found
        assert found == inside or inside in found.parents


def test_what_is_inside_is_found_however_it_is_written(place: Path) -> None:
    root = place / "root"
    roots = Roots([place / "link-to-root"])

    for path in ("a/data.h5", "./a//data.h5", f"{root}/a/data.h5", f"{place}/link-to-root/a/data.h5"):
        assert roots.check(path) == root / "a" / "data.h5"
    assert roots.check("a/b/ünï code.h5").read_text() == "inside"
    assert roots.check(str(root)) == root


def test_a_path_that_is_none_is_refused_with_what_was_given(place: Path) -> None:
    roots = Roots([place / "root"])

    for path, said in (("", "0 characters"), ("a/" * 3000, "6,000 characters"), ("y" * 300, "y" * 100)):
        with pytest.raises(PathRefusedError, match=said):
            roots.check(path)


def test_what_is_neither_file_nor_folder_is_refused(place: Path) -> None:
    with pytest.raises(PathRefusedError, match="pipe"):
        Roots([place / "root"]).check("pipe")


def test_the_second_root_is_looked_in_when_the_first_has_no_such_file(place: Path) -> None:
    roots = Roots([place / "root", place / "root2"])

    assert roots.check("secret.txt") == place / "root2" / "secret.txt"
    assert roots.check("a/data.h5") == place / "root" / "a" / "data.h5"


def test_a_root_that_is_no_folder_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="--root"):
        Roots([place / "secret.txt"])


def given(kind: str, folder: Path) -> dict[str, Any]:
    """Data of a kind in a new folder, as a request names it."""
    folder.mkdir(parents=True)
    if kind == "radio":
        made = radio_dataset(folder)
        return {"kind": kind, "name": "n", "url": made["spec"]["url"], "set": made["id"]}
    if kind == "hdf5":
        return {"kind": kind, "name": "n", "path": burgers_dataset(folder)["spec"]["path"]}
    return {"kind": kind, "name": "n", "path": images_dataset(folder)["spec"]["path"]}


def swap(folder: Path, other: Path) -> None:
    """What somebody who may write to the root does: a link to `other` where a folder was."""
    folder.rename(folder.with_name("was-here"))
    folder.symlink_to(other)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/stoker.db")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "kind", ["hdf5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("radio", "images"))]
)
def test_data_whose_folder_became_a_link_is_not_looked_at(
    database: Database, tmp_path: Path, kind: str
) -> None:
    """The process that looks finds out, not a check before it."""
    request = given(kind, tmp_path / "root" / "set")
    shutil.copytree(tmp_path / "root" / "set", tmp_path / "secret")
    check = Roots([tmp_path / "root"]).check
    Datasets(
        database,
        tmp_path / "data",
        check,
        probe=lambda what, *given, **named: PROBES[what](*given, **named),
        access=DataAccess(roots=("/",)),
    ).register(TypeAdapter(Registration).validate_python(request))
    datasets = Datasets(database, tmp_path / "data", check, probe=probe, access=DataAccess(roots=("/",)))
    assert datasets.samples("n")

    swap(tmp_path / "root" / "set", tmp_path / "secret")

    with pytest.raises(SourceError, match=str(tmp_path / "root" / "set")):
        datasets.samples("n")


def test_data_of_the_service_is_read_where_its_state_folder_is_behind_a_link(tmp_path: Path) -> None:
    """The operator may have put it there; nobody else can write to it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "disk")
    spec = burgers_dataset(tmp_path / "state")["spec"]

    assert probe("facts", "hdf5", {**spec, "make": {}})["samples"] == 12
    with pytest.raises(SourceError, match="link"):
        probe("facts", "hdf5", spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["radio", "hdf5", "images"])
def test_a_job_does_not_train_on_data_whose_folder_became_a_link(tmp_path: Path, kind: str) -> None:
    of_kind = {"radio": radio_dataset, "hdf5": burgers_dataset, "images": images_dataset}
    (tmp_path / "root" / "set").mkdir(parents=True)
    dataset = of_kind[kind](tmp_path / "root" / "set")
    folder = make_job(tmp_path, dataset, epochs=1)
    shutil.copytree(tmp_path / "root" / "set", tmp_path / "secret")

    swap(tmp_path / "root" / "set", tmp_path / "secret")

    assert finish(folder) not in (0, STOPPED, NO_ROOM)
    (told,) = lines(folder, "failed")
    assert str(tmp_path / "root" / "set") in told["data"]["error"]
    assert not [*(tmp_path / "caches").rglob("*.safetensors")]


def opened_h5(folder: Path) -> str:
    with open_file(folder / "x.h5") as file:
        return str(file.attrs["is"])


def opened_image(folder: Path) -> str:
    return read_file(folder / "x.png").decode()


def opened_rows(folder: Path) -> str:
    with closing(connect_read_only(folder / "x.db")) as connection:
        return connection.execute("SELECT * FROM t").fetchone()[0]


def listed(folder: Path) -> str:
    (entry,) = [entry for entry in images_below(folder) if "is-" in entry.key]
    return entry.key.removeprefix("is-")


@pytest.fixture
def two_places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder of the root that this process is confined to, and the same data elsewhere."""
    for folder, what in ((tmp_path / "root" / "swap", "inside"), (tmp_path / "else", SECRET)):
        folder.mkdir(parents=True)
        with h5py.File(folder / "x.h5", "w") as file:
            file.attrs["is"] = what
        (folder / "x.png").write_text(what)
        (folder / f"is-{what}.png").write_text(what)
        with closing(sqlite3.connect(folder / "x.db")) as connection, connection:
            connection.execute("CREATE TABLE t AS SELECT ? AS what", [what])
    confine_sources([tmp_path / "root" / "swap"])
    yield tmp_path / "root", tmp_path / "else"
    confine_sources(None)


def test_a_database_outside_is_refused_though_another_thread_opens_one_inside(
    two_places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not tell its descriptor, so a new one that is inside was taken for it."""
    root, other = two_places
    inside, outside = root / "swap" / "x.db", root / "swap" / "link.db"
    outside.symlink_to(other / "x.db")
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect
    thread = threading.Thread(target=lambda: opened.append(connect_read_only(inside)))

    def while_another_opens(*given: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*given, **{**named, "check_same_thread": False})
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(0.5)  # it waits for us, unless the check can be fooled
        return connection

    monkeypatch.setattr(sqlite3, "connect", while_another_opens)
    with pytest.raises(SourceError, match=r"link\.db"):
        connect_read_only(outside)
    thread.join()

    assert opened[0].execute("SELECT * FROM t").fetchone()[0] == "inside"
    opened[0].close()


@pytest.mark.parametrize("read", [opened_h5, opened_image, opened_rows, listed])
@pytest.mark.parametrize("tries", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_folder_that_turns_into_a_link_while_it_is_opened_leads_nowhere(
    two_places: tuple[Path, Path], read: Callable[[Path], str], tries: int
) -> None:
    """Against somebody who swaps a folder for a link as fast as the system lets them."""
    root, other = two_places
    command = [sys.executable, "-I", "-S", "-c", SWAPPING, str(root / "swap"), str(other)]
    seen = {"inside": 0, "refused": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapping:
        assert swapping.stdout is not None
        assert swapping.stdout.readline() == b"swaps\n"
        try:
            while sum(seen.values()) < tries or (not all(seen.values()) and sum(seen.values()) < 200 * tries):
                try:
                    seen[read(root / "swap")] += 1
                except (SourceError, sqlite3.OperationalError, ValueError):
                    seen["refused"] += 1
        finally:
            swapping.kill()

    assert min(seen.values()) > 0, "nothing was swapped, or nothing opened: the race was not run"


def test_a_file_beside_data_is_not_looked_into_outside(two_places: tuple[Path, Path]) -> None:
    """macOS puts a file next to each data file, which is told by its first bytes."""
    root, other = two_places
    (other / "._x.h5").write_bytes(b"\x00\x05\x16\x07 and more")
    (root / "swap" / "._x.h5").symlink_to(other / "._x.h5")

    with pytest.raises(SourceError, match=r"\._x\.h5 leads out"):
        find_files(root / "swap")


SWAPPING = """
import os, sys
folder, other = sys.argv[1:]
os.symlink(other, folder + ".evil")
print("swaps", flush=True)
while True:
    os.rename(folder, folder + ".keep"); os.rename(folder + ".evil", folder)
    os.rename(folder, folder + ".evil"); os.rename(folder + ".keep", folder)
"""


def test_what_a_file_refers_to_in_other_files_is_not_read(two_places: tuple[Path, Path]) -> None:
    """Also when the file came to refer to them after it was described."""
    root, other = two_places
    with h5py.File(other / "y.h5", "w") as file:
        file["tensor"] = np.ones((4, 3, 5), np.float32)
    with h5py.File(root / "swap" / "y.h5", "w") as file:
        file["tensor"] = np.zeros((4, 3, 5), np.float32)
    source = HDF5Source(root / "swap" / "y.h5", fields={"tensor": "n t x"})
    assert source.read(0)["tensor"].max() == 0
    source.close()
    with h5py.File(root / "swap" / "y.h5", "w") as file:
        file["tensor"] = h5py.ExternalLink(str(other / "y.h5"), "tensor")

    with pytest.raises(SourceError, match="external"):
        source.read(0)
