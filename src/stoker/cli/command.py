"""What surrounds one command: streams, errors, exit codes, signals.

Results go to standard output, everything else to standard error. With `--json` standard output carries
exactly one JSON object, also when the command fails or was typed wrong; whatever a library prints meanwhile
is sent to standard error. An error that Stoker raised on purpose is one line; its class decides the exit
code. A remark that cannot be written (a full disk under a log) ends no run; a result that cannot does.
Of several ranks rank 0 speaks; the others say what went wrong with them, their number first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO, TypeVar, cast

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.flags import Debug, Json, with_parameters
from stoker.distributed.environment import RankEnvironment, find_rank_environment
from stoker.errors import ConfigError, Interrupted, ResourceError, StokerError
from stoker.runtime.disk import FULL_ERRNOS, READ_ONLY_ERRNOS
from stoker.runtime.guard import EXIT_S, say_end
from stoker.runtime.threads import start_thread

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.run.context import Run
    from stoker.schema import Json as JsonValue


# ----------------------------------------------------------------------------------------------------------
# The ranks of a command that `torchrun` started; the launcher's environment is read here alone.


def own_environment() -> RankEnvironment | None:
    """Return what a launcher set for this process; None: one process, or the variables make no sense."""
    try:
        return find_rank_environment(os.environ)
    except ConfigError:
        return None  # said by `joined`, where it matters


def name_of_rank() -> str:
    """Return how lines of this process begin: empty for rank 0, which speaks for the run."""
    environment = own_environment()
    return "" if environment is None or environment.rank == 0 else f"rank {environment.rank}: "


@contextmanager
def joined(config: Config) -> Generator[Run]:
    """The run of a command, with the ranks that do it together.

    Raises:
        ConfigError: The environment speaks of several ranks and makes no sense.
        StalledError: The meeting point of the ranks is not there.
    """
    environment = find_rank_environment(os.environ)
    from stoker.run.context import Run

    if environment is None:
        yield Run(config)
        return
    from stoker.distributed.group import RankGroup, ignore_sigterm

    with RankGroup(environment, timeout_s=config.training.rank_deadline) as ranks:
        try:
            yield Run(config, ranks=ranks)
        except BaseException:
            ignore_sigterm()  # it ends now, and its error must not become an interrupt
            raise


def refuse_ranks(command: str) -> None:
    """Refuse to do `command` once per rank.

    Raises:
        ConfigError: This is one of several ranks.
    """
    environment = find_rank_environment(os.environ)
    if environment is not None:
        raise ConfigError(
            f"`stoker {command}` runs in one process, and this is rank {environment.rank} of "
            f"{environment.world_size}. "
            "Run it without torchrun; train and precompute are made for several"
        )


# ----------------------------------------------------------------------------------------------------------
# The standard streams, when they are closed, full or no longer read.


INTERRUPTED = "interrupted; the same command resumes"
"""What a command says that a signal ended."""


def keep_standard_streams() -> None:
    """Point closed standard streams at nothing, or the next file opened (a shard) would be one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  a descriptor, for the whole process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


@contextmanager
def printing(stream: TextIO) -> Generator[None]:
    """Write to `stream` and flush it; a reader that went away (`| head`) is left to the caller.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        ResourceError: It cannot be written. After either, what is written goes nowhere.
    """
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
        raise
    except OSError as error:
        _discard(stream)
        raise ResourceError(
            f"standard output cannot be written: {error.strerror}. Make room, or send the output elsewhere"
        ) from error


def _discard(stream: TextIO) -> None:
    """Point `stream` at nothing, or Python would fail again on the rest of its buffer at the very end."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


# ----------------------------------------------------------------------------------------------------------
# One command: its output, its errors, its exit code.


TELL_S = 10.0
"""Seconds between two lines about how far it is, where there is no terminal."""
WIDE = 100_000
"""Columns when standard output is not a terminal: a row of a table in a file or a pipe is one line."""
UsageError = cast("type[Exception]", typer.BadParameter.__base__)
"""What the parser raises on a command typed wrong; some versions of typer carry a copy of click inside."""


class Result(Protocol):
    """What a pipeline function returns."""

    def to_json(self) -> dict[str, JsonValue]:
        """Return the keys that scripts rely on."""
        ...


R = TypeVar("R", bound="Result | Mapping[str, Any]")


class CommandOutput:
    """Where one command's output goes."""

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json = as_json
        self.debug = debug
        self._rank = name_of_rank()
        self._stdout: TextIO = sys.stdout
        self.notes = console(sys.stderr, quiet=bool(self._rank), soft_wrap=False)

    def show(self, result: R, render: Callable[[R, Console], None], *, exit_code: int = 0) -> None:
        """Print a result as one JSON object, or as `render` makes it; end with `exit_code` unless it is 0."""
        if self._rank:
            pass
        elif self.as_json:
            self.write_json(dict(result) if isinstance(result, Mapping) else result.to_json())
        else:
            with printing(self._stdout):
                render(result, console(self._stdout))
        if exit_code:
            raise typer.Exit(exit_code)

    def note(self, line: str) -> None:
        """Print one line on standard error; one that cannot be written is dropped."""
        if not self._rank:
            self.warn(line)

    def warn(self, line: str) -> None:
        """One line that every rank says."""
        with contextlib.suppress(OSError):
            typer.echo(self._rank + line, err=True)

    def write(self, text: str) -> None:
        """Text on standard output as it is."""
        with printing(self._stdout):
            self._stdout.write(text)

    def write_json(self, data: dict[str, JsonValue]) -> None:
        """The one JSON object; NaN and infinities become null, since JSON has neither."""
        self.write(json.dumps(finite(data), allow_nan=False) + "\n")

    def fail(self, message: str, exit_code: int) -> typer.Exit:
        """Report a failure; the caller raises what comes back."""
        if exit_code == Interrupted.exit_code:  # of all ranks at once
            self.note(message.strip())
        else:
            self.warn(message.strip())
        if self.as_json and not self._rank:
            try:
                self.write_json({"error": message, "exit_code": exit_code})
            except ResourceError as error:
                self.note(str(error))
            except BrokenPipeError:
                pass  # the reader has seen enough
        return typer.Exit(exit_code)


class ProgressLine:
    """Says how far it is: a line that is kept up to date on a terminal, elsewhere one every ten seconds.

    A context, which takes the line away at its end.
    """

    def __init__(self, out: CommandOutput) -> None:
        self._say = out.note
        self._status = out.notes.status("") if out.notes.is_terminal else None
        self._told = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, *lines: str, last: bool = False) -> None:
        """Show where it stands; the `last` lines are said whenever they come."""
        if self._status is not None and not last:
            self._status.start()
            self._status.update(escape("  ".join(lines)))
        elif last or time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            for line in lines:
                self._say(line)


@contextmanager
def command_output(*, as_json: bool, debug: bool) -> Generator[CommandOutput]:
    """Run one command: streams set, errors turned into one line and an exit code."""
    out = CommandOutput(as_json=as_json, debug=debug)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(_log_lines(out))
        try:
            yield out
        except StokerError as error:
            if debug:
                traceback.print_exc()
            raise out.fail(_as_typed(error), error.exit_code) from None
        except KeyboardInterrupt as error:
            said = str(error) if isinstance(error, Interrupted) else INTERRUPTED
            raise out.fail(said, Interrupted.exit_code) from None
        except (typer.Exit, BrokenPipeError, UsageError):
            raise
        except Exception as error:  # noqa: BLE001 (the process edge: an unforeseen error is one line too)
            if debug:
                traceback.print_exc()
            raise out.fail(_unforeseen(error), StokerError.exit_code) from None


def cli_command(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the flags `--json` and `--debug`, from which its first parameter is made."""

    @wraps(command)
    def run(*args: Any, as_json: bool = False, debug: bool = False, **given: Any) -> None:
        with command_output(as_json=as_json, debug=debug) as out:
            command(out, *args, **given)

    own = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("as_json", Json), ("debug", Debug))
    ]
    return with_parameters(run, command, own, without=next(iter(signature(command).parameters)))


def _as_typed(error: StokerError) -> str:
    """Return the message in words that can be typed: arguments of the library are settings there."""
    if not error.arguments:
        return str(error)
    from stoker.config.names import in_settings  # costs half a second that others need not pay

    return in_settings(error)


def _unforeseen(error: Exception) -> str:
    """Return one line for an error of no class of ours: about a file, or else a bug."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. {_advice(error)}; --debug shows where it happened"
    return f"unexpected {type(error).__name__}: {error}. --debug shows where; please report it"


def _advice(error: OSError) -> str:
    if error.errno in READ_ONLY_ERRNOS:
        return "Change who may use it, or name another place"
    if error.errno in FULL_ERRNOS:
        return "Free space there, then run this again"
    return "Correct that, then run this again"


@contextmanager
def _log_lines(out: CommandOutput) -> Generator[None]:
    """Show what the package logs, and its warnings, as plain lines on standard error."""

    def show(message: Warning | str, *_rest: object, **_more: object) -> None:
        out.note(str(message))

    logger = logging.getLogger("stoker")
    handler = _LogHandler(out)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if out.debug else logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _LogHandler(logging.Handler):
    """Each line once: train and val are built from the same files and would say the same."""

    def __init__(self, out: CommandOutput) -> None:
        super().__init__()
        self._out = out
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            say = self._out.warn if record.levelno >= logging.WARNING else self._out.note
            say(line)


def console(stream: TextIO, *, quiet: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console that writes to `stream`; colours and bold only on a terminal and without NO_COLOR.

    It breaks no line, so that a path can be copied; `soft_wrap=False` for what is drawn again.
    """
    return Console(
        file=stream,
        highlight=False,
        quiet=quiet,
        soft_wrap=soft_wrap,
        width=None if stream.isatty() else WIDE,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


def finite(data: Any) -> Any:
    """JSON in which numbers that are not finite are null.

    >>> finite({"a": [1.5, float("nan")], "b": float("inf")})
    {'a': [1.5, None], 'b': None}
    """
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in cast("dict[Any, Any]", data).items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in cast("list[Any]", data)]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def run(app: typer.Typer, words: Sequence[str]) -> NoReturn:
    """Run the command that `words` spell, and end the process with its exit code."""
    keep_standard_streams()
    out = CommandOutput(as_json="--json" in words, debug=False)
    try:
        with printing(sys.stdout):  # help and version; each command looks after its own result
            code = app([*words], prog_name="stoker", standalone_mode=False)
    except UsageError as raised:
        error: Any = raised
        code = error.exit_code
        if out.as_json:
            out.fail(error.format_message(), code)
        else:
            with contextlib.suppress(OSError):
                error.show()
    except typer.Abort:  # what the parser makes of a Ctrl-C that came outside a command
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        code = 1
    except ResourceError as error:
        out.note(str(error))
        code = error.exit_code
    say_end(code or 0)
    _end_in_time(code or 0)
    sys.exit(code)


def _end_in_time(code: int) -> None:
    """Leave behind what holds the interpreter's end up: it joins threads of libraries, and one may hang."""

    def wait() -> None:
        threading.main_thread().join()  # over as soon as the interpreter begins to end
        time.sleep(EXIT_S)
        os._exit(code)

    start_thread(wait, "stoker-end")


def stop_on_sigterm() -> None:
    """Make SIGTERM end the process as Ctrl-C does: work is committed, exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
