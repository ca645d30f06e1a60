"""Code as part of an identity: its text, and the values that functions use from outside of themselves."""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

_FOREIGN = (
    *("builtins", "torch", "torchvision", "numpy", "typing", "abc", "collections", "functools", "PIL"),
    *("h5py", "pandas", "stoker"),
)

_CACHE = type(functools.lru_cache(len))


def qualified_name(kind: object) -> str:
    """`module.Class`, as far as the object tells."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def is_foreign(kind: Any) -> bool:
    """Whether a class or function belongs to Python or torch, whose text is not noted."""
    module = getattr(kind, "__module__", None) or "builtins"
    if module == "builtins":  # also the module of what `exec` makes
        return getattr(builtins, getattr(kind, "__name__", "?"), None) is kind or not _has_text(kind)
    return module.partition(".")[0] in _FOREIGN


def is_library(kind: Any) -> bool:
    """Whether it comes with Python or an installed package: what its code uses is not looked at."""
    top = (getattr(kind, "__module__", None) or "builtins").partition(".")[0]
    if top in ("builtins", "__main__") or is_foreign(kind):
        return is_foreign(kind)
    return top in sys.stdlib_module_names or _installed(sys.modules.get(top))


def code_digest(kind: Any) -> str:
    """The sha256 of the source text, or of the bytecode where there is no text."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        text = _code_text(kind)  # typed at a prompt: there is no file to read
    if getattr(kind, "__name__", "") == "<lambda>":
        text += _code_text(kind)  # several may stand in one line
    return hashlib.sha256(text.encode()).hexdigest()


def functions_in(member: Any) -> list[types.FunctionType]:
    """The functions behind a member of a class: methods of each kind, properties, cached functions."""
    if isinstance(member, staticmethod | classmethod):
        member = cast("Any", member).__func__
    if isinstance(member, property):
        found = [member.fget, member.fset, member.fdel]
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        found = [cast("Any", member).func]
    else:
        found = [member.__wrapped__ if isinstance(member, _CACHE) else member]
    return [function for function in found if isinstance(function, types.FunctionType)]


def used_values(function: types.FunctionType) -> Iterator[Any]:
    """What a function uses from outside: defaults, closure, and the global names that it reads."""
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in sorted(_global_names(function.__code__)):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif not _is_library_module(value):  # helpers.scale(x): what is used of that module
            names = {n for code in _codes(function.__code__) for n in code.co_names}
            yield from (vars(value)[n] for n in sorted(names & vars(value).keys()))


def _is_library_module(module: types.ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    if top == "__main__":
        return False
    return top in _FOREIGN or top in sys.stdlib_module_names or _installed(sys.modules.get(top, module))


def _installed(module: types.ModuleType | None) -> bool:
    path = Path(getattr(module, "__file__", None) or "")
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _has_text(kind: Any) -> bool:
    return isinstance(kind, types.FunctionType) or any(
        functions_in(member) for member in (vars(kind).values() if isinstance(kind, type) else ())
    )


def _global_names(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for part in _codes(code)
        for step in dis.get_instructions(part)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code_text(kind: Any) -> str:
    """Bytecode, constants and names of a function, or of all functions of a class."""
    members = vars(kind).values() if isinstance(kind, type) else [kind]
    codes = [function.__code__ for member in members for function in functions_in(member)]
    return "\n".join(_one_code(code) for code in codes)


def _one_code(code: types.CodeType) -> str:
    constants = [_constant(value) for value in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {constants} {code.co_names}"


def _constant(value: Any) -> str:
    """Equal in each process: the order of a set depends on the seed of its process."""
    if isinstance(value, types.CodeType):
        return _one_code(value)
    if isinstance(value, tuple | frozenset):
        texts = [_constant(inner) for inner in cast("tuple[Any, ...]", value)]
        return f"tuple{texts}" if isinstance(value, tuple) else f"set{sorted(texts)}"
    return repr(value)
