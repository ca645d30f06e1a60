"""Runs of adopt: again, killed, with workers, of changed folders; originals stay as they are."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError, IncompleteError, SourceError
from stoker.extras.adopt import digest, source
from stoker.extras.adopt.layouts import LAYOUTS, layout_of_pattern
from stoker.extras.adopt.listing import make_listing
from stoker.extras.adopt.run import AdoptSettings, run_adopt
from stoker.extras.adopt.source import FileReader
from tests.adopt.writers import WRITERS, nan, settle, values
from tests.cli.commands import run, run_json


def write_npy(root: Path, count: int, *shape: int) -> Path:
    for number in range(count):
        (root / f"{number // 100}").mkdir(parents=True, exist_ok=True)
        np.save(root / f"{number // 100}/{number:05d}.npy", values(number, *shape))
    return root


def take(root: Path, out: Path, **settings: Any) -> Any:
    chosen = AdoptSettings(**{"workers": 0, "progress": None, "layout": "npy", **settings})
    return run_adopt(root, out, name="x", settings=chosen)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("case", ["sd-scripts", "lmdb", "bags", "specforge", "edm2 zip"])
def test_originals_keep_their_bytes_and_times_and_get_no_company(case: str, tmp_path: Path) -> None:
    written = WRITERS[case][0](tmp_path / "f", 5, {2: nan})
    before = state_of(written.root)

    with pytest.raises(IncompleteError, match="NaN"):
        stoker.adopt(written.root, tmp_path / "caches", name="x", workers=0, progress=False)

    assert state_of(written.root) == before


def test_an_lmdb_is_read_in_this_process_and_in_workers(tmp_path: Path) -> None:
    """A process may open one only once; listing, reading and the first samples share it."""
    written = WRITERS["lmdb"][0](tmp_path / "f", 30, {})

    for workers in (None, 0, 1):
        cache = stoker.adopt(
            written.root, tmp_path / f"caches{workers}", name="x", workers=workers, progress=False
        )
        assert len(cache) == 30


def test_all_there_is_found_again_without_reading_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_npy(tmp_path / "f", 50, 4)
    settle(root)
    first = take(root, tmp_path / "c")
    shards = {path: path.stat().st_mtime_ns for path in first.path.glob("shard-*")}
    looked: list[str] = []
    read = FileReader.arrays

    def counted(self: FileReader, part: Any, kind: str) -> Any:
        looked.append(part.file)
        return read(self, part, kind)

    monkeypatch.setattr(FileReader, "arrays", counted)
    monkeypatch.setattr(digest, "digest_file", None)

    again = take(root, tmp_path / "c")

    assert (again.new, again.adopted, again.fingerprint) == (0, 50, first.fingerprint)
    assert len(looked) <= source.PROBED
    assert {path: path.stat().st_mtime_ns for path in first.path.glob("shard-*")} == shards


def test_a_moved_folder_has_the_same_fingerprint(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 5, 4)
    first = take(root, tmp_path / "c")
    root.rename(tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").rglob("*.npy"):
        os.utime(path, (1, 1))

    assert take(tmp_path / "elsewhere", tmp_path / "c").fingerprint == first.fingerprint


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 5, 4)
    settle(root)
    first = take(root, tmp_path / "c")
    file = root / "0/00003.npy"
    times = file.stat()
    np.save(file, values(77, 4))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    second = take(root, tmp_path / "c")

    assert second.fingerprint != first.fingerprint
    assert second.cache[3]["data"].numpy().tolist() == values(77, 4).tolist()


def test_a_fixed_file_costs_its_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.extras.adopt import listing

    monkeypatch.setattr(listing, "BLOCK", 10)
    root = write_npy(tmp_path / "f", 40, 4)
    file = root / "0/00025.npy"
    sound = file.read_bytes()
    file.write_bytes(sound[:-3])
    assert [bad.file for bad in take(root, tmp_path / "c").bad] == ["0/00025.npy"]
    file.write_bytes(sound)

    fixed = take(root, tmp_path / "c")

    assert (fixed.bad, fixed.adopted, fixed.new) == ((), 40, 10)


def test_a_new_file_costs_the_blocks_from_there_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.extras.adopt import listing

    monkeypatch.setattr(listing, "BLOCK", 10)
    root = write_npy(tmp_path / "f", 40, 4)
    take(root, tmp_path / "c")
    np.save(root / "0/00024b.npy", values(99, 4))

    more = take(root, tmp_path / "c")

    assert (more.adopted, more.new) == (41, 21)
    assert more.cache[25]["data"].numpy().tolist() == values(99, 4).tolist()


KILLED = """
import sys, time
from stoker.extras.adopt.source import FileReader
read = FileReader.arrays
def slow(self, part, kind):
    time.sleep(0.01)
    return read(self, part, kind)
FileReader.arrays = slow
from stoker.extras.adopt import run
made = run.PrecomputeSettings
run.PrecomputeSettings = lambda **more: made(**more, commit_after_s=0.2)
settings = run.AdoptSettings(workers=0, progress=None, layout="npy")
run.run_adopt(sys.argv[1], sys.argv[2], name="x", settings=settings)
"""


def test_a_run_that_was_killed_is_continued(tmp_path: Path) -> None:
    root, out = write_npy(tmp_path / "f", 400, 4), tmp_path / "c"
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(root), str(out)])
    until = time.monotonic() + 60
    while not list(out.glob("x/*/shard-*")) and time.monotonic() < until:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)

    rest = take(root, out)

    assert killed.returncode == -signal.SIGKILL
    assert 0 < rest.new < 400
    assert (rest.adopted, rest.cache.complete, rest.bad) == (400, True, ())
    assert all(np.array_equal(rest.cache[n]["data"].numpy(), values(n, 4)) for n in (0, 199, 399))


def test_workers_store_the_same_records_and_name_the_same_files(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 300, 4)
    (root / "1/00150.npy").write_bytes(b"x")
    alone = take(root, tmp_path / "alone")

    workers = take(root, tmp_path / "workers", workers=2)

    assert (workers.fingerprint, workers.bad) == (alone.fingerprint, alone.bad)
    assert [bad.file for bad in workers.bad] == ["1/00150.npy"]
    assert torch.equal(workers.cache[299]["data"], alone.cache[299]["data"])


def test_workers_read_pt_files_each_through_a_process_of_its_own(tmp_path: Path) -> None:
    written = WRITERS["specforge"][0](tmp_path / "f", 12, {4: nan})

    result = take(written.root, tmp_path / "c", layout="auto", workers=2)

    assert [bad.file for bad in result.bad] == [written.files[4]]
    assert result.adopted == 11


def test_a_file_that_changes_meanwhile_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_npy(tmp_path / "f", 40, 4)
    read = FileReader.arrays

    def touched(self: FileReader, part: Any, kind: str) -> Any:
        if part.file == "0/00039.npy":
            np.save(root / part.file, values(99, 5))
        return read(self, part, kind)

    monkeypatch.setattr(FileReader, "arrays", touched)
    monkeypatch.setattr(source, "PROBED", 1)

    with pytest.raises(SourceError, match=r"00039\.npy changed"):
        take(root, tmp_path / "c")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 8, 4)
    (root / "0/gone.npy").symlink_to(root / "nowhere")
    os.mkfifo(root / "0/pipe.npy")
    (root / "linked").symlink_to(tmp_path)
    (root / "0/readme.txt").write_text("x")
    (root / "0/00001.npy.tmp").write_text("x")

    result = take(root, tmp_path / "c")

    why = {bad.file: bad.why for bad in result.bad}
    assert why.keys() == {"0/gone.npy", "0/pipe.npy", "linked"}
    assert "link" in why["0/gone.npy"]
    assert "pipe" in why["0/pipe.npy"]
    assert result.ignored == 2


def test_a_python_object_in_an_array_is_refused_and_not_run(tmp_path: Path) -> None:
    root, ran = write_npy(tmp_path / "f", 4, 4), tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {ran}",)

    np.save(root / "0/evil.npy", np.array([Evil()], dtype=object))
    np.savez(root / "0/evil.npz", moments=np.array([Evil()], dtype=object))

    assert [bad.file for bad in take(root, tmp_path / "c").bad] == ["0/evil.npy"]
    with pytest.raises(SourceError, match=r"evil\.npz"):
        take(root, tmp_path / "d", layout="npz")
    assert not ran.exists()


def test_the_cache_folder_inside_the_folder_is_left_out(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 3, 4)
    take(root, root / "caches")
    np.save(root / "caches/stray.npy", values(9, 4))

    assert take(root, root / "caches").count == 3


def test_bytes_after_the_data_are_damage(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 4, 4)
    written = WRITERS["speculators"][0](tmp_path / "s", 4, {})
    for file in (root / "0/00002.npy", written.root / written.files[2]):
        with file.open("ab") as opened:
            opened.write(bytes(64))

    assert [bad.file for bad in take(root, tmp_path / "c").bad] == ["0/00002.npy"]
    assert [bad.file for bad in take(written.root, tmp_path / "d", layout="auto").bad] == [written.files[2]]


def test_a_zip_above_4_gib_is_read_where_its_members_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 200)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    written = WRITERS["edm2 zip"][0](tmp_path / "f", 5, {})

    result = take(written.root, tmp_path / "c", layout="auto")

    assert (result.layout, result.bad, result.adopted) == ("edm2", (), 5)
    assert np.array_equal(result.cache[4]["mean"].numpy(), written.records[4])


def test_a_flipped_bit_in_a_zip_is_found(tmp_path: Path) -> None:
    written = WRITERS["edm2 zip"][0](tmp_path / "f", 5, {})
    file = written.root / "latents.zip"
    data = bytearray(file.read_bytes())
    data[data.find(values(2, 8, 4, 4).tobytes()) + 100] ^= 4
    file.write_bytes(data)

    (bad,) = take(written.root, tmp_path / "c", layout="edm2").bad

    assert (bad.number, "checksum" in bad.why) == (2, True)


def test_a_few_other_files_do_not_decide_the_layout(tmp_path: Path) -> None:
    written = WRITERS["sd-scripts"][0](tmp_path / "f", 5, {})
    np.save(written.root / "mean.npy", values(1, 4))

    assert take(written.root, tmp_path / "c", layout="auto").layout == "sd-scripts"


# ----------------------------------------------------------------------------------------------------------
# Layouts that are not known, and shapes.


def test_a_pattern_names_samples_and_fields(tmp_path: Path) -> None:
    root = tmp_path / "f"
    for split, number in (("train", 3), ("train", 4), ("val", 5)):
        (root / split).mkdir(parents=True, exist_ok=True)
        np.save(root / split / f"s{number}_{number * 10}.npy", values(number, 2))

    result = take(root, tmp_path / "c", layout="{split}/{key}_{label:int}.npy")

    assert list(result.cache.filler.source.keys()) == ["s3", "s4", "s5"]
    assert [result.cache[n]["label"].item() for n in range(3)] == [30, 40, 50]
    assert [result.cache[n]["split"].item() for n in range(3)] == [0, 0, 1]


def test_one_key_in_two_folders_is_no_silent_replacement(tmp_path: Path) -> None:
    root = tmp_path / "f"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for number in range(3):
            np.save(root / split / f"{number + (split == 'val') * 2}.npy", values(number, 2))

    result = take(root, tmp_path / "c", layout="{split}/{key}.npy")

    assert sorted(bad.file for bad in result.bad) == ["train/2.npy", "val/2.npy"]
    assert (result.adopted, result.count) == (4, 5)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("mars", "Did you mean 'mar'"),
        ("{name}.npy", "one {key}"),
        ("{key}/{key}.npy", "one {key}"),
        ("{key}_{label:float}.npy", "not a group"),
        ("{key}.bin", "ends in .bin"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        take(write_npy(tmp_path / "f", 2, 4), tmp_path / "c", layout=layout)


def test_a_folder_of_no_known_layout_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f/a.bin").write_bytes(b"x")

    with pytest.raises(SourceError, match=r"files end in \.bin.*pattern"):
        take(tmp_path / "f", tmp_path / "c", layout="auto")
    with pytest.raises(SourceError, match=r"no file of the layout npy: it has a\.bin"):
        take(tmp_path / "f", tmp_path / "c")
    with pytest.raises(SourceError, match="does not exist"):
        take(tmp_path / "g", tmp_path / "c")


def test_a_place_without_files_says_so(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a").symlink_to(tmp_path / "f")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/README").write_bytes(b"x")

    for root, layout, fact in (
        (tmp_path / "f", "auto", "holds no files"),
        (tmp_path / "links", "auto", "a: a link to a folder"),
        (tmp_path / "links", "npy", "a: a link to a folder"),
        (tmp_path / "plain", "auto", "no suffix"),
        (Path("/dev/null"), "auto", "/dev/null cannot be read: a device"),
    ):
        with pytest.raises(SourceError, match=fact):
            take(root, tmp_path / "c", layout=layout)
    wrong: Any
    for wrong in (None, 5, ""):
        with pytest.raises(ConfigError, match=f"folder is {wrong!r}"):
            stoker.adopt(wrong, tmp_path / "c", name="x")


def test_a_folder_of_pt_files_that_hold_code_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    for number in range(3):
        torch.save({"x": Code()}, tmp_path / f"f/{number}.pt")

    with pytest.raises(SourceError, match=r"0\.pt: it asks for posix\.system"):
        take(tmp_path / "f", tmp_path / "c", layout="auto")


class Code:
    """What would run a command when it is loaded as a pickle."""

    def __reduce__(self) -> Any:
        return os.system, ("false",)


def test_shapes_that_vary_along_several_axes_are_one_cache(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(12):
        np.save(root / f"{number:02d}.npy", values(number, 4, 8 + number % 3, 8 - number % 3))
    np.save(root / "12.npy", values(12, 5, 8, 8))

    result = take(root, tmp_path / "c")

    assert [bad.file for bad in result.bad] == ["12.npy"], "another number of channels"
    for number in range(12):
        stored = result.cache[number]["data"]
        assert stored.shape == (4, 8 + number % 3, 8 - number % 3)
        assert np.array_equal(stored.numpy(), np.load(root / f"{number:02d}.npy"))


def test_arrays_of_another_number_of_axes_are_refused_with_the_files(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(9):
        np.save(root / f"{number}.npy", values(number, *((4, 8) if number % 2 else (4, 2, 4))))

    with pytest.raises(SourceError, match=r"\(4, 2, 4\) in 0\.npy, float32 \(4, 8\) in 1\.npy.*\{key\}"):
        take(root, tmp_path / "c")


def test_latents_in_buckets_of_several_sizes_are_batched_by_size(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    sizes = [(8, 8)] * 8 + [(6, 10)] + [(10, 6)]
    for number in range(40):
        height, width = sizes[number % 10]
        name = f"{number:03d}_{height * 8:04d}x{width * 8:04d}_sd.npz"
        (root / f"{number:03d}.png").write_bytes(b"an image")
        np.savez(root / name, latents=values(number, 4, height, width))

    cache = take(root, tmp_path / "c", layout="sd-scripts").cache
    loader = stoker.Loader(cache, batch_size=4, batch_by="latent", shuffle=True)

    seen = [number for batch in loader for number in batch["index"].tolist()]
    assert sorted(seen) == list(range(40))
    for batch in loader:
        for number, latent in zip(batch["index"].tolist(), batch["latent"], strict=True):
            assert np.array_equal(latent.numpy(), values(number, 4, *sizes[number % 10]))


def test_a_varying_axis_0_is_a_ragged_field(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(12):
        np.save(root / f"{number}.npy", values(number, 1 + number % 4, 3))

    cache = take(root, tmp_path / "c").cache

    assert cache.schema["data"].ragged
    assert [len(cache[n]["data"]) for n in range(4)] == [1, 2, 3, 4]


def test_ragged_fields_can_be_named_where_the_first_files_are_alike(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(12):
        np.save(root / f"{number:02d}.npy", values(number, 5 if number == 7 else 4, 3))

    assert [bad.file for bad in take(root, tmp_path / "c").bad] == ["07.npy"]
    rules = source.AdoptRules(ragged={"data": (0,)})
    assert take(root, tmp_path / "c", rules=rules).bad == ()


def test_the_axes_that_a_bad_file_names_take_it_when_given(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(40):
        np.save(root / f"{number:02d}.npy", values(number, 4, 9 if number == 23 else 8, 8))
    command = ["cache", "adopt", str(root), "--out", str(tmp_path / "c"), "--name", "x", "--layout", "npy"]

    bad = run_json(*command, exit_code=4)["bad"]
    assert [one["file"] for one in bad] == ["23.npy"]
    axes = bad[0]["why"].split("(ragged ")[1].split(",")[0]
    assert run_json(*command, "--ragged", axes)["adopted"] == 40

    for wrong, says in (
        ("data:x", "'data:x'"),
        ("latent", "latent; the fields are data"),
        ("data:3", "3 axes"),
    ):
        with pytest.raises(AssertionError, match=says):  # the exit code is another, and the output says why
            run(*command, "--ragged", wrong)


def test_one_ragged_field_may_be_named_as_text(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(40):
        np.save(root / f"{number}.npy", values(number, 3 + (number == 23), 2))

    cache = stoker.adopt(root, tmp_path / "c", name="x", ragged="data", workers=0, progress=False)

    assert (len(cache), cache.schema["data"].ragged) == (40, True)
    wrong: Any
    for wrong in (5, [1], {"data": 0}):
        with pytest.raises(ConfigError, match="ragged"):
            stoker.adopt(root, tmp_path / "c", name="x", ragged=wrong)


def test_zeros_and_nan_can_be_allowed(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 4, 4)
    np.save(root / "0/00001.npy", np.zeros(4, np.float32))
    np.save(root / "0/00002.npy", np.full(4, np.nan, np.float32))

    assert [bad.file for bad in take(root, tmp_path / "c").bad] == ["0/00001.npy", "0/00002.npy"]
    allowed = take(root, tmp_path / "d", rules=source.AdoptRules(nan="allow", zeros="allow"))
    assert (allowed.bad, allowed.adopted) == ((), 4)


@pytest.mark.parametrize("option", ["nan", "zeros"])
def test_samples_can_be_allowed_after_they_were_refused_and_the_other_way_round(
    option: str, tmp_path: Path
) -> None:
    root = write_npy(tmp_path / "f", 6, 4)
    np.save(root / "0/00002.npy", np.full(4, np.inf if option == "nan" else 0.0, np.float32))
    words = ["cache", "adopt", str(root), "--out", str(tmp_path / "c"), "--name", "x"]
    allowing = [*words, f"--{option}", "allow"]

    assert [bad["file"] for bad in run_json(*words, exit_code=4)["bad"]] == ["0/00002.npy"]
    assert run_json(*allowing)["adopted"] == 6
    assert [bad["file"] for bad in run_json(*words, exit_code=4)["bad"]] == ["0/00002.npy"]
    assert run_json(*allowing)["new"] == 0


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=60, unique=True))
def test_samples_are_numbered_in_natural_order_of_their_keys(numbers: list[int]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        root, folder = Path(place, "f"), Path(place, "list")
        root.mkdir()
        folder.mkdir()
        for number in numbers:
            (root / f"s{number}.npy").touch()
        listing = make_listing(root, LAYOUTS["npy"], folder, "x")

        assert list(listing.keys()) == [f"s{number}" for number in sorted(numbers)]
        listing.close()


@given(st.from_regex(r"[a-z][a-z0-9.]{0,8}(/[a-z0-9.]{1,8})?", fullmatch=True), st.integers(-999, 999))
def test_a_pattern_finds_the_key_that_it_was_made_with(key: str, label: int) -> None:
    role = layout_of_pattern("x-{key}_{label:int}.npz").roles[0]

    match = role.match(f"x-{key}_{label}.npz")

    assert match is not None
    assert (match["key"], int(match["label"])) == (key, label)


# ----------------------------------------------------------------------------------------------------------
# The command.


def test_the_command_prints_bad_files_and_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = write_npy(tmp_path / "f", 6, 4)
    (root / "0/00002.npy").write_bytes(b"")
    words = ["cache", "adopt", "f", "--out", "caches", "--name", "x", "--layout", "npy"]

    report = run_json(*words, exit_code=4)
    text, _ = run(*words, "--allow-bad")
    shown = run_json("cache", "show", report["path"])

    assert report["bad"] == [{"file": "0/00002.npy", "why": "empty, 0 bytes", "number": 2}]
    assert (report["adopted"], report["count"], report["layout"]) == (5, 6, "npy")
    assert "5 of 6 adopted (0 new), 1 file bad" in text
    assert "0/00002.npy: empty, 0 bytes" in text
    assert shown["records"] == 5


def test_a_command_that_adopts_nothing_does_not_say_that_the_cache_serves(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    for number in range(3):
        np.save(root / f"{number}.npy", np.full(4, np.nan, np.float32))
    words = ["cache", "adopt", str(root), "--out", str(tmp_path / "c"), "--name", "x"]

    text, _ = run(*words, exit_code=4)

    assert "open_cache" not in text
    assert all(option in text for option in ("--ragged", "--nan", "--zeros"))
    with pytest.raises(IncompleteError) as error:
        stoker.adopt(root, tmp_path / "c", name="x", workers=0, progress=False)
    assert "allow_bad" not in error.value.hint


def test_the_error_of_the_function_names_the_files(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "f", 6, 4)
    (root / "0/00002.npy").write_bytes(b"")

    with pytest.raises(IncompleteError, match=r"0/00002\.npy: empty, 0 bytes.*allow_bad"):
        stoker.adopt(root, tmp_path / "c", name="x", layout="npy", workers=0, progress=False)
    cache = stoker.adopt(
        root, tmp_path / "c", name="x", layout="npy", workers=0, progress=False, allow_bad=True
    )

    assert (len(cache), cache.quarantined[2].number) == (5, 2)


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """The list of 20,000 files takes no more of this process than that of 2,000."""
    grown = []
    for count in (2_000, 20_000):
        root = tmp_path / f"f{count}"
        for number in range(count):
            if number % 1000 == 0:
                (root / f"{number // 1000:02d}").mkdir(parents=True)
            (root / f"{number // 1000:02d}/{'long' * 20}{number}.npy").touch()
        (tmp_path / "list").mkdir(exist_ok=True)
        code = f"""
import resource, pathlib
from stoker.extras.adopt.layouts import LAYOUTS
from stoker.extras.adopt.listing import make_listing
root, folder = pathlib.Path({str(root)!r}), pathlib.Path({str(tmp_path / "list")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
listing = make_listing(root, LAYOUTS["npy"], folder, "x{count}")
assert sum(1 for _ in listing.keys()) == {count}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        grown.append(int(done.stdout))

    assert grown[1] < grown[0] + 8_000, "KiB"


def test_an_error_that_passes_makes_no_other_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_npy(tmp_path / "f", 5, 4)
    first = take(root, tmp_path / "first")
    digested, failed = digest.digest_file, set[str]()

    def fails_once(ref: Any, *, sampled: bool) -> Any:
        if ref.name not in failed:
            failed.add(ref.name)
            raise SourceError("cannot be read") from OSError(errno.EIO, "Input/output error")
        return digested(ref, sampled=sampled)

    monkeypatch.setattr(digest, "digest_file", fails_once)
    second = take(root, tmp_path / "second")

    assert len(failed) == 5
    assert second.fingerprint == first.fingerprint
