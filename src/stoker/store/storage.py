"""The files of a cache folder, on this machine or mirrored from a URL, and which processes use the folder.

`open_storage` gives the storage that a path needs: `Storage`, or `MirrorStorage` below a mirror. Both write
files so that they appear complete or not at all. A temporary that no process holds was left by one that died,
and is swept. Opening never follows a link and never waits on a pipe or device.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias, cast

from stoker.errors import ConfigError, FormatError, Problem, StalledError, StokerError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import (
    PendingFile,
    RegularFile,
    dead_temporaries,
    link_file,
    make_folder,
    rename,
    sync_folder,
    write_file,
)
from stoker.runtime.jsonio import canonical_json
from stoker.runtime.locks import LAST_POLL_S, lock_folder, lock_holder, try_lock
from stoker.runtime.threads import map_in_order
from stoker.store.format import (
    FINGERPRINT,
    INDEX_FILE,
    RECIPE_FILE,
    SOURCES_FILE,
    WEIGHTS_FOLDER,
    LocalFile,
    OpenFile,
    PendingWrite,
    check_name,
    is_shard_name,
    places_name,
)
from stoker.store.mirror import (
    MARKER,
    MirrorFolder,
    mirror_of,
    open_remote,
    opened_root,
    read_marker,
    root_of,
)
from stoker.store.mirror_blocks import BLOCK_BYTES, USED_FILE, mark_complete, remove_block_file, require_holes
from stoker.store.remote import (
    Expected,
    Remote,
    RemoteObject,
    ReplacedError,
    Retries,
    is_url,
    local_path,
    parse_url,
)
from stoker.units import KIB, MIB, format_bytes

log = logging.getLogger("stoker")
NO_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
"""What linking says where a file has to be copied."""


class Storage:
    """The files of one local folder. Names are plain: no `/`, no `..`, not a link or a device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def mirror(self) -> MirrorFolder | None:
        """The mirror that the folder is in; None: its files are all there is."""
        return None

    def create(self, name: str) -> PendingWrite:
        """Begin a new file called `name`."""
        return PendingFile(self.path, check_name(name, where=str(self.path)))

    def put(self, name: str, data: bytes, *, expected: Expected = "anything") -> None:
        """Write a small file atomically and durably, replacing one of that name.

        Raises:
            ReplacedError: What is there is not what was `expected`.
        """
        write_file(self.path / name, data)

    def version(self, name: str) -> Expected:
        """Return what `put` is to expect if no other process replaces the file. Ask before reading it."""
        return "anything"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each regular file by name, sorted; hidden ones left out."""
        with os.scandir(self.path) as entries:
            found = {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
            }
        return dict(sorted(found.items()))

    def list(self) -> list[str]:
        """Return the names of the regular files, sorted; hidden ones left out."""
        return [*self.sizes()]

    def open(self, name: str) -> OpenFile:
        """Open `name` for positional reads; of a shard that is served in place, also the user's files.

        Raises:
            FormatError: It is a link, pipe or device, which is not touched.
        """
        places = places_name(check_name(name, where=str(self.path)))
        file = LocalFile(self.path / name)
        if places is None or not (self.path / places).exists():
            return file
        from stoker.store.places import open_placed  # few caches serve the user's own files

        return open_placed(file, self.path / places)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return all of a small file.

        Raises:
            FormatError: It is larger than `limit_bytes`.
        """
        with RegularFile(self.path / name) as file:
            if file.size > limit_bytes:
                raise FormatError(
                    f"{self.path / name} has {format_bytes(file.size)}, "
                    f"expected {format_bytes(limit_bytes)} at most"
                )
            return file.read_all()

    def link(self, other: Storage, name: str) -> None:
        """Take over the file `name` of `other`: a hard link, or a copy where links are not possible."""
        try:
            if not link_file(other.path / name, self.path / name):
                return
        except OSError as error:
            if error.errno not in NO_LINK_ERRNOS:
                with explain_disk_errors(self.path):
                    raise
            self._copy(other, name)
        sync_folder(self.path)

    def _copy(self, other: Storage, name: str) -> None:
        """Copy the file `name` of `other`."""
        file, pending = other.open(name), self.create(name)
        piece = memoryview(bytearray(4 * MIB))
        try:
            for offset in range(0, file.size, len(piece)):
                part = piece[: min(len(piece), file.size - offset)]
                file.read_into(offset, part)
                pending.write_at(offset, part)
            pending.commit()
        finally:
            pending.discard()
            file.close()

    def share(self, name: str) -> None:
        """Let others see a small file that was written in place; they see this folder already."""

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, which may be hidden; no error if it is missing."""
        with suppress(FileNotFoundError):
            rename(self.path / name, self.path / new)

    def remove(self, name: str) -> None:
        """Remove a file; no error if it is missing."""
        (self.path / name).unlink(missing_ok=True)


class MirrorStorage(Storage):
    """The files of a folder at a URL, and the local folder that stands for it.

    What the URL lists is the truth. A small file that may change (the index, failures) is requested again at
    each read. That costs one request, whose answer is empty if the file is unchanged.
    """

    def __init__(self, path: Path, mirror: MirrorFolder) -> None:
        super().__init__(path)
        self._mirror = mirror

    @property
    def mirror(self) -> MirrorFolder:
        """The mirror that the folder is in."""
        return self._mirror

    def create(self, name: str) -> PendingWrite:
        """Begin a shard."""
        return MirrorPending(self, check_name(name, where=str(self.path)))

    def put(self, name: str, data: bytes, *, expected: Expected = "anything") -> None:
        """Put a small file there, then here; as `Storage.put`."""
        key = self._mirror.key(name)
        with self._mirror.locked():
            etag = self._mirror.ask("put", name, lambda remote: remote.put(key, data, expected=expected))
            self._keep(name, data, etag)

    def put_file(self, name: str, path: Path) -> str:
        """Put a file that no other process writes, as one object; return its etag."""
        mirror = self._mirror
        try:
            return mirror.ask("put", name, lambda remote: remote.put(mirror.key(name), path, expected=None))
        except ReplacedError:
            # An attempt whose answer was lost had put it.
            found = mirror.head(name)
            if found.bytes != path.stat().st_size:
                raise
            return found.etag

    def version(self, name: str) -> Expected:
        """Return what a put of a file would replace; the copy here is of this version, or of a later one."""
        try:
            return self._fresh(name)
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object by name, sorted; hidden ones left out."""
        _, objects = self._mirror.ask("list", "", lambda remote: remote.list(self._mirror.name))
        self._mirror.listed = {one.name: one for one in objects if not one.name.startswith(".")}
        return {name: one.bytes for name, one in self._mirror.listed.items()}

    def open(self, name: str) -> OpenFile:
        """Open a file; nothing of a shard is fetched yet."""
        if is_shard_name(check_name(name, where=str(self.path))):
            return self._mirror.open(name)
        self._fresh(name)
        return super().open(name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return all of a small file as it is there; as `Storage.read`."""
        self._fresh(name)
        return super().read(name, limit_bytes=limit_bytes)

    def link(self, other: Storage, name: str) -> None:
        """Copy the file `name` of `other`: nothing can be linked to a URL."""
        self._copy(other, name)

    def share(self, name: str) -> None:
        """Put a small file as it is here; no other process writes one of this name."""
        self.put(name, (self.path / name).read_bytes())

    def rename(self, name: str, new: str) -> None:
        """Give a shard another name there; what was here of it goes."""
        mirror = self._mirror
        with suppress(FileNotFoundError):
            mirror.ask("put", new, lambda remote: remote.move(mirror.key(name), mirror.key(new)))
            mirror.forget(name)

    def remove(self, name: str) -> None:
        """Remove a file there, then here."""
        mirror = self._mirror
        mirror.ask("delete", name, lambda remote: remote.remove(mirror.key(name)))
        mirror.forget(name)
        super().remove(name)

    def _fresh(self, name: str) -> str:
        """Have a small file here as it is there; return its etag.

        Raises:
            FileNotFoundError: It is missing.
        """
        path, mirror = self.path / name, self._mirror
        if name.startswith("."):
            return ""  # locks and the like are of this machine
        if path.exists() and (name in (RECIPE_FILE, SOURCES_FILE) or name.endswith(".safetensors")):
            return ""  # it never changes under its name
        with mirror.locked():
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
        """Return a small file and its etag, fetched again if it came damaged; None if it has not changed."""
        mirror, answer = self._mirror, None
        for _ in range(2):
            answer = mirror.ask("get", name, lambda remote: remote.get(mirror.key(name), known=known))
            if answer is None or _matches(*answer):
                break
        return answer

    def _keep(self, name: str, data: bytes, etag: str) -> None:
        write_file(self.path / name, data)
        write_file(self.path / f"{ETAG_PREFIX}{name}", etag.encode())

    def _etag(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.path / f"{ETAG_PREFIX}{name}").read_bytes()[:KIB].decode(errors="replace")
        return ""


ETAG_PREFIX = ".etag-"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def _matches(data: bytes, etag: str) -> bool:
    """Return True if bytes are those of their etag, where that is their MD5: as a rule, for small objects."""
    found = _MD5.fullmatch(etag)
    return found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1]


class MirrorPending:
    """A shard being written here; `commit` puts it there, and keeps it here as what is fetched already."""

    def __init__(self, storage: MirrorStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._pending = PendingFile(storage.path, name)
        self.write_at, self.read_at = self._pending.write_at, self._pending.read_at
        self.truncate, self.discard = self._pending.truncate, self._pending.discard

    def commit(self) -> None:
        """Put the object; it is visible when this returns, and not before."""
        path, mirror = self._storage.path, self._storage.mirror
        etag, size = self._storage.put_file(self._name, self._pending.path), self._pending.path.stat().st_size
        mirror.counters.add(put_bytes=size)
        try:
            mirror.root.space.take(size)
            with mirror.locked():
                remove_block_file(path, self._name)
                self._pending.show()
                mark_complete(path, self._name, block_bytes=BLOCK_BYTES, etag=etag)
            mirror.root.space.take(0)  # alone it may be more than there is room for
        except (StokerError, OSError) as error:
            log.warning("%s is stored; no copy is kept here: %s", mirror.url_of(self._name), error)
            self._pending.discard()


def open_storage(path: Path) -> Storage:
    """Return the files of a folder: of a mirror those at its URL, else those that are in it."""
    mirror = mirror_of(path)
    return Storage(path) if mirror is None else MirrorStorage(path, mirror)


def sweep(folder: Path) -> int:
    """Remove temporaries whose writers are dead from a folder; return how many."""
    return sum(1 for _ in dead_temporaries(folder, remove=True))


# ----------------------------------------------------------------------------------------------------------
# Which processes use a folder, so that it is not removed meanwhile, and which one changes it.
#
# A process that has a folder open holds a shared flock on its recipe, through a descriptor that only
# reads. That works on read-only mounts, needs no file of its own, and ends with its holder, however that
# ends. A process that removes anything takes the exclusive lock first. The modification time of the recipe
# says when the folder was last opened.
#
# What only one process may do in a folder at a time, it does under `runtime.locks.lock_folder`. Records
# stay right without those locks: the same ones may be encoded twice, and an index may know less than one
# before it until it is made again. That one run trains in a folder, and one gc or repair works there,
# needs them.


WAIT_S = 10.0
"""How long opening waits for a clean-up, which holds the folder for as long as it unlinks files."""
NOTED_EVERY_S = 3600.0
"""Opening notes the time of use at most this often."""
INDEX_WAIT_S = 60.0
"""How long a process that writes an index or rearranges shards waits for the one before."""


class UsageLock:
    """Holds a folder open until nothing refers to this any more.

    Raises:
        FormatError: The folder has no recipe, or was removed meanwhile.
        StalledError: It could not be held for `WAIT_S` seconds; says why.
    """

    def __init__(self, folder: Path) -> None:
        self._file = _shared(folder)


def note_use(folder: Path) -> None:
    """Note that a folder was opened now. A process that only maintains it, or skips it, does not."""
    recipe = folder / RECIPE_FILE
    with suppress(OSError):  # a folder that we may only read, or that went meanwhile
        if abs(time.time() - recipe.lstat().st_mtime) > NOTED_EVERY_S:
            os.utime(recipe, follow_symlinks=False)


@contextmanager
def exclusive_use(folder: Path) -> Generator[bool]:
    """Keep all processes from opening a folder; yield True if none has it open.

    Where the file system has no locks this is unknown, which counts as open.
    """
    try:
        file = RegularFile(folder / RECIPE_FILE)
    except (OSError, FormatError):
        yield False
        return
    try:
        # Between `open` and the lock another process may have renamed the folder away, or replaced the
        # recipe. Then the lock is on a file that no other process opens.
        yield _lock_alone(file) and _is_current(file, folder)
    finally:
        file.close()


def has_locks(folder: Path) -> bool:
    """Return True if the file system of a folder has locks, by which processes say that they have it open."""
    try:
        with RegularFile(folder / RECIPE_FILE) as file:
            locked = try_lock(file.fileno(), shared=True, without_locks=False)
            # Without locks only the answer to this second question is yes.
            return locked or not try_lock(file.fileno(), shared=True, without_locks=True)
    except (OSError, FormatError):
        return True


def _lock_alone(file: RegularFile) -> bool:
    with suppress(OSError):
        return try_lock(file.fileno(), without_locks=False)
    return False


@contextmanager
def preserve_times(folder: Path) -> Generator[None]:
    """Remove things from a folder without making it look used."""
    before = folder.stat()
    try:
        yield
    finally:
        with suppress(OSError):  # not ours, or read-only
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def idle_seconds(folder: Path, *, now: float | None = None) -> float:
    """Return the seconds since a folder was last opened or written to; 0 when its times are in the future.

    `now`: the time to count from, the same for all folders that are compared; None: the present.
    """
    times = [folder.stat().st_mtime]
    with suppress(FileNotFoundError):
        times.append((folder / RECIPE_FILE).lstat().st_mtime)
    return max(0.0, (time.time() if now is None else now) - max(times))


def _shared(folder: Path) -> RegularFile:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            file = RegularFile(folder / RECIPE_FILE)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(
                f"{folder} holds no {RECIPE_FILE}: it is not a cache, or was removed"
            ) from error
        why = _lock_shared(file, folder)
        if why is None:
            return file
        file.close()
        if time.monotonic() >= until:
            raise StalledError.of_all([why.within(f"{folder} could not be opened for {WAIT_S:g} s: ")])
        time.sleep(LAST_POLL_S)


def _lock_shared(file: RegularFile, folder: Path) -> Problem | None:
    """Hold the open recipe of a folder; returns why that is of no use now, or None when it is held."""
    if not try_lock(file.fileno(), shared=True):
        return Problem("a clean-up holds it", "See whether `stoker cache gc` hangs")
    # The lock counts only if it is on the file that others will open (see `exclusive_use`).
    if _is_current(file, folder):
        return None
    # It was moved away, or its recipe repaired, while we waited; a file system may say so each time.
    fact = f"its {RECIPE_FILE} is another file each time it is looked at"
    return Problem(fact, "See what keeps replacing it")


def _is_current(file: RegularFile, folder: Path) -> bool:
    """Return True if what is open is what the folder holds now."""
    try:
        there = (folder / RECIPE_FILE).lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), there)


def lock_maintenance(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the process that rearranges a folder's shards: one at a time.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "compact", "is being compacted or repaired")


def lock_index(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the process that writes a folder's index; read the shards under it too.

    Raises:
        StalledError: Another process had it for `INDEX_WAIT_S` seconds.
        ReadOnlyError: The folder cannot be written.
    """
    return _only(folder, "index", "has its index written")


@contextmanager
def _only(folder: Path, purpose: str, doing: str) -> Generator[None]:
    with lock_folder(folder, purpose, timeout_s=INDEX_WAIT_S) as got:
        if not got:
            raise StalledError(
                f"{folder} {doing} by {lock_holder(folder, purpose)}, which took longer than "
                f"{INDEX_WAIT_S:g} s",
                hint="Run again when it is done",
            )
        yield


# ----------------------------------------------------------------------------------------------------------
# From a URL to the local folder that stands for it.


MIRROR_DIR = Path(".stoker/mirror")
Limit: TypeAlias = "int | Literal['as it is'] | None"


def mirror_limit(folder: Path) -> int | None:
    """Return how many bytes are kept here of what is put into a folder, or below it; None: all."""
    found = root_of(folder) or root_of(folder / "name" / "fingerprint")
    return None if found is None else found[0].space.limit_bytes


def mirror_url(folder: Path) -> str | None:
    """Return the URL that a mirror, or a folder in one, stands for; None: it is a plain folder."""
    folder = folder.absolute()
    if (folder / MARKER).exists():
        return read_marker(folder)[0]
    found = root_of(folder)
    return None if found is None else f"{found[0].url}/{found[1]}"


def display_path(folder: Path) -> str:
    """Return a folder for messages: its URL where it has one, else its path."""
    return mirror_url(folder) or str(folder)


def make_root(path: Path, url: str, limit_bytes: int | None) -> None:
    """Make a folder stand for a URL, or change its limit.

    Raises:
        FormatError: It stands for another URL.
        ConfigError: A limit cannot be kept there.
        ReadOnlyError: The folder cannot be made.
    """
    known = read_marker(path) if (path / MARKER).exists() else None
    if known == (url, limit_bytes):
        return
    if known is not None and known[0] != url:
        raise FormatError(f"{path} stands for {known[0]}, not for {url}", hint="Choose another mirror_dir")
    make_folder(path, 0o700)
    if limit_bytes is not None:
        require_holes(path)
    (path / USED_FILE).touch(mode=0o600)
    text = canonical_json({"format": 1, "limit_bytes": limit_bytes, "url": url})
    write_file(path / MARKER, text.encode())
    if (root := opened_root(path)) is not None:
        root.space.limit_bytes = limit_bytes


def resolve_local(place: str | Path, *, must_exist: bool = True) -> Path:
    """Return the local path of a place: of a URL that of its mirror, of a path itself.

    Raises:
        ConfigError: It is no place at all: empty, or not text.
        FormatError: There is nothing at the URL, and `must_exist`.
        StokerError: As `attach_mirror`.
    """
    text = str(place) if isinstance(cast("object", place), str | Path) else ""
    if not text or "\0" in text:
        raise ConfigError(
            f"the path of the cache is {place!r}", hint="Expected a path, as 'data/latent_cache'"
        )
    return attach_mirror(place, must_exist=must_exist) if is_url(place) else Path(place)


def attach_mirror(
    url: str | Path,
    mirror_dir: str | Path = MIRROR_DIR,
    limit_bytes: Limit = "as it is",
    *,
    must_exist: bool = False,
) -> Path:
    """Return the local folder that stands for a URL, with recipes and indexes as they are there now.

    Args:
        url: Of a folder of caches, of one cache (its folders by fingerprint), or of one fingerprint.
        mirror_dir: Where mirrors are kept, each in a folder of its own.
        limit_bytes: Bytes of shards that are kept here; None: as many as fit; by default as it was, and at
            first None.
        must_exist: Refuse a URL at which there is nothing.
    Raises:
        ConfigError: It is not a URL, or a package is missing; or the limit cannot be kept there.
        FormatError: There is nothing.
        ServiceError, StalledError: The place refuses, or does not answer.
    """
    url = parse_url(url)
    folders, objects = _list(open_remote(url), "")
    if must_exist and not folders and not objects:
        raise FormatError(f"there is no cache at {url}", hint="Check the address, or run precompute")
    depth = _depth(folders, objects)
    top, inside = _split(url, depth)
    root = local_path(mirror_dir, "mirror_dir").absolute() / _folder_name(top)
    if limit_bytes == "as it is":
        limit_bytes = read_marker(root)[1] if (root / MARKER).exists() else None
    make_root(root, top, limit_bytes)
    remote = open_remote(top)
    if depth == 2:
        names = [inside]
    elif depth == 1:
        names = [f"{inside}/{folder}" for folder in folders]
    else:
        below = map_in_order(lambda name: (name, _list(remote, name)[0]), folders, what=f"listing {url}")
        names = [f"{name}/{folder}" for name, found in below for folder in found]
    names = [name for name in names if FINGERPRINT.fullmatch(name.rpartition("/")[2])]
    for _ in map_in_order(lambda name: _bring(root / name), names, what=f"reading what is at {url}"):
        pass
    _remove_gone(root, inside, {*names}, remote)
    (root / inside).mkdir(mode=0o700, parents=True, exist_ok=True)
    return root / inside


def _list(remote: Remote, folder: str) -> tuple[list[str], list[RemoteObject]]:
    folders, objects = Retries().run(lambda: remote.list(folder), f"list {remote.url}/{folder}".rstrip("/"))
    return [name for name in folders if not name.startswith(".") and name != WEIGHTS_FOLDER], objects


def _depth(folders: list[str], objects: list[RemoteObject]) -> int:
    """Return how many folders below the one that holds caches by name."""
    if any(one.name == RECIPE_FILE for one in objects):
        return 2
    return 1 if any(map(FINGERPRINT.fullmatch, folders)) else 0


def _split(url: str, depth: int) -> tuple[str, str]:
    """Return the URL of the folder that holds caches by name, and what is below it."""
    top, inside = url, ""
    for _ in range(depth):
        top, _, last = top.rpartition("/")
        inside = f"{last}/{inside}" if inside else last
    if depth and (top.endswith((":/", "//"))):
        raise ConfigError(f"{url}: caches lie in <folder>/<name>/<fingerprint>, and here a folder is missing")
    return top, inside


def _folder_name(url: str) -> str:
    """Return a folder's name that says which URL it stands for, and differs for each."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-60:].strip("-")
    return f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _bring(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = open_storage(folder)
    for name in (RECIPE_FILE, INDEX_FILE):
        storage.version(name)  # fetches it, unless the cache was begun and has none yet


def _remove_gone(root: Path, inside: str, names: set[str], remote: Remote) -> None:
    """Remove what stands for a folder that is not there any more, unless a process has it open."""
    for recipe in root.glob(f"[!.]*/[!.]*/{RECIPE_FILE}"):
        name = str(recipe.parent.relative_to(root))
        if name in names or not (name == inside or name.startswith(inside and f"{inside}/")):
            continue
        if _is_there(remote, f"{name}/{RECIPE_FILE}"):
            continue  # begun since the list was made
        with exclusive_use(recipe.parent) as is_unused:
            if is_unused:
                shutil.rmtree(recipe.parent, ignore_errors=True)


def _is_there(remote: Remote, name: str) -> bool:
    try:
        Retries().run(lambda: remote.head(name), f"head {remote.url}/{name}")
    except FileNotFoundError:
        return False
    return True
