"""No path that a request may write leads out of the roots."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, PathRefusedError
from stoker.service.paths import Roots

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
            with roots.opened(path) as (fd, real):
                assert real == inside or inside in real.parents, path
                assert os.readlink(f"/proc/self/fd/{fd}") == str(real), path
                assert os.path.isdir(fd) or os.pread(fd, 20, 0) == b"inside", path
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


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=9))
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


def test_kinds_are_told_apart(place: Path) -> None:
    roots = Roots([place / "root"])

    with pytest.raises(PathRefusedError, match="is folder, expected a file"), roots.opened("a", kind="file"):
        pass
    with (
        pytest.raises(PathRefusedError, match="is file, expected a folder"),
        roots.opened("a/data.h5", kind="folder"),
    ):
        pass
    with pytest.raises(PathRefusedError, match="neither"), roots.opened("pipe"):
        pass


def test_the_second_root_is_looked_in_when_the_first_has_no_such_file(place: Path) -> None:
    roots = Roots([place / "root", place / "root2"])

    assert roots.check("secret.txt") == place / "root2" / "secret.txt"
    assert roots.check("a/data.h5") == place / "root" / "a" / "data.h5"


def test_a_root_that_is_no_folder_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        Roots([place / "secret.txt"])


@pytest.mark.parametrize("tries", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_folder_that_turns_into_a_link_while_it_is_opened_leads_nowhere(tmp_path: Path, tries: int) -> None:
    """Against somebody who swaps a folder for a link as fast as the system lets them."""
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "real" / "x").write_text("inside")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "x").write_text(SECRET)
    (root / "evil").symlink_to(tmp_path / "else")
    (root / "real").rename(root / "swap")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (root / "swap").rename(root / "keep")
            (root / "evil").rename(root / "swap")
            (root / "swap").rename(root / "evil")
            (root / "keep").rename(root / "swap")

    swapping = threading.Thread(target=swap)
    swapping.start()
    roots, seen = Roots([root]), {"inside": 0, "refused": 0}
    try:
        while sum(seen.values()) < tries or (not all(seen.values()) and sum(seen.values()) < 200 * tries):
            try:
                with roots.opened("swap/x") as (fd, _):
                    seen[os.pread(fd, 20, 0).decode()] += 1
            except PathRefusedError:
                seen["refused"] += 1
    finally:
        stop.set()
        swapping.join(30)

    assert min(seen.values()) > 0, "nothing was swapped, or nothing opened: the race was not run"
