"""A local folder that stands for a URL, and the folders of caches in it.

`<root>/.mirror.json` says which URL and how large it may be. Each folder below that is not hidden stands for
the one of that name below the URL, so any process that is told a path finds the rest automatically.

Shards are here in part, block by block: `ensure` has what is needed here, `prefetch` begins to fetch what
will be, `release` says what may go first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, FormatError, ResourceError, StalledError, StokerError
from stoker.runtime.files import RegularFile
from stoker.runtime.jsonio import is_count, read_strict
from stoker.runtime.locks import lock_range
from stoker.runtime.threads import Pool, Ticket, is_exiting
from stoker.store.mirror_blocks import (
    BLOCK_BYTES,
    HERE,
    MAP_PREFIX,
    BlockFile,
    BlockMap,
    Space,
    make_block_file,
    remove_block_file,
)
from stoker.store.remote import (
    ANSWER_S,
    TIMEOUT_S,
    FolderRemote,
    Remote,
    RemoteObject,
    ReplacedError,
    Retries,
    parse_url,
)
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.store.format import Buffer

T = TypeVar("T")
LOCK_FILE = ".mirror-lock"
MARKER = ".mirror.json"
FETCH_ENDS_S = TIMEOUT_S + 2 * ANSWER_S
"""Seconds after which a fetch has ended: no attempt begins after `TIMEOUT_S`, and the last one ends too."""
RUN_BLOCKS = 8
"""Blocks that one request asks for at most."""
AT_ONCE = 16
"""Concurrent requests of one process that a reader waits for.

Prefetch has half as many in addition, so that it never fills their queue.
"""
SHARE = 4
"""What is on its way takes at most this part of the limit, one half and the other."""


@dataclass(slots=True)
class MirrorCounters:
    """Counts of what a mirror did for this process."""

    requests: int = 0
    """Requests for parts of shards, repeated ones included."""
    bytes: int = 0
    """Bytes of shards that came."""
    ahead_bytes: int = 0
    """Those of them that came ahead of need."""
    hits: int = 0
    """Reads that found all of their bytes here."""
    misses: int = 0
    """Reads that had to wait for the place."""
    direct: int = 0
    """Reads that went past the mirror: it is full, or what it held was given back too soon."""
    refetched: int = 0
    """Times that bytes here did not match their sums and were fetched again."""
    put_bytes: int = 0
    """Bytes of shards that were written here and put there."""
    wait_s: float = 0.0
    """Seconds that reads waited for the place, all threads together."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: float) -> None:
        """Count what happened; safe from several threads."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class MirrorRoot:
    """One mirror, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url, limit = read_marker(path)
        self.space = Space(path, limit, self.require)
        self.counters = MirrorCounters()
        self.retries = Retries()

    def require(self) -> None:
        """Check that it is still there; nothing is written where it was removed.

        Raises:
            ResourceError: It is not.
        """
        if not (self.path / MARKER).exists():
            raise ResourceError(
                f"{self.path} was removed while it was in use",
                hint=f"What it stood for is at {self.url}: open the cache again. `stoker cache gc` gives "
                "room back without harm to who reads",
            )

    @cached_property
    def remote(self) -> Remote:
        """The place itself; opened when first asked for, in this process."""
        return open_remote(self.url)

    @cached_property
    def run_blocks(self) -> int:
        """Blocks that one request asks for at most: fewer in a small mirror."""
        limit = self.space.limit_bytes
        return RUN_BLOCKS if limit is None else max(1, min(RUN_BLOCKS, limit // (16 * SHARE * BLOCK_BYTES)))

    @cached_property
    def pool(self) -> Pool:
        """Threads that fetch what is needed now."""
        return Pool(self._at_once(AT_ONCE), "stoker-fetch")

    @cached_property
    def ahead_pool(self) -> Pool:
        """Threads that fetch what will be."""
        return Pool(self._at_once(AT_ONCE // 2), "stoker-ahead")

    def _at_once(self, most: int) -> int:
        limit = self.space.limit_bytes
        if limit is None:
            return most
        return max(1, min(most, limit // (SHARE * self.run_blocks * BLOCK_BYTES)))


def read_marker(root: Path) -> tuple[str, int | None]:
    """Return the URL that a folder stands for, and its limit."""
    where = root / MARKER
    with RegularFile(where) as file:
        if file.size > MIB:
            raise FormatError(f"{where} has {file.size:,} bytes: it is not of a mirror")
        entries = read_strict(file.read_all(), where=str(where))
    url, limit = entries.get("url"), entries.get("limit_bytes")
    if entries.get("format") != 1 or not isinstance(url, str) or not (limit is None or is_count(limit)):
        raise FormatError(
            f"{where} is not understood", hint=f"Remove {root}, which is a copy, or upgrade stoker"
        )
    return parse_url(url), limit


def open_remote(url: str) -> Remote:
    """Return the place at a URL; asks it nothing yet.

    Raises:
        ConfigError: It is not a URL, or the extra that it needs is not installed.
    """
    url = parse_url(url)
    if url.startswith("file://"):
        return FolderRemote(url)
    try:
        objects = import_module("stoker.store.object_store")
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(
            f"{url} needs a package that is not installed", hint="pip install 'stoker[objects]'"
        ) from error
    return objects.ObjectRemote(url)


_roots: dict[tuple[int, Path], MirrorRoot] = {}
_roots_lock = threading.Lock()


def root_of(folder: Path) -> tuple[MirrorRoot, str] | None:
    """Return the mirror that a folder belongs to, and its name there; None for a plain folder."""
    folder = folder.absolute()
    for root in (folder.parent, folder.parent.parent):
        name = str(folder.relative_to(root))
        if not name.startswith(".") and (root / MARKER).exists():
            with _roots_lock:
                key = (os.getpid(), root)  # a fork has none of our threads
                if key not in _roots:
                    _roots[key] = MirrorRoot(root)
                return _roots[key], name
    return None


# ----------------------------------------------------------------------------------------------------------
# A file of a mirror, opened: what is read is fetched first, where it is not here.


TRIES = 3
"""Times that blocks are fetched which are given back before they are read; then they go past the mirror."""


class MirrorFile:
    """An `OpenFile` of an object. Safe to use from several threads."""

    def __init__(self, folder: MirrorFolder, copy: BlockFile) -> None:
        self._folder, self._copy = folder, copy
        self._direct = 0
        """Reads that went past the mirror."""
        self._counters = folder.counters

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._copy.map.size

    @property
    def origin(self) -> str:
        """The place that its bytes come from."""
        return self._folder.url_of(self._copy.name)

    @property
    def generation(self) -> tuple[int, int]:
        """Another value whenever bytes that were read before may have been fetched again."""
        return self._copy.map.generation, self._direct

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`, fetching what is not here.

        Raises:
            CorruptError: The file ends before `out` is full, or was replaced since it was opened.
            StalledError, ServiceError: It cannot be fetched.
        """
        if not len(out) or self._read_here(offset, [out]):
            self._counters.hits += 1  # under no lock: a count for people may miss one of two threads
            return
        self._check(offset, len(out))
        begin = perf_counter()
        try:
            self._fetched(offset, out)
        finally:
            self._counters.add(misses=1, wait_s=perf_counter() - begin)

    def _fetched(self, offset: int, out: memoryview[Any]) -> None:
        for _ in range(TRIES):
            try:
                self._folder.fetch(self._copy, [(offset, offset + len(out))])
            except ResourceError:
                break  # the disk is full; what is asked for can be had all the same
            if self._read_here(offset, [out]):
                return
        self._direct += 1  # two threads may count as one: each still sees another value than before its read
        self._folder.read_direct(self._copy, offset, out)

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` with what is here and in the page cache."""
        return self._read_here(offset, outs, wait=False)

    def fileno(self) -> int:
        """None: pages of it may not be here, and must be fetched before they are read."""
        return -1

    @property
    def direct_fd(self) -> int:
        """Of the local copy, which has some of the bytes."""
        return self._copy.file.fileno()

    def here(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these extents are here; those are noted as read now."""
        blocks = self._copy.map
        first = np.minimum(begins // blocks.block_bytes, blocks.count)
        last = np.minimum(-(-ends // blocks.block_bytes), blocks.count)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks.state != HERE)])
        found = (ends <= blocks.size) & (before[last] == before[first])
        for low, high in zip(first[found].tolist(), last[found].tolist(), strict=True):
            blocks.touch(low, high)
        self._counters.hits += int(found.sum())
        return found

    def prefetch(self, offset: int, size: int) -> None:
        """Begin to fetch bytes that will be read."""
        self._folder.begin_fetch(self._copy, [(offset, offset + size)])

    def refetch(self, offset: int, size: int) -> bool:
        """Have bytes that are not what they should be fetched again at the next read."""
        self._folder.refetch(self._copy, offset, offset + size)
        return True

    def close(self) -> None:
        """Nothing: what is open goes with the last who refers to it."""

    def _read_here(self, offset: int, outs: Sequence[memoryview[Any]], *, wait: bool = True) -> bool:
        copy = self._copy
        blocks, size = copy.map, sum(map(len, outs))
        first, last = blocks.blocks(offset, offset + size)
        if offset + size > blocks.size:
            return False
        before = blocks.generation
        if not blocks.holds(first, last):
            return False
        if not wait:
            there = copy.file.read_cached(offset, outs)
        else:
            there = True
            copy.file.read_into(offset, outs[0])
        if not there or blocks.generation != before:
            return False
        blocks.touch(first, last)
        return True

    def _check(self, offset: int, size: int) -> None:
        if offset + size > self.size:
            raise CorruptError(
                f"{self.origin} ends at byte {self.size}, expected {offset + size}: truncated or replaced"
            )


# ----------------------------------------------------------------------------------------------------------
# A folder, and the blocks that are fetched for it.


Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of a file, each from a first one to one past the last."""
QUEUED = 64
"""Requests ahead of need that wait or run at a time in one process; more are refused."""


class MirrorFolder:
    """One folder of a mirror, in this process. Threads may share it.

    Each block is brought here once for all processes of a machine, several requests at a time.
    """

    def __init__(self, root: MirrorRoot, name: str) -> None:
        self.root, self.name = root, name
        self.path: Path = root.path / name
        self.counters = root.counters
        """What all folders of this mirror did, in this process."""
        self.listed: dict[str, RemoteObject] = {}
        """Objects as the last list had them."""
        self._lock = threading.Lock()
        self._copies: WeakValueDictionary[str, BlockFile] = WeakValueDictionary()
        self._ahead: set[Ticket[bool]] = set()
        self._under_way: list[tuple[str, int, int]] = []
        """Blocks that threads of this process are fetching: shard, first, and one past the last."""
        self._came = threading.Condition(threading.Lock())
        """Told of every block that comes, and of every fetch that ends."""

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.root.url}/{self.name}"

    def url_of(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def key(self, name: str) -> str:
        """Return the name of a file below the mirror's URL."""
        return f"{self.name}/{name}"

    def ask(
        self, operation: str, name: str, attempt: Callable[[Remote], T], timeout_s: float = TIMEOUT_S
    ) -> T:
        """Return what `attempt` answers, repeated while that may help."""
        remote, what = self.root.remote, f"{operation} {self.url}/{name}"
        return self.root.retries.run(lambda: attempt(remote), what, timeout_s)

    def head(self, name: str) -> RemoteObject:
        """Return size and etag of a file there; its name is that below the mirror's URL."""
        return self.ask("head", name, lambda remote: remote.head(self.key(name)))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep all others on this machine from changing which files are here.

        Raises:
            ResourceError: The mirror was removed while it was in use.
        """
        self.root.require()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / LOCK_FILE
        path.touch(mode=0o600)
        with lock_range(path, 0, 1, timeout_s=TIMEOUT_S) as got:
            if not got:
                raise StalledError(
                    f"{path} has been locked for {TIMEOUT_S:g} s", hint="See what hangs on this machine"
                )
            yield

    def forget(self, name: str) -> None:
        """Remove what is here of a shard."""
        with self.locked():
            remove_block_file(self.path, name)

    def open(self, name: str) -> MirrorFile:
        """Open a shard for reading; nothing of it is fetched yet.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return MirrorFile(self, self._copy(name))

    def ensure(self, name: str, ranges: Ranges, timeout_s: float = TIMEOUT_S) -> None:
        """Have these bytes of a shard here, as far as the mirror's limit allows to keep them.

        Raises:
            StalledError: `timeout_s` passed; what came is kept.
            FileNotFoundError, ServiceError, ResourceError: They cannot be had, or there is no room.
        """
        self.fetch(self._copy(name), ranges, timeout_s)

    def prefetch(self, name: str, ranges: Ranges) -> int:
        """Begin to fetch bytes that will be needed; return how many were begun, in complete blocks.

        Fewer than `absent_bytes` means that enough is under way: ask again later. What goes wrong is not
        said: a read of those bytes meets it.
        """
        return self.begin_fetch(self._copy(name), ranges)

    def bring(self, name: str, ranges: Ranges) -> bool:
        """Fetch as `prefetch`, in the thread that calls; return whether all came."""
        copy = self._copy(name)
        came = [self._fetch_ahead(copy, *run) for run in self._runs_of(copy, ranges)]
        return all(came)

    def rank(self, name: str, used: NDArray[np.uint32]) -> None:
        """Set for each block of a shard how late it is removed when space runs out, the smallest first.

        The unit is seconds since 1970, as if the block had last been read then.
        """
        with suppress(FileNotFoundError, CorruptError):  # nothing of it is here
            blocks = BlockMap(self.path / f"{MAP_PREFIX}{name}")
            if len(used) == blocks.count:
                blocks.used[:] = used

    def absent_bytes(self, name: str, ranges: Ranges) -> int:
        """Return how many bytes have to be fetched before these are here, in complete blocks."""
        copy = self._copy(name)
        return sum(size_of(copy, run) for run in self._runs_of(copy, ranges))

    def release(self, name: str, ranges: Ranges) -> None:
        """Say that these bytes will not be needed soon: they go first when there is no room."""
        blocks = self._copy(name).map
        for begin, end in ranges:
            first, last = blocks.blocks(begin, end)
            blocks.used[first:last] = 0

    def _copy(self, name: str) -> BlockFile:
        listed = self.listed.get(name)
        with self._lock:
            copy = self._copies.get(name)
            if copy is not None and _is_of(copy, listed):
                return copy
        copy = self._opened(name, listed) or self._made(name, listed)
        with self._lock:
            self._copies[name] = copy
        return copy

    def _opened(self, name: str, listed: RemoteObject | None) -> BlockFile | None:
        """Return what is here of a shard, if it is of the version that was listed."""
        with suppress(FileNotFoundError, CorruptError):
            copy = BlockFile(self.path, name)
            if _is_of(copy, listed):
                return copy
        return None

    def _made(self, name: str, listed: RemoteObject | None) -> BlockFile:
        with self.locked():
            if (copy := self._opened(name, listed)) is not None:  # another process was quicker
                return copy
            if listed is None:
                listed = replace(self.head(name), name=name)
            make_block_file(self.path, listed, block_bytes=BLOCK_BYTES)
            return BlockFile(self.path, name)

    def _runs_of(self, copy: BlockFile, ranges: Ranges) -> list[tuple[int, int]]:
        """Return runs of blocks that are not here, each for one request: first, and one past the last."""
        blocks, most = copy.map, self.root.run_blocks
        together: list[tuple[int, int]] = []
        for first, last in sorted(blocks.blocks(begin, end) for begin, end in ranges if begin < end):
            if together and first <= together[-1][1]:
                together[-1] = together[-1][0], max(last, together[-1][1])
            else:
                together.append((first, last))
        missing = [run for first, last in together for run in blocks.absent(first, last)]
        return [(at, min(at + most, end)) for begin, end in missing for at in range(begin, end, most)]

    def fetch(self, copy: BlockFile, ranges: Ranges, timeout_s: float = TIMEOUT_S) -> None:
        """Have bytes here; returns when they are, or were before they had to go again.

        Raises:
            StalledError: `timeout_s` passed; what came is kept.
            ResourceError: There is no room on the disk.
            StokerError, FileNotFoundError: As `Remote`.
        """
        deadline = time.monotonic() + timeout_s
        runs = self._runs_of(copy, ranges)
        if len(runs) == 1:
            self._fetch_run(copy, *runs[0], deadline)
            return
        pool = self.root.pool
        parts = [pool.submit(partial(self._fetch_run, copy, *run, deadline)) for run in runs]
        for part in parts:
            part.wait(max(0.0, deadline - time.monotonic()))
        came = [part for part in parts if part.done()]
        for part in came:
            part.result(0.0, self.url_of(copy.name))
        if late := len(parts) - len(came):  # those not begun end at once: the deadline is theirs too
            raise StalledError(
                f"{late} of {len(parts)} parts of {self.url_of(copy.name)} did not come in {timeout_s:g} s"
                f"{self._slowest()}",
                hint="See whether the store answers, then run again: what arrived is kept",
            )

    def begin_fetch(self, copy: BlockFile, ranges: Ranges) -> int:
        """Begin to fetch bytes; returns how many were begun, which are fewer when enough is under way."""
        begun = 0
        for run in self._runs_of(copy, ranges):
            with self._lock:
                self._ahead = {ticket for ticket in self._ahead if not ticket.done()}
                if len(self._ahead) >= QUEUED:
                    break
                self._ahead.add(self.root.ahead_pool.submit(partial(self._fetch_ahead, copy, *run)))
            begun += size_of(copy, run)
        return begun

    def read_direct(self, copy: BlockFile, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from the place itself, past the mirror."""
        at = 0

        def sink(piece: Buffer) -> None:
            nonlocal at
            out[at : at + len(piece)] = piece
            at += len(piece)

        self._ask(copy, lambda remote: self._read(remote, copy, offset + at, offset + len(out), sink))
        self.counters.add(direct=1, bytes=at)

    def read_plain(self, name: str, begin: int, end: int, sink: Callable[[Buffer], None]) -> None:
        """Hand bytes of a file to `sink`, past the mirror: to measure what the place gives.

        Raises:
            StokerError, FileNotFoundError: As `Remote`.
        """
        at = begin

        def take(piece: Buffer) -> None:
            nonlocal at
            at += len(piece)
            sink(piece)

        self.ask("get", name, lambda remote: remote.read(self.key(name), at, end, etag="", sink=take))

    def refetch(self, copy: BlockFile, begin: int, end: int) -> None:
        """Forget bytes that do not match their sums, so that the next read fetches them.

        Raises:
            StalledError: Another process has been fetching them for `TIMEOUT_S` seconds.
        """
        blocks = copy.map
        first, last = blocks.blocks(begin, min(end, blocks.size))
        with lock_range(copy.map_path, first, last, timeout_s=TIMEOUT_S) as got:
            if not got:
                raise self._busy(copy, TIMEOUT_S)
            blocks.drop(first, last)
        self.counters.add(refetched=1)

    def _fetch_ahead(self, copy: BlockFile, first: int, last: int) -> bool:
        if is_exiting():
            return False  # the exit of the process would wait for us
        missing = sum(size_of(copy, run) for run in copy.map.absent(first, last))
        with suppress(StokerError, OSError):  # a read of these bytes meets it
            self._fetch_run(copy, first, last, time.monotonic() + TIMEOUT_S)
            self.counters.add(ahead_bytes=missing)
            return True
        return False

    def _fetch_run(self, copy: BlockFile, first: int, last: int, deadline: float) -> None:
        if time.monotonic() >= deadline:  # the caller has given up meanwhile
            raise StalledError(f"a part of {self.url_of(copy.name)} was not begun in time")
        with self._alone(copy, first, last, deadline) as absent:
            if not absent:
                return
            left = max(0.0, deadline - time.monotonic())
            with lock_range(copy.map_path, first, last, timeout_s=left) as got:
                if not got:
                    raise self._busy(copy, left)
                for run in copy.map.absent(first, last):
                    self._fetch_blocks(copy, *run, deadline)

    def _slowest(self) -> str:
        """Return what an error adds about requests under way."""
        said = self.root.retries.describe_slowest()
        return f": {said}" if said else ""

    def _busy(self, copy: BlockFile, waited_s: float) -> StalledError:
        return StalledError(
            f"another process has been fetching {self.url_of(copy.name)} for {waited_s:.0f} s",
            hint="See whether it hangs, then run again",
        )

    @contextmanager
    def _alone(self, copy: BlockFile, first: int, last: int, deadline: float) -> Generator[bool]:
        """Keep the other threads of this process from blocks; yields whether some are still absent.

        A thread that waits here continues as soon as its own blocks are there, not when all blocks of that
        request are. The lock between processes has to be asked again and again, which takes up to 20 ms each
        time.
        """
        own = (copy.name, first, last)

        def free() -> bool:
            busy = any(name == own[0] and a < last and first < b for name, a, b in self._under_way)
            return not busy or copy.map.holds(first, last)

        left = max(0.0, deadline - time.monotonic())
        with self._came:
            if not self._came.wait_for(free, left):
                url = self.url_of(copy.name)
                raise StalledError(
                    f"another thread has been fetching {url} for {left:.0f} s{self._slowest()}",
                    hint="See whether the store answers, then run again: what arrived is kept",
                )
            absent = not copy.map.holds(first, last)
            if absent:
                self._under_way.append(own)
        try:
            yield absent
        finally:
            if absent:
                with self._came:
                    self._under_way.remove(own)
                    self._came.notify_all()

    def _tell(self) -> None:
        with self._came:
            self._came.notify_all()

    def _fetch_blocks(self, copy: BlockFile, first: int, last: int, deadline: float) -> None:
        blocks, space = copy.map, self.root.space
        _, stop = blocks.extent(first, last)
        space.take((last - first) * blocks.block_bytes, lambda: blocks.expect(first, last))
        arriving = _Arriving(copy, first, last, self._tell)

        def attempt(remote: Remote) -> None:
            self._read(remote, copy, arriving.begin(), stop, arriving.take)

        try:
            self._ask(copy, attempt, deadline - time.monotonic())
        except ResourceError:
            if not space.free((last - arriving.at) * blocks.block_bytes):
                raise
            self._ask(copy, attempt, deadline - time.monotonic())
        finally:
            self.counters.add(bytes=arriving.came)

    def _ask(self, copy: BlockFile, attempt: Callable[[Remote], None], timeout_s: float = TIMEOUT_S) -> None:
        self.ask("get", copy.name, attempt, max(0.0, timeout_s))

    def _read(
        self, remote: Remote, copy: BlockFile, begin: int, end: int, sink: Callable[[Buffer], None]
    ) -> None:
        self.counters.add(requests=1)
        try:
            remote.read(self.key(copy.name), begin, end, etag=copy.map.etag, sink=sink)
        except ReplacedError as error:
            self.forget(copy.name)
            raise CorruptError(
                f"{self.url_of(copy.name)} was replaced since it was opened", hint="Open the cache again"
            ) from error


class _Arriving:
    """Writes what comes of a run of blocks, and marks each block once it is complete."""

    def __init__(self, copy: BlockFile, first: int, last: int, tell: Callable[[], None]) -> None:
        self.at = first
        """The first block that is not here yet."""
        self.came = 0
        self._copy, self._last, self._tell = copy, last, tell
        self._stop = copy.map.extent(first, last)[1]
        self._byte = 0
        """Where the next piece goes."""

    def begin(self) -> int:
        """Return the first byte to ask for; what came of a block that was cut is asked for again."""
        self._byte = self._copy.map.extent(self.at, self.at + 1)[0]
        return self._byte

    def take(self, piece: Buffer) -> None:
        """Take the bytes that follow those so far."""
        self._copy.write(self._byte, piece)
        self._byte += len(piece)
        self.came += len(piece)
        whole = self._last if self._byte == self._stop else self._byte // self._copy.map.block_bytes
        if whole > self.at:
            self._copy.map.add(self.at, whole)
            self.at = whole
            self._tell()


def size_of(copy: BlockFile, run: tuple[int, int]) -> int:
    """Return the bytes of a run of blocks."""
    begin, end = copy.map.extent(*run)
    return end - begin


def _is_of(copy: BlockFile, listed: RemoteObject | None) -> bool:
    """Return True if what is here is of the version that was listed, as far as that can be told."""
    if listed is None:
        return True
    tags = {copy.map.etag, listed.etag} - {""}
    return copy.map.size == listed.bytes and len(tags) < 2


_folders: dict[tuple[int, str], MirrorFolder] = {}


def opened_root(path: Path) -> MirrorRoot | None:
    """Return the mirror in a folder, if this process has it open."""
    return _roots.get((os.getpid(), path.absolute()))


def mirror_of(path: Path) -> MirrorFolder | None:
    """Return the mirror that stands behind a cache's local folder; None: it is a plain one."""
    found = root_of(path)
    if found is None:
        return None
    root, name = found
    return _folders.setdefault((id(root), name), MirrorFolder(root, name))
