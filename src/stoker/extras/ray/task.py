"""A task on a node: check that this is the right place, encode a slice, answer how that ended.

It runs in a worker process of Ray, which serves many tasks: what it loaded for one it keeps for the next. The
order comes as plain values, since the driver's version of Stoker may differ. Source and encoder come pickled
by the driver, which a cluster trusts by its token. A `StokerError` is answered by name and not raised: the
driver ends the run with it, as one machine alone would. This module does not import Ray by name, so that it
can be tested without it.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError, DeviceError, FormatError, SourceError, StokerError
from stoker.plan.resources import probe
from stoker.precompute.progress import Snapshot
from stoker.precompute.run import encode_here
from stoker.precompute.settings import EncodeShare, PrecomputeSettings
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.signals import Interrupts
from stoker.sources.files import confine_sources, confined_sources, stamp_of
from stoker.sources.protocol import FileRef, Source
from stoker.store import Digests, FileDigest, Folder, Recipe, make_recipe, open_folder
from stoker.store.remote import FolderRemote, Remote, Retries
from stoker.store.storage import attach_mirror, root_of
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# The cache folder as the driver describes it to tasks, and as a node finds it, proven by a mark.
#
# A path is the same on all nodes. A URL is seen from everywhere, and each node keeps a mirror of it on its
# own disk, at the driver's path. In both the driver leaves a mark, whose random text no other place has.


SIGHT_S = 5.0
"""How long a file that the driver has just written may take to be seen on another node."""
_MARK_BYTES = 16


@contextmanager
def marked_folder(folder: Folder, driver: str) -> Generator[dict[str, Any]]:
    """Leave a mark in the cache folder while entered; yields in plain values where that is.

    Raises:
        ReadOnlyError: It cannot be written to.
    """
    cache_dir, text = folder.path.parent.parent.resolve(), secrets.token_hex(_MARK_BYTES)
    mark = f"{folder.name}/{folder.recipe.fingerprint}/.ray-{secrets.token_hex(6)}"
    told: dict[str, Any] = {
        "cache_dir": str(cache_dir),
        "name": folder.name,
        "fingerprint": folder.recipe.fingerprint,
        "mark": mark,
        "text": text,
        "driver": driver,
        "url": None,
    }
    remote: Remote = _folder(cache_dir)
    if (found := root_of(folder.path)) is not None:
        root, _ = found
        told |= {"url": root.url, "mirrors": str(root.path.parent), "limit_bytes": root.space.limit_bytes}
        remote = root.remote
    Retries().run(lambda: remote.put(mark, text.encode()), f"put {remote.url}/{mark}")
    try:
        yield told
    finally:
        with suppress(StokerError, OSError):
            Retries().run(lambda: remote.remove(mark), f"delete {remote.url}/{mark}")


def find_folder(told: dict[str, Any], node: str) -> Path:
    """Return the folder of caches as this node has it.

    Raises:
        ConfigError: The node sees another place than the driver.
        StokerError: As `attach_mirror`.
    """
    until = time.monotonic() + SIGHT_S
    while (found := _found(told)) is None:
        if time.monotonic() > until:
            raise ConfigError(
                f"node {node} does not find {told['mark']} in {told['url'] or told['cache_dir']}, where "
                f"{told['driver']} has just put it",
                hint="Set training.latent_cache_dir to one place that all nodes see. That is a "
                "folder on shared storage, at the same path, or a URL (s3://, gs://, file://). For a URL, "
                "every node needs its variables (AWS_ENDPOINT_URL, credentials) in Ray's environment",
            )
        time.sleep(0.1)
    return found


def _found(told: dict[str, Any]) -> Path | None:
    """Return this node's folder of caches, if the driver's mark is there."""
    mark = told["mark"]
    with suppress(FormatError, FileNotFoundError):  # no cache, or no mark
        remote, cache_dir = _place(told)
        answer = Retries().run(lambda: remote.get(mark), f"get {remote.url}/{mark}")
        if answer is not None and answer[0] == told["text"].encode():
            return cache_dir
    return None


def _place(told: dict[str, Any]) -> tuple[Remote, Path]:
    """Return where the mark should be, and this node's folder of caches; for a URL that is its mirror.

    Raises:
        FormatError: No such cache was found at the URL.
        StokerError: As `attach_mirror`.
    """
    if told["url"] is None:
        return _folder(Path(told["cache_dir"])), Path(told["cache_dir"])
    mirrors = Path(told["mirrors"])
    url = f"{told['url']}/{told['name']}/{told['fingerprint']}"
    with explain_disk_errors(mirrors):
        folder = attach_mirror(url, mirrors, told["limit_bytes"], must_exist=True)
    found = root_of(folder)
    assert found is not None, folder
    return found[0].remote, found[0].path


def _folder(path: Path) -> FolderRemote:
    return FolderRemote(f"file://{path}")


FETCH_S = 300.0
"""How long source and encoder may take to arrive on a node."""
_LEAST_BYTES = 64 * MIB
_LAST_NOTE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLoad:
    """Source, encoder and settings, which all tasks of a run need; pickled once by the driver."""

    source: Source
    encoder: Encoder | None
    settings: PrecomputeSettings
    files: tuple[FileDigest, ...]
    """The source's files as the driver digested them."""


@dataclass(slots=True, kw_only=True)
class _LoadedRun:
    """State that this process keeps from one task to the next: the last run's, as workers serve one."""

    run: str
    load: TaskLoad
    folder: Folder
    compared: bool = False
    """The encoder's first call has been compared with a second (`EncodeShare.compare_first`)."""


_loaded: dict[str, _LoadedRun] = {}


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes: bits, or reading a pickle, depend on them."""
    python = ".".join(platform.python_version_tuple()[:2])
    # A build for other hardware (2.13.0+cu128) is not another version.
    return {
        "python": python,
        "torch": torch.__version__.partition("+")[0],
        "stoker": import_module("stoker").__version__,
    }


def encode_slice(order: dict[str, Any], payload: list[Any], board: Any) -> dict[str, Any]:
    """Encode a slice, on a node.

    Args:
        order: Plain values, from `Round._order` in `engine.py`.
        payload: A reference to a `TaskLoad`, pickled, as bytes in an array; fetched once by a process.
        board: The actor that gets reports of how far this is.

    Returns:
        How it ended: `kind` is `done` or `failed`, and which node says so.
    """
    node = f"{os.uname().nodename} ({_ray().get_runtime_context().get_node_id()[:6]})"
    answer: dict[str, Any] = {"node": node, "kind": "failed"}
    reporter = _BoardReporter(board, tuple(order["key"]), node)
    reporter.report(stage="prepare")
    try:
        with _warnings_to(reporter):
            answer |= _encode(order, _prepare(order, payload, node), reporter)
            answer["kind"] = "done"
    except DeviceError as error:  # this process can never use the device again: another one takes the slice
        reporter.note_and_wait(str(error))
        os._exit(1)
    except StokerError as error:
        answer |= {"error": type(error).__name__, **error.to_json()}
    except Exception as error:  # noqa: BLE001  a process edge: the driver raises it
        traceback.print_exc()
        message = f"unexpected {type(error).__name__}: {error}"
        answer |= {"error": "StokerError", "message": message, "hint": ""}
    return answer


def end_process(pid: int, began: int) -> None:
    """Kill a process of this node if it began then; a stopped process answers no other signal."""
    with suppress(OSError):
        if _process_start(pid) == began:
            os.kill(pid, signal.SIGKILL)


def _process_start(pid: int) -> int:
    """Return when a process began, in ticks of the node's clock."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _ray() -> Any:
    """Return the library, which is installed where a task runs."""
    return import_module("ray")


def _prepare(order: dict[str, Any], payload: list[Any], node: str) -> _LoadedRun:
    """Return source, encoder and folder, loaded by an earlier task of this process or now.

    Raises:
        ConfigError: Versions differ, or the node does not see the driver's folder.
        SourceError: The node does not see the driver's data.
    """
    _check_versions(order["versions"], node)
    loaded = _loaded.get("run")
    if loaded is not None and loaded.run == order["run"]:
        return loaded
    take_over(order["process"])
    told = order["folder"]
    cache_dir = find_folder(told, node)
    load = _load(payload)
    digests = DriverDigests(load.files, Digests(cache_dir, load.settings.identity))
    try:
        recipe = make_recipe(
            load.source,
            load.encoder,
            dtype=load.settings.dtype,
            encode_batch=load.settings.encode_batch,
            digests=digests,
        )
    except SourceError as error:
        raise SourceError(
            f"node {node} cannot make the recipe of {told['name']}: {error.problem.fact}",
            hint=f"All nodes read the data at the paths that {told['driver']} has it at: put it on storage "
            "that they share",
        ) from error
    _check_recipe(recipe, told, node)
    folder = open_folder(cache_dir, told["name"], recipe)
    _loaded["run"] = _LoadedRun(run=order["run"], load=load, folder=folder)
    return _loaded["run"]


def _check_versions(driver: dict[str, str], node: str) -> None:
    here = versions()
    differing = [
        f"{name} {here[name]} (driver: {driver.get(name)})" for name in here if driver.get(name) != here[name]
    ]
    if differing:
        raise ConfigError(
            f"node {node} has {', '.join(differing)}",
            hint="Expected the same versions on all nodes: records of two of them may differ. Install what "
            "the driver has",
        )


def _check_recipe(recipe: Recipe, told: dict[str, Any], node: str) -> None:
    if recipe.fingerprint != told["fingerprint"]:
        raise ConfigError(
            f"node {node} makes {told['name']} another cache: {recipe.fingerprint} there, "
            f"{told['fingerprint']} at the driver ({told['driver']}). The node sees other data, or has "
            "another version of the encoder's code",
            hint="Fix the node; nothing of it was stored",
        )


def process_state() -> dict[str, Any]:
    """Return what a task takes over of the driver's process, in plain values."""
    cwd = str(Path.cwd())
    return {"cwd": cwd, "sys_path": [entry or cwd for entry in sys.path], "confined": confined_sources()}


def take_over(state: dict[str, Any]) -> None:
    """Find relative paths and modules of scripts as the driver does, and confine sources as it does."""
    with suppress(OSError):
        os.chdir(state["cwd"])
    sys.path.extend(entry for entry in state["sys_path"] if entry not in sys.path)
    confine_sources(state["confined"])


def _load(payload: list[Any]) -> TaskLoad:
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    fetched: Any = _ray().get(payload[0], timeout=FETCH_S)
    return cloudpickle.loads(memoryview(fetched))


def _encode(order: dict[str, Any], run: _LoadedRun, reporter: _BoardReporter) -> dict[str, Any]:
    torch.set_num_threads(order["threads"])  # as the driver would have encoded; bits depend on it
    machine = probe()
    tasks_here = max(1, round(machine.cpus / max(order["num_cpus"], 0.01)))
    settings = replace(
        run.load.settings,
        commit_after_s=order["commit_after_s"],
        device=order["device"],
        memory_bytes=max(
            _LEAST_BYTES, min(run.load.settings.memory_bytes, machine.host_bytes // (2 * tasks_here))
        ),
    )
    with Interrupts(patient=True) as interrupts:
        done = encode_here(
            EncodeShare(
                source=run.load.source,
                encoder=run.load.encoder,
                folder=run.folder,
                settings=settings,
                missing=order["numbers"],
                interrupts=interrupts,
                lasts_s=order["lasts_s"],
                compare_first=not run.compared,
            ),
            reporter,
        )
    run.compared = True
    rest: NDArray[np.int64] = order["numbers"][:0]
    if not done.finished:  # looked up on this node: the driver may see later what was stored here
        rest = np.intersect1d(order["numbers"], run.folder.missing(retry_transient=False))
    failures = [asdict(failure) for failure in done.failures]
    return {**asdict(done), "failures": failures, "rest": rest}


class DriverDigests:
    """A `Digester` that takes the driver's digests of files that look the same here.

    Size, times and inode decide; the number of the device differs between nodes. Where one file differs all
    are digested, since which of them are sampled depends on those before.
    """

    def __init__(self, known: Sequence[FileDigest], digests: Digests) -> None:
        self._known = known
        self._digests = digests

    def files(self, refs: Sequence[FileRef]) -> list[FileDigest]:
        """See `Digester`."""
        found: list[FileDigest] = []
        for ref, known in zip(refs, self._known, strict=False):
            try:
                stamp = stamp_of(ref.path.stat())
            except OSError:
                break
            if ref.name != known.name or _without_device(stamp) != _without_device(known.stamp):
                break
            found.append(replace(known, stamp=stamp))
        return found if len(found) == len(refs) else self._digests.files(refs)


def _without_device(stamp: tuple[int, ...]) -> tuple[int, ...]:
    return (*stamp[:3], *stamp[4:])


class _BoardReporter:
    """A `ProgressSink` that reports to the board."""

    interval_s = 1.0
    """Often enough for a person, seldom enough for an actor that a thousand tasks call."""

    def __init__(self, board: Any, key: tuple[int, ...], node: str) -> None:
        self._board = board
        self._key = key
        self._node = node
        self._process = (_ray().get_runtime_context().get_node_id(), os.getpid(), _process_start(os.getpid()))

    def report(self, **facts: Any) -> None:
        """Tell how far this task is, in fields of `TaskReport`."""
        self._board.report.remote(self._key, {"node": self._node, "process": self._process, **facts})

    def update(self, snapshot: Snapshot) -> None:
        """See `ProgressSink`."""
        group = snapshot.group
        self.report(
            stage="encode" if snapshot.encoded else "read",
            encoded=snapshot.encoded,
            written_bytes=snapshot.written_bytes,
            sample=group.start if group else -1,
            call_s=snapshot.call_s,
            busy=snapshot.busy,
            shard_fill=snapshot.shard_fill,
            last_failure=snapshot.last_failure,
        )

    def note(self, text: str) -> None:
        """See `ProgressSink`."""
        self._board.note.remote(f"{self._node}: {text}")

    def note_and_wait(self, text: str) -> None:
        """Send a note and wait until it arrived, since this process is about to end."""
        with suppress(Exception):  # the board may have ended
            _ray().get(self._board.note.remote(f"{self._node}: {text}"), timeout=_LAST_NOTE_S)

    def close(self) -> None:
        """See `ProgressSink`."""


class _BoardHandler(logging.Handler):
    """Passes warnings to the board; an error may be the last message of this process."""

    def __init__(self, reporter: _BoardReporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        urgent = record.levelno >= logging.ERROR
        send = self._reporter.note_and_wait if urgent else self._reporter.note
        send(record.getMessage())


@contextmanager
def _warnings_to(reporter: _BoardReporter) -> Generator[None]:
    logger, handler = logging.getLogger("stoker"), _BoardHandler(reporter)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# ----------------------------------------------------------------------------------------------------------
# Cut what is missing into slices for workers on other machines: complete encode batches, evenly among those
# that are idle.
#
# Arithmetic on indexes; nothing here knows who the workers are, or how fast. A worker ends early when its
# time is up, or when others have nothing left to do; the rest comes back and is cut again. So workers are
# started seldom, and a slow worker does not hold up others.


MOST_SAMPLES = 2**18
"""In a slice: its numbers are sent to the worker, 8 bytes each."""
NEAR = 8
"""A slice is shortened by up to this part of it to end where a run of the source does."""


@dataclass(slots=True, kw_only=True)
class Slice:
    """Samples that one worker is to encode."""

    key: int
    """Its number, counted from 0."""
    numbers: NDArray[np.int64]
    """Of samples, ascending; whole groups as far as they are missing."""
    losses: int = 0
    """How often a worker was lost while it had this, or what this is the rest of."""

    @property
    def span(self) -> str:
        """Its first and last sample."""
        return f"{self.numbers[0]}-{self.numbers[-1]}"


class Slices:
    """Hands out slices, and takes back what a worker did not get to, or was lost with.

    Args:
        recipe: Says where groups begin.
        missing: Numbers to encode, ascending.
        runs: Of the source; a slice ends with one where that is near, so that one worker reads a compressed
            chunk.
    """

    def __init__(self, recipe: Recipe, missing: NDArray[np.int64], runs: Sequence[range]) -> None:
        self._size = recipe.encode_batch.consecutive
        self._offsets = np.array([part.offset for part in recipe.parts], np.int64)
        self._edges = np.array([run.start for run in runs], np.int64)
        self._left: deque[NDArray[np.int64]] = deque([missing] if len(missing) else [])
        """The samples that no worker has, in pieces of complete groups."""
        self._made = 0
        self._again: deque[Slice] = deque()
        """Slices that were lost with their worker."""

    @property
    def empty(self) -> bool:
        """True if there is nothing to hand out."""
        return not self._again and not self._left

    def take(self, idle: int) -> Slice:
        """Return the next slice, one of `idle` workers' share of what is left; there must be something."""
        if self._again:
            return self._again.popleft()
        wanted = -(-sum(map(len, self._left)) // max(1, idle))
        piece = self._left.popleft()
        end = self._end(piece, min(wanted, MOST_SAMPLES))
        if end < len(piece):
            self._left.appendleft(piece[end:])
        self._made += 1
        return Slice(key=self._made - 1, numbers=piece[:end])

    def put_back(self, rest: NDArray[np.int64]) -> None:
        """Take back samples that a worker did not get to."""
        if len(rest):
            self._left.append(rest)

    def give_back(self, lost: Slice, unstored: NDArray[np.int64]) -> None:
        """Take back the unstored part of a slice whose worker was lost; the next worker gets it, counted."""
        rest = np.intersect1d(lost.numbers, unstored)
        if len(rest):
            self._again.append(Slice(key=lost.key, numbers=rest, losses=lost.losses + 1))

    def _end(self, piece: NDArray[np.int64], wanted: int) -> int:
        """Return the length of a slice: complete encode batches, up to the end of a run if that is near."""
        if wanted >= len(piece):
            return len(piece)
        latest = self._group_end(int(piece[wanted - 1]))
        at = int(np.searchsorted(self._edges, latest, side="right")) - 1
        if at >= 0 and self._edges[at] > piece[0]:
            near = int(np.searchsorted(piece, self._group_end(int(self._edges[at]) - 1)))
            if near >= wanted - wanted // NEAR:
                return near
        return int(np.searchsorted(piece, latest))

    def _group_end(self, number: int) -> int:
        """Return the sample after the last of its group, which may be a short one at the end of a part."""
        part = int(np.searchsorted(self._offsets, number, side="right")) - 1
        first = int(self._offsets[part])
        end = first + ((number - first) // self._size + 1) * self._size
        later = self._offsets[part + 1 : part + 2]
        return min(end, int(later[0])) if len(later) else end
