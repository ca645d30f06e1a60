"""The process of a job: a child of its worker; by hand, `python -m stoker.service.child FOLDER`.

It reads its task from `FOLDER/job.json`, writes events to `FOLDER/events.jsonl` and checkpoints to
`FOLDER/checkpoints`. Its exit status is 0 for a completed job. It is 75 when it was asked to stop (SIGTERM)
and can resume, and 74 when the disk was full. Any other status is a failure, which its last event explains.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.errors import ConfigError, Interrupted, ResourceError, StokerError
from stoker.runtime.disk import FULL_ERRNOS
from stoker.runtime.processes.entry import Connection
from stoker.service.executor import NO_ROOM, STOPPED, begin_job
from stoker.service.folders import JobFile
from stoker.service.journal import Journal

if TYPE_CHECKING:
    from stoker.service.job_config import JobConfig

_FAILED = 1


def serve(connection: Connection) -> int:
    """Do the job that a worker started this process for; return the exit status."""
    _leave_on_signals()
    return do_job(begin_job(connection))


def main(words: Sequence[str]) -> int:
    """Do the job of a folder; return the exit status."""
    _leave_on_signals()
    if len(words) != 1:
        raise SystemExit("usage: python -m stoker.service.child FOLDER")
    return do_job(Path(words[0]).absolute())


def _leave_on_signals() -> None:
    # Training replaces these handlers. Before that there is nothing to save: files appear complete.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def do_job(folder: Path) -> int:
    """Do the job of a folder; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(capture=True)

    try:
        journal = Journal(folder / "events.jsonl")
    except (OSError, ResourceError) as error:
        logging.getLogger("stoker").error("%s", error)
        return NO_ROOM if _is_full(error) else _FAILED
    try:
        job = JobFile.read(folder / "job.json")
        done = _do(folder, job, journal)
        journal.tell("completed", {"progress": 1.0, **done})
    except Interrupted as error:
        logging.getLogger("stoker").info("%s", error)
        return STOPPED
    except Exception as error:  # noqa: BLE001 - the edge of the process; it is logged with its traceback
        return _fail(journal, error)
    return 0


def _leave(_number: int, _frame: object) -> None:
    os._exit(STOPPED)


def _do(folder: Path, job: JobFile, journal: Journal) -> Mapping[str, Any]:
    from stoker.service.runs import JobRun, generate, train

    if job.kind == "generation":
        return generate(job, journal)
    journal.tell("progress", {"message": f"attempt {job.attempt}: opens its data"})

    from stoker.service.connections import use_password, with_urls
    from stoker.service.job_config import check, settings_of
    from stoker.service.security import data_paths
    from stoker.sources.files import confine_sources

    config = config_of(job.config)
    datasets, password = with_urls(cast("Sequence[Mapping[str, Any]]", job.datasets), job.connections)
    use_password(password)
    job = replace(job, datasets=datasets)
    confine_sources(data_paths(cast("Mapping[str, Any]", one["spec"]) for one in job.datasets))
    settings = settings_of(config, job.datasets, caches=job.caches, run_dir=str(folder), epochs=job.epochs)
    run = JobRun(folder=folder, job=job, config=config, settings=settings, journal=journal)
    return train(run, check(config, job.datasets))


def config_of(given: Mapping[str, Any]) -> JobConfig:
    """Return the configuration of a job, which another version of the service may have accepted.

    Raises:
        ConfigError: Some fields are wrong; names all of them.
    """
    from pydantic import ValidationError

    from stoker.config.names import schema_of, wrong_fields
    from stoker.service.job_config import JobConfig

    try:
        return JobConfig.model_validate(given)
    except ValidationError as error:
        found = wrong_fields(error.errors(), schema_of(JobConfig))
        wrong = [problem.within(f"config.{path}: " if path else "config: ") for path, problem in found]
        raise ConfigError.of_all(wrong) from None


def _fail(journal: Journal, error: Exception) -> int:
    """Write why the job failed; return the exit status. On a full disk nothing can be written."""
    logging.getLogger("stoker").error("%s: %s", type(error).__name__, error, exc_info=error)
    if _is_full(error):
        return NO_ROOM
    try:
        journal.tell("failed", {"error": _said(error) or type(error).__name__, "type": type(error).__name__})
    except ResourceError:
        return NO_ROOM
    code = error.exit_code if isinstance(error, StokerError) else _FAILED
    return code if code not in (0, STOPPED, NO_ROOM) else _FAILED


def _said(error: Exception) -> str:
    """Return why the job failed; arguments of the library are settings there, and runs are jobs."""
    if not isinstance(error, StokerError) or not error.arguments:
        return str(error)
    from stoker.config.names import in_settings

    text = in_settings(error)
    for typed, pressed in _INSTEAD:
        text = text.replace(typed, pressed)
    return text


_INSTEAD = (
    ("run again with precompute.retry_quarantined=true. ", "resume the job. "),
    ("run again with ", "clone the job with "),
    ("run it again", "resume the job"),
    ("To continue without them: ", "To continue without them, clone the job with "),
)
"""What a message says of a run, and what is done with a job; one that is resumed reads repaired files."""


def _is_full(error: BaseException | None) -> bool:
    """Return True if a disk or a quota was full while something was written, somewhere below an error."""
    while error is not None:
        if isinstance(error, ResourceError):
            return error.full
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
