"""The process of a job: `python -m stoker.service.child FOLDER`.

It is told everything by `FOLDER/job.json`, says everything in `FOLDER/events.jsonl`, and keeps what it can go
on from in `FOLDER/checkpoints`. It exits with 0 when the job is completed, with 75 when it was asked to stop
(SIGTERM) and can go on from where it is, and with anything else when it failed, which its last line explains.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import ConfigError, Interrupted, StokerError
from stoker.service.executor import STOPPED
from stoker.service.job_file import JobFile

if TYPE_CHECKING:
    from stoker.service.runs.journal import Journal
    from stoker.service.runs.run import JobRun

_FAILED = 1


def main(words: Sequence[str]) -> int:
    """Do the job of a folder; the exit status."""
    # Until something takes the signal that has more to save, there is nothing to save: files appear whole.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if len(words) != 1:
        raise SystemExit("usage: python -m stoker.service.child FOLDER")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(capture=True)
    folder = Path(words[0]).absolute()

    from stoker.service.runs.journal import Journal

    journal = Journal(folder / "events.jsonl")
    try:
        job = JobFile.read(folder / "job.json")
        done = _do(folder, job, journal)
    except Interrupted as error:
        logging.getLogger("stoker").info("%s", error)
        return STOPPED
    except StokerError as error:
        return _fail(journal, error, error.exit_code)
    except Exception as error:  # noqa: BLE001 - the edge of the process; it is told with its traceback
        return _fail(journal, error, _FAILED)
    journal.tell("completed", {"progress": 1.0, **done})
    return 0


def _leave(_number: int, _frame: object) -> None:
    os._exit(STOPPED)


def _do(folder: Path, job: JobFile, journal: Journal) -> Mapping[str, Any]:
    if job.kind == "generation":
        from stoker.service.runs.generate import generate

        return generate(job, journal)
    journal.tell("progress", {"message": f"attempt {job.attempt}: opens its data"})

    from pydantic import ValidationError

    from stoker.service.runs.run import JobRun
    from stoker.service.runs.settings import check, settings_of
    from stoker.service.training_config import TrainingConfig

    try:
        config = TrainingConfig.model_validate(job.config)
    except ValidationError as error:
        raise ConfigError(f"the job's configuration is refused: {error}") from error
    settings = settings_of(config, job.datasets, caches=job.caches, run_dir=str(folder), epochs=job.epochs)
    run = JobRun(folder=folder, job=job, config=config, settings=settings, journal=journal)
    return _trainer(check(config, job.datasets))(run)


def _trainer(kind: str) -> Callable[[JobRun], dict[str, Any]]:
    if kind == "radio":
        from stoker.service.runs.rows import train_rows

        return train_rows
    if kind == "images":
        from stoker.service.runs.images import train_images

        return train_images
    from stoker.service.runs.operator import train_operator

    return train_operator


def _fail(journal: Journal, error: Exception, code: int) -> int:
    logging.getLogger("stoker").error("%s: %s", type(error).__name__, error, exc_info=error)
    journal.tell("failed", {"error": str(error) or type(error).__name__, "type": type(error).__name__})
    return code if code not in (0, STOPPED) else _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
