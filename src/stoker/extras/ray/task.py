"""What a task on a node does: see whether this is the right place, encode a slice, say how that ended.

It runs in a worker process of Ray, which serves many tasks: what it loaded for one it keeps for the next. The
order comes as plain values, since the driver's Stoker may be another than this one; source and encoder come
pickled by the driver, whom a cluster trusts by its token. An error of ours is answered by name, and not
raised: the driver ends the run with it, as one machine alone would.
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
from stoker.store.mirror.root import attach_mirror, root_of
from stoker.store.remote import FolderRemote, Remote, Retries
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# The cache folder as the driver tells tasks of it, and as a node finds it: one place, which is proven.
#
# A path is the same on all nodes. An address is seen from everywhere, and each node keeps a mirror of it on
# its own disk, where the driver has its one. In both the driver leaves a mark that no other place can hold.


SIGHT_S = 5.0
"""How long a file that the driver has just written may take to be seen on another node."""
_MARK_BYTES = 16


@contextmanager
def marked(folder: Folder, driver: str) -> Generator[dict[str, Any]]:
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


def find(told: dict[str, Any], node: str) -> Path:
    """The folder of caches as this node has it.

    Raises:
        ConfigError: The node sees another place than the driver.
        StokerError: As `attach_mirror`.
    """
    until = time.monotonic() + SIGHT_S
    while (found := _found(told)) is None:
        if time.monotonic() > until:
            raise ConfigError(
                f"node {node} does not find {told['mark']} in {told['url'] or told['cache_dir']}, where "
                f"{told['driver']} has just put it. Expected one place that all nodes see: a folder on "
                "storage that they share, at the same path, or an address (s3://, gs://, file://) behind "
                "which all find the same store, with its variables (AWS_ENDPOINT_URL, credentials) in Ray's "
                "environment there. Set training.latent_cache_dir (--cache-dir) to such a place"
            )
        time.sleep(0.1)
    return found


def _found(told: dict[str, Any]) -> Path | None:
    """This node's folder of caches, if the driver's mark is there."""
    mark = told["mark"]
    with suppress(FormatError, FileNotFoundError):  # nothing is there, or no mark
        remote, cache_dir = _place(told)
        answer = Retries().run(lambda: remote.get(mark), f"get {remote.url}/{mark}")
        if answer is not None and answer[0] == told["text"].encode():
            return cache_dir
    return None


def _place(told: dict[str, Any]) -> tuple[Remote, Path]:
    """Where the mark is to be, and this node's folder of caches; of an address its mirror.

    Raises:
        FormatError: There is no such cache at the address.
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
"""How long source and encoder may take to come to a node."""
_LEAST_BYTES = 64 * MIB
_LAST_WORD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLoad:
    """What all tasks of a run need; pickled once by the driver."""

    source: Source
    encoder: Encoder | None
    settings: PrecomputeSettings
    files: tuple[FileDigest, ...]
    """The source's files as the driver digested them."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What this process keeps from one task to the next: one run's, for that is how workers are used."""

    run: str
    load: TaskLoad
    folder: Folder
    compared: bool = False
    """The encoder's first call has been compared with a second (`EncodeShare.compare_first`)."""


_kept: dict[str, _Kept] = {}


def versions() -> dict[str, str]:
    """What must be the same on all nodes: it decides bits, or whether a pickle can be read."""
    python = ".".join(platform.python_version_tuple()[:2])
    # A build for other hardware (2.13.0+cu128) is no other version.
    return {
        "python": python,
        "torch": torch.__version__.partition("+")[0],
        "stoker": import_module("stoker").__version__,
    }


def encode_slice(order: dict[str, Any], payload: list[Any], board: Any) -> dict[str, Any]:
    """Encode a slice, on a node.

    Args:
        order: Plain values; `ray_round.py` makes them.
        payload: A reference to a `TaskLoad`, pickled, as bytes in an array; fetched once by a process.
        board: The actor that is told how far this is.

    Returns:
        How it ended: `kind` is `done` or `failed`, and which node says so.
    """
    answer: dict[str, Any] = {"node": _node(), "kind": "failed"}
    teller = _Teller(board, tuple(order["place"]), answer["node"])
    teller.say(stage="prepare")
    try:
        with _warnings_to(teller):
            kept = _prepare(order, payload, answer["node"])
            answer |= _encode(order, kept, teller)
            answer["kind"] = "done"
    except DeviceError as error:  # this process can never use the device again: another one takes the slice
        teller.insist(str(error))
        os._exit(1)
    except StokerError as error:
        answer |= {"error": type(error).__name__, "message": error.marked}
    except Exception as error:  # noqa: BLE001  a process edge: the driver raises it
        traceback.print_exc()
        answer |= {"error": "StokerError", "message": f"unexpected {type(error).__name__}: {error}"}
    return answer


def _node() -> str:
    """This node in messages; several may be on one machine."""
    return f"{os.uname().nodename} ({_ray().get_runtime_context().get_node_id()[:6]})"


def end_process(number: int, began: int) -> None:
    """Kill a process of this node if it is the one that is meant: one that is stopped hears nothing else."""
    with suppress(OSError):
        if _began(number) == began:
            os.kill(number, signal.SIGKILL)


def _began(number: int) -> int:
    """When a process began, in ticks of the node's clock."""
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19])


def _ray() -> Any:
    """The library, which is there when a task runs."""
    return import_module("ray")


def _prepare(order: dict[str, Any], payload: list[Any], node: str) -> _Kept:
    """Source, encoder and folder, as this process has them or gets them now.

    Raises:
        ConfigError: Versions differ, or the node does not see the driver's folder.
        SourceError: The node does not see the driver's data.
    """
    _check_versions(order["versions"], node)
    kept = _kept.get("run")
    if kept is not None and kept.run == order["run"]:
        return kept
    take_over(order["process"])
    told = order["folder"]
    cache_dir = find(told, node)
    load = _load(payload)
    digests = Agreed(load.files, Digests(cache_dir, load.settings.identity))
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
            f"node {node} cannot make the recipe of {told['name']}: {error.marked}. All nodes read the data "
            f"at the paths that {told['driver']} has it at: put it on storage that they share"
        ) from error
    _check_recipe(recipe, told, node)
    folder = open_folder(cache_dir, told["name"], recipe)
    _kept["run"] = _Kept(run=order["run"], load=load, folder=folder)
    return _kept["run"]


def _check_versions(driver: dict[str, str], node: str) -> None:
    here = versions()
    differing = [
        f"{name} {here[name]} (driver: {driver.get(name)})" for name in here if driver.get(name) != here[name]
    ]
    if differing:
        raise ConfigError(
            f"node {node} has {', '.join(differing)}. Expected the same versions on all nodes: records of "
            "two of them may differ. Install what the driver has"
        )


def _check_recipe(recipe: Recipe, told: dict[str, Any], node: str) -> None:
    if recipe.fingerprint != told["fingerprint"]:
        raise ConfigError(
            f"node {node} makes {told['name']} another cache: {recipe.fingerprint} there, "
            f"{told['fingerprint']} at the driver ({told['driver']}). The node sees other data, or has "
            "another version of the encoder's code. Fix the node; nothing of it was stored"
        )


def process_state() -> dict[str, Any]:
    """What a task takes over of the driver's process, in plain values."""
    cwd = str(Path.cwd())
    return {"cwd": cwd, "sys_path": [entry or cwd for entry in sys.path], "confined": confined_sources()}


def take_over(state: dict[str, Any]) -> None:
    """Find relative paths and modules of scripts as the driver does, where that is shared, and read source
    files only where the driver may.
    """
    with suppress(OSError):
        os.chdir(state["cwd"])
    sys.path.extend(entry for entry in state["sys_path"] if entry not in sys.path)
    confine_sources(state["confined"])


def _load(payload: list[Any]) -> TaskLoad:
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    fetched: Any = _ray().get(payload[0], timeout=FETCH_S)
    return cloudpickle.loads(memoryview(fetched))


def _encode(order: dict[str, Any], kept: _Kept, teller: _Teller) -> dict[str, Any]:
    torch.set_num_threads(order["threads"])  # what the driver would have encoded with; bits depend on it
    machine = probe()
    beside = max(1, round(machine.cpus / max(order["num_cpus"], 0.01)))
    settings = replace(
        kept.load.settings,
        seal_after_s=order["seal_after_s"],
        device=order["device"],
        memory_bytes=max(
            _LEAST_BYTES, min(kept.load.settings.memory_bytes, machine.host_bytes // (2 * beside))
        ),
    )
    with Interrupts(patient=True) as interrupts:
        done = encode_here(
            EncodeShare(
                source=kept.load.source,
                encoder=kept.load.encoder,
                folder=kept.folder,
                settings=settings,
                missing=order["numbers"],
                interrupts=interrupts,
                lasts_s=order["lasts_s"],
                compare_first=not kept.compared,
            ),
            teller,
        )
    kept.compared = True
    rest: NDArray[np.int64] = order["numbers"][:0]
    if not done.finished:  # asked of the folder here: the driver may see later what was stored here
        rest = np.intersect1d(order["numbers"], kept.folder.missing(retry_transient=False))
    failures = [asdict(failure) for failure in done.failures]
    return {**asdict(done), "failures": failures, "rest": rest}


class Agreed:
    """A `Digester` that takes the driver's word for files which are to all appearances the driver's.

    Size, times and inode decide; the device's number is a matter of each node. Where one file differs all are
    digested, since which of them are sampled depends on those before.
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


class _Teller:
    """A `ProgressSink` that tells the board."""

    def __init__(self, board: Any, place: tuple[int, ...], node: str) -> None:
        self._board = board
        self._place = place
        self._node = node
        self._process = (_ray().get_runtime_context().get_node_id(), os.getpid(), _began(os.getpid()))

    @property
    def interval_s(self) -> float:
        """Often enough for a person, seldom enough for an actor that a thousand tasks talk to."""
        return 1.0

    def say(self, **view: Any) -> None:
        """Tell where this task stands."""
        self._board.tell.remote(self._place, {"node": self._node, "process": self._process, **view})

    def update(self, snapshot: Snapshot) -> None:
        """See `ProgressSink`."""
        group = snapshot.group
        self.say(
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

    def insist(self, text: str) -> None:
        """Say something and wait until it is heard, for this process is about to end."""
        with suppress(Exception):  # a process that is gone cannot be told
            _ray().get(self._board.note.remote(f"{self._node}: {text}"), timeout=_LAST_WORD_S)

    def close(self) -> None:
        """See `ProgressSink`."""


class _Handler(logging.Handler):
    """Passes warnings to the board; an error may be the last word of this process."""

    def __init__(self, teller: _Teller) -> None:
        super().__init__(logging.WARNING)
        self._teller = teller

    def emit(self, record: logging.LogRecord) -> None:
        say = self._teller.insist if record.levelno >= logging.ERROR else self._teller.note
        say(record.getMessage())


@contextmanager
def _warnings_to(teller: _Teller) -> Generator[None]:
    logger, handler = logging.getLogger("stoker"), _Handler(teller)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
