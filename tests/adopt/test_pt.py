"""Folders of `.pt` files become caches; nothing in such a file runs, hangs or fills memory."""

from __future__ import annotations

import os
import signal
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.errors import SourceError
from stoker.extras.adopt import pt
from stoker.extras.adopt.pt import PtReader, RefusedFileError
from stoker.extras.adopt.run import AdoptResult, AdoptSettings, run_adopt
from stoker.loader import Loader, Windows
from stoker.run.precompute import repair_cache
from stoker.runtime.processes.child import TORCH, Child
from stoker.units import MIB

STEPS, TOKENS, WIDTH = 9, 4, 8
READER = (*TORCH, "stoker.extras.adopt.pt")


@pytest.fixture(autouse=True)
def loaded_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers find their module imported, which takes a second each; the tests of what they import do not."""
    monkeypatch.setattr(pt, "Child", partial(Child, modules=READER))


def sample(number: int, **more: Any) -> dict[str, Any]:
    """What the earlier precompute saved for one sample."""
    latent = torch.from_numpy(np.random.default_rng(number).standard_normal((STEPS, TOKENS, WIDTH)))
    return {
        "latent": latent.to(torch.float16),
        "params": {"nu": torch.tensor(number / 10), "force": torch.arange(3.0)},
        "bc": None,
        **more,
    }


def make_old(folder: Path, numbers: range | list[int] = range(5), **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        torch.save(sample(number, **more), folder / f"sample_{number:05d}.pt")
    return folder


def take(old: Path | str, out: Path, **settings: Any) -> AdoptResult:
    chosen = AdoptSettings(**{"layout": "sample-pt", "workers": 0, "progress": None, **settings})
    return run_adopt(old, out, name="burgers1d_train", settings=chosen)


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def test_records_are_what_the_files_hold_and_serve_as_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pt, "Child", Child)
    old = make_old(tmp_path / "old", bc={"left": torch.ones(STEPS, 2), "kind": "periodic"})

    result = take(old, tmp_path / "new")

    cache = result.cache
    assert (len(cache), cache.complete, result.new, result.bad) == (5, True, 5, ())
    assert {*result.left_out} == {"bc_kind"}
    for number in range(5):
        expected: dict[str, Tensor] = sample(number)
        assert torch.equal(cache[number]["latent"], expected["latent"])
        assert cache[number]["param_nu"] == pytest.approx(number / 10)
    batch = next(iter(Loader(cache, batch_size=6, windows=Windows(), shuffle=False)))
    assert batch.z0.shape == (6, TOKENS, WIDTH)
    assert {name: tuple(value.shape) for name, value in batch.cond.items()} == {
        "bc_left": (6, 2), "param_force": (6, 3), "param_nu": (6, 1),
    }  # fmt: skip


def test_missing_and_broken_samples_are_listed_by_name(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, *range(14, 34)])
    ran = tmp_path / "ran"
    (old / "sample_00001.pt").write_bytes(b"")
    (old / "sample_00002.pt").write_bytes((old / "sample_00002.pt").read_bytes()[:-200])
    torch.save({"latent": Evil(ran)}, old / "sample_00003.pt")
    (old / "sample_00005.pt").unlink()
    (old / "sample_00005.pt").symlink_to(old / "nowhere")
    (old / "sample_00006.pt").unlink()
    os.mkfifo(old / "sample_00006.pt")
    torch.save(sample(7, latent=torch.ones(3, TOKENS, WIDTH).half()), old / "sample_00007.pt")
    torch.save(
        sample(8, latent=torch.full((STEPS, TOKENS, WIDTH), torch.nan).half()), old / "sample_00008.pt"
    )
    torch.save(sample(9, latent=torch.zeros(1).half().expand(STEPS, TOKENS, WIDTH)), old / "sample_00009.pt")
    bomb(old / "sample_00010.pt")
    torch.save([1, 2], old / "sample_00011.pt")
    (old / "sample_1.pt").write_bytes(b"other")

    result = take(old, tmp_path / "new", count=36)

    why = {bad.file: bad.why for bad in result.bad}
    expected = {
        1: "empty", 2: "zip archive", 3: "asks for posix.system", 4: "is missing", 5: "link", 6: "pipe",
        7: "float16 (3, 4, 8), most are float16 (9, 4, 8)", 8: "NaN", 9: "storage holds fewer",
        10: "is compressed", 11: "its 'latent' is None", 12: "is missing", 13: "is missing",
        34: "is missing", 35: "is missing",
    }  # fmt: skip
    assert why.keys() == {f"sample_{number:05d}.pt" for number in expected}
    for number, text in expected.items():
        assert text in why[f"sample_{number:05d}.pt"], (number, why)
    assert result.ignored == 1
    assert result.cache.indices.tolist() == [0, *range(14, 34)]
    assert result.cache.complete
    assert not ran.exists()


def bomb(path: Path) -> None:
    """A small archive whose entries would unpack to 64 MiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(64 * MIB))


def test_a_file_that_claims_huge_entries_or_sizes_is_refused(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", [0, 1])
    # A tensor over a storage that the archive does not have: torch.save of a view keeps the whole storage,
    # so the sizes in the pickle are changed by hand.
    data = (old / "sample_00001.pt").read_bytes()
    (old / "sample_00001.pt").write_bytes(
        data.replace(b"K\tK\x04K\x08\x87", b"J\xff\xff\xff\x0fK\x04\x86\x86"[:8])
    )

    assert [bad.file for bad in take(old, tmp_path / "new").bad] == ["sample_00001.pt"]
    with PtReader(100) as reader, pytest.raises(RefusedFileError, match="100 are allowed"):
        reader.read(old / "sample_00000.pt")


def test_a_file_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    (file,) = make_old(tmp_path / "old", [0]).iterdir()

    with PtReader(MIB, timeout_s=0.5) as reader:
        reader.read(file)
        assert reader._child is not None
        os.kill(reader._child.pid, signal.SIGSTOP)
        with pytest.raises(RefusedFileError, match="took longer") as caught:
            reader.read(file)
        again = reader.read(file)

    assert caught.value.transient
    assert torch.equal(again.tensors["latent"], sample(0)["latent"])


def test_the_reader_goes_on_after_its_process_was_killed(tmp_path: Path) -> None:
    files = sorted(make_old(tmp_path / "old", [0, 1]).iterdir())

    with PtReader(MIB) as reader:
        reader.read(files[0])
        child = reader._child
        assert child is not None
        child.kill()
        child.wait(10)
        with pytest.raises(RefusedFileError, match="SIGKILL"):
            reader.read(files[0])
        assert torch.equal(reader.read(files[1]).tensors["latent"], sample(1)["latent"])


def test_the_reading_process_is_limited(tmp_path: Path) -> None:
    (file,) = make_old(tmp_path / "old", [0]).iterdir()

    with PtReader(MIB) as reader:
        reader.read(file)
        assert reader._child is not None
        limits = Path(f"/proc/{reader._child.pid}/limits").read_text().splitlines()

    found = {line[:26].strip(): line[26:].split()[0] for line in limits[1:]}
    assert int(found["Max address space"]) < 1 << 40
    assert int(found["Max cpu time"]) < 200
    assert (found["Max file size"], found["Max core file size"]) == ("0", "0")


def test_modules_in_the_working_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive unpacked there may bring its own `torch.py`."""
    old = make_old(tmp_path / "old", [0])
    for name in ("torch", "safetensors", "json", "stoker"):
        (old / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(old)
    monkeypatch.setattr(pt, "Child", Child)

    assert take(".", tmp_path / "new").new == 1
    assert not (tmp_path / "ran").exists()


def test_a_record_damaged_after_it_was_stored_is_adopted_again(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old")
    cache = take(old, tmp_path / "new").cache
    file = cache.path / cache.index.shards[0].file
    data = bytearray(file.read_bytes())
    data[cache.shard(0).columns["latent"].offset] ^= 1
    file.write_bytes(data)

    repaired = repair_cache(cache.path)
    again = take(old, tmp_path / "new")

    assert repaired.command == f"stoker cache adopt FOLDER --out {tmp_path / 'new'} --name burgers1d_train"
    assert (again.new, again.adopted) == (1, 5)
    assert again.cache.verify().ok
    assert torch.equal(again.cache[0]["latent"], sample(0)["latent"])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"latent": torch.ones(STEPS, TOKENS, WIDTH, dtype=torch.complex64)}, "C64"),
        ({"latent": torch.ones(TOKENS, WIDTH)}, "expected a tensor"),
        ({"latent": torch.ones(STEPS, TOKENS, WIDTH).to_sparse()}, "expected a plain one"),
        ({"latent": torch.ones(1).as_strided((10**6, 10**4, 100), (0, 0, 0))}, "storage holds fewer"),
        ({"more": torch.ones(2)}, "has also more"),
        ({f"k{i}": 0.0 for i in range(1200)}, "more than 1000 entries"),
        ({f"text{i}": "x" for i in range(1200)}, "more than 1000 entries"),
        ({"params": {"nu": torch.tensor(0.0), "x": 1}, "param_nu": torch.tensor(1.0)}, "comes twice"),
    ],
)
def test_a_sample_unlike_the_others_is_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    old = make_old(tmp_path / "old", range(5))
    torch.save(sample(5, **more), old / "sample_00005.pt")

    (bad,) = take(old, tmp_path / "new").bad

    assert (bad.file, bad.number) == ("sample_00005.pt", 5)
    assert text in bad.why


def test_views_that_are_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    (file,) = make_old(tmp_path / "old", [0]).iterdir()
    base = torch.ones(4096)
    torch.save({f"view{number}": base for number in range(50)}, file)

    with PtReader(MIB) as reader, pytest.raises(RefusedFileError, match="views of less"):
        reader.read(file)


def test_dicts_within_one_another_without_end_are_refused(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", range(3))
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"a": deep, "b": torch.ones(1)}
    torch.save(sample(3, more=deep), old / "sample_00003.pt")

    (bad,) = take(old, tmp_path / "new").bad

    assert (bad.file, "too deep" in bad.why) == ("sample_00003.pt", True)


def test_a_size_that_only_the_archive_claims_is_refused(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", [0, 1])
    data = bytearray((old / "sample_00001.pt").read_bytes())
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = b"\xf0\xff\xff\xff" * 2  # 4 GiB, stored
    (old / "sample_00001.pt").write_bytes(data)

    (bad,) = take(old, tmp_path / "new").bad

    assert "its entries claim 429496" in bad.why


def test_entries_as_long_as_the_latent_run_along_time(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", bc={"left": torch.ones(STEPS, 2), "kind": torch.tensor(1)})

    schema = take(old, tmp_path / "new").cache.schema

    assert {name for name, field in schema.items() if field.time} == {"latent", "bc_left"}


def test_folders_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no file of the layout sample-pt"):
        take(tmp_path / "empty", tmp_path / "new")
    old = make_old(tmp_path / "old", [0, 99_999])
    with pytest.raises(SourceError, match="sample_99999 follows after 99,998 missing numbers"):
        take(old, tmp_path / "new")
    with pytest.raises(SourceError, match="there is a sample 3, and count is 3"):
        take(make_old(tmp_path / "few"), tmp_path / "new", count=3)
    assert not (tmp_path / "new/burgers1d_train").exists()


def test_a_member_of_a_tar_file_is_read_where_it_is(tmp_path: Path) -> None:
    import tarfile

    old = make_old(tmp_path / "old", [0, 1])
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for number in range(2):
            archive.add(old / f"sample_{number:05d}.pt", f"{number:04d}.pt")

    result = take(tmp_path / "all.tar", tmp_path / "new", layout="auto")

    assert (result.layout, result.adopted) == ("webdataset", 2)
    assert torch.equal(result.cache[1]["latent"], sample(1)["latent"])
