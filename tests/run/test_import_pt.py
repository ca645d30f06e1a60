"""Earlier caches of `.pt` files become shards; nothing in such a file runs, hangs or fills memory."""

from __future__ import annotations

import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.errors import ConfigError, SourceError
from stoker.extras.import_pt import run
from stoker.extras.import_pt.run import ImportSettings, PtReader, RefusedFileError, import_pt
from stoker.loader import Loader, Windows
from stoker.run.precompute import repair_cache
from stoker.runtime.processes.child import TORCH, Child
from stoker.units import MIB

STEPS, TOKENS, WIDTH = 9, 4, 8
READER = (*TORCH, "stoker.extras.import_pt.run")


@pytest.fixture(autouse=True)
def loaded_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers find their module imported, which takes a second each; the tests of what they import do not."""
    monkeypatch.setattr(run, "Child", partial(Child, modules=READER))


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


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def test_records_are_what_the_files_hold_and_serve_as_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Child", Child)
    old = make_old(tmp_path / "old", bc={"left": torch.ones(STEPS, 2), "kind": "periodic"})

    result = import_pt(old, tmp_path / "new", name="burgers1d_train")

    cache = result.cache
    assert (len(cache), cache.complete, result.imported, result.failures) == (5, True, 5, [])
    assert cache.recipe.entries["source"]["kind"] == "import-pt/1"
    assert result.left_out == {"bc_kind": 5}
    for number in range(5):
        expected: dict[str, Tensor] = sample(number)
        assert torch.equal(cache[number]["latent"], expected["latent"])
        assert cache[number]["param_nu"] == pytest.approx(number / 10)
    batch = next(iter(Loader(cache, batch_size=6, windows=Windows(), shuffle=False)))
    assert batch.z0.shape == (6, TOKENS, WIDTH)
    assert {name: tuple(value.shape) for name, value in batch.cond.items()} == {
        "bc_left": (6, 2), "param_force": (6, 3), "param_nu": (6, 1),
    }  # fmt: skip


def test_importing_twice_does_nothing_the_second_time(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old")
    first = import_pt(old, tmp_path / "new", name="x", settings=ImportSettings(dtype="bfloat16"))
    before = {p: p.stat().st_mtime_ns for p in first.cache.path.iterdir()}

    again = import_pt(old, tmp_path / "new", name="x", settings=ImportSettings(dtype="bfloat16"))

    assert (again.imported, again.reused) == (0, 5)
    assert {p: p.stat().st_mtime_ns for p in first.cache.path.iterdir()} == before
    assert again.cache.schema["latent"].dtype == "bfloat16"


def test_an_import_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_old(tmp_path / "old")
    read = PtReader.read

    def interrupted(self: PtReader, path: Path) -> Any:
        if path.name == "sample_00003.pt":
            raise KeyboardInterrupt
        return read(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(PtReader, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_pt(old, tmp_path / "new", name="x")

    result = import_pt(old, tmp_path / "new", name="x")

    assert (result.imported, result.reused, len(result.cache)) == (2, 3, 5)


def test_other_bytes_make_another_cache(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old")
    first = import_pt(old, tmp_path / "new", name="x")
    torch.save(sample(7), old / "sample_00000.pt")

    second = import_pt(old, tmp_path / "new", name="x")

    assert second.cache.fingerprint != first.cache.fingerprint
    assert second.imported == 5


def test_a_second_cache_of_a_name_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stoker")
    old = make_old(tmp_path / "old", [0, 2])
    first = import_pt(old, tmp_path / "new", name="x")
    import_pt(old, tmp_path / "new", name="x")
    assert "another cache" not in caplog.text

    torch.save(sample(1), old / "sample_00001.pt")
    second = import_pt(old, tmp_path / "new", name="x")
    import_pt(old, tmp_path / "new", name="x")

    (said,) = [text for text in caplog.messages if "another cache" in text]
    assert first.cache.fingerprint in said
    assert second.cache.fingerprint in said
    assert f"stoker cache gc {tmp_path / 'new'} --keep 1" in said


def test_missing_and_broken_samples_are_listed_by_name(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11])
    ran = tmp_path / "ran"
    (old / "sample_00001.pt").write_bytes(b"")
    (old / "sample_00002.pt").write_bytes((old / "sample_00002.pt").read_bytes()[:-200])
    torch.save({"latent": Evil(ran)}, old / "sample_00003.pt")
    (old / "sample_00005.pt").unlink()
    (old / "sample_00005.pt").symlink_to(old / "sample_00000.pt")
    (old / "sample_00006.pt").unlink()
    os.mkfifo(old / "sample_00006.pt")
    torch.save(sample(7, latent=torch.zeros(3, TOKENS, WIDTH).half()), old / "sample_00007.pt")
    torch.save(
        sample(8, latent=torch.full((STEPS, TOKENS, WIDTH), torch.nan).half()), old / "sample_00008.pt"
    )
    torch.save(sample(9, latent=torch.zeros(1).half().expand(STEPS, TOKENS, WIDTH)), old / "sample_00009.pt")
    bomb(old / "sample_00010.pt")
    torch.save([1, 2], old / "sample_00011.pt")
    (old / "sample_1.pt").write_bytes(b"other")

    result = import_pt(old, tmp_path / "new", name="x", settings=ImportSettings(count=14))

    why = {failure["number"]: str(failure["error"]) for failure in result.failures}
    assert {failure["stage"] for failure in result.failures} == {"import"}
    assert result.missing == (4, 12, 13)
    assert "sample_00004.pt is missing" in why[4]
    for number, text in {
        1: "not a zip archive", 2: "zip archive", 3: "asks for posix.system", 5: "is a link", 6: "is a link",
        7: "that of the first is float16 (9, 4, 8)", 8: "NaN", 9: "storage holds fewer",
        10: "is compressed", 11: "holds a list",
    }.items():  # fmt: skip
        assert text in why[number], (number, why[number])
        assert f"sample_{number:05d}.pt" in why[number]
    assert result.ignored == 1
    assert result.cache.indices.tolist() == [0]
    assert result.cache.complete
    assert not ran.exists()
    assert result.to_json()["missing"] == [4, 12, 13]
    assert [failure["number"] for failure in result.to_json()["broken"]] == [1, 2, 3, *range(5, 12)]  # type: ignore[union-attr]


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

    result = import_pt(old, tmp_path / "new", name="x", settings=ImportSettings(file_bytes=64 * MIB))

    assert [failure["number"] for failure in result.failures] == [1]
    tiny = ImportSettings(file_bytes=(old / "sample_00000.pt").stat().st_size - 1)
    with pytest.raises(SourceError, match=r"sample_00000\.pt"):
        import_pt(old, tmp_path / "newer", name="x", settings=tiny)


def test_a_file_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = make_old(tmp_path / "old", [0]).iterdir()
    monkeypatch.setattr(run, "START_S", 0.0)
    monkeypatch.setattr(run, "Child", Child)

    with (
        PtReader(MIB, timeout_s=0.05) as reader,
        pytest.raises(RefusedFileError, match="took longer") as caught,
    ):
        reader.read(file)

    assert caught.value.transient


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
    monkeypatch.setattr(run, "Child", Child)

    assert import_pt(".", tmp_path / "new", name="x").imported == 1
    assert not (tmp_path / "ran").exists()


def test_a_record_damaged_after_the_import_is_imported_again(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old")
    cache = import_pt(old, tmp_path / "new", name="x").cache
    file = cache.path / cache.index.shards[0].file
    data = bytearray(file.read_bytes())
    data[cache.shard(0).columns["latent"].offset] ^= 1
    file.write_bytes(data)

    repaired = repair_cache(cache.path)
    again = import_pt(old, tmp_path / "new", name="x")

    assert repaired.command == f"stoker cache import-pt DIR --out {tmp_path / 'new'} --name x"
    assert (again.imported, again.reused) == (1, 4)
    assert again.cache.verify().ok
    assert torch.equal(again.cache[0]["latent"], sample(0)["latent"])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"latent": torch.zeros(STEPS, TOKENS, WIDTH, dtype=torch.complex64)}, "is complex64"),
        ({"latent": torch.zeros(TOKENS, WIDTH)}, "expected a tensor"),
        ({"latent": torch.zeros(STEPS, TOKENS, WIDTH).to_sparse()}, "expected a plain one"),
        ({"latent": torch.zeros(1).as_strided((10**6, 10**4, 100), (0, 0, 0))}, "storage holds fewer"),
        ({"more": torch.zeros(2)}, "its fields are"),
        ({f"k{i}": 0.0 for i in range(1200)}, "more than 1000 entries"),
        ({f"text{i}": "x" for i in range(1200)}, "more than 1000 entries"),
        ({"params": {"nu": torch.tensor(0.0), "x": 1}, "param_nu": torch.tensor(1.0)}, "comes twice"),
    ],
)
def test_a_sample_unlike_the_first_is_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    old = make_old(tmp_path / "old", [0])
    torch.save(sample(1, **more), old / "sample_00001.pt")

    (failure,) = import_pt(old, tmp_path / "new", name="x").failures

    assert (failure["number"], failure["stage"], failure["kind"]) == (1, "import", "sample")
    assert "sample_00001.pt" in str(failure["error"])
    assert text in str(failure["error"])


def test_a_size_that_only_the_archive_claims_is_refused(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", [0, 1])
    data = bytearray((old / "sample_00001.pt").read_bytes())
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = b"\xf0\xff\xff\xff" * 2  # 4 GiB, stored
    (old / "sample_00001.pt").write_bytes(data)

    (failure,) = import_pt(old, tmp_path / "new", name="x").failures

    assert "its entries claim 429496" in str(failure["error"])


def test_entries_as_long_as_the_latent_run_along_time(tmp_path: Path) -> None:
    old = make_old(tmp_path / "old", bc={"left": torch.ones(STEPS, 2), "kind": torch.tensor(1)})

    schema = import_pt(old, tmp_path / "new", name="x").cache.schema

    assert {name for name, field in schema.items() if field.time} == {"latent", "bc_left"}


def test_folders_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no sample_00000"):
        import_pt(tmp_path / "empty", tmp_path / "new", name="x")
    with pytest.raises(SourceError, match="cannot be read"):
        import_pt(tmp_path / "none", tmp_path / "new", name="x")
    old = make_old(tmp_path / "old", [0, 99_999])
    with pytest.raises(SourceError, match=r"2 samples for 100,000 numbers"):
        import_pt(old, tmp_path / "new", name="x")
    with pytest.raises(ConfigError, match="there is a sample 99999"):
        import_pt(old, tmp_path / "new", name="x", settings=ImportSettings(count=5))
    assert not (tmp_path / "new").exists()
