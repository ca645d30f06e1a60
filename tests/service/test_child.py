"""Real processes of jobs: what they say, how they stop, and that no kill changes what they learn."""

from __future__ import annotations

import errno
import json
import logging
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file

from stoker.service import child
from stoker.service.database import Database
from stoker.service.datasets import Datasets, Registration, describe
from stoker.service.executor import NO_ROOM
from stoker.service.probes import PROBES
from stoker.service.security import DataAccess
from stoker.sources.files import confine_sources
from stoker.train.operator import LatentOperator, OperatorShape
from tests.service.conftest import made_on
from tests.service.job_folders import (
    burgers_dataset,
    finish,
    images_dataset,
    kill,
    lines,
    make_job,
    radio_dataset,
    same,
    start,
    wait_for,
    weights,
)
from tests.sources.sql.server import Server

RADIO = {"batch_size": 32, "epochs": 30, "early_stop_patience": 0, "learning_rate": 0.005}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a job in this process, which goes on as it was."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    yield lambda folder: child.main([str(folder)])
    for number, handler in before.items():
        signal.signal(number, handler)
    confine_sources(None)


def test_a_job_says_what_it_does_and_leaves_its_weights(tmp_path: Path, in_process: Any) -> None:
    folder = make_job(tmp_path, radio_dataset(tmp_path), batch_size=256, epochs=2, max_gdop=20.0)

    assert in_process(folder) == 0

    said = lines(folder)
    (started,) = lines(folder, "started")
    data = started["data"]
    assert data["train_samples"] + data["val_samples"] + data["dropped"] == 300
    assert data["dropped"] > 0
    assert data["tier"] == "host"
    assert "with device cpu the device tier is the host tier" in data["reason"]
    epochs = [line["data"] for line in said if line["kind"] == "metrics"]
    assert [row["epoch"] for row in epochs] == [1, 2]
    assert {
        "train_loss", "val_loss", "learning_rate", "grad_norm", "stall", "tier", "samples_per_s", "seconds",
        "rmse_m", "best_val_loss", "progress",
    } <= epochs[1].keys()  # fmt: skip
    assert epochs[1]["p50_m"] < epochs[1]["p68_m"] < epochs[1]["p95_m"]
    assert (folder / "checkpoints" / epochs[1]["checkpoint"]).is_dir()
    assert said[-1]["kind"] == "completed"
    with safe_open(folder / "model.safetensors", "pt") as file:
        facts = {name: json.loads(text) for name, text in file.metadata().items()}
    assert facts["statistics"]["target"]["deviation"][0] > 1_000
    assert facts["caches"] == {
        one["name"].removeprefix("radio_"): one["fingerprint"] for one in data["caches"]
    }


def test_what_cannot_be_done_fails_with_its_reason(tmp_path: Path, in_process: Any) -> None:
    dataset = radio_dataset(tmp_path)
    cases = {
        "max_gdop": ({"max_gdop": 0.001}, "max_gdop=0.001: drops all 300 rows"),
        "config": ({"n_fft": 5}, "n_fft=5 has no effect"),
        "gpu": ({"accelerator": "gpu"}, "sees no CUDA device"),
    }
    for name, (given, why) in cases.items():
        folder = make_job(tmp_path, dataset, name=name, **given)

        code = in_process(folder)

        (failed,) = lines(folder, "failed")
        assert why in failed["data"]["error"], name
        assert code not in (0, 75)


def test_the_cure_of_bad_samples_is_one_of_the_service(tmp_path: Path, in_process: Any) -> None:
    dataset = images_dataset(tmp_path)
    broken = sorted((tmp_path / "images").rglob("*.png"))[3]
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    given: dict[str, Any] = {"batch_size": 8, "epochs": 1, "validation_split": 0.25}
    folder = make_job(tmp_path, dataset, **given)

    assert in_process(folder) != 0

    error = lines(folder, "failed")[0]["data"]["error"]
    assert "cached" not in error
    assert "run again" not in error
    assert "resume the job" in error
    (setting,) = re.findall(r"clone the job with precompute.max_quarantined=(\S+)", error)
    more = {"precompute.max_quarantined": json.loads(setting)}
    assert in_process(make_job(tmp_path, dataset, name="clone", settings=more, **given)) == 0
    broken.write_bytes(whole)
    assert in_process(make_job(tmp_path, dataset, again=True, **given)) == 0, "resumed, once it is repaired"
    assert lines(folder, "started")[-1]["data"]["quarantined"] == 0


@pytest.mark.parametrize(
    "where",
    [
        "stoker.service.journal.os.write",
        pytest.param("stoker.runtime.files.os.fsync", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_no_failure_of_the_job(
    tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = make_job(tmp_path, radio_dataset(tmp_path), batch_size=256, epochs=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, full)

    assert in_process(folder) == NO_ROOM
    assert lines(folder, "failed") == []


def test_the_best_weights_of_simulations_make_their_operator_again(tmp_path: Path, in_process: Any) -> None:
    folder = make_job(tmp_path, burgers_dataset(tmp_path), batch_size=8, epochs=2)

    assert in_process(folder) == 0

    with safe_open(folder / "model.safetensors", "pt") as file:
        facts = {name: json.loads(text) for name, text in file.metadata().items()}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    model = LatentOperator(OperatorShape(**facts["shape"]))
    model.load_state_dict(found)
    best = max((folder / "checkpoints").glob("best-?????????"))
    assert same(found, load_file(best / "model.safetensors"))
    shape = facts["shape"]
    assert sum(facts["conditions"].values()) == shape["cond"]
    with torch.no_grad():
        states = model(torch.zeros(3, shape["tokens"], shape["dim"]), torch.zeros(3, shape["cond"]))
    assert states.shape == (3, shape["tokens"], shape["dim"])
    assert facts["architecture"] == "operator"
    assert set(facts["caches"]) == {"train", "val"}
    assert facts["config"]["epochs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [burgers_dataset, images_dataset])
def test_simulations_and_images_are_trained_on(tmp_path: Path, make: Any) -> None:
    folder = make_job(tmp_path, make(tmp_path), batch_size=8, epochs=4, validation_split=0.25)

    assert finish(folder) == 0, (folder / "log.txt").read_text()

    rows = [line["data"] for line in lines(folder, "metrics")]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert all(row["samples_per_s"] > 0 for row in rows)
    assert [row["at"] for row in rows] == sorted({row["at"] for row in rows})
    assert lines(folder)[-1]["kind"] == "completed"
    done = lines(folder, "completed")[0]["data"]
    assert done["best_val_loss"] == min(row["val_loss"] for row in rows)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("make", [radio_dataset, burgers_dataset, images_dataset])
def test_killed_at_any_moment_it_ends_with_the_weights_of_an_unbroken_run(tmp_path: Path, make: Any) -> None:
    """Kills come while rows are read, encoded, trained on, saved: wherever the moment falls."""
    dataset = make(tmp_path)
    more = RADIO if make is radio_dataset else {"batch_size": 8, "epochs": 30, "early_stop_patience": 0}
    whole = make_job(tmp_path, dataset, name="whole", **more)
    began = time.monotonic()
    assert finish(whole) == 0
    took_s, draw = time.monotonic() - began, random.Random(5)
    broken, attempt, kills = make_job(tmp_path, dataset, name="broken", **more), 0, 0

    while True:
        process = start(broken)
        attempt += 1
        if attempt <= 5:
            wait_for(broken, "progress" if attempt == 1 else "started", 1)
            time.sleep(draw.uniform(0, 0.5 * took_s) if kills else 0)  # a small job may be over by then
        else:
            process.wait(120)
        if process.poll() is not None:
            assert process.returncode == 0, (broken / "log.txt").read_text()
            break
        kill(process)
        kills += 1
        make_job(tmp_path, dataset, name="broken", again=True, **more)

    assert kills
    assert same(weights(broken), weights(whole))
    told = {line["data"]["epoch"]: line["data"]["train_loss"] for line in lines(broken, "metrics")}
    wanted = {line["data"]["epoch"]: line["data"]["train_loss"] for line in lines(whole, "metrics")}
    assert told == wanted, "every epoch was told, with the same figures"


@pytest.mark.parametrize("make", [radio_dataset, burgers_dataset])
def test_an_epoch_that_was_saved_and_not_told_is_told_by_the_next_attempt(
    tmp_path: Path, in_process: Any, make: Any
) -> None:
    """A kill came between the checkpoint and the event."""
    dataset, more = make(tmp_path), {"batch_size": 32, "early_stop_patience": 0}
    folder = make_job(tmp_path, dataset, epochs=1, **more)
    assert in_process(folder) == 0
    (lost,) = lines(folder, "metrics")
    kept = [line for line in lines(folder) if line["kind"] not in ("metrics", "completed")]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))

    make_job(tmp_path, dataset, again=True, epochs=2, **more)
    assert in_process(folder) == 0

    first, second = lines(folder, "metrics")
    assert (first["data"]["epoch"], second["data"]["epoch"]) == (1, 2)
    assert first["data"]["train_loss"] == lost["data"]["train_loss"]


@pytest.mark.slow
def test_asked_to_stop_it_saves_and_goes_on_there(tmp_path: Path) -> None:
    dataset = radio_dataset(tmp_path)
    whole = make_job(tmp_path, dataset, name="whole", **RADIO)
    assert finish(whole) == 0
    folder = make_job(tmp_path, dataset, **RADIO)

    stops = 0
    for wait in ("metrics", "metrics", "metrics"):
        process, before = start(folder), len(lines(folder, wait))
        wait_for(folder, wait, min(before + 3, 30))
        process.send_signal(signal.SIGTERM)
        stops += process.wait(60) == 75
        make_job(tmp_path, dataset, again=True, **RADIO)
    assert finish(folder) == 0

    assert stops
    assert same(weights(folder), weights(whole))
    assert [line["data"]["epoch"] for line in lines(folder, "metrics")] == [*range(1, 31)], "none twice"


@pytest.mark.slow
@pytest.mark.parametrize("make", [radio_dataset, burgers_dataset])
def test_a_damaged_checkpoint_is_named_and_none_left_fails(tmp_path: Path, make: Any) -> None:
    dataset, more = make(tmp_path), {"epochs": 3, "batch_size": 32}
    folder = make_job(tmp_path, dataset, **more)
    assert finish(folder) == 0
    newest = max(
        (folder / "checkpoints").iterdir(), key=lambda path: (path.name.partition("-")[2], path.name)
    )
    hurt(newest)

    make_job(tmp_path, dataset, again=True, **{**more, "epochs": 4})
    assert finish(folder) == 0
    said = [line["data"].get("message", "") for line in lines(folder, "progress")]
    assert any("skipped" in text and newest.name in text for text in said)
    assert lines(folder, "metrics")[-1]["data"]["epoch"] == 4

    for path in (folder / "checkpoints").iterdir():
        hurt(path)
    make_job(tmp_path, dataset, again=True, **{**more, "epochs": 5})
    assert finish(folder) == 4
    assert str(folder / "checkpoints") in lines(folder)[-1]["data"]["error"]
    assert lines(folder, "metrics")[-1]["data"]["epoch"] == 4, "it did not begin anew"


def hurt(checkpoint: Path) -> None:
    """Change bytes of a checkpoint, in such a way that doing it again does not mend it."""
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes((byte + 1) % 256 for byte in data[-8:]))


@pytest.mark.slow
def test_two_jobs_at_once_share_one_cache_and_one_precompute(tmp_path: Path) -> None:
    dataset = radio_dataset(tmp_path)
    folders = [make_job(tmp_path, dataset, name=name, **RADIO) for name in ("one", "two")]

    processes = [start(folder) for folder in folders]

    assert [process.wait(120) for process in processes] == [0, 0]
    started = [lines(folder, "started")[0]["data"] for folder in folders]
    assert started[0]["caches"] == started[1]["caches"]
    assert sum(one["encoded"] for one in started) == 300, "each row was encoded once"
    assert len(list((tmp_path / "caches").glob("*/*/index.json"))) == 2
    assert same(weights(folders[0]), weights(folders[1]))


@pytest.mark.slow
def test_rows_of_postgresql_are_registered_and_trained_on_as_those_of_sqlite(
    tmp_path: Path, server: Server, in_process: Any
) -> None:
    here = radio_dataset(tmp_path)
    there = radio_dataset(tmp_path, url=made_on(server))
    database = Database(f"sqlite:///{tmp_path}/stoker.db")
    datasets = Datasets(
        database,
        tmp_path,
        Path,
        probe=lambda what, *given, **named: PROBES[what](*given, **named),
        access=DataAccess(roots=("/",), servers=(str(server.folder),)),
    )
    request = {"kind": "radio", "name": "lab", "url": there["spec"]["url"], "set": there["id"]}

    made = datasets.register(TypeAdapter(Registration).validate_python(request))
    assert (made.facts["samples"], datasets.validate("lab").health) == (300, "good")
    assert len(datasets.samples("lab", limit=5)) == 5
    (told,) = describe(database, [made.id])
    folders = [make_job(tmp_path, one, name=str(n), epochs=2) for n, one in enumerate((here, told))]
    assert [in_process(folder) for folder in folders] == [0, 0]

    assert same(*map(weights, folders))
    database.close()
