"""Files of an S3 server by the real rclone, and everything that goes wrong on the wire."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.config.sections import FetchConfig
from stoker.extras.fetch.origins import WantedFile, WantedFolder
from stoker.extras.fetch.run import FetchReport, FileResult, fetch_files
from tests.fetch.s3 import LOST, SECRET_KEY, Bucket, a_bucket, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
BODY = os.urandom(300_000)
QUICK = FetchConfig(stall=8.0, tries=2, deadline=60.0, at_once=6)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "RCLONE_"))]:
        monkeypatch.delenv(name)
    with a_bucket() as one:
        for name, value in one.variables().items():
            monkeypatch.setenv(name, value)
        yield one


def wanted(name: str) -> WantedFile:
    digest = hashlib.sha256(BODY).hexdigest()
    return WantedFile(
        name=name, source=f"s3:bucket/{name}", bytes=len(BODY), algorithm="sha256", digest=digest
    )


def of(report: FetchReport, name: str) -> FileResult:
    return next(file for file in report.files if file.name == name)


FAULTS = {"cut.h5": "cut", "wrong.h5": "wrong", "hang.h5": "hang", "busy.h5": "503"}


@pytest.mark.parametrize(
    "faulty",
    [
        pytest.param(["cut.h5", "wrong.h5"], id="cut-wrong"),
        pytest.param(["hang.h5", "busy.h5"], id="hang-busy", marks=pytest.mark.slow),
    ],
)
def test_whatever_goes_wrong_with_one_file_is_named_and_the_others_arrive(
    bucket: Bucket, tmp_path: Path, faulty: list[str]
) -> None:
    names = ["good.h5", *faulty, "short.h5", "fine.h5"]
    for name in names:
        bucket.put(name, BODY if name != "short.h5" else BODY[:-1])
    bucket.faults |= {name: FAULTS[name] for name in faulty}
    every = [wanted(name) for name in (*names, "none.h5")]
    said: list[object] = []

    report = fetch_files(every, tmp_path, QUICK, listen=said.append)

    why = {file.name: file.why for file in report.failed}
    assert list(why) == [*faulty, "short.h5", "none.h5"]
    assert report.exit_code != 0
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["fine.h5", "good.h5"]
    assert (tmp_path / "good.h5").read_bytes() == (tmp_path / "fine.h5").read_bytes() == BODY
    assert "sha256 is" in why.get("wrong.h5", "sha256 is")
    assert "is a folder" in why["none.h5"]
    assert "299,999 bytes, 300,000 were declared" in why["short.h5"]
    assert all(file.seconds < 2 * QUICK.deadline for file in report.files)
    assert SECRET_KEY not in str(report) + str(said) + str(report.to_json())
    bucket.faults.clear()
    bucket.put("short.h5", BODY)
    bucket.put("none.h5", BODY)
    second = fetch_files(every, tmp_path, QUICK)
    assert second.exit_code == 0
    for name in {"cut.h5", "hang.h5"} & set(faulty):
        assert (of(second, name).resumed, of(second, name).received) == (LOST, len(BODY) - LOST)
    assert of(second, "good.h5").status == of(second, "fine.h5").status == "present"
    assert all((tmp_path / file.name).read_bytes() == BODY for file in second.files)


def test_a_folder_is_listed_with_the_digests_that_the_server_keeps(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(3):
        bucket.put(f"set/train_{number:03d}.h5", BODY + bytes([number]))
    bucket.put("set/val.h5", BODY)
    bucket.faults["set/train_001.h5"] = "wrong"
    want = [WantedFolder(name="set/", source="s3:bucket/set", match="train_*.h5", count=3)]

    report = fetch_files(want, tmp_path, QUICK)

    assert [(file.name, file.status) for file in report.files] == [
        ("set/train_000.h5", "fetched"), ("set/train_001.h5", "failed"), ("set/train_002.h5", "fetched"),
    ]  # fmt: skip
    assert "md5 is" in report.failed[0].why
    assert of(report, "set/train_000.h5").verified == "md5"
    missing = fetch_files([WantedFolder(name="a/", source="s3:bucket/none")], tmp_path, QUICK)
    assert missing.exit_code == 3
