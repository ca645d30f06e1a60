"""The identity of a Dataset: its code with the values that code uses, what it holds in memory, and its files.

A Dataset is code, so nothing can prove that two of them give the same samples. What can be seen is
compared: source text, length, and values held by attributes, functions and closures (arrays and tensors by
content). Also files by content, folders by names and sizes, and a few probed samples (`torch_dataset`).
Recipes made from this are labelled as sampled. Nothing of the Dataset is called: values are read where they
are. Modules that its functions import when they are called are imported.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import operator
import os
import pathlib
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from stoker.schema import Json, digest_json
from stoker.sources.pickling import attributes_of
from stoker.sources.protocol import FileRef
from stoker.units import GIB, MIB, format_bytes
from stoker.used_code import (
    code_digest,
    functions_in,
    is_foreign,
    is_library,
    named_files,
    qualified_name,
    used_values,
)

# ----------------------------------------------------------------------------------------------------------
# Digest of arrays and tensors that a Dataset holds in memory, without a copy of them.
#
# They are hashed in blocks of 1 MiB, so that neither a transposed array nor one on a GPU is copied whole.
# Above `LIMIT_BYTES` in all, blocks are drawn with a fixed seed instead: hashing must stay cheaper than
# encoding.


LIMIT_BYTES = 4 * GIB
"""Arrays of one Dataset up to this are hashed in full."""
_BLOCK_BYTES = MIB


def plain_array(value: Any) -> Any:
    """Return the values as tensor or numpy array in the same memory (a pair if sparse); else None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # a subclass must not run its own code
            tensor = value.detach()
            if tensor.layout == torch.strided:
                return tensor.as_subclass(torch.Tensor)
            entries = tensor.to_sparse_coo()
            return entries._indices(), entries._values()
    if isinstance(value, np.ndarray):
        return np.ndarray.view(value, np.ndarray)
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, bytes | bytearray):
        return np.asarray(memoryview(value))
    return None


def digest_array(array: Any, fraction: float) -> str:
    """Return the xxh3 of dtype, shape and values; of `fraction` of its blocks, drawn with a fixed seed."""
    order = _memory_order(array)
    digest = xxhash.xxh3_128(f"{array.dtype} {tuple(array.shape)} {order} {min(fraction, 1.0)}".encode())
    array = array.transpose(order) if isinstance(array, np.ndarray) else array.permute(order)
    if getattr(array, "is_meta", False):
        return digest.hexdigest()
    draw = np.random.default_rng(0)
    for place, block in enumerate(_blocks(array)):
        if fraction >= 1 or place == 0 or draw.random() < fraction:
            digest.update(_bytes(block))
    return digest.hexdigest()


def digest_bytes(value: bytes, fraction: float) -> str:
    """Return what `digest_array` returns for an array of at most one block, in a tenth of the time: a Dataset
    may hold millions of short ones.
    """
    digest = xxhash.xxh3_128(f"uint8 ({len(value)},) [0] {min(fraction, 1.0)}".encode())
    digest.update(value)
    return digest.hexdigest()


def _memory_order(array: Any) -> list[int]:
    """Axes from the slowest in memory to the fastest, so that a transposed array is read in one go."""
    strides = array.strides if isinstance(array, np.ndarray) else array.stride()
    return sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]) if array.shape[axis] > 1 else 0)


def _blocks(array: Any) -> Iterator[Any]:
    """Views of at most 1 MiB, in order."""
    if array.ndim == 0 or array.nbytes <= _BLOCK_BYTES:
        yield array
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > _BLOCK_BYTES:
        for row in array:
            yield from _blocks(row)
        return
    step = _BLOCK_BYTES // row_bytes
    for first in range(0, len(array), step):
        yield array[first : first + step]


def _bytes(block: Any) -> Any:
    if not isinstance(block, np.ndarray | np.generic):
        import torch

        flat = block.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        block = flat.view(torch.uint8).numpy()
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


MOST_FILES = 2000
"""Files named one by one; beyond that names and sizes stand for them, so that a start stays cheap."""
DEEPEST = 100
"""Levels that are followed: far more than data has, and less than Python's stack."""

_NUMBERS = (int, float, complex, bool, type(None))
_PLAIN = (
    *(*_NUMBERS, range, slice, type(...), decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
)
"""Types whose text says all there is to say."""
_REDUCED = (functools.partial, operator.itemgetter, operator.attrgetter, operator.methodcaller)
_WITHOUT_DATA = ("logging", "threading", "_thread")
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_TORCH_NAMES = ("torch.dtype", "torch.device", "torch.layout", "torch.memory_format")
_OPEN = (types.SimpleNamespace, argparse.Namespace)


@dataclass(slots=True)
class Description:
    """Everything that was seen of a Dataset."""

    code: dict[str, Json] = field(default_factory=dict[str, Json])
    """Qualified name to digest of source text."""
    held: dict[str, Json] = field(default_factory=dict[str, Json])
    """Attribute to digest of what it holds; `(code)` is what the code uses."""
    files: tuple[FileRef, ...] = ()
    """Files it holds by path; their content is digested by the store."""
    folders: list[Json] = field(default_factory=list[Json])
    """Digests over names and sizes of the folders it holds, and of files beyond `MOST_FILES`."""
    unseen: list[str] = field(default_factory=list[str])
    """In words, what was looked at only in part."""


def describe(dataset: object) -> Description:
    """Look at a Dataset, what it holds (datasets inside it, transforms, values), and the code behind it."""
    walk = _Walk()
    walk.begin(dataset)
    found = Description(code=walk.code)
    files = sorted(path for path in walk.paths if path.is_file())
    root = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
    if len(files) > MOST_FILES:
        found.folders.append(_stat_digest(root, files))
        found.unseen.append(f"{len(files):,} files by names and sizes alone")
    else:
        found.files = tuple(FileRef(name=path.relative_to(root).as_posix(), path=path) for path in files)
    for folder in sorted(path for path in walk.paths if path.is_dir()):
        found.folders.append(
            _stat_digest(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
        )
        found.unseen.append(f"folder {folder} by names and sizes alone")
    _digest_held(walk, found)
    return found


def held_paths(dataset: object) -> list[Path]:
    """Return the files and folders that a Dataset holds by path; nothing is opened or digested."""
    walk = _Walk()
    walk.begin(dataset)
    return sorted(walk.paths)


def _digest_held(walk: _Walk, found: Description) -> None:
    total = sum(_nbytes(token) for tokens in walk.held.values() for token in tokens)
    if total > LIMIT_BYTES:
        found.unseen.append(f"{format_bytes(LIMIT_BYTES)} out of {format_bytes(total)} held in memory")
    fraction = LIMIT_BYTES / max(1, total)
    places = {path: place for place, path in enumerate(sorted(walk.paths))}  # the same wherever they are
    for name, tokens in walk.held.items():
        digest = hashlib.sha256()
        for token in tokens:
            if isinstance(token, Path):
                text = f"path {places[token]}"
            elif isinstance(token, bytes):
                text = digest_bytes(token, fraction)
            else:
                text = token if isinstance(token, str) else digest_array(token, fraction)
            data = text.encode(errors="surrogatepass")
            digest.update(f"{len(data)}:".encode() + data)
        found.held[name] = digest.hexdigest()
    found.unseen.extend(f"{name} is a {kind}" for name, kind in walk.unseen.items())


def _nbytes(token: Any) -> int:
    if isinstance(token, bytes):
        return len(token)
    return 0 if isinstance(token, str | Path) else token.nbytes


def _stat_digest(root: Path, files: Iterable[Path]) -> str:
    return digest_json([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


class _Walk:
    """Goes through what a Dataset holds, and notes it as a row of texts, paths and arrays."""

    def __init__(self) -> None:
        self.code: dict[str, Json] = {}
        self.held: dict[str, list[Any]] = {}
        self.paths: dict[Path, None] = {}
        self.unseen: dict[str, str] = {}
        self._classes: dict[int, object] = {}
        self._seen: dict[int, tuple[int, object]] = {}  # holds what it names: an id may be given again
        self._tokens: list[Any] = []
        self._attribute = ""  # empty in code, where much is met that holds no data
        self._depth = 0

    def begin(self, dataset: object) -> None:
        """Note the code of the Dataset, then each attribute by name."""
        self._seen[id(dataset)] = (0, dataset)
        self._tokens = self.held.setdefault("(code)", [])
        for kind in type(dataset).__mro__:
            self._class(kind)
        self._contents(dataset)
        for name, value in attributes_of(dataset).items():
            self._tokens = self.held.setdefault(name, [])
            self._attribute = name
            self.look(value)

    def look(self, value: Any) -> None:
        """Note one value with all that it holds."""
        if type(value) in _PLAIN:
            self._tokens.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, str | pathlib.PurePath):
            self._text(value)
        elif id(value) in self._seen:
            self._tokens.append(f"again {self._seen[id(value)][0]}")
        elif self._depth >= DEEPEST:
            self._opaque(value)
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._depth += 1
            self._look_inside(value)
            self._depth -= 1

    def _look_inside(self, value: Any) -> None:
        if type(value) is bytes and len(value) <= _BLOCK_BYTES:
            self._tokens.append(value)
            return
        array = plain_array(value)
        if isinstance(array, tuple):
            self._items(f"sparse {tuple(cast('Any', value).shape)}", cast("tuple[Any, ...]", array))
        elif array is not None:
            self._array(array)
        elif isinstance(value, type):
            for kind in type.mro(cast("type[Any]", value)):
                self._class(kind)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.look(value.__func__)
            self.look(value.__self__)
        elif isinstance(value, _BOUND):
            self._tokens.append(f"callable {value.__qualname__}")
            if not isinstance(value.__self__, type | types.ModuleType):
                self.look(value.__self__)
        elif isinstance(value, enum.Enum):
            self._tokens.append(f"{qualified_name(type(value))} {attributes_of(value)['_name_']}")
            self.look(attributes_of(value)["_value_"])
        elif isinstance(value, re.Pattern):
            self._items("pattern", [cast("Any", value).pattern, cast("Any", value).flags])
        elif isinstance(value, np.dtype) or qualified_name(type(value)) in _TORCH_NAMES:
            self._tokens.append(repr(value))
        elif reduced := next((kind for kind in _REDUCED if isinstance(value, kind)), None):
            self._items(reduced.__name__, cast("Any", reduced).__reduce__(value)[1:])
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Containers and objects: their content, then what the attributes of a user's own class hold."""
        kind: type[Any] = type(value)
        whole = self._contents(value)
        followed = callable(value) or _is_dataset(kind) or isinstance(value, _OPEN) or not is_library(kind)
        attributes = attributes_of(value) if followed else {}
        if attributes or (followed and not is_foreign(kind)):
            self._tokens.append(f"object {qualified_name(kind)}")
            for parent in kind.__mro__:
                self._class(parent)
            for name, held in attributes.items():
                self._tokens.append(f"attribute {name}")
                self.look(held)
        elif callable(value):
            self._tokens.append(f"callable {qualified_name(value)} {getattr(value, '__name__', '')}")
        elif not whole:
            self._opaque(value)

    def _contents(self, value: Any) -> bool:
        """Note the items of a container; False if its items cannot be read without its code."""
        kind: type[Any] = type(value)  # not isinstance: a proxy may claim to be what it is not
        if issubclass(kind, dict):
            pairs = list(dict.items(cast("dict[Any, Any]", value)))
            self._items("dict", [part for pair in pairs for part in pair])
            return True
        if issubclass(kind, set | frozenset):
            base = set if issubclass(kind, set) else frozenset
            items = list(cast("Any", base).__iter__(value))
            if not all(type(item) in (*_PLAIN, str, bytes) for item in items):
                return False
            self._items("set", sorted(items, key=repr))  # their order is the process's own
            return True
        for number in (int, float, complex):
            if issubclass(kind, number):  # a class of the user's: its own text may say anything
                self._tokens.append(f"{number.__name__} {cast('Any', number).__repr__(value)}")
                return True
        for base in (list, tuple, deque):
            if issubclass(kind, base):
                self._items(base.__name__, list(cast("Any", base).__iter__(value)))
                return True
        return False

    def _items(self, kind: str, items: Iterable[Any]) -> None:
        values = list(items)
        self._tokens.append(f"{kind} of {len(values)}")
        if all(type(value) in _NUMBERS for value in values):
            self._tokens.append(repr(values))
            return
        for value in values:
            self.look(value)

    def _array(self, array: Any) -> None:
        dtype: Any = array.dtype
        if getattr(dtype, "hasobject", False) or getattr(dtype, "kind", "") == "T":
            self._items(f"array {tuple(array.shape)}", array.reshape(-1).tolist())
        else:
            self._tokens.append(array)

    def _text(self, value: str | pathlib.PurePath) -> None:
        """A path stands for what it leads to, other text for itself."""
        text = os.fspath(value) if isinstance(value, pathlib.PurePath) else str.__str__(value)
        path = _as_path(text, sure=isinstance(value, Path))
        if path is not None:
            self.paths[path] = None
        self._tokens.append(f"text {text}" if path is None else path)

    def _opaque(self, value: object) -> None:
        self._tokens.append(f"opaque {qualified_name(type(value))}")
        if self._attribute and type(value).__module__ not in _WITHOUT_DATA:
            self.unseen[self._attribute] = qualified_name(type(value))

    def _class(self, kind: type[Any]) -> None:
        """Note a class, and what its functions use; what it holds itself counts too."""
        known = id(kind) in self._classes
        self._classes[id(kind)] = kind
        self._code(kind)
        if known or is_library(kind):
            return
        attribute, self._attribute = self._attribute, ""
        for name, member in list(vars(kind).items()):
            functions = functions_in(member)
            for function in functions:
                self.look(function)
            if not functions and not _is_special(name, member):
                self._tokens.append(f"attribute {name}")
                self.look(member)
        self._attribute = attribute

    def _function(self, function: types.FunctionType) -> None:
        self._code(function)
        if not is_library(function):
            attribute, self._attribute = self._attribute, ""
            for value in used_values(function):
                self.look(value)
            for path in named_files(function):
                self._text(path)
            self._attribute = attribute

    def _code(self, kind: Any) -> None:
        name = qualified_name(kind)
        self._tokens.append(f"code {name}")
        if not is_foreign(kind):
            digest = code_digest(kind)
            if self.code.setdefault(name, digest) != digest:
                self._tokens.append(digest)  # two functions of one name


def _is_special(name: str, member: object) -> bool:
    """Return True if a member is one that Python itself keeps in a class."""
    slot = isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
    return slot or (name.startswith("__") and name.endswith("__"))


def _is_dataset(kind: type[Any]) -> bool:
    # torch's own containers (Subset, ConcatDataset) are looked into, though their text is not noted.
    own = not is_foreign(kind) or kind.__module__.startswith("torch.utils.data")
    return own and hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


def _as_path(text: str, *, sure: bool) -> Path | None:
    """Return what is clearly a path: it exists, and is a Path, absolute, or has a separator or suffix."""
    if not text or (not sure and os.sep not in text and not Path(text).suffix):
        return None
    try:
        return Path(text).absolute() if Path(text).exists() else None
    except (OSError, ValueError):  # text that no file system takes as a name
        return None
