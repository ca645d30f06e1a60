"""Parts that commands share: streams, errors, exit codes, signals, flags, and a training run with its screen.

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
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    Protocol,
    TextIO,
    TypeVar,
    cast,
    get_type_hints,
)

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from stoker.distributed.ranks import RankEnvironment, find_rank_environment
from stoker.errors import (
    TROUBLESHOOTING,
    ConfigError,
    Interrupted,
    ResourceError,
    StalledError,
    StokerError,
    docs_url,
)
from stoker.runtime.disk import FULL_ERRNOS, READ_ONLY_ERRNOS
from stoker.runtime.signals import EXIT_S, say_end, started_ns
from stoker.runtime.threads import start_thread
from stoker.units import TIMES, parse_bytes

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.run.context import Run
    from stoker.run.train import TrainResult
    from stoker.schema import Json as JsonValue


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, the rest on standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and log more.")]
# readable=False: the parser does not look at paths; the code that opens one says what is wrong
ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", readable=False, help="YAML file with the settings.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file, as training.epochs=3."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG | KEY=VALUE", help="The settings file, and what wins over it."),
]
CACHE_FOLDERS = (".stoker", "data/latent_cache")
"""Where caches are looked for when no folder is named."""


def cache_place(text: str) -> str:
    """Return the folder of a cache that was called by its name alone, as `stoker cache ls` lists it."""
    if "/" in text or Path(text).exists():
        return text
    return next((place for folder in CACHE_FOLDERS if Path(place := f"{folder}/{text}").is_dir()), text)


# text, not a Path, which would make one slash of a URL's two or three
CachePath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        parser=cache_place,
        help="A cache (its newest complete recipe) by name or folder, or one recipe's folder.",
    ),
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", readable=False, help="The settings file, as a flag.")
]
Splits = Annotated[
    list[str] | None, typer.Option(help="Splits to encode, as train val; default: what `train` needs.")
]
Manifest = Annotated[Path | None, typer.Option(help="Write a JSON report of the run here.")]
Stage = Annotated[
    str | None, typer.Option(help="One of the stages alone: operator, decoder, consistency; or all.")
]
Epochs = Annotated[int | None, typer.Option(help="training.epochs; with --stage the epochs of that stage.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeFlags:
    """Flags of `precompute` that are settings, as given; None where a flag is absent."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "workers": "precompute.workers", "device": "training.device",
        "overwrite": "precompute.overwrite", "limit": "data.limit",
        "compression": "precompute.compression", "named_devices": "precompute.devices",
        "retry_quarantined": "precompute.retry_quarantined", "engine": "precompute.engine",
        "address": "precompute.ray.address",
    }  # fmt: skip
    """The setting of each flag."""

    workers: Annotated[int | None, typer.Option(help="precompute.workers; 0 reads in this process.")] = None
    device: Annotated[str | None, typer.Option(help="training.device: auto, cpu or cuda[:i].")] = None
    limit: Annotated[int | None, typer.Option(help="data.limit: only the first samples of each split.")] = (
        None
    )
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Encode everything again into a clean folder.")
    ] = None
    compression: Annotated[
        str | None, typer.Option(metavar="none|zstd|lz4|auto", help="precompute.compression.")
    ] = None
    devices: Annotated[
        str | None, typer.Option(help="precompute.devices: an encoder on each, as cuda:0,cuda:1, or all.")
    ] = None
    retry_quarantined: Annotated[
        bool | None, typer.Option("--retry-quarantined", help="Try samples again that failed before.")
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="local|ray", help="precompute.engine: this machine, a Ray cluster, or a plugin's."
        ),
    ] = None
    address: Annotated[
        str | None, typer.Option(metavar="auto|HOST:PORT", help="precompute.ray.address; default: one here.")
    ] = None

    @property
    def named_devices(self) -> list[str] | None:
        """`devices`, which may be several in one word."""
        return None if self.devices is None else [self.devices]

    def settings(self, overrides: Sequence[str]) -> list[str]:
        """Return `overrides` with every given flag added as `key=value`."""
        given = {key: getattr(self, name) for name, key in self.KEYS.items()}
        return [*overrides, *settings_of(given)]


def settings_of(given: Mapping[str, object]) -> list[str]:
    """Return settings by name as `key=value`, without those that are None."""
    return [f"{key}={_text(value)}" for key, value in given.items() if value is not None]


def spread_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with every field of its parameter `flags`, a dataclass, as a parameter of its own.

    So a flag is stated once, with its name, type, default and help, and commands that share it agree.
    """
    kind = get_type_hints(command)["flags"]
    hints = get_type_hints(kind, include_extras=True)
    own = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(kind)
    ]

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        command(*args, flags=kind(**{one.name: given.pop(one.name) for one in own}), **given)

    return with_parameters(run, command, own, without="flags")


def with_parameters(
    run: Callable[..., None], command: Callable[..., None], own: Sequence[Parameter], *, without: str
) -> Callable[..., None]:
    """Return `run`, which the parser takes to have the parameters of `command`, one of them replaced."""
    shown = signature(command, eval_str=True)
    others = [one for one in shown.parameters.values() if one.name != without]
    by_kind = sorted([*others, *own], key=lambda one: one.kind)
    vars(run)["__signature__"] = shown.replace(parameters=by_kind)
    run.__annotations__ = {one.name: one.annotation for one in by_kind}
    return run


def _text(value: object) -> str:
    """Return a value as a setting has it; of several words a list."""
    if isinstance(value, list):
        return _list(cast("list[str]", value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(values: Sequence[str]) -> str:
    """Return task names as one value: alone, or as a list; `a,b` counts as two."""
    names = split_words(values)
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def tell_settings(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return paths and settings among `words`: what has a `=` is a setting, unless there is such a file."""
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    return [Path(word) for word in words if word not in settings], settings


def config_and_overrides(words: Sequence[str], config: Path | None = None) -> tuple[Path, list[str]]:
    """Tell the settings file from the settings in what was typed.

    Raises:
        ConfigError: No file, or more than one.
    """
    files, overrides = tell_settings(words)
    return one_config([*files, *([config] if config else [])]), overrides


def one_config(words: Sequence[Path]) -> Path:
    """Return the one file of settings among words that are not settings.

    Raises:
        ConfigError: No word, or several.
    """
    if len(words) == 1:
        return words[0]
    if not words:
        raise ConfigError(
            "no CONFIG file is named, and one is needed",
            hint="Name it, as stoker.yaml; `stoker init DATA` writes one",
        )
    found = ", ".join(map(str, words))
    lone = [str(word) for word in words if not word.exists() and "/" not in str(word)]
    like = next((word for word in lone if "." in word and not word.endswith((".yaml", ".yml"))), "")
    raise ConfigError(
        f"expected one CONFIG file, found {found}",
        hint=f"Name one of them. Settings are written key=value, as {like or 'training.epochs'}=3",
    )


SEVERAL = ("--tasks", "--splits")
"""Flags that take more than one value, each as its own word."""


class SeveralWords(TyperCommand):
    """A command that reads `--splits train val`: one flag, several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before each of its words, then parse as usual."""
        return super().parse_args(ctx, repeat_flags(args))


def repeat_flags(args: Sequence[str]) -> list[str]:
    """Put the flag before each of its words; a setting, a file or another flag ends them.

    >>> repeat_flags(["--splits", "train", "val", "c.yaml", "latent.dim=8"])
    ['--splits', 'train', '--splits', 'val', 'c.yaml', 'latent.dim=8']
    """
    out: list[str] = []
    flag = ""
    for place, arg in enumerate(args):
        named = arg.endswith((".yaml", ".yml")) or Path(arg).is_file()
        ends = arg.startswith("-") or "=" in arg or (named and args[place - 1] != flag)
        if flag and not ends and args[place - 1] != flag:
            out.append(flag)
        if ends:
            flag = arg if arg in SEVERAL else ""
        out.append(arg)
    return out


def split_words(values: Sequence[str]) -> list[str]:
    """Return words of repeated or comma-separated values.

    >>> split_words(["train,val", "test"])
    ['train', 'val', 'test']
    """
    return [word for value in values for word in value.split(",") if word]


# ----------------------------------------------------------------------------------------------------------
# Sizes, times and shares as people type them.


class BadValueError(typer.BadParameter):
    """A value on the command line is wrong; `hint` says what would be right."""

    def __init__(self, fact: str, hint: str) -> None:
        super().__init__(fact)
        self.hint = hint


def size(text: str) -> int:
    """Return bytes. A number without a unit is refused: who types 20 rarely means 20 bytes. 0 needs none.

    >>> size("20GB"), size("1.5 GiB"), size("4096B"), size("0")
    (20000000000, 1610612736, 4096, 0)
    """
    found = parse_bytes(text)
    if found is None:
        raise BadValueError(f"{text!r} is not a size", "Write a number with a unit, as 20GB or 512MiB")
    if found and text.strip()[-1].isdigit():
        hint = f"Write {text.strip()}GB, or {text.strip()}B for bytes"
        raise BadValueError(f"{text!r} has no unit", hint)
    return found


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("30d"), duration("12 h")
    (2592000.0, 43200.0)
    """
    number, unit = _split(text)
    if unit not in TIMES:
        raise BadValueError(f"{text!r} is not a time", "Write a number with a unit, as 30d, 12h or 90min")
    return number * TIMES[unit]


def share(text: str) -> float:
    """Return a fraction above 0 and at most 1.

    >>> share("5%"), share("0.05"), share("1")
    (0.05, 0.05, 1.0)
    """
    number, unit = _split(text)
    fraction = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 < fraction <= 1:
        raise BadValueError(f"{text!r} is not a share", "Write 5% or 0.05, more than 0 and at most all")
    return fraction


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    return (float(match[1]), match[2].lower()) if match else (0.0, "?")


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
            f"{environment.world_size}",
            hint="Run it without torchrun; train and precompute are made for several",
        )


# ----------------------------------------------------------------------------------------------------------
# The standard streams, when they are closed, full or no longer read.


INTERRUPTED = "interrupted; the same command resumes"
"""Message of a command that a signal ended."""


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
        BrokenPipeError: The reader has closed the pipe.
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
            f"standard output cannot be written: {error.strerror}",
            hint="Make room, or send the output elsewhere",
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
_MISSING = tuple(kind for kind in typer.BadParameter.__subclasses__() if kind.__name__ == "MissingParameter")
"""Error of the parser for a command typed wrong; some versions of typer carry a copy of click."""


class Result(Protocol):
    """Result of a function of `stoker.run`."""

    def to_json(self) -> dict[str, JsonValue]:
        """Return the keys that scripts rely on."""
        ...


R = TypeVar("R", bound="Result | Mapping[str, Any]")


class CommandOutput:
    """Where one command's output goes; `command_output` makes it."""

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json = as_json
        """True if one JSON object is to be printed."""
        self.debug = debug
        """True if tracebacks are shown."""
        self._rank = name_of_rank()
        self._stdout: TextIO = sys.stdout
        self.notes = console(sys.stderr, quiet=bool(self._rank), soft_wrap=False)

    def show(self, result: R, render: Callable[[R, Console], None], *, exit_code: int = 0) -> None:
        """Print a result as one JSON object, or as `render` makes it; end with `exit_code` unless it is 0.

        Args:
            result: A mapping, or an object with `to_json()`.
            render: Prints the result on the rich console that it is given.
            exit_code: Exit code of the command.
        """
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
        """Print one line on standard error; one that cannot be written is dropped.

        Args:
            line: The line.
        """
        if not self._rank:
            self.warn(line)

    def warn(self, line: str) -> None:
        """Print one line on standard error, on every rank.

        Args:
            line: The line.
        """
        with contextlib.suppress(OSError):
            if self._rank or not self.notes.is_terminal:
                typer.echo(self._rank + line, err=True)
            else:  # through the console: it moves a screen that is being drawn out of the way
                self.notes.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Write text to standard output as it is.

        Args:
            text: The text.
        """
        with printing(self._stdout):
            self._stdout.write(text)

    def write_json(self, data: dict[str, JsonValue]) -> None:
        """Write the one JSON object; NaN and infinities become null, since JSON has neither.

        Args:
            data: The object.
        """
        self.write(json.dumps(finite(data), allow_nan=False) + "\n")

    def confirm(self, question: str) -> None:
        """Ask before something is deleted, on a terminal; elsewhere refuse.

        Args:
            question: What is deleted, as a question.

        Raises:
            ConfigError: There is no terminal.
            typer.Exit: The answer is no.
        """
        if self.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError(f"{question} Standard input is not a terminal", hint="Add --yes to delete")
        try:
            agreed = typer.confirm(question, err=True)
        except typer.Abort:  # Ctrl-C, or the end of the input
            raise KeyboardInterrupt from None
        if not agreed:
            self.note("nothing was deleted")
            raise typer.Exit

    def fail(self, fact: str, exit_code: int, hint: str = "", docs: str = "") -> typer.Exit:
        """Report a failure, and return what the caller raises.

        Args:
            fact: What is wrong.
            exit_code: Exit code of the command.
            hint: What to do about it.
            docs: URL of a page about it.
        """
        if exit_code == Interrupted.exit_code:  # of all ranks at once
            self.note(fact.strip())
        else:
            for line in error_lines(fact, hint, docs):
                self.warn(line)
        if self.as_json and not self._rank:
            try:
                self.write_json(error_json(fact, hint, exit_code, docs))
            except ResourceError as error:
                self.note(str(error))
            except BrokenPipeError:
                pass  # the reader has seen enough
        return typer.Exit(exit_code)


def error_lines(fact: str, hint: str, docs: str = "") -> list[str]:
    """Return an error as people read it: its fact, then a hint what to do.

    On a terminal they are in color, and `error:` is a link to the page about the error.
    """
    plain = os.environ.get("NO_COLOR") or not sys.stderr.isatty()
    link = _LINK.format(docs or docs_url(TROUBLESHOOTING), _RED.format("error:"))
    names = ("error:", "hint:") if plain else (link, _CYAN.format("hint:"))
    return [f"{name} {text}" for name, text in zip(names, (fact, hint), strict=True) if text]


def error_json(fact: str, hint: str, exit_code: int, docs: str = "") -> dict[str, JsonValue]:
    """Return an error as `--json` shows it; `error` is the entire message, `docs` a URL."""
    error = f"{fact}. {hint}" if hint else fact
    page = docs or docs_url(TROUBLESHOOTING)
    return {"error": error, "fact": fact, "hint": hint, "exit_code": exit_code, "docs": page}


_LINK = "\x1b]8;;{}\x1b\\{}\x1b]8;;\x1b\\"  # OSC 8; a terminal that does not know it shows the text
_RED, _CYAN = "\x1b[1;31m{}\x1b[0m", "\x1b[1;36m{}\x1b[0m"


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
    """Yield where the output of one command goes; errors become one line and an exit code.

    Args:
        as_json: Print one JSON object on standard output, and all else on standard error.
        debug: Show tracebacks.
    """
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
            fact, hint = (_as_typed(StokerError(text)) for text in (error.problem.fact, error.problem.hint))
            raise out.fail(fact, error.exit_code, hint, error.docs) from None
        except KeyboardInterrupt as error:
            said = str(error) if isinstance(error, Interrupted) else INTERRUPTED
            raise out.fail(said, Interrupted.exit_code) from None
        except (typer.Exit, BrokenPipeError, UsageError):
            raise
        except Exception as error:  # noqa: BLE001 (the process edge: an unforeseen error is one line too)
            if debug:
                traceback.print_exc()
            told = _unforeseen(error)
            raise out.fail(told.fact, told.exit_code, told.hint) from None


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


def _unforeseen(error: Exception) -> StokerError:
    """Return what to say of an error of no class of ours: about a file, about memory, or else a bug."""
    if isinstance(error, OSError) and error.filename is not None:
        hint = f"{_advice(error)}; --debug shows where it happened"
        return StokerError(f"{error.filename}: {error.strerror}", hint=hint)
    if isinstance(error, MemoryError) or ("torch" in sys.modules and _is_out_of_memory(error)):
        return ResourceError(
            f"memory does not suffice: {str(error) or type(error).__name__}",
            hint="Lower batch sizes and workers, or raise the limits on memory (ulimit -v, that of a "
            "container); --debug shows where it happened",
        )
    return StokerError(
        f"unexpected {type(error).__name__}: {error}", hint="--debug shows where; please report it"
    )


def _is_out_of_memory(error: Exception) -> bool:
    from stoker.plan.resources import is_out_of_memory  # few commands need it

    return is_out_of_memory(error)


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
    """Return a console that writes to `stream`; colors and bold only on a terminal and without NO_COLOR.

    It breaks no line, so that a path can be copied; `soft_wrap=False` for what is drawn again.
    """
    return Console(
        file=stream,
        highlight=False,
        emoji=False,
        quiet=quiet,
        soft_wrap=soft_wrap,
        width=None if stream.isatty() else WIDE,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


def finite(data: Any) -> Any:
    """Return JSON in which numbers that are not finite are null.

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
        said = error.format_message().rstrip(".")
        if not said.startswith("Usage:"):
            fact, hint = _wrong_usage(error)
            out.fail(fact, code, hint)
        else:  # a group without a command, whose help it is
            with contextlib.suppress(OSError):
                error.show()
    except typer.Abort:  # what the parser makes of a Ctrl-C that came outside a command
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        code = 1
    except ResourceError as error:
        code = out.fail(error.fact, error.exit_code, error.hint, error.docs).exit_code
    say_end(code or 0)
    _end_in_time(code or 0)
    sys.exit(code)


_NOT_VALID = re.compile(r"Input should be (?P<expected>.+?)(?:, unable to .*)?")


def _wrong_usage(error: Any) -> tuple[str, str]:
    """Return fact and hint of what the parser refused."""
    path = error.ctx.command_path if error.ctx is not None else "stoker"
    takes = f"`{path} --help` shows what it takes"
    said = error.format_message().rstrip(".")
    option = getattr(error, "option_name", None)
    if option and said.startswith("No such option"):
        return f"No such option: {option}", f"{_option_hint(error, option)}{takes}"
    if isinstance(error, _MISSING):
        return said, f"{_arguments_in_words(error)}{takes}"
    refused = getattr(error.__cause__, "errors", list[Any])()
    match = _NOT_VALID.fullmatch(error.message.rstrip("."))
    if match and refused and error.param is not None:
        name = error.param.get_error_hint().strip("'")
        expected = (
            match["expected"].replace("valid integer", "whole number").replace("valid number", "number")
        )
        expected = expected if expected.startswith("a ") else f"a number {expected}"
        return f"{name} is {refused[0]['input']}", f"Expected {expected}. {takes}"
    fact, mean, near = said.partition(". Did you mean ")
    if mean:
        named = near.startswith("'stoker ") or not fact.startswith("No such command")
        return fact, "Did you mean " + (near if named else near.replace("'", f"'{path} ", 1))
    hint = getattr(error, "hint", "")
    return fact, f"{hint}. {takes}" if hint else takes


def _arguments_in_words(error: Any) -> str:
    """Return what each argument of a command is, which its name alone may not say."""
    params = error.ctx.command.params if error.ctx is not None else []
    named = {
        str(param.metavar or param.name.upper()): str(param.help).rstrip(".")
        for param in params
        if param.param_type_name == "argument" and getattr(param, "help", None)
    }
    return "".join(f"{name}: {help}. " for name, help in named.items())


def _option_hint(error: Any, option: str) -> str:
    """Return which option, or which setting, an unknown option probably meant."""
    kinds = [str(param.metavar or "") for param in error.ctx.command.params] if error.ctx is not None else []
    if any("KEY=VALUE" in kind for kind in kinds):
        from stoker.config.names import setting_of

        if option in ("--set", "--override", "-o"):
            return "Settings are written without a flag, as training.epochs=3. "
        if setting := setting_of().get(option.lstrip("-").replace("-", "_")):
            return f"It is a setting: write {setting}=VALUE. "
    near = get_close_matches(option, error.possibilities or [], n=1, cutoff=0.75)
    return f"Did you mean {near[0]}? " if near else ""


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


# ----------------------------------------------------------------------------------------------------------
# What commands that train share: the run with its screen, and the end of one that waited too long.


def load_settings(
    out: CommandOutput, path: Path, overrides: Sequence[str], *, earlier: bool = False
) -> Config:
    """Return the settings of a file and a command line; note those that no longer have an effect."""
    from stoker.config import load_config

    settings = load_config(path, overrides, earlier=earlier)
    for note in settings.notes:
        out.note(note)
    return settings


def run_training(
    out: CommandOutput, settings: Config, *, live: bool | None = None, stage: str | None = None
) -> None:
    """Encode what is missing, train and print the result; `live` None: a screen on a terminal alone."""
    from stoker.cli import output
    from stoker.cli.output import watching
    from stoker.run.train import train_config

    drawn = out.notes.is_terminal if live is None else live
    started = started_ns() / 1e9
    with joined(settings) as run, watching(out.notes, out.note, live=drawn) as watch:
        listeners = (watch, output.events(out.note))

        def listen(kind: str, facts: Mapping[str, Any]) -> None:
            for listener in listeners:
                listener(kind, facts)

        result = train_config(run, started=started, on_event=listen, stage=stage)
    out.show(result, output.train)
    end_on_stall(out, result)


def end_on_stall(out: CommandOutput, result: TrainResult) -> None:
    """End with exit code 5 where a run waited for data longer than it was allowed to."""
    if result.over_budget is not None:
        out.note(result.over_budget)
        raise typer.Exit(StalledError.exit_code)
