"""Pickle a source for another process. An error names what cannot be pickled, where it is, and what to do."""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import re
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from stoker.errors import Argument, SourceError, StokerError
from stoker.used_code import functions_in, is_library, qualified_name

_ALONE = Argument("precompute.workers", "0", "workers=0 (cached: precompute={'workers': 0})")
_HERE = f"Or read in this process alone: {_ALONE.marked}"
_MOST_NAMED = 5
_INNER = re.compile(r"^(?:job\.)?source(?:\._source)*\._dataset\b")
"""The path of a Dataset inside whatever wraps it."""


def pickle_for_process(thing: object, name: str = "source", *, otherwise: str = _HERE) -> bytes:
    """`thing` pickled, classes and functions of scripts and notebooks with their code.

    Args:
        thing, name: What, and what its path begins with.
        otherwise: What else can be done about it, as the last sentence of a message.

    Raises:
        SourceError: A member cannot, or should not, go to another process; names it and says what to do.
    """
    found = obstacles(thing, name)
    if found:
        _refuse(found, otherwise)
    try:
        return dumps(thing)
    except StokerError:
        raise
    except Exception as error:
        culprit = _culprit(thing, name)
        path = name if culprit is None else _shown_path(culprit.path)
        kind = "" if culprit is None else f" ({type(culprit.value).__name__})"
        raise SourceError(
            f"{path}{kind} cannot be sent to another process: {type(error).__name__}: {error}",
            hint="Make it on first use in __getitem__ instead of in __init__, or leave it out of the state "
            f"(__getstate__). {otherwise}",
        ) from error


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, for two kinds of object that it does not send as we need them.

    - Functions of `functools.lru_cache` that no other process can import. cloudpickle sends their name alone.
      Here they are made again in the other process, with an empty cache.
    - Code. Since cloudpickle 3.1.3 it arrives without its file name, so that its text is not found there,
      and the fingerprint of a Dataset of local classes would differ between processes.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, _CACHE) and not _is_importable(obj):
            settings = cast("Any", obj).cache_parameters()
            return _cached_anew, (cast("Any", obj).__wrapped__, settings["maxsize"], settings["typed"])
        return super().reducer_override(obj)


_CACHE = type(functools.lru_cache(len))


def _cached_anew(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_importable(function: Any) -> bool:
    """Return True if another process finds this very object by module and name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is function


def dumps(thing: object) -> bytes:
    """Return the pickle of an object, as it is sent to a process."""
    with io.BytesIO() as file:
        _Pickler(file).dump(thing)
        return file.getvalue()


def _refuse(found: list[PicklingObstacle], otherwise: str) -> None:
    shown = [PicklingObstacle(_shown_path(one.path), one.what, one.cure) for one in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    cures = ". ".join(dict.fromkeys(one.cure for one in shown))
    raise SourceError(
        f"{'; '.join(map(str, shown))}{more}, which cannot be sent to another process, and samples are read "
        "in others",
        hint=f"{cures}. {otherwise}",
    )


def _culprit(thing: object, name: str) -> HeldObject | None:
    """Return the innermost member that cannot be pickled alone."""
    worst: HeldObject | None = None
    for member in members(thing, name):
        if worst is not None and not member.path.startswith(worst.path):
            continue
        if not _picklable(member.value):
            worst = member
    return worst


def _picklable(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _shown_path(path: str) -> str:
    """Return a path as the user knows it: their Dataset, not what it is wrapped in.

    >>> _shown_path("source._source._dataset.file"), _shown_path("source.path")
    ('dataset.file', 'source.path')
    """
    return _INNER.sub("dataset", path)


# ----------------------------------------------------------------------------------------------------------
# How much an object would take along to another process, without pickling it.
#
# Pickling gigabytes to count them would need that memory once more. So arrays, tensors and text are asked
# for their size, and of a long list a thousand items stand for all.


_NUMBERS = (int, float, complex, bool, type(None))
_NUMBER_BYTES = 9
"""A number in a pickle, about."""


def estimate_pickle_bytes(thing: object) -> int:
    """Return bytes of data in a pickle of `thing`, about; code is not counted.

    >>> estimate_pickle_bytes({"a": np.zeros(1000), "b": [bytes([n % 256] * 100) for n in range(10_000)]})
    1008002
    >>> estimate_pickle_bytes([float(n) for n in range(10_000)])
    90000
    """
    total, seen = 0.0, set[int]()
    waiting = deque([(thing, 1.0)])
    kept: list[object] = []  # an id must not be given again while it is known
    while waiting and len(kept) < MOST_MEMBERS:
        value, times = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        items = _items(value)
        if items is None:
            total += times * _size(value)
            continue
        some = items[:: max(1, len(items) // MOST_OF_ONE)]
        others = [item for item in some if not isinstance(item, _NUMBERS)]
        total += times * _NUMBER_BYTES * len(items) * (1 - len(others) / max(1, len(some)))
        # One object in many places is pickled once.
        alone = len({id(item) for item in others}) > len(others) // 2
        share = len(items) / len(some) if alone else 1.0
        waiting.extend((item, times * share) for item in others)
    return int(total)


def _items(value: Any) -> Sequence[Any] | None:
    """Return what a container or an object holds; None where its own size is to be taken."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return array.reshape(-1).tolist() if array.dtype == object else None
    if isinstance(value, dict):
        held = cast("dict[Any, Any]", value)
        return [*held.keys(), *held.values()]
    if isinstance(value, list | tuple):
        return cast("Sequence[Any]", value)
    if isinstance(value, set | frozenset | deque):
        return [*cast("set[Any]", value)]
    if isinstance(value, str | bytes | bytearray | type) or _storage(value) is not None:
        return None
    return [*state_of(value).values()] or None


def _size(value: Any) -> int:
    """Return bytes of what has no parts."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    storage = _storage(value)
    if storage is not None:
        return storage.nbytes()  # pickled whole with each view of it
    found = getattr(value, "nbytes", None)
    if isinstance(found, int):
        return found
    # Tables of other libraries say what they hold when they are asked for their size.
    return 0 if callable(value) or isinstance(value, type) else sys.getsizeof(value)


def _storage(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage()


# ----------------------------------------------------------------------------------------------------------
# What an object holds, member by member: which of it cannot go to another process, or should not.
#
# Nothing of it is called but what pickling calls (`__getstate__`): an object that leaves its handle out of
# its state travels, and is not an obstacle. Members are named as one would write them:
# `dataset.files[0].handle`.


MOST_MEMBERS = 100_000
"""Objects looked at; beyond that pickling itself has the last word."""
MOST_OF_ONE = 1_000
"""Members of one list or dictionary."""

_PLAIN_MEMBERS = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    bytearray,
    type(None),
    range,
    slice,
    type,
    types.ModuleType,
)
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
class HeldObject:
    """Something that an object holds."""

    path: str
    """As one would write it, `dataset.file`."""
    value: Any


@dataclass(frozen=True, slots=True)
class PicklingObstacle:
    """A member that cannot, or should not, go to another process."""

    path: str
    what: str
    """Its kind, in words."""
    cure: str

    def __str__(self) -> str:
        """Return path and kind."""
        return f"{self.path} is {self.what}"


def members(value: object, path: str) -> Iterator[HeldObject]:
    """Yield the object and what it holds, each once, the nearest first."""
    seen: set[int] = set()
    waiting = deque([HeldObject(path, value)])
    kept: list[Any] = []  # an id must not be given again while it is known
    while waiting and len(seen) < MOST_MEMBERS:
        member = waiting.popleft()
        if id(member.value) in seen:
            continue
        seen.add(id(member.value))
        kept.append(member.value)
        yield member
        waiting.extend(_held(member))


def obstacles(value: object, path: str) -> list[PicklingObstacle]:
    """Return what keeps `value` from going to another process, as far as it can be seen without trying."""
    return [found for member in members(value, path) if (found := _obstacle(member)) is not None]


def uses_module(value: object, module: str) -> bool:
    """Return True if a function of an object's class, or of what the object holds, names a module."""
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
    """Return what draws random numbers, judged by the names of classes and functions; at most three."""
    found: list[str] = []
    for member in members(value, path):
        kind: type[Any] = type(member.value)
        name = qualified_name(member.value if isinstance(member.value, types.FunctionType) else kind)
        short = name.rpartition(".")[2].lower()
        draws = name.startswith(_DRAWS) or any(word in short for word in _RANDOM)
        if draws and member.path != path and not isinstance(member.value, _PLAIN_MEMBERS):
            found.append(f"{member.path}, a {name}")
        if len(found) == 3:
            break
    return found


def _held(member: HeldObject) -> Iterator[HeldObject]:
    value, path = member.value, member.path
    if isinstance(value, (*_PLAIN_MEMBERS, np.ndarray, np.generic)) or _tensor_device(value):
        return
    kind: type[Any] = type(value)
    if issubclass(kind, dict):
        items = list(dict.items(cast("dict[Any, Any]", value)))[:MOST_OF_ONE]
        yield from (HeldObject(f"{path}[{key!r:.40}]", held) for key, held in items if not _plain(held))
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        held = [item for item, _ in zip(value, range(MOST_OF_ONE), strict=False)]
        yield from (
            HeldObject(f"{path}[{place}]", item) for place, item in enumerate(held) if not _plain(item)
        )
    elif isinstance(value, functools.partial):
        yield HeldObject(f"{path}.func", value.func)
        yield from (HeldObject(f"{path}.args[{n}]", arg) for n, arg in enumerate(value.args))
        yield from (HeldObject(f"{path}.keywords[{n!r}]", arg) for n, arg in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield HeldObject(f"{path}.__self__", value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _closure(value, path)
    if _obstacle(member) is None:
        for name, held in state_of(value).items():
            if not _plain(held):
                yield HeldObject(f"{path}.{name}", held)


def _plain(value: object) -> bool:
    return type(value) in _PLAIN_MEMBERS


def _closure(function: types.FunctionType, path: str) -> Iterator[HeldObject]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield HeldObject(f"{path}.<closure>.{name}", cell.cell_contents)
        except ValueError:  # not filled yet
            continue


def state_of(value: object) -> dict[str, Any]:
    """Return what pickling would take along, by name."""
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
    return attributes_of(value)


def _obstacle(member: HeldObject) -> PicklingObstacle | None:
    value = member.value
    name = qualified_name(type(value))
    device = _tensor_device(value)
    if device and device not in ("cpu", "meta"):
        cure = "Each reader would hold a copy there: keep it on the CPU (`.cpu()`); batches go there later"
        return PicklingObstacle(member.path, f"a tensor on {device}", cure)
    if any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return None  # each process has its own, and cloudpickle knows
    if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
        of = getattr(value, "name", None)
        return PicklingObstacle(
            member.path, "an open file" + (f" ({of})" if isinstance(of, str) else ""), _LAZY
        )
    for beginning, (what, cure) in _KINDS.items():
        if name.startswith(beginning) and not _travels(value):
            return PicklingObstacle(member.path, what or f"a {name}", cure)
    return None


def _travels(value: object) -> bool:
    """Return True if a handle can be pickled after all; there is little in it to be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return False
    return True


def _tensor_device(value: Any) -> str:
    torch = sys.modules.get("torch")
    return str(value.device) if torch is not None and isinstance(value, torch.Tensor) else ""


def attributes_of(value: object) -> dict[str, Any]:
    """Return what an object holds by name, slots included; nothing is computed."""
    try:
        found = dict(cast("dict[str, Any]", object.__getattribute__(value, "__dict__")))
    except (AttributeError, TypeError):
        found = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    found[name] = member.__get__(value)
    return found
