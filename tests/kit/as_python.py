"""The child's side of `forked.py`: be what `python WORD...` would be.

Where that is `stoker`, the child that its guardian starts is a fork of the guardian.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
import warnings
from contextlib import suppress
from typing import Any

from stoker.runtime.processes import child, entry
from stoker.runtime.processes.entry import STACK_SIGNAL, Connection

STDERR = 2
GUARDED = ["-P", "-m", "stoker.cli.main"]
START_CODE = "STOKER_TEST_START_CODE"
"""A variable that names a script to run first, in place of a `sitecustomize.py`, which a fork has not."""


class ForkingPopen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, but the process that a guardian starts is a fork of it."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        if args[1:4] != GUARDED:
            super()._execute_child(args, executable, preexec_fn, *more)
            return
        pass_fds, env, output = more[1], more[3], more[10]
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        code = 1
        try:  # what is above on the stack stays alive, so that none of its descriptors is closed twice
            if output >= 0:
                os.dup2(output, 1)
            kept = {0, 1, STDERR, *pass_fds}
            for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
                if fd not in kept:
                    with suppress(OSError):
                        os.close(fd)
            os.environ.clear()
            os.environ.update(env)
            begin(args[1:], [])
            code = 0
        except SystemExit as error:
            code = entry._exit_code(error)
        finally:
            with suppress(BaseException):
                entry._finish()
            os._exit(code)


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
    guarded = words[:3] == GUARDED
    if guarded:
        words = words[1:]
    kind, *rest = words if words[0] in ("-c", "-m") else ("", *words)
    sys.argv[:] = ["-c", *rest[1:]] if kind == "-c" else rest
    first = os.path.dirname(os.path.realpath(rest[0])) if not kind else "" if kind == "-c" else os.getcwd()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [os.path.abspath(entry) for entry in given if entry]
    if not guarded:  # `-P`, and the rest as the guardian has it
        sys.path[:] = [first, *more, *import_path]
    else:
        del sys.path[0]
    child.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkingPopen})
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        if name != __name__:
            del sys.modules[name]  # they are found where this Python looks for them, or not at all
    try:
        if script := os.environ.get(START_CODE):
            run_code(script, {"__name__": "sitecustomize"})
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
    run_code(path, main_module.__dict__)


def run_code(path: str, namespace: dict[str, Any]) -> None:
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, namespace)


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
