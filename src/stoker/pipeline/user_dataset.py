"""A torch Dataset of the user's own, named in a configuration by its import path.

What a configuration names is imported and called: it is code, like the script that would otherwise hold it.
The folder that the command runs in is on the import path, here and in the readers.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from stoker.config.models import DataConfig
from stoker.errors import ConfigError, SourceError, SplitError, StokerError
from stoker.sources.protocol import Source
from stoker.sources.split_of import SplitOf
from stoker.sources.torch_dataset import TorchSource

_FORM = "Expected module:name, or path/file.py:name, of a Dataset or of what makes it"


def torch_source(data: DataConfig, task: str, split: str) -> Source:
    """The Dataset that `data.dataset` names, or the part of it that is `split`.

    What takes an argument `split` is called with it, and gives that split; all else is cut by `data.splits`.

    Raises:
        ConfigError: There is no such module or name.
        SplitError: It gives None for this split.
        SourceError: Making it failed; names file and line.
    """
    if data.dataset is None:
        raise ConfigError(f"data.kind=torch needs data.dataset, as data.dataset=mydata:Waves. {_FORM}")
    settings = data.torch
    make = _named(data.dataset)
    arguments: dict[str, Any] = dict(settings.arguments or {})
    by_split = "split" not in arguments and _takes_split(make)
    if by_split:
        arguments["split"] = split
    dataset = _called(make, arguments, data.dataset)
    if dataset is None:
        raise SplitError(f"data.dataset {data.dataset} gives None for split {split!r}: it has no such split")
    source: Source = (
        dataset
        if isinstance(dataset, Source)
        else TorchSource(
            dataset,
            identity=settings.identity,
            time=settings.time,
            text=cast("Any", settings.text),
            random=settings.random,
        )
    )
    return source if by_split else SplitOf(source, split, splits=data.splits, seed=data.seed)


def _named(spec: str) -> Any:
    """What stands under `module:name`."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"data.dataset is {spec!r}. {_FORM}")
    module = _file_module(Path(place), spec) if place.endswith(".py") else _module(place, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            raise ConfigError(
                f"data.dataset {spec}: {getattr(module, '__file__', place)} has no {part}. It has "
                f"{', '.join(sorted(own)) or 'nothing to call'}"
            )
        found = getattr(found, part)
    return found


def _file_module(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"data.dataset {spec}: {path} is no file. {_FORM}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # and there it stays: readers import it by the same name
    module = _module(path.stem, spec)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(
            f"data.dataset {spec}: the name {path.stem} belongs to {module.__file__} already. Rename the file"
        )
    return module


def _module(name: str, spec: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(spec, "cannot be imported", error) from error
        raise ConfigError(
            f"data.dataset {spec}: there is no module {error.name}, neither installed nor in {here}. {_FORM}"
        ) from error
    except Exception as error:
        raise _failed(spec, "cannot be imported", error) from error


def _takes_split(make: Any) -> bool:
    try:
        return callable(make) and "split" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # compiled code without a signature
        return False


def _called(make: Any, arguments: dict[str, Any], spec: str) -> Any:
    if hasattr(make, "__getitem__") and not isinstance(make, type) and not arguments:
        return make  # a Dataset that is there already
    if not callable(make):
        raise ConfigError(f"data.dataset {spec} is a {type(make).__name__}, which cannot be called. {_FORM}")
    try:
        return cast("Callable[..., Any]", make)(**arguments)
    except StokerError:
        raise
    except TypeError as error:
        if _place(error) is None:  # the call itself
            takes = inspect.signature(make)
            raise ConfigError(
                f"data.dataset {spec}: {error}. It takes {takes}, and data.torch.arguments gives "
                f"{', '.join(arguments) or 'nothing'}"
            ) from error
        raise _failed(spec, f"called with {_shown(arguments)}", error) from error
    except Exception as error:
        raise _failed(spec, f"called with {_shown(arguments)}", error) from error


def _shown(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "nothing"


def _failed(spec: str, doing: str, error: Exception) -> SourceError:
    place = _place(error)
    at = f" at {place}" if place else ""
    return SourceError(f"data.dataset {spec}, {doing}: {type(error).__name__}{at}: {error}. Fix it there")


def _place(error: BaseException) -> str | None:
    """File and line in the user's own code: the innermost that is neither ours nor Python's import."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<frozen") and f.filename != __file__]
    own = [f for f in own if not f.filename.endswith("importlib/__init__.py")]
    outside = [f for f in own if "site-packages" not in f.filename and f"{sys.prefix}/lib" not in f.filename]
    found = (outside or own)[-1:]
    return f"{found[0].filename}:{found[0].lineno}" if found else None
