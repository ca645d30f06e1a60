"""What a power cut may leave, worked out from recorded calls: a strict reading of what fsync promises.

A file's bytes last from its fsync on, a name from the fsync of its folder on; whatever was not synced may be
there, or not, name by name and write by write. A failed fsync of a file loses what it was to write for good:
the kernel marks those pages clean, so syncing again succeeds and writes nothing. One of a folder leaves its
names waiting: a journal that cannot be written ends the file system, so nothing that follows can succeed.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.preload import Call

State = dict[str, bytes | None]
"""Path below the root to content; None: a folder."""


@dataclass(slots=True)
class _File:
    disk: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes (offset, bytes) and truncations (size, None) since the last fsync."""


@dataclass(slots=True)
class _Folder:
    names: dict[str, object]
    """As the program sees it: name to file or folder."""
    disk: dict[str, object]
    waiting: list[list[tuple[str, object | None]]] = field(default_factory=list)
    """Changes of names since the last fsync; those of one call happen together."""


class Disk:
    """A folder tree as a program sees it, and as it would be found after a power cut."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[int, _File] = {}
        self._top = self._scan(root)

    def _scan(self, path: Path) -> _Folder:
        names: dict[str, object] = {}
        for entry in os.scandir(path):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                names[entry.name] = self._scan(path / entry.name)
            elif stat.S_ISREG(status.st_mode):
                file = self._files.setdefault(status.st_ino, _File())
                file.disk = bytearray((path / entry.name).read_bytes())
                names[entry.name] = file
        return _Folder(dict(names), dict(names))

    def _parent(self, path: str) -> tuple[_Folder, str]:
        assert path.startswith(self._root + "/"), path
        *parents, name = path[len(self._root) + 1 :].split("/")
        folder = self._top
        for parent in parents:
            inner = folder.names[parent]
            assert isinstance(inner, _Folder)
            folder = inner
        return folder, name

    def _change(self, *changes: tuple[str, object | None]) -> None:
        by_folder: dict[int, tuple[_Folder, list[tuple[str, object | None]]]] = {}
        for path, item in changes:
            folder, name = self._parent(path)
            by_folder.setdefault(id(folder), (folder, []))[1].append((name, item))
        for folder, group in by_folder.values():
            folder.waiting.append(group)
            _apply(folder.names, group)

    def apply(self, call: Call) -> None:
        """Take note of one recorded call."""
        if call.op in ("fsync", "fdatasync"):
            self._sync(call)
            return
        if call.result < 0 or not call.writes:
            return
        if call.op in ("create", "open-write"):
            folder, name = self._parent(call.path)
            file = self._files.setdefault(call.inode, _File())
            if folder.names.get(name) is not file:
                file = self._files[call.inode] = _File()  # inode numbers are used again
                self._change((call.path, file))
            if call.offset & os.O_TRUNC:
                file.waiting.append((0, None))
        elif call.op in ("write", "pwrite", "writev"):
            self._files[call.inode].waiting.append((call.offset, call.data))
        elif call.op == "ftruncate":
            self._files[call.inode].waiting.append((call.offset, None))
        elif call.op == "mkdir":
            self._change((call.path, _Folder({}, {})))
        elif call.op == "rename":
            folder, name = self._parent(call.path)
            self._change((call.path, None), (call.other, folder.names[name]))
        elif call.op == "link":
            folder, name = self._parent(call.path)
            self._change((call.other, folder.names[name]))
        elif call.op in ("unlink", "rmdir"):
            self._change((call.path, None))

    def apply_all(self, calls: Sequence[Call]) -> list[str]:
        """Take note of recorded calls; returns the marks among them."""
        for call in calls:
            if call.op != "mark":
                self.apply(call)
        return [call.path for call in calls if call.op == "mark"]

    def _sync(self, call: Call) -> None:
        item: object = self._top
        if call.path != self._root:
            folder, name = self._parent(call.path.removesuffix(" (deleted)"))
            item = folder.names.get(name)
        done = call.result >= 0
        if not done and call.error == errno.EINTR:
            return  # nothing was tried yet; the caller tries again
        if isinstance(item, _Folder) and done:
            for group in item.waiting:
                _apply(item.disk, group)
            item.waiting.clear()
        elif isinstance(item, _File):
            if done:
                _write(item.disk, item.waiting)
            item.waiting.clear()

    def after_cut(self, kind: str, chance: random.Random) -> State:
        """What is found after a power cut now.

        Args:
            kind: `least`: only what was synced. `names`: every name, of files only what was synced.
                `some`: any part of the rest as well.
            chance: Which part.
        """
        found: State = {}
        self._find(self._top, "", kind, chance, found)
        return found

    def _find(self, folder: _Folder, path: str, kind: str, chance: random.Random, found: State) -> None:
        names = dict(folder.disk)
        for group in folder.waiting:
            if kind == "names" or (kind == "some" and chance.random() < 0.5):
                _apply(names, group)
        for name, item in names.items():
            if isinstance(item, _Folder):
                found[path + name] = None
                self._find(item, f"{path}{name}/", kind, chance, found)
            elif isinstance(item, _File):
                content = bytearray(item.disk)
                if kind == "some":
                    _write(content, [w for w in item.waiting if chance.random() < 0.5])
                found[path + name] = bytes(content)


def _apply(names: dict[str, object], group: Sequence[tuple[str, object | None]]) -> None:
    for name, item in group:
        if item is None:
            names.pop(name, None)
        else:
            names[name] = item


def _write(content: bytearray, writes: Sequence[tuple[int, bytes | None]]) -> None:
    for offset, data in writes:
        if data is None:
            del content[offset:]
            content.extend(bytes(offset - len(content)))
        else:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data


def make(state: State, root: Path) -> None:
    """Write a state into an empty folder."""
    for name, content in sorted(state.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def cuts(
    disk: Disk, calls: Sequence[Call], *, some: int, seed: int
) -> Iterator[tuple[int, str, State, list[str]]]:
    """Different states that a power cut may leave between two calls, each once.

    Args:
        disk, calls: What there was, and what was done.
        some: How often to draw what is left of the kind `some`, after each call.
        seed: Of that.
    Yields:
        How many calls had been made, the kind of cut, what it leaves, and what had been promised (marks).
    """
    chance = random.Random(seed)
    seen: set[tuple[object, ...]] = set()
    promised: list[str] = []
    for i, call in enumerate(calls):
        promised += disk.apply_all([call])
        for kind in ("least", "names", *["some"] * some):
            state = disk.after_cut(kind, chance)
            key = (len(promised), *sorted(state.items(), key=lambda item: item[0]))
            if key not in seen:
                seen.add(key)
                yield i + 1, kind, state, [*promised]
