"""The commands that look after caches: keys, exit codes, what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stoker.cli.command import run as run_app
from stoker.cli.main import app
from stoker.errors import ReadOnlyError
from stoker.store import open_cache
from stoker.store.storage import attach_mirror
from tests.store.kill_points import make_old, prepare

CACHE = "data/latent_cache/burgers1d_train"


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def run_json(*args: str, exit_code: int = 0) -> dict[str, Any]:
    (line,) = run(*args, "--json", exit_code=exit_code).splitlines()
    return json.loads(line)


@pytest.fixture
def cache(project: Path) -> Path:
    run("precompute", "c.yaml", "--splits", "train")
    return open_cache(CACHE).path


def damage(path: Path, number: int = 7) -> None:
    """Flip a bit of a record, wherever it serves from."""
    record = open_cache(path)[number]["latent"].numpy().tobytes()
    for shard in path.glob("shard-*"):
        data = bytearray(shard.read_bytes())
        at = data.find(record)
        if at >= 0:
            data[at + 8] ^= 1
            shard.write_bytes(data)
            return
    raise AssertionError(f"no shard holds record {number}")


def test_repair_names_the_samples_and_the_command(cache: Path) -> None:
    damage(cache)

    found = run_json("cache", "verify", CACHE, "--repair", exit_code=4)

    (number,) = found["missing"]
    assert (found["ok"], found["encode_again"], found["encoded"]) == (False, str(number), None)
    assert found["command"] == f"stoker cache verify {cache} --repair --config CONFIG [KEY=VALUE...]"
    assert "--repair" not in str(found["bad"])
    text = run("cache", "verify", CACHE, "--repair", exit_code=4)
    assert f"1 sample has to be encoded: {number}" in text
    assert found["command"] in text


def test_repair_of_a_folder_that_cannot_be_written_asks_for_nothing_where_it_is_sound(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ReadOnlyError(f"{cache} cannot be written: Read-only file system")

    monkeypatch.setattr("stoker.store.maintain.repair", refuse)

    found = run_json("cache", "verify", CACHE, "--repair")

    assert (found["ok"], found["records"], found["bad"]) == (True, 12, [])
    damage(cache)
    assert "cannot be written" in run_json("cache", "verify", CACHE, "--repair", exit_code=3)["error"]


def test_repair_with_the_settings_encodes_again(cache: Path) -> None:
    before = {n: open_cache(cache)[n] for n in range(12)}
    damage(cache)

    found = run_json("cache", "verify", CACHE, "--repair", "--config", "c.yaml")

    assert (found["ok"], found["encoded"], found["missing"]) == (True, 1, [])
    after = open_cache(cache)
    assert all(torch.equal(before[n][name], after[n][name]) for n in before for name in before[n])
    assert run_json("cache", "verify", CACHE)["ok"]


def test_a_damaged_recipe_is_written_anew_by_the_settings(cache: Path) -> None:
    (cache / "recipe.json").write_bytes(b"{}")
    run("cache", "verify", str(cache), "--repair", exit_code=4)

    assert run_json("cache", "verify", str(cache), "--repair", "--config", "c.yaml")["ok"]
    assert len(open_cache(cache)) == 12


def test_settings_of_another_cache_are_refused(cache: Path) -> None:
    damage(cache)

    error = run_json("cache", "verify", CACHE, "--repair", "--config", "c.yaml", "latent.dim=4", exit_code=3)[
        "error"
    ]

    assert f"stoker cache why {cache} CONFIG" in error


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["cache", "verify", CACHE, "--repair", "--subset", "5%"], "--repair reads every record"),
        (["cache", "verify", CACHE, "--config", "c.yaml"], "--config and settings go with --repair"),
        (["cache", "verify", CACHE, "--subset", "120%"], "'120%' is not a share"),
        (["cache", "verify", CACHE, "--subset", "0"], "'0' is not a share"),
        (["cache", "gc", "--yes", "data", "--max-size", "20 cows"], "'20 cows' is not a size"),
        (["cache", "gc", "--yes", "data", "--max-size", "20"], "20GB"),
        (["cache", "gc", "--yes", "data", "--older-than", "30"], "30d"),
        (["cache", "gc", "--yes", "data", "--older-than", "soon"], "'soon' is not a time"),
        (["cache", "import-pt", "old", "--out", "data"], "'--name'"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_wrong(
    project: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_app(app, args)

    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_compact_and_gc(cache: Path) -> None:
    damage(cache)
    run("cache", "verify", CACHE, "--repair", "--config", "c.yaml")  # makes a second shard

    merged = run_json("cache", "compact", CACHE)
    assert (merged["shards_before"], merged["shards_after"], merged["records"]) == (2, 1, 12)
    assert "nothing to merge: 1 shard\n" in run("cache", "compact", CACHE)
    planned = run_json("cache", "gc", "--yes", "data/latent_cache", "--dry-run")
    text = run("cache", "gc", "--yes", "data/latent_cache", "--dry-run")
    done = run_json("cache", "gc", "--yes", "data/latent_cache")

    assert [item["kind"] for item in planned["removed"]] == ["shard", "shard"]
    assert planned["removed"] == done["removed"]
    assert "2 × shard" in text
    assert str(cache) in text
    assert len([*cache.glob("shard-*")]) == 1
    assert run_json("cache", "verify", CACHE)["records"] == 12


def test_gc_of_copies_by_their_folder_or_their_address(cache: Path, tmp_path: Path) -> None:
    there = f"file://{tmp_path}/there"
    run("cache", "push", CACHE, there)
    own = attach_mirror(there, tmp_path / "mirrors")
    by_address = attach_mirror(there)
    for mirror in (own, by_address):
        assert open_cache(mirror / cache.parent.name).verify().ok

    for place in (str(own), there):
        freed = run_json("cache", "gc", "--yes", place, "--max-size", "0B")
        assert [item["kind"] for item in freed["removed"]] == ["copy"]
        assert freed["bytes_left"] == 0
        assert freed["bytes_removed"] >= cache.stat().st_blksize


def test_of_an_address_the_address_is_named(project: Path) -> None:
    there = f"file://{project}/there"
    prepare(project / "old")
    run("cache", "push", "old/x", there)
    place = f"{there}/x"

    found = run_json("cache", "show", place)
    assert found["address"].startswith(f"{place}/")
    assert found["address"] in run("cache", "show", place)
    assert run_json("cache", "why", place, place)["a"] == found["address"]
    made = run("precompute", "c.yaml", "--splits", "val", f"training.latent_cache_dir={there}")
    assert f"{there}/burgers1d_val/" in made
    assert ".stoker" not in made
    assert f"stoker cache gc {there} --at-address removes them" in run("cache", "compact", place)
    assert "--at-address also removes shards" in run("cache", "gc", "--yes", there)
    assert "--at-address" not in run("cache", "gc", "--yes", there, "--at-address")


@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_folder_of_caches_at_an_address_is_listed(cache: Path, project: Path, command: str) -> None:
    there = f"file://{project}/there"
    prepare(project / "old")
    run("cache", "push", "old/x", there)
    run("cache", "push", CACHE, there)

    listed = run_json("cache", command, there)

    assert listed["path"] == there
    assert {one["name"]: one["records"] for one in listed["caches"]} == {
        name: run_json("cache", "show", f"{there}/{name}")["records"] for name in (cache.parent.name, "x")
    }
    assert all(one["address"].startswith(f"{there}/{one['name']}/") for one in listed["caches"])
    assert cache.parent.name in run("cache", command, there)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["cache", "show", "file://share/x"], "Expected three slashes"),
        (["cache", "show", "gs://"], "names no bucket"),
        (["cache", "show", "http://share/x"], "is not an address of caches"),
        (["cache", "gc", "--yes", "raw", "--at-address"], "raw is a local folder"),
    ],
)
def test_a_place_that_cannot_be_meant_is_exit_code_3(project: Path, args: list[str], said: str) -> None:
    result = CliRunner().invoke(app, args, catch_exceptions=False)

    assert result.exit_code == 3
    assert said in " ".join(result.stderr.split())


def test_compact_leaves_a_damaged_shard_and_says_so(cache: Path) -> None:
    damage(cache)
    run("cache", "verify", CACHE, "--repair", "--config", "c.yaml")
    damage(cache)  # serves from the new shard now

    report = run_json("cache", "compact", CACHE, exit_code=4)

    assert len(report["left"]) == 1


def test_gc_by_age_size_and_number(cache: Path) -> None:
    run("precompute", "c.yaml", "latent.dim=4")
    make_old(cache)

    assert run_json("cache", "gc", "--yes", "data/latent_cache", "--older-than", "60d")["removed"] == []
    report = run_json(
        "cache",
        "gc",
        "--yes",
        "data/latent_cache",
        "--older-than",
        "30d",
        "--max-size",
        "20GB",
        "--keep",
        "1",
    )

    assert [item["path"] for item in report["removed"] if item["kind"] == "fingerprint"] == [
        str(cache.relative_to(Path.cwd()) if cache.is_absolute() else cache)
    ]
    assert "weights" in {item["kind"] for item in report["removed"]}
    assert not cache.exists()
    assert len(open_cache(CACHE)) == 12


def test_gc_says_what_stays_and_why(cache: Path) -> None:
    said = run("cache", "gc", "--yes", "data/latent_cache")
    assert "nothing to remove" in said
    assert "no limit was given" in said
    report = run_json("cache", "gc", "--yes", "data/latent_cache", "--keep", "0")

    assert report["removed"] == []
    assert [item["reason"] for item in report["kept"]] == ["the newest complete one of its name"]
    assert report["bytes_left"] == report["bytes_before"] > 0
    assert "the newest complete one" in run(
        "cache", "gc", "--yes", "data/latent_cache", "--keep", "0", "--dry-run"
    )


def test_gc_forced_removes_the_newest_too(cache: Path) -> None:
    report = run_json("cache", "gc", "--yes", "data/latent_cache", "--keep", "0", "--force")

    assert {item["kind"] for item in report["removed"]} == {"fingerprint", "weights"}
    assert not cache.exists()
    assert report["bytes_left"] == 0


@pytest.mark.parametrize(
    "command",
    [
        ["cache", "gc", "--yes", CACHE],
        ["cache", "gc", "--yes", "nothing"],
        ["cache", "compact", "raw"],
        ["cache", "verify", "raw"],
    ],
)
def test_what_is_no_cache_is_4_with_one_line(cache: Path, command: list[str]) -> None:
    error = run_json(*command, exit_code=4)

    assert error["exit_code"] == 4
    assert "\n" not in error["error"]


def test_a_lost_recipe_is_written_anew_by_the_settings(cache: Path) -> None:
    (cache / "recipe.json").unlink()
    assert "holds no recipe.json" in run_json("cache", "verify", str(cache), "--repair", exit_code=4)["error"]

    assert run_json("cache", "verify", str(cache), "--repair", "--config", "c.yaml")["ok"]
    assert len(open_cache(cache)) == 12


def test_a_cache_is_found_by_the_name_that_ls_shows(cache: Path) -> None:
    name = Path(CACHE).name
    assert name in run("cache", "ls")

    assert run_json("cache", "show", name)["path"] == run_json("cache", "show", CACHE)["path"]
    assert run_json("cache", "verify", name)["ok"]
    assert run_json("cache", "why", name, CACHE)["differences"] == []


def test_verify_names_shards_once_and_the_fact(cache: Path) -> None:
    damage(cache)

    text = run("cache", "verify", CACHE, exit_code=4)

    (line,) = [line for line in text.splitlines() if "shard-" in line]
    assert line.endswith("does not match its checksum")
    assert f"verify {CACHE} --repair" in text


def test_import_lists_what_is_missing_with_exit_code_4(project: Path) -> None:
    Path("old").mkdir()
    for number in (0, 2):
        torch.save({"latent": torch.randn(9, 4, 8), "params": None}, f"old/sample_{number:05d}.pt")
    Path("old/readme.txt").write_text("")
    args = ["cache", "import-pt", "old", "--out", "data/latent_cache", "--name", "old", "--dtype", "float16"]

    report = run_json(*args, exit_code=4)
    text = run(*args, "--allow-missing")

    assert (report["records"], report["missing"], report["broken"]) == (2, [1], [])
    assert "2 of 3 adopted (0 new), 1 file bad" in text
    assert "sample_00001.pt: is missing" in text
    assert f"stoker.open_cache({report['path']!r}) serves what is there" in text
    assert "--nan" in text
    assert "--ragged" not in text, "import-pt has no such option"
    assert "1 other file ignored" in text
    assert run_json("cache", "show", "data/latent_cache/old")["complete"]


def test_export_writes_what_safetensors_reads(cache: Path) -> None:
    from safetensors.torch import load_file

    report = run_json(
        "cache", "export", CACHE, "out", "--to", "safetensors", "--records", "2:6", "--fields", "latent"
    )

    found = load_file("out/records.safetensors")
    assert found["index"].tolist() == [2, 3, 4, 5]
    assert torch.equal(found["latent"], torch.stack([open_cache(CACHE)[n]["latent"] for n in range(2, 6)]))
    assert (report["records"], report["path"], report["to"]) == (4, "out", "safetensors")
    assert [file["file"] for file in report["files"]] == ["records.safetensors"]
    assert "12" in run("cache", "export", CACHE, "td", "--to", "tensordict")
    assert json.loads(Path("td/meta.json").read_text())["shape"] == [12]


def test_export_says_what_is_wrong(cache: Path) -> None:
    assert (
        "safetensors, tensordict"
        in run_json("cache", "export", CACHE, "o", "--to", "x", exit_code=3)["error"]
    )
    wrong = CliRunner().invoke(app, ["cache", "export", CACHE, "o", "--to", "tensordict", "--records", "5"])
    assert (wrong.exit_code, "is not a range" in wrong.stderr) == (2, True)
    damage(cache)
    assert "sample 7" in run_json("cache", "export", CACHE, "o", "--to", "tensordict", exit_code=4)["error"]
    assert not Path("o").exists()


def test_a_cache_is_made_compressed_and_later_not(project: Path) -> None:
    run("precompute", "c.yaml", "--splits", "train", "--compression", "zstd")
    made = run_json("cache", "show", CACHE)
    assert made["bytes"] < made["raw_bytes"]
    assert "uncompressed" in run("cache", "show", CACHE)
    assert run_json("plan", "c.yaml")["bytes"] > 0

    report = run_json("cache", "compact", CACHE, "--compression", "none")

    assert (report["bytes_before"], report["written"]) == (made["bytes"], made["shards"])
    assert report["bytes_after"] > report["bytes_before"]
    run("cache", "verify", CACHE)
    run("cache", "compact", CACHE, "--compression", "gzip", exit_code=3)
