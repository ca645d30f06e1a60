"""Data that grows: no sample changes its split, and what was encoded stays."""

from pathlib import Path

import h5py
import numpy as np

import stoker
from stoker.precompute import PrecomputeSettings, run_precompute

SPLITS = {"train": 0.6, "val": 0.4}
QUIET = PrecomputeSettings(readers=0, progress=None)


def add(folder: Path, name: str, rows: int) -> None:
    with h5py.File(folder / f"{name}.h5", "w") as file:
        file["u"] = np.random.default_rng(rows).normal(size=(rows, 4)).astype("float32")


def sources(path: object) -> dict[str, stoker.HDF5Source]:
    fields = {"u": "n c"}
    return {s: stoker.HDF5Source(path, fields=fields, split=s, splits=SPLITS) for s in SPLITS}  # type: ignore[arg-type]


def assigned(path: object) -> dict[str, str]:
    return {key: split for split, source in sources(path).items() for key in source.keys()}  # noqa: SIM118 - a source is no mapping


def test_added_files_move_no_sample_and_encode_only_themselves(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    before: dict[str, str] = {}
    for count in (1, 2, 5):
        for n in range(count):
            if not (data / f"part-{n}.h5").exists():
                add(data, f"part-{n}", 20)
        now = assigned(data)
        assert before.items() <= now.items()
        for split, source in sources(data).items():
            report = run_precompute(source, None, tmp_path / "c", name=split, settings=QUIET)
            old = sum(found == split for found in before.values())
            assert (report.adopted, report.encoded) == (old, len(source) - old)
        before = now


def test_rows_added_to_a_file_move_no_row(tmp_path: Path) -> None:
    add(tmp_path, "u", 50)
    before = assigned(tmp_path)
    add(tmp_path, "u", 100)
    assert before.items() <= assigned(tmp_path).items()


def test_a_file_of_another_folder_moves_no_sample(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        add(tmp_path / name, name, 30)
    first, second = tmp_path / "one/one.h5", tmp_path / "two/two.h5"
    assert assigned([first]).items() <= assigned([first, second]).items()
