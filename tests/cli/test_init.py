"""`stoker init`: from data to a configuration that runs as it was written."""

from __future__ import annotations

import json
import sqlite3
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from stoker.config import load_config
from stoker.config.load import EXAMPLES
from stoker.run.look import look
from tests.cli.commands import run, run_json
from tests.conftest import write_burgers

FAST = (
    "training.epochs=1", "training.num_workers=0", "training.device=cpu", "model.width=16", "model.depth=1",
    "model.heads=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pdebench(folder: Path) -> str:
    return str(write_burgers(folder / "burgers.h5", samples=24))


def unknown(folder: Path) -> str:
    with h5py.File(folder / "mine.h5", "w") as file:
        file["velocity"] = np.random.default_rng(0).normal(size=(24, 9, 32)).astype("f4")
        file["nu"] = np.linspace(0, 1, 24, dtype="f4")
    return "mine.h5"


def images(folder: Path, *, classes: bool = True) -> str:
    for number in range(20):
        place = folder / "images" / ("cat" if number % 2 else "dog" if classes else "cat")
        place = place if classes else folder / "images"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number, 0, 0)).save(place / f"{number}.jpg")
    return "images"


def rows(folder: Path) -> str:
    with sqlite3.connect(folder / "rows.db") as connection:
        connection.execute("CREATE TABLE few (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE many (id INTEGER PRIMARY KEY, power REAL, name TEXT, kind INT)")
        connection.executemany(
            "INSERT INTO many VALUES (?, ?, ?, ?)", [(i, i / 2, "x", i % 3) for i in range(60)]
        )
    return "sqlite:///rows.db"


def dataset(folder: Path) -> str:
    (folder / "mine_of_init.py").write_text(
        "import torch\n"
        "class Items(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 40\n"
        "    def __getitem__(self, i):\n        return {'x': torch.full((3,), float(i)), 'y': i % 2}\n"
    )
    return "mine_of_init:Items"


def parquet(folder: Path) -> str:
    pq.write_table(pa.table({"a": np.arange(40.0), "b": np.arange(40)}), folder / "rows.parquet")
    return "rows.parquet"


def tar(folder: Path) -> str:
    with tarfile.open(folder / "set.tar", "w") as archive:
        for number in range(24):
            path = folder / f"{number:03}.npy"
            np.save(path, np.full(4, number, "f4"))
            archive.add(path, path.name)
            path.unlink()
    return "set.tar"


def arrays(folder: Path) -> str:
    np.save(folder / "grid.npy", np.zeros((24, 8), "f4"))
    return "grid.npy"


OTHERS = [images, rows, dataset, parquet, tar, arrays]


def explained(path: Path) -> dict[str, Any]:
    """The settings of a file in which every setting has a comment."""
    text = path.read_text()
    for line in text.splitlines():
        assert not line or line.lstrip().startswith("#") or line.endswith(":") or "  # " in line, line
    return yaml.safe_load(text)


@pytest.mark.parametrize("make", [pdebench, unknown])
def test_train_runs_on_what_init_wrote_for_simulations(folder: Path, make: Any) -> None:
    found = run_json("init", make(folder))
    explained(folder / "stoker.yaml")

    report = run_json("train", "stoker.yaml", *FAST)

    assert found["trains"] is True
    assert found["samples"] == 24
    assert report["epochs"] == 1
    assert Path(".stoker").is_dir()


@pytest.mark.parametrize("make", OTHERS)
def test_precompute_runs_on_what_init_wrote_for_other_data(
    folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    found = run_json("init", make(folder))
    explained(folder / "stoker.yaml")

    caches = run_json("precompute", "stoker.yaml", "training.num_workers=0")["caches"]

    assert found["trains"] is (make not in (tar, arrays))  # which have a single field
    assert {cache["name"].rpartition("_")[2] for cache in caches} == {"train", "val"}
    assert all(cache["records"] > 0 for cache in caches)
    sys.modules.pop("mine_of_init", None)


@pytest.mark.parametrize(
    ("make", "target"), [(images, "label"), (rows, "kind"), (dataset, "y"), (parquet, "b")]
)
def test_train_runs_on_what_init_wrote_for_records(
    folder: Path, make: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    run("init", make(folder))
    marked = "GUESSED" in next(
        line for line in (folder / "stoker.yaml").read_text().splitlines() if "target:" in line
    )

    report = run_json("train", "stoker.yaml", *FAST)

    assert marked is (target not in ("label", "y"))
    assert (report["target"], report["epochs"]) == (target, 1)
    assert (report["accuracy"] is None) is (report["val_nrmse"] is not None)
    sys.modules.pop("mine_of_init", None)


def test_a_pattern_stands_for_its_files(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "raw").mkdir(exist_ok=True)
        write_burgers(folder / "raw" / f"{name}.h5", samples=12)

    found = run_json("init", "raw/*.h5")
    report = run_json("train", "stoker.yaml", *FAST)

    assert (found["samples"], found["settings"]["data.files"]) == (24, "raw/*.h5")
    assert found["settings"]["data.task"] == "raw"
    assert report["epochs"] == 1


def test_files_that_a_shell_made_of_a_pattern_are_refused_with_the_pattern(folder: Path) -> None:
    assert "stoker init 'raw/*.h5'" in run("init", "raw/a.h5", "raw/b.h5", exit_code=3)[1]


def test_images_without_labels_have_nothing_to_predict(folder: Path) -> None:
    found = run_json("init", images(folder, classes=False))

    assert found["trains"] is False
    assert "training.target" not in found["settings"]


def test_the_next_command_is_named(folder: Path) -> None:
    assert "stoker train stoker.yaml" in run("init", pdebench(folder))[1]
    assert "stoker train rows.yaml" in run("init", rows(folder), "--out", "rows.yaml")[1]
    assert "stoker precompute other.yaml" in run("init", tar(folder), "--out", "other.yaml")[1]


def test_what_does_not_follow_from_the_data_is_marked_as_a_guess(folder: Path) -> None:
    found = run_json("init", unknown(folder))
    text = (folder / "stoker.yaml").read_text()

    assert "GUESSED" in next(line for line in text.splitlines() if line.lstrip().startswith("fields:"))
    assert any("velocity: n t x" in question for question in found["questions"])
    run("init", pdebench(folder), "--force")
    assert "GUESSED" not in (folder / "stoker.yaml").read_text()


def test_labels_are_seen(folder: Path) -> None:
    images(folder / "plain", classes=False)

    assert look(images(folder)).settings["data.images.annotations"] == "folder"
    assert look("plain/images").settings["data.images.annotations"] is None


def test_the_largest_table_is_taken_and_what_is_left_out_is_said(folder: Path) -> None:
    found = look(rows(folder))

    assert found.settings["data.sql.table"] == "many"
    assert found.settings["data.sql.columns"] == ["power", "kind"]
    assert any("not numbers: name" in question for question in found.questions)


def test_few_samples_are_split_so_that_some_are_left_to_validate(folder: Path) -> None:
    run("init", str(write_burgers(folder / "few.h5", samples=5)))

    assert run_json("precompute", "stoker.yaml", *FAST)["caches"][1]["records"] >= 1


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nowhere.h5", "does not exist"),
        ("notes.txt", "found .txt"),
        ("empty", "found nothing"),
        ("sqlite:///nowhere.db", "nowhere.db is not a file"),
        ("sqlite:///notes.txt", "cannot be read as SQLite"),
        ("nowhere_of_init:Items", "nowhere_of_init"),
    ],
)
def test_what_is_no_data_is_said(folder: Path, what: str, said: str) -> None:
    Path("empty").mkdir()
    Path("notes.txt").write_text("some text, long enough to be no database at all" * 20)

    told = run_json("init", what, exit_code=3)

    assert said in told["error"]
    assert told["hint"]
    assert not Path("stoker.yaml").exists()


@pytest.mark.parametrize("name", ["bad.h5", "empty.h5"])
def test_a_broken_hdf5_file_is_no_bug_of_ours(folder: Path, name: str) -> None:
    Path(name).write_text("no HDF5" if name == "bad.h5" else "")

    told = run_json("init", name, exit_code=3)

    assert name in told["fact"]
    assert "report it" not in told["error"]


def test_a_broken_image_is_named_and_the_others_are_used(folder: Path) -> None:
    images(folder)
    Path("images/cat/0broken.jpg").write_text("")

    assert any("cannot be read" in fact for fact in run_json("init", "images")["facts"])


def test_files_of_the_kind_that_most_are_of_are_looked_at(folder: Path) -> None:
    Path("mixed").mkdir()
    write_burgers(folder / "mixed" / "b.h5", samples=24)
    write_burgers(folder / "mixed" / "c.h5", samples=24)
    Image.new("RGB", (4, 4)).save("mixed/a.png")

    assert look("mixed").what.startswith("HDF5")


def test_folders_of_splits_are_no_classes(folder: Path) -> None:
    for split in ("train", "val"):
        images(folder / split)
        (folder / split / "images").rename(folder / f"{split}_")
        (folder / split).rmdir()
        Path("set").mkdir(exist_ok=True)
        (folder / f"{split}_").rename(folder / "set" / split)

    why = {one.name: one.why for one in look("set").proposed}

    assert why["data.images.annotations"] == "a folder for each class: cat, dog"


@pytest.mark.parametrize("name", ["run#1.db", "50%25.db", "what?mode=rwc.db"])
def test_a_database_is_found_under_any_name(folder: Path, name: str) -> None:
    rows(folder)
    Path("rows.db").rename(name)

    assert look(name).settings["data.sql.table"] == "many"


def test_a_folder_with_one_database_is_that_database(folder: Path) -> None:
    Path("place").mkdir()
    rows(folder)
    Path("rows.db").rename("place/rows.db")

    assert look("place").settings["data.sql.url"] == "sqlite:///place/rows.db"


def test_of_several_tables_the_choice_is_a_guess(folder: Path) -> None:
    found = look(rows(folder))

    assert any("few" in question for question in found.questions)
    assert next(one for one in found.proposed if one.name == "data.sql.table").guessed


def test_a_password_is_neither_shown_nor_written(folder: Path) -> None:
    told = run_json("init", "postgresql://me:SECRET@localhost:1/lab", exit_code=3)

    assert "SECRET" not in json.dumps(told)
    assert "PGPASSWORD" in told["hint"]


@pytest.mark.parametrize("what", ["", "ftp://bucket/data", "mysql://localhost/x"])
def test_what_cannot_be_read_from_there_is_said(folder: Path, what: str) -> None:
    assert "Expected" in run_json("init", what, exit_code=3)["hint"] or not what


@pytest.mark.parametrize("out", ["missing/x.yaml", "sub"])
def test_a_place_that_cannot_be_written_is_said_before_anything_is_looked_at(folder: Path, out: str) -> None:
    Path("sub").mkdir()

    assert "--out" in run_json("init", "nowhere.h5", "--out", out, exit_code=3)["hint"]


@pytest.mark.parametrize("place", ["old", "old/burgers_train"])
def test_train_runs_on_what_init_wrote_for_caches(folder: Path, place: str) -> None:
    run("init", pdebench(folder))
    stored = run_json("precompute", "stoker.yaml", "training.latent_cache_dir=old", *FAST)["caches"]
    wanted = sum(cache["records"] for cache in stored if place in f"old/{cache['name']}")

    found = run_json("init", place, "--force")
    explained(folder / "stoker.yaml")
    report = run_json("train", "stoker.yaml", *FAST)

    assert found["samples"] == wanted
    assert (found["trains"], report["epochs"]) == (True, 1)
    assert sum(cache["records"] for cache in report["caches"]) <= wanted


@pytest.mark.parametrize("inside", ["", "/burgers_train"])
def test_train_runs_on_what_init_wrote_for_caches_at_a_url(folder: Path, inside: str) -> None:
    run("init", pdebench(folder))
    stored = run_json("precompute", "stoker.yaml", "training.latent_cache_dir=old", *FAST)["caches"]
    url = f"file://{folder}/there"
    for cache in stored:
        run("cache", "push", f"old/{cache['name']}", url)

    assert run_json("data", "inspect", f"{url}{inside}")["what"] == "records of a cache"
    found = run_json("init", f"{url}{inside}", "--force")
    explained(folder / "stoker.yaml")
    report = run_json("train", "stoker.yaml", *FAST)

    assert found["settings"]["data.files"] == f"{url}{inside}"
    assert found["samples"] == sum(one["records"] for one in stored if inside in f"/{one['name']}")
    assert report["epochs"] == 1


@pytest.mark.parametrize("place", ["raw", "raw/burgers.h5", "none"])
@pytest.mark.parametrize("command", [("init",), ("data", "inspect")])
def test_a_url_without_caches_is_refused_with_what_works(
    folder: Path, command: tuple[str, ...], place: str
) -> None:
    (folder / "raw").mkdir()
    pdebench(folder / "raw")

    told = run_json(*command, f"file://{folder}/{place}", exit_code=3)

    assert f"file://{folder}/{place}" in told["error"]
    assert "stoker data fetch" in told["hint"]


def test_what_is_known_already_is_given_to_init_and_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "mine_with_text.py").write_text(
        "import torch\n"
        "class Named:\n"
        "    def __len__(self): return 30\n"
        "    def __getitem__(self, i): return {'x': torch.ones(3) * i, 'y': i % 2, 'name': str(i)}\n"
    )
    hint = run_json("init", "mine_with_text:Named", exit_code=3)["hint"]
    assert "data.torch.text={name: drop}" in hint

    found = run_json("init", "mine_with_text:Named", "data.torch.text={name: drop}", "training.epochs=2")
    written = explained(folder / "stoker.yaml")
    report = run_json("train", "stoker.yaml", "training.num_workers=0", "training.device=cpu")

    assert {*found["fields"]} == {"x", "y"}
    assert written["data"]["torch"]["text"] == {"name": "drop"}
    assert (written["training"]["epochs"], report["epochs"]) == (2, 2)
    sys.modules.pop("mine_with_text", None)


def test_axes_given_to_init_are_those_of_the_grid(folder: Path) -> None:
    with h5py.File(folder / "odd.h5", "w") as file:
        file["u"] = np.random.default_rng(0).normal(size=(24, 8, 12, 6)).astype("f4")

    found = run_json("init", "odd.h5", "data.fields={data: 'u: n t y x'}", "latent.dim=8")

    assert found["fields"]["data"].startswith("float32 (8, 12, 6, 1)")
    assert explained(folder / "stoker.yaml")["latent"]["dim"] == 8
    assert run_json("train", "stoker.yaml", *FAST)["epochs"] == 1


def test_parts_of_a_setting_given_to_init_are_written(folder: Path) -> None:
    with h5py.File(folder / "few.h5", "w") as file:
        file["u"] = np.random.default_rng(0).normal(size=(24, 8, 16)).astype("f4")

    run_json("init", "few.h5", "data.splits.train=0.75", "data.splits.val=0.25")

    assert explained(folder / "stoker.yaml")["data"]["splits"] == {"train": 0.75, "val": 0.25}


def test_of_two_fields_with_time_both_are_states(folder: Path) -> None:
    with h5py.File(folder / "two.h5", "w") as file:
        for seed, name in enumerate("uv"):
            file[name] = np.random.default_rng(seed).normal(size=(24, 9, 16)).astype("f4")

    found = run_json("init", "two.h5")

    assert explained(folder / "stoker.yaml")["training"]["state_fields"] == ["u", "v"]
    assert found["trains"]
    assert run_json("train", "stoker.yaml", *FAST)["epochs"] == 1


def test_every_split_of_a_few_samples_gets_some(folder: Path) -> None:
    for samples in (2, 3, 4, 5):
        write_burgers(folder / "burgers.h5", samples=samples)
        found = run_json("init", "burgers.h5", "--force")

        caches = run_json("precompute", "stoker.yaml", "training.num_workers=0")["caches"]

        assert found["samples"] == samples == sum(cache["records"] for cache in caches)


def test_files_divided_by_name_are_counted_together(folder: Path) -> None:
    for name, samples in (("train", 8), ("val", 3)):
        (folder / "raw").mkdir(exist_ok=True)
        write_burgers(folder / "raw" / f"burgers_{name}.h5", samples=samples)

    assert run_json("init", "raw")["samples"] == 11
    caches = run_json("precompute", "stoker.yaml", "training.num_workers=0")["caches"]
    assert [cache["records"] for cache in caches] == [8, 3]


def test_one_image_stands_for_its_folder(folder: Path) -> None:
    found = run_json("init", f"{images(folder, classes=False)}/3.jpg")

    assert (found["samples"], found["settings"]["data.root"]) == (20, "images")


def test_parquet_without_its_library_names_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    assert "stoker[parquet]" in run_json("init", parquet(folder), exit_code=3)["hint"]


def test_a_dataset_with_a_wrong_setting_is_not_made_again_and_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "mine_counted.py").write_text(
        "made = []\n"
        "class Rooted:\n"
        "    def __new__(cls, *args, **named):\n"
        "        made.append(1)\n"
        "        return super().__new__(cls)\n"
        "    def __init__(self, root): pass\n"
    )

    assert "data.torch.arguments" in run_json("init", "mine_counted:Rooted", exit_code=3)["hint"]
    assert len(sys.modules.pop("mine_counted").made) <= 3


def test_text_columns_of_parquet_are_left_out_and_named(folder: Path) -> None:
    table = pa.table({"a": np.arange(40.0), "b": np.arange(40), "name": [str(n) for n in range(40)]})
    pq.write_table(table, folder / "rows.parquet")

    found = run_json("init", "rows.parquet")

    assert {*found["fields"]} == {"a", "b"}
    assert any("name" in question for question in found["questions"])
    assert run_json("precompute", "stoker.yaml", "training.num_workers=0")["caches"]


def test_a_file_that_is_there_stays_unless_forced(folder: Path) -> None:
    Path("stoker.yaml").write_text("mine")

    assert "--force" in run_json("init", pdebench(folder), exit_code=3)["hint"]
    assert Path("stoker.yaml").read_text() == "mine"
    run("init", "burgers.h5", "--force")
    assert "burgers" in Path("stoker.yaml").read_text()


def test_a_path_with_a_line_end_adds_no_setting(folder: Path) -> None:
    place = folder / "a\ntraining: {epochs: 7}\n"
    place.mkdir()
    write_burgers(place / "x.h5", samples=24)

    run("init", str(place))

    assert load_config("stoker.yaml").training.epochs == 20


def test_inspect_says_the_same_and_writes_nothing(folder: Path) -> None:
    path = pdebench(folder)
    before = sorted(folder.iterdir())

    assert run_json("data", "inspect", path)["fields"] == {
        "data": "float32 (9, 1, 32, 1), time along axis 0",
        "Nu": "float32 ()",
    }
    assert sorted(folder.iterdir()) == before


def test_train_on_data_says_how_to_begin(folder: Path) -> None:
    path = pdebench(folder)

    assert f"stoker init {path}" in run_json("train", path, exit_code=3)["hint"]


def test_data_that_is_not_there_is_said_before_a_settings_file_that_is(folder: Path) -> None:
    Path("stoker.yaml").write_text("of an earlier day")

    told = run_json("init", "nope", exit_code=3)

    assert "nope" in told["error"]
    assert "stoker.yaml" not in told["error"]
    run_json("init", "data.h5", exit_code=3)
    assert Path("stoker.yaml").read_text() == "of an earlier day"


def test_the_schema_and_all_settings_are_printed(folder: Path) -> None:
    schema = json.loads(run("init", "--schema")[0])
    every = run("init", "--all")[0]

    assert {"data", "training", "latent"} <= schema["properties"].keys()
    assert yaml.safe_load(every) is None, "all of it is commented"
    uncommented = "\n".join(line.replace("# ", "", 1) for line in every.splitlines()[1:])
    Path("all.yaml").write_text(uncommented)
    assert load_config("all.yaml").to_dict() == load_config(None).to_dict()
    assert not Path("stoker.yaml").exists()


@pytest.mark.parametrize("name", sorted(path.stem.removeprefix("train_") for path in EXAMPLES.iterdir()))
def test_an_example_that_comes_with_stoker_is_written_with_commands_that_name_the_copy(name: str) -> None:
    run("init", "--example", name, "--out", "mine.yaml")

    assert load_config("mine.yaml").to_dict() == load_config(EXAMPLES / f"train_{name}.yaml").to_dict()
    assert "stoker train mine.yaml data.files=" in Path("mine.yaml").read_text()
    assert "configs/" not in Path("mine.yaml").read_text()


def test_examples_are_named_and_go_without_data(folder: Path) -> None:
    for words in (["--example", "../train_darcy"], ["--example", "none"], ["--example", "darcy", "data.h5"]):
        assert "error" in run_json("init", *words, exit_code=3)
    assert "darcy" in run_json("init", "--example", "none", exit_code=3)["hint"]
    assert not Path("stoker.yaml").exists()
