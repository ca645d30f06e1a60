"""Each layout is recognized, its fields have standard names, and all planted damage is found by file name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from stoker.extras.adopt import pt
from stoker.extras.adopt.run import AdoptResult, AdoptSettings, run_adopt
from stoker.runtime.processes.child import TORCH, Child
from tests.adopt.writers import WRITERS, Written, nan, narrow, values, zeros

COUNT = 14
READER = (*TORCH, "stoker.extras.adopt.pt")


@pytest.fixture(autouse=True)
def loaded_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads `.pt` finds its module imported, which takes a second each."""
    monkeypatch.setattr(pt, "Child", partial(Child, modules=READER))


def take(written: Written, tmp_path: Path, **settings: Any) -> AdoptResult:
    """Adopt in this process."""
    chosen = AdoptSettings(workers=0, progress=None, **settings)
    return run_adopt(written.root, tmp_path / "caches", name="x", settings=chosen)


@pytest.mark.parametrize("case", WRITERS)
def test_a_layout_is_recognized_and_its_records_are_what_the_files_hold(case: str, tmp_path: Path) -> None:
    write, layout = WRITERS[case]
    written = write(tmp_path / "features", COUNT, {})

    result = take(written, tmp_path)

    assert (result.layout, result.bad, result.adopted) == (layout, (), COUNT)
    assert result.why
    assert {*result.cache.schema} == written.fields
    for number, record in enumerate(written.records):
        assert np.array_equal(result.cache[number][written.main].float().numpy(), record.astype(np.float32))


@pytest.mark.parametrize("case", WRITERS)
def test_keys_are_relative_names_without_what_the_layout_adds(case: str, tmp_path: Path) -> None:
    write, _ = WRITERS[case]
    written = write(tmp_path / "features", COUNT, {})

    source = take(written, tmp_path).cache.filler.source

    assert list(source.keys()) == written.keys
    assert source.keys()[3] == written.keys[3]


@pytest.mark.parametrize("case", WRITERS)
def test_all_planted_damage_is_found_by_name_and_nothing_else(case: str, tmp_path: Path) -> None:
    write, _ = WRITERS[case]
    change: dict[int, Any] = {3: nan, 5: zeros}
    if case not in ("lightningdit", "lola", "lmdb", "parquet"):  # whose rows have one shape
        change[7] = narrow
    written = write(tmp_path / "features", COUNT, change)
    order = [*written.more.get("order", range(COUNT))]
    bad = {number: written.files[place] for place, number in enumerate(order)}
    words = {3: "NaN", 5: "zeros", 7: "most are"}
    expected = {(bad[number], words[number]) for number in change}
    lost = len(change)
    root = written.root
    if written.whole_files:
        cut = root / bad[9]
        cut.write_bytes(cut.read_bytes()[:-30])
        (root / bad[11]).write_bytes(b"")
        expected |= {(bad[9], ""), (bad[11], "empty")}
        lost += 2
    if written.partner is not None:
        (root / written.partner(0)).unlink()
        expected.add((written.files[0], "has no"))
        (root / bad[12]).unlink()
        expected.add((written.partner(order.index(12)), "has no"))
        lost += 2
    if written.again is not None:
        copy = root / written.again(1)
        copy.write_bytes((root / written.files[1]).read_bytes())
        expected |= {(written.files[1], "same key"), (written.again(1), "same key")}
        lost += 1

    result = take(written, tmp_path)

    found = [(bad.file, bad.why) for bad in result.bad]
    assert len(found) == len(expected), found
    for file, word in expected:
        assert any(name == file and word in why for name, why in found), (file, word, found)
    without_sample = sum(bad.number is None for bad in result.bad)
    assert result.adopted == result.count - lost + without_sample
    sound = result.cache.indices.tolist()
    assert np.array_equal(
        result.cache[sound[-1]][written.main].float().numpy(), written.records[-1].astype(np.float32)
    )


def test_a_row_that_a_killed_job_did_not_write_is_found(tmp_path: Path) -> None:
    def half(array: Any) -> Any:
        array = array.copy()
        array[4:] = 0
        return array

    write, _ = WRITERS["lola"]
    (bad,) = take(write(tmp_path / "l", COUNT, {6: half}), tmp_path).bad

    assert (bad.file, bad.number) == ("run_1.h5", 6)
    assert "zeros in 2 of 6 rows, the first is 4" in bad.why


def test_latents_of_an_image_and_the_image_share_a_key_and_an_image_without_them_is_named(
    tmp_path: Path,
) -> None:
    written = WRITERS["sd-scripts"][0](tmp_path / "f", 4, {})
    (written.root / "a/new.png").write_bytes(b"png")

    result = take(written, tmp_path)

    assert [bad.file for bad in result.bad] == ["a/new.png"] * 2
    assert {bad.why.partition(":")[0] for bad in result.bad} == {"has no latents", "has no text"}
    assert result.cache.filler.source.keys()[0] == "a/000"


def test_bags_that_clam_wrote_twice_are_adopted_with_the_places_of_their_patches(tmp_path: Path) -> None:
    for folder in ("h5_files", "pt_files"):
        (tmp_path / "f" / folder).mkdir(parents=True)
    for number in range(6):
        features = values(number, 50 + number, 8)
        with h5py.File(tmp_path / f"f/h5_files/slide_{number}.h5", "w") as file:
            file["features"], file["coords"] = features, np.arange(100 + 2 * number).reshape(-1, 2)
        torch.save(torch.from_numpy(features), tmp_path / f"f/pt_files/slide_{number}.pt")

    settings = AdoptSettings(workers=0, progress=None)
    result = run_adopt(tmp_path / "f", tmp_path / "c", name="x", settings=settings)

    assert (result.layout, result.adopted, result.ignored) == ("bags", 6, 6)
    assert {*result.cache.schema} == {"features", "coords"}
    assert result.cache.keys()[0] == "slide_0"


def test_windows_of_a_video_share_the_output_of_the_text_encoder(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    root = tmp_path / "f"
    root.mkdir()
    for clip in ("a", "b"):
        for window in range(3):
            latent = torch.randn(4, 5, 2, 2)
            save_file(
                {"latents_5x2x2_bfloat16": latent}, root / f"{clip}_{window:05d}-017_0016x0016_hv.safetensors"
            )
    save_file({"varlen_t5_bfloat16": torch.randn(3, 4)}, root / "a_hv_te.safetensors")
    save_file({"varlen_t5_bfloat16": torch.randn(3, 4)}, root / "c_hv_te.safetensors")

    result = run_adopt(root, tmp_path / "caches", name="x", settings=AdoptSettings(workers=0, progress=None))

    assert result.layout == "musubi-tuner"
    assert list(result.cache.filler.source.keys())[:2] == ["a_00000-017", "a_00001-017"]
    assert result.adopted == 3
    assert torch.equal(result.cache[0]["hidden"], result.cache[2]["hidden"])
    assert sorted(bad.file for bad in result.bad)[-1] == "c_hv_te.safetensors"
    assert sum("has no text" in bad.why for bad in result.bad) == 3
