"""Make a data set: the whole of it or nothing, however often the process is killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from stoker.errors import ConfigError, StalledError
from stoker.pipeline.demo import BurgersSpec, write_burgers
from stoker.plugins import load_extension
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.service.folders import JobFile
from stoker.service.runs.journal import Journal
from stoker.sources.sql.query import parse_address
from stoker.units import format_count

WAIT_S = 3600.0
"""How long the maker before, who writes into the same database, is waited for."""


def generate(job: JobFile, journal: Journal) -> dict[str, Any]:
    """Make what the job's one data set says; what the job came to, by name.

    Raises:
        ConfigError: It is none that the service makes.
        StalledError: Another maker had the database all that time.
    """
    datasets = cast("Sequence[Mapping[str, Any]]", job.datasets)
    if len(datasets) != 1 or "make" not in datasets[0]["spec"]:
        raise ConfigError(f"job {job.id} names no data set to make. Expected one, as `generate` notes it")
    dataset = datasets[0]
    spec: Mapping[str, Any] = dataset["spec"]
    journal.tell("started", {"message": f"makes {dataset['name']}"})
    made = _radio(spec, journal) if dataset["kind"] == "radio" else _burgers(spec)
    return {"epoch": job.epochs, "message": f"{dataset['name']} is there", "made": made}


def _radio(spec: Mapping[str, Any], journal: Journal) -> bool:
    radio = load_extension("service.radio")
    wanted, path = radio.RadioSpec(**spec["make"]), Path(parse_address(str(spec["url"])).target)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_folder(path.parent, "generate") as free:
        if not free:
            journal.tell("progress", {"message": f"waits for {lock_holder(path.parent, 'generate')}"})
    with lock_folder(path.parent, "generate", timeout_s=WAIT_S) as free:
        if not free:
            raise StalledError(
                f"{path} was written to by {lock_holder(path.parent, 'generate')} for {WAIT_S:g} s. "
                "See its job"
            )
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # jobs read while others are made
        journal.tell("progress", {"message": f"makes {format_count(wanted.rows)} rows"})
        return radio.write_radio(path, wanted)


def _burgers(spec: Mapping[str, Any]) -> bool:
    path = Path(str(spec["path"]))
    if path.is_file():  # it appears whole or not at all
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_burgers(path, BurgersSpec(**spec["make"]))
    return True
