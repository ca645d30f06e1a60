"""Say in JSON what code an encoder runs: source text, settings, captured values.

Two modules can have one class and equal weights and still differ (a stride, a scale kept as a plain number),
so an identity needs their settings too. What cannot be described for certain is refused with the cure, an
explicit `version=`; a guess would make two encoders share one cache.
"""

from __future__ import annotations

import abc
import enum
import functools
import hashlib
import inspect
import logging
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from stoker.encoders.weights import digest_weights, named_parts
from stoker.errors import EncoderError
from stoker.schema import Json
from stoker.used_code import (
    bytecode_text,
    captured_values,
    functions_in,
    global_values,
    is_library,
    package_version,
    source_text,
    unwrapped,
)

LIBRARIES = (
    *("torch.", "torchvision.", "transformers.", "timm.", "numpy."),
    *("builtins.", "typing.", "abc.", "collections.", "functools."),
)
"""Code of these is named, not quoted: library versions are provenance, not part of a recipe."""


def qualified_name(thing: object) -> str:
    """Module and name of a class or function; of an instance, those of its class."""
    named = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{getattr(named, '__qualname__', '?')}"


def describe_module(module: nn.Module) -> dict[str, Json]:
    """Classes, digests of their code and plain settings of a module and everything below it.

    Raises:
        EncoderError: A class has no source text, or an attribute is of a kind that cannot be described.
    """
    return {
        name or "self": {**_instance(part, "forward"), **_hooks(part)}
        for name, part in named_parts(module).items()
    }


def describe_function(function: Callable[..., object]) -> dict[str, Json]:
    """What a callable runs: source digest, defaults, captured values, globals, and whose method it is.

    Functions and classes of the user that it uses are described too; those of libraries are named.

    Raises:
        EncoderError: It has no source text, or captures something that cannot be described.
    """
    if isinstance(function, nn.Module):
        return describe_module(function)
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[object]", function)
        bound = _value(partial.args, "args"), _value(dict(partial.keywords), "keywords")
        return {**describe_function(partial.func), "args": bound[0], "keywords": bound[1]}
    if isinstance(function, types.MethodType):
        owner = function.__self__
        described = describe_module(owner) if isinstance(owner, nn.Module) else _instance(owner, "__call__")
        return {**describe_function(function.__func__), "owner": described}
    if not isinstance(function, types.FunctionType):
        if not isinstance(inspect.getattr_static(function, "__call__", None), types.FunctionType):
            raise EncoderError(_unseen(function, "it is compiled"))
        return _instance(function, "__call__")
    if _in_library(function):
        return {"class": qualified_name(function), "source": None}
    return {"class": qualified_name(function), "source": _source(function), **_used(function)}


def bound_module(function: Callable[..., object]) -> nn.Module | None:
    """The module that a callable is, or is a method of, `functools.partial` taken off; else None."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _instance(thing: object, call: str) -> dict[str, Json]:
    """Class, code of it and of its bases, and settings of an object that is run by its method `call`."""
    if not hasattr(thing, "__dict__"):
        raise EncoderError(_unseen(thing, "it has no __dict__ that shows its settings"))
    code: dict[str, Json] = {}
    for kind in type(thing).__mro__:
        if not _in_library(kind):
            method = vars(kind).get(call)
            used = _used(method) if isinstance(method, types.FunctionType) else {}
            others = {} if is_library(kind) else {"methods": _methods_used(kind)}
            code[qualified_name(kind)] = {"source": _source(kind), **used, **others}
    return {"class": qualified_name(type(thing)), "code": code, "set": _settings(thing)}


def _hooks(module: nn.Module) -> dict[str, Json]:
    """What runs before and after `forward`; modules without hooks read as they always did."""
    found: dict[str, Json] = {}
    for name in _HOOKS:
        hooks = cast("Mapping[int, Callable[..., object]]", getattr(module, name, {})).values()
        if hooks:
            found[name] = [_hook(hook) for hook in hooks]
    return found


def _hook(hook: Callable[..., object]) -> Json:
    if isinstance(hook, types.FunctionType | types.MethodType | functools.partial | nn.Module):
        return _value(hook, qualified_name(cast("object", hook)))
    return describe_function(hook)


def _used(function: types.FunctionType) -> dict[str, Json]:
    """Values that a function takes from around it; its text has their names alone."""
    function = _undecorated(function)
    return {
        "defaults": _value([function.__defaults__, function.__kwdefaults__], "defaults"),
        "captured": {name: _value(value, name) for name, value in sorted(captured_values(function).items())},
        "globals": {name: _value(value, name) for name, value in sorted(global_values(function).items())},
    }


def _followed(code: Any) -> Json:
    """Describe a user's function or class that other code uses; one that is met again is only named."""
    outermost = _MET.get() is None
    met = _MET.get() or {}
    if is_library(code):
        return _named(qualified_name(code), code.__module__)
    if isinstance(code, _PLAINLY_NAMED) or id(code) in met:
        return qualified_name(code)
    met[id(code)] = code
    _MET.set(met)
    try:
        if isinstance(code, types.FunctionType):
            return describe_function(code)
        if not isinstance(code, type):
            return {"object": _followed(cast("object", type(code))), "set": _settings(code)}
        kinds = [kind for kind in code.__mro__ if not is_library(kind)]
        return {
            qualified_name(kind): {"source": _source(kind), "used": _methods_used(kind)} for kind in kinds
        }
    finally:
        if outermost:
            _MET.set(None)


def _named(name: str, module: str | None) -> str:
    """Name what belongs to an installed package, with the version of that package."""
    version = None if f"{module}.".startswith(LIBRARIES) else package_version(module or "builtins")
    return name if version is None else f"{name} of {version}"


def _methods_used(kind: type) -> dict[str, Json]:
    """Values that the methods of a class take from around them."""
    return {
        f"{name}.{i}": _used(function)
        for name, member in sorted(vars(kind).items())
        for i, function in enumerate(functions_in(member))
    }


def _undecorated(function: types.FunctionType) -> types.FunctionType:
    """Without the decorators of libraries, such as `torch.no_grad()`, whose insides are not the user's."""
    while f"{function.__globals__.get('__name__')}.".startswith(LIBRARIES):
        inner = getattr(function, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        function = inner
    return function


def _in_library(thing: object) -> bool:
    return f"{thing.__module__}.".startswith(LIBRARIES)


def _source(thing: Any) -> Json:
    if _in_library(thing):
        return None
    try:
        text = source_text(thing)
        if text.count("lambda") > 1 and getattr(thing, "__name__", "") == "<lambda>":
            text += bytecode_text(thing)  # several in one line have one text
        return hashlib.sha256(text.encode()).hexdigest()
    except (OSError, TypeError) as error:
        raise EncoderError(_unseen(thing, str(error))) from error


def _unseen(thing: object, why: str) -> str:
    return (
        f"{qualified_name(thing)} has no source text and settings to tell it by ({why}), so that a change "
        f"would go unseen. {_CURE}"
    )


def _settings(thing: object) -> Json:
    """Plain attributes: a module's weights and parts are not among them, they are described elsewhere."""
    return {
        name: _value(value, f"{qualified_name(thing)}.{name}")
        for name, value in sorted(getattr(thing, "__dict__", {}).items())
        if name not in _BOOKKEEPING
    }


def _value(value: Any, where: str) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex | bytes | torch.dtype | torch.device | torch.Size | range):
        return repr(
            cast("object", value)
        )  # repr keeps every bit of a float, and canonical JSON refuses infinities
    if isinstance(value, Tensor):
        return digest_weights({"": value})
    if isinstance(value, nn.Module | Mapping | Sequence | set | frozenset):
        return _held(cast("object", value), where)
    return _code_value(value, where)


def _held(value: object, where: str) -> Json:
    """Describe what may hold further values; one that holds itself by how many levels up it is."""
    above = _ABOVE.get()
    if id(value) in above:
        return {"itself": len(above) - above.index(id(value))}
    token = _ABOVE.set((*above, id(value)))
    try:
        return _parts(value, where)
    except RecursionError as error:
        text = f"{where[:100]} is nested too deep to be distinguished from another. {_CURE}"
        raise EncoderError(text) from error
    finally:
        _ABOVE.reset(token)


def _parts(value: object, where: str) -> Json:
    if isinstance(value, nn.Module):
        weights = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return {"module": describe_module(value), "weights": digest_weights(weights)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): _value(item, f"{where}[{key!r}]") for key, item in items}
    if isinstance(value, Sequence):
        return [_value(item, f"{where}[{i}]") for i, item in enumerate(cast("Sequence[object]", value))]
    ordered = sorted(cast("set[object]", value), key=_place)  # what is met first is described there
    return [*sorted(str(_value(item, where)) for item in ordered)]


def _array_or_text(value: Any, where: str) -> Json:
    if isinstance(value, np.dtype | re.Pattern):
        return repr(cast("object", value))
    if value.dtype.hasobject:
        raise EncoderError(_alike(value, where))
    array = np.ascontiguousarray(value)
    return [array.dtype.str, list(value.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _code_value(value: Any, where: str) -> Json:
    if isinstance(value, np.ndarray | np.generic | np.dtype | re.Pattern):
        return _array_or_text(value, where)
    if isinstance(value, types.ModuleType):
        return _named(value.__name__, value.__name__)
    if isinstance(value, type | types.FunctionType | _PLAINLY_NAMED):
        return _followed(value)
    if isinstance(value, types.MethodType):
        return {"method": _followed(value.__func__), "owner": _value(value.__self__, f"{where}.__self__")}
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[object]", value)
        inside = [_value(part, where) for part in (partial.func, partial.args, partial.keywords)]
        return {"partial": inside}
    if (function := unwrapped(value)) is not value:
        return _value(function, where)
    kinds = type(value).__mro__
    if hasattr(value, "__dict__") and not any(is_library(kind) for kind in kinds if kind not in _EMPTY):
        return _followed(value)
    raise EncoderError(_alike(value, where))


def _alike(value: object, where: str) -> str:
    return (
        f"{where} is a {qualified_name(type(value))}, which cannot be distinguished from others of its kind. "
        f"{_CURE}"
    )


def _place(item: object) -> str:
    """Order within a set: equal in each process, which the order of the set itself is not."""
    return qualified_name(item) if callable(item) else repr(item)


_CURE = (
    'Give stoker.ModuleEncoder(module, version="1") in place of the module, in settings encoder.version=1, '
    "and raise the version when the encoder changes"
)

_PLAINLY_NAMED = types.BuiltinFunctionType | logging.Logger

_EMPTY = (object, abc.ABC, Generic, Protocol, enum.Enum)
"""Bases that hold nothing of their own."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_BOOKKEEPING = frozenset(vars(nn.Module()))
"""What every module has: hooks, which are described apart, and registries."""

_ABOVE: ContextVar[tuple[int, ...]] = ContextVar("_ABOVE", default=())
"""Modules and containers around the one that is being described, by id, the outermost first."""

_MET: ContextVar[dict[int, object] | None] = ContextVar("_MET", default=None)
"""Functions and classes that are already described: code that uses itself must come to an end."""
