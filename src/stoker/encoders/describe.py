"""Say in JSON what code an encoder runs: source text, settings, captured values.

Two modules can have one class and equal weights and still differ (a stride, a scale kept as a plain number),
so an identity needs their settings too. What cannot be described for certain is refused with the cure, an
explicit `version=`; a guess would make two encoders share one cache.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stoker.encoders.weights import digest_weights, named_parts
from stoker.errors import EncoderError
from stoker.schema import Json

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
    return {name or "self": _instance(part, "forward") for name, part in named_parts(module).items()}


def describe_function(function: Callable[..., object]) -> dict[str, Json]:
    """What a callable runs: source digest, defaults, captured values, globals, and whose method it is.

    Functions that it calls are named only: give a `version` and raise it when they change.

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
            code[qualified_name(kind)] = {"source": _source(kind), **used}
    return {"class": qualified_name(type(thing)), "code": code, "set": _settings(thing)}


def _used(function: types.FunctionType) -> dict[str, Json]:
    """Values that a function takes from around it; its text has their names alone."""
    function = _undecorated(function)
    closure = inspect.getclosurevars(function)
    return {
        "defaults": _value([function.__defaults__, function.__kwdefaults__], "defaults"),
        "captured": {name: _value(value, name) for name, value in sorted(closure.nonlocals.items())},
        "globals": {name: _value(value, name) for name, value in sorted(closure.globals.items())},
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
        return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()
    except (OSError, TypeError) as error:
        raise EncoderError(_unseen(thing, str(error))) from error


def _unseen(thing: object, why: str) -> str:
    return (
        f"{qualified_name(thing)} has no source text and settings to tell it by ({why}), so that a change "
        f'would go unseen. Give ModuleEncoder(..., version="1") and raise it when the code changes'
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
    if isinstance(value, nn.Module):
        weights = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return {"module": describe_module(value), "weights": digest_weights(weights)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): _value(item, f"{where}[{key!r}]") for key, item in items}
    if isinstance(value, Sequence):
        return [_value(item, f"{where}[{i}]") for i, item in enumerate(cast("Sequence[object]", value))]
    if isinstance(value, set | frozenset):
        return [*sorted(str(_value(item, where)) for item in cast("set[object]", value))]
    if isinstance(
        value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType | logging.Logger
    ):
        return value.__name__ if isinstance(value, types.ModuleType) else qualified_name(value)
    raise EncoderError(
        f"{where} is a {qualified_name(value)}, which cannot be told apart from another of its kind. "
        f'Give ModuleEncoder(..., version="1") and raise it when the encoder changes'
    )


_BOOKKEEPING = frozenset(vars(nn.Module()))
"""What every module has: hooks and registries. They are no settings."""
