"""The `stoker` command's entry, and the guardian of the process that encodes.

Commands that encode run in a child of this process. A child that crashes while it encodes is started
again. So is one that makes no progress within the encoder's timeout (also with the interpreter's lock held,
or stopped). It resumes from the committed shards. An encode batch that fails `MAX_TRIES` times ends that: the
last stage and stack are printed. What happens outside encoding is passed through as it is, and a command
that was asked to end is never started again.

So do commands that read and write much. When a call on a file does not come back for `STORAGE_S`, the child
is ended, or left behind where not even a kill ends it, and the command fails.

This module imports nothing heavy: the guardian costs a tenth of a second and a few megabytes.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stoker.cli.command import (
    INTERRUPTED,
    error_json,
    error_lines,
    keep_standard_streams,
    name_of_rank,
    printing,
)
from stoker.errors import ConfigError, Interrupted, ResourceError
from stoker.runtime.processes.child import SpawnedProcess, oom_kills
from stoker.runtime.processes.heartbeat import Heartbeat, HeartbeatPage
from stoker.runtime.signals import GUARD_VARIABLE, TOGETHER_S, Lifeline, started_ns

# ----------------------------------------------------------------------------------------------------------
# Which file a process is waiting for, seen from outside, whatever holds its interpreter's lock.
#
# A call on a file whose storage does not answer never comes back: not when it is asked to, and not when a
# deadline passes in another thread. The kernel says which call a thread is in (`/proc/PID/syscall`), and
# how often it has waited (`/proc/PID/status`): both unchanged, it has got no answer since.


# Calls by number: what names the file is the descriptor, the first or the second argument. Source: the
# kernel's syscall_64.tbl, and asm-generic/unistd.h. Calls that may wait for people are left out.
_X86_64: Mapping[str, str] = {
    "close": "3",
    "fd": "0 1 5 17 18 19 20 40 74 75 77 78 91 138 217 221 285 295 296 306 326 327 328",
    "first": "2 4 6 21 76 80 82 83 84 85 86 87 88 89 90 92 132 137",
    "second": "257 258 262 263 264 265 266 267 268 269 280 316 332 437 439",
}
_AARCH64: Mapping[str, str] = {
    "close": "57",
    "fd": "44 46 47 52 61 63 64 65 66 67 68 69 70 71 80 82 83 223 267 285 286 287",
    "first": "43 45 49",
    "second": "34 35 36 37 38 48 53 56 78 79 88 276 291 437 439",
}
_KINDS: Mapping[str, Mapping[int, str]] = {
    machine: {int(number): kind for kind, numbers in calls.items() for number in numbers.split()}
    for machine, calls in (("x86_64", _X86_64), ("aarch64", _AARCH64))
}
_PAGE_FAULT = -1
"""Stands in place of a number where a thread waits for a page of a mapped file."""
_PATH_BYTES = 4096
_STOPPED = ("T", "t")
"""States of a process that a signal or a debugger holds."""


@dataclass(frozen=True, slots=True)
class FileCall:
    """One wait of a process's main thread for a file."""

    text: str
    """Call, arguments and stack, as the kernel writes them."""
    waits: int
    """How often the thread had waited before."""


def file_call(pid: int) -> FileCall | None:
    """Return the call on a file that the main thread of a process is in; None: no such call is known."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:  # noqa: PTH123  pathlib costs 10 ms
            text = file.read().strip()
        kind = _kind(text)
        if kind is None or (kind == "fd" and not _is_file(_name_of(pid, text))):
            return None
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            status = dict(line.split(":", 1) for line in file if ":" in line)
        if status["State"].split()[0] in _STOPPED:
            return None
        waits = int(status["voluntary_ctxt_switches"])
    except (OSError, ValueError, LookupError):  # it ended, or this system does not say
        return None
    return FileCall(text, waits)


def file_of(pid: int, call: FileCall) -> str:
    """Return the file that a call is about, for messages."""
    with suppress(OSError, ValueError):
        if name := _name_of(pid, call.text):
            return name
    return "a file"


def _kind(text: str) -> str | None:
    number = text.partition(" ")[0]
    if number == "running":
        return None
    return "page" if int(number) == _PAGE_FAULT else _KINDS.get(os.uname().machine, {}).get(int(number))


def _name_of(pid: int, text: str) -> str:
    kind = _kind(text)
    if kind in (None, "page"):
        return ""
    first, second = (int(word, 16) for word in text.split()[1:3])
    path = b""
    if kind in ("first", "second"):
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(first if kind == "first" else second)
            path = memory.read(_PATH_BYTES).partition(b"\0")[0]
    if kind == "close":  # the descriptor is closed already
        return ""
    return os.fsdecode(path) or os.readlink(f"/proc/{pid}/fd/{first}")  # noqa: PTH115  pathlib costs 10 ms


def _is_file(name: str) -> bool:
    """Return True unless it is a pipe, socket or terminal, which wait for people or other programs."""
    return name.startswith("/") and not name.startswith(("/dev/", "/memfd:"))


GUARDED = frozenset({
    "demo", "precompute", "train", "compat precompute", "compat precompute_latent_cache", "compat train",
})  # fmt: skip
"""Commands that may encode."""
WATCHED = frozenset({
    *(f"cache {name}" for name in ("adopt", "compact", "export", "gc", "get", "import-pt", "ls", "pull")),
    "cache push", "cache show", "cache verify", "cache why",
    "data inspect", "data stage", "init", "plan", "validate", "compat validate", "compat validate_config",
})  # fmt: skip
"""Others that wait for storage."""
STORAGE_S = 600.0
"""How long one call on a file may get no answer, as long as `runtime.threads` waits for one item."""
MAX_TRIES = 3
"""Failures at one group after which the guardian gives up."""
MAX_STARTS = 20
"""Starts after which it gives up, whichever groups failed."""
LOOK_S = 0.25
DUMP_S = 0.5
"""How long a child past its deadline gets to write its stacks."""
GRACE_S = 5.0
"""How long a killed child may take to vanish; one stuck in the kernel is left behind."""
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that ask for an end, as far as they are not ignored (`nohup`)."""
SI_KERNEL = 0x80
"""`si_code` of a signal that no process sent (Linux, `siginfo.h`)."""
EXIT_STALLED = 5
EXIT_FAILED = 1
STACK_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """How one child ended."""

    code: int
    """Exit code; negative: the signal."""
    beat: Heartbeat
    """Its last beat."""
    output: str
    """Its standard output, which is held back with `--json`: the answer is that of the last child."""
    stack: str
    """Its output on a crash, or when asked for its stacks."""
    overdue: bool
    """It was killed past its deadline."""
    memory: bool
    """The kernel killed for memory meanwhile."""
    unanswered: str
    """The file whose storage did not answer, so that it was killed; else empty."""
    asked: bool
    """A signal had asked for it."""

    @property
    def while_encoding(self) -> bool:
        """True if starting it again is safe and may help."""
        inside = (self.beat.limit_s > 0 and self.beat.stage != "end") or self.beat.stage == "lost"
        return (
            inside and not self.asked and not self.unanswered and (self.code < 0 or self.beat.stage == "lost")
        )

    def describe(self) -> str:
        """Return it in words, with stage and samples."""
        where = "between two groups" if self.beat.number < 0 else f"at the group of sample {self.beat.number}"
        if self.beat.stage == "start":
            trying = "while the encoder was tried or brought to its device"
            where = trying if self.beat.limit_s else "before encoding"
        if self.unanswered:
            return f"has waited {STORAGE_S:g} s for an answer from the storage of {self.unanswered}"
        if self.overdue:
            return f'made no progress for {self.beat.limit_s:g} s in stage "{self.beat.stage}" {where}'
        if self.beat.stage == "lost":
            return f"lost its device {where}"
        if self.code >= 0:
            return f'ended with exit code {self.code} in stage "{self.beat.stage}" {where}'
        name = signal.Signals(-self.code).name
        memory = ", and the memory cgroup counts an out-of-memory kill" if self.memory else ""
        return f'was killed by {name} in stage "{self.beat.stage}" {where}{memory}'


def main() -> None:
    """Run the `stoker` command."""
    keep_standard_streams()
    words = sys.argv[1:]
    linux = sys.platform.startswith("linux")
    guarded = GUARDED | WATCHED if linux else GUARDED
    name = " ".join(words[: 1 + (words[:1] in (["cache"], ["data"], ["compat"]))])
    if name not in guarded or {"-h", "--help"} & {*words} or GUARD_VARIABLE in os.environ:
        from stoker.cli.main import main as command

        command()
        return
    if not linux:
        needed = f"`stoker {name}` needs Linux (memfd, pidfd), and this is {sys.platform}"
        sys.exit(_fail(needed, ConfigError.exit_code, words, "Run it there"))
    sys.exit(guard(words))


def guard(words: Sequence[str]) -> int:
    """Run a command in a child, again where that helps; its exit code."""
    watched = {signal.SIGCHLD, *(n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN)}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # the child unblocks its own
    failed, starts = Counter[int](), 0
    notes_fd: int | None = None
    while True:
        try:
            notes_fd = notes_fd or os.memfd_create("stoker-notes", os.MFD_CLOEXEC)
            child = _GuardedChild(words, watched, notes_fd)
        except OSError as error:
            fact = f"the command's process cannot be started: {error}"
            return _fail(fact, ResourceError.exit_code, words, _not_started(error))
        end = child.run()
        if not end.while_encoding:
            return _passed_on(end, words)
        place, starts = end.beat.number, starts + 1
        if place < 0 and end.beat.done:  # between groups, but not between those of the last time
            failed[place] = 0
        failed[place] += 1
        if failed[place] >= MAX_TRIES or starts >= MAX_STARTS:
            break
        _say(f"the encoding process {end.describe()}. Starting it again; what is stored stays")
    stack = f"\nIts last stacks:\n{end.stack[-STACK_CHARS:]}" if end.stack else ""
    fact = f"the encoding process {end.describe()}: failure {failed[place]} there, {starts} in all"
    hint = f"What is stored stays, and the same command resumes once the cause is fixed{stack}"
    return _fail(fact, EXIT_STALLED if end.overdue else EXIT_FAILED, words, hint)


def _not_started(error: OSError) -> str:
    """Return what to do about it."""
    hints = {
        errno.EMFILE: "Allow more open files (ulimit -n), then run this again",
        errno.ENFILE: "The machine has no open file left: end other programs, then run this again",
        errno.EAGAIN: "Allow more processes (ulimit -u) or end some, then run this again",
        errno.ENOMEM: "Free memory, then run this again",
        errno.EACCES: f"Check that {sys.executable} may be executed",
        errno.ENOENT: f"Check that {sys.executable} is there",
    }
    return hints.get(error.errno or 0, "Correct that, then run this again")


def _passed_on(end: ChildEnd, words: Sequence[str]) -> int:
    if end.code >= 0:
        return _answer(end.output, end.code)
    if end.unanswered:
        hint = "See what is mounted there, then run the same command again: what is stored stays"
        return _fail(f"the command {end.describe()}", EXIT_STALLED, words, hint)
    if end.asked:
        return _fail(INTERRUPTED, Interrupted.exit_code, words)
    return _fail(f"the command {end.describe()}", EXIT_FAILED, words, "The same command resumes")


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk below a log ends no run
        print(name_of_rank() + text, file=sys.stderr, flush=True)  # noqa: T201  the command line's own line


def _fail(fact: str, code: int, words: Sequence[str], hint: str = "") -> int:
    if code == Interrupted.exit_code:
        _say(fact)
    else:
        for line in error_lines(fact, hint):
            _say(line)
    report = json.dumps(error_json(fact, hint, code)) + "\n"
    return _answer(report if "--json" in words else "", code)


def _answer(text: str, code: int) -> int:
    """Put out what the command answers; the exit code."""
    if not text or name_of_rank():  # even that may fail on a full disk
        return code
    try:
        with printing(sys.stdout):
            sys.stdout.write(text)
    except BrokenPipeError:
        return EXIT_FAILED
    except ResourceError as error:
        _say(str(error))
        return error.exit_code
    return code


class _GuardedChild:
    """One run of the command."""

    def __init__(self, words: Sequence[str], watched: set[signal.Signals], notes_fd: int) -> None:
        self._watched = watched
        self._page = HeartbeatPage.create()
        self._stack_fd = os.memfd_create("stoker-stack", os.MFD_CLOEXEC)
        lifeline = Lifeline(
            page_fd=self._page.fd,
            stack_fd=self._stack_fd,
            notes_fd=notes_fd,
            parent=os.getpid(),
            started_ns=started_ns(),
        )
        self._oom_kills = oom_kills()
        self._output_fd = os.memfd_create("stoker-output", os.MFD_CLOEXEC) if "--json" in words else None
        # Not a `runtime.processes.Child`: that is in a session of its own, without the terminal (Ctrl-C, job
        # control, the live screen) and without standard input, ends by SIGKILL with its owner and not in
        # order, and costs the guardian imports that take longer than all of its own work.
        self._process = SpawnedProcess(
            [sys.executable, "-P", "-m", "stoker.cli.main", *words],
            stdout=self._output_fd,
            pass_fds=(self._page.fd, self._stack_fd, notes_fd),
            env={**os.environ, GUARD_VARIABLE: lifeline.to_text()},
        )
        self._overdue = False
        self._call: FileCall | None = None
        self._call_since = 0.0
        self._unanswered = ""
        self._asked: list[float] = []

    def run(self) -> ChildEnd:
        """Wait for its end, and bring it about when it is overdue."""
        try:
            self._watch()
            code, beat = self._process.code(), self._page.look()
            if self._overdue and beat.stage == "end":
                code = beat.number  # its work was done and its answer given
            return ChildEnd(
                code=-signal.SIGKILL if code is None else code,
                beat=beat,
                output=_text(self._output_fd) if self._output_fd is not None else "",
                stack=_text(self._stack_fd).partition("Extension modules:")[0].strip(),
                overdue=self._overdue,
                memory=oom_kills() > self._oom_kills,
                unanswered=self._unanswered,
                asked=bool(self._asked) or not ENDING.isdisjoint(signal.sigpending()),
            )
        finally:
            self._page.close()
            os.close(self._stack_fd)
            self._process.close()
            if self._output_fd is not None:
                os.close(self._output_fd)

    def _watch(self) -> None:
        while not self._process.poll(0):
            self._pass_on(signal.sigtimedwait(self._watched, LOOK_S))
            if len(self._asked) > 1 and time.monotonic() - self._asked[1] > GRACE_S:
                self._kill()  # no handler of its own runs while C code holds the interpreter's lock
                return
            if self._storage_hangs():
                self._kill()
                return
            beat = self._page.look()
            if beat.limit_s and time.monotonic() - beat.time_ns / 1e9 > beat.limit_s:
                # Its handler writes the stacks without the interpreter's help.
                self._process.signal(signal.SIGUSR1)
                if not self._process.poll(DUMP_S) and self._page.look().time_ns == beat.time_ns:
                    self._kill()
                    return

    def _storage_hangs(self) -> bool:
        """Return True if the child has been waiting too long for its storage."""
        call, now = file_call(self._process.pid), time.monotonic()
        if call is None or call != self._call:
            self._call, self._call_since = call, now
        elif now - self._call_since > STORAGE_S:
            self._unanswered = file_of(self._process.pid, call)
        return bool(self._unanswered)

    def _pass_on(self, info: signal.struct_siginfo | None) -> None:
        """Hand on what was sent to us alone; Ctrl-C on a terminal reaches the child without us."""
        if info is None or info.si_signo not in ENDING:
            return
        now = time.monotonic()
        if not self._asked or now - self._asked[-1] > TOGETHER_S:
            self._asked.append(now)
        if info.si_code != SI_KERNEL:
            self._process.signal(signal.Signals(info.si_signo))

    def _kill(self) -> None:
        self._overdue = True
        self._process.signal(signal.SIGKILL)
        if not self._process.poll(GRACE_S):
            _say(f"process {self._process.pid} cannot be ended; left behind")


def _text(fd: int) -> str:
    """Return all of an anonymous file."""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


if __name__ == "__main__":
    main()
