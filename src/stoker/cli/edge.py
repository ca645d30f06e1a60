"""What happens at the edge of the process: streams, errors, exit codes, signals.

Results go to standard output, everything else to standard error. With `--json` standard output carries
exactly one JSON object, also when the command fails; whatever a library prints meanwhile is sent to
standard error. An error that Stoker raised on purpose is one line; its class decides the exit code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar, cast

import typer
from rich.console import Console

from stoker.errors import Interrupted, StokerError

if TYPE_CHECKING:
    from stoker.schema import Json

WIDE = 160
"""Columns when standard output is not a terminal: tables in a file or a pipe are never cut."""


class Result(Protocol):
    """What a pipeline function returns."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        ...


R = TypeVar("R", bound=Result)


class Edge:
    """Where one command's output goes."""

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json = as_json
        self.debug = debug
        self._stdout: TextIO = sys.stdout
        self.notes = console(sys.stderr)

    def show(self, result: R, render: Callable[[R, Console], None]) -> None:
        """Print a result: one JSON object, or what `render` makes of it."""
        if self.as_json:
            self.write_json(result.to_json())
        else:
            render(result, console(self._stdout))

    def note(self, line: str) -> None:
        """One line on standard error."""
        typer.echo(line, err=True)

    def write_json(self, data: dict[str, Json]) -> None:
        """The one JSON object; NaN and infinities become null, since JSON has neither."""
        self._stdout.write(json.dumps(finite(data), allow_nan=False) + "\n")
        self._stdout.flush()

    def fail(self, message: str, exit_code: int) -> typer.Exit:
        """Report a failure; the caller raises what comes back."""
        self.note(message.strip())
        if self.as_json:
            self.write_json({"error": message, "exit_code": exit_code})
        return typer.Exit(exit_code)


@contextlib.contextmanager
def edge(*, as_json: bool, debug: bool) -> Generator[Edge]:
    """Run one command: streams set, errors turned into one line and an exit code."""
    out = Edge(as_json=as_json, debug=debug)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(_log_lines(out))
        try:
            yield out
        except StokerError as error:
            if debug:
                traceback.print_exc()
            raise out.fail(str(error), error.exit_code) from None
        except KeyboardInterrupt:
            raise out.fail("interrupted; the same command resumes", Interrupted.exit_code) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 (the process edge: what nobody foresaw is one line too)
            if debug:
                traceback.print_exc()
            line = f"unexpected {type(error).__name__}: {error}. --debug shows where; please report it"
            raise out.fail(line, StokerError.exit_code) from None


@contextlib.contextmanager
def _log_lines(out: Edge) -> Generator[None]:
    """Show what the package logs, and its warnings, as plain lines on standard error."""

    def show(message: Warning | str, *_rest: object, **_more: object) -> None:
        out.note(str(message))

    logger = logging.getLogger("stoker")
    handler = _Lines(out)
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


class _Lines(logging.Handler):
    """Each line once: train and val are built from the same files and would say the same."""

    def __init__(self, out: Edge) -> None:
        super().__init__()
        self._out = out
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            self._out.note(line)


def console(stream: TextIO) -> Console:
    """A console that writes to `stream`; colours only on a terminal and without NO_COLOR."""
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE)


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


def stop_on_sigterm() -> None:
    """Make SIGTERM end the process as Ctrl-C does: work is sealed, exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
