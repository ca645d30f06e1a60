import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from stoker import Loader, precompute
from stoker.errors import SourceError
from stoker.schema import Field
from stoker.sources.tar import TarSource
from stoker.testing import check_source


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def sample(number: int) -> dict[str, bytes]:
    return {
        "jpg": bytes([number]) * (10 + number),
        "cls": f"{number % 3}\n".encode(),
        "npy": npy(np.full((2, 3), number, "f8")),
        "json": b'{"box": [1, 2.5], "id": %d}' % number,
    }


def write(path: Path, members: list[tuple[str, bytes]], links: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in links:
            archive.addfile(info)
    return path


def shard(path: Path, numbers: range) -> Path:
    return write(path, [(f"set/{n:04d}.{end}", data) for n in numbers for end, data in sample(n).items()])


def test_members_of_one_name_are_a_sample(tmp_path: Path) -> None:
    shard(tmp_path / "b-000001.tar", range(5, 8))
    shard(tmp_path / "b-000000.tar", range(5))
    source = TarSource(tmp_path)

    assert source.schema() == {
        "cls": Field(shape=(), dtype="int64"),
        "jpg": Field(shape=(-1,), dtype="uint8", ragged=True),
        "json.box": Field(shape=(2,), dtype="float64"),
        "json.id": Field(shape=(), dtype="int64"),
        "npy": Field(shape=(2, 3), dtype="float32"),
    }
    for number in (6, 0, 7, 3):
        found = source.read(number)
        assert found["jpg"].tobytes() == sample(number)["jpg"]
        assert (found["cls"], found["json.id"], found["npy"][0, 0]) == (number % 3, number, number)
    assert source.keys()[5] == "b-000001.tar:set/0005"
    check_source(source)


def test_numbers_keep_every_digit_and_arrays_of_float64_are_narrowed_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = 1_763_884_800.25
    own = {"npy": npy(np.ones(2)), "json": b'{"at": 1763884800.25}'}
    members = [(f"{n}.{end}", data) for n in range(3) for end, data in own.items()]
    source = TarSource(write(tmp_path / "a.tar", members))
    assert source.read(1)["json.at"] == at
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["npy"]

    scalars = [(f"{n}.npy", npy(np.asarray(at))) for n in range(3)]
    assert TarSource(write(tmp_path / "b.tar", scalars)).read(1)["npy"] == at


def test_a_source_that_ends_with_the_program_says_nothing(tmp_path: Path) -> None:
    """Also where the program has closed descriptors by then, and modules are gone already."""
    shard(tmp_path / "a.tar", range(3))
    code = (
        "import os, sys\n"
        "from stoker.sources import tar\n"
        f"source = tar.TarSource({str(tmp_path / 'a.tar')!r}, fields=['cls'])\n"
        "source.read(1)\n"
        "if sys.argv[1] == 'closed': os.closerange(3, 100)\n"
        "if sys.argv[1] == 'modules': vars(tar).update(dict.fromkeys(vars(tar)))\n"
    )
    for how in ("closed", "modules", ""):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_images_are_served_as_bytes_with_their_lengths(tmp_path: Path) -> None:
    source = TarSource(shard(tmp_path / "a.tar", range(8)), fields=["jpg", "cls"])
    cache = precompute(source, None, tmp_path / "c", name="a", workers=0)
    batch = next(iter(Loader(cache, 8, shuffle=False, ragged="pack")))

    pieces = np.split(batch["jpg"].numpy(), batch["jpg.offsets"][1:-1].numpy())
    assert [piece.tobytes() for piece in pieces] == [sample(n)["jpg"] for n in range(8)]


def test_a_bad_member_is_a_quarantined_sample_with_its_name(tmp_path: Path) -> None:
    members = [(f"{n}.{end}", data) for n in range(6) for end, data in sample(n).items()]
    members[4 * 2 + 2] = ("2.npy", b"\x93NUMPY broken")
    members[4 * 3 + 1] = ("3.cls", b"9" * 30)
    del members[4 * 4 + 1]
    source = TarSource(write(tmp_path / "a.tar", members))
    cache = precompute(source, None, tmp_path / "c", name="a", workers=0, max_quarantined=0.6)

    assert sorted(cache.quarantined) == [2, 3, 4]
    assert "a.tar: key '3': member .cls cannot be decoded (Python int too large" in cache.quarantined[3].error
    assert "a.tar: key '2': member .npy cannot be decoded" in cache.quarantined[2].error
    assert "a.tar: key '4': member .cls is not there" in cache.quarantined[4].error


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("members", "links", "said"),
    [
        ([("/etc/0.npy", b"")], (), "its name is absolute"),
        ([("../0.npy", b"")], (), "leads out of the archive"),
        ([("a/../../0.npy", b"")], (), "leads out of the archive"),
        ([("0\n.npy", b"")], (), "control characters"),
        ([("0.npy", b""), ("0.npy", b"")], (), r"holds '0\.npy' twice"),
        ([], (special("0.jpg", tarfile.SYMTYPE, "/etc/passwd"),), "it is a link"),
        ([], (special("0.jpg", tarfile.LNKTYPE, "1.jpg"),), "it is a link"),
        ([], (special("0.jpg", tarfile.FIFOTYPE),), "it is a device or pipe"),
        ([], (special("0.jpg", tarfile.CHRTYPE),), "it is a device or pipe"),
        ([("readme", b"")], (), "belongs to no sample"),
        ([("0.txt", b"hello")], (), r"members \.txt of '0' have no known kind"),
        ([], (), "holds no members"),
    ],
)
def test_names_are_not_trusted(tmp_path: Path, members, links, said: str) -> None:
    source = TarSource(write(tmp_path / "a.tar", members, links))
    with pytest.raises(SourceError, match=said):
        source.schema()


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.8])
def test_a_tar_file_cut_short_is_refused_with_the_place(tmp_path: Path, kept: float) -> None:
    path = shard(tmp_path / "a.tar", range(8))
    data = path.read_bytes()
    used = len(data.rstrip(b"\0"))
    path.write_bytes(data[: int(used * kept)])
    with pytest.raises(SourceError, match=r"a\.tar.*(cut short|not a readable tar file)"):
        len(TarSource(path))


def test_a_tar_file_cut_between_members_or_damaged_inside_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", range(8))
    data = path.read_bytes()
    path.write_bytes(data[: 512 * 2 * 6])
    with pytest.raises(SourceError, match="no mark of its end at byte"):
        len(TarSource(path))
    path.write_bytes(data[: 512 * 2 * 6] + b"\xff" * 512 + data[512 * 13 :])
    with pytest.raises(SourceError, match="no mark of its end at byte 6,144"):
        len(TarSource(path))


@pytest.mark.parametrize(
    ("ending", "members", "said"),
    [
        (
            "npy",
            [npy(np.ones((2, 3), "f4")), npy(np.ones(3, "f4"))],
            r"float32 \(2, 3\) in '0' of .*a\.tar \(sample 0\) and float32 \(3,\) in '1'.*leave \.npy out",
        ),
        (
            "npy",
            [npy(np.ones(3, "f4")), npy(np.ones(3, "i4"))],
            r"float32 \(3,\) in '0' .* int32 \(3,\) in '1'",
        ),
        ("json", [b'{"a": 1}', b'{"a": [1, 2]}'], r"field 'json\.a' .*leave \.json out with fields="),
        ("json", [b'{"a": 1, "a": 2}'], r"key '0': .*\.json.*key 'a' comes twice"),
    ],
)
def test_members_that_differ_in_more_than_length_are_named(
    tmp_path: Path, ending: str, members: list[bytes], said: str
) -> None:
    write(tmp_path / "a.tar", [(f"{number}.{ending}", data) for number, data in enumerate(members)])
    with pytest.raises(SourceError, match=said):
        TarSource(tmp_path).schema()


def test_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("0.npy"))
    with pytest.raises(SourceError, match="compressed one has to be unpacked"):
        len(TarSource(tmp_path / "a.tar"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"holds no tar file \(\.tar\)"):
        TarSource(tmp_path / "empty")
