"""Files from a web server, folders and rclone remotes, and everything that goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.config.sections import FetchConfig
from stoker.errors import ConfigError, ResourceError
from stoker.extras.fetch.origins import WantedFile, parse_wanted, read_manifest
from stoker.extras.fetch.run import LOCK, FetchReport, FileResult, fetch_files
from stoker.runtime.files import BLOCK_BYTES, paths_of
from stoker.runtime.locks import FileLock
from tests.fetch.servers import Files

BODY = bytes(range(256)) * 64
STAT = "case $* in *lsjson*) echo '{\"Size\": 16384}';;"
QUICK = FetchConfig(stall=1.0, tries=3, deadline=60.0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wanted(name: str, source: str, content: bytes = BODY) -> WantedFile:
    return WantedFile(
        name=name, source=source, bytes=len(content), algorithm="sha256", digest=sha256(content)
    )


def of(report: FetchReport, name: str) -> FileResult:
    return next(file for file in report.files if file.name == name)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.part*"))


def test_files_of_all_kinds_arrive_and_a_second_time_nothing_moves(files: Files, tmp_path: Path) -> None:
    files.content["/a.h5"] = BODY
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "b.h5").write_bytes(BODY[:100])
    want = [
        wanted("deep/er/a.h5", f"{files.url}/a.h5"),
        wanted("b.h5", "raw/b.h5", BODY[:100]),
        WantedFile(name="plain.h5", source=f"{files.url}/a.h5"),
        wanted("empty.h5", (tmp_path / "none").as_uri(), b""),
    ]
    (tmp_path / "none").touch()
    out = tmp_path / "out"

    first = fetch_files(want, out, QUICK, base=tmp_path)
    asked = len(files.asked)
    second = fetch_files(want, out, QUICK, base=tmp_path)

    assert first.exit_code == 0
    assert [file.status for file in first.files] == ["fetched"] * 4
    assert [file.verified for file in first.files] == ["sha256", "sha256", "", "sha256"]
    assert (out / "deep/er/a.h5").read_bytes() == (out / "plain.h5").read_bytes() == BODY
    assert (out / "b.h5").read_bytes() == BODY[:100]
    assert [file.status for file in second.files] == ["present"] * 4
    assert (len(files.asked), second.files[0].received) == (asked, 0)
    assert leftovers(out) == []


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        pytest.param(["404"] * 9, "answers 404", id="missing"),
        pytest.param(["503"] * 9, "answers 503", id="failing"),
        pytest.param(["silent"] * 9, "", id="silent"),
        pytest.param(["short"] * 9, "ended after 100 of 16,384 bytes", id="truncated"),
        pytest.param(["stuck"] * 9, "", id="hanging"),
        pytest.param(["wrong"] * 9, "sha256 is", id="wrong-checksum"),
        pytest.param(["gzip"] * 9, "gzip-encoded", id="encoded"),
        pytest.param(["elsewhere"] * 9, "answers 302", id="leads-to-a-file"),
    ],
)
def test_one_of_three_that_fails_is_named_and_the_others_are_kept(
    files: Files, tmp_path: Path, faults: list[str], why: str
) -> None:
    files.content |= {"/a": BODY, "/b": BODY, "/c": BODY}
    files.faults["/b"] = faults
    want = [wanted(name, f"{files.url}/{name}") for name in "abc"]
    settings = FetchConfig(stall=1.0, tries=2, deadline=30.0)
    begin = time.monotonic()

    report = fetch_files(want, tmp_path, settings)

    assert time.monotonic() - begin < 30
    assert [file.name for file in report.failed] == ["b"]
    assert report.exit_code != 0
    assert why in of(report, "b").why
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes() == BODY
    assert not (tmp_path / "b").exists()


def test_a_file_with_another_digest_is_fetched_once_more_and_not_again(files: Files, tmp_path: Path) -> None:
    files.content["/a"] = BODY
    files.faults["/a"] = ["wrong"] * 9

    report = fetch_files([wanted("a", f"{files.url}/a")], tmp_path, FetchConfig(stall=1.0, tries=6))

    assert report.failed[0].tries == 2


def test_what_a_server_says_cannot_pass_for_a_wrong_digest(files: Files, tmp_path: Path) -> None:
    files.content["/a"] = BODY
    files.faults["/a"] = ["garbled"] * 4
    one = wanted("a", f"{files.url}/a")

    report = fetch_files([one], tmp_path, FetchConfig(stall=1.0, tries=6))

    assert report.exit_code == 0
    assert (tmp_path / "a").read_bytes() == BODY


def test_a_file_that_is_shorter_than_declared_is_refused_at_once(files: Files, tmp_path: Path) -> None:
    files.content["/a"] = BODY[:-1]

    report = fetch_files([wanted("a", f"{files.url}/a")], tmp_path, QUICK)

    assert f"has {len(BODY) - 1:,} bytes, {len(BODY):,} were declared" in report.failed[0].why
    assert (report.failed[0].tries, len(files.asked)) == (1, 1)


@pytest.mark.parametrize("fault", ["cut", "hang"])
@pytest.mark.parametrize("declared", [True, False])
def test_what_came_before_a_failure_is_kept(files: Files, tmp_path: Path, fault: str, declared: bool) -> None:
    files.content["/a"] = BODY
    files.etags["/a"] = '"1"'
    files.faults["/a"] = [fault, "503", fault]
    one = wanted("a", f"{files.url}/a") if declared else WantedFile(name="a", source=f"{files.url}/a")
    said: list[object] = []

    report = fetch_files([one], tmp_path, FetchConfig(stall=1.0, tries=3), listen=said.append)

    assert report.exit_code == 0
    assert (tmp_path / "a").read_bytes() == BODY
    assert report.files[0].tries == 4
    assert report.files[0].received == len(BODY)
    half, more = len(BODY) // 2, len(BODY) * 3 // 4
    assert [part for _, part in files.asked] == [None, *[f"bytes={half}-"] * 2, f"bytes={more}-"]
    assert sum(isinstance(line, str) and line.startswith("a: ") for line in said) == 3


@pytest.mark.parametrize("fault", ["", "no-ranges"])
def test_another_content_is_not_added_to_the_first(files: Files, tmp_path: Path, fault: str) -> None:
    """Without a declared digest the server's word for the version is all there is."""
    files.content["/a"], files.etags["/a"] = b"x" * 1000, '"old"'
    files.faults["/a"] = ["cut", "404"]
    one = WantedFile(name="a", source=f"{files.url}/a")
    assert fetch_files([one], tmp_path, QUICK).exit_code != 0
    assert leftovers(tmp_path) == [".a.part", ".a.part.journal"]
    files.content["/a"], files.etags["/a"] = b"y" * 1000, '"new"'
    files.faults["/a"] = [fault]

    report = fetch_files([one], tmp_path, QUICK)

    assert (tmp_path / "a").read_bytes() == b"y" * 1000
    assert report.files[0].received == 1000


def test_a_damaged_partial_file_is_kept_up_to_the_damage(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.runtime.files.BLOCK_BYTES", 64 * 1024)
    monkeypatch.setattr("stoker.extras.fetch.origins.PIECE_BYTES", 16 * 1024)
    body = os.urandom(1024 * 1024)
    files.content["/a"], files.faults["/a"] = body, ["cut", "404"]
    want = [wanted("a", f"{files.url}/a", body)]
    out = tmp_path / "out"
    part, journal = paths_of(out / "a")
    assert fetch_files(want, out, QUICK).exit_code != 0
    first, *others = [int(line.split()[0]) for line in journal.read_text().splitlines()[1:]]
    assert others
    with part.open("r+b") as file:  # in the second block
        file.seek(first + 5)
        file.write(b"damaged")
    with journal.open("a") as file:
        file.write("17 torn")

    report = fetch_files(want, out, QUICK)

    assert (out / "a").read_bytes() == body
    assert (report.files[0].resumed, report.files[0].received) == (first, len(body) - first)


def test_a_trickle_ends_at_the_deadline(files: Files, tmp_path: Path) -> None:
    files.content |= {"/a": BODY, "/b": BODY}
    files.faults["/a"] = ["503"] * 1000
    settings = FetchConfig(stall=5, tries=1000, deadline=0.6)

    report = fetch_files([wanted(n, f"{files.url}/{n}") for n in "ab"], tmp_path, settings)

    assert [file.name for file in report.failed] == ["a"]
    assert "600 ms" in report.failed[0].why
    assert report.exit_code == 5


def test_a_file_that_is_there_and_wrong_stays_until_the_right_one_is_whole(
    files: Files, tmp_path: Path
) -> None:
    """The earlier script took whatever had the name, however short."""
    (tmp_path / "a").write_bytes(BODY[:10])
    files.faults["/a"] = ["404"]
    want = [wanted("a", f"{files.url}/a")]

    assert fetch_files(want, tmp_path, QUICK).exit_code != 0
    assert (tmp_path / "a").read_bytes() == BODY[:10]
    files.content["/a"] = BODY
    assert fetch_files(want, tmp_path, QUICK).exit_code == 0
    assert (tmp_path / "a").read_bytes() == BODY


def test_a_file_with_the_declared_digest_is_taken_as_it_is(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(BODY)
    want = [wanted("a", f"{files.url}/a")]

    assert fetch_files(want, tmp_path, QUICK).files[0].status == "present"
    (tmp_path / "a").write_bytes(BODY[::-1])  # same size, touched since it was looked at
    files.content["/a"] = BODY
    assert fetch_files(want, tmp_path, QUICK).files[0].status == "fetched"
    assert (tmp_path / "a").read_bytes() == BODY


@pytest.mark.parametrize(
    "name",
    [
        "../a", "a/../../b", "/etc/a", "a//b", "", ".", "..", ".hidden", "a/.part", "-rf", "~root/a",
        "a\nb", "a\0b", "a\\b", "a\u202eb", "x" * 300, "\udcff", "a//", "c/" * 600 + "d",
    ],
)  # fmt: skip
def test_names_of_a_manifest_are_not_trusted(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the name"):
        parse_wanted({name: {"from": "x"}}, "m.json")


def test_a_manifest_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for text, why in [
        ('{"files": {"a": {"from": "x"}, "a": {"from": "y"}}}', "'a' comes twice"),
        ('{"files": {"a": {"from": "x", "sha": "y"}}}', "is not known"),
        ('{"files": {"a": {"from": "x", "sha256": "y"}}}', "sha256"),
        ('{"files": {"a": {"from": "x", "bytes": -1}}}', "bytes"),
        ('{"files": {"a": {"from": "x"}, "a/b": {"from": "x"}}}', "is a file, and the folder of"),
        ('{"files": {"a": 3}}', "not a mapping"),
        ('{"files": []}', "is not a manifest"),
        ("[" * 100_000, "is not a manifest"),
        ("\xff", "is not a manifest"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_manifest(path)


@pytest.mark.parametrize(
    "source", ["https://me:pass@host/a", "ftp://host/a", ":s3,secret_access_key=hidden:bucket/a"]
)
def test_addresses_that_carry_secrets_are_refused_and_not_shown(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        fetch_files([WantedFile(name="a", source=source)], tmp_path, QUICK)

    assert "pass@" not in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_query_is_not_shown(files: Files, tmp_path: Path) -> None:
    said: list[object] = []
    files.faults["/a"] = ["503"] * 3 + ["cut"] * 9

    report = fetch_files(
        [WantedFile(name="a", source=f"{files.url}/a?token=hidden")], tmp_path, QUICK, listen=said.append
    )

    assert "hidden" not in json.dumps(report.to_json()) + repr(said)


def test_a_link_in_the_folder_leads_nowhere(files: Files, tmp_path: Path) -> None:
    files.content["/a"] = BODY
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "sub").symlink_to(outside)

    with pytest.raises(ConfigError, match="is a link"):
        fetch_files([wanted("sub/a", f"{files.url}/a")], out, QUICK)
    (out / "a").symlink_to(outside / "a")
    fetch_files([wanted("a", f"{files.url}/a")], out, QUICK)

    assert list(outside.iterdir()) == []
    assert not (out / "a").is_symlink()


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    report = fetch_files(
        [WantedFile(name="a", source="pipe"), WantedFile(name="b", source=".")],
        tmp_path / "out",
        QUICK,
        base=tmp_path,
    )

    assert [file.name for file in report.failed] == ["a", "b"]
    assert all("regular file" in file.why for file in report.failed)


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    with FileLock(tmp_path / LOCK) as lock:
        assert lock.acquire()
        with pytest.raises(ResourceError, match=f"process {os.getpid()}"):
            fetch_files([WantedFile(name="a", source="a")], tmp_path, QUICK)


def test_more_than_the_disk_holds_is_refused_before_anything_moves(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free"):
        fetch_files([WantedFile(name="a", source=f"{files.url}/a", bytes=1 << 60)], tmp_path, QUICK)

    assert files.asked == []


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_from_there(files: Files, tmp_path: Path) -> None:
    body = os.urandom(BLOCK_BYTES * 3)
    files.content["/a"] = body
    files.faults["/a"] = ["hang"]
    manifest = tmp_path / "m.json"
    entry = {"from": f"{files.url}/a", "bytes": len(body), "sha256": sha256(body)}
    manifest.write_text(json.dumps({"files": {"a": entry}}))
    words = [sys.executable, "-m", "stoker", "data", "fetch", str(manifest), "--json"]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    _, journal = paths_of(tmp_path / "a")
    while not (journal.exists() and len(journal.read_text().splitlines()) > 1):
        assert time.monotonic() < until
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait(10)

    second = subprocess.run(words, capture_output=True, timeout=60, check=True)

    (file,) = json.loads(second.stdout)["files"]
    assert (tmp_path / "a").read_bytes() == body
    assert file["resumed"] >= BLOCK_BYTES
    assert file["received"] == len(body) - file["resumed"]


rclone = pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed")


@rclone
def test_a_remote_of_rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RCLONE_CONFIG_BOX_TYPE", "local")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a b.h5").write_bytes(BODY)
    want = [
        wanted("a.h5", f"box:{tmp_path}/far/a b.h5"),
        wanted("none.h5", f"box:{tmp_path}/far/none.h5"),
        WantedFile(name="folder.h5", source=f"box:{tmp_path}/far"),
        WantedFile(name="unknown.h5", source="nobox:a.h5"),
    ]
    part, journal = paths_of(tmp_path / "out" / "a.h5")
    part.parent.mkdir()
    part.write_bytes(BODY[:100])
    import xxhash

    journal.write_text(f"stoker part 1 tag\n100 {xxhash.xxh3_128_hexdigest(BODY[:100])}\n")

    # The program itself may take more than a second to start.
    report = fetch_files(want, tmp_path / "out", FetchConfig(stall=30.0, tries=3, deadline=60.0))

    assert (tmp_path / "out" / "a.h5").read_bytes() == BODY
    assert (report.files[0].received, report.files[0].resumed) == (len(BODY) - 100, 100)
    assert [file.name for file in report.failed] == ["none.h5", "folder.h5", "unknown.h5"]
    assert "exit code 3" in report.failed[0].why
    assert "is a folder" in report.failed[1].why
    assert "didn't find section" in report.failed[2].why
    assert all(file.tries == 1 for file in report.failed)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        pytest.param("exec sleep 600", "", id="hangs"),
        pytest.param(
            "case $* in *lsjson*) echo '{\"Size\": 16384}';; *) exec sleep 600;; esac", "", id="cat-hangs"
        ),
        pytest.param(
            "case $* in *lsjson*) echo '{\"Size\": 16384}';; esac", "ended after 0", id="gives-nothing"
        ),
        pytest.param("echo key=abcdef123 >&2; exit 1", "key=***", id="fails"),
        pytest.param("echo not json", "cannot be read", id="nonsense"),
    ],
)
def test_an_rclone_that_fails_or_hangs(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "bin" / "rclone"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/bash\n{program}\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    settings = FetchConfig(stall=0.5, tries=2)

    report = fetch_files(
        [wanted("a", "far:a")],
        tmp_path / "out",
        settings,
        redact=lambda text: text.replace("abcdef123", "***"),
    )

    assert why in report.failed[0].why
    assert report.failed[0].tries == 2
