"""The backup of the guide, as its reader types it while jobs run, and the service restored from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.service.client import Client
from stoker.service.services import open_services
from tests.service.test_server import service

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "service-backup.md"


def typed(heading: str, cwd: Path, url: str) -> None:
    """Run the commands below a heading of the guide."""
    found = re.search(rf"## {heading}\n.*?```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    commands = found[1].replace("D=.stoker/service ", "D=state ").replace("B=stoker-backup ", "B=backup ")
    database = {} if url.startswith("sqlite") else {"STOKER_DATABASE": url}
    subprocess.run(["bash", "-c", commands], cwd=cwd, check=True, timeout=120, env={**os.environ, **database})


def until(met: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 240
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder without jobs."""
    found = tmp_path / "state"
    open_services(found).database.close()
    return found


def test_a_backup_without_jobs_has_none(tmp_path: Path, state: Path) -> None:
    typed("Back up", tmp_path, "sqlite")

    assert not [*(tmp_path / "backup" / "jobs").iterdir()]
    assert (tmp_path / "backup" / "stoker.db").exists()
    assert state.exists()


def test_a_checkpoint_that_cannot_be_copied_ends_the_backup_with_the_error(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (state / "jobs" / "a" / "checkpoints").mkdir(parents=True)
    full = tmp_path / "bin" / "cp"
    full.parent.mkdir()
    full.write_text("#!/bin/sh\necho 'cp: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setenv("PATH", str(full.parent), prepend=":")

    with pytest.raises(subprocess.CalledProcessError):
        typed("Back up", tmp_path, "sqlite")

    assert "No space left" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_backup_of_a_running_service_is_restored_with_all_jobs(
    tmp_path: Path, url: str, request: pytest.FixtureRequest
) -> None:
    state = tmp_path / "state"
    is_sqlite = url.startswith("sqlite")
    words = ("--workers", "1", *(() if is_sqlite else ("--database", url)))

    def client(started: dict[str, Any]) -> Client:
        return Client(started["address"], (state / "token").read_text().strip())

    def submit(found: Client, name: str, epochs: int) -> str:
        config = {"dataset_ids": ["radio"], "batch_size": 64, "epochs": epochs, "early_stop_patience": 0}
        return found.submit({"job_name": name, "config": config})["id"]

    with service(state, *words) as (process, started):
        first = client(started)
        first.generate({"kind": "radio", "name": "radio", "rows": 1500})
        done, runs = submit(first, "done", 3), submit(first, "runs", 5000)
        until(lambda: first.job(done)["job"]["status"] == "completed")
        waits = submit(first, "waits", 2)
        until(lambda: (state / "jobs" / runs / "checkpoints").exists() and first.metrics(runs))
        until(lambda: first.job(runs)["job"]["current_epoch"] >= 10)
        typed("Back up", tmp_path, url)
        before = {one["id"]: one for one in first.jobs()["jobs"]}
        rows = first.metrics(done)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    state.rename(tmp_path / "lost")
    if not is_sqlite:
        with request.getfixturevalue("server").connect() as connection:
            name = url.partition("?")[0].rpartition("/")[2]
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {name}")
    typed("Restore", tmp_path, url)

    with service(state, *words) as (process, started):
        second = client(started)
        assert {one["id"] for one in second.jobs()["jobs"]} == {*before}
        told = state / "jobs" / runs / "events.jsonl"
        until(lambda: "continues after epoch" in told.read_text())  # from a checkpoint of the backup
        reached = second.job(runs)["job"]["current_epoch"]
        until(lambda: second.job(runs)["job"]["current_epoch"] > reached + 5)
        second.act(runs, "cancel")
        until(lambda: second.job(runs)["job"]["status"] == "cancelled")
        until(lambda: second.job(waits)["job"]["status"] == "completed")
        after = {one["id"]: one for one in second.jobs()["jobs"]}
        assert {one["status"] for one in after.values()} == {"completed", "cancelled"}
        again = {one["job_name"] for one in after.values() if one["attempt"] > 1}
        assert again == {"runs"}, "what had ended, or had not begun, has one attempt"
        assert second.metrics(done) == rows
        epochs = [row["epoch"] for row in second.metrics(runs, limit=1000)]
        assert epochs == [*range(1, len(epochs) + 1)]
        second.download(done, "model.safetensors", tmp_path / "model")
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
