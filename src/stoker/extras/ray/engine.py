"""Precompute on a Ray cluster: `precompute(..., engine=RayEngine(address="auto"))`.

The driver is the process that called precompute. It holds the lock of the cache, cuts what is missing into
slices and has each encoded by a task (`task.py`), on any node that has room. Tasks
write their own shards to the cache folder or its URL, which all nodes must see. No other state exists: when
the driver is killed, so are its tasks, and the next run begins with what the folder lacks.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import errors
from stoker.config.load import make_config
from stoker.config.sections import RayConfig
from stoker.errors import ConfigError, Interrupted, ResourceError, StalledError, StokerError
from stoker.extras.ray.board import Board
from stoker.extras.ray.task import (
    Slice,
    Slices,
    TaskLoad,
    encode_slice,
    end_process,
    marked_folder,
    process_state,
    versions,
)
from stoker.plan.resources import automatic_device, probe
from stoker.precompute.encode import EncodeClock
from stoker.precompute.progress import ProgressSink, Rate, Snapshot, WorkerView
from stoker.precompute.settings import EncodeShare, ShareOutcome
from stoker.runtime.signals import Interrupts
from stoker.runtime.threads import start_thread
from stoker.sources.pickling import pickle_for_process
from stoker.sources.protocol import SelfCheckingSource
from stoker.store import Failure
from stoker.units import MIB, format_count

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# The connection to a cluster: made within a timeout, asked for room, closed at the end.
#
# Ray reads its own environment (the token, where its files go); nothing of it is read here.


ray: Any = import_module("ray")
"""The library, which is an extra; what comes out of it is checked where it is used."""
STORE_BYTES = 256 * MIB
"""Object store of a cluster that we start, in addition to what is put into it."""
_LISTENING_S = 5.0
_JOIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """The CPUs and GPUs that one task takes of a node."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        """Return them as settings."""
        return f"num_cpus={self.num_cpus:g} num_gpus={self.num_gpus:g}"

    def times(self, resources: dict[str, float]) -> int:
        """Return how many tasks fit into these resources."""
        rooms = [
            int(resources.get(name, 0.0) / wanted + 1e-9)
            for name, wanted in (("CPU", self.num_cpus), ("GPU", self.num_gpus))
            if wanted > 0
        ]
        return min(rooms, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node that is alive."""

    address: str
    resources: dict[str, float]

    def __str__(self) -> str:
        """Return its address, and what it has for tasks."""
        cpus, gpus = self.resources.get("CPU", 0.0), self.resources.get("GPU", 0.0)
        return f"{self.address} (CPU {cpus:g}, GPU {gpus:g})"


class RayCluster:
    """A connection from the first use until `close`; one that the caller had is used and left open."""

    def __init__(self, settings: RayConfig) -> None:
        self.settings = settings
        self._is_ours = False
        self._closed = threading.Event()

    def connect(self, interrupts: Interrupts, *, store_bytes: int) -> None:
        """Connect, unless there is a connection.

        Args:
            interrupts: End the wait.
            store_bytes: Size of what will be put into the object store. A cluster that we start has room for
                that and a little more.

        Raises:
            StalledError: The cluster did not answer in time.
            ConfigError: No cluster was found, or it wants a token.
            Interrupted: A signal came.
        """
        if ray.is_initialized():
            return
        settings = self.settings
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if settings.address is None:
            options |= {
                "address": "local",
                "num_cpus": max(1, int(probe().cpus)),
                "object_store_memory": STORE_BYTES + store_bytes,
                "include_dashboard": False,
            }
        else:
            _check_listening(settings.address, min(_LISTENING_S, settings.connect))
            options |= {"address": settings.address}
        try:
            _call_within(settings.connect, lambda: ray.init(**options), interrupts, self._closed)
        except StokerError:
            raise
        except Exception as error:
            raise _connect_error(error, settings.address) from error
        self._is_ours = True

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are alive."""
        return [
            ClusterNode(address=node["NodeManagerAddress"], resources=dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def need(self, *, device: str, threads: int) -> TaskResources:
        """Return what a task takes: by the settings, else by the nodes.

        Args:
            device: Where the encoder runs.
            threads: Threads that torch computes with; a task has as many.
        """
        settings = self.settings
        gpus = settings.num_gpus
        if gpus is None:
            gpus = 1.0 if device.startswith("cuda") else 0.0
        if settings.num_cpus is not None:
            return TaskResources(num_cpus=settings.num_cpus, num_gpus=gpus)
        least = TaskResources(num_cpus=1, num_gpus=gpus)
        shares = [
            found.get("CPU", 1.0) / (max(1.0, found["GPU"] // gpus) if gpus else 1.0)
            for found in (node.resources for node in self.nodes())
            if least.times(found)
        ]
        most = float("inf") if gpus else float(threads)
        cpus = max(1.0, float(int(min([*shares, most])))) if shares else 1.0
        return TaskResources(num_cpus=cpus, num_gpus=gpus)

    def no_room_error(self, need: TaskResources) -> ResourceError:
        """Return the error for a cluster without a node that could ever run a task."""
        nodes = ", ".join(map(str, self.nodes())) or "none"
        return ResourceError(
            f"no node of the Ray cluster can run a task that takes {need}; the nodes: {nodes}",
            hint="Ask for less (precompute.ray.num_cpus, precompute.ray.num_gpus), or add such a node",
        )

    def free(self) -> str:
        """Describe the resources that are free at the moment."""
        found = cast("dict[str, float]", ray.available_resources())
        return f"CPU {found.get('CPU', 0.0):g}, GPU {found.get('GPU', 0.0):g}"

    def close(self) -> None:
        """Close the connection if it is ours; a cluster that we started ends with it."""
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()
            self._closed.set()
            self._closed = threading.Event()


def _check_listening(address: str, timeout_s: float) -> None:
    """Refuse an address where no process listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`: Ray knows where
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise StalledError(
            f"no Ray cluster answers at {address}: {error}",
            hint="Expected the address that `ray start --head` prints; start the cluster, or leave "
            "--address out for one on this machine",
        ) from error


def _call_within(
    timeout_s: float, call: Callable[[], Any], interrupts: Interrupts, closed: threading.Event
) -> None:
    """Make a call that may hang in a thread, which is left behind if it does.

    In a thread Ray installs no signal handlers. The thread lives until `closed`: the kernel ends a cluster
    that we started together with the thread that started it.
    """
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            ended.append(error)
        else:
            ended.append(None)
            closed.wait()

    thread = start_thread(run, "stoker-ray-connect")
    waited = 0.0
    while not ended:
        thread.join(_JOIN_S)
        waited += _JOIN_S
        if interrupts.signal is not None:
            raise Interrupted("stopped while connecting to the Ray cluster; nothing was started")
        if not ended and waited > timeout_s:
            raise StalledError(
                f"the Ray cluster did not answer within {timeout_s:g} s",
                hint="Look at it with `ray status`; a wrong RAY_AUTH_TOKEN looks like this, too. Give more "
                "time with precompute.ray.connect",
            )
    if ended[0] is not None:
        raise ended[0]


def _connect_error(error: Exception, address: str | None) -> StokerError:
    text = " ".join(str(error).split())[:600]
    where = "on this machine" if address is None else f"at {address}"
    if isinstance(error, ray.exceptions.AuthenticationError) or "oken" in text or "nauthenticated" in text:
        return ConfigError(
            f"the Ray cluster {where} wants a token: {text}",
            hint="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on the cluster; "
            "`ray get-auth-token` prints the one of this account",
        )
    if isinstance(error, ConnectionError):
        return ConfigError(
            f"there is no Ray cluster {where}: {text}",
            hint="Start one with `ray start --head`, give --address host:port, or leave it out for one on "
            "this machine",
        )
    return StokerError(f"the Ray cluster {where} cannot be used: {type(error).__name__}: {text}")


# ----------------------------------------------------------------------------------------------------------
# Progress: the reports of all tasks put together into the snapshots that one machine shows.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """How far a task says it is."""

    node: str = ""
    process: tuple[str, int, int] = ("", 0, 0)
    """Ray's name of the node, the process id there, and when the process began by the node's clock."""
    stage: str = ""
    """`prepare`, `read` until something is encoded, then `encode`."""
    encoded: int = 0
    written_bytes: int = 0
    sample: int = -1
    """The first sample of the encode batch that is being made."""
    call_s: float = 0.0
    busy: float = 0.0
    shard_fill: tuple[int, int] = (0, 0)
    last_failure: str = ""


class RoundProgress:
    """Shows how far a round is."""

    def __init__(self, share: EncodeShare, sink: ProgressSink | None, *, device: str) -> None:
        self._share, self._sink, self._device = share, sink, device
        self._begun = time.monotonic()
        self._shown = 0.0
        self._rate = Rate(self._begun)
        self._quarantined = len(share.folder.failures().keys() - set(share.missing.tolist()))
        self._record_bytes = 0.0
        """Bytes of one record on disk, roughly: of tasks that have ended only the records are known."""
        self.last_note = ""
        """The latest note of a task, as a sentence after another."""

    def note(self, text: str) -> None:
        """Pass on a note of a task."""
        self.last_note = f". It said last: {text}"
        if self._sink is not None:
            self._sink.note(text)

    def show(
        self, reports: Sequence[TaskReport], encoded: int, failures: Sequence[Failure], *, last: bool
    ) -> None:
        """Show how far the round is, if it is time for that."""
        now = time.monotonic()
        if self._sink is None or (not last and now - self._shown < self._sink.interval_s):
            return
        self._shown = now
        self._sink.update(self._snapshot(now, reports, encoded, failures))

    def _snapshot(
        self, now: float, reports: Sequence[TaskReport], encoded: int, failures: Sequence[Failure]
    ) -> Snapshot:
        share, working = self._share, [view for view in reports if view.stage != "prepare"]
        total, told = share.folder.recipe.count, sum(view.encoded for view in working)
        encoded += told
        nodes = len({view.node for view in reports})
        samples = [view.sample for view in working if view.sample >= 0]
        calls = [view.call_s for view in working if view.call_s]
        first = min(samples, default=-1)
        if told:
            self._record_bytes = sum(view.written_bytes for view in working) / told
        return Snapshot(
            name=share.folder.name,
            total=total,
            done=total - len(share.missing) + encoded + len(failures),
            encoded=encoded,
            adopted=share.adopted,
            seconds=now - self._begun,
            rate=self._rate(now, encoded),
            written_bytes=int(encoded * self._record_bytes),
            workers=tuple(
                WorkerView(number=i + 1, stage=view.stage, sample=view.sample, seconds=0.0, name=view.node)
                for i, view in enumerate(reports)
            ),
            device=f"{self._device}, {len(reports)} tasks on {nodes} nodes",
            group=range(first, max(samples, default=-1) + 1) if samples else range(0),
            call_s=sum(calls) / len(calls) if calls else 0.0,
            busy=sum(view.busy for view in working) / len(working) if working else 0.0,
            shard_fill=(
                sum(view.shard_fill[0] for view in working),
                sum(view.shard_fill[1] for view in working),
            ),
            quarantined=self._quarantined + len(failures),
            last_failure=next((view.last_failure for view in reports if view.last_failure), ""),
        )


# ----------------------------------------------------------------------------------------------------------
# A slice that a task encodes: what is known of the task, and what its errors mean.


LOST = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.TaskCancelledError,
)
"""A worker or a node is lost; another one can take over its slice."""


@dataclass(slots=True, kw_only=True)
class SliceTask:
    """A slice, and the task that encodes it."""

    slice: Slice
    heard: float | None = None
    """When its last report came; None: it waits for a place."""
    report_index: int = -1
    view: TaskReport = field(default_factory=TaskReport)
    is_halted: bool = False
    """It was told to end, since others have nothing left to do."""
    _placed: float = 0.0

    @property
    def key(self) -> tuple[int, int]:
        """Its key on the board."""
        return self.slice.key, self.slice.losses

    @property
    def left_s(self) -> float:
        """Seconds of work left, by its own pace; 0 where that is not known."""
        if self.heard is None or not self.view.encoded:
            return 0.0
        left = len(self.slice.numbers) - self.view.encoded
        return left / self.view.encoded * (self.heard - self._placed)

    def take_report(self, index: int, report: TaskReport) -> None:
        """Store its latest report."""
        self.heard = time.monotonic()
        self._placed = self._placed or self.heard
        self.report_index, self.view = index, report


def task_error(task: SliceTask, error: Exception) -> StokerError:
    """Return the error for a task that Ray could not run, or that raised an unexpected exception."""
    text = " ".join(str(error).split())
    if "No module named 'stoker" in text:
        return ConfigError(
            f"a node of the Ray cluster cannot import this version of stoker: {text[-300:]}",
            hint="Install the driver's version of it on every node",
        )
    return StokerError(
        f"the task for samples {task.slice.span} failed: {type(error).__name__}: {text[-600:]}"
    )


# ----------------------------------------------------------------------------------------------------------
# One round on a cluster: each slice becomes a task, answers are counted, what is lost is sent again.
#
# When all slices are sent and a worker has nothing to do, it gets half of what the slowest task has left.


LOOK_S = 0.2
LAST_REPORTS_S = 2.0
"""How long the board may take to give the last reports of tasks."""
GET_S = 60.0
"""How long the short answer of a task that has ended may take to arrive."""
NODES_EVERY_S = 5.0
DRIVER_S = 120.0
"""How long one turn of the driver's loop may take before its guardian ends it."""
FIRST_S = 30.0
"""How long the first tasks last; later ones as long as the run so far, since each costs a second or two."""
COMMIT_SHARE, COMMIT_LEAST_S, COMMIT_MOST_S = 0.05, 1.0, 30.0
"""A task commits what it has after a twentieth of the run so far: at most that is lost with it."""
SIGHT_S = 90.0
"""How long it may take until the driver sees a stored file: file servers cache directories for a minute."""
SHARE_S = 10.0
"""Work that one worker may have left while another has none; sharing it costs two starts of workers."""
STOP_S = 30.0
"""Time to stop that a task gets, in addition to the time to write one encode batch."""


class Round:
    """Drives a share of work to its end.

    Args:
        share: What to encode.
        sink: Gets the progress.
        cluster: A connected one.
        payload: Reference to the `TaskLoad` in the object store.
        folder: How tasks find the cache folder, from `marked_folder`.
    """

    def __init__(
        self,
        share: EncodeShare,
        sink: ProgressSink | None,
        *,
        cluster: RayCluster,
        payload: Any,
        folder: dict[str, Any],
    ) -> None:
        self._share, self._cluster, self._payload, self._folder = share, cluster, payload, folder
        self._interrupts = share.interrupts
        self._begun = time.monotonic()
        settings = share.settings
        self._threads = torch.get_num_threads()
        device = automatic_device()[0] if settings.device == "auto" else settings.device
        self._need = cluster.need(device=device, threads=self._threads)
        self._slices = Slices(share.folder.recipe, share.missing, share.source.runs())
        self._tasks: dict[Any, SliceTask] = {}
        self._room, self._counted_at = 0, float("-inf")
        self._moved = self._begun
        """When the last report or answer came."""
        self._encoded, self._encode_s = 0, 0.0
        self._workers, self._lost_workers, self._abandoned = 0, 0, 0
        self._failures: list[Failure] = []
        self._quiet_s = sum(getattr(settings.timeouts, one.name) for one in fields(settings.timeouts))
        self._clock = EncodeClock(limit_s=DRIVER_S)
        self._device = "cuda" if self._need.num_gpus else device
        self._progress = RoundProgress(share, sink, device=self._device)
        # Where this node is one of the cluster's, the board is on it: driver and board are lost together.
        here = _on_node(ray.get_runtime_context().get_node_id(), soft=True)
        actor = ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        self._board = actor.remote()
        self._send = ray.remote(encode_slice).options(
            num_cpus=self._need.num_cpus,
            num_gpus=self._need.num_gpus,
            max_retries=0,  # `_lost` does it: what a lost task has stored is not encoded again
            scheduling_strategy="SPREAD" if cluster.settings.placement == "spread" else "DEFAULT",
        )
        self._asked: Any = None
        """The answer of the board that is awaited."""
        self._run = secrets.token_hex(8)

    def run(self) -> ShareOutcome:
        """Encode everything, or stop cleanly at a signal.

        Raises:
            StokerError: As `RayEngine`.
        """
        finished = False
        try:
            while self._tasks or not self._slices.empty:
                if self._interrupts.signal is not None:
                    break
                self._clock.alive(bounded=True)
                self._send_slices()
                self._collect(LOOK_S)
                self._read_board()
                self._check()
                self._split_longest()
                self._show()
            else:
                finished = True
        finally:
            self._stop()
            self._clock.alive(bounded=False)
        if finished:
            self._wait_until_visible()
        self._read_last_reports()
        self._show(last=True)
        return ShareOutcome(
            finished=finished,
            encoded=self._encoded,
            encode_seconds=self._encode_s,
            workers=self._workers,
            lost_workers=self._lost_workers,
            abandoned_workers=self._abandoned,
            failures=tuple(self._failures),
        )

    def _send_slices(self) -> None:
        """Send a slice to every free place of the cluster.

        Raises:
            ResourceError: No node could ever run a task, and none joined in time.
        """
        now, settings = time.monotonic(), self._cluster.settings
        if now - self._counted_at > NODES_EVERY_S:
            self._counted_at = now
            self._room = sum(self._need.times(node.resources) for node in self._cluster.nodes())
            if not self._room:
                error = self._cluster.no_room_error(self._need)
                if settings.address is None or now - self._moved > settings.wait:
                    raise error
                log.warning("%s. Waiting %g s for one", error, settings.wait)
        while len(self._tasks) < self._room and not self._slices.empty:
            one = self._slices.take(self._room - len(self._tasks))
            reference = self._send.remote(self._order(one), [self._payload], self._board)
            self._tasks[reference] = SliceTask(slice=one)

    def _order(self, one: Slice) -> dict[str, Any]:
        """Return the order for a task, in plain values."""
        elapsed_s = time.monotonic() - self._begun
        return {
            "run": self._run,
            "key": (one.key, one.losses),
            "numbers": one.numbers,
            "lasts_s": min(self._cluster.settings.slice, max(FIRST_S, elapsed_s)),
            "versions": versions(),
            "process": process_state(),
            "folder": self._folder,
            "threads": self._threads,
            "num_cpus": self._need.num_cpus,
            "device": self._device,
            "commit_after_s": min(COMMIT_MOST_S, max(COMMIT_LEAST_S, COMMIT_SHARE * elapsed_s)),
        }

    def _collect(self, timeout_s: float) -> None:
        """Take the answers of tasks that have ended."""
        if not self._tasks:
            select.select([self._interrupts.fd] if self._interrupts.fd >= 0 else [], [], [], timeout_s)
            return
        ready, _ = ray.wait([*self._tasks], num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait([*self._tasks], num_returns=len(self._tasks), timeout=0)
        for reference in ready:
            task = self._tasks.pop(reference)
            self._moved = time.monotonic()
            try:
                answer = ray.get(reference, timeout=GET_S)
            except LOST as error:
                self._lost(task, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            except ray.exceptions.RayError as error:
                raise task_error(task, error) from error
            else:
                self._take_answer(task, answer)

    def _take_answer(self, task: SliceTask, answer: dict[str, Any]) -> None:
        if answer["kind"] == "failed":
            kind = getattr(errors, answer["error"], StokerError)
            fact = f"node {answer['node']}, samples {task.slice.span}: {answer['message']}"
            raise kind(fact, hint=answer["hint"])
        if not (answer["finished"] or task.is_halted or answer["encoded"] or answer["failures"]):
            self._lost(task, "something other than Stoker told it to stop")
            return
        self._slices.put_back(answer["rest"])
        self._encoded += answer["encoded"]
        self._encode_s += answer["encode_seconds"]
        self._workers = max(self._workers, answer["workers"])
        self._lost_workers += answer["lost_workers"]
        self._abandoned += answer["abandoned_workers"]
        self._failures += [Failure(**failure) for failure in answer["failures"]]

    def _split_longest(self) -> None:
        """End the task with the most left if others have nothing: the rest is cut into new slices."""
        tasks = self._tasks.values()
        if not self._slices.empty or len(tasks) >= self._room or any(task.is_halted for task in tasks):
            return
        reference = max(self._tasks, key=lambda one: self._tasks[one].left_s, default=None)
        if reference is not None and self._tasks[reference].left_s > SHARE_S:
            self._tasks[reference].is_halted = True
            ray.cancel(reference, force=False)

    def _lost(self, task: SliceTask, cause: str) -> None:
        """Put back what a lost worker has not stored, for another one.

        Raises:
            StokerError: This slice was lost too often.
        """
        if self._interrupts.signal is not None:
            return
        self._read_last_reports()
        one, node = task.slice, task.view.node or "a node"
        if one.losses >= self._cluster.settings.max_retries:
            raise StokerError(
                f"samples {one.span} were lost with their worker {one.losses + 1} times, at last on {node}: "
                f"{cause}{self._progress.last_note}",
                hint="What is stored stays; run it again to resume. precompute.ray.max_retries allows more",
            )
        unstored = self._share.folder.missing(retry_quarantined=True)
        rest = len(np.intersect1d(one.numbers, unstored))
        self._encoded += len(one.numbers) - rest
        self._slices.give_back(one, unstored)
        log.warning(
            "%s lost samples %s (%s): %s of them are stored, the other %s go to another worker",
            node, one.span, cause, format_count(len(one.numbers) - rest), format_count(rest),
        )  # fmt: skip

    def _read_last_reports(self) -> None:
        """Read all reports until now; twice, since an answer that is awaited already may be older."""
        for _ in range(2):
            self._read_board(LAST_REPORTS_S)

    def _read_board(self, wait_s: float = 0.0) -> None:
        """Read what tasks report; a lost board is started by Ray and asked again."""
        if self._asked is None:
            self._asked = self._board.read.remote([task.key for task in self._tasks.values()])
        if not ray.wait([self._asked], timeout=wait_s)[0]:
            return
        asked, self._asked = self._asked, None
        try:
            reports, notes = ray.get(asked, timeout=GET_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return
        now, by_key = time.monotonic(), {task.key: task for task in self._tasks.values()}
        for key, (index, report) in reports.items():
            task = by_key.get(tuple(key))
            if task is not None and index != task.report_index:
                task.take_report(index, TaskReport(**report))
                self._moved = now
        for note in notes:
            self._progress.note(note)

    def _check(self) -> None:
        """End tasks that hang where their own supervision does not see it; limit the wait for a place.

        Raises:
            StalledError: No report of any task came for as long as the settings allow.
        """
        now, settings = time.monotonic(), self._cluster.settings
        waiting = [task for task in self._tasks.values() if task.heard is None]
        none_placed = bool(self._tasks) and len(waiting) == len(self._tasks)
        if none_placed and now - self._moved > settings.wait:
            raise StalledError(
                f"the Ray cluster gave none of {len(waiting)} tasks a place within {settings.wait:g} s. "
                f"Each takes {self._need}; free now: {self._cluster.free()}",
                hint="Ask for less, wait for other jobs to end, or give more time with precompute.ray.wait",
            )
        for reference, task in list(self._tasks.items()):
            limit_s = settings.wait if task.view.stage == "prepare" else self._quiet_s
            if task.heard is not None and now - task.heard > limit_s:
                del self._tasks[reference]
                _kill_process(task)
                self._lost(task, f"it said nothing for {limit_s:g} s in stage {task.view.stage}")

    def _show(self, *, last: bool = False) -> None:
        reports = [task.view for task in self._tasks.values() if task.heard is not None]
        self._progress.show(reports, self._encoded, self._failures, last=last)

    def _stop(self) -> None:
        """Let tasks that still run commit and end, and wait for that within a limit."""
        if not self._tasks:
            return
        for reference in self._tasks:
            ray.cancel(reference, force=False)
        until = time.monotonic() + self._share.settings.timeouts.write + STOP_S
        while self._tasks and time.monotonic() < until:
            self._clock.alive(bounded=True)
            ready, _ = ray.wait([*self._tasks], num_returns=1, timeout=LOOK_S)
            for reference in ready:
                self._tasks.pop(reference)
                try:
                    answer = ray.get(reference, timeout=GET_S)
                except ray.exceptions.RayError:  # it never began, or was lost: nothing more to save
                    continue
                self._encoded += answer.get("encoded", 0)
                self._encode_s += answer.get("encode_seconds", 0.0)
        for reference in self._tasks:
            ray.cancel(reference, force=True)

    def _wait_until_visible(self) -> None:
        """Wait until this node sees what tasks have stored from others.

        Raises:
            ConfigError: It does not become visible.
            Interrupted: A signal came.
        """
        quarantined = np.array([failure.number for failure in self._failures], np.int64)
        expected: NDArray[np.int64] = np.setdiff1d(self._share.missing, quarantined)
        until = time.monotonic() + SIGHT_S
        while True:
            unseen = np.intersect1d(expected, self._share.folder.missing(retry_quarantined=True))
            if not len(unseen):
                return
            if time.monotonic() > until:
                raise ConfigError(
                    f"{format_count(len(unseen))} records that tasks have stored are not in "
                    f"{self._share.folder.path} as seen from {os.uname().nodename}, {SIGHT_S:g} s later "
                    f"(sample {unseen[0]} is the first)",
                    hint="Expected one folder on storage that all nodes share. Run it again to encode what "
                    "is missing",
                )
            if self._interrupts.signal is not None:
                raise Interrupted(
                    "stopped while waiting to see what tasks have stored. Run it again to resume"
                )
            self._clock.alive(bounded=False)
            time.sleep(1.0)


def _kill_process(task: SliceTask) -> None:
    """Kill a worker that may not answer Ray, with a task on its node: else its place would never be free."""
    node, *process = task.view.process
    there = _on_node(node, soft=False)
    ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there).remote(*process)


def _on_node(node: str, *, soft: bool) -> Any:
    """Return the strategy that places a task on a node; `soft`: on another one where that is impossible."""
    strategies: Any = ray.util.scheduling_strategies
    return strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=soft)


class RayEngine:
    """An `Engine` whose workers, encoders and writers are tasks of a Ray cluster.

    It connects when there is something to encode, and stays connected until `close`, or the end of a `with`.

    Args:
        settings: The section `precompute.ray`; None: its defaults.
        **changed: Settings by their names there, over those of `settings`, as `RayEngine(num_gpus=1)`.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    def __init__(self, settings: RayConfig | None = None, **changed: Any) -> None:
        if changed:
            given = {**(settings or RayConfig()).model_dump(), **changed}
            config = make_config({"precompute": {"engine": "ray", "ray": given}}, where="RayEngine")
            settings = config.precompute.ray
        self._cluster = RayCluster(settings or RayConfig())

    def __call__(self, share: EncodeShare, sink: ProgressSink | None) -> ShareOutcome:
        """See `Engine`.

        Raises:
            SourceError: Source or encoder cannot be sent to other nodes.
            ConfigError: No such cluster was found, or a node does not fit: it sees other files, or has other
                versions.
            StalledError: The cluster does not answer, or gives no task a place.
            ResourceError: No node has what a task takes.
            StokerError: A task failed, or was lost too often.
        """
        if share.settings.workers != 0 and isinstance(share.source, SelfCheckingSource):
            with share.interrupts.raising():
                share.source.check_in_child()
        payload = _pack(share)
        self._cluster.connect(share.interrupts, store_bytes=len(payload))
        with marked_folder(share.folder, os.uname().nodename) as folder:
            reference = ray.put(np.frombuffer(payload, np.uint8))
            del payload
            return Round(share, sink, cluster=self._cluster, payload=reference, folder=folder).run()

    def close(self) -> None:
        """Close the connection; a cluster that we started ends."""
        self._cluster.close()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pack(share: EncodeShare) -> bytes:
    """Return the pickled `TaskLoad` of a share.

    Raises:
        SourceError: Source or encoder cannot be pickled.
    """
    settings = replace(
        share.settings, progress=None, part=(0, 1), devices=(), always_in_child=True, overwrite=False
    )
    load = TaskLoad(
        source=share.source, encoder=share.encoder, settings=settings, files=share.folder.recipe.files
    )
    return pickle_for_process(load, "job", otherwise="Or encode on this machine alone (--engine local)")
