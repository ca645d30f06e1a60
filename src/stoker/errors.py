"""Every error Stoker raises on purpose.

StokerError
├── ConfigError            a setting is unknown, malformed or contradicts another    (also ValueError)
├── SourceError            raw data is missing, unreadable or not as declared        (also ValueError)
│   ├── SplitError         the split asked for does not exist
│   ├── DecodeError        a file was read, but no sample can be made of its content
│   ├── TransferError      a file could not be fetched
│   │   └── DigestError    what was fetched is not what was declared
│   └── PathRefusedError   a request names a path outside the folders it may read
├── EncoderError           an encoder does not fit the data, or failed
├── RecordError            one sample or record is not what its schema says          (also ValueError)
├── FormatError            a file is not a store, or not one this version reads      (also ValueError)
│   └── CorruptError       bytes do not match their checksum
├── IncompleteError        a cache lacks records that were asked for
│   └── MissingRecordError one record by number                                      (also KeyError)
├── UncountedError         a length is asked for that is not known yet               (also TypeError)
├── ReadOnlyError          a cache folder cannot be written                          (also OSError)
├── StaleStateError        a saved loader or training state belongs to something else
├── StalledError           a timeout passed
│   └── WorkerError        worker processes died or hung more often than allowed
├── DeviceError            a device cannot be used again in this process
├── ResourceError          memory, disk space or a device does not suffice
├── ServiceError           a service across the network refused, or made no sense
│   └── AccessError        a URL leads to nothing, or its credentials are missing or wrong
├── DivergedError          training met a NaN or an infinity
├── NotFoundError          the service knows no job, dataset or cache of that name   (also LookupError)
├── ConflictError          what was asked of a job does not fit the state it is in
├── LostAttemptError       an attempt at a job is over; what its worker says of it no longer counts
└── DegradedError          the service's database does not answer, or cannot be written
Interrupted                SIGINT or SIGTERM arrived; what was encoded is committed  (a KeyboardInterrupt)

Catch `StokerError` at the edge of a program. `Interrupted` is not an `Exception`, so code that catches and
retries every error lets it through, as any Ctrl-C. Errors of other libraries pass through unchanged,
except inside a reader, where all are wrapped with path, sample and stage.
`exit_code` is what the command line returns for a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

DOCS = "https://stoker-data.github.io/stoker/0.1"
"""Where the documentation of this minor version is published (docs/reference/versions.md)."""
TROUBLESHOOTING = "how-to/troubleshooting"
"""The page with a heading for each class of errors."""


def docs_url(page: str) -> str:
    """Return the URL of a page of the documentation, that of this version.

    Args:
        page: Its path below docs/ without the suffix, with an anchor if wanted: `how-to/sql`,
            `how-to/troubleshooting#splits`.

    >>> docs_url("how-to/sql")
    'https://stoker-data.github.io/stoker/0.1/how-to/sql.html'
    """
    path, mark, anchor = page.partition("#")
    return f"{DOCS}/{path}.html{mark}{anchor}"


_BEGIN, _PYTHON, _END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around an argument in the text of a message until its error takes it out. Unicode has these characters for
the inside of programs alone, so no path, query or error of a library has them."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a message names: on the command line it is a setting."""

    name: str
    """Of the setting, as far as it is known: `data.sql.table`, `table`; or an option, `--ragged`."""
    value: str | None
    """As `repr` writes it, or `...` for any; None: none is named."""
    python: str
    """The argument as Python calls it."""

    @property
    def marked(self) -> str:
        """As it is written in the text of a message."""
        given = "" if self.value is None else self.value
        return f"{_BEGIN}{self.name}={given}{_PYTHON}{self.python}{_END}"


def _parts(text: str) -> tuple[str | Argument, ...]:
    """Return a message's text, and the arguments that it names, in their order."""
    first, *others = text.split(_BEGIN)
    parts: list[str | Argument] = [first]
    for other in others:
        setting, begun, more = other.partition(_PYTHON)
        python, ended, rest = more.partition(_END)
        if begun and ended and _END not in setting and _PYTHON not in python:
            name, _, value = setting.partition("=")
            parts += [Argument(name, value or None, python), rest]
        else:
            parts.append(_BEGIN + other)
    return tuple(parts)


def arg(name: str, *value: object, call: str = "", setting: str = "") -> str:
    """Return `name=value` for the message of a `StokerError`; the command line shows the setting instead.

    Only what is written with this is translated. Whatever else a message holds arrives as it is.

    Args:
        name: Name of an argument. Its setting is the one that ends in `.name`, see `config/names.py`.
        value: Its value; left out: none is shown. `...` stands for any.
        call: In Python the argument is shown as one of this call: `Timeouts(lock_s=...)`.
        setting: Another setting, `data.join.columns`, or an option, `--ragged`.

    >>> print(ConfigError(f"no layout. Use {arg('preset', 'well')} or {arg('lock_s', ..., call='Timeouts')}"))
    no layout. Use preset='well' or Timeouts(lock_s=...)
    """
    given = "" if not value else "..." if value[0] is ... else repr(value[0])
    python = f"{call}({name}={given})" if call else f"{name}={given}"
    return Argument(setting or name, given or None, python).marked


class Problem(NamedTuple):
    """What is wrong, and what to do: one of several that an error names.

    >>> print(Problem("a.yaml: epochs is 0", hint="Expected at least 1"))
    a.yaml: epochs is 0. Expected at least 1
    """

    fact: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.fact}. {self.hint}" if self.hint else self.fact

    def within(self, place: str) -> Problem:
        """Return it with a place before the fact."""
        return Problem(f"{place}{self.fact}", self.hint)


class StokerError(Exception):
    """Root of the tree. Raised itself where no class of it says more. Exit code 1.

    Args:
        args: The fact first: what is wrong, with values. Arguments in it are written with `arg`.
        hint: What to do about it.

    Examples:
        >>> import stoker
        >>> try:
        ...     stoker.open_cache("nowhere")
        ... except stoker.StokerError as error:
        ...     print(error.fact)
        ...     print(error.hint)
        ...     print("exit code", error.exit_code)
        there is no cache at nowhere
        Check the path: `stoker cache ls` lists caches, `stoker precompute CONFIG` makes one
        exit code 4
    """

    exit_code: int = 1
    """What the `stoker` command exits with."""

    def __init__(self, *args: object, hint: str = "") -> None:
        self.problem = Problem(str(args[0]) if args else type(self).__name__, hint)
        """Fact and hint, their arguments marked: for an error that is raised again with more text."""
        if hint:
            args = (str(self.problem), *args[1:])
        super().__init__(*(_as_python(value) if isinstance(value, str) else value for value in args))

    @classmethod
    def of_all(cls, problems: Sequence[Problem]) -> Self:
        """Return the error for some problems, a line each. Of one alone, fact and hint stay apart."""
        if len(problems) == 1:
            return cls(problems[0].fact, hint=problems[0].hint)
        return cls("\n".join(map(str, problems)))

    @property
    def fact(self) -> str:
        """What is wrong, with values."""
        return _as_python(self.problem.fact)

    @property
    def hint(self) -> str:
        """What to do about it; it may be empty."""
        return _as_python(self.problem.hint)

    @property
    def docs(self) -> str:
        """URL of what the documentation says about errors of this class.

        Examples:
            >>> ConfigError("batch_size is 0").docs
            'https://stoker-data.github.io/stoker/0.1/how-to/troubleshooting.html#configerror'
        """
        public = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return docs_url(f"{TROUBLESHOOTING}#{public.__name__.lower()}")

    @property
    def marked(self) -> str:
        """The message with its arguments marked."""
        return str(self.problem)

    @property
    def parts(self) -> tuple[str | Argument, ...]:
        """The message: its text, and the arguments that it names."""
        return _parts(self.marked)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the message names."""
        return tuple(part for part in self.parts if isinstance(part, Argument))

    def to_json(self) -> dict[str, str]:
        """Return fact and hint as another process takes them: `kind(end["message"], hint=end["hint"])`."""
        return {"message": self.problem.fact, "hint": self.problem.hint}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy it with all that it knows, whatever its class takes to be made."""
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        """Return the message alone; `KeyError` would quote it."""
        return str(self.args[0]) if self.args else type(self).__name__


def _as_python(text: str) -> str:
    return "".join(part if isinstance(part, str) else part.python for part in _parts(text))


def _restored(kind: type[StokerError], args: tuple[object, ...], known: dict[str, object]) -> StokerError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(known)
    return error


class ConfigError(StokerError, ValueError):
    """Raised for a setting that is unknown, malformed or contradicts another. Exit code 3."""

    exit_code = 3


class SourceError(StokerError, ValueError):
    """Raised where raw data is missing, unreadable or not as declared. Exit code 3."""

    exit_code = 3


class SplitError(SourceError):
    """Raised for a split that does not exist, or that no sample is in. Exit code 3."""


class DecodeError(SourceError):
    """Raised for a file that was read but holds no usable sample. Precompute quarantines it. Exit code 3."""


class TransferError(SourceError):
    """Raised for a file that could not be fetched, or is not the one that was asked for. Exit code 3.

    Args:
        message: What happened.
        hint: What to do about it.
        transient: True if trying again may help.
        wait_s: Seconds that the other side asked to wait first.
    """

    def __init__(
        self, message: str = "", *, hint: str = "", transient: bool = False, wait_s: float = 0.0
    ) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient
        self.wait_s = wait_s


class DigestError(TransferError):
    """Raised for a fetched file that is complete and not the declared one. Exit code 3.

    Fetching it again may help once.

    Args:
        message: What happened.
        hint: What to do about it.
    """

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint, transient=True)


class PathRefusedError(SourceError):
    """Raised by the service for a path outside the folders it may read, or through a link. Exit code 3."""


class ServiceError(StokerError):
    """Raised where a service on the network refuses a request, or its answer cannot be read. Exit code 1.

    Args:
        message: What happened.
        hint: What to do about it.
        status: The HTTP status; 0 where there was none.
    """

    def __init__(self, message: str = "", *, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class AccessError(ServiceError):
    """Raised for a URL that leads to nothing, or whose credentials are missing or wrong. Exit code 3."""

    exit_code = 3


class EncoderError(StokerError):
    """Raised for an encoder that does not fit the data, or that failed. Exit code 3."""

    exit_code = 3


class RecordError(StokerError, ValueError):
    """Raised for a sample or record that is not what its schema says. Exit code 1."""


class FormatError(StokerError, ValueError):
    """Raised for a folder or file that is not a cache, or not one that this version reads. Exit code 4."""

    exit_code = 4


class CorruptError(FormatError):
    """Raised for bytes that do not match their checksum. Exit code 4.

    Args:
        fact: What is damaged.
        hint: What to do about it; the message is both.
        shard: File name of the shard that is damaged, where it is one.
        folder: Folder of that shard: copies of a cache have shards of the same names.
    """

    def __init__(
        self, fact: str = "", *, hint: str = "", shard: str = "", folder: Path | None = None
    ) -> None:
        super().__init__(fact, hint=hint)
        self.shard = shard
        self.folder = folder


class IncompleteError(StokerError):
    """Raised for a cache that lacks records which were asked for. Exit code 4."""

    exit_code = 4


class MissingRecordError(IncompleteError, KeyError):
    """Raised for one record that is not in the cache; the message says why. Exit code 4."""


class UncountedError(StokerError, TypeError):
    """Raised by `len()` of a loader whose length is not known yet. Exit code 1.

    It is a `TypeError` too, as Python raises for an iterator. So code that can do without a length does.
    """


class ReadOnlyError(StokerError, OSError):
    """Raised for a cache folder, or another that a setting names, that cannot be written. Exit code 3."""

    exit_code = 3


class StaleStateError(StokerError):
    """Raised for a saved state that belongs to another cache, order or batch size. Exit code 1."""


class StalledError(StokerError):
    """Raised when a timeout passed; the message says what was waited for. Exit code 5."""

    exit_code = 5


class WorkerError(StalledError):
    """Raised when worker processes died or hung more often than allowed. Exit code 5."""


class ResourceError(StokerError):
    """Raised where memory, disk space or a device does not suffice. Exit code 6.

    Args:
        message: What is missing, with figures.
        hint: What to do about it.
        full: True if a disk or a quota was full in the middle of writing, which may pass.
    """

    exit_code = 6

    def __init__(self, message: str = "", *, hint: str = "", full: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.full = full


class DeviceError(StokerError):
    """Raised for a device that this process cannot use again; another process can. Exit code 1."""


class DivergedError(StokerError):
    """Raised when training meets a NaN or an infinity. Exit code 1."""


class NotFoundError(StokerError, LookupError):
    """Raised by the service for a job, dataset or cache that it does not know. Exit code 3."""

    exit_code = 3


class ConflictError(StokerError):
    """Raised by the service for a request that does not fit the state a job is in. Exit code 3.

    Asking again gives the same answer.

    Args:
        message: The state.
        hint: What would be possible.
        state: The state the job is in; empty where no state is the reason.
    """

    exit_code = 3

    def __init__(self, message: str = "", *, hint: str = "", state: str = "") -> None:
        super().__init__(message, hint=hint)
        self.state = state


class LostAttemptError(StokerError):
    """Raised in a worker of the service whose attempt at a job is over. Exit code 1.

    The worker changes nothing more, and ends its process of that job.
    """


class DegradedError(StokerError):
    """Raised when the service's database does not answer in time, or cannot be written. Exit code 6.

    Asking again later may help.

    Args:
        message: What did not work.
        hint: What to look at.
        full: True if the disk has no room; reading may still work then.
    """

    exit_code = 6

    def __init__(self, message: str = "", *, hint: str = "", full: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.full = full


class Interrupted(KeyboardInterrupt):
    """Raised when SIGINT or SIGTERM arrives; what was encoded is committed. Exit code 130.

    It is a `KeyboardInterrupt`, so `except Exception` does not catch it.
    """

    exit_code = 130
    """As in `StokerError`."""
