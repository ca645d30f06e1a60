"""What a run folder remembers between commands: whether its run finished, and how long a step took.

`run.json` lies beside the checkpoints. An interrupted run with the same settings goes on where it stopped; a
finished one, or one with other settings, begins anew. The time of a step counts for steps of the
same work only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.errors import FormatError
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.locate import batch_size_of, trajectory_steps, windows_of
from stoker.schema import Json, Schema, canonical_json, digest_json, schema_to_json
from stoker.store.local import LocalStorage
from stoker.store.remote import local_path
from stoker.store.strict_json import read_strict

FILE = "run.json"
LIMIT_BYTES = 1 << 20


def run_dir_of(config: Config) -> Path:
    """`training.run_dir`, or `runs/{task}`, or `runs/{task}+{task}`.

    Raises:
        ConfigError: It is an address.
    """
    return local_path(config.training.run_dir or f"runs/{'+'.join(tasks_of(config))}", "training.run_dir")


def settings_digest(config: Config, fingerprints: Mapping[str, str]) -> str:
    """What an interrupted run must share with this one: model, training and data, wherever they lie."""
    settings: dict[str, Any] = config.to_dict()
    training = {k: v for k, v in settings["training"].items() if k not in _FREE}
    kept: dict[str, Json] = {"training": training, "model": settings["model"], "caches": dict(fingerprints)}
    if settings["stages"]:  # how long each is may change from one to the next
        kept["stages"] = [{k: v for k, v in own.items() if k != "epochs"} for own in settings["stages"]]
        del training["epochs"]
    if settings["tasks"] is not None:
        kept["tasks"] = settings["tasks"]
    return digest_json(kept)


_FREE = (
    "tier", "reserve_bytes", "run_dir", "latent_cache_dir", "checkpoint_every", "device", "max_stall",
    "rank_deadline", "trackers", "price_per_hour",
)  # fmt: skip
"""Settings of `training` that change no batch."""


def unfinished(config: Config, digest: str) -> int | None:
    """Ranks with which an interrupted run of these settings was begun in the run folder; None: none was."""
    diary = _read(run_dir_of(config))
    if diary.get("settings") != digest or diary.get("finished") is not False:
        return None
    return diary.get("ranks", 1)


def work_digest(config: Config, schema: Schema) -> str:
    """What decides how long a step takes: the model, its batch of records like `schema`, and the device."""
    training = config.training
    work: dict[str, Json] = {
        "model": config.to_dict()["model"],
        "fields": schema_to_json(schema),
        "batch_size": batch_size_of(config, trajectory_steps(schema)),
        "horizon": windows_of(config).horizons[1],
        "device": device_of(config),
        "amp": training.amp,
    }
    return digest_json(work)


def last_step_s(config: Config, schema: Schema) -> float | None:
    """Seconds that a step of the last run here took, loading left out; None when there was none like it."""
    diary = _read(run_dir_of(config))
    step_s = diary.get("step_s")
    if not isinstance(step_s, float) or step_s <= 0 or diary.get("work") != work_digest(config, schema):
        return None
    return step_s


def write_diary(
    run_dir: Path, *, digest: str, finished: bool, work: str, step_s: float | None, ranks: int = 1
) -> None:
    """Note the state of a run; `digest` and `work` as `settings_digest` and `work_digest` make them.

    Args:
        ranks: With how many it was begun.

    Raises:
        ReadOnlyError: The folder cannot be written.
    """
    text = canonical_json(
        {"settings": digest, "finished": finished, "work": work, "step_s": step_s, "ranks": ranks}
    )
    LocalStorage(run_dir).put(FILE, text.encode())


def _read(run_dir: Path) -> dict[str, Any]:
    """The diary; empty when there is none, or a damaged one."""
    with suppress(OSError, FormatError):
        return read_strict(LocalStorage(run_dir).read(FILE, limit_bytes=LIMIT_BYTES), where=FILE)
    return {}
