"""The child's side of `forked.py`: be what `python WORD...` would be."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import threading
import types
import warnings
from contextlib import suppress
from typing import Any

from stoker.runtime.processes.entry import STACK_SIGNAL, Connection

STDERR = 2


def main(connection: Connection) -> None:
    """Run code, a module or a script with the streams, folder, environment and path of a new Python."""
    given = connection.arguments
    folder, *streams = connection.shared
    os.fchdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    faulthandler.unregister(STACK_SIGNAL)
    faulthandler.disable()
    for fd in (folder, *streams, connection.stack_fd):
        os.close(fd)
    connection.socket.close()
    connection.heartbeat.close()
    os.environ.clear()
    os.environ.update(given["environment"])
    begin(given["words"], given["import_path"])


def begin(words: list[str], import_path: list[str]) -> None:
    sys.orig_argv[:] = [sys.executable, *words]
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    kind, *rest = words if words[0] in ("-c", "-m") else ("", *words)
    sys.argv[:] = ["-c", *rest[1:]] if kind == "-c" else rest
    first = os.path.dirname(os.path.realpath(rest[0])) if not kind else "" if kind == "-c" else os.getcwd()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [os.path.abspath(entry) for entry in given if entry]
    sys.path[:] = [first, *more, *import_path]
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        if name != __name__:
            del sys.modules[name]  # they are found where this Python looks for them, or not at all
    try:
        if kind == "-c":
            main_module = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main_module.__dict__)
        elif kind == "-m":
            if not hasattr(sys.modules.get(rest[0]), "__path__"):
                sys.modules.pop(rest[0], None)  # it is run under another name, as if never imported
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        else:
            run_script(rest[0])
    except SystemExit:
        raise
    except BaseException as error:
        report(error)


def run_script(path: str) -> None:
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    main_module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)


def report(error: BaseException) -> None:
    """End as the interpreter does: a traceback and 1, and after Ctrl-C by that signal."""
    own = error.__traceback__.tb_next if error.__traceback__ else None
    sys.excepthook(type(error), error, own)
    if not isinstance(error, KeyboardInterrupt):
        sys.exit(1)
    with suppress(BaseException):
        threading_: Any = threading
        threading_._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
