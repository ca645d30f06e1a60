"""Files of a source, their order, and the facts in their names.

Names carry meaning in simulation archives: `burgers1d_train_003.h5` is a shard of a split and
`1D_Burgers_Sols_Nu0.01.hdf5` holds a parameter. All reading of names happens here, and `open_regular` opens
files of any kind. A process that reads for somebody else is confined to some paths (`confine_sources`).
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import stat
import tokenize
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Generic, NoReturn, TypeAlias, TypeVar, cast

from stoker.errors import SourceError, SplitError, StokerError
from stoker.units import format_bytes, format_few

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""A file, a folder, a glob pattern, or a list of these."""

ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")
FileT = TypeVar("FileT")
KeyT = TypeVar("KeyT", bound=Hashable)

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_MAGIC = re.compile(r"[*?\[]")
_PARAMETER = re.compile(r"([A-Za-z]+)(-?\d+\.\d*(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+)")
_RANK = re.compile(r"(?<!\d)([123])[dD](?![A-Za-z0-9])")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_LISTED_BYTES = 100
"""Memory that the name of one sample takes."""
_NAMED = 20
"""Entries that a message names, at most."""
_confined: tuple[PurePosixPath, ...] | None = None
_ALIASES = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
_SPLITS = ("train", "val", "test")

_log = logging.getLogger("stoker")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which numbers in names count as numbers.

    >>> sorted(["s_10.h5", "s_9.h5"], key=natural_key)
    ['s_9.h5', 's_10.h5']
    """
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece), piece) if piece.isdigit() else (1, 0, piece) for piece in pieces]


def find_files(
    path: Paths, *, suffixes: tuple[str, ...] = SUFFIXES, what: str = "HDF5"
) -> tuple[Path, list[Path]]:
    """Return all files of a kind behind `path`, and the root their names are relative to.

    A folder or a pattern gives its files in natural order; a list keeps its own order. What a folder or a
    pattern gives and `usable_files` leaves out is named in a warning.

    Returns:
        The root (absolute) and the files (absolute, at least one).
    Raises:
        SourceError: Nothing is there, an entry cannot be read, a named file is empty, or one is named twice.
    """
    root, files, _ = find_keyed_files(path, suffixes=suffixes, what=what)
    return root, files


def find_keyed_files(
    path: Paths, *, suffixes: tuple[str, ...] = SUFFIXES, what: str = "HDF5"
) -> tuple[Path, list[Path], list[str]]:
    """Return the result of `find_files`, and the name of each file in keys of samples.

    That is its name relative to the folder, the pattern or the file that `path` names it by. It is not
    relative to the folder that all files share: a file of another folder would change that one, and with it
    the splits.
    """
    if isinstance(path, str | os.PathLike):
        found = [_expand(Path(path), suffixes, what)]
        root = found[0][0]
    else:
        items = cast("list[object]", [*path] if isinstance(cast("object", path), Iterable) else [path])
        named = [item for item in items if isinstance(item, str | os.PathLike)]
        if len(named) < len(items):
            raise SourceError(
                f"the path is {path!r}", hint=f"Expected {what} files, a folder or a pattern, or a list"
            )
        _require_named(named, suffixes)
        found = [_expand(Path(item), suffixes, what) for item in named]
        if not found:
            raise SourceError(
                "the list of files is empty", hint=f"Give at least one {what} file, folder or pattern"
            )
        folders = [file.parent for _, some in found for file in some]
        root = found[0][0] if len(found) == 1 else Path(os.path.commonpath(folders))
    files = [file for _, some in found for file in some]
    if len(set(files)) < len(files):
        twice = next(file for index, file in enumerate(files) if file in files[:index])
        raise SourceError(f"{twice} is named twice", hint="Give each file once")
    for file in files:
        if file.stat().st_size == 0:  # one that was named: others are left out with a warning
            raise SourceError(f"{file} is empty (0 bytes)", hint="Copy or download it again, or leave it out")
    return root, files, [file.relative_to(own).as_posix() for own, some in found for file in some]


def _require_named(named: Sequence[str | os.PathLike[str]], suffixes: tuple[str, ...]) -> None:
    """Refuse a list that names files that are not there: one error for all of them.

    Raises:
        SourceError: Several are missing.
    """
    paths = [Path(item).expanduser() for item in named]
    gone = [path for path in paths if not os.path.lexists(path) and not is_pattern(path)]
    if len(gone) < 2:
        return  # `_expand` says more about one
    few = format_few(gone, _NAMED)
    raise SourceError(
        f"{len(gone)} of {len(paths)} files do not exist: {few}{_nearby(gone[0].absolute(), suffixes)}",
        hint="Check the paths, or give a folder or pattern",
    )


def _expand(path: Path, suffixes: tuple[str, ...], what: str) -> tuple[Path, list[Path]]:
    start = "" if path.is_absolute() else " (a relative one begins in the current folder)"
    path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolve() would follow links
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        found = [file for file in entries_below(path) if file.suffix.lower() in suffixes]
        if not found:
            raise SourceError(
                f"{path} holds no {what} file ({', '.join(suffixes)})", hint="Name the files or a pattern"
            )
        return path, usable_files(found, str(path))
    if os.path.lexists(path):
        raise SourceError(
            f"{path} is {why_unreadable(path)}", hint=f"Give the {what} file itself, a folder or a pattern"
        )
    if not is_pattern(path):
        raise SourceError(
            f"{path} does not exist{_nearby(path, suffixes)}",
            hint=f"Check the path{start}, or give a folder or pattern",
        )
    root, found = entries_of_pattern(path)
    folders = [entry for entry in found if entry.is_dir()]
    if len(folders) == len(found):
        only = f" ({len(folders)} folders do)" if folders else ""
        raise SourceError(f"no file matches {path}{only}", hint=f"Check the pattern; {root} was searched")
    leave_out(str(path), dict.fromkeys(folders, "a folder"))
    return root, usable_files([entry for entry in found if entry not in set(folders)], str(path))


def is_pattern(path: Path) -> bool:
    """Return True if a path has one of the characters `*?[`.

    >>> is_pattern(Path("runs/*/data.h5")), is_pattern(Path("data.h5"))
    (True, False)
    """
    return _MAGIC.search(str(path)) is not None


def entries_below(folder: Path) -> list[Path]:
    """Return all entries below a folder that are not folders, in natural order.

    A link to a folder elsewhere is not followed; a warning names it.

    Raises:
        SourceError: A folder cannot be listed.
    """
    found: list[Path] = []
    links: dict[Path, str] = {}
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        found.extend(Path(place, name) for name in names)
        for name in folders:
            link = Path(place, name)
            if link.is_symlink() and not link.resolve().is_relative_to(folder.resolve()):
                links[link] = "a link to another folder: name that folder as well"
    leave_out(str(folder), links)
    return sorted(found, key=lambda entry: natural_key(str(entry)))


def entries_of_pattern(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder that a pattern is searched in, and all entries that match it, in natural order.

    They are those of `Path.glob`, hidden ones among them.

    Raises:
        SourceError: A folder cannot be listed.
    """
    plain = next(index for index, part in enumerate(path.parts) if _MAGIC.search(part))
    root = Path(*path.parts[:plain])
    found = dict.fromkeys(_matches(root, path.parts[plain:])) if root.is_dir() else {}
    return root, sorted(found, key=lambda entry: natural_key(str(entry)))


def _matches(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Entries below a folder that match the parts of a pattern. `Path.glob` hides folders it cannot list."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        for place, _, _ in os.walk(folder, onerror=_refuse_folder):
            yield from _matches(Path(place), rest) if rest else ()
        return
    if _MAGIC.search(part):
        found = [entry for entry in list_folder(folder) if fnmatchcase(entry.name, part)]
    else:
        found = [folder / part] if os.path.lexists(folder / part) else []
    for entry in found:
        if not rest or (entry.is_symlink() and not entry.exists()):
            yield entry
        elif entry.is_dir():
            yield from _matches(entry, rest)


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, in natural order.

    Raises:
        SourceError: It cannot be listed.
    """
    try:
        return sorted(folder.iterdir(), key=lambda entry: natural_key(entry.name))
    except OSError as error:
        _refuse_folder(error)


def _refuse_folder(error: OSError) -> NoReturn:
    raise SourceError(
        f"{error.filename} cannot be read: {error.strerror}",
        hint="Change its permissions, or name files instead",
    ) from error


def usable_files(found: Sequence[Path], where: str) -> list[Path]:
    """Those of the entries that a folder or a pattern gives which are data; a warning names the others.

    Left out are empty files, what macOS puts next to a file (`._x.h5`), and links to a file of the same split
    that is among the entries itself.

    Args:
        found: Entries that are no folders.
        where: Names the folder or the pattern.

    Raises:
        SourceError: An entry is a pipe, a device or a link to nothing; all of them are named. Or no file is
            left.
    """
    bad = {entry: why for entry in found if (why := why_unreadable(entry)) is not None}
    if bad:
        raise SourceError(
            f"{where}: {len(bad)} of {len(found)} entries cannot be read: {_listed(bad)}",
            hint="Remove them, or give a list of files or a pattern without them",
        )
    left = {entry: why for entry in found if (why := _no_data(entry)) is not None}
    files = [entry for entry in found if entry not in left]
    if not files:
        raise SourceError(f"{where}: no file holds data: {_listed(left)}", hint="Copy or download them again")
    links = [entry for entry in files if entry.is_symlink()]
    there = {entry.resolve() for entry in files if not entry.is_symlink()} if links else set[Path]()
    for link in links:
        target = link.resolve()
        # A file that serves two splits by a link (test as val) is wanted in both.
        if target in there and split_of(link.name, _SPLITS) == split_of(target.name, _SPLITS):
            left[link] = f"a link to {target.name}, which is read itself"
    leave_out(where, left)
    return [entry for entry in files if entry not in left]


def leave_out(where: str, left: Mapping[Path, str]) -> None:
    """Say which entries are not read, in one warning, if there are any."""
    if left:
        _log.warning("%s: not read (%d): %s", where, len(left), _listed(left))


def refuse_together(bad: Sequence[SourceError], total: int, where: str) -> None:
    """Raise one error for all files that cannot be used, so that they are put right in one go.

    Args:
        bad: The error of each such file, which names it.
        total: Files that were looked at.
        where: Names the source.

    Raises:
        SourceError: There is one.
    """
    if not bad:
        return
    if total == 1:
        raise bad[0]
    more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    raise SourceError(
        f"{where}: {len(bad)} of {total} files cannot be used\n  "
        + "\n  ".join(error.marked for error in bad[:_NAMED])
        + more,
        hint="Fix them as described, or give a list of files or a pattern without them",
    ) from (bad[0].__cause__ or bad[0])


def require_listable(count: int, where: str) -> None:
    """Refuse more samples than memory has room for their names alone, which a few bytes in a file can state.

    Raises:
        SourceError: There are too many.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed_bytes = count * _LISTED_BYTES
    if needed_bytes > memory_bytes:
        raise SourceError(
            f"{where} states {count:,} samples, whose names alone take {format_bytes(needed_bytes)}; memory "
            f"is {format_bytes(memory_bytes)}",
            hint="Is the shape right? Else give it in parts",
        )


def _listed(entries: Mapping[Path, str]) -> str:
    return format_few((f"{entry} ({why})" for entry, why in entries.items()), _NAMED, "; ")


def why_unreadable(path: Path) -> str | None:
    """Return why an entry cannot be read as a file; None where it can, or is a folder."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ENOENT:
            return "a link to a file that is not there"
        return "a link that leads to itself" if error.errno == errno.ELOOP else f"{error.strerror}"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _no_data(path: Path) -> str | None:
    """Return why a file holds no data, as far as its size and first bytes tell; None: it may."""
    if path.stat().st_size == 0:
        return "empty, 0 bytes"
    if path.name.startswith("._"):
        with open_regular(path) as file:
            return "written by macOS, no data" if file.read(4) == _APPLE_DOUBLE else None
    return None


def open_regular(path: Path) -> io.FileIO:
    """Open a file for reading, without a buffer; a pipe in its place does not hang.

    Raises:
        SourceError: It is a pipe, a device or a folder, or outside of the paths of `confine_sources`.
        OSError: It cannot be opened.
    """
    # O_NONBLOCK: opening a pipe would else wait for a process that writes into it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_opened(fd, path)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SourceError(f"{path} is not a regular file", hint="Put the file there, or leave it out")
        return io.FileIO(fd)
    except BaseException:
        os.close(fd)
        raise


def _nearby(path: Path, suffixes: tuple[str, ...]) -> str:
    if not path.parent.is_dir():
        return f" (nor does its folder {path.parent})"
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix.lower() in suffixes)
    return f" (its folder has {format_few(names, 5)})" if names else ""


def resolve_files(root: str | os.PathLike[str], task: str, split: str | None = None) -> list[Path]:
    """Return the files of a task below `root`, as named by PDEBench converters.

    `{task}_{split}.h5`, else every shard `{task}_{split}_*.h5`, else the undivided `{task}.h5`;
    `.hdf5` as well. Without `split`: the files of all splits, or the undivided one.

    Raises:
        SplitError: The task has files, but none for `split`.
        SourceError: The task has no file, or a single file and other shards are in one folder.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise SourceError(
            f"data.root {folder} is not a folder", hint="Point data.root at it, or name data.files"
        )
    names = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.is_dir()]
    names.sort(key=lambda file: natural_key(file.name))
    own = [file for file in names if file.stem == task or file.stem.startswith(f"{task}_")]
    usable = usable_files(own, f"{folder}/{task}") if own else []
    divided: dict[str, list[Path]] = {}
    whole: list[Path] = []
    for file in usable:
        if file.stem == task:
            whole.append(file)
        else:
            divided.setdefault(canonical_split(file.stem[len(task) + 1 :].split("_")[0]), []).append(file)
    if split is None:
        known = [name for name in ("train", "val", "test") if name in divided]
        found = [file for name in known for file in _one_set(divided[name], task, name)] or whole
    elif canonical_split(split) in divided:
        found = _one_set(divided[canonical_split(split)], task, canonical_split(split))
    elif divided and not whole:
        raise absent_split(f"{folder}/{task}", split, divided)
    else:
        found = whole
    if not found:
        seen = ", ".join(file.name for file in names[:5]) or "no HDF5 file at all"
        near = get_close_matches(task, {file.stem.rpartition("_")[0] or file.stem for file in names}, n=1)
        meant = f"Did you mean data.task={near[0]}? Otherwise name" if near else "Name"
        raise SourceError(
            f"{folder} has no file for data.task {task!r}: looked for {task}_{split or '<split>'}.h5, its "
            f"shards {task}_{split or '<split>'}_*.h5 and {task}.h5, found {seen}",
            hint=f"{meant} data.files instead",
        )
    return found


def _one_set(files: list[Path], task: str, split: str) -> list[Path]:
    """Either the single file of a split or its shards; a link to one of the shards does not hide the rest."""
    single = [file for file in files if canonical_split(file.stem[len(task) + 1 :]) == split]
    shards = [file for file in files if file not in single]
    single = [file for file in single if not any(file.samefile(shard) for shard in shards)]
    if len(single) > 1 or (single and any(shard.stem[-1].isdigit() for shard in shards)):
        listed = ", ".join(file.name for file in files[:4])
        raise SourceError(
            f"{task}_{split} exists more than once ({listed}), so it is unclear which files belong to it",
            hint="Remove what is stale, or name data.files",
        )
    return single or shards


def absent_split(where: str, split: str, found: Collection[str]) -> SplitError:
    """Return the error for a split that no file carries; `found` is what there is instead."""
    names = sorted(found, key=split_rank)
    return SplitError(
        f'{where}: split "{split}" has no file',
        hint=f"Splits found: {', '.join(names)}. Give data.splits, or data.split={names[0]}",
    )


def canonical_split(name: str) -> str:
    """`valid` and `validation` are `val`; other names are lower-cased."""
    return _ALIASES.get(name.lower(), name.lower())


def split_rank(name: str) -> tuple[int, str]:
    """Sorts train, val, test, then others by name."""
    known = ("train", "val", "test")
    return (known.index(name) if name in known else len(known), name)


def split_of(name: str, known: Collection[str]) -> str | None:
    """Return the split that a relative file name carries (as a word of its name or as a folder), if just one.

    >>> split_of("burgers1d_train_003.h5", ["train", "val"]), split_of("valid/a.h5", ["train", "val"])
    ('train', 'val')
    """
    path = PurePosixPath(name)
    words = [*path.parent.parts, *re.split(r"[^A-Za-z0-9]+", path.stem)]
    hits = {canonical_split(word) for word in words} & set(known)
    return hits.pop() if len(hits) == 1 else None


def name_parameters(stem: str) -> dict[str, float]:
    """Return parameters written in a file's stem: words of letters followed by a decimal number.

    >>> name_parameters("1D_CFD_Eta1.e-8_Zeta0.1_Train"), name_parameters("burgers1d_train_000")
    ({'Eta': 1e-08, 'Zeta': 0.1}, {})
    """
    matches = (_PARAMETER.fullmatch(word) for word in stem.split("_"))
    return {match[1]: float(match[2]) for match in matches if match}


def family(name: str) -> str:
    """Return a relative name without parameter values: what files of one parameter study have in common.

    >>> family("1D_Burgers_Sols_Nu0.01.hdf5")
    '1D_Burgers_Sols_Nu'
    """
    path = PurePosixPath(name)
    words = (_PARAMETER.fullmatch(word) for word in path.stem.split("_"))
    plain = [match[1] if match else word for match, word in zip(words, path.stem.split("_"), strict=True)]
    return str(path.with_name("_".join(plain)))


def space_rank(stem: str) -> int | None:
    """Return the number of space axes that a name states.

    >>> space_rank("1D_Burgers_Sols_Nu0.01"), space_rank("cfd2d_rand_train"), space_rank("latents_32dim")
    (1, 2, None)
    """
    found = {int(rank) for rank in _RANK.findall(stem)}
    return found.pop() if len(found) == 1 else None


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Size, times, device and inode: what a write to a file, or another file in its place, changes."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def confine_sources(paths: Iterable[str | os.PathLike[str]] | None) -> None:
    """Have this process, and the workers that it starts, read source files at or below `paths` alone.

    Every HDF5 file, image, tar file and SQLite database is checked once it is open. So a folder that is
    swapped for a symbolic link after its name was checked leads nowhere.

    Args:
        paths: Real paths of files and folders, without a symbolic link on the way; None: no such limit.
    """
    global _confined  # noqa: PLW0603 - as a working directory, it holds for the process
    _confined = None if paths is None else tuple(PurePosixPath(path) for path in paths)


def confined_sources() -> list[str] | None:
    """Return the paths of `confine_sources`; None where it was not called."""
    return None if _confined is None else [str(path) for path in _confined]


def check_opened(fd: int, path: str | os.PathLike[str]) -> None:
    """Refuse an open source file or folder that is not below the paths of `confine_sources`.

    The kernel says where an open descriptor is. A path may be swapped between its check and its opening.

    Args:
        fd: The descriptor.
        path: What was opened, for the message.
    Raises:
        SourceError: It is elsewhere.
    """
    if _confined is not None and not _is_inside(fd):
        raise SourceError(
            f"{os.fspath(path)} leads out of the data set by a symbolic link",
            hint="Put the file itself there, and register the data set by its real path",
        )


def descriptors() -> set[tuple[int, str]]:
    """Return what this process has open: numbers and names; nothing where it is not confined."""
    found: set[tuple[int, str]] = set()
    for number in () if _confined is None else Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            found.add((int(number.name), str(number.readlink())))
    return found


def check_opened_since(before: set[tuple[int, str]], path: str | os.PathLike[str]) -> None:
    """As `check_opened`, for a library that does not tell its descriptor.

    Nothing else in the process may open files below the confined paths meanwhile: any new descriptor that is
    inside counts as the library's.

    Args:
        before: `descriptors()` before the library opened the file.
        path: What it opened.
    Raises:
        SourceError: None of the new descriptors is that file.
    """
    # SQLite takes a descriptor again that it kept for the same file: then there is no new one.
    candidates = descriptors() - before or before
    if not any(_is_inside(fd) for fd, _ in candidates):
        check_opened(-1, path)


def _is_inside(fd: int) -> bool:
    try:
        # "(deleted)": a file that was replaced since it was opened
        name = str(Path(f"/proc/self/fd/{fd}").readlink()).removesuffix(" (deleted)")
    except OSError:
        return False
    return any(PurePosixPath(name).is_relative_to(allowed) for allowed in _confined or ())


# ----------------------------------------------------------------------------------------------------------
# Errors of the libraries that read files, and the files that a source keeps open.


FOREIGN_ERRORS = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    SystemError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that readers may raise for damaged, truncated or locked files: all but a lack of memory.

Readers are h5py, zarr of a zip file, and numpy, which parses the header of a .npy file as Python.
"""


def cause_of(error: Exception) -> Exception:
    """Return the error, or an `OSError` with errno if h5py states one (`errno = 5`) only in its text.

    By errno a failure that passes (a lock, a lost mount) can be told from a damaged file.
    """
    stated = re.search(r"\berrno = ([1-9]\d*)", str(error))
    if stated is None or (isinstance(error, OSError) and error.errno is not None):
        return error
    clean = OSError(int(stated[1]), str(error))
    clean.__cause__ = error
    return clean


@contextmanager
def source_errors(fact: str, hint: str) -> Generator[None]:
    """Turn what a library raises for a damaged file into a `SourceError`; errors of ours pass.

    Args:
        fact: What cannot be done, and where; the library's own text follows in brackets.
        hint: What to do.
    """
    try:
        yield
    except StokerError:
        raise
    except FOREIGN_ERRORS as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{fact} ({text})", hint=hint) from cause_of(error)


def describe_each(items: Sequence[ItemT], describe: Callable[[ItemT], FoundT], where: str) -> list[FoundT]:
    """Return what `describe` says of each file.

    Raises:
        SourceError: Files cannot be used: one error names all of them, so that they are put right at once.
    """
    found: list[FoundT] = []
    bad: list[SourceError] = []
    for item in items:
        try:
            found.append(describe(item))
        except SourceError as error:
            bad.append(error)
    refuse_together(bad, len(items), where)
    return found


class OpenFiles(Generic[KeyT, FileT]):
    """The few files that a source has open; the least recently used is closed first.

    They belong to one process. After a fork the inherited handles are forgotten, not closed: the state of
    the library that opened them (HDF5) is a copy of the parent's.
    """

    def __init__(
        self, open_one: Callable[[KeyT], FileT], close_one: Callable[[FileT], object], limit: int
    ) -> None:
        self._open_one, self._close_one, self._limit = open_one, close_one, limit
        self._owner = os.getpid()
        self._open: OrderedDict[KeyT, FileT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: KeyT) -> FileT:
        """Return the file, opened if it is not open in this process."""
        if self._owner != os.getpid():
            self._open, self._owner = OrderedDict(), os.getpid()
        if key not in self._open:
            while len(self._open) >= self._limit:
                self._close_one(self._open.popitem(last=False)[1])
            self._open[key] = self._open_one(key)
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        """Close every file."""
        if self._owner == os.getpid():
            for file in self._open.values():
                self._close_one(file)
        self._open.clear()
