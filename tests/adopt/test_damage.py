"""Adopt under attack: kills, two runs at once, changing folders, odd names and odd contents."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import warnings
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from stoker.errors import SourceError
from stoker.extras.adopt import containers, formats, listing, source
from stoker.extras.adopt.layouts import LAYOUTS
from stoker.extras.adopt.run import AdoptSettings, run_adopt
from tests.adopt.writers import WRITERS, settle, values

COUNT = 160


def take(root: Path, out: Path, **settings: Any) -> Any:
    chosen = AdoptSettings(**{"workers": 0, "progress": None, **settings})
    return run_adopt(root, out, name="x", settings=chosen)


def write_npy(root: Path, count: int = 12) -> Path:
    root.mkdir(exist_ok=True)
    for number in range(count):
        np.save(root / f"{number:03d}.npy", values(number, 4))
    return root


def reasons(result: Any) -> dict[str, str]:
    return {bad.file: bad.why for bad in result.bad}


# ----------------------------------------------------------------------------------------------------------
# Kills.


SLOW = """
import sys, time
from stoker.extras.adopt import run
from stoker.extras.adopt.source import FileReader
read = FileReader.arrays
def arrays(self, part, kind):
    time.sleep(0.005)
    return read(self, part, kind)
FileReader.arrays = arrays
made = run.PrecomputeSettings
run.PrecomputeSettings = lambda **more: made(**more, commit_after_s=0.1)
run.run_adopt(sys.argv[1], sys.argv[2], name="x", settings=run.AdoptSettings(workers=0, progress=None))
"""


def npy_folder(root: Path) -> None:
    write_npy(root, COUNT)
    (root / "007.npy").write_bytes(b"")


def tar_folder(root: Path) -> None:
    WRITERS["webdataset"][0](root, COUNT, {5: np.zeros_like})


def lmdb_folder(root: Path) -> None:
    WRITERS["lmdb"][0](root, COUNT, {5: np.zeros_like})


def parquet_folder(root: Path) -> None:
    WRITERS["parquet"][0](root, COUNT, {5: np.zeros_like})


FOLDERS: list[Callable[[Path], None]] = [npy_folder, tar_folder, lmdb_folder, parquet_folder]


def killed_at(root: Path, out: Path, moments: list[float]) -> None:
    """Start an adopt and kill it, once for each moment, a fraction of the time that one takes."""
    for moment in moments:
        child = subprocess.Popen([sys.executable, "-c", SLOW, str(root), str(out)])
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait(30)


def records_of(result: Any) -> list[tuple[int, dict[str, bytes]]]:
    return [
        (number, {name: value.numpy().tobytes() for name, value in result.cache[number].items()})
        for number in result.cache.indices.tolist()
    ]


def check_kills(write: Callable[[Path], None], tmp_path: Path, moments: list[float]) -> None:
    root = tmp_path / "f"
    write(root)
    expected = take(root, tmp_path / "undisturbed")

    killed_at(root, tmp_path / "c", moments)
    result = take(root, tmp_path / "c")

    assert (result.fingerprint, result.bad) == (expected.fingerprint, expected.bad)
    assert result.cache.complete
    assert list(result.cache.keys()) == list(expected.cache.keys())
    assert records_of(result) == records_of(expected)
    left = [path.name for path in (tmp_path / "c/.adopt").iterdir() if path.name.endswith(".part")]
    assert left == [], "a killed run left a list"


@pytest.mark.chaos
@pytest.mark.parametrize("write", FOLDERS)
def test_a_run_killed_at_any_moment_continues_to_the_same_cache(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    draw = random.Random(write.__name__)
    check_kills(write, tmp_path, [draw.uniform(0.1, 1.2) for _ in range(2)])


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("write", FOLDERS)
def test_a_run_killed_many_times_continues_to_the_same_cache(
    write: Callable[[Path], None], seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    check_kills(write, tmp_path, [draw.uniform(0.02, 1.5) for _ in range(6)])


@pytest.mark.parametrize("write", [npy_folder, lmdb_folder])
def test_two_adopts_of_one_folder_at_once_make_one_cache(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    root, out = tmp_path / "f", tmp_path / "c"
    write(root)
    expected = take(root, tmp_path / "undisturbed")
    children = [
        subprocess.Popen([sys.executable, "-c", SLOW, str(root), str(out)], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [child.communicate(timeout=90)[1] for child in children]

    assert [child.returncode for child in children] == [0, 0], said
    result = take(root, out)
    assert (result.fingerprint, result.new, result.bad) == (expected.fingerprint, 0, expected.bad)
    assert records_of(result) == records_of(expected)


def test_a_list_that_another_run_is_writing_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = write_npy(tmp_path / "f"), tmp_path / "lists"
    folder.mkdir()
    write = listing._ListingWriter.write
    began = {name: threading.Event() for name in ("first", "second")}
    ends = {name: threading.Event() for name in began}

    def slow(self: Any, count: int | None) -> None:
        name = threading.current_thread().name
        if name in began:
            began[name].set()
            assert ends[name].wait(30)
        write(self, count)

    def run() -> int:
        with closing(listing.make_listing(root, LAYOUTS["npy"], folder, "x")) as made:
            return len(made)

    monkeypatch.setattr(listing._ListingWriter, "write", slow)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(run()), name=name) for name in began]
    for thread in threads:
        thread.start()
        assert began[thread.name].wait(30)
    ends["first"].set()
    threads[0].join(30)
    counts.append(run())
    ends["second"].set()
    threads[1].join(30)

    assert counts == [12, 12, 12]


# ----------------------------------------------------------------------------------------------------------
# The same folder is the same cache, whatever was adopted before.


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests by a sample begin with the first kilobytes, and blocks have few samples."""
    from stoker.extras.adopt import run
    from stoker.store import recipe

    monkeypatch.setattr(run, "FULL_BYTES", 10_000)
    monkeypatch.setattr(listing, "SMALL_BYTES", 500)
    monkeypatch.setattr(listing, "BLOCK", 10)
    monkeypatch.setattr(recipe, "SAMPLE_BYTES", 100)


@pytest.mark.usefixtures("small_limits")
def test_a_folder_adopted_in_two_steps_is_the_cache_of_one_adopted_at_once(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(40):
        np.save(root / f"{number:03d}.npy", values(number, 200))
    settle(root)
    take(root, tmp_path / "c")
    np.save(root / "013.npy", values(99, 200))
    settle(root)

    steps = take(root, tmp_path / "c")

    assert steps.fingerprint == take(root, tmp_path / "fresh").fingerprint
    assert steps.fingerprint == take(root, tmp_path / "c").fingerprint


@pytest.mark.usefixtures("small_limits")
def test_a_container_of_several_blocks_adopted_in_two_steps_is_the_same_cache(tmp_path: Path) -> None:
    root = WRITERS["lightningdit"][0](tmp_path / "f", 70, {}).root
    (root / "latents_rank00_shard013.safetensors").unlink()
    settle(root)
    take(root, tmp_path / "c")
    more = WRITERS["lightningdit"][0](tmp_path / "g", 75, {}).root
    (more / "latents_rank00_shard014.safetensors").rename(root / "latents_rank00_shard014.safetensors")
    settle(root)

    steps = take(root, tmp_path / "c")

    assert steps.fingerprint == take(root, tmp_path / "fresh").fingerprint


def test_how_many_files_a_thread_digests_at_once_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.extras.adopt import digest

    root = write_npy(tmp_path / "f", 150)
    together = take(root, tmp_path / "c").fingerprint
    monkeypatch.setattr(digest, "BATCH_FILES", 1)

    assert take(root, tmp_path / "d").fingerprint == together


def test_files_and_folders_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f")
    written = WRITERS["webdataset"][0](tmp_path / "t", 20, {})
    closed = [root / "003.npy", written.root / written.files[0], root / "folder"]
    closed[2].mkdir()
    for path in closed:
        path.chmod(0)
    try:
        if os.access(closed[0], os.R_OK):
            pytest.skip("root may read everything")
        plain, tars = take(root, tmp_path / "c"), take(written.root, tmp_path / "d")
    finally:
        for path in closed:
            path.chmod(0o700)

    assert {*reasons(plain)} == {"003.npy", "folder/"}
    assert {*reasons(tars)} == {written.files[0]}


def test_a_container_that_cannot_be_opened_is_named_and_the_rest_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WRITERS["edm2 zip"][0](tmp_path / "f", 20, {})
    (written.root / "other.zip").write_bytes((written.root / "latents.zip").read_bytes())
    opened = containers.open_regular

    def refused(path: Path) -> Any:
        if path.name == "other.zip":
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(containers, "open_regular", refused)

    result = take(written.root, tmp_path / "c")

    assert [(bad.file, "Permission denied" in bad.why) for bad in result.bad] == [("other.zip", True)]
    assert result.adopted == 20


def test_a_file_that_could_not_be_read_for_a_while_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.extras.adopt import digest

    root = write_npy(tmp_path / "f")
    settle(root)
    expected = take(root, tmp_path / "undisturbed").fingerprint
    read = digest.why_unreadable
    with monkeypatch.context() as patch:
        patch.setattr(
            digest, "why_unreadable", lambda path: "Stale file handle" if "003" in path.name else read(path)
        )
        take(root, tmp_path / "c")

    assert take(root, tmp_path / "c").fingerprint == expected


# ----------------------------------------------------------------------------------------------------------
# Folders that change meanwhile.


def test_a_file_that_goes_while_the_folder_is_listed_is_not_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_npy(tmp_path / "f")
    walk = listing.walk

    def removing(*args: Any) -> Any:
        for name, entry in walk(*args):
            if name == "004.npy":
                (root / name).unlink()
            yield name, entry

    monkeypatch.setattr(listing, "walk", removing)

    result = take(root, tmp_path / "c", layout="npy")

    assert (result.adopted, result.count, result.bad) == (11, 11, ())


def test_a_file_that_goes_after_it_was_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_npy(tmp_path / "f")
    read = source.FileReader.arrays

    def removing(self: Any, part: Any, kind: str) -> Any:
        (root / "004.npy").unlink(missing_ok=True)
        return read(self, part, kind)

    monkeypatch.setattr(source.FileReader, "arrays", removing)

    assert reasons(take(root, tmp_path / "c", layout="npy")) == {"004.npy": "is missing"}


def test_a_file_that_grows_meanwhile_ends_the_run_and_the_next_run_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WRITERS["webdataset"][0](tmp_path / "f", 10, {})
    read = source.FileReader.arrays

    def growing(self: Any, part: Any, kind: str) -> Any:
        with tarfile.open(written.root / written.files[0], "a") as archive:
            np.save(data := io.BytesIO(), values(77, 4, 3))
            member = tarfile.TarInfo("9999.latent.npy")
            member.size = len(data.getvalue())
            archive.addfile(member, io.BytesIO(data.getvalue()))
        return read(self, part, kind)

    with monkeypatch.context() as patch:
        patch.setattr(source.FileReader, "arrays", growing)
        with pytest.raises(SourceError, match=r"train-000\.tar changed"):
            take(written.root, tmp_path / "c")

    result = take(written.root, tmp_path / "c")
    assert (result.adopted, result.count, {*reasons(result)}) == (10, 11, {written.files[0]})


# ----------------------------------------------------------------------------------------------------------
# Names.


def test_odd_names_are_samples_like_all_others(tmp_path: Path) -> None:
    names = [
        "ünï", "a b", " lead", "line\nbreak", "x" * 200, "-rf", "--out", "q'uote\"", "日本", "tab\t", "{key}",
        "%s", "[red]", "back\\slash", "\x1b[31m", "e\u0301", "\u00e9", "*", "a;b", "#",
    ]  # fmt: skip
    root = tmp_path / "f"
    root.mkdir()
    for number, name in enumerate(names):
        np.save(root / f"{name}.npy", values(number, 4))

    result = take(root, tmp_path / "c")

    assert (result.bad, result.ignored) == ((), 0)
    keys = list(result.cache.keys())
    assert sorted(keys) == sorted(names)
    for number, name in enumerate(names):
        assert np.array_equal(result.cache[keys.index(name)]["data"].numpy(), values(number, 4))


def test_links_pipes_and_names_that_are_not_text_are_named(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f")
    np.save(tmp_path / "other.npy", values(50, 4))
    (root / "file.npy").symlink_to(tmp_path / "other.npy")
    (root / "loop.npy").symlink_to("loop.npy")
    (root / "loop").symlink_to("loop")
    (root / "up").symlink_to(root)
    os.mkfifo(root / "pipe.npy")
    os.mkfifo(root / "pipe.tar")
    with open(os.fsencode(root) + b"/\xff\xfe.npy", "wb") as file:
        np.save(file, values(51, 4))

    why = reasons(result := take(root, tmp_path / "c"))

    assert why.keys() == {"loop.npy", "up", "pipe.npy", "\\xff\\xfe.npy"}
    assert "not UTF-8" in why["\\xff\\xfe.npy"]
    assert result.adopted == 13


def test_a_bad_file_of_an_odd_name_is_one_line_without_control_characters(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f")
    (root / "a\x1b[2J\nb.npy").write_bytes(b"")

    (bad,) = take(root, tmp_path / "c").bad

    assert bad.file == "a\x1b[2J\nb.npy"
    assert str(bad) == r"a\x1b[2J\nb.npy: empty, 0 bytes"


# ----------------------------------------------------------------------------------------------------------
# Contents.


def as_json(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def tensors_file(path: Path, header: object) -> None:
    text = as_json(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


ODD_HEADERS: list[object] = [
    [1, 2], 7, None, "text", b"{", b"[" * 100_000, {"a": [1]}, {"a": None}, {"a": {}},
    {"a": {"dtype": [], "shape": [16], "data_offsets": [0, 64]}},
    {"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 64]}},
    {"a": {"dtype": "F32", "shape": [16], "data_offsets": None}},
    {"a": {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]}},
    {"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 64]}},
]  # fmt: skip


@pytest.mark.parametrize("case", ["speculators", "lightningdit"])
def test_a_tensors_file_with_an_odd_header_is_named_and_the_rest_adopted(case: str, tmp_path: Path) -> None:
    written = WRITERS[case][0](tmp_path / "f", 20, {})
    names = [f"{number:03d}.safetensors" for number in range(len(ODD_HEADERS))]
    for name, header in zip(names, ODD_HEADERS, strict=True):
        tensors_file(written.root / name, header)

    result = take(written.root, tmp_path / "c", layout=WRITERS[case][1])

    assert {*reasons(result)} == {*names}
    assert result.adopted == 20


def test_arrays_of_an_odd_type_are_named_and_the_rest_adopted(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 30)
    odd = {
        "a": np.array([{}], dtype=object), "b": np.array("text"), "c": np.array(3.0, np.float32),
        "d": np.zeros(4, [("x", "f4")]), "e": np.ones(4, complex), "f": np.array(["2020-01-01"], "M8[D]"),
        "g": np.zeros((0,), np.float32), "h": np.array([b"x"]),
    }  # fmt: skip
    for name, array in odd.items():
        np.save(root / f"{name}.npy", array)
    for name, wrong in {
        "i": b"(" * 50,
        "j": b"\x00" * 50,
        "k": b"{'descr': [], 'shape': 3}" + b" " * 25,
    }.items():
        data = bytearray((root / "000.npy").read_bytes())
        data[10:60] = wrong[:50]
        (root / f"{name}.npy").write_bytes(data)

    result = take(root, tmp_path / "c")

    assert {*reasons(result)} == {f"{name}.npy" for name in "abcdefghijk"}
    assert result.adopted == 30


def test_json_that_is_not_what_it_should_be_is_named_and_the_rest_adopted(tmp_path: Path) -> None:
    written = WRITERS["stable-audio"][0](tmp_path / "f", 40, {})
    odd: list[object] = [
        [1, 2], 3, "x", None, {}, b"[" * 100_000, b"\xff",
        {"padding_mask": {"a": 1}, "seconds_total": [1, 2]},
        {"padding_mask": [[1], [2, 3]], "seconds_total": "x"},
        {"padding_mask": [1, None], "seconds_total": 4},
        {"padding_mask": 1, "seconds_total": 10**30},
    ]  # fmt: skip
    for file, value in zip(written.files, odd, strict=False):
        (written.root / file.replace(".npy", ".json")).write_bytes(as_json(value))

    result = take(written.root, tmp_path / "c")

    assert {name.rpartition(".")[0] for name in reasons(result)} == {
        file.removesuffix(".npy") for file in written.files[: len(odd)]
    }
    assert result.adopted == 40 - len(odd)


@pytest.mark.parametrize("text", [b"[]", b"null", b"{", b'{"labels": {"a": 1}}', b"\xff"])
def test_a_list_of_labels_that_lists_none_is_named(text: bytes, tmp_path: Path) -> None:
    written = WRITERS["repa"][0](tmp_path / "f", 6, {})
    labels = written.root / "vae-sd/dataset.json"
    labels.write_bytes(text)
    assert {*reasons(take(written.root, tmp_path / "c"))} == {"vae-sd/dataset.json"}

    labels.write_bytes(b'{"labels": null}')
    assert take(written.root, tmp_path / "d").bad == ()


@pytest.mark.parametrize("pair", [b'["a\\q.npy", 1]', b'["\xff.npy", 1]', b'["a.npy", ' + b"9" * 5000 + b"]"])
def test_a_damaged_list_of_labels_is_named_with_the_files_that_it_gives_no_label(
    pair: bytes, tmp_path: Path
) -> None:
    written = WRITERS["repa"][0](tmp_path / "f", 6, {})
    labels = written.root / "vae-sd/dataset.json"
    begin, comma, rest = labels.read_bytes().rpartition(b", [")
    labels.write_bytes(begin + b", " + pair + comma + rest)

    why = reasons(take(written.root, tmp_path / "c"))

    assert why.keys() == {"vae-sd/dataset.json", written.files[5]}
    assert why["vae-sd/dataset.json"].startswith("its labels cannot be read")


def test_labels_that_contradict_or_are_too_large_are_named(tmp_path: Path) -> None:
    written = WRITERS["repa"][0](tmp_path / "f", 6, {})
    labels = written.root / "vae-sd/dataset.json"
    pairs = json.loads(labels.read_bytes())["labels"]
    pairs[1][1] = 10**30
    labels.write_text(json.dumps({"labels": [*pairs, [pairs[3][0], 7], pairs[4]]}))
    root = tmp_path / "g"
    root.mkdir()
    for number in range(6):
        np.save(root / f"{number}_{10**30 if number == 2 else number}.npy", values(number, 4))

    listed = reasons(take(written.root, tmp_path / "c"))
    named = reasons(take(root, tmp_path / "d", layout="{key}_{label:int}.npy"))

    assert listed.keys() == {written.files[1], "vae-sd/dataset.json"}
    assert "7" in listed["vae-sd/dataset.json"]
    assert named.keys() == {f"2_{10**30}.npy"}


def test_archives_that_claim_what_they_do_not_have_are_named_and_the_rest_adopted(tmp_path: Path) -> None:
    tars = WRITERS["webdataset"][0](tmp_path / "t", 10, {})
    for name, kind in (("x.tar", tarfile.GNUTYPE_LONGNAME), ("y.tar", tarfile.XHDTYPE)):
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = kind, 2**44
        (tars.root / name).write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2000))
    zips = WRITERS["edm2 zip"][0](tmp_path / "z", 10, {})
    far = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, 5, 5, 0, 2**64 - 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0, 0, 0)
    most = 2**32 - 1
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *[0] * 7, most, most, 4, 9, 0, 0, 0, 0, most)
    (zips.root / "x.zip").write_bytes(far + end)
    (zips.root / "y.zip").write_bytes(entry + b"a.np" + struct.pack("<2H", 1, 24) + b"12345" + end)

    for written in (tars, zips):
        result = take(written.root, tmp_path / f"c{written.root.name}")
        suffix = written.files[0][-4:]
        assert [bad.file for bad in result.bad] == [f"x{suffix}", f"y{suffix}"]
        assert result.adopted == 10


def test_an_npz_that_holds_an_array_twice_is_named(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(6):
        np.savez(root / f"{number}.npz", a=values(number, 4))
    np.save(data := io.BytesIO(), values(9, 4))
    with zipfile.ZipFile(root / "2.npz", "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr("a.npy", data.getvalue())

    assert reasons(take(root, tmp_path / "c")) == {"2.npz": "holds 'a.npy' twice"}


@pytest.mark.parametrize("odd", ["", "__len__", "x.scale"])
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_file_with_an_array_that_no_field_can_be_named_after_is_named_and_the_rest_adopted(
    odd: str, suffix: str, tmp_path: Path
) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(6):
        arrays = {odd if number > 0 else "x": values(number, 4)}
        if suffix == "npz":
            np.savez(root / f"{number}.npz", **arrays)
        else:
            save_file(
                {name: torch.from_numpy(array) for name, array in arrays.items()}, root / f"{number}.{suffix}"
            )

    result = take(root, tmp_path / "c")
    assert (result.adopted, {*reasons(result)}) == (1, {f"{number}.{suffix}" for number in range(1, 6)})

    (root / f"0.{suffix}").unlink()
    with pytest.raises(SourceError, match=rf"1\.{suffix}: holds an array"):
        take(root, tmp_path / "d")


def test_pt_files_of_an_odd_type_are_named_even_when_they_come_first(tmp_path: Path) -> None:
    written = WRITERS["specforge"][0](tmp_path / "f", 12, {})
    one: dict[str, Any] = dict.fromkeys(
        ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"), torch.tensor(1)
    )
    odd: list[Any] = [[torch.ones(3)], "text", one, {**one, "hidden_state": torch.ones(1, 4, 6)}, 5, [1, 2]]
    for file, value in zip(written.files, odd, strict=False):
        torch.save(value, written.root / file)

    result = take(written.root, tmp_path / "c", layout="hidden-states")
    few = written.files[: len(odd)]
    assert ({*reasons(result)}, result.adopted) == ({*few}, 6)

    for file in few[2:]:
        (written.root / file).unlink()
    result = take(written.root, tmp_path / "d")
    assert (result.layout, {*reasons(result)}) == ("hidden-states", {*few[:2]})


def test_a_text_of_one_token_is_a_sample_like_all_others(tmp_path: Path) -> None:
    listed = WRITERS["speculators"][0](tmp_path / "s", 8, {})
    save_file(
        {"hidden_states": torch.ones(1, 3, 6), "token_ids": torch.tensor([5])}, listed.root / listed.files[2]
    )
    chats = WRITERS["specforge"][0](tmp_path / "f", 8, {})
    chat = {
        "input_ids": torch.tensor([[3]]), "loss_mask": torch.tensor([1]),
        "hidden_state": torch.ones(1, 1, 6), "aux_hidden_state": torch.ones(1, 1, 18),
    }  # fmt: skip
    torch.save(chat, chats.root / chats.files[2])
    texts = WRITERS["simpletuner"][0](tmp_path / "t", 8, {})
    torch.save(
        {"prompt_embeds": torch.ones(1, 5), "pooled_prompt_embeds": torch.ones(1, 4)},
        texts.root / texts.files[2],
    )

    varying = source.AdoptRules(ragged={"hidden": (0,)})
    results = [
        take(written.root, tmp_path / f"c{at}", rules=varying)
        for at, written in enumerate((listed, chats, texts))
    ]

    assert [result.bad for result in results] == [(), (), ()]
    assert [tuple(result.cache[2]["hidden"].shape) for result in results] == [(1, 3, 6), (1, 6), (1, 5)]


def test_hdf5_of_an_odd_type_is_named_and_the_rest_adopted(tmp_path: Path) -> None:
    bags = WRITERS["bags"][0](tmp_path / "f", 12, {})
    odd: list[Any] = [
        3.0,
        h5py.Empty("f4"),
        None,
        h5py.SoftLink("/nowhere"),
        np.array([b"x"]),
        np.ones((2, 2, 2)),
    ]
    for file, value in zip(bags.files, odd, strict=False):
        with h5py.File(bags.root / file, "w") as opened:
            opened["coords"] = np.ones((2, 2), np.int64)
            if value is None:
                opened.create_group("features")
            else:
                opened["features"] = value
    rows = WRITERS["lola"][0](tmp_path / "l", 40, {})
    for name, value in (("a", 3.0), ("b", None), ("c", h5py.SoftLink("/nowhere"))):
        with h5py.File(rows.root / f"{name}.h5", "w") as opened:
            if value is None:
                opened.create_group("state")
            else:
                opened["state"] = value

    assert {*reasons(take(bags.root, tmp_path / "c"))} == {*bags.files[: len(odd)]}
    result = take(rows.root, tmp_path / "d")
    assert ({*reasons(result)}, result.adopted) == ({"a.h5", "b.h5", "c.h5"}, 40)


@pytest.mark.parametrize("layout", ["lightningdit", "safetensors"])
def test_a_header_that_claims_to_be_huge_is_not_read_into_memory(layout: str, tmp_path: Path) -> None:
    root = WRITERS["lightningdit"][0](tmp_path / "f", 8, {}).root
    with open(root / "a.safetensors", "wb") as file:
        file.write((2**39).to_bytes(8, "little"))
        file.truncate(2**40)
    code = f"""
import resource, sys
from pathlib import Path
from stoker.errors import SourceError
from stoker.extras.adopt.containers import Rows, stated_shapes
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
path = Path({str(root / "a.safetensors")!r})
for look in (stated_shapes, lambda path: Rows("safetensors-rows", path)):
    try:
        look(path)
    except SourceError as error:
        print(error.fact)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.count("claims") == 2


def test_a_small_file_that_would_unpack_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "SMALL_UNPACKED_BYTES", 10_000)
    root = tmp_path / "f"
    root.mkdir()
    for number in range(5):
        np.savez_compressed(root / f"{number}.npz", moments=values(number, 4, 100))
    np.savez_compressed(root / "5.npz", moments=np.ones(1 << 20, np.float32))
    edm2 = WRITERS["edm2 zip"][0](tmp_path / "z", 5, {}).root / "latents.zip"
    with zipfile.ZipFile(edm2) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    np.save(data := io.BytesIO(), np.ones((8, 400, 400), np.float32))
    held["00000/img-mean-std-00000002.npy"] = data.getvalue()
    with zipfile.ZipFile(edm2, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)

    plain, zipped = take(root, tmp_path / "c"), take(edm2.parent, tmp_path / "d")

    assert plain.adopted == 5
    assert "claims to unpack" in reasons(plain)["5.npz"]
    assert zipped.adopted == 4
    assert "too large" in zipped.bad[0].why


def test_a_file_above_the_limit_of_a_sample_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_npy(tmp_path / "f")
    monkeypatch.setattr(source, "MAX_FILE_BYTES", 1000)
    np.save(root / "large.npy", values(1, 400))

    assert "1,000" in reasons(take(root, tmp_path / "c"))["large.npy"]


def test_null_rows_and_null_keys_of_parquet_are_named_by_row(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    lists = [[1.0, 2.0]] * 12
    features: list[Any] = [*lists[:5], None, [1.0, None], *lists[7:]]
    ids: list[Any] = ["a", None, "c", "", "None", *"fghijkl"]
    table = pyarrow.table(
        {
            "id": ids,
            "features": pyarrow.array(features, pyarrow.list_(pyarrow.float32(), 2)),
            "label": pyarrow.array([None if row == 8 else row for row in range(12)]),
        }
    )
    pyarrow.parquet.write_table(table, root / "a.parquet")

    result = take(root, tmp_path / "c")

    why = sorted(bad.why for bad in result.bad)
    assert [one.partition(":")[0].partition(",")[0].removesuffix(" has no key") for one in why] == [
        "row 1", "row 3", "row 5 column 'features' is null", "row 6 column 'features' holds a null",
        "row 8 column 'label' is null",
    ]  # fmt: skip
    assert result.adopted == 7


def test_a_parquet_file_damaged_in_its_keys_is_named_and_the_rest_adopted(tmp_path: Path) -> None:
    written = WRITERS["parquet"][0](tmp_path / "f", 12, {})
    table = pyarrow.table(
        {"id": [f"y{n}" for n in range(2000)], "features": [[1.0] * 6] * 2000, "label": [1] * 2000}
    )
    pyarrow.parquet.write_table(table, written.root / "b.parquet", row_group_size=500)
    data = bytearray((written.root / "b.parquet").read_bytes())
    data[40:400] = b"\xff" * 360
    (written.root / "b.parquet").write_bytes(data)

    result = take(written.root, tmp_path / "c")

    assert ({*reasons(result)}, result.adopted) == ({"b.parquet"}, 12)


@pytest.mark.parametrize("cut", [0, 100, 5000, 3, -10, -4096])
def test_an_lmdb_that_is_cut_short_is_refused_and_not_a_crash(cut: int, tmp_path: Path) -> None:
    written = WRITERS["lmdb"][0](tmp_path / "f", 200, {})
    file = written.root / "data.mdb"
    file.write_bytes(file.read_bytes()[:cut])

    with pytest.raises(SourceError, match=r"data\.mdb"):
        take(written.root, tmp_path / "c", layout="lmdb")


@pytest.mark.parametrize("shape", [b"x", b"", b"1000000000000 3", b"-4 3", b"9999999999999999999999 3"])
def test_an_lmdb_with_an_odd_shape_is_refused_and_closed(shape: bytes, tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    with lmdb.open(str(root), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"latents_shape", shape)
        transaction.put(b"latents_0_data", values(0, 3).tobytes())
    open_files = len(os.listdir("/proc/self/fd"))

    with pytest.raises(SourceError, match=r"data\.mdb"):
        take(root, tmp_path / "c", layout="lmdb")

    assert containers._environments == {}
    assert len(os.listdir("/proc/self/fd")) <= open_files


@pytest.mark.parametrize("case", WRITERS)
def test_an_empty_file_and_noise_are_named_for_each_layout(case: str, tmp_path: Path) -> None:
    written = WRITERS[case][0](tmp_path / "f", 30, {})
    names = sorted({*written.files})
    if len(names) < 4:
        suffix = Path(names[0]).suffix
        empty, noise = f"zz0{suffix}", f"zz1{suffix}"
        if case == "lmdb":
            for name in (empty, noise):
                (written.root / name).mkdir()
            empty, noise = f"{empty}/data.mdb", f"{noise}/data.mdb"
    else:
        empty, noise = names[1], names[2]
    (written.root / empty).write_bytes(b"")
    (written.root / noise).write_bytes(random.Random(case).randbytes(1000))

    why = reasons(take(written.root, tmp_path / "c", layout=WRITERS[case][1]))

    assert why.keys() == {empty, noise}
    assert why[empty] == "empty, 0 bytes"
