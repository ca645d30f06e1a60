"""Folders that are wanted as a whole: every shard arrives, or what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config.sections import FetchConfig
from stoker.errors import ConfigError
from stoker.extras.fetch.origins import WantedFolder, parse_wanted, read_manifest
from stoker.extras.fetch.run import FetchReport, fetch_files

QUICK = FetchConfig(stall=10.0, tries=2, deadline=60.0)
SHARDS = [f"burgers_train_{number:03d}.h5" for number in range(5)]


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A folder with five shards, and other things."""
    far = tmp_path / "far"
    (far / "deep").mkdir(parents=True)
    for number, name in enumerate(SHARDS):
        (far / ("deep" if number > 2 else "") / name).write_bytes(bytes([number]) * 1000)
    (far / "README.txt").write_text("read me")
    (far / ".hidden").write_text("no")
    return far


def fetched(report: FetchReport) -> list[str]:
    return [file.name for file in report.files if file.status != "failed"]


def test_all_files_of_a_folder_arrive_under_their_names(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    want = parse_wanted({"raw/": {"from": "far"}, "./": {"from": str(far), "match": "*_000.h5"}}, "m")

    first = fetch_files(want, out, QUICK, base=tmp_path)
    second = fetch_files(want, out, QUICK, base=tmp_path)

    names = [
        "raw/README.txt",
        *(f"raw/{name}" for name in SHARDS[:3]),
        *(f"raw/deep/{n}" for n in SHARDS[3:]),
    ]
    assert fetched(first) == [*names, SHARDS[0]]
    assert first.exit_code == 0
    assert (out / "raw/deep" / SHARDS[4]).read_bytes() == bytes([4]) * 1000
    assert {file.status for file in second.files} == {"present"}


def test_a_pattern_and_a_count_say_what_has_to_be_there(far: Path, tmp_path: Path) -> None:
    want = WantedFolder(name="raw/", source=str(far), match="*_train_*.h5", count=5)
    assert len(fetched(fetch_files([want], tmp_path / "out", QUICK))) == 5
    (far / SHARDS[1]).unlink()
    others = WantedFolder(name="more/", source=str(far), match="*.txt")

    report = fetch_files([want, others], tmp_path / "out", QUICK)

    assert [file.name for file in report.failed] == ["raw/"]
    assert "has 4 files that match *_train_*.h5, expected 5 (6 files in all)" in report.failed[0].why
    assert report.exit_code == 3
    assert fetched(report) == ["more/README.txt"], "the other folder is fetched all the same"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("none", "is not a folder"), ("empty", "has 0 files, expected at least one"),
        ("https://host/folder/", "web servers list no folders"),
        (":s3,secret_access_key=hidden:bucket/a", "written out in full"), ("dangling", "No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_listed_is_named(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "train.h5").symlink_to(tmp_path / "train_000.h5")

    report = fetch_files([WantedFolder(name="a/", source=source)], tmp_path / "out", QUICK, base=tmp_path)

    assert why in report.failed[0].why
    assert report.exit_code == 3
    assert "hidden" not in str(report)


def test_names_of_a_listing_are_not_trusted(far: Path, tmp_path: Path) -> None:
    (far / "a\nb.h5").touch()

    with pytest.raises(ConfigError, match="a character that"):
        fetch_files([WantedFolder(name="a/", source=str(far))], tmp_path / "out", QUICK)


def test_the_same_name_twice_is_refused(far: Path, tmp_path: Path) -> None:
    twice = [WantedFolder(name="a/", source=str(far)), WantedFolder(name="a/", source=f"{far}/")]

    with pytest.raises(ConfigError, match="wanted twice"):
        fetch_files(twice, tmp_path / "out", QUICK)


def test_folders_are_written_down_strictly(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for text, why in [
        ('{"files": {"a/": {"from": "x", "bytes": 3}}}', r"there are: from, match, count"),
        ('{"files": {"a": {"from": "x", "match": "*"}}}', r"there are: from, bytes, sha256"),
        ('{"files": {"../": {"from": "x"}}}', "the name"),
        ('{"files": {"a//": {"from": "x"}}}', "the name"),
        ('{"files": {"a/": {"from": "x", "count": 0}}}', "count"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_manifest(path)
