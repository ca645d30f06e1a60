"""Precompute on a Ray cluster: `precompute(..., engine=RayEngine(address="auto"))`.

The driver, which is the process that asked, holds the claim of the cache, cuts what is missing into slices
(`slices.py`) and has each encoded by a task (`ray_task.py`), on whatever node has room. Tasks write shards of
their own to the cache folder or its address, which all nodes must see (`ray_folder.py`). Nothing is kept
elsewhere: when the driver is killed, so are its tasks, and the next run begins with what the folder lacks.
"""

from __future__ import annotations

import logging
import secrets
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import errors
from stoker.errors import ConfigError, Interrupted, StalledError, StokerError
from stoker.extras.ray.board import Board
from stoker.extras.ray.cluster import RayCluster, ray, whoami
from stoker.extras.ray.settings import RaySettings
from stoker.extras.ray.task import TaskLoad, encode_slice, end_process, marked, process_state, versions
from stoker.plan.resources import automatic_device
from stoker.precompute.encode import EncodeClock
from stoker.precompute.progress import ProgressSink, Rate, Snapshot, WorkerView
from stoker.precompute.settings import EncodeShare, ShareOutcome
from stoker.scale.slices import Slice, Slices
from stoker.sources.pickling import pickle_for_process
from stoker.sources.protocol import SelfCheckingSource
from stoker.store import Failure
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# All workers of a round in one view: their words put together into the snapshots that one machine shows.


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How far a task says it is."""

    node: str = ""
    process: tuple[str, int, int] = ("", 0, 0)
    """Ray's name of the node, the number of the process there, and when that began by the node's clock."""
    stage: str = ""
    """`prepare`, `read` until something is encoded, then `encode`."""
    encoded: int = 0
    written_bytes: int = 0
    sample: int = -1
    """The first of the group in hand."""
    call_s: float = 0.0
    busy: float = 0.0
    shard_fill: tuple[int, int] = (0, 0)
    last_failure: str = ""


class RoundProgress:
    """Shows a round."""

    def __init__(self, share: EncodeShare, sink: ProgressSink | None, *, device: str) -> None:
        self._share, self._sink, self._device = share, sink, device
        self._begun = time.monotonic()
        self._shown = 0.0
        self._rate = Rate(self._begun)
        self._aside = len(share.folder.failures().keys() - set(share.missing.tolist()))
        self._record_bytes = 0.0
        """Of one record as stored, about: tasks that have ended are counted in records."""
        self.last_note = ""
        """The latest of what tasks said, as a sentence."""

    def note(self, text: str) -> None:
        """Pass on what a task said."""
        self.last_note = f"It said last: {text}. "
        if self._sink is not None:
            self._sink.note(text)

    def show(self, views: Sequence[View], encoded: int, failures: Sequence[Failure], *, last: bool) -> None:
        """Show where the round stands, if it is time for that."""
        now = time.monotonic()
        if self._sink is None or (not last and now - self._shown < self._sink.interval_s):
            return
        self._shown = now
        self._sink.update(self._snapshot(now, views, encoded, failures))

    def _snapshot(
        self, now: float, views: Sequence[View], encoded: int, failures: Sequence[Failure]
    ) -> Snapshot:
        share, working = self._share, [view for view in views if view.stage != "prepare"]
        total, told = share.folder.recipe.count, sum(view.encoded for view in working)
        encoded += told
        nodes = len({view.node for view in views})
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
            seconds=now - self._begun,
            rate=self._rate(now, encoded),
            written_bytes=int(encoded * self._record_bytes),
            workers=tuple(
                WorkerView(number=i + 1, stage=view.stage, sample=view.sample, seconds=0.0, name=view.node)
                for i, view in enumerate(views)
            ),
            device=f"{self._device}, {len(views)} tasks on {nodes} nodes",
            group=range(first, max(samples, default=-1) + 1) if samples else range(0),
            call_s=sum(calls) / len(calls) if calls else 0.0,
            busy=sum(view.busy for view in working) / len(working) if working else 0.0,
            shard_fill=(
                sum(view.shard_fill[0] for view in working),
                sum(view.shard_fill[1] for view in working),
            ),
            quarantined=self._aside + len(failures),
            last_failure=next((view.last_failure for view in views if view.last_failure), ""),
        )


# ----------------------------------------------------------------------------------------------------------
# A slice that is out as a task: what is known of it, and what it means if it does not come back.


LOST = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.TaskCancelledError,
)
"""A worker or a node is gone, with what it was doing; another one can do it."""


@dataclass(slots=True, kw_only=True)
class Out:
    """A slice that is out."""

    slice: Slice
    heard: float | None = None
    """When it was last heard of; None: it waits for a place."""
    word: int = -1
    view: View = field(default_factory=View)
    halted: bool = False
    """It was told to end, for others have nothing left to do."""
    _placed: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """What the board knows it by."""
        return self.slice.key, self.slice.losses

    @property
    def left_s(self) -> float:
        """Work that it has left, by its own pace; 0 where that is not known."""
        if self.heard is None or not self.view.encoded:
            return 0.0
        left = len(self.slice.numbers) - self.view.encoded
        return left / self.view.encoded * (self.heard - self._placed)

    def hear(self, word: int, view: View) -> None:
        """Take in its latest word, the number of which says that it is a new one."""
        self.heard = time.monotonic()
        self._placed = self._placed or self.heard
        self.word, self.view = word, view


def why(error: Exception) -> str:
    """What Ray says of a loss, in short."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def failed(task: Out, error: Exception) -> StokerError:
    """The error for a task that Ray could not run, or that raised what none of ours does."""
    text = " ".join(str(error).split())
    if "No module named 'stoker" in text:
        return ConfigError(
            f"a node of the Ray cluster cannot import this version of stoker: {text[-300:]}. Install the "
            "driver's version of it on every node"
        )
    return StokerError(
        f"the task for samples {task.slice.span} failed: {type(error).__name__}: {text[-600:]}"
    )


# ----------------------------------------------------------------------------------------------------------
# One round on a cluster: slices go out as tasks, what comes back is counted, what is lost goes out again.
#
# A worker that has nothing to do, when all is handed out, gets half of what the one with the most still
# has.


log = logging.getLogger("stoker")

LOOK_S = 0.2
LAST_WORDS_S = 2.0
"""How long the board may take to say what tasks said last."""
GET_S = 60.0
"""How long the short answer of a task that has ended may take to come here."""
NODES_EVERY_S = 5.0
DRIVER_S = 120.0
"""How long one turn of the driver's loop may take before its guardian ends it."""
FIRST_S = 30.0
"""How long the first tasks last; later ones as long as the run so far, since each costs a second or two."""
SEAL_SHARE, SEAL_LEAST_S, SEAL_MOST_S = 0.05, 1.0, 30.0
"""A task seals what it has after a twentieth of the run so far: what losing it costs."""
SIGHT_S = 90.0
"""How long what tasks have stored may take to be seen here: file servers cache directories for a minute."""
SHARE_S = 10.0
"""Work that one worker may have left while another has none; sharing it costs two starts of workers."""
STOP_S = 30.0
"""What a task that is to stop gets in addition to the time to write one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a round takes place."""

    cluster: RayCluster
    settings: RaySettings
    payload: Any
    """Reference to source, encoder and settings, in the object store."""
    folder: dict[str, Any]
    """What tasks are told of the cache folder (`ray_folder.py`)."""


class Round:
    """Drives a share of work to its end."""

    def __init__(self, share: EncodeShare, sink: ProgressSink | None, site: Site) -> None:
        self._share, self._site = share, site
        self._interrupts = share.interrupts
        self._begun = time.monotonic()
        settings, cluster = share.settings, site.cluster
        self._threads = torch.get_num_threads()
        device = automatic_device()[0] if settings.device == "auto" else settings.device
        self._need = cluster.need(device=device, threads=self._threads)
        self._slices = Slices(share.folder.recipe, share.missing, share.source.runs())
        self._tasks: dict[Any, Out] = {}
        self._room, self._looked = 0, float("-inf")
        self._moved = self._begun
        """When anything was last heard."""
        self._encoded, self._encode_s = 0, 0.0
        self._workers, self._lost_workers, self._abandoned = 0, 0, 0
        self._failures: list[Failure] = []
        self._quiet_s = sum(getattr(settings.timeouts, one.name) for one in fields(settings.timeouts))
        self._clock = EncodeClock(limit_s=DRIVER_S)
        self._device = "cuda" if self._need.num_gpus else device
        self._views = RoundProgress(share, sink, device=self._device)
        self._board = (
            ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=_beside_us()).remote()
        )
        self._send = ray.remote(encode_slice).options(
            num_cpus=self._need.num_cpus,
            num_gpus=self._need.num_gpus,
            max_retries=0,  # we see to that ourselves: what a lost task has stored is not encoded again
            scheduling_strategy="SPREAD" if site.settings.placement == "spread" else "DEFAULT",
        )
        self._asked: Any = None
        """What the board is to answer."""
        self._run = secrets.token_hex(8)

    def go(self) -> ShareOutcome:
        """Encode everything, or stop in order at a signal.

        Raises:
            StokerError: As `RayEngine`.
        """
        finished = False
        try:
            while self._tasks or not self._slices.empty:
                if self._interrupts.signal is not None:
                    break
                self._clock.alive(bounded=True)
                self._send_out()
                self._collect(LOOK_S)
                self._listen()
                self._check()
                self._share_out()
                self._show()
            else:
                finished = True
        finally:
            self._stop()
            self._clock.alive(bounded=False)
        if finished:
            self._wait_for_sight()
        self._hear_out()
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

    def _send_out(self) -> None:
        """Give every place that the cluster has a slice."""
        now = time.monotonic()
        if now - self._looked > NODES_EVERY_S:
            self._looked = now
            self._room = sum(self._need.times(node.resources) for node in self._site.cluster.nodes())
            if not self._room:
                self._no_room(now)
        while len(self._tasks) < self._room and not self._slices.empty:
            one = self._slices.take(self._room - len(self._tasks))
            reference = self._send.remote(self._order(one), [self._site.payload], self._board)
            self._tasks[reference] = Out(slice=one)

    def _no_room(self, now: float) -> None:
        """No node of the cluster could ever run a task; others may join one that is not ours."""
        refusal = self._site.cluster.refuse(self._need)
        if self._site.cluster.own or now - self._moved > self._site.settings.wait_s:
            raise refusal
        log.warning("%s. Waiting %g s for one", refusal, self._site.settings.wait_s)

    def _order(self, one: Slice) -> dict[str, Any]:
        """What a task is told, in plain values."""
        elapsed_s = time.monotonic() - self._begun
        return {
            "run": self._run,
            "place": (one.key, one.losses),
            "numbers": one.numbers,
            "lasts_s": min(self._site.settings.slice_s, max(FIRST_S, elapsed_s)),
            "versions": versions(),
            "process": process_state(),
            "folder": self._site.folder,
            "threads": self._threads,
            "num_cpus": self._need.num_cpus,
            "device": self._device,
            "seal_after_s": min(SEAL_MOST_S, max(SEAL_LEAST_S, SEAL_SHARE * elapsed_s)),
        }

    def _collect(self, timeout_s: float) -> None:
        """Take in what has ended."""
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
                self._lost(task, why(error))
            except ray.exceptions.RayError as error:
                raise failed(task, error) from error
            else:
                self._take_in(task, answer)

    def _take_in(self, task: Out, answer: dict[str, Any]) -> None:
        if answer["kind"] == "failed":
            kind = getattr(errors, answer["error"], StokerError)
            raise kind(f"node {answer['node']}, samples {task.slice.span}: {answer['message']}")
        if not (answer["finished"] or task.halted or answer["encoded"] or answer["failures"]):
            self._lost(task, "something other than Stoker told it to stop")
            return
        self._slices.put_back(answer["rest"])
        self._encoded += answer["encoded"]
        self._encode_s += answer["encode_seconds"]
        self._workers = max(self._workers, answer["workers"])
        self._lost_workers += answer["lost_workers"]
        self._abandoned += answer["abandoned_workers"]
        self._failures += [Failure(**failure) for failure in answer["failures"]]

    def _share_out(self) -> None:
        """End the task with the most left if others have nothing: the rest is cut into new slices."""
        tasks = self._tasks.values()
        if not self._slices.empty or len(tasks) >= self._room or any(task.halted for task in tasks):
            return
        reference = max(self._tasks, key=lambda one: self._tasks[one].left_s, default=None)
        if reference is not None and self._tasks[reference].left_s > SHARE_S:
            self._tasks[reference].halted = True
            ray.cancel(reference, force=False)

    def _lost(self, task: Out, cause: str) -> None:
        """What a lost worker has not stored goes to another one.

        Raises:
            StokerError: That has happened too often to this slice.
        """
        if self._interrupts.signal is not None:
            return
        self._hear_out()
        one, node = task.slice, task.view.node or "a node"
        if one.losses >= self._site.settings.max_retries:
            raise StokerError(
                f"samples {one.span} were lost with their worker {one.losses + 1} times, at last on {node}: "
                f"{cause}. {self._views.last_note}What is stored stays; run it again to resume. "
                "precompute.ray.max_retries allows more"
            )
        unstored = self._share.folder.missing(retry_quarantined=True)
        rest = len(np.intersect1d(one.numbers, unstored))
        self._encoded += len(one.numbers) - rest
        self._slices.give_back(one, unstored)
        log.warning(
            "%s lost samples %s (%s): %s of them are stored, the other %s go to another worker",
            node, one.span, cause, format_count(len(one.numbers) - rest), format_count(rest),
        )  # fmt: skip

    def _hear_out(self) -> None:
        """Take in all that was said until now: what the board was asked before may be older."""
        for _ in range(2):
            self._listen(LAST_WORDS_S)

    def _listen(self, wait_s: float = 0.0) -> None:
        """What tasks say about themselves; a lost board is started and asked again."""
        if self._asked is None:
            self._asked = self._board.look.remote([task.place for task in self._tasks.values()])
        if not ray.wait([self._asked], timeout=wait_s)[0]:
            return
        asked, self._asked = self._asked, None
        try:
            words, notes = ray.get(asked, timeout=GET_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return
        now, places = time.monotonic(), {task.place: task for task in self._tasks.values()}
        for place, (word, view) in words.items():
            task = places.get(tuple(place))
            if task is not None and word != task.word:
                task.hear(word, View(**view))
                self._moved = now
        for note in notes:
            self._views.note(note)

    def _check(self) -> None:
        """End what hangs where its own supervision does not see it; do not wait for a place forever.

        Raises:
            StalledError: Nothing was heard of any task for as long as the settings allow.
        """
        now, settings = time.monotonic(), self._site.settings
        waiting = [task for task in self._tasks.values() if task.heard is None]
        none_placed = bool(self._tasks) and len(waiting) == len(self._tasks)
        if none_placed and now - self._moved > settings.wait_s:
            raise StalledError(
                f"the Ray cluster gave none of {len(waiting)} tasks a place within {settings.wait_s:g} s. "
                f"Each takes {self._need}; free now: {self._site.cluster.free()}. Ask for less, wait for "
                "other jobs to end, or give more time with precompute.ray.wait"
            )
        for reference, task in list(self._tasks.items()):
            limit_s = settings.wait_s if task.view.stage == "prepare" else self._quiet_s
            if task.heard is not None and now - task.heard > limit_s:
                del self._tasks[reference]
                _end(task)
                self._lost(task, f"it said nothing for {limit_s:g} s in stage {task.view.stage}")

    def _show(self, *, last: bool = False) -> None:
        views = [task.view for task in self._tasks.values() if task.heard is not None]
        self._views.show(views, self._encoded, self._failures, last=last)

    def _stop(self) -> None:
        """Have what still runs seal and end, and wait for that, but not for long."""
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

    def _wait_for_sight(self) -> None:
        """See here what tasks have stored elsewhere.

        Raises:
            ConfigError: It does not come into sight.
            Interrupted: A signal came.
        """
        aside = np.array([failure.number for failure in self._failures], np.int64)
        expected: NDArray[np.int64] = np.setdiff1d(self._share.missing, aside)
        until = time.monotonic() + SIGHT_S
        while True:
            unseen = np.intersect1d(expected, self._share.folder.missing(retry_quarantined=True))
            if not len(unseen):
                return
            if time.monotonic() > until:
                raise ConfigError(
                    f"{format_count(len(unseen))} records that tasks have stored are not in "
                    f"{self._share.folder.path} as seen from {whoami()}, {SIGHT_S:g} s later "
                    f"(sample {unseen[0]} is the first). Expected "
                    "one folder on storage that all nodes share. Run it again to encode what is missing"
                )
            if self._interrupts.signal is not None:
                raise Interrupted(
                    "stopped while waiting to see what tasks have stored. Run it again to resume"
                )
            self._clock.alive(bounded=False)
            time.sleep(1.0)


def _end(task: Out) -> None:
    """End a worker that may not answer Ray, with a task on its node: else its place would never be free."""
    node, *process = task.view.process
    strategies: Any = ray.util.scheduling_strategies
    beside = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    ray.remote(end_process).options(num_cpus=0, scheduling_strategy=beside).remote(*process)


def _beside_us() -> Any:
    """On this node if that is one of the cluster's: driver and board are gone together then."""
    strategies: Any = ray.util.scheduling_strategies
    here = ray.get_runtime_context().get_node_id()
    return strategies.NodeAffinitySchedulingStrategy(node_id=here, soft=True)


_OTHERWISE = "Or encode on this machine alone (--engine local)"


class RayEngine:
    """An `Engine` whose workers, encoders and writers are tasks of a Ray cluster.

    It connects when there is something to encode, and stays connected until `close`, or the end of a `with`.

    Args:
        settings: Which cluster and what of it; single settings by name win, as `RayEngine(num_gpus=1)`.

    Raises:
        ConfigError: A setting means nothing.
    """

    def __init__(self, settings: RaySettings | None = None, **changed: Any) -> None:
        self.settings = replace(settings or RaySettings(), **changed)
        self._cluster = RayCluster(self.settings)

    def __call__(self, share: EncodeShare, sink: ProgressSink | None) -> ShareOutcome:
        """See `Engine`.

        Raises:
            SourceError: Source or encoder cannot be sent to other nodes.
            ConfigError: There is no such cluster, or a node does not fit: it sees other files, or has other
                versions.
            StalledError: The cluster does not answer, or gives no task a place.
            ResourceError: No node has what a task takes.
            StokerError: A task failed, or was lost too often.
        """
        if share.settings.workers != 0 and isinstance(share.source, SelfCheckingSource):
            with share.interrupts.raising():
                share.source.check_in_child()
        payload = self._packed(share)
        self._cluster.connect(share.interrupts, store_bytes=len(payload))
        with marked(share.folder, whoami()) as folder:
            site = Site(
                cluster=self._cluster,
                settings=self.settings,
                payload=ray.put(np.frombuffer(payload, np.uint8)),
                folder=folder,
            )
            del payload
            return Round(share, sink, site).go()

    def close(self) -> None:
        """Let go of the cluster; one that we started ends."""
        self._cluster.close()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _packed(share: EncodeShare) -> bytes:
        settings = replace(
            share.settings, progress=None, part=(0, 1), devices=(), always_in_child=True, overwrite=False
        )
        load = TaskLoad(
            source=share.source,
            encoder=share.encoder,
            settings=settings,
            files=share.folder.recipe.files,
        )
        return pickle_for_process(load, "job", otherwise=_OTHERWISE)
