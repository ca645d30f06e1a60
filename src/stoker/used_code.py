"""Code as part of an identity: its text, and the values that functions use from outside of themselves."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import importlib.util
import inspect
import io
import os
import sys
import sysconfig
import tokenize
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, cast

_FOREIGN = (
    *("builtins", "torch", "torchvision", "numpy", "typing", "abc", "collections", "functools", "PIL"),
    *("h5py", "pandas", "stoker"),
)

_Span: TypeAlias = "tuple[tuple[int, int], tuple[int, int]]"
"""Line and column of the beginning and the end."""
_NO_DATA = ("dev", "proc", "sys")
"""Folders at the root whose files are views of the machine."""

_NOT_OWN = frozenset({"site-packages", "dist-packages"})

_CACHE = type(functools.lru_cache(len))


def qualified_name(kind: object) -> str:
    """`module.Class`, as far as the object tells."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def is_foreign(kind: Any) -> bool:
    """Return True if a class or function belongs to Python or torch, whose text is not noted."""
    module = getattr(kind, "__module__", None) or "builtins"
    if module == "builtins":  # also the module of what `exec` makes
        return getattr(builtins, getattr(kind, "__name__", "?"), None) is kind or not _has_text(kind)
    return module.partition(".")[0] in _FOREIGN


def is_library(kind: Any) -> bool:
    """Return True if it comes with Python or an installed package: what its code uses is not looked at."""
    top = (getattr(kind, "__module__", None) or "builtins").partition(".")[0]
    if top in ("builtins", "__main__") or is_foreign(kind):
        return is_foreign(kind)
    return top in sys.stdlib_module_names or _installed(sys.modules.get(top))


def describe_failure(error: BaseException) -> str:
    """Return the type of an error, its file and line as `place_of_error` does, and its text.

    >>> describe_failure(ValueError("x"))
    'ValueError: x'
    """
    place = place_of_error(error)
    at = f" at {place}" if place else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}{at}" + (f": {text}" if text else "")


def place_of_error(error: BaseException) -> str | None:
    """Return file and line in the user's own code, or else in a library; None: the error is of neither.

    It is the innermost place outside of Stoker, Python and installed packages, if there is one.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    stoker, python = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<frozen", stoker))
        and not frame.filename.endswith("importlib/__init__.py")
    ]
    own = [
        frame
        for frame in foreign
        if not (frame.filename.startswith(python) or _NOT_OWN & {*Path(frame.filename).parts})
    ]
    found = (own or foreign)[-1:]
    return f"{found[0].filename}:{found[0].lineno}" if found else None


def source_text(kind: Any) -> str:
    """Return the source text of a class or function without its comments and docstrings.

    Text that has none is returned as it stands. Docstrings stay where the code reads `__doc__`.

    Raises:
        OSError, TypeError: There is no source text.
    """
    return _without_comments(inspect.getsource(kind))


def _without_comments(text: str) -> str:
    """Cut comments and docstrings out of a piece of source; a line of which nothing is left goes as well.

    >>> _without_comments("def f(x):\\n    'Doc.'\\n    # why\\n    return x  # what\\n")
    'def f(x):\\n    return x\\n'
    """
    indented = text[:1].isspace()
    try:
        # A method stands alone here: its indentation needs a block around it.
        tree = ast.parse(f"if 1:\n{text}" if indented else text)
        tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return text  # part of a statement, as a lambda among arguments
    spans: list[_Span] = [(token.start, token.end) for token in tokens if token.type == tokenize.COMMENT]
    if "__doc__" not in text:
        spans += _docstrings(tree, [*io.StringIO(text)], 1 if indented else 0)
    lines = [*io.StringIO(text)]  # not `splitlines`, which also splits at a form feed
    for (first, begin), (last, end) in sorted(spans, reverse=True):
        before, after = lines[first - 1][:begin].rstrip(), lines[last - 1][end:]
        rest = after.strip()
        kept = [] if not before and not rest else [before + (after if rest else "\n")]
        lines[first - 1 : last] = kept
    return "".join(lines)


def _docstrings(tree: ast.Module, lines: list[str], shift: int) -> Iterator[_Span]:
    """Yield where docstrings begin and end, as tokens do: lines from 1, columns in characters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
            continue
        if isinstance(first.value.value, str):
            begin, end = first.lineno - shift, (first.end_lineno or 0) - shift
            yield (
                (begin, _characters(lines[begin - 1], first.col_offset)),
                (end, _characters(lines[end - 1], first.end_col_offset or 0)),
            )


def _characters(line: str, column_bytes: int) -> int:
    """Return a column of `ast`, which counts bytes of UTF-8, in characters."""
    return len(line.encode()[:column_bytes].decode(errors="ignore"))


def code_digest(kind: Any) -> str:
    """Return the sha256 of the source text without comments, or of the bytecode where there is no text."""
    try:
        text = source_text(kind)
    except (OSError, TypeError):
        text = _code_text(kind)  # typed at a prompt: there is no file to read
    if getattr(kind, "__name__", "") == "<lambda>":
        text += _code_text(kind)  # several may stand in one line
    return hashlib.sha256(text.encode()).hexdigest()


def functions_in(member: Any) -> list[types.FunctionType]:
    """Return the functions behind a member of a class: methods of each kind, properties, cached functions."""
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
    """Yield what a function uses from outside: defaults, closure, and the global names that it reads."""
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
            names = _names_in(function)
            yield from (vars(value)[n] for n in sorted(names & vars(value).keys()))
    for module in imported_inside(function).values():
        names = _names_in(function)
        yield from (
            value
            for name, value in sorted(vars(module).items())
            if name in names and not isinstance(value, types.ModuleType)
        )


def imported_inside(function: types.FunctionType) -> dict[str, types.ModuleType]:
    """Return the user's modules that a function imports when it is called, by name.

    They are imported here, so that what is found does not depend on which calls were made before.
    """
    package = str(function.__globals__.get("__package__") or "")
    names = set[str]()
    for code in _codes(function.__code__):
        level, module = 0, ""
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(step.argval) is int:
                level = step.argval
            elif step.opname == "IMPORT_NAME":
                module, *around = _module_names(step.argval, level, package)
                names.update((module, *around))
            elif step.opname == "IMPORT_FROM":
                names.add(f"{module}.{step.argval}")
    found = {name: _own_module(name) for name in sorted(names)}
    return {name: module for name, module in found.items() if module is not None}


def _own_module(name: str) -> types.ModuleType | None:
    """Return a module of the user's; None for one of a library, or that cannot be imported."""
    top = name.partition(".")[0]
    if name not in sys.modules:
        if not top or top in _FOREIGN or top in sys.stdlib_module_names:
            return None
        with suppress(Exception, SystemExit):  # the user's code, which may be a script for another machine
            spec = importlib.util.find_spec(top)
            if spec is not None and _NOT_OWN.isdisjoint(Path(spec.origin or "").parts):
                importlib.import_module(name)
    module = sys.modules.get(name)
    return None if module is None or _is_library_module(module) else module


def _module_names(name: str, level: int, package: str) -> list[str]:
    """Return the module that an import statement names, then the packages around it."""
    if level:
        around = package.split(".")[: len(package.split(".")) - level + 1]
        name = ".".join([*around, name] if name else around)
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def named_files(function: types.FunctionType) -> list[Path]:
    """Return the regular files whose path is written in a function, absolute or with a suffix."""
    found: set[Path] = set()
    for code in _codes(function.__code__):
        for text in code.co_consts:
            if not isinstance(text, str) or "\n" in text or not (os.sep in text or Path(text).suffix):
                continue
            path = Path(text).absolute()
            with suppress(OSError, ValueError):  # text that no file system takes as a name
                if path.is_file() and path.parts[1] not in _NO_DATA:
                    found.add(path)
    return sorted(found)


def captured_values(function: types.FunctionType) -> dict[str, Any]:
    """Return what the closure of a function holds, by name; cells that are not filled yet are left out."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def global_values(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads, by name, with what it uses of a user's modules."""
    found = {
        name: function.__globals__[name]
        for name in _global_names(function.__code__) & {*function.__globals__}
    }
    found |= imported_inside(function)
    names = _names_in(function)
    waiting, modules = sorted(found.items(), key=lambda item: item[0]), set[int]()
    while waiting:
        at, module = waiting.pop()
        if not isinstance(module, types.ModuleType) or _is_library_module(module) or id(module) in modules:
            continue
        modules.add(id(module))
        inside = {f"{at}.{name}": vars(module)[name] for name in names & vars(module).keys()}
        found |= inside
        waiting += sorted(inside.items(), key=lambda item: item[0])
    return found


def unwrapped(value: Any) -> Any:
    """Return the function behind `functools.lru_cache`, or the value itself."""
    return value.__wrapped__ if isinstance(value, _CACHE) else value


def package_version(module: str) -> str | None:
    """Return `package version` of a module that comes with an installed package; None for all others."""
    top = module.partition(".")[0]
    if top in _FOREIGN or top in sys.stdlib_module_names or not _installed(sys.modules.get(top)):
        return None
    version = getattr(sys.modules[top], "__version__", None)
    if version is None:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(top)
    return f"{top} {version or 'of unknown version'}"


def bytecode_text(function: types.FunctionType) -> str:
    """Return bytecode, constants and names of a function."""
    return _one_code(function.__code__)


def _is_library_module(module: types.ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    if top == "__main__":
        return False
    return top in _FOREIGN or top in sys.stdlib_module_names or _installed(sys.modules.get(top, module))


def _installed(module: types.ModuleType | None) -> bool:
    path = Path(getattr(module, "__file__", None) or "")
    return not _NOT_OWN.isdisjoint(path.parts)


def _has_text(kind: Any) -> bool:
    return isinstance(kind, types.FunctionType) or any(
        functions_in(member) for member in (vars(kind).values() if isinstance(kind, type) else ())
    )


def _names_in(function: types.FunctionType) -> set[str]:
    """Return every name that a function, or one inside it, looks up."""
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _global_names(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for part in _codes(code)
        for step in dis.get_instructions(part)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and that of the functions inside it."""
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
