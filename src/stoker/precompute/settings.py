"""Settings of a precompute run, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from stoker.arguments import BATCH, FLAG, Kind, check, number, or_none, whole
from stoker.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stoker.encoders.protocol import Encoder
    from stoker.precompute.progress import ProgressSink
    from stoker.runtime.signals import Interrupts
    from stoker.sources.protocol import Source
    from stoker.store import Failure, Folder
    from stoker.store.cache import Cache
    from stoker.store.compressed import Compression
    from stoker.store.folder import SampleLookup

_FRACTION = number("a fraction from 0 to 1, as 0.01", least=0.0, most=1.0)
_SHARE = number("a fraction of a record's largest value, as 0.01", least=0.0)
_DTYPES = Kind(
    "a dtype, as 'float16', dtypes by field, or None",
    lambda value: value is None or isinstance(value, str | Mapping),
)
_PART = Kind(
    "a rank and the number of ranks, as (0, 4)",
    lambda value: (
        isinstance(value, tuple | list)
        and [type(one) for one in cast("Sequence[object]", value)] == [int, int]
        and 0 <= cast("Sequence[int]", value)[0] < cast("Sequence[int]", value)[1]
    ),
)
_PROGRESS = Kind(
    "'auto', True, False, None, or a sink with update, note and close",
    lambda value: (
        value is None
        or value == "auto"
        or all(callable(getattr(value, name, None)) for name in ("update", "note", "close"))
    ),
)

Nan: TypeAlias = Literal["reject", "allow"]
Identity: TypeAlias = Literal["auto", "full"]
Among: TypeAlias = Literal["alone", "first", "rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Longest time of each stage without progress, in seconds. Progress resets the clock.

    A worker makes progress with every sample, and while it reads bytes: that for ten timeouts at most.

    Raises:
        ConfigError: A value is not a number above 0.

    Examples:
        >>> import stoker, torch
        >>> timeouts = stoker.Timeouts(read=120, encode=600)  # or timeouts={"read": 120, "encode": 600}
        >>> cache = stoker.precompute([torch.ones(2)] * 4, None, "caches", name="ones", timeouts=timeouts)
        >>> timeouts.total_s
        960.0
    """

    start: float = 60.0
    """A worker's interpreter, its imports, and unpickling the source."""
    open: float = 60.0
    """Opening a part and reading the first sample of it in that worker."""
    read: float = 60.0
    """One sample, or one piece of a long sample."""
    encode: float = 300.0
    """One call of the encoder, or bringing it to its device. A child that hangs is killed and started again.
    The first samples are encoded in the caller's process. A hang ends the run there, and leaves a thread."""
    write: float = 120.0
    """One encode batch converted, checksummed and written, with the commit of a shard that it fills; at the
    end, the commit of what is open."""

    def __post_init__(self) -> None:
        """Refuse what is not a time."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"precompute.timeouts.{entry.name} must be above 0 seconds, got {value!r}")

    @property
    def total_s(self) -> float:
        """Seconds that a process that encodes may show nothing: every stage within its timeout."""
        return sum(getattr(self, entry.name) for entry in fields(self))


def as_timeouts(given: Timeouts | Mapping[str, float] | None) -> Timeouts:
    """Timeouts from those that are given by name; the others are the defaults.

    >>> as_timeouts({"read": 4.0}).read
    4.0

    Raises:
        ConfigError: A name is unknown, or a value is no time.
    """
    if given is None or isinstance(given, Timeouts):
        return given or Timeouts()
    names = [entry.name for entry in fields(Timeouts)]
    if not isinstance(cast("object", given), Mapping) or not given.keys() <= {*names}:
        raise ConfigError(
            f"timeouts is {given!r}",
            hint=f"Expected seconds by stage, as {{'read': 120}}; the stages are {', '.join(names)}",
        )
    return Timeouts(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeSettings:
    """Settings that say how to fill a cache.

    `dtype`, `encode_batch` and `identity` go into the recipe, `nan` decides which samples are stored, and the
    last bits of a record may depend on `device`. Nothing else here changes what is stored.
    """

    dtype: str | Mapping[str, str] | None = None
    """Storage dtype of float fields, for all or by field; None: as encoded."""
    encode_batch: int | None = None
    """Samples in one call of the encoder; None: the encoder's own fixed number, about 8 MiB of samples."""
    workers: int | None = None
    """Worker processes, on Linux.

    None: the first samples are read in this process. Then there is one worker (without an encoder: one for
    each core), and more while the encoder waits for data and memory has room for them. With 0, and with None
    on other systems, this process reads, without timeouts.
    """
    device: str = "cpu"
    """Where the encoder runs: `cpu`, `cuda`, `cuda:1`, or `auto`, which takes a GPU where there is one."""
    devices: tuple[str, ...] = ()
    """Where there are several, an encoder on each, fed by the same workers; else on `device`."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long each stage may go without progress."""
    max_quarantined: float = 0.001
    """Largest fraction of samples that may be quarantined before the run counts as failed."""
    retry_quarantined: bool = False
    """Try every quarantined sample again, also those whose error was the sample's own."""
    nan: Nan = "reject"
    """Quarantine a sample or record holding NaN or infinity, or store it as it is."""
    identity: Identity = "auto"
    """How source files are digested for the recipe."""
    overwrite: bool = False
    """Remove the records of this recipe first and encode all of them again, unless another process was at it
    when this one began: then what that one stored is kept."""
    max_error: float | None = None
    """Largest rounding error that the storage dtype may cause, as a fraction of a record's largest value."""
    compression: Compression = "none"
    """Lossless compression of shards, not part of the recipe. `auto`: zstd where it saves a tenth."""
    memory_bytes: int = 1024**3
    """Bytes in flight between source and store, what the encoder itself needs not counted. A group that is
    larger on its own goes alone."""
    always_in_child: bool = False
    """Encode in a child also what is little: for a process that must not keep a thread which hangs."""
    commit_after_s: float = 30.0
    """Seconds from its first record to the commit of a shard that is not full: what a kill costs."""
    by_blocks: bool = False
    """What is stored is served meanwhile: encode block after block (`fill_blocks`), and commit early."""
    progress: ProgressSink | Literal["auto"] | None = "auto"
    """Where progress goes; `auto`: live on a terminal, else a line every ten seconds on standard error."""
    part: tuple[int, int] = (0, 1)
    """Which part of how many this process encodes, where several fill the cache together."""
    among: Among = "alone"
    """True if others have the same part: the first of them encodes, and the rest wait for it.

    They take over where it does not come (back) within the timeout of a start.
    """

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        check(
            {
                "workers": (self.workers, or_none(whole(least=0))),
                "encode_batch": (self.encode_batch, BATCH),
                "max_quarantined": (self.max_quarantined, _FRACTION),
                "max_error": (self.max_error, or_none(_SHARE)),
                "retry_quarantined": (self.retry_quarantined, FLAG),
                "overwrite": (self.overwrite, FLAG),
                "dtype": (self.dtype, _DTYPES),
                "part": (self.part, _PART),
                "progress": (self.progress, _PROGRESS),
            }
        )
        if self.compression != "none":
            from stoker.store.compressed import check_compression  # the store imports torch

            check_compression(self.compression)
        choices = (("nan", Nan), ("identity", Identity), ("among", Among))
        for name, known in choices:
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"precompute.{name} is {getattr(self, name)!r}, expected {' or '.join(get_args(known))}"
                )
        if self.overwrite and self.together:
            raise ConfigError(
                "overwrite with several ranks: one would remove what another has just encoded",
                hint="Run precompute with overwrite in one process, or choose another cache folder",
            )
        if self.memory_bytes < 1:
            raise ConfigError(f"memory_bytes must be above 0, got {self.memory_bytes}")

    @property
    def together(self) -> bool:
        """Other processes of the same run fill this cache as well, or wait for it."""
        return self.part[1] > 1 or self.among != "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeReport:
    """Results of a precompute run."""

    cache: Cache
    """The finished cache."""
    name: str
    """The cache's name below the cache folder."""
    path: str
    """The fingerprint's folder."""
    fingerprint: str
    """16 hex digits of the recipe's digest."""
    records: int
    """Records in the cache now."""
    encoded: int
    """Records that this run encoded."""
    reused: int
    """Records that were there before."""
    adopted: int
    """Records taken over from another cache of the folder: of the same parts or samples."""
    quarantined: int
    """Samples set aside, each listed with its stage and error."""
    bytes: int
    """Bytes of the cache's shards."""
    seconds: float
    """Wall time of the call."""
    encode_seconds: float
    """Time inside the encoder."""
    workers: int = 0
    """Worker processes at the end of the run."""
    lost_workers: int = 0
    """Workers that died or were killed past a timeout."""
    abandoned_workers: int = 0
    """Those of them that SIGKILL did not end in time: they waited in the kernel for storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeShare:
    """Samples to encode, and how."""

    source: Source
    """Where samples are read."""
    encoder: Encoder | None
    """What encodes them; None: they are stored as they are."""
    folder: Folder
    """Where records go; its recipe says in which groups they are encoded."""
    settings: PrecomputeSettings
    """How to encode: dtype, workers, timeouts and so on."""
    missing: NDArray[np.int64]
    """Numbers of the samples, ascending."""
    interrupts: Interrupts
    """A signal ends the work early; what is encoded is committed."""
    lasts_s: float = float("inf")
    """Time from the first group on after which the work ends early in the same way."""
    here_until: float | None = None
    """Encode in the calling process alone, until this time of `time.monotonic()`; None: use children.

    It continues if the rest takes less time than the start of a process. Otherwise another process encodes
    the rest, and tries transient failures again.
    """
    compare_first: bool = True
    """See `BatchEncoder`; False where the same process has done so for an earlier share."""
    same: SampleLookup | None = None
    """Records of sibling caches that samples may be recognized in."""
    adopted: int = 0
    """Records of sibling caches that were taken over before, for the progress display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOutcome:
    """Result of a share."""

    finished: bool = True
    """False: a signal came first, or the time was up."""
    encoded: int = 0
    """Records that were encoded and handed to the store."""
    adopted: int = 0
    """Records of sibling caches that were stored for samples which were recognized."""
    encode_seconds: float = 0.0
    """Time inside the encoder, of all that there were."""
    workers: int = 0
    """Worker processes at the end."""
    lost_workers: int = 0
    """Workers that died or were killed past a timeout."""
    abandoned_workers: int = 0
    """Those of them that SIGKILL did not end in time."""
    failures: tuple[Failure, ...] = ()
    """Samples set aside meanwhile."""


Engine: TypeAlias = "Callable[[EncodeShare, ProgressSink | None], ShareOutcome]"
"""Encodes a share, and returns when all of it is stored or set aside, a signal came, or time is up.

Raises:
    StokerError: The work cannot continue; what was encoded until then is stored.
"""
