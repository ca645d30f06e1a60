"""What names a Dataset: the text of its classes and transforms, the files it holds, its indices.

A Dataset is code, so nothing can prove that two of them give the same samples. What can be seen is
compared: source text, length, files by content, folders by names and sizes, and a few probed samples
(`torch_dataset`). Recipes made from this are labelled as sampled.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from stoker.schema import Json, digest_json
from stoker.sources.protocol import FileRef

MOST_FILES = 2000
"""Files named one by one; beyond that names and sizes stand for them, so that a start stays cheap."""

_FOREIGN = ("builtins", "torch", "torchvision", "numpy", "typing", "abc", "collections", "functools", "PIL")


@dataclass(slots=True)
class Description:
    """What was seen of a Dataset."""

    code: dict[str, Json] = field(default_factory=dict[str, Json])
    """Qualified name to digest of source text."""
    indices: list[Json] = field(default_factory=list[Json])
    """Digests of integer lists, such as the indices of a torch `Subset`."""
    files: tuple[FileRef, ...] = ()
    """Files it holds by path; their content is digested by the store."""
    folders: list[Json] = field(default_factory=list[Json])
    """Digests over names and sizes of the folders it holds, and of files beyond `MOST_FILES`."""


def describe(dataset: object) -> Description:
    """Look at a Dataset, the datasets inside it (Subset, ConcatDataset, wrappers) and its transforms."""
    found = Description()
    paths: dict[Path, None] = {}
    _look(dataset, found, paths, set(), 0)
    files = sorted(path for path in paths if path.is_file())
    root = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
    if len(files) > MOST_FILES:
        found.folders.append(_stat_digest(root, files))
    else:
        found.files = tuple(FileRef(name=path.relative_to(root).as_posix(), path=path) for path in files)
    for folder in sorted(path for path in paths if path.is_dir()):
        found.folders.append(
            _stat_digest(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
        )
    return found


def qualified_name(kind: object) -> str:
    """`module.Class`, as far as the object tells."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _stat_digest(root: Path, files: Iterable[Path]) -> str:
    return digest_json([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


def _look(value: Any, found: Description, paths: dict[Path, None], seen: set[int], depth: int) -> None:
    """Note the code behind `value` and what its attributes hold."""
    if id(value) in seen or depth > 5:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType | types.MethodType):
        _note_code(value, found)
        return
    for kind in type(value).__mro__:
        _note_code(kind, found)
    attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
    for held in attributes.values():
        _look_inside(held, found, paths, seen, depth)


def _look_inside(held: Any, found: Description, paths: dict[Path, None], seen: set[int], depth: int) -> None:
    if isinstance(held, str | os.PathLike):
        _note_path(cast("str | os.PathLike[str]", held), paths)
    elif isinstance(held, Mapping):
        _look_inside(list(cast("Mapping[Any, Any]", held).values()), found, paths, seen, depth + 1)
    elif isinstance(held, list | tuple):
        values = cast("Sequence[Any]", held)
        if values and all(isinstance(value, int | np.integer) for value in values):
            found.indices.append(hashlib.sha256(np.asarray(values, dtype=np.int64).tobytes()).hexdigest())
        elif len(values) > MOST_FILES and all(isinstance(value, str | os.PathLike) for value in values):
            found.folders.append(digest_json([Path(value).name for value in values]))
        elif depth <= 5:
            for value in values:
                _look_inside(value, found, paths, seen, depth + 1)
    elif _is_dataset(held) or (callable(held) and not isinstance(held, type)):
        _look(held, found, paths, seen, depth + 1)


def _is_dataset(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not _is_foreign(kind.__module__)


def _is_foreign(module: str) -> bool:
    # torch's own containers (Subset, ConcatDataset) are looked into, though their text is not noted.
    return module.partition(".")[0] in _FOREIGN and not module.startswith("torch.utils.data")


def _note_path(value: str | os.PathLike[str], paths: dict[Path, None]) -> None:
    """Remember what is clearly a path: an existing one that is a Path, absolute, or has a separator."""
    text = os.fspath(value)
    if isinstance(value, str) and os.sep not in text and not Path(text).suffix:
        return
    try:
        exists = bool(text) and Path(text).exists()
    except (OSError, ValueError):  # text that no file system takes as a name
        return
    if exists:
        paths[Path(text).absolute()] = None


def _note_code(kind: Any, found: Description) -> None:
    module = getattr(kind, "__module__", None) or "builtins"
    if module.partition(".")[0] in _FOREIGN:
        return
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        text = _code_text(kind)  # typed at a prompt: there is no file to read
    found.code[qualified_name(kind)] = hashlib.sha256(text.encode()).hexdigest()


def _code_text(kind: Any) -> str:
    """Bytecode, constants and names of a function, or of all functions of a class."""
    functions = vars(kind).values() if isinstance(kind, type) else [kind]
    codes = [getattr(function, "__code__", None) for function in functions]
    return "\n".join(_one_code(code) for code in codes if isinstance(code, types.CodeType))


def _one_code(code: types.CodeType) -> str:
    constants = [_one_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {constants} {code.co_names}"
