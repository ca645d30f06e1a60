"""What a run folder remembers between commands: whether its run finished, and how long a step took.

`run.json` lies beside the checkpoints. An interrupted run with the same settings goes on where it stopped; a
finished one, or one with other settings, begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.errors import FormatError
from stoker.pipeline.build import tasks_of
from stoker.schema import Json, canonical_json, digest_json
from stoker.store.local import LocalStorage
from stoker.store.strict_json import read_strict

FILE = "run.json"
LIMIT_BYTES = 1 << 20


def run_dir_of(config: Config) -> Path:
    """`training.run_dir`, or `runs/{task}`."""
    return Path(config.training.run_dir or f"runs/{tasks_of(config)[0]}")


def settings_digest(config: Config, fingerprints: Mapping[str, str]) -> str:
    """What an interrupted run must share with this one: model, training and data, wherever they lie."""
    settings: dict[str, Any] = config.to_dict()
    training = {k: v for k, v in settings["training"].items() if k not in _FREE}
    kept: dict[str, Json] = {"training": training, "model": settings["model"], "caches": dict(fingerprints)}
    return digest_json(kept)


_FREE = ("tier", "reserve_bytes", "run_dir", "latent_cache_dir", "checkpoint_every", "device")
"""Settings of `training` that change no batch."""


def unfinished(config: Config, digest: str) -> bool:
    """Whether the run folder holds an interrupted run of these settings."""
    diary = _read(run_dir_of(config))
    return diary.get("settings") == digest and diary.get("finished") is False


def last_step_s(config: Config) -> float | None:
    """Seconds that a step of the last run here took, loading left out; None when there was none."""
    step_s = _read(run_dir_of(config)).get("step_s")
    return step_s if isinstance(step_s, float) and step_s > 0 else None


def write_diary(run_dir: Path, *, digest: str, finished: bool, step_s: float | None) -> None:
    """Note the state of a run.

    Raises:
        ReadOnlyError: The folder cannot be written.
    """
    text = canonical_json({"settings": digest, "finished": finished, "step_s": step_s})
    LocalStorage(run_dir).put(FILE, text.encode())


def _read(run_dir: Path) -> dict[str, Any]:
    """The diary; empty when there is none, or a damaged one."""
    with suppress(OSError, FormatError):
        return read_strict(LocalStorage(run_dir).read(FILE, limit_bytes=LIMIT_BYTES), where=FILE)
    return {}
