"""Fill a cache from a source and an encoder: resume what is missing, or return at once."""

from __future__ import annotations

import logging
import select
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from stoker.arguments import FLAG, FUNCTIONS, NAMES, PATH, TEXT, Kind, check, or_none, whole
from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import weights_device
from stoker.encoders.wrappers import (
    Augmentation,
    FieldSelectingEncoder,
    VariantEncoder,
    keep_fields,
    select_fields,
)
from stoker.errors import ConfigError, IncompleteError, Interrupted, Problem, StokerError, arg
from stoker.plan.resources import encode_on, probe, require_devices
from stoker.precompute.background import EncodeFiller, FillTask, folder_mark, recipe_of
from stoker.precompute.checks import (
    check_quarantined,
    check_space,
    check_space_together,
    check_values,
    describe_failures,
    too_many,
)
from stoker.precompute.encoder_processes import unpickled
from stoker.precompute.inputs import EncoderLike, as_encoder, as_source
from stoker.precompute.progress import ProgressSink, automatic
from stoker.precompute.run import SMALL_ENCODER_BYTES, can_begin_in_process, encode_here
from stoker.precompute.settings import (
    EncodeShare,
    Engine,
    PrecomputeReport,
    PrecomputeSettings,
    ShareOutcome,
    Timeouts,
    as_timeouts,
)
from stoker.precompute.several import encode_together, handed_on, refuse_alone, settings_of
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import sync_folder
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.runtime.processes.child import LIGHT, TORCH, preload
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.wire import Frame, WorkerChannel
from stoker.runtime.signals import Interrupts, first_time
from stoker.schema import DtypeName, dtype_names
from stoker.sources.files import confine_sources
from stoker.sources.pickling import estimate_pickle_bytes
from stoker.sources.protocol import Source
from stoker.store import Cache, Folder, Recipe, open_folder
from stoker.store.cache import FilledCache
from stoker.store.compressed import Compression
from stoker.store.format import INDEX_FILE
from stoker.store.storage import INDEX_WAIT_S, open_storage, resolve_local
from stoker.units import format_count, format_percent

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


# ----------------------------------------------------------------------------------------------------------
# One process encodes a cache at a time; the others wait, and say for whom.
#
# The lock saves work, nothing more: shards of two processes never collide. So a process that has waited long
# for a holder that makes no progress starts to encode as well.


POLL_S = 0.2
_SAY_EVERY_S = 30.0


def take_turn(
    folder: Folder, stack: ExitStack, interrupts: Interrupts, *, quiet_s: float, shared: bool = False
) -> bool:
    """Wait until no other process encodes this cache; the lock is held until `stack` closes.

    Args:
        quiet_s: How long the holder may leave the folder unchanged before we encode as well.
        shared: Hold it together with others that say so too: the ranks of a run.

    Returns:
        Whether we had to wait, so that the folder must be looked at again.
    """
    mark, changed, said = None, time.monotonic(), float("-inf")
    waited = False
    while interrupts.signal is None:
        with ExitStack() as attempt:
            if attempt.enter_context(folder.lock(shared=shared)):
                stack.push(attempt.pop_all())
                return waited
        waited = True
        now, present = time.monotonic(), folder_mark(folder.path)
        if present != mark:
            mark, changed = present, now
        if now - said > _SAY_EVERY_S:
            said = now
            log.warning(
                "%s is being encoded by %s; waiting for it", folder.path, lock_holder(folder.path, "encode")
            )
        if now - changed > quiet_s:
            other = lock_holder(folder.path, "encode")
            log.warning("%s did nothing for %g s; encoding as well", other, quiet_s)
            return True
        select.select([interrupts.fd] if interrupts.fd >= 0 else [], [], [], POLL_S)
    return waited


# ----------------------------------------------------------------------------------------------------------
# Machines that fill one cache: group `g` belongs to machine `g mod nodes`, counted over all groups.
#
# A process that encodes a part holds its lock. Once its own is done it looks at the others': a part whose
# machine died, or never came, is free and is taken over. So a run ends with every record stored as long as
# one process lives, and each group is encoded once unless a process died. Of the ranks on a machine the first
# encodes; the rest wait, and take over only what was free for as long as a start may take.
#
# At a URL a machine does not see the locks of others, only their shards. There the parts of others are
# waited for, and taken over when no shard has come for as long as the holder of a lock may show nothing.


ADDRESS_POLL_S = 5.0
"""Seconds between two looks at which shards an address has."""


def part_of(recipe: Recipe, missing: NDArray[np.int64], part: tuple[int, int]) -> NDArray[np.int64]:
    """Return those of `missing` whose groups belong to rank `part[0]` of `part[1]`."""
    size = recipe.encode_batch.consecutive
    offsets = np.array([entry.offset for entry in recipe.parts], np.int64)
    counts = np.array([entry.count for entry in recipe.parts], np.int64)
    before = np.cumsum(-(-counts // size)) - -(-counts // size)
    where = np.searchsorted(offsets, missing, side="right") - 1
    group = before[where] + (missing - offsets[where]) // size
    return missing[group % part[1] == part[0]]


def encode_parts(
    folder: Folder,
    settings: PrecomputeSettings,
    encode: Callable[[int, bool], bool],
    interrupts: Interrupts,
    *,
    quiet_s: float,
) -> None:
    """Encode the part of this process, then every other that no process works on, until all are dealt with.

    Args:
        folder: The cache.
        settings: Which part of how many, and whether others have the same.
        encode: Encodes what a part lacks, if told to; whether it lacks nothing then.
        interrupts: Ends a wait.
        quiet_s: How long the holders of the rest may leave the folder unchanged before we encode it as well.

    Raises:
        Interrupted: A signal came while waiting.
    """
    rank, world_size = settings.part
    if not settings.together:  # the holder of the cache's lock has that of its only part
        encode(0, True)
        return
    left = [(rank + step) % world_size for step in range(world_size)]
    wait_s = settings.timeouts.start if settings.among == "rest" else 0.0
    apart, said = open_storage(folder.path).mirror is not None and world_size > 1, False
    mark, changed = _mark(folder.path, apart), time.monotonic()
    while left:
        if interrupts.signal is not None:
            raise Interrupted("stopped while waiting for other ranks; what is encoded is stored")
        quiet = time.monotonic() - changed
        overdue, done = quiet > quiet_s, list[int]()
        for number in left:
            mine = quiet >= wait_s and (number == rank or not apart)
            if _take(folder, number, world_size, encode, mine, overdue=overdue):
                done.append(number)
        left = [number for number in left if number not in done]
        if left and not done:
            if apart and not said and rank not in left:
                said = True
                log.info(
                    "%s: waiting for %d of %d machines to store their parts; they are encoded here when "
                    "nothing was stored for %.0f s", folder.path, len(left), world_size, quiet_s,
                )  # fmt: skip
            poll_s = ADDRESS_POLL_S if apart else POLL_S
            select.select([interrupts.fd] if interrupts.fd >= 0 else [], [], [], poll_s)
        now = _mark(folder.path, apart)
        if done or now != mark:
            mark, changed = now, time.monotonic()


def _mark(folder: Path, apart: bool) -> tuple[int, int]:
    """Return a value that changes when a process stores something: here, or at the folder's URL."""
    if not apart:
        return folder_mark(folder)
    sizes = open_storage(folder).sizes()
    return len(sizes), sum(sizes.values())


def _take(
    folder: Folder,
    number: int,
    world_size: int,
    encode: Callable[[int, bool], bool],
    mine: bool,
    *,
    overdue: bool,
) -> bool:
    """Deal with a part unless another process is at it; return whether it is dealt with."""
    with folder.lock(f"encode-{number}-of-{world_size}", shared=not mine) as got:
        return (got or overdue) and encode(number, mine or overdue)


log = logging.getLogger("stoker")
Devices: TypeAlias = "str | torch.device | Sequence[str | torch.device] | None"
_ENGINE = or_none(Kind("an engine, as stoker.extras.ray.engine.RayEngine()", callable))
MOST_PASSES = 3
"""Making the index may find records damaged, which costs another pass."""
_MOSTLY = 0.5
"""A cache of several with more of its bytes in fields of the sample is warned of."""


@dataclass(slots=True, kw_only=True)
class _RunCounts:
    """What is learnt along the way, for the report."""

    begun: float = field(default_factory=time.monotonic)
    encoded: int = 0
    adopted: int = 0
    encode_seconds: float = 0.0
    workers: int = 0
    lost_workers: int = 0
    abandoned_workers: int = 0

    def add(self, done: ShareOutcome) -> None:
        """Count what came of a share."""
        self.encoded += done.encoded
        self.adopted += done.adopted
        self.encode_seconds += done.encode_seconds
        self.workers, self.lost_workers = done.workers, done.lost_workers
        self.abandoned_workers = done.abandoned_workers


@overload
def precompute(
    source: Source | Dataset[Any],
    encoder: EncoderLike,
    cache_dir: str | Path,
    *,
    name: str,
    dtype: DtypeName | Mapping[str, DtypeName] | None = None,
    encode_batch: int | None = None,
    workers: int | None = None,
    device: Devices = None,
    timeouts: Timeouts | Mapping[str, float] | None = None,
    max_quarantined: float = 0.001,
    retry_quarantined: bool = False,
    nan: Literal["reject", "allow"] = "reject",
    overwrite: bool = False,
    max_error: float | None = None,
    compression: Compression = "none",
    part: tuple[int, int] = (0, 1),
    fields: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    variants: int | None = None,
    augment: Augmentation | Sequence[Augmentation] = (),
    variant_seed: int = 0,
    progress: ProgressSink | Literal["auto"] | bool | None = "auto",
    wait: bool = True,
    engine: Engine | None = None,
) -> Cache: ...
@overload
def precompute(
    source: Source | Dataset[Any],
    encoder: Mapping[str, EncoderLike],
    cache_dir: str | Path,
    *,
    name: str,
    **settings: Any,
) -> dict[str, Cache]: ...
def precompute(  # noqa: PLR0913  # pyright: ignore[reportInconsistentOverload]  settings as of one cache
    source: Source | Dataset[Any],
    encoder: EncoderLike | Mapping[str, EncoderLike],
    cache_dir: str | Path,
    *,
    name: str,
    dtype: DtypeName | Mapping[str, Any] | None = None,
    encode_batch: int | Mapping[str, int] | None = None,
    workers: int | None = None,
    device: Devices | Mapping[str, Devices] = None,
    timeouts: Timeouts | Mapping[str, float] | None = None,
    max_quarantined: float = 0.001,
    retry_quarantined: bool = False,
    nan: Literal["reject", "allow"] = "reject",
    overwrite: bool = False,
    max_error: float | Mapping[str, float] | None = None,
    compression: Compression | Mapping[str, Compression] = "none",
    part: tuple[int, int] = (0, 1),
    fields: str | Sequence[str] | Mapping[str, str | Sequence[str]] = (),
    keep: str | Sequence[str] | Mapping[str, str | Sequence[str]] = (),
    variants: int | Mapping[str, int] | None = None,
    augment: Augmentation | Sequence[Augmentation] | Mapping[str, Augmentation | Sequence[Augmentation]] = (),
    variant_seed: int = 0,
    progress: ProgressSink | Literal["auto"] | bool | None = "auto",
    wait: bool = True,
    engine: Engine | None = None,
) -> Cache | dict[str, Cache]:
    """Encode what the cache lacks, and return it; a complete cache comes back at once.

    With several encoders, as `{"latents": vae, "text": t5}`, each sample is read once for all the caches that
    lack it. The caches are called `<name>_latents` and `<name>_text`, and are those that a call for each of
    them alone makes and finds. Settings of records (`dtype`, `encode_batch`, `device`, `max_error`,
    `compression`, `fields`, `keep`, `variants`, `augment`) are for all, or a mapping by the same keys.

    Args:
        source: What to read: a source, or any map-style Dataset, see `TorchSource`.
        encoder: What to apply: an encoder, or a frozen module, which takes the field `data`, the only field,
            or the first of a tuple; see `ModuleEncoder`. A list of names stores these fields of samples as
            they are, None all of them. A mapping makes several caches in one pass over the source.
        cache_dir: Folder of caches, or a URL such as `s3://bucket/caches`.
        name: Name of the cache, which goes to `<cache_dir>/<name>/<fingerprint>/`.
        dtype: Storage dtype of float fields, for all or by field name; None: as encoded.
        encode_batch: Samples in one call of the encoder, a part of the recipe; None: about 8 MiB of samples
            and records. `measure_encode_batch` finds a good number on a device.
        workers: Worker processes; None: automatic; 0: read in this process, without timeouts.
        device: Where the encoder runs: `cpu`, `cuda[:i]`, or `auto`, which takes a GPU where there is one;
            None: where its weights are. Of several, as `["cuda:0", "cuda:1"]` or `"all"`, on each of them,
            in processes of their own.
        timeouts: Seconds by stage, as `{"read": 120}`, or `Timeouts`.
        max_quarantined: Largest fraction of samples that may be quarantined, 0 to 1.
        retry_quarantined: Try every quarantined sample again, also those whose error was the sample's own.
        nan: `"reject"` quarantines a sample or record that holds NaN or infinity, `"allow"` stores it.
        overwrite: Remove the records of this recipe first and encode all of them again.
        max_error: Largest rounding error that `dtype` may cause, as a fraction of a record's largest value;
            a record beyond it is quarantined. None: any.
        compression: Lossless compression of shards: `"none"`, `"zstd"`, `"lz4"`, or `"auto"`, zstd for shards
            that it makes smaller by a tenth.
        part: This rank and the number of ranks, where each of them makes this call: all help, and each
            returns the entire cache.
        fields: Fields of the encoder's output to store; none named: all, which with many encoders includes
            fields of the sample that they do not take.
        keep: Fields of the raw sample to store next to what the encoder makes of it.
        variants: Number of variants of each sample that `augment` makes and the encoder encodes; axis 0 of
            the fields of a record that they change, see `Cache.variants`.
        augment: What makes a variant: `f(batch, keys)`, or several in order, as in `stoker.transforms`. The
            keys follow from the content of a sample, the variant's number and `variant_seed`.
        variant_seed: Another one gives other variants.
        progress: Where progress goes. `"auto"` or True: live on a terminal, else a line every ten seconds on
            standard error. None or False: nowhere.
        wait: False: return while another process encodes. A `Loader` serves what is there, and its first
            epoch is in the order in which the cache is filled. With `workers=None`, on a CPU and in the main
            thread, the call encodes for half a second itself. It encodes the rest too if that takes at most
            two seconds more. Where torch.distributed is initialized, all ranks are to make this call: they
            agree on the order.
        engine: Who encodes, as `stoker.extras.ray.engine.RayEngine()`; None: this machine.

    Returns:
        The cache, complete unless `wait=False`: every sample is stored or quarantined. It carries source and
        encoder, with which a loader has damaged records encoded again. Of several encoders, a dict of caches
        by their keys, in the same order.

    Raises:
        IncompleteError: More samples than `max_quarantined` failed; everything else is stored.
        ResourceError: `device` is not there, or memory or disk space does not suffice.
        StalledError: The encoder or the storage passed its timeout; what was encoded is stored.
        Interrupted: SIGINT or SIGTERM; what was encoded is stored, the same call resumes.
        StokerError: See `stoker.errors`.

    Examples:
        >>> import stoker, torch
        >>> data = [{"x": torch.rand(8)} for _ in range(20)]
        >>> encoder = stoker.ModuleEncoder(torch.nn.Linear(8, 2), field="x")
        >>> cache = stoker.precompute(data, encoder, "caches", name="small", dtype="float16")
        >>> len(cache), cache[0]["latent"].shape, cache[0]["latent"].dtype
        (20, torch.Size([2]), torch.float16)
    """
    _check_call(cache_dir, name, wait, engine)
    source = as_source(source)
    shared: dict[str, Any] = {
        "workers": workers,
        "timeouts": as_timeouts(timeouts),
        "max_quarantined": max_quarantined,
        "retry_quarantined": retry_quarantined,
        "nan": nan,
        "overwrite": overwrite,
        "part": part,
        "progress": "auto" if progress is True else None if progress is False else progress,
    }
    of_cache: dict[str, Any] = {
        "dtype": dtype,
        "encode_batch": encode_batch,
        "device": device,
        "max_error": max_error,
        "compression": compression,
        "fields": fields,
        "keep": keep,
        "variants": variants,
        "augment": augment,
        "variant_seed": variant_seed,
    }
    if isinstance(encoder, Mapping):
        refuse_alone(wait=wait, engine=engine, part=part, name=name, keys=[*encoder])
        defaults = precompute.__kwdefaults__ or {}
        wishes = [
            _wish(f"{name}_{key}", source, one, shared, settings_of(key, [*encoder], of_cache, defaults))
            for key, one in encoder.items()
        ]
        reports = run_together(source, wishes, cache_dir)
        return {key: report.cache for key, report in zip(encoder, reports, strict=True)}
    wish = _wish(name, source, encoder, shared, of_cache)
    encoder, settings = wish.encoder, wish.settings
    if wait:
        return run_precompute(source, encoder, cache_dir, name=name, settings=settings, engine=engine).cache
    if engine is not None:
        raise ConfigError(
            f"{arg('wait', False)} encodes in another process, on this machine",
            hint="Leave wait or engine out",
        )
    try:
        cache = begin_precompute(source, encoder, cache_dir, name=name, settings=settings).cache
    except StokerError as error:
        _tell_ranks(name, "", error.problem, filling=False)
        raise
    told = _tell_ranks(name, cache.fingerprint, None, filling=cache.filling is not None)
    agree_on_order(cache, filling=_is_filled_by_any(told, name, cache.fingerprint))
    return cache


def _check_call(cache_dir: object, name: object, wait: object, engine: object) -> None:
    check({"cache_dir": (cache_dir, PATH), "name": (name, TEXT)})
    check({"wait": (wait, FLAG), "engine": (engine, _ENGINE)})


def _wish(
    name: str, source: Source, given: EncoderLike, shared: Mapping[str, Any], of_cache: Mapping[str, Any]
) -> CacheWish:
    """Return one cache to have, of arguments of `precompute`."""
    encoder = as_encoder(given, source)
    device, variants, augment = (of_cache[name] for name in ("device", "variants", "augment"))
    if device is None:
        device = "cpu" if encoder is None else str(weights_device(encoder))
    devices = encode_on(device)
    check({name: (of_cache[name], NAMES) for name in ("fields", "keep")})
    check({"variants": (variants, or_none(whole())), "augment": (augment, FUNCTIONS)})
    check({"variant_seed": (of_cache["variant_seed"], whole())})
    settings = PrecomputeSettings(
        dtype=dtype_names(of_cache["dtype"]),
        encode_batch=of_cache["encode_batch"],
        device=devices[0],
        devices=devices,
        max_error=of_cache["max_error"],
        compression=of_cache["compression"],
        **shared,
    )
    if variants is not None or augment != ():
        encoder = VariantEncoder(encoder, variants or 0, augment, seed=of_cache["variant_seed"])
    encoder = keep_fields(select_fields(encoder, of_cache["fields"]), of_cache["keep"])
    return CacheWish(name=name, encoder=encoder, settings=settings)


_Told = tuple[str, str, Problem | None, bool]
"""What a rank says of its call: name and fingerprint of the cache, its error, whether it fills the cache."""


def _tell_ranks(name: str, fingerprint: str, error: Problem | None, *, filling: bool) -> list[_Told]:
    """Return what all ranks of torch's process group say, which are all to make this call; none: no group.

    The timeout is that of the group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (name, fingerprint, error, filling))
    return told


def _is_filled_by_any(told: Sequence[_Told], name: str, fingerprint: str) -> bool:
    """Return True if any rank fills this cache.

    Raises:
        ConfigError: Ranks called for different caches.
        StokerError: Another rank failed.
    """
    for rank, (their_name, theirs, error, _) in enumerate(told):
        if error is not None:
            raise StokerError.of_all([error.within(f"rank {rank} could not begin to fill {their_name}: ")])
        if (their_name, theirs) != (name, fingerprint):
            raise ConfigError(
                f"rank {rank} fills {their_name}/{theirs}, this one {name}/{fingerprint}",
                hint=f"Call precompute with {arg('wait', False)} for the same caches in the same order on "
                "all ranks, of the same data and encoder. For a cache of one rank alone, leave it out",
            )
    return any(filling for *_, filling in told)


def agree_on_order(cache: Cache, *, filling: bool) -> None:
    """Have the first epoch of a cache come in the order of filling if any rank is `filling` it."""
    if filling:
        cache.filling = cache.filling or FilledCache(cache)
        cache.filling.agreed = True


def begin_precompute(
    source: Source, encoder: Encoder | None, cache_dir: str | Path, *, name: str, settings: PrecomputeSettings
) -> PrecomputeReport:
    """As `run_precompute`, but what is missing is encoded by another process, in the background.

    The report is of what is there so far. Errors of that process are raised where the cache is served.

    Raises:
        SourceError: Source and encoder cannot be sent to a process.
    """
    _require_devices(encoder, settings)
    tally, cache_dir = _RunCounts(), resolve_local(cache_dir, must_exist=False)
    start_early = partial(_start_early, encoder, settings)
    recipe = recipe_of(source, encoder, cache_dir, settings, on_large_file=start_early)
    weights = None if encoder is None else encoder.weights()
    folder = open_folder(cache_dir, name, recipe, weights=weights)
    if not settings.overwrite and _ready(folder, settings) is not None:
        return run_precompute(source, encoder, cache_dir, name=name, settings=settings)
    folder.note_keys(source)
    filler = EncodeFiller(
        source, encoder, cache_dir, name=name, settings=settings, fingerprint=recipe.fingerprint
    )
    filling = filler.begin()
    tally.add(filling.here)
    cache, _ = filling.look()
    cache.filler, cache.filling = filler, filling
    return _report(cache, folder, tally)


def run_precompute(
    source: Source,
    encoder: Encoder | None,
    cache_dir: str | Path,
    *,
    name: str,
    settings: PrecomputeSettings,
    engine: Engine | None = None,
) -> PrecomputeReport:
    """Do the work of `precompute` and report on it; errors as there."""
    wish = CacheWish(name=name, encoder=encoder, settings=settings)
    return run_together(source, [wish], cache_dir, engine=engine)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWish:
    """One cache to have, of a source."""

    name: str
    encoder: Encoder | None
    settings: PrecomputeSettings


class _WishedCache:
    """A cache that is looked at, and filled where it lacks something."""

    def __init__(self, source: Source, wish: CacheWish, cache_dir: Path, *, start_early: bool) -> None:
        self.source, self.encoder, self.settings, self.name = source, wish.encoder, wish.settings, wish.name
        self.tally, self._cache_dir = _RunCounts(), cache_dir
        early = partial(_start_early, wish.encoder, wish.settings) if start_early else None
        self._recipe = recipe_of(source, wish.encoder, cache_dir, wish.settings, on_large_file=early)
        self.folder = self._open()
        self.cache = None if wish.settings.overwrite else _ready(self.folder, wish.settings)
        self.folder.note_keys(source)

    def _open(self) -> Folder:
        weights = None if self.encoder is None else self.encoder.weights()
        return open_folder(self._cache_dir, self.name, self._recipe, weights=weights)

    def take_turn(self, turn: ExitStack, interrupts: Interrupts) -> None:
        """Wait until no other process encodes it, and look again.

        Raises:
            Interrupted: A signal came first.
        """
        settings = self.settings
        waited = take_turn(
            self.folder, turn, interrupts, quiet_s=settings.timeouts.total_s, shared=settings.together
        )
        if interrupts.signal is not None:
            raise Interrupted("stopped while waiting for another process; nothing was begun")
        if settings.overwrite and not waited and first_time(f"clear {self.folder.path}"):
            clear(self.folder)
            self.folder = self._open()
        self.cache = _ready(self.folder, settings) if waited else None

    def share(self, interrupts: Interrupts) -> EncodeShare:
        """Return it as something to fill."""
        return EncodeShare(
            source=self.source,
            encoder=self.encoder,
            folder=self.folder,
            settings=self.settings,
            missing=np.empty(0, np.int64),
            interrupts=interrupts,
        )

    def report(self) -> PrecomputeReport:
        """Check what is stored, and report on it.

        Raises:
            IncompleteError, RecordError: It is not good enough for its settings.
        """
        cache, settings = self.cache, self.settings
        assert cache is not None
        check_quarantined(self.folder, settings)
        check_values(cache, settings)
        cache.filler = EncodeFiller(
            self.source,
            self.encoder,
            self._cache_dir,
            name=self.name,
            settings=settings,
            fingerprint=self._recipe.fingerprint,
        )
        return _report(cache, self.folder, self.tally)


def run_together(
    source: Source, wishes: Sequence[CacheWish], cache_dir: str | Path, *, engine: Engine | None = None
) -> list[PrecomputeReport]:
    """Have several caches of one source: those that lack something are filled in one pass over it.

    Args:
        source: Where samples are read, once.
        wishes: The caches; timeouts, workers and the like are the same in the settings of all.
        cache_dir: Folder of caches.
        engine: Who encodes, where it is one cache; None: this machine.

    Returns:
        A report on each, in their order.

    Raises:
        StokerError: As `precompute`.
    """
    if engine is None:
        for wish in wishes:
            _require_devices(wish.encoder, wish.settings)
    cache_dir = resolve_local(cache_dir, must_exist=False)
    caches = [_WishedCache(source, wish, cache_dir, start_early=engine is None) for wish in wishes]
    if lacking := [cache for cache in caches if cache.cache is None]:
        with Interrupts() as interrupts, ExitStack() as turn:
            if len(wishes) > 1:
                _warn_of_samples(lacking)
            # In one order in every process, so that no two wait for each other.
            for one in sorted(lacking, key=lambda one: one.folder.path):
                one.take_turn(turn, interrupts)
            lacking = [one for one in lacking if one.cache is None]
            if len(lacking) == 1:
                one = lacking[0]
                one.cache = _fill(one.share(interrupts), engine or encode_here, one.tally)
            elif lacking:
                _fill_together(lacking, interrupts)
    return [one.report() for one in caches]


def _warn_of_samples(caches: Sequence[_WishedCache]) -> None:
    """Warn of caches that are mostly raw samples, which encoders hand on: each of several would hold them."""
    for one in caches:
        if one.encoder is None or isinstance(one.encoder, FieldSelectingEncoder):
            continue
        names, part = handed_on(one.source.schema(), one.folder.recipe.encoded)
        if part > _MOSTLY:
            made = [name for name in one.folder.recipe.encoded if name not in names]
            log.warning(
                "%s of the bytes of %s are fields of the sample that its encoder hands on: %s. To store only "
                "what it makes, give fields=%r for this cache",
                format_percent(part), one.name, ", ".join(names), made,
            )  # fmt: skip


def _start_early(encoder: Encoder | None, settings: PrecomputeSettings) -> None:
    """Start the processes that children are forked from, while a large file is digested.

    Where this process encodes first, it finds out whether a child is worth the import of torch.
    """
    small = estimate_pickle_bytes(encoder) <= SMALL_ENCODER_BYTES
    if settings.workers != 0:
        preload(LIGHT)
    in_process = small and can_begin_in_process(settings) and current_thread() is main_thread()
    if encoder is not None and not in_process:
        preload(TORCH)


def _require_devices(encoder: Encoder | None, settings: PrecomputeSettings) -> None:
    """Refuse devices that this machine lacks, also where the cache is complete and `overwrite` left out."""
    if encoder is not None:
        require_devices(settings.device, *settings.devices)


def _ready(folder: Folder, settings: PrecomputeSettings) -> Cache | None:
    """Return the cache if nothing is left to do: no worker is started, nothing is encoded."""
    cache = folder.complete()
    if cache is None or (
        cache.quarantined and len(folder.missing(retry_quarantined=settings.retry_quarantined))
    ):
        return None
    return cache


def _fill(whole: EncodeShare, engine: Engine, tally: _RunCounts) -> Cache:
    """Encode all that is missing."""
    folder, settings, whole = whole.folder, whole.settings, _adopted(whole, tally)
    again = {settings.part[0]}
    """The parts of which this run tries again what failed for a passing reason: once, and its own."""

    def encode(part: int, mine: bool) -> bool:
        fresh = part in again and settings.among != "rest"
        retry = settings.retry_quarantined and fresh
        missing = folder.missing(retry_quarantined=retry, retry_transient=fresh)
        own = part_of(folder.recipe, missing, (part, settings.part[1]))
        if len(own) and not mine:
            return False
        again.discard(part)
        if len(own):
            check_space(folder.path, folder.recipe.schema, len(missing), probe(path=folder.path))
            _work(engine, replace(whole, missing=own), tally)
        return True

    lost = 0
    for _ in range(MOST_PASSES):
        encode_parts(folder, settings, encode, whole.interrupts, quiet_s=settings.timeouts.total_s)
        cache = folder.finish()
        lost = len(folder.missing(retry_transient=False))
        if not lost:
            return cache
        log.warning("%s proved damaged, to be encoded again", format_count(lost, "record"))
    raise _all_damaged(folder, lost)


def _adopted(whole: EncodeShare, tally: _RunCounts) -> EncodeShare:
    """Take over what other caches of the folder have; return the share, with the samples that they know."""
    folder = whole.folder
    if whole.settings.overwrite:
        return whole
    # Without the lock each rank would count the same records.
    with lock_folder(folder.path, "adopt", timeout_s=INDEX_WAIT_S):
        tally.adopted = folder.adopt()
    same = folder.same_samples() if whole.encoder is not None else None
    return replace(whole, same=same, adopted=tally.adopted)


def _fill_together(caches: Sequence[_WishedCache], interrupts: Interrupts) -> None:
    """Encode all that several caches lack, each sample read once."""
    wholes = {one.name: _adopted(one.share(interrupts), one.tally) for one in caches}
    retry = caches[0].settings.retry_quarantined
    lost = dict[str, int]()
    for attempt in range(MOST_PASSES):
        first = attempt == 0
        missing = {
            name: whole.folder.missing(retry_quarantined=retry and first, retry_transient=first)
            for name, whole in wholes.items()
        }
        shares = [
            replace(whole, missing=missing[name]) for name, whole in wholes.items() if len(missing[name])
        ]
        _work_together(shares, [one.tally for one in caches if len(missing[one.name])])
        for one in caches:
            one.cache = one.folder.finish()
        lost = {one.name: len(one.folder.missing(retry_transient=False)) for one in caches}
        if not any(lost.values()):
            return
        log.warning("%s proved damaged, to be encoded again", format_count(sum(lost.values()), "record"))
    raise _all_damaged(next(one.folder for one in caches if lost[one.name]), max(lost.values()))


def _all_damaged(folder: Folder, lost: int) -> IncompleteError:
    return IncompleteError(
        f"{folder.path} lacks {format_count(lost)} of {format_count(folder.recipe.count)} after "
        f"{MOST_PASSES} passes: something damages or removes what is written",
        hint="Choose another cache folder",
    )


def _work_together(shares: Sequence[EncodeShare], tallies: Sequence[_RunCounts]) -> None:
    """Have the shares of several caches encoded, and show it; errors as `_work`."""
    if not shares:
        return
    if len(shares) == 1:
        check_space(shares[0].folder.path, shares[0].folder.recipe.schema, len(shares[0].missing), probe())
        _work(encode_here, shares[0], tallies[0])
        return
    path = shares[0].folder.path
    check_space_together(
        path, [(one.folder.recipe.schema, len(one.missing)) for one in shares], probe(path=path)
    )
    sink = _sink(shares[0].settings)
    try:
        outcomes = encode_together(shares, sink)
        for tally, done in zip(tallies, outcomes, strict=True):
            tally.add(done)
        if not all(done.finished for done in outcomes):
            _raise_interrupted([share.folder for share in shares], shares[0].interrupts)
        for share, done in zip(shares, outcomes, strict=True):
            _note_failures(share, done, sink)
    finally:
        if sink is not None:
            sink.close()


def _sink(settings: PrecomputeSettings) -> ProgressSink | None:
    return automatic() if settings.progress == "auto" else settings.progress


def _work(engine: Engine, share: EncodeShare, tally: _RunCounts) -> None:
    """Have a share encoded, and show it.

    Raises:
        Interrupted: A signal came.
        StokerError: As `Engine`.
    """
    sink = _sink(share.settings)
    try:
        done = engine(share, sink)
        tally.add(done)
        if not done.finished:
            _raise_interrupted([share.folder], share.interrupts)
        _note_failures(share, done, sink)
    finally:
        if sink is not None:
            sink.close()


def _raise_interrupted(folders: Sequence[Folder], interrupts: Interrupts) -> None:
    for folder in folders:
        folder.finish()  # so that `inspect` and `plan` need not read every shard to know what is there
    stored = sum(folder.stored_count() for folder in folders)
    count = sum(folder.recipe.count for folder in folders)
    what = interrupts.signal.name if interrupts.signal is not None else "a signal"
    raise Interrupted(
        f"stopped by {what}: {format_count(stored)} of {format_count(count)} records are stored. "
        f"Run it again to encode the missing {format_count(count - stored)}"
    )


def _note_failures(share: EncodeShare, done: ShareOutcome, sink: ProgressSink | None) -> None:
    if sink is None or not done.failures:
        return
    if too_many(share.folder, share.settings.max_quarantined):
        return  # the error that follows lists them
    for text in describe_failures({failure.number: failure for failure in done.failures}):
        sink.note(text)


def clear(folder: Folder) -> None:
    """Remove the records of a folder: the index first, so that none ever names a shard that is gone."""
    storage = open_storage(folder.path)
    with explain_disk_errors(folder.path):
        storage.remove(INDEX_FILE)
        sync_folder(folder.path)  # or a power cut may bring back the index without its shards
        for name in storage.list():
            if name.startswith(("shard-", "failures-")):
                storage.remove(name)


def _report(cache: Cache, folder: Folder, tally: _RunCounts) -> PrecomputeReport:
    return PrecomputeReport(
        cache=cache,
        name=cache.name,
        path=str(cache.path),
        fingerprint=cache.fingerprint,
        records=len(cache),
        encoded=tally.encoded,
        reused=max(0, len(cache) - tally.encoded - tally.adopted),
        adopted=tally.adopted,
        quarantined=len(cache.quarantined),
        bytes=sum(shard.bytes for shard in cache.index.shards),
        seconds=time.monotonic() - tally.begun,
        encode_seconds=tally.encode_seconds,
        workers=tally.workers,
        lost_workers=tally.lost_workers,
        abandoned_workers=tally.abandoned_workers,
    )


def fill_in_child(connection: Connection) -> int:
    """Fill a cache in the child of a `ChildFill`, and send how that ended; return its exit code."""
    keep_freed_memory()  # before there are threads
    channel, (task_fd,) = WorkerChannel(connection.socket), connection.shared
    try:
        if (start := channel.next()) is None:
            return 0
        confine_sources(start["confined"])
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        end = _fill_from(task_fd)
    except StokerError as error:
        end = {"kind": "failed", "error": type(error).__name__, **error.to_json()}
    except Interrupted as error:
        end = {"kind": "failed", "error": Interrupted.__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001  a process edge: the caller raises it
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        end = {"kind": "failed", "error": "StokerError", "message": message, "hint": ""}
    with suppress(OSError):  # the caller is gone, and with it everybody to be told
        channel.send(end)
    return 0


def _fill_from(task_fd: int) -> Frame:
    task: FillTask = unpickled(task_fd)
    with task.state.entered():
        report = run_precompute(
            task.source, task.encoder, task.cache_dir, name=task.name, settings=task.settings
        )
    return {"kind": "done", "encoded": report.encoded}
