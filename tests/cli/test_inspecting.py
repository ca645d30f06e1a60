"""Commands that look at caches: `inspect`, `verify`, `why`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import h5py
import numpy as np

from stoker.cli import output
from stoker.cli.command import console
from stoker.run.caches import Explanation
from stoker.store import Difference
from tests.cli.commands import Screen, run, run_json, strip_ansi


def test_inspect_shows_the_cache(project: Path) -> None:
    run("precompute", "c.yaml")

    summary = run_json("cache", "show", "data/latent_cache/burgers1d_train")

    assert {
        "fingerprint", "records", "fields", "shards", "bytes", "complete", "quarantined", "statistics",
    } <= summary.keys()  # fmt: skip
    assert (summary["records"], summary["complete"], summary["quarantined"]) == (12, True, [])
    text, _ = run("cache", "show", "data/latent_cache/burgers1d_train")
    assert summary["fingerprint"] in text
    assert "latent" in text
    assert "12 of 12 stored\n" in text


def test_inspect_lists_the_caches_of_a_folder(project: Path) -> None:
    run("precompute", "c.yaml")

    listed = run_json("cache", "show", "data/latent_cache")
    text, _ = run("cache", "show", "data/latent_cache")

    assert [(c["name"], c["records"]) for c in listed["caches"]] == [
        ("burgers1d_train", 12),
        ("burgers1d_val", 4),
    ]
    assert listed["unreadable"] == {}
    assert all(cache["fingerprint"] in text for cache in listed["caches"])


def test_inspect_names_a_cache_of_a_folder_that_cannot_be_opened(project: Path) -> None:
    run("precompute", "c.yaml")
    recipe = next((project / "data/latent_cache/burgers1d_val").glob("*/recipe.json"))
    recipe.write_text("{")

    listed = run_json("cache", "show", "data/latent_cache", exit_code=4)

    assert [cache["name"] for cache in listed["caches"]] == ["burgers1d_train"]
    assert str(recipe.parent.name) in listed["unreadable"]["burgers1d_val"]


def test_inspect_tells_what_is_quarantined_from_what_is_missing(project: Path) -> None:
    with h5py.File(project / "raw" / "burgers1d_train.h5", "r+") as file:
        file["tensor"][3, 0, 0] = np.nan
    run("precompute", "c.yaml", "--splits", "train", exit_code=4)

    text, _ = run("cache", "show", "data/latent_cache/burgers1d_train")

    assert "11 of 12 stored, 1 quarantined\n" in text


def test_inspect_names_missing_shards_and_a_command_that_repairs(project: Path) -> None:
    run("precompute", "c.yaml")
    cache = "data/latent_cache/burgers1d_train"
    (shard,) = (project / cache).glob("*/shard-*")
    size = shard.stat().st_size
    assert run_json("cache", "show", cache)["missing_shards"] == []

    shard.chmod(0o644)
    os.truncate(shard, 100)
    cut = run_json("cache", "show", cache)["missing_shards"]
    shard.unlink()
    summary = run_json("cache", "show", cache)
    text, _ = run("cache", "show", cache)

    entry = {"shard": shard.name, "records": 12, "bytes": None, "expected_bytes": size}
    assert cut == [{**entry, "bytes": 100}]
    assert summary["missing_shards"] == [entry]
    assert (summary["records"], summary["shards"], summary["bytes"]) == (0, 0, 0)
    assert f"{shard.name}: 12 records" in text
    (command,) = re.findall(r"stoker (cache verify \S+ --repair)", text)
    named, _ = run(*command.split(), exit_code=4)
    (command,) = re.findall(r"stoker (cache verify .* CONFIG)", named)
    run(*command.replace("CONFIG", "c.yaml").split())
    assert run_json("cache", "show", cache)["records"] == 12


def flip_a_record_byte(project: Path) -> None:
    shard = next((project / "data/latent_cache/burgers1d_train").glob("*/shard-*"))
    content = bytearray(shard.read_bytes())
    content[8192] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)


def test_verify_names_the_damaged_record(project: Path) -> None:
    run("precompute", "c.yaml")
    assert run_json("cache", "verify", "data/latent_cache/burgers1d_train") == {
        "records": 12, "ok": True, "bad": [], "unchecked": [],
    }  # fmt: skip

    flip_a_record_byte(project)
    report = run_json("cache", "verify", "data/latent_cache/burgers1d_train", exit_code=4)

    assert report["ok"] is False
    assert {"index", "shard", "why"} == report["bad"][0].keys()
    text, _ = run("cache", "verify", "data/latent_cache/burgers1d_train", exit_code=4)
    assert f"sample {report['bad'][0]['index']}" in text


def test_verify_finds_damaged_keys_and_says_how_to_note_them_again(project: Path) -> None:
    run("precompute", "c.yaml")
    path = "data/latent_cache/burgers1d_train"
    (keys,) = (project / path).glob("*/keys.jsonl")
    keys.write_bytes(keys.read_bytes().replace(b":1", b":x"))

    report = run_json("cache", "verify", path, exit_code=4)
    text, _ = run("cache", "verify", path, exit_code=4)

    assert [(bad["index"], bad["shard"]) for bad in report["bad"]] == [(-1, "keys.jsonl")]
    assert "Run the same precompute again" in " ".join(text.split())
    assert "--repair" not in text
    repaired, _ = run("cache", "verify", path, "--repair")
    assert "keys.jsonl" in repaired
    assert "Run the same precompute again" in " ".join(repaired.split())
    run("precompute", "c.yaml")
    assert run_json("cache", "verify", path)["ok"]


def test_verify_of_a_subset_reads_fewer_records(project: Path) -> None:
    run("precompute", "c.yaml")

    report = run_json("cache", "verify", "data/latent_cache/burgers1d_train", "--subset", "0.25")
    text, _ = run("cache", "verify", "data/latent_cache/burgers1d_train", "--subset", "0.25")

    assert (report["records"], report["unchecked"][0]) == (3, "9 of 12 records")
    assert "3 of 3 records match" in text
    assert "not looked at: 9 of 12 records" in text


def test_why_takes_settings_as_the_other_commands_do(project: Path) -> None:
    run("precompute", "c.yaml", "--splits", "train")
    cache = "data/latent_cache/burgers1d_train"

    alone = run_json("cache", "why", "c.yaml", "latent.dim=6")
    beside = run_json("cache", "why", cache, "c.yaml", "latent.dim=6")
    _, message = run("cache", "why", cache, "latent.dim=6", exit_code=3)
    _, three = run("cache", "why", "c.yaml", cache, cache, exit_code=3)

    assert {d["entry"]: (d["a"], d["b"]) for d in alone["differences"]}["encoder.config.dim"] == (6, 8)
    assert {d["entry"]: (d["a"], d["b"]) for d in beside["differences"]}["encoder.config.dim"] == (8, 6)
    assert "latent.dim=6" in message
    assert "at most" in three


def test_why_compares_settings_with_the_nearest_cache(project: Path) -> None:
    run("precompute", "c.yaml", "--splits", "train")
    assert run_json("cache", "why", "c.yaml")["same"] is True

    text = (project / "c.yaml").read_text().replace("dim: 8", "dim: 6")
    (project / "other.yaml").write_text(text)
    report = run_json("cache", "why", "other.yaml")

    assert report["same"] is False
    assert {"entry", "a", "b"} <= report["differences"][0].keys()
    entries = {d["entry"]: (d["a"], d["b"]) for d in report["differences"]}
    assert entries["encoder.config.dim"] == (6, 8)
    shown, _ = run("cache", "why", "other.yaml", "c.yaml")
    assert "encoder.config.dim" in shown
    assert "6  ->  8" in shown


def test_why_shows_values_whole_but_for_digests(project: Path) -> None:
    part = {"name": "burgers1d_train_and_more.h5", "count": 10_000, "selection": [0, 9_000]}
    found = [Difference(entry="p", a=part, b=None, note="only in the first"),
             Difference(entry="d", a="0123456789abcdef" * 4, b="f" * 64, note="other bytes")]  # fmt: skip
    screen = Screen()

    output.why(Explanation(a="a", b="b", differences=tuple(found)), console(screen))

    text = " ".join(strip_ansi(screen.getvalue()).split())
    assert "name burgers1d_train_and_more.h5, count 10000, selection [0, 9000]" in text
    assert "0123456789abcdef…89abcdef -> ffffffffffffffff…ffffffff" in text


def test_get_shows_records_by_key_and_by_condition(project: Path) -> None:
    run("precompute", "c.yaml")
    path = "data/latent_cache/burgers1d_train"
    key = run_json("cache", "get", path)["records"][3]["key"]

    by_key = run_json("cache", "get", path, key)
    met = run_json("cache", "get", path, "--where", "sample_index % 2 = 1", "--limit", "2")
    text, _ = run("cache", "get", path, key)

    assert [(r["index"], r["key"]) for r in by_key["records"]] == [(3, key)]
    assert by_key["records"][0]["fields"]["latent"]["dtype"] == "float16"
    assert (met["count"], [r["index"] for r in met["records"]]) == (6, [1, 3])
    assert f"sample 3, key {key}" in text


def test_get_says_which_key_or_column_there_is_not(project: Path) -> None:
    run("precompute", "c.yaml")
    path = "data/latent_cache/burgers1d_train"

    _, no_key = run("cache", "get", path, "nothing", exit_code=4)
    _, no_column = run("cache", "get", path, "--where", "nothing > 1", exit_code=3)

    assert "'nothing'" in no_key
    assert "Columns of burgers1d_train are sample_index, key" in no_column
