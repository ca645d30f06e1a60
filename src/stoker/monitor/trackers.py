"""Trackers of figures: TensorBoard, Weights & Biases, MLflow, or one's own.

Each of these packages is imported by its own class, on its first use: none of them is needed to train.
A tracker runs in a process of its own. `TrackerProcesses` starts it and never waits for it: the pipe to it
is the bounded queue, and a line that does not fit is dropped and counted. So a tracker that is slow, hangs
or crashes costs the run nothing but a message. After the run it has a timeout, and is then killed.
"""

# The packages are optional, and ship few types.
# pyright: reportMissingImports=false

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, TypeAlias, cast

from stoker.errors import ConfigError
from stoker.plugins import find_plugin
from stoker.runtime.processes.child import LIGHT, Child
from stoker.runtime.processes.entry import Connection
from stoker.schema import Json, flatten_settings

PROJECT = "stoker"
"""Project of Weights & Biases, and experiment of MLflow, where the environment names no other."""
PARAM_BYTES = 500
"""MLflow refuses longer values of settings."""

Ending: TypeAlias = Literal["finished", "failed", "interrupted", "killed"]
"""How a run ended; `killed` where it could not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Facts about a run that a tracker is given before its first figure."""

    name: str
    """Name of the run."""
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
        """Open what figures go to.

        Args:
            run: The run, before its first figure.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the figures of a step.

        Args:
            step: Steps trained so far; it never falls.
            values: Figures by name, as `training/stall`.
        """
        ...

    def end(self, status: Ending) -> None:
        """Write what is left, and close.

        Args:
            status: `finished`, `failed`, `interrupted`, or `killed` where the run could not say.
        """
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Open an event file; one that is there is left, since TensorBoard shows both as one run."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=10)
        lines = (f"    {name}: {value}" for name, value in flatten_settings(run.settings).items())
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: Ending) -> None:
        """Flush."""
        self._writer.add_text("status", status)
        self._writer.close()


class WeightsAndBiases:
    """A run in the project `stoker` or `WANDB_PROJECT`; without credentials offline, in the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one of this folder."""
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
        """Add one row to the run's history."""
        self._run.log(dict(values), step=step)

    def end(self, status: Ending) -> None:
        """Upload what is left, when online."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run in the experiment `stoker` of `MLFLOW_TRACKING_URI`, else of `mlflow.db` in the run's folder."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one of this folder."""
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
        settings = flatten_settings(run.settings).items()
        params = [Param(name, str(value)[:PARAM_BYTES]) for name, value in settings]
        for first in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._id, params=params[first : first + 100])
        keep_id(run, "mlflow", self._id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a metric each, in one call."""
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
                f"training.trackers names {name}, and the package {lacking[0]} is not installed",
                hint="pip install 'stoker[trackers]', or leave it out",
            )


def make_tracker(name: str) -> Tracker:
    """Return a new tracker of a name.

    Raises:
        ConfigError: It is unknown, or its package is not installed.
    """
    check_trackers([name])
    return cast("Tracker", find_plugin("stoker.trackers", name, "training.trackers").load()())


def kept_id(run: TrackedRun, name: str) -> str | None:
    """Return the id under which a resumed run was begun, if it was."""
    file = run.folder / f"tracker-{name}.id"
    return file.read_text(encoding="utf-8").strip() if run.resumed and file.is_file() else None


def keep_id(run: TrackedRun, name: str, text: str) -> None:
    """Record the id for a run that continues this one."""
    (run.folder / f"tracker-{name}.id").write_text(text + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------
# The process of each tracker, and the pipe to it.


PIPE_BYTES = 1 << 20
"""Lines that wait in a pipe: some thousand rows of a dozen figures."""
END_S = 60.0
"""Seconds that all trackers together have to finish once the run is over."""
LAST_BYTES = 2000
"""Of a tracker's log, to find its last line."""


class TrackerProcesses:
    """The trackers of one run; close it with `end`."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        say: Callable[[str], None],
        *,
        end_s: float = END_S,
    ) -> None:
        """Start a process for each name; `say` gets a line about whatever goes wrong with one."""
        self._end_s = end_s
        self._pipes = [_TrackerProcess(name, run.folder / f"tracker-{name}.log", say) for name in names]
        start: dict[str, Json] = {**asdict(run), "folder": str(run.folder)}
        for pipe in self._pipes:
            pipe.send({"start": start})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass figures on, as far as they are numbers; returns at once."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for pipe in self._pipes if finite else ():
            pipe.send({"step": step, "values": dict(finite)})

    def end(self, status: Ending) -> None:
        """Tell how the run ended, and wait for all trackers together; what is not done by then is killed."""
        until = time.monotonic() + self._end_s
        for pipe in self._pipes:
            pipe.close(status, until)
        for pipe in self._pipes:
            pipe.finish(until, self._end_s)


class _TrackerProcess:
    """One tracker's process."""

    def __init__(self, name: str, log: Path, say: Callable[[str], None]) -> None:
        self._name, self._log, self._say = name, log, say
        self._sent = self._dropped = 0
        self._ended = self._told = False
        theirs, ours = os.pipe()
        self._stdin = os.fdopen(ours, "wb", buffering=0)
        try:
            with log.open("ab") as out:
                self._child = Child(
                    "stoker.monitor.trackers:track",
                    what=f"a process for tracker {name}",
                    arguments={"name": name},
                    shared=[theirs],
                    output=out.fileno(),
                    modules=LIGHT,  # the process stays as long as the run
                    death_signal=None,  # it reports the end of a run that was killed
                )
        except BaseException:
            self._stdin.close()
            raise
        finally:
            os.close(theirs)
        with suppress(OSError):  # a user's quota of pipe memory; the ordinary 64 KiB do as well
            fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._stdin.fileno(), False)

    def send(self, row: Mapping[str, Json]) -> bool:
        """Return True if it took the entire line. Half a line would spoil the next, so it ends the pipe."""
        if self._ended:
            return False
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._sent += 1
        try:
            written = self._stdin.write(line)
        except BrokenPipeError:
            return self._gone()
        if written == len(line):
            return True
        self._dropped += 1
        if self._dropped == 1:
            self._say(
                f"tracker {self._name} does not keep up: figures are dropped, the run continues ({self._log})"
            )
        if written:
            self._stop_sending()
        return False

    def close(self, status: Ending, until: float) -> None:
        """Say how the run ended, as soon as there is room for that, and close the pipe."""
        if not self._ended:
            select.select([], [self._stdin], [], max(0.0, until - time.monotonic()))
            self.send({"end": status})
        self._stop_sending()

    def finish(self, until: float, all_s: float) -> None:
        """Wait for the process until then, and say what it did not do."""
        if not self._child.wait(until - time.monotonic()):
            self._child.stop(0.0)
            self._say(f"tracker {self._name} was not done {all_s:g} s after the run: ended ({self._log})")
        elif self._child.exit and self._child.exit.code and not self._dropped:
            self._gone()
        self._child.close()
        if self._dropped:
            self._say(f"tracker {self._name}: {self._dropped} of {self._sent} rows dropped ({self._log})")

    def _stop_sending(self) -> None:
        self._ended = True
        with suppress(OSError):
            self._stdin.close()

    def _gone(self) -> bool:
        """Say once that the process failed, in its own last words."""
        if not self._told:
            self._told = True
            self._say(
                f"tracker {self._name} failed, the run continues: {_last_line(self._log)} ({self._log})"
            )
        self._stop_sending()
        return False


def _last_line(log: Path) -> str:
    """Return the last line of a log, or that it is empty."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return "its log cannot be read"


def serve(tracker: Tracker, lines: Iterable[str], log: TextIO) -> int:
    """Hand lines to a tracker; returns how many rows it failed to keep."""
    failed = 0
    for text in lines:
        row: Mapping[str, Any] = json.loads(text)
        if "start" in row:
            facts: dict[str, Any] = row["start"]
            folder = Path(facts.pop("folder"))
            tracker.start(TrackedRun(folder=folder, **facts))
        elif "end" in row:
            tracker.end(row["end"])
            return failed
        else:
            try:
                tracker.log(row["step"], row["values"])
            except Exception as error:  # noqa: BLE001 (code of others; one row lost is no reason to lose all)
                failed += 1
                print(f"step {row['step']}: {type(error).__name__}: {error}", file=log, flush=True)
    tracker.end("killed")
    return failed


def track(connection: Connection) -> int:
    """Run a tracker, in the child; 0 where it kept everything.

    A run that was killed closes the pipe without a last word, and its tracker then reports that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the run, which then says how it ended
    try:
        with os.fdopen(connection.shared[0], encoding="utf-8") as lines:
            failed = serve(make_tracker(connection.arguments["name"]), lines, sys.stderr)
    except Exception as error:  # noqa: BLE001 (the edge of the process: its last line is what the run repeats)
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if failed:
        print(f"{failed} rows were not kept", file=sys.stderr)  # noqa: T201
    return 1 if failed else 0
