"""The list of samples of a folder, in a SQLite file: millions of names take no memory here or in workers.

A walk notes each file with its key and role. Sorted by key, the notes of one key become one sample, with what
is wrong with it: a file that lacks its partner, two files of one key. Samples are numbered in natural order
of their keys. Each 4,096 of them are a block, whose stamp tells if any of its files was touched.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from stoker.errors import DecodeError, ResourceError, SourceError
from stoker.extras.adopt.containers import ROWS, Member, label_pairs, members, read_zip_member, says_no_labels
from stoker.extras.adopt.layouts import Layout, Role
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import PendingFile, dead_temporaries
from stoker.runtime.locks import lock_folder
from stoker.sources.files import open_regular, why_unreadable
from stoker.units import MIB, format_count

BLOCK = 4096
"""Samples of a block."""
SHOWN = 5
MAX_UNLABELED_BYTES = MIB
"""Bytes of a list of labels without labels."""
KEPT_S = 24 * 3600
"""Age of an earlier list of the same name from which it is removed: a run may still use a younger one."""
PROBE_BYTES = 64 * 1024
SMALL_BYTES = 2 * MIB
"""Up to this size a sample of a file would be all of it."""
SWEEP_S = 10.0
"""How long the removal of earlier lists may take."""
MAX_CLASSES = 100_000
MAX_GAPS = 10
"""Numbers without a file, for each with one, beyond which a file is probably named wrongly."""


class FilePart(NamedTuple):
    """One file of a sample, or one place in a container."""

    role: str
    file: str
    """Relative to the folder."""
    size: int
    """Bytes of the file."""
    mtime_ns: int
    offset: int = -1
    """Of a member of an archive; -1: the entire file, or a row."""
    length: int = -1
    member: str = ""
    row: int = -1
    sampled: bool = False
    """The file is digested by a sample of its bytes, since files before it in the list are large already."""


class ListedSample(NamedTuple):
    """One sample."""

    key: str
    parts: tuple[FilePart, ...]
    values: Mapping[str, int | str]
    """Fields from the name, or from a list of labels."""
    faults: tuple[tuple[str, str], ...]
    """Files that are wrong, and why, as far as their names tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBlock:
    """Consecutive samples."""

    first: int
    count: int
    stamp: str
    """Digest of names, sizes and times."""
    changed_ns: int
    """Latest change of one of its files."""


@dataclass(slots=True, kw_only=True)
class _WalkNotes:
    """Notes of a walk that are not samples."""

    ignored: int = 0
    ignored_names: list[str] = field(default_factory=list[str])
    faults: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def ignore(self, name: str) -> None:
        """Count a file that the layout has no place for."""
        self.ignored += 1
        if len(self.ignored_names) < SHOWN:
            self.ignored_names.append(name)


def walk(
    root: Path, skipped: Path | None, faults: list[tuple[str, str]]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relative name and entry of each file below a folder; hidden ones are left out.

    Args:
        root: The folder.
        skipped: A folder to leave out.
        faults: Gets what cannot be listed, and links to folders, which are not followed.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = os.scandir(root / folder)
        except OSError as error:
            faults.append((folder or ".", f"cannot be listed: {error.strerror}"))
            continue
        with entries:
            try:
                yield from _of_folder(entries, folder, folders, skipped, faults)
            except OSError as error:
                faults.append((folder or ".", f"cannot be listed: {error.strerror}"))


def _of_folder(
    entries: Iterator[os.DirEntry[str]],
    folder: str,
    folders: list[str],
    skipped: Path | None,
    faults: list[tuple[str, str]],
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield name and entry of each file in a folder, and add the folders in it to `folders`."""
    for entry in entries:
        name = folder + entry.name
        if not _is_utf8(name):
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            faults.append((shown, "its name is not UTF-8"))
        elif entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(".") and Path(entry.path) != skipped:
                folders.append(f"{name}/")
        elif entry.is_symlink() and Path(entry.path).is_dir():  # which says no of a link to itself
            faults.append((name, "a link to a folder, which is not followed"))
        elif not entry.name.startswith("."):
            yield name, entry


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Listing:
    """A listing on disk, opened on first use in each process.

    Args:
        path: The SQLite file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, sqlite3.Connection] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __len__(self) -> int:
        return int(self._one("SELECT count FROM facts")[0])

    @property
    def digest(self) -> str:
        """Digest of all blocks."""
        return str(self._one("SELECT digest FROM facts")[0])

    @property
    def classes(self) -> dict[str, list[str]]:
        """The texts of each group of names that is numbered, in the order of their numbers."""
        return json.loads(self._one("SELECT classes FROM facts")[0])

    @property
    def ignored(self) -> tuple[int, list[str]]:
        """Number of files that the layout has no place for, and the first names."""
        count, names = self._one("SELECT ignored, ignored_names FROM facts")
        return int(count), json.loads(names)

    @property
    def faults(self) -> list[tuple[str, str]]:
        """Entries that belong to no sample and are wrong, and why."""
        return [tuple(pair) for pair in json.loads(self._one("SELECT faults FROM facts")[0])]

    def largest(self, suffixes: Sequence[str]) -> int:
        """Return the bytes of the largest file of these suffixes; 0 without such a file."""
        marks = " OR ".join("suffix = ?" for _ in suffixes)
        return int(self._one(f"SELECT coalesce(max(bytes), 0) FROM sizes WHERE {marks}", suffixes)[0])  # noqa: S608

    def sample(self, number: int) -> ListedSample:
        """Return a sample.

        Raises:
            IndexError: There is no such sample.
        """
        row = self._one("SELECT * FROM samples WHERE number = ?", (number,))
        if row is None:
            raise IndexError(f"sample {number} does not exist: this source has {len(self)}")
        return _sample(row)

    def samples(self, first: int, count: int) -> list[ListedSample]:
        """Return consecutive samples."""
        rows = self._database().execute(
            "SELECT * FROM samples WHERE number >= ? AND number < ? ORDER BY number", (first, first + count)
        )
        return [_sample(row) for row in rows]

    def blocks(self) -> Iterator[ListedBlock]:
        """Yield the blocks in order."""
        for first, count, stamp, changed_ns in self._database().execute(
            "SELECT * FROM blocks ORDER BY first"
        ):
            yield ListedBlock(first=first, count=count, stamp=stamp, changed_ns=changed_ns)

    def keys(self) -> ListedKeys:
        """Return the keys of all samples."""
        return ListedKeys(self)

    def key_range(self, first: int, stop: int) -> Iterator[str]:
        """Yield the keys of consecutive samples."""
        rows = self._database().execute(
            "SELECT key FROM samples WHERE number >= ? AND number < ? ORDER BY number", (first, stop)
        )
        return (str(key) for (key,) in rows)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()
        self._opened = None

    def _database(self) -> sqlite3.Connection:
        if self._opened is None or self._opened[0] != os.getpid():
            # Immutable: no lock is taken, which some network file systems do not have.
            address = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
            connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._opened = (os.getpid(), connection)
        return self._opened[1]

    def _one(self, query: str, values: Sequence[object] = ()) -> Any:
        try:
            return self._database().execute(query, tuple(values)).fetchone()
        except sqlite3.Error as error:
            raise SourceError(
                f"the list of files {self.path} cannot be read: {error}", hint="Run stoker.adopt again"
            ) from error


class ListedKeys(Sequence[str]):
    """Keys of samples, read from the listing as they are asked for."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def __len__(self) -> int:
        return len(self._listing)

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._listing.sample(places).key
        return [self._listing.sample(place).key for place in places]

    def __iter__(self) -> Iterator[str]:
        return self._listing.key_range(0, len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[str]", other))

    __hash__ = None  # type: ignore[assignment]


def _sample(row: tuple[Any, ...]) -> ListedSample:
    _, key, parts, values, faults = row
    return ListedSample(
        key=key,
        parts=tuple(FilePart(*part) for part in json.loads(parts)),
        values=json.loads(values) if values else {},
        faults=tuple((file, why) for file, why in json.loads(faults)) if faults else (),
    )


# ----------------------------------------------------------------------------------------------------------
# Make a listing.


_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384; PRAGMA temp_store = FILE;
CREATE TABLE found (sort TEXT, key TEXT, role INTEGER, base TEXT, part TEXT, field TEXT, changed INTEGER);
CREATE TABLE shared (key TEXT, role INTEGER, part TEXT, used INTEGER);
CREATE TABLE samples (number INTEGER PRIMARY KEY, key TEXT, parts TEXT, field TEXT, faults TEXT);
CREATE TABLE blocks (first INTEGER, count INTEGER, stamp TEXT, changed_ns INTEGER);
CREATE TABLE sizes (suffix TEXT PRIMARY KEY, bytes INTEGER);
CREATE TABLE facts (count, digest, classes, ignored, ignored_names, faults);
"""
_DIGITS = re.compile(r"\d+")


def make_listing(  # noqa: PLR0913 (what is listed, where the list goes, and three limits)
    root: Path,
    layout: Layout,
    folder: Path,
    name: str,
    *,
    skipped: Path | None = None,
    count: int | None = None,
    full_bytes: int | None = None,
) -> Listing:
    """Walk a folder and write the list of its samples; an equal list that is there is kept.

    Args:
        root: The folder, or one file of it.
        layout: Which files are samples.
        folder, name: The list goes to `<folder>/<name>-<digest>.sqlite`.
        skipped: A folder below the root to leave out.
        count: Of numbered samples, how many there should be; None: up to the highest number.
        full_bytes: Bytes of the first files that are digested in full; of later ones those above 2 MiB are
            digested by a sample. None: all files in full.

    Raises:
        SourceError: No file is a sample, or an archive cannot be listed.
    """
    purpose = f"list-{name}"
    with lock_folder(folder, purpose) as alone:
        if alone:
            _sweep(folder, name)
    writer = partial(_ListingWriter, root=root, layout=layout, skipped=skipped, full_bytes=full_bytes)
    # Lists may be written at the same time; what is being written is not swept.
    with lock_folder(folder, purpose, shared=True, timeout_s=SWEEP_S):
        try:
            return Listing(_write(writer, folder, name, count))
        except sqlite3.Error:
            # SQLite does not tell what the system said of a write; a write of ours does, or it has passed.
            _try_to_write(folder)
        try:
            return Listing(_write(writer, folder, name, count))
        except sqlite3.Error as error:
            raise ResourceError(
                f"the list of files cannot be written to {folder}: {error}", hint="Free space there"
            ) from error


def _write(
    writer: Callable[[sqlite3.Connection], _ListingWriter], folder: Path, name: str, count: int | None
) -> Path:
    """Write a list under a temporary name; it is renamed once it is complete."""
    unfinished = folder / f".{name}.{secrets.token_hex(4)}.part"
    try:
        with explain_disk_errors(folder):
            with closing(sqlite3.connect(unfinished)) as database:
                writer(database).write(count)
            with closing(Listing(unfinished)) as made:
                final = folder / f"{name}-{made.digest[:16]}.sqlite"
            unfinished.replace(final)
            return final
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed runs left, and earlier lists that no run uses any more."""
    for _ in dead_temporaries(folder, remove=True):
        pass
    for old in folder.glob(f".{name}.*.part"):
        with suppress(OSError):
            old.unlink()
    for old in folder.glob(f"{name}-{'[0-9a-f]' * 16}.sqlite"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()


def _try_to_write(folder: Path) -> None:
    pending = PendingFile(folder, "list")
    try:
        pending.write_at(0, bytes(PROBE_BYTES))
    finally:
        pending.discard()


class _ListingWriter:
    """Writes one listing."""

    def __init__(
        self,
        database: sqlite3.Connection,
        root: Path,
        layout: Layout,
        skipped: Path | None,
        full_bytes: int | None,
    ) -> None:
        self._database = database
        self._large_files = _LargeFiles(full_bytes)
        self._root = root if root.is_dir() else root.parent
        self._only = None if root.is_dir() else root.name
        self._layout = layout
        self._skipped = skipped
        self._notes = _WalkNotes()
        self._classes: dict[str, dict[str, int]] = {}
        self._sizes: dict[str, int] = {}

    def write(self, count: int | None) -> None:
        """Walk, then group what was found by key."""
        self._database.executescript(_TABLES)
        self._database.executemany("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?)", self._found())
        self._number_classes()
        total, digest = self._group(count)
        self._orphans_of_shared()
        facts = (
            total,
            digest,
            json.dumps({name: list(texts) for name, texts in self._classes.items()}),
            self._notes.ignored,
            json.dumps(self._notes.ignored_names),
            json.dumps(self._notes.faults),
        )
        self._database.execute("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?)", facts)
        self._database.executemany("INSERT INTO sizes VALUES (?, ?)", self._sizes.items())
        self._database.execute("DROP TABLE found")
        self._database.commit()

    def _found(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row of `found` for each file, or each sample in a container."""
        if self._only is None:
            files = walk(self._root, self._skipped, self._notes.faults)
        else:
            with os.scandir(self._root) as entries:
                files = [(entry.name, entry) for entry in entries if entry.name == self._only]
        for name, entry in files:
            place, match = next(
                (
                    (place, match)
                    for place, role in enumerate(self._layout.roles)
                    if (match := role.match(name))
                ),
                (-1, None),
            )
            if match is None:
                self._notes.ignore(name)
                continue
            role = self._layout.roles[place]
            try:
                status = entry.stat()
                regular = stat.S_ISREG(status.st_mode)
            except OSError:  # a link to nothing is met again, by its name, when it is read
                try:
                    status, regular = os.lstat(self._root / name), False
                except FileNotFoundError:  # removed since it was listed
                    continue
            part = FilePart(role.name, name, status.st_size, status.st_mtime_ns)
            changed = [status.st_ctime_ns, status.st_dev, status.st_ino]
            self._note_size(name, status.st_size)
            if role.kind in ("file", "image"):
                yield from self._row(place, match, part, changed)
            elif regular:
                yield from self._contents(place, match, part, changed)
            else:
                self._notes.faults.append((name, why_unreadable(self._root / name) or "not a file"))

    def _note_size(self, name: str, size: int) -> None:
        suffix = name.rpartition(".")[2].lower()
        self._sizes[suffix] = max(self._sizes.get(suffix, 0), size)

    def _contents(
        self, place: int, match: re.Match[str], part: FilePart, changed: list[int]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the samples in a container; one that cannot be listed is a sample that fails."""
        role, path = self._layout.roles[place], self._root / part.file
        try:
            if part.size == 0:
                raise DecodeError("empty, 0 bytes")
            if role.kind == "labels":
                with open_regular(path) as raw, io.BufferedReader(raw) as file:
                    yield from self._labels(place, file, part.file, changed)
                return
            for member in members(role.kind, path):
                yield from self._member(place, match, part, changed, member)
        except (SourceError, OSError) as error:
            fact = error.fact if isinstance(error, SourceError) else f"cannot be read: {error.strerror}"
            why = fact.removeprefix(f"{path} ").removeprefix(f"{path}: ")
            if role.kind == "labels":
                self._notes.faults.append((part.file, why))
                return
            broken = part._replace(role="!" + why)
            yield self._noted(part.file, place, "", broken, {}, changed)

    def _member(
        self, place: int, match: re.Match[str], part: FilePart, changed: list[int], member: Member
    ) -> Iterator[tuple[Any, ...]]:
        role = self._layout.roles[place]
        name = match["key"] if "key" in match.re.groupindex else part.file
        if role.kind in ROWS:
            keyed = role.kind == "parquet" and not member.name.isdigit()
            row = part._replace(row=member.row)
            if not member.name:
                row = row._replace(
                    role=f"!row {member.row} has no key: the column of keys is null or empty there"
                )
                yield self._noted(f"{part.file}:{member.row}", place, "", row, {}, changed)
                return
            key = member.name if keyed or not name else f"{name}:{member.name}"
            yield self._noted(key, place, "", row, {}, changed)
            return
        inside = part._replace(offset=member.offset, length=member.size, member=member.name)
        if role.kind == "tar":
            stem = member.name.rpartition("/")
            key = f"{part.file}:{stem[0]}{stem[1]}{stem[2].partition('.')[0]}"
            ending = stem[2].partition(".")[2]
            self._note_size(ending, member.size)
            yield self._noted(key, place, "", inside._replace(role=ending), {}, changed)
            return
        for other, inner in enumerate(self._layout.roles):
            if found := inner.match(member.name):
                if inner.kind == "labels":
                    with open_regular(self._root / part.file) as file:
                        data = read_zip_member(file.fileno(), member)
                    yield from self._labels(other, io.BytesIO(data), part.file, changed)
                elif inner.kind == "file":
                    yield from self._row(other, found, inside._replace(role=inner.name), changed)
                return

    def _labels(
        self, place: int, file: io.BufferedIOBase, name: str, changed: list[int]
    ) -> Iterator[tuple[Any, ...]]:
        latents = self._layout.roles[0]
        found = False
        for latent, label in label_pairs(file):
            found = True
            if match := latents.match(latent):
                yield self._noted(_key(latents, match), place, name, None, {"label": label}, changed)
        if not found:
            file.seek(0)
            if not says_no_labels(file.read(MAX_UNLABELED_BYTES)):
                self._notes.faults.append((name, "lists no labels, and does not say that there are none"))

    def _row(
        self, place: int, match: re.Match[str], part: FilePart, changed: list[int]
    ) -> Iterator[tuple[Any, ...]]:
        role = self._layout.roles[place]
        values: dict[str, Any] = {}
        for name, text in match.groupdict().items():
            if name in ("key", "folder", "base") or text is None:
                continue
            values[name] = int(text) if name in role.whole else text
            if name not in role.whole:
                known = self._classes.setdefault(name, {})
                known.setdefault(text, 0)
                if len(known) > MAX_CLASSES:
                    raise SourceError(
                        f"the part {{{name}}} of file names has more than {MAX_CLASSES:,} different texts",
                        hint="Write * in its place, since it is not a field but names samples",
                    )
        key = _key(role, match)
        if role.shared:
            self._database.execute(
                "INSERT INTO shared VALUES (?, ?, ?, 0)", (key, place, json.dumps([*part, *changed]))
            )
            return
        yield self._noted(key, place, match.groupdict().get("base") or key, part, values, changed)

    def _noted(
        self,
        key: str,
        place: int,
        base: str,
        part: FilePart | None,
        values: Mapping[str, Any],
        changed: list[int],
    ) -> tuple[Any, ...]:
        sort = _DIGITS.sub(lambda digits: digits[0].rjust(20, "0"), key)
        text = "" if part is None else json.dumps([*part, *changed])
        return sort, key, place, base, text, json.dumps(values) if values else "", changed[0]

    def _number_classes(self) -> None:
        for name, texts in self._classes.items():
            self._classes[name] = {text: number for number, text in enumerate(sorted(texts))}

    def _group(self, count: int | None) -> tuple[int, str]:
        """Write samples and blocks; return the number of samples, and the digest of all."""
        seen = {place for (place,) in self._database.execute("SELECT DISTINCT role FROM found")}
        shared = {place for (place,) in self._database.execute("SELECT DISTINCT role FROM shared")}
        self._database.execute("CREATE INDEX by_key ON shared (key)")
        roles = self._layout.roles
        archives = {place for place, role in enumerate(roles) if role.kind in ("tar", "zip", *ROWS)}
        needed = {p for p in seen | shared if not roles[p].optional and p not in archives}
        rows = self._database.execute("SELECT * FROM found ORDER BY sort, key, role, part")
        grouped = (
            self._sample(key, list(notes), needed, shared)
            for key, notes in itertools.groupby(rows, key=lambda row: row[1])
        )
        if self._layout.numbered:
            grouped = _with_gaps(grouped, count)
        blocks: list[tuple[Any, ...]] = []
        total = 0
        whole = hashlib.sha256()
        for block in _batches(grouped, BLOCK):
            self._large_files.begin_block()  # the samples of the next one are made when they are asked for
            stamp = hashlib.sha256()
            for _, *texts in block:
                stamp.update(json.dumps(texts).encode())
            whole.update(stamp.digest())
            blocks.append((total, len(block), stamp.hexdigest(), max(one[0] for one in block)))
            self._database.executemany(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
                (
                    (total + at, key, parts, values, faults)
                    for at, (_, key, parts, values, faults, _) in enumerate(block)
                ),
            )
            total += len(block)
        self._database.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", blocks)
        if not total:
            faults = [": ".join(fault) for fault in self._notes.faults[:SHOWN]]
            few = ", ".join(self._notes.ignored_names or faults) or "nothing"
            raise SourceError(
                f"{self._root} holds no file of the layout {self._layout.name}: it has {few}"
                + (
                    f" and {format_count(self._notes.ignored - SHOWN)} more"
                    if self._notes.ignored > SHOWN
                    else ""
                ),
                hint="Check the folder, or name another layout or a pattern",
            )
        return total, whole.hexdigest()

    def _sample(
        self, key: str, notes: list[tuple[Any, ...]], needed: set[int], shared: set[int]
    ) -> tuple[Any, ...]:
        """Return change time, key, parts, values, faults and stamps of the sample of a key."""
        roles = self._layout.roles
        held: dict[int, list[list[Any]]] = {}
        values: dict[str, Any] = {}
        faults: list[tuple[str, str]] = []
        for _, _, place, base, part, own, _ in notes:
            held.setdefault(place, [])
            if part:
                held[place].append(json.loads(part))
            for name, value in (json.loads(own) if own else {}).items():
                number = self._classes[name][value] if isinstance(value, str) else value
                if not part and values.setdefault(name, number) != number:  # of a list of labels
                    faults.append((base, f"gives {key!r} the {name} {values[name]} and the {name} {number}"))
                values[name] = number
        for place in shared:
            found = self._database.execute(
                "SELECT part FROM shared WHERE key = ? AND role = ?", (notes[0][3], place)
            ).fetchall()
            if found:
                held[place] = [json.loads(part) for (part,) in found]
                self._database.execute(
                    "UPDATE shared SET used = 1 WHERE key = ? AND role = ?", (notes[0][3], place)
                )
        for place, parts in held.items():
            if len(parts) > 1 and roles[place].kind != "tar":
                names = [part[1] for part in parts]
                for name in names:
                    others = ", ".join(other for other in names if other != name)
                    faults.append((name, f"has the same key {key!r} as {others or 'another entry of it'}"))
        files = [part[1] for _, parts in sorted(held.items()) for part in parts]
        for place in sorted(needed - held.keys()):
            role = roles[place]
            lead = files[0] if files else notes[0][3]  # of a label: the file that lists it
            faults.append((lead, f"has no {role.name}: no such file belongs to {key!r}"))
        parts = [part for _, parts in sorted(held.items()) for part in parts]
        # Of a container that cannot be listed, nothing else is known.
        faults = [(part[1], part[0][1:]) for part in parts if part[0].startswith("!")] or faults
        kept = [part[: len(FilePart._fields)] for part in parts if roles_kind(roles, part[0]) != "image"]
        for part in kept:
            part[-1] = self._large_files.is_sampled(FilePart(*part))
        changed = max((part[len(FilePart._fields)] for part in parts), default=0)
        return (
            changed,
            key,
            json.dumps(kept),
            json.dumps(values) if values else "",
            json.dumps(faults) if faults else "",
            [part[len(FilePart._fields) :] for part in parts],
        )

    def _orphans_of_shared(self) -> None:
        rows = self._database.execute("SELECT key, role, part FROM shared WHERE used = 0 ORDER BY key")
        for key, place, part in rows:
            main = next(role.name for at, role in enumerate(self._layout.roles) if at != place)
            self._notes.faults.append(
                (json.loads(part)[1], f"has no {main}: no such file belongs to {key!r}")
            )


class _LargeFiles:
    """Decides by the order of samples alone which files are digested by a sample of their bytes.

    What an earlier run digested has no part in it, so equal folders have equal digests.
    """

    def __init__(self, full_bytes: int | None) -> None:
        self._full_bytes = full_bytes
        self._bytes = 0
        self._containers: dict[str, bool] = {}
        self._files: dict[str, bool] = {}

    def begin_block(self) -> None:
        """Forget files of the last block; those with samples of several blocks stay."""
        self._files.clear()

    def is_sampled(self, part: FilePart) -> bool:
        """Return True if the file of the next part is digested by a sample."""
        known = self._containers if part.row >= 0 or part.offset >= 0 else self._files
        if part.file not in known:
            self._bytes += part.size
            beyond = self._full_bytes is not None and self._bytes > self._full_bytes
            known[part.file] = beyond and part.size > SMALL_BYTES
        return known[part.file]


def roles_kind(roles: Sequence[Role], name: str) -> str:
    """Return the kind of the role of a name."""
    return next((role.kind for role in roles if role.name == name), "file")


def _key(role: Role, match: re.Match[str]) -> str:
    groups = match.groupdict()
    own = role.named.format(key=groups["key"])
    return f"{groups['folder']}/{own}" if groups.get("folder") else own


def _batches(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(rows, size)):
        yield batch


def _with_gaps(samples: Iterator[tuple[Any, ...]], count: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield samples by number, and one that fails for each number that has no file."""
    expected, stem = 0, ""
    for files, sample in enumerate(samples, 1):
        digits = _DIGITS.findall(sample[1])[-1]
        stem, number = sample[1].removesuffix(digits), int(digits)
        if number - expected > MAX_GAPS * files + 1000:
            raise SourceError(
                f"{sample[1]} follows after {format_count(number - expected)} missing numbers",
                hint="Is a file named wrongly?",
            )
        if count is not None and number >= count:
            raise SourceError(f"there is a sample {number}, and count is {count}", hint="Give more")
        yield from (_gap(stem, missing) for missing in range(expected, number))
        expected = number + 1
        yield sample
    if stem:
        yield from (_gap(stem, missing) for missing in range(expected, count or 0))


def _gap(stem: str, number: int) -> tuple[Any, ...]:
    key = f"{stem}{number:05d}"
    return 0, key, "[]", "", json.dumps([[f"{key}.pt", "is missing"]]), []
