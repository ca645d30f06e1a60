"""Where figures go in addition to a run's folder: TensorBoard, Weights & Biases, MLflow, or one's own.

A tracker runs in a process of its own (`tracking.py` starts it), so it may block, fail or take its time. Each
of these packages is imported by its own class, on its first use: none of them is needed to train.
"""

# The packages are optional, and ship few types.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

from stoker.errors import ConfigError
from stoker.plugins import find_plugin
from stoker.schema import Json

PROJECT = "stoker"
"""Project of Weights & Biases, and experiment of MLflow, where the environment names no other."""
PARAM_BYTES = 500
"""MLflow refuses longer values of settings."""

Ending: TypeAlias = Literal["finished", "failed", "interrupted", "killed"]
"""How a run ended; `killed` where it could not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first figure."""

    name: str
    folder: Path
    """The run's folder; a tracker that keeps files keeps them there."""
    settings: Mapping[str, Json]
    """All settings, by section."""
    resumed: bool = False
    """It continues a run that was started before in the same folder."""


class Tracker(Protocol):
    """Keeps the figures of one run. Calls come one after another, from one thread of a process of its own.

    Whatever it raises is written to `tracker-<name>.log` in the run's folder; an error in `start` ends it,
    one in `log` loses that row. The run continues either way.
    """

    def start(self, run: TrackedRun) -> None:
        """Open what figures go to."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures by name (`training/stall`) at a step; steps never fall."""
        ...

    def end(self, status: Ending) -> None:
        """Bring everything to where it belongs, and close."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Open an event file; one that is there is left, since TensorBoard shows both as one run."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=10)
        lines = (f"    {name}: {value}" for name, value in flat(run.settings).items())
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: Ending) -> None:
        """Flush."""
        self._writer.add_text("status", status)
        self._writer.close()


class WeightsAndBiases:
    """A run in the project `stoker` or `WANDB_PROJECT`; without credentials offline, in the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or go on with the one of this folder."""
        import wandb

        settings: Any = wandb.setup().settings
        offline = settings.mode == "offline" or not (
            settings.mode != "online"
            or wandb.login(prompt=False)  # without a prompt: there is no user to answer
        )
        self._run: Any = wandb.init(
            project=settings.project or PROJECT,
            name=run.name,
            id=kept_id(run, "wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            mode="offline" if offline else settings.mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        keep_id(run, "wandb", str(self._run.id))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row of the run's history."""
        self._run.log(dict(values), step=step)

    def end(self, status: Ending) -> None:
        """Upload what is left, when online."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run in the experiment `stoker` of `MLFLOW_TRACKING_URI`, else of `mlflow.db` in the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or go on with the one of this folder."""
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Its store of plain files is no longer developed, and refused unless asked for by name.
        own = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else own)
        self._id = kept_id(run, "mlflow")
        if self._id is not None:
            return
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = (
            self._client.create_experiment(
                PROJECT,
                # A server keeps what is uploaded to it where it likes.
                artifact_location=None if mlflow.is_tracking_uri_set() else self._artifacts(run),
            )
            if found is None
            else found.experiment_id
        )
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = [Param(name, str(value)[:PARAM_BYTES]) for name, value in flat(run.settings).items()]
        for first in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._id, params=params[first : first + 100])
        keep_id(run, "mlflow", self._id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A metric each, in one call."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, status: Ending) -> None:
        """Say how the run ended."""
        words = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, words.get(status, "KILLED"))

    @staticmethod
    def _artifacts(run: TrackedRun) -> str:
        return (run.folder.resolve() / "mlflow").as_uri()


NEEDS: Mapping[str, Sequence[str]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "alembic", "sqlalchemy"),
}
"""Packages that each of our own needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown names, and packages that are not installed, before any work is done.

    Raises:
        ConfigError: One of them.
    """
    for name in names:
        plugin = find_plugin("stoker.trackers", name, "training.trackers")
        needs = NEEDS[name] if plugin.is_own else ()
        lacking = [need for need in needs if find_spec(need) is None]
        if lacking:
            raise ConfigError(
                f"training.trackers names {name}, and the package {lacking[0]} is not installed. "
                "pip install 'stoker[trackers]', or leave it out"
            )


def make_tracker(name: str) -> Tracker:
    """Return a new tracker of a name.

    Raises:
        ConfigError: It is unknown, or its package is not installed.
    """
    check_trackers([name])
    return cast("Tracker", find_plugin("stoker.trackers", name, "training.trackers").load()())


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Json]:
    """Settings of all sections by their whole name.

    >>> flat({"training": {"lr": 0.1, "order": "full"}})
    {'training.lr': 0.1, 'training.order': 'full'}
    """
    found: dict[str, Json] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            found[prefix + name] = cast("Json", value)
    return found


def kept_id(run: TrackedRun, name: str) -> str | None:
    """The id under which a resumed run was begun, if it was."""
    file = run.folder / f"tracker-{name}.id"
    return file.read_text(encoding="utf-8").strip() if run.resumed and file.is_file() else None


def keep_id(run: TrackedRun, name: str, text: str) -> None:
    """Record the id for a run that continues this one."""
    (run.folder / f"tracker-{name}.id").write_text(text + "\n", encoding="utf-8")
