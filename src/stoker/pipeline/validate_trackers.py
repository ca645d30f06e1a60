"""Whether trackers can be had, and whether what they send to answers; none of them can end a run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stoker.errors import ConfigError, StalledError
from stoker.monitor.trackers import BUILT_IN, check_trackers
from stoker.pipeline.checks import Row, failed
from stoker.pipeline.folders import obstacle
from stoker.runtime.threads import call_within

ANSWER_S = 5.0
"""Seconds that a server has to take a connection."""
WANDB = "https://api.wandb.ai"
PORTS = {"http": 80, "https": 443}


def check_each(names: tuple[str, ...], environment: Mapping[str, str]) -> list[Row]:
    """A row for each tracker.

    Args:
        names: As `training.trackers` has them.
        environment: In which servers and credentials are named.
    """
    return [_row(name, environment) for name in names]


def _row(name: str, environment: Mapping[str, str]) -> Row:
    check = f"tracker {name}"
    try:
        check_trackers([name])
    except ConfigError as error:
        return failed(check, error)
    if name not in BUILT_IN or name == "tensorboard":
        detail = "event files in the run's folder" if name in BUILT_IN else "found; of another package"
        return Row(check=check, status="pass", detail=detail)
    server, offline = (_wandb if name == "wandb" else _mlflow)(environment)
    if server is None:
        return Row(check=check, status="pass", detail=offline)
    if urlsplit(server).scheme not in PORTS:
        return _of_a_file(check, server)
    why, shown = unreachable(server), _without_user(server)
    if why is None:
        return Row(check=check, status="pass", detail=f"{shown} answers")
    detail = f"{shown} does not answer ({why}): figures may be lost, the run goes on; {offline}"
    return Row(check=check, status="warn", detail=detail)


def _without_user(server: str) -> str:
    """An address without the name and password that it may carry.

    >>> _without_user("https://me:secret@host:5000/path")
    'https://host:5000'
    """
    parts = urlsplit(server)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _wandb(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Its server, or None and why none is asked."""
    server = environment.get("WANDB_BASE_URL") or WANDB
    mode = environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return None, f"offline, as WANDB_MODE={mode} says: files in the run's folder, for `wandb sync`"
    without = "without credentials it works offline, in the run's folder"
    host = urlsplit(server).hostname or ""
    if environment.get("WANDB_API_KEY") or host in _netrc(environment):
        return server, "WANDB_MODE=offline keeps them in the run's folder"
    return None, f"offline: {without} (no WANDB_API_KEY, and {host} is not in ~/.netrc)"


def _netrc(environment: Mapping[str, str]) -> str:
    try:
        return (Path(environment.get("HOME", "")) / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mlflow(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Its server, or None and where it keeps figures instead."""
    server = environment.get("MLFLOW_TRACKING_URI")
    local = "mlflow.db in the run's folder"
    return (server, f"without MLFLOW_TRACKING_URI it is {local}") if server else (None, f"offline: {local}")


def _of_a_file(check: str, address: str) -> Row:
    """A database or folder of this machine."""
    place = Path(address.partition(":///")[2] or address.partition(":")[2] or address)
    why = obstacle(place.parent) if address.startswith(("sqlite:", "file:", "/", ".")) else None
    if why is None:
        return Row(check=check, status="pass", detail=f"{address.partition('://')[0]} store, not a server")
    detail = f"MLFLOW_TRACKING_URI names {place}, and {why}: figures would be lost, the run goes on"
    return Row(check=check, status="warn", detail=detail)


def unreachable(server: str, answer_s: float = ANSWER_S) -> str | None:
    """Why nobody takes a connection at an address; None: somebody does."""
    parts = urlsplit(server)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]

    def connect() -> None:
        socket.create_connection((host, port), timeout=answer_s).close()

    try:  # names are looked up without a deadline of their own
        call_within(answer_s + 1, connect, server)
    except StalledError:
        return f"no answer in {answer_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None
