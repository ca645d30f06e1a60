"""What an object holds, member by member: which of it cannot go to another process, or should not.

Nothing of it is called but what pickling calls (`__getstate__`): an object that leaves its handle out of its
state travels, and is no finding. Members are named as one would write them: `dataset.files[0].handle`.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from stoker.used_code import functions_in, is_library, qualified_name

MOST_MEMBERS = 100_000
"""Objects looked at; beyond that pickling itself has the last word."""
MOST_OF_ONE = 1_000
"""Members of one list or dictionary."""

_PLAIN = (int, float, complex, bool, str, bytes, bytearray, type(None), range, slice, type, types.ModuleType)
_USED = "; if it does so already, an item was read from it: make a new object and give that"
_LAZY = f"Keep its path, and open it on first use in __getitem__{_USED}"
_CONNECT = f"Keep its address, and connect on first use in __getitem__{_USED}"
_LOCK = "A reader has no other thread: leave it out of the state (__getstate__), or make it on first use"
_KINDS = {
    "h5py.": ("an open HDF5 file", _LAZY),
    "sqlite3.": ("an open database", _CONNECT),
    "psycopg.": ("an open database connection", _CONNECT),
    "psycopg2.": ("an open database connection", _CONNECT),
    "pymysql.": ("an open database connection", _CONNECT),
    "duckdb.": ("an open database connection", _CONNECT),
    "_duckdb.": ("an open database connection", _CONNECT),
    "redis.": ("an open connection", _CONNECT),
    "pymongo.": ("an open connection", _CONNECT),
    "sqlalchemy.engine.": ("a database engine or connection", _CONNECT),
    "sqlalchemy.orm.session.": ("a database session", _CONNECT),
    "socket.": ("an open socket", _CONNECT),
    "_socket.": ("an open socket", _CONNECT),
    "ssl.": ("an open socket", _CONNECT),
    "zipfile.": ("an open archive", _LAZY),
    "tarfile.": ("an open archive", _LAZY),
    "mmap.": ("a mapped file", _LAZY),
    "lmdb.": ("an open database", _CONNECT),
    "builtins.Environment": ("an open database", _CONNECT),
    "builtins.generator": ("a generator, which runs once", "Make it in __getitem__, or keep a list"),
    "subprocess.": ("a running process", "Start it on first use in __getitem__"),
    "_thread.": ("", _LOCK),
    "threading.": ("", _LOCK),
    "multiprocessing.": ("", _LOCK),
    "queue.": ("", _LOCK),
    "_queue.": ("", _LOCK),
    "concurrent.": ("", _LOCK),
}
"""Beginning of a type's qualified name to what it is (nothing: that name), and to the cure."""
_DRAWS = ("numpy.random.", "random.Random", "torch._C.Generator")
_RANDOM = ("random", "jitter", "noise", "dropout", "augment", "mixup", "cutmix")


@dataclass(frozen=True, slots=True)
class Member:
    """Something that an object holds."""

    path: str
    """As one would write it, `dataset.file`."""
    value: Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A member that cannot, or should not, go to another process."""

    path: str
    what: str
    """What it is, in words."""
    cure: str

    def __str__(self) -> str:
        """Path and kind."""
        return f"{self.path} is {self.what}"


def members(value: object, path: str) -> Iterator[Member]:
    """The object and what it holds, each once, the nearest first."""
    seen: set[int] = set()
    waiting = deque([Member(path, value)])
    kept: list[Any] = []  # an id must not be given again while it is known
    while waiting and len(seen) < MOST_MEMBERS:
        member = waiting.popleft()
        if id(member.value) in seen:
            continue
        seen.add(id(member.value))
        kept.append(member.value)
        yield member
        waiting.extend(_held(member))


def obstacles(value: object, path: str) -> list[Finding]:
    """What keeps `value` from going to another process, as far as it can be seen without trying."""
    return [found for member in members(value, path) if (found := _obstacle(member)) is not None]


def uses_module(value: object, module: str) -> bool:
    """Whether a function of an object's class, or of the class of something that it holds, names a module."""
    kinds = {type(member.value) for member in members(value, "")}
    classes = {one for kind in kinds if not is_library(kind) for one in kind.__mro__}
    functions = [f for one in classes for member in vars(one).values() for f in functions_in(member)]
    return any(_comes_from(module, f.__globals__.get(n), n) for f in functions for n in _names(f.__code__))


def _comes_from(module: str, value: object, name: str) -> bool:
    place = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name == module or (isinstance(place, str) and place.split(".")[0] == module)


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names, attributes and imports in a function and in those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def random_members(value: object, path: str) -> list[str]:
    """What draws random numbers, judged by the names of classes and functions; at most three."""
    found: list[str] = []
    for member in members(value, path):
        kind: type[Any] = type(member.value)
        name = qualified_name(member.value if isinstance(member.value, types.FunctionType) else kind)
        short = name.rpartition(".")[2].lower()
        draws = name.startswith(_DRAWS) or any(word in short for word in _RANDOM)
        if draws and member.path != path and not isinstance(member.value, _PLAIN):
            found.append(f"{member.path}, a {name}")
        if len(found) == 3:
            break
    return found


def _held(member: Member) -> Iterator[Member]:
    value, path = member.value, member.path
    if isinstance(value, (*_PLAIN, np.ndarray, np.generic)) or _tensor_device(value):
        return
    kind: type[Any] = type(value)
    if issubclass(kind, dict):
        items = list(dict.items(cast("dict[Any, Any]", value)))[:MOST_OF_ONE]
        yield from (Member(f"{path}[{key!r:.40}]", held) for key, held in items if not _plain(held))
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        held = [item for item, _ in zip(value, range(MOST_OF_ONE), strict=False)]
        yield from (Member(f"{path}[{place}]", item) for place, item in enumerate(held) if not _plain(item))
    elif isinstance(value, functools.partial):
        yield Member(f"{path}.func", value.func)
        yield from (Member(f"{path}.args[{n}]", arg) for n, arg in enumerate(value.args))
        yield from (Member(f"{path}.keywords[{n!r}]", arg) for n, arg in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield Member(f"{path}.__self__", value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _closure(value, path)
    if _obstacle(member) is None:
        for name, held in state_of(value).items():
            if not _plain(held):
                yield Member(f"{path}.{name}", held)


def _plain(value: object) -> bool:
    return type(value) in _PLAIN


def _closure(function: types.FunctionType, path: str) -> Iterator[Member]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Member(f"{path}.<closure>.{name}", cell.cell_contents)
        except ValueError:  # not filled yet
            continue


def state_of(value: object) -> dict[str, Any]:
    """What pickling would take along by name."""
    kind = type(value)
    own = getattr(kind, "__getstate__", None)
    if own is not None and own is not getattr(object, "__getstate__", None):
        try:
            state = own(value)
        except Exception:  # noqa: BLE001 - foreign code; pickling will meet the same and say so
            return {}
        return {str(k): v for k, v in state.items()} if isinstance(state, dict) else {}
    reduces = any(getattr(kind, n) is not getattr(object, n) for n in ("__reduce__", "__reduce_ex__"))
    if reduces:
        return {}
    try:
        found = dict(cast("dict[str, Any]", object.__getattribute__(value, "__dict__")))
    except (AttributeError, TypeError):
        found = {}
    for parent in kind.__mro__:
        for name, slot in vars(parent).items() if "__slots__" in vars(parent) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # not set
                    continue
    return found


def _obstacle(member: Member) -> Finding | None:
    value = member.value
    name = qualified_name(type(value))
    device = _tensor_device(value)
    if device and device not in ("cpu", "meta"):
        cure = "Each reader would hold a copy there: keep it on the CPU (`.cpu()`); batches go there later"
        return Finding(member.path, f"a tensor on {device}", cure)
    if any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return None  # each process has its own, and cloudpickle knows
    if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
        of = getattr(value, "name", None)
        return Finding(member.path, "an open file" + (f" ({of})" if isinstance(of, str) else ""), _LAZY)
    for beginning, (what, cure) in _KINDS.items():
        if name.startswith(beginning) and not _travels(value):
            return Finding(member.path, what or f"a {name}", cure)
    return None


def _travels(value: object) -> bool:
    """Whether a handle can be pickled after all; there is little in it to be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _tensor_device(value: Any) -> str:
    torch = sys.modules.get("torch")
    return str(value.device) if torch is not None and isinstance(value, torch.Tensor) else ""
