"""Find and call code of the user's own that a configuration names by its import path.

What a configuration names is imported and called: it is code, like the script that would otherwise hold it.
The folder that the command runs in is on the import path, here and in the processes that are started.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from stoker.errors import ConfigError, StokerError


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """A name in the user's own code, and the setting that gives it."""

    setting: str
    """As `data.dataset`."""
    spec: str
    """`module:name` or `path/file.py:name`."""
    of: str
    """The expected kind of thing, as `a Dataset or of what makes it`."""
    arguments: str
    """The setting with the arguments."""
    error: type[StokerError]
    """Raised where the user's code fails."""

    @property
    def form(self) -> str:
        """The form of the setting, for messages."""
        return f"Expected module:name, or path/file.py:name, of {self.of}"

    def find(self) -> Any:
        """Import the module and return what stands under the name.

        Raises:
            ConfigError: There is no such module or name.
            StokerError: Importing it failed; of the class `error`, with file and line.
        """
        place, _, name = self.spec.rpartition(":")
        if not place or not name:
            raise ConfigError(f"{self.setting} is {self.spec!r}. {self.form}")
        module = self._file_module(Path(place)) if place.endswith(".py") else self._module(place)
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
                raise ConfigError(
                    f"{self.setting} {self.spec}: {getattr(module, '__file__', place)} has no {part}. It has "
                    f"{', '.join(sorted(own)) or 'nothing to call'}"
                )
            found = getattr(found, part)
        return found

    def call(self, make: Any, arguments: Mapping[str, Any]) -> Any:
        """Call what was found.

        Raises:
            ConfigError: It cannot be called, or not with these arguments.
            StokerError: It failed; of the class `error`, with file and line.
        """
        if not callable(make):
            raise ConfigError(
                f"{self.setting} {self.spec} is a {type(make).__name__}, which cannot be called. {self.form}"
            )
        try:
            return cast("Callable[..., Any]", make)(**arguments)
        except StokerError:
            raise
        except TypeError as error:
            if _place(error) is None:  # the call itself
                raise ConfigError(
                    f"{self.setting} {self.spec}: {error}. It takes {inspect.signature(make)}, and "
                    f"{self.arguments} gives {', '.join(arguments) or 'nothing'}"
                ) from error
            raise self._failed(f"called with {_shown(arguments)}", error) from error
        except Exception as error:
            raise self._failed(f"called with {_shown(arguments)}", error) from error

    def _file_module(self, path: Path) -> ModuleType:
        if not path.is_file():
            raise ConfigError(f"{self.setting} {self.spec}: {path} is no file. {self.form}")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # and there it stays: other processes import it by the same name
        module = self._module(path.stem)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise ConfigError(
                f"{self.setting} {self.spec}: the name {path.stem} belongs to {module.__file__} already. "
                "Rename the file"
            )
        return module

    def _module(self, name: str) -> ModuleType:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise self._failed("cannot be imported", error) from error
            raise ConfigError(
                f"{self.setting} {self.spec}: there is no module {error.name}, neither installed nor in "
                f"{here}. {self.form}"
            ) from error
        except Exception as error:
            raise self._failed("cannot be imported", error) from error

    def _failed(self, doing: str, error: Exception) -> StokerError:
        place = _place(error)
        at = f" at {place}" if place else ""
        return self.error(
            f"{self.setting} {self.spec}, {doing}: {type(error).__name__}{at}: {error}. Fix it there"
        )


def takes_argument(make: Any, name: str) -> bool:
    """Return whether a callable has a parameter of that name."""
    try:
        return callable(make) and name in inspect.signature(make).parameters
    except (TypeError, ValueError):  # compiled code without a signature
        return False


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "nothing"


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
