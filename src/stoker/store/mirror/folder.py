"""One folder of caches at an address, and the local folder that stands for it.

Shards are here in part, block by block: `ensure` has what is needed here, `ahead` begins to fetch what will
be, `release` says what may go first.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, ResourceError, StalledError, StokerError
from stoker.runtime.files import PendingFile, write_file
from stoker.runtime.locks import lock_range
from stoker.runtime.threads import Ticket, ending
from stoker.store.mirror.blocks import (
    BLOCK_BYTES,
    MAP_PREFIX,
    BlockMap,
    Stand,
    make_stand,
    mark_whole,
    remove_stand,
)
from stoker.store.mirror.root import MirrorRoot, root_of
from stoker.store.remote import DEADLINE_S, ChangedError, Expected, Object, Remote
from stoker.store.storage import SOURCES_FILE, Buffer
from stoker.units import KIB

# ----------------------------------------------------------------------------------------------------------
# A file of a mirror, opened: what is read is fetched first, where it is not here.


TRIES = 3
"""Times that blocks are fetched which are given back before they are read; then they go past the mirror."""


class MirrorFile:
    """An `OpenFile` of an object. Safe to use from several threads."""

    def __init__(self, fetcher: Fetcher, stand: Stand) -> None:
        self._fetcher, self._stand = fetcher, stand
        self._direct = 0
        """Reads that went past the mirror."""
        self._counters = fetcher.counters

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._stand.map.size

    @property
    def origin(self) -> str:
        """Where its bytes come from."""
        return self._fetcher.origin(self._stand)

    @property
    def generation(self) -> tuple[int, int]:
        """Another value whenever bytes that were read before may have been fetched again."""
        return self._stand.map.generation, self._direct

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
                self._fetcher.fetch(self._stand, [(offset, offset + len(out))])
            except ResourceError:
                break  # the disk is full; what is asked for can be had all the same
            if self._read_here(offset, [out]):
                return
        self._direct += 1  # two threads may count as one: each still sees another value than before its read
        self._fetcher.read_direct(self._stand, offset, out)

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` with what is here and in the page cache."""
        return self._read_here(offset, outs, wait=False)

    def fileno(self) -> int:
        """None: pages of it may not be here, and must be fetched before they are read."""
        return -1

    def ahead(self, offset: int, size: int) -> None:
        """Begin to fetch bytes that will be read."""
        self._fetcher.ahead(self._stand, [(offset, offset + size)])

    def mend(self, offset: int, size: int) -> bool:
        """Have bytes that are not what they should be fetched anew at the next read."""
        self._fetcher.mend(self._stand, offset, offset + size)
        return True

    def close(self) -> None:
        """Nothing: what is open goes with the last who refers to it."""

    def _read_here(self, offset: int, outs: Sequence[memoryview[Any]], *, wait: bool = True) -> bool:
        stand = self._stand
        blocks, size = stand.map, sum(map(len, outs))
        first, last = blocks.blocks(offset, offset + size)
        if offset + size > blocks.size:
            return False
        before = blocks.generation
        if not blocks.holds(first, last):
            return False
        if not wait:
            there = stand.file.read_cached(offset, outs)
        else:
            there = True
            stand.file.read_into(offset, outs[0])
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
# A folder's name at the place, and the lock on what is here of it: shared by all that a mirror does.


T = TypeVar("T")
LOCK_FILE = ".mirror-lock"


class Place:
    """The folder `name` of a mirror: here, and at its address."""

    def __init__(self, root: MirrorRoot, name: str) -> None:
        self.root, self.name = root, name
        self.path: Path = root.path / name

    def url_of(self, name: str) -> str:
        """The address of a file, for messages."""
        return f"{self.root.url}/{self.name}/{name}"

    def key(self, name: str) -> str:
        """The name of a file below the mirror's address."""
        return f"{self.name}/{name}"

    def ask(
        self, operation: str, name: str, attempt: Callable[[Remote], T], deadline_s: float = DEADLINE_S
    ) -> T:
        """What `attempt` answers, repeated while that may help."""
        remote = self.root.remote
        return self.root.retries.run(lambda: attempt(remote), f"{operation} {self.url_of(name)}", deadline_s)

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
        with lock_range(path, 0, 1, timeout_s=DEADLINE_S) as got:
            if not got:
                raise StalledError(
                    f"{path} has been locked for {DEADLINE_S:g} s. See what hangs on this machine"
                )
            yield

    def forget(self, name: str) -> None:
        """Remove what is here of a shard."""
        with self.locked():
            remove_stand(self.path, name)


# ----------------------------------------------------------------------------------------------------------
# Bring blocks of a shard here: each once for all processes of a machine, several requests at a time.


Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of a file, each from a first one to one past the last."""
QUEUED = 64
"""Requests ahead of need that wait or run at a time in one process; more are refused."""


class Fetcher:
    """Fetches for one folder, in this process. Safe to use from several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.counters = place.root.counters
        self._lock = threading.Lock()
        self._ahead: set[Ticket[bool]] = set()
        self._under_way: list[tuple[str, int, int]] = []
        """Blocks that threads of this process are fetching: shard, first, and one past the last."""
        self._came = threading.Condition(threading.Lock())
        """Told of every block that comes, and of every fetch that ends."""

    def origin(self, stand: Stand) -> str:
        """Where its bytes come from."""
        return self._place.url_of(stand.name)

    def runs_of(self, stand: Stand, ranges: Ranges) -> list[tuple[int, int]]:
        """Runs of blocks that are not here, each for one request: first, and one past the last."""
        blocks, most = stand.map, self._place.root.run_blocks
        together: list[tuple[int, int]] = []
        for first, last in sorted(blocks.blocks(begin, end) for begin, end in ranges if begin < end):
            if together and first <= together[-1][1]:
                together[-1] = together[-1][0], max(last, together[-1][1])
            else:
                together.append((first, last))
        missing = [run for first, last in together for run in blocks.absent(first, last)]
        return [(at, min(at + most, end)) for begin, end in missing for at in range(begin, end, most)]

    def fetch(self, stand: Stand, ranges: Ranges, deadline_s: float = DEADLINE_S) -> None:
        """Have bytes here; returns when they are, or were before they had to go again.

        Raises:
            StalledError: `deadline_s` passed; what came is kept.
            ResourceError: There is no room on the disk.
            StokerError, FileNotFoundError: As `Remote`.
        """
        deadline = time.monotonic() + deadline_s
        runs = self.runs_of(stand, ranges)
        if len(runs) == 1:
            self._fetch_run(stand, *runs[0], deadline)
            return
        pool = self._place.root.pool
        parts = [pool.submit(partial(self._fetch_run, stand, *run, deadline)) for run in runs]
        for part in parts:
            part.wait(max(0.0, deadline - time.monotonic()))
        came = [part for part in parts if part.done()]
        for part in came:
            part.result(0.0, self.origin(stand))
        if late := len(parts) - len(came):  # those not begun end at once: the deadline is theirs too
            raise StalledError(
                f"{late} of {len(parts)} parts of {self.origin(stand)} did not come in "
                f"{deadline_s:g} s. See whether the store answers, then run again: what arrived is kept"
            )

    def ahead(self, stand: Stand, ranges: Ranges) -> int:
        """Begin to fetch bytes; returns how many were begun, which are fewer when enough is under way."""
        begun = 0
        for run in self.runs_of(stand, ranges):
            with self._lock:
                self._ahead = {ticket for ticket in self._ahead if not ticket.done()}
                if len(self._ahead) >= QUEUED:
                    break
                self._ahead.add(self._place.root.ahead_pool.submit(partial(self._fetch_ahead, stand, *run)))
            begun += size_of(stand, run)
        return begun

    def bring(self, stand: Stand, ranges: Ranges) -> bool:
        """Fetch bytes ahead of need, in the thread that calls; whether they came, as in `ahead`."""
        came = [self._fetch_ahead(stand, *run) for run in self.runs_of(stand, ranges)]
        return all(came)

    def read_direct(self, stand: Stand, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from the place itself, past the mirror."""
        at = 0

        def sink(piece: Buffer) -> None:
            nonlocal at
            out[at : at + len(piece)] = piece
            at += len(piece)

        self._ask(stand, lambda remote: self._read(remote, stand, offset + at, offset + len(out), sink))
        self.counters.add(direct=1, bytes=at)

    def mend(self, stand: Stand, begin: int, end: int) -> None:
        """Forget bytes that do not match their sums, so that the next read fetches them.

        Raises:
            StalledError: Another process has been fetching them for `DEADLINE_S` seconds.
        """
        blocks = stand.map
        first, last = blocks.blocks(begin, min(end, blocks.size))
        with lock_range(stand.map_path, first, last, timeout_s=DEADLINE_S) as got:
            if not got:
                raise self._busy(stand, DEADLINE_S)
            blocks.drop(first, last)
        self.counters.add(mended=1)

    def _fetch_ahead(self, stand: Stand, first: int, last: int) -> bool:
        if ending():
            return False  # the exit of the process would wait for us
        missing = sum(size_of(stand, run) for run in stand.map.absent(first, last))
        with suppress(StokerError, OSError):  # whoever reads these bytes will meet it
            self._fetch_run(stand, first, last, time.monotonic() + DEADLINE_S)
            self.counters.add(ahead_bytes=missing)
            return True
        return False

    def _fetch_run(self, stand: Stand, first: int, last: int, deadline: float) -> None:
        if time.monotonic() >= deadline:  # it waited in line until nobody waits for it any more
            raise StalledError(f"a part of {self.origin(stand)} was not begun in time")
        with self._alone(stand, first, last, deadline) as absent:
            if not absent:
                return
            left = max(0.0, deadline - time.monotonic())
            with lock_range(stand.map_path, first, last, timeout_s=left) as got:
                if not got:
                    raise self._busy(stand, left)
                for run in stand.map.absent(first, last):
                    self._fetch_blocks(stand, *run, deadline)

    def _busy(self, stand: Stand, waited_s: float) -> StalledError:
        return StalledError(
            f"another process has been fetching {self.origin(stand)} for {waited_s:.0f} s. See whether it "
            "hangs, then run again"
        )

    @contextmanager
    def _alone(self, stand: Stand, first: int, last: int, deadline: float) -> Generator[bool]:
        """Keep the other threads of this process from blocks; yields whether some are still absent.

        Whoever waits here goes on as soon as its own blocks are there, and not when all are that come with
        them. The lock between processes has to be asked again and again, which takes up to 20 ms each time.
        """
        own = (stand.name, first, last)

        def free() -> bool:
            busy = any(name == own[0] and a < last and first < b for name, a, b in self._under_way)
            return not busy or stand.map.holds(first, last)

        left = max(0.0, deadline - time.monotonic())
        with self._came:
            if not self._came.wait_for(free, left):
                raise StalledError(f"another thread has been fetching {self.origin(stand)} for {left:.0f} s")
            absent = not stand.map.holds(first, last)
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

    def _fetch_blocks(self, stand: Stand, first: int, last: int, deadline: float) -> None:
        blocks, space = stand.map, self._place.root.space
        _, stop = blocks.extent(first, last)
        space.take((last - first) * blocks.block_bytes, lambda: blocks.expect(first, last))
        arriving = _Arriving(stand, first, last, self._tell)

        def attempt(remote: Remote) -> None:
            self._read(remote, stand, arriving.begin(), stop, arriving.take)

        try:
            self._ask(stand, attempt, deadline - time.monotonic())
        except ResourceError:
            if not space.free((last - arriving.at) * blocks.block_bytes):
                raise
            self._ask(stand, attempt, deadline - time.monotonic())
        finally:
            self.counters.add(bytes=arriving.came)

    def _ask(self, stand: Stand, attempt: Callable[[Remote], None], deadline_s: float = DEADLINE_S) -> None:
        self._place.ask("get", stand.name, attempt, max(0.0, deadline_s))

    def _read(
        self, remote: Remote, stand: Stand, begin: int, end: int, sink: Callable[[Buffer], None]
    ) -> None:
        self.counters.add(requests=1)
        try:
            remote.read(self._place.key(stand.name), begin, end, etag=stand.map.etag, sink=sink)
        except ChangedError as error:
            self._place.forget(stand.name)
            raise CorruptError(
                f"{self.origin(stand)} was replaced since it was opened. Open the cache again"
            ) from error


class _Arriving:
    """Writes what comes of a run of blocks, and marks each block once it is whole."""

    def __init__(self, stand: Stand, first: int, last: int, tell: Callable[[], None]) -> None:
        self.at = first
        """The first block that is not here yet."""
        self.came = 0
        self._stand, self._last, self._tell = stand, last, tell
        self._stop = stand.map.extent(first, last)[1]
        self._byte = 0
        """Where the next piece goes."""

    def begin(self) -> int:
        """The first byte to ask for; what came of a block that was cut is asked for again."""
        self._byte = self._stand.map.extent(self.at, self.at + 1)[0]
        return self._byte

    def take(self, piece: Buffer) -> None:
        """Take the bytes that follow those so far."""
        self._stand.write(self._byte, piece)
        self._byte += len(piece)
        self.came += len(piece)
        whole = self._last if self._byte == self._stop else self._byte // self._stand.map.block_bytes
        if whole > self.at:
            self._stand.map.add(self.at, whole)
            self.at = whole
            self._tell()


def size_of(stand: Stand, run: tuple[int, int]) -> int:
    """Bytes of a run of blocks."""
    begin, end = stand.map.extent(*run)
    return end - begin


# ----------------------------------------------------------------------------------------------------------
# Which files a folder has at its address, and the small ones of them whole, here and there.
#
# The place's own list is the truth. A small file that may change (the index, failures) is asked for again
# at each read, at the cost of one request that is answered with nothing where it is the same.


log = logging.getLogger("stoker")
ETAG_PREFIX = ".etag-"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
LASTING = ("recipe.json", SOURCES_FILE)
"""Small files that never change under their name; weights neither."""


class Names:
    """The names of one folder. Safe to use from several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.listed: dict[str, Object] = {}
        """Objects as the last list had them."""

    def sizes(self) -> dict[str, int]:
        """Bytes by name of the objects there are, sorted by name."""
        place = self._place
        _, objects = place.ask("list", "", lambda remote: remote.list(place.name))
        self.listed = {one.name: one for one in objects if not one.name.startswith(".")}
        return {name: one.bytes for name, one in self.listed.items()}

    def fresh(self, name: str) -> str:
        """Have a small file here as it is there; returns its etag.

        Raises:
            FileNotFoundError: There is none.
        """
        place, path = self._place, self._place.path / name
        if name.startswith("."):
            return ""  # claims and the like are of this machine
        if path.exists() and (name in LASTING or name.endswith(".safetensors")):
            return ""
        with place.locked():
            known = self._etag(name) if path.exists() else ""
            try:
                answer = self._get(name, known)
            except FileNotFoundError:
                path.unlink(missing_ok=True)
                raise
            if answer is None:
                return known
            self._keep(name, *answer)
            return answer[1]

    def _get(self, name: str, known: str) -> tuple[bytes, str] | None:
        """A small file and its etag, fetched twice where the first one came wrong; None: it is as it was."""
        place, answer = self._place, None
        for _ in range(2):
            answer = place.ask("get", name, lambda remote: remote.get(place.key(name), known=known))
            if answer is None or _matches(*answer):
                break
        return answer

    def version(self, name: str) -> Expected:
        """What a put of a file would replace; the copy here is of this version, or of a later one."""
        try:
            return self.fresh(name)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes, expected: Expected) -> None:
        """Put a small file there, then here.

        Raises:
            ChangedError: It is not the version that was expected.
        """
        place = self._place
        with place.locked():
            etag = place.ask("put", name, lambda remote: remote.put(place.key(name), data, expected=expected))
            self._keep(name, data, etag)

    def put_file(self, name: str, path: Path) -> str:
        """Put a file that nobody else writes, as one object; returns its etag."""
        place = self._place
        try:
            return place.ask("put", name, lambda remote: remote.put(place.key(name), path, expected=None))
        except ChangedError:
            # An attempt whose answer was lost had put it.
            found = place.ask("head", name, lambda remote: remote.head(place.key(name)))
            if found.bytes != path.stat().st_size:
                raise
            return found.etag

    def share(self, name: str) -> None:
        """Put a small file as it is here; nobody else writes one of this name."""
        self.put(name, (self._place.path / name).read_bytes(), "anything")

    def rename(self, name: str, new: str) -> None:
        """Give a shard another name there; what was here of it goes."""
        place = self._place
        place.ask("put", new, lambda remote: remote.rename(place.key(name), place.key(new)))
        place.forget(name)

    def remove(self, name: str) -> None:
        """Remove a file there, then here."""
        place = self._place
        place.ask("delete", name, lambda remote: remote.remove(place.key(name)))
        place.forget(name)

    def create(self, name: str) -> MirrorPending:
        """Begin a shard."""
        return MirrorPending(self, self._place, name)

    def _keep(self, name: str, data: bytes, etag: str) -> None:
        write_file(self._place.path / name, data)
        write_file(self._place.path / f"{ETAG_PREFIX}{name}", etag.encode())

    def _etag(self, name: str) -> str:
        with suppress(FileNotFoundError):
            path = self._place.path / f"{ETAG_PREFIX}{name}"
            return path.read_bytes()[:KIB].decode(errors="replace")
        return ""


def _matches(data: bytes, etag: str) -> bool:
    """Whether bytes are those of their etag, where that is their MD5: as a rule, for small objects."""
    found = _MD5.fullmatch(etag)
    return found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1]


class MirrorPending:
    """A shard being written here; `commit` puts it there, and keeps it here as what is fetched already."""

    def __init__(self, names: Names, place: Place, name: str) -> None:
        self._names, self._place, self._name = names, place, name
        self._pending = PendingFile(place.path, name)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`."""
        self._pending.write_at(offset, data)

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back `size` bytes."""
        return self._pending.read_at(offset, size)

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        self._pending.truncate(size)

    def commit(self) -> None:
        """Put the object; it exists for everybody when this returns, and for nobody before."""
        place = self._place
        etag, size = self._names.put_file(self._name, self._pending.path), self._pending.path.stat().st_size
        place.root.counters.add(put_bytes=size)
        try:
            place.root.space.take(size)
            with place.locked():
                remove_stand(place.path, self._name)
                self._pending.show()
                mark_whole(place.path, self._name, block_bytes=BLOCK_BYTES, etag=etag)
            place.root.space.take(0)  # alone it may be more than there is room for
        except (StokerError, OSError) as error:
            log.warning("%s is stored; no copy is kept here: %s", place.url_of(self._name), error)
            self._pending.discard()

    def discard(self) -> None:
        """Remove the temporary; safe to call twice and after `commit`."""
        self._pending.discard()


class MirrorFolder:
    """The folder `name` of a mirror, in this process. Safe to use from several threads."""

    def __init__(self, root: MirrorRoot, name: str) -> None:
        self.root = root
        self.counters = root.counters
        """What all folders of this mirror did, in this process."""
        self._place = Place(root, name)
        self.names = Names(self._place)
        """Which files there are, and small ones whole."""
        self._fetcher = Fetcher(self._place)
        self._stands: WeakValueDictionary[str, Stand] = WeakValueDictionary()
        self._lock = threading.Lock()

    def url_of(self, name: str) -> str:
        """The address of a file; of the folder for an empty name."""
        return self._place.url_of(name).rstrip("/")

    @property
    def url(self) -> str:
        """Its address."""
        return f"{self._place.root.url}/{self._place.name}"

    def open(self, name: str) -> MirrorFile:
        """Open a shard for reading; nothing of it is fetched yet.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return MirrorFile(self._fetcher, self._stand(name))

    def ensure(self, name: str, ranges: Ranges, deadline_s: float = DEADLINE_S) -> None:
        """Have these bytes of a shard here, as far as the mirror's limit allows to keep them.

        Raises:
            StalledError: `deadline_s` passed; what came is kept.
            FileNotFoundError, ServiceError, ResourceError: They cannot be had, or there is no room.
        """
        self._fetcher.fetch(self._stand(name), ranges, deadline_s)

    def ahead(self, name: str, ranges: Ranges) -> int:
        """Begin to fetch bytes that will be needed; returns how many were begun, in whole blocks.

        Fewer than `absent_bytes` means that enough is under way: ask again later. What goes wrong is not
        said: whoever reads those bytes will meet it.
        """
        return self._fetcher.ahead(self._stand(name), ranges)

    def bring(self, name: str, ranges: Ranges) -> bool:
        """As `ahead`, in the thread that calls; whether they came."""
        return self._fetcher.bring(self._stand(name), ranges)

    def rank(self, name: str, used: NDArray[np.uint32]) -> None:
        """Say for each block of a shard how late it goes when there is no room, those with the least first:
        in seconds since 1970, as if it had last been read then.
        """
        with suppress(FileNotFoundError, CorruptError):  # nothing of it is here
            blocks = BlockMap(self._place.path / f"{MAP_PREFIX}{name}")
            if len(used) == blocks.count:
                blocks.used[:] = used

    def absent_bytes(self, name: str, ranges: Ranges) -> int:
        """How many bytes have to be fetched before these are here: whole blocks."""
        stand = self._stand(name)
        return sum(size_of(stand, run) for run in self._fetcher.runs_of(stand, ranges))

    def release(self, name: str, ranges: Ranges) -> None:
        """Say that these bytes will not be needed soon: they go first when there is no room."""
        blocks = self._stand(name).map
        for begin, end in ranges:
            first, last = blocks.blocks(begin, end)
            blocks.used[first:last] = 0

    def _stand(self, name: str) -> Stand:
        listed = self.names.listed.get(name)
        with self._lock:
            stand = self._stands.get(name)
            if stand is not None and _is_of(stand, listed):
                return stand
        stand = self._opened(name, listed) or self._made(name, listed)
        with self._lock:
            self._stands[name] = stand
        return stand

    def _opened(self, name: str, listed: Object | None) -> Stand | None:
        """What is here of a shard, if it is of the version that was listed."""
        with suppress(FileNotFoundError, CorruptError):
            stand = Stand(self._place.path, name)
            if _is_of(stand, listed):
                return stand
        return None

    def _made(self, name: str, listed: Object | None) -> Stand:
        with self._place.locked():
            if (stand := self._opened(name, listed)) is not None:  # another process was quicker
                return stand
            if listed is None:
                found = self._place.ask("head", name, lambda remote: remote.head(self._place.key(name)))
                listed = Object(name=name, bytes=found.bytes, etag=found.etag)
            make_stand(self._place.path, listed, block_bytes=BLOCK_BYTES)
            return Stand(self._place.path, name)


def _is_of(stand: Stand, listed: Object | None) -> bool:
    """Whether what is here is of the version that was listed, as far as that can be told."""
    if listed is None:
        return True
    tags = {stand.map.etag, listed.etag} - {""}
    return stand.map.size == listed.bytes and len(tags) < 2


_folders: dict[tuple[int, str], MirrorFolder] = {}


def mirror_of(path: Path) -> MirrorFolder | None:
    """The mirror that stands behind a cache's local folder; None: it is a plain one."""
    found = root_of(path)
    if found is None:
        return None
    root, name = found
    return _folders.setdefault((id(root), name), MirrorFolder(root, name))
