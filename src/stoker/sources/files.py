"""Which files a source is made of, in which order, and what their names say.

Names carry meaning in simulation archives: `burgers1d_train_003.h5` is a shard of a split and
`1D_Burgers_Sols_Nu0.01.hdf5` holds a parameter. All reading of names happens here; no file is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TypeAlias, cast

from stoker.errors import SourceError, SplitError

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""A file, a folder, a glob pattern, or a list of these."""

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_MAGIC = re.compile(r"[*?\[]")
_PARAMETER = re.compile(r"([A-Za-z]+)(-?\d+\.\d*(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+)")
_RANK = re.compile(r"(?<!\d)([123])[dD](?![A-Za-z0-9])")
_ALIASES = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key under which numbers in names count as numbers.

    >>> sorted(["s_10.h5", "s_9.h5"], key=natural_key)
    ['s_9.h5', 's_10.h5']
    """
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece), piece) if piece.isdigit() else (1, 0, piece) for piece in pieces]


def find_files(
    path: Paths, *, suffixes: tuple[str, ...] = SUFFIXES, what: str = "HDF5"
) -> tuple[Path, list[Path]]:
    """All files of a kind behind `path`, and the root their names are relative to.

    A folder or a pattern gives its files in natural order; a list keeps its own order.

    Returns:
        The root (absolute) and the files (absolute, at least one).
    Raises:
        SourceError: Nothing is there, a file is empty, or one is named twice.
    """
    if isinstance(path, str | os.PathLike):
        root, files = _expand(Path(path), suffixes, what)
    else:
        items = cast("list[object]", [*path] if isinstance(cast("object", path), Iterable) else [path])
        named = [item for item in items if isinstance(item, str | os.PathLike)]
        if len(named) < len(items):
            raise SourceError(
                f"the path is {path!r}. Expected {what} files, a folder or a pattern, or a list"
            )
        found = [_expand(Path(item), suffixes, what) for item in named]
        if not found:
            raise SourceError(f"the list of files is empty. Give at least one {what} file, folder or pattern")
        files = [file for _, some in found for file in some]
        root = found[0][0] if len(found) == 1 else Path(os.path.commonpath([file.parent for file in files]))
    if len(set(files)) < len(files):
        twice = next(file for index, file in enumerate(files) if file in files[:index])
        raise SourceError(f"{twice} is named twice. Give each file once")
    for file in files:
        if file.stat().st_size == 0:
            raise SourceError(f"{file} is empty (0 bytes). Copy or download it again, or leave it out")
    return root, files


def _expand(path: Path, suffixes: tuple[str, ...], what: str) -> tuple[Path, list[Path]]:
    path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolve() would follow links
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
        if not files:
            raise SourceError(
                f"{path} holds no {what} file ({', '.join(suffixes)}). Name the files or a pattern"
            )
        return path, sorted(files, key=lambda file: natural_key(str(file)))
    if os.path.lexists(path):
        found = "a pipe or a device" if path.exists() else "a link to a file that is not there"
        raise SourceError(f"{path} is {found}. Expected a file ({what}), a folder or a pattern")
    if not _MAGIC.search(str(path)):
        raise SourceError(
            f"{path} does not exist{_nearby(path, suffixes)}. Check the path, or give a folder or pattern"
        )
    plain = next(index for index, part in enumerate(path.parts) if _MAGIC.search(part))
    root, pattern = Path(*path.parts[:plain]), "/".join(path.parts[plain:])
    files = sorted((file for file in root.glob(pattern) if file.is_file()), key=lambda f: natural_key(str(f)))
    if not files:
        raise SourceError(f"no file matches {path}. Check the pattern; {root} was searched")
    return root, files


def _nearby(path: Path, suffixes: tuple[str, ...]) -> str:
    if not path.parent.is_dir():
        return f" (nor does its folder {path.parent})"
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix.lower() in suffixes)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f" (its folder has {', '.join(names[:5])}{more})" if names else ""


def resolve_files(root: str | os.PathLike[str], task: str, split: str | None = None) -> list[Path]:
    """The files of a task below `root`, as named by PDEBench converters.

    `{task}_{split}.h5`, else every shard `{task}_{split}_*.h5`, else the undivided `{task}.h5`;
    `.hdf5` as well. Without `split`: the files of all splits, or the undivided one.

    Raises:
        SplitError: The task has files, but none for `split`.
        SourceError: The task has no file, or a single file and other shards lie side by side.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise SourceError(f"data.root {folder} is not a folder. Point data.root at it, or name data.files")
    names = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file()]
    names.sort(key=lambda file: natural_key(file.name))
    divided: dict[str, list[Path]] = {}
    whole: list[Path] = []
    for file in names:
        if file.stem == task:
            whole.append(file)
        elif file.stem.startswith(f"{task}_"):
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
            f"shards {task}_{split or '<split>'}_*.h5 and {task}.h5, found {seen}. {meant} data.files instead"
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
            f"{task}_{split} exists more than once ({listed}), so it is unclear which files belong to it. "
            "Remove what is stale, or name data.files"
        )
    return single or shards


def absent_split(where: str, split: str, found: Collection[str]) -> SplitError:
    """The error for a split that no file carries; `found` is what there is instead."""
    names = sorted(found, key=split_rank)
    return SplitError(
        f'{where}: split "{split}" has no file. Splits found: {", ".join(names)}. '
        f"Give data.splits, or data.split={names[0]}"
    )


def canonical_split(name: str) -> str:
    """`valid` and `validation` are `val`; other names are lower-cased."""
    return _ALIASES.get(name.lower(), name.lower())


def split_rank(name: str) -> tuple[int, str]:
    """Sorts train, val, test, then others by name."""
    known = ("train", "val", "test")
    return (known.index(name) if name in known else len(known), name)


def split_of(name: str, known: Collection[str]) -> str | None:
    """The split that a relative file name carries (as a word of its name or as a folder), if just one.

    >>> split_of("burgers1d_train_003.h5", ["train", "val"]), split_of("valid/a.h5", ["train", "val"])
    ('train', 'val')
    """
    path = PurePosixPath(name)
    words = [*path.parent.parts, *re.split(r"[^A-Za-z0-9]+", path.stem)]
    hits = {canonical_split(word) for word in words} & set(known)
    return hits.pop() if len(hits) == 1 else None


def name_parameters(stem: str) -> dict[str, float]:
    """Parameters written in a file's stem: words of letters followed by a decimal number.

    >>> name_parameters("1D_CFD_Eta1.e-8_Zeta0.1_Train"), name_parameters("burgers1d_train_000")
    ({'Eta': 1e-08, 'Zeta': 0.1}, {})
    """
    matches = (_PARAMETER.fullmatch(word) for word in stem.split("_"))
    return {match[1]: float(match[2]) for match in matches if match}


def family(name: str) -> str:
    """A relative name without parameter values: what files of one parameter study have in common.

    >>> family("1D_Burgers_Sols_Nu0.01.hdf5")
    '1D_Burgers_Sols_Nu'
    """
    path = PurePosixPath(name)
    words = (_PARAMETER.fullmatch(word) for word in path.stem.split("_"))
    plain = [match[1] if match else word for match, word in zip(words, path.stem.split("_"), strict=True)]
    return str(path.with_name("_".join(plain)))


def space_rank(stem: str) -> int | None:
    """The number of space axes that a name states.

    >>> space_rank("1D_Burgers_Sols_Nu0.01"), space_rank("cfd2d_rand_train"), space_rank("latents_32dim")
    (1, 2, None)
    """
    found = {int(rank) for rank in _RANK.findall(stem)}
    return found.pop() if len(found) == 1 else None


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Size, times, device and inode: what a write to a file, or another file in its place, changes."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino
