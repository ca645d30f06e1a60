"""`subprocess`, but a Python that it starts is forked from a process that has torch and Stoker loaded.

    from tests.kit import forked as subprocess

A Python that imports torch takes some two seconds of processor time, a fork some 50 ms. The child has the
arguments, environment, folder, limits, standard streams and import path that it would have, a `__main__` of
its own, and the same exit codes; signals reach it as ever. Where a fork could tell, a Python is started:
other options of the interpreter, variables that libraries read when they are loaded, a `sitecustomize`,
`preexec_fn`, further descriptors. Not for tests of the start of the interpreter, of what is imported, of
command lines in /proc, or of sessions: a fork is always in one of its own.

The child that the guardian of a `stoker` command starts is a fork of the guardian. A test that has to change
the program names a script in `as_python.START_CODE`: it runs first, in the guardian and in its child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, TimeoutExpired
from typing import Any

from stoker.runtime.processes.child import TORCH, Child
from tests.kit.import_once import read_at_start, start_code

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "CalledProcessError",
    "CompletedProcess",
    "Popen",
    "TimeoutExpired",
    "run",
]

MODULES = (
    *TORCH,
    *("stoker.cli.main", "stoker.config", "stoker.encoders", "stoker.loader", "stoker.run"),
    *("stoker.plan", "stoker.precompute", "stoker.sources", "stoker.store", "stoker.train"),
    *("omegaconf", "pydantic", "safetensors.torch", "torch.nn", "torch.optim", "torch._dynamo"),
)
IGNORE_WARNINGS = ["-W", "ignore"]
AT_START = read_at_start(dict(os.environ))


@cache
def import_path() -> list[str]:
    """Where a Python started without a script and without PYTHONPATH looks for modules."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import json, sys; print(json.dumps(sys.path))"
    return json.loads(
        subprocess.run([sys.executable, "-P", "-c", code], env=env, stdout=PIPE, check=True).stdout
    )


def can_be_forked(args: Any, env: dict[str, str]) -> bool:
    if sys.platform != "linux" or not isinstance(args, list) or str(args[0]) != sys.executable:
        return False
    words = [str(word) for word in args[3 if args[1:3] == IGNORE_WARNINGS else 1 :]]
    if len(words) < 1 or (words[0].startswith("-") and (words[0] not in ("-c", "-m") or len(words) < 2)):
        return False
    return read_at_start(env) == AT_START and not start_code(env.get("PYTHONPATH", ""))


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`."""

    child: Child | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        names = (
            "close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite c2pread c2pwrite "
            "errread errwrite restore_signals gid gids uid umask start_new_session process_group"
        )
        given = dict(zip(names.split(), more, strict=True))
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in (given["env"] or os.environ).items()}
        unlike = executable or preexec_fn or given["pass_fds"] or given["shell"] or not given["close_fds"]
        if unlike or not can_be_forked(args, env):
            super()._execute_child(args, executable, preexec_fn, *more)
            return
        cwd = os.fspath(given["cwd"]) if given["cwd"] is not None else "."
        folder = os.open(cwd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        streams = [
            ours if ours >= 0 else standard
            for standard, ours in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
        ]
        try:
            self.child = Child(
                "tests.kit.as_python:main",
                what="a Python of a test",
                arguments={
                    "words": [str(word) for word in args[1:]],
                    "environment": env,
                    "import_path": import_path(),
                },
                shared=[folder, *streams],
                modules=MODULES,
            )
        finally:
            os.close(folder)
        self.pid = self.child.pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names.split()[7:13]))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self.child is None:
            return super()._try_wait(wait_flags)
        limit_s = 0.0 if wait_flags & os.WNOHANG else 3600.0
        while not self.child.wait(limit_s):
            if wait_flags & os.WNOHANG:
                return 0, 0
        assert self.child.exit is not None
        code = self.child.exit.code
        self.child.close()
        return self.pid, 9 if code is None else code << 8 if code >= 0 else -code

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self.child is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(
    *popenargs: Any,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **named: Any,
) -> CompletedProcess[Any]:
    """As `subprocess.run`."""
    if input is not None:
        named["stdin"] = PIPE
    if capture_output:
        named["stdout"] = named["stderr"] = PIPE
    with Popen(*popenargs, **named) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise CalledProcessError(process.returncode, process.args, output=out, stderr=err)
    return CompletedProcess(process.args, process.returncode, out, err)
