"""Fill a cache from a source and an encoder: resume what is missing, or return at once."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import weights_device
from stoker.encoders.wrappers import keeping
from stoker.errors import ConfigError, IncompleteError, Interrupted, arg
from stoker.plan.resources import encode_on, probe, require_devices
from stoker.precompute.background import EncodeFiller, recipe_of
from stoker.precompute.heartbeat import first_time
from stoker.precompute.progress import ProgressSink, automatic
from stoker.precompute.queue import check_quarantined, check_values, describe_failures, too_many
from stoker.precompute.settings import PrecomputeReport, PrecomputeSettings, Timeouts, as_timeouts
from stoker.precompute.share import POLL_S, Done, Engine, Interrupts, Share, folder_mark, take_turn
from stoker.precompute.space import check_space
from stoker.precompute.stages import encode_here
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import sync_folder
from stoker.runtime.locks import lock_folder
from stoker.sources.given import check_source
from stoker.sources.protocol import Source
from stoker.store import Cache, Folder, Recipe, open_folder
from stoker.store.compressed import Compression
from stoker.store.format import INDEX_FILE
from stoker.store.mirror.root import resolve_local
from stoker.store.storage import open_storage
from stoker.store.use import INDEX_WAIT_S
from stoker.units import format_count

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------------
# Machines that fill one cache: group `g` belongs to machine `g mod nodes`, counted over all groups.
#
# Whoever encodes a part holds its claim. Once its own is done it looks at the others': a part whose machine
# died, or never came, is free and is taken over. So a run ends with every record stored as long as one
# process lives, and each group is encoded once unless somebody died. Of the ranks on a machine the first
# encodes; the rest wait, and take over only what has lain free for as long as a start may take.
#
# At an address nobody sees the claims of other machines, only their shards. There the parts of others are
# waited for, and taken over when no shard has come for as long as one who holds a claim may show nothing.


ADDRESS_POLL_S = 5.0
"""Seconds between two looks at which shards an address has."""


def part_of(recipe: Recipe, missing: NDArray[np.int64], part: tuple[int, int]) -> NDArray[np.int64]:
    """Those of `missing` whose groups belong to rank `part[0]` of `part[1]`."""
    size = recipe.group.samples
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
    """Encode the part of this process, then every other that nobody works on, until all are dealt with.

    Args:
        folder: The cache.
        settings: Which part of how many, and whether others have the same.
        encode: Encodes what a part lacks, if told to; whether it lacks nothing then.
        interrupts: Ends a wait.
        quiet_s: How long those who hold the rest may leave the folder unchanged before we go on beside them.

    Raises:
        Interrupted: A signal came while waiting.
    """
    rank, world_size = settings.part
    if not settings.together:  # whoever holds the claim of the cache holds that of its only part
        encode(0, True)
        return
    left = [(rank + step) % world_size for step in range(world_size)]
    patience_s = settings.timeouts.start if settings.among == "rest" else 0.0
    apart, said = open_storage(folder.path).mirror is not None and world_size > 1, False
    mark, changed = _mark(folder.path, apart), time.monotonic()
    while left:
        if interrupts.signal is not None:
            raise Interrupted("stopped while waiting for other ranks; what is encoded is stored")
        quiet = time.monotonic() - changed
        beside, done = quiet > quiet_s, list[int]()
        for number in left:
            mine = quiet >= patience_s and (number == rank or not apart)
            if _take(folder, number, world_size, encode, mine, beside=beside):
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
    """Changes when somebody stores something: here, or at the address that the folder stands for."""
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
    beside: bool,
) -> bool:
    """Deal with a part unless somebody else is at it; whether it is dealt with."""
    with folder.lock(f"encode-{number}-of-{world_size}", shared=not mine) as got:
        return (got or beside) and encode(number, mine or beside)


log = logging.getLogger("stoker")
MOST_PASSES = 3
"""Making the index may find records damaged, which costs another pass."""


@dataclass(slots=True, kw_only=True)
class _Tally:
    """What is learnt along the way, for the report."""

    begun: float = field(default_factory=time.monotonic)
    encoded: int = 0
    adopted: int = 0
    encode_seconds: float = 0.0
    workers: int = 0
    lost_workers: int = 0
    abandoned_workers: int = 0

    def add(self, done: Done) -> None:
        """Count what came of a share."""
        self.encoded += done.encoded
        self.adopted += done.adopted
        self.encode_seconds += done.encode_seconds
        self.workers, self.lost_workers = done.workers, done.lost_workers
        self.abandoned_workers = done.abandoned_workers


def precompute(  # noqa: PLR0913  the public face: every setting by name, as in the documentation
    source: Source,
    encoder: Encoder | None,
    cache_dir: str | Path,
    *,
    name: str,
    dtype: str | Mapping[str, str] | None = None,
    encode_batch: int | None = None,
    workers: int | None = None,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    timeouts: Timeouts | Mapping[str, float] | None = None,
    max_quarantined: float = 0.001,
    retry_quarantined: bool = False,
    nan: Literal["reject", "allow"] = "reject",
    overwrite: bool = False,
    max_error: float | None = None,
    compression: Compression = "none",
    part: tuple[int, int] = (0, 1),
    keep: str | Sequence[str] = (),
    progress: ProgressSink | Literal["auto"] | bool | None = "auto",
    wait: bool = True,
    engine: Engine | None = None,
) -> Cache:
    """Encode what the cache lacks, and return it; a complete cache comes back at once.

    Args:
        source, encoder: What to read, and what to apply; None stores samples as they are.
        cache_dir, name: The cache goes to `<cache_dir>/<name>/<fingerprint>/`, here or at an address.
        dtype: Storage dtype of float fields, for all or by field name.
        encode_batch: Samples in one call of the encoder, a part of the recipe; None: about 8 MiB of samples
            and records. `stoker.precompute.measure` finds a good number on a device.
        workers: Worker processes; None: automatic; 0: read in this process, without timeouts.
        device: Where the encoder runs: `cpu`, `cuda[:i]`, or `auto`, which takes a GPU where there is one;
            None: where its weights are. Of several, as `["cuda:0", "cuda:1"]` or `"all"`, on each of them,
            in processes of their own.
        timeouts: Seconds by stage, as `{"read": 120}`, or `Timeouts`.
        keep: Fields of the raw sample to store beside what the encoder makes of it.
        max_quarantined, retry_quarantined, nan, overwrite, max_error, compression, progress: See
            `PrecomputeSettings`.
        part: This rank and the number of ranks, where each of them makes this call: all help, and each
            returns the whole cache.
        wait: False: return at once, while another process encodes; a `Loader` serves what is there.
        engine: Who encodes, as `stoker.extras.ray.engine.RayEngine()`; None: this machine.

    Returns:
        The cache, complete unless `wait=False`: every sample is stored or quarantined. It carries source and
        encoder, with which a loader has damaged records encoded again.

    Raises:
        IncompleteError: More samples than `max_quarantined` failed; everything else is stored.
        ResourceError: `device` is not there, or memory or disk space does not suffice.
        StalledError: The encoder or the storage passed its deadline; what was encoded is stored.
        Interrupted: SIGINT or SIGTERM; what was encoded is stored, the same call resumes.
        StokerError: See `stoker.errors`.
    """
    check_source(source)
    if device is None:
        device = "cpu" if encoder is None else str(weights_device(encoder))
    devices = encode_on(device)
    settings = PrecomputeSettings(
        dtype=dtype,
        encode_batch=encode_batch,
        workers=workers,
        device=devices[0],
        devices=devices,
        timeouts=as_timeouts(timeouts),
        max_quarantined=max_quarantined,
        retry_quarantined=retry_quarantined,
        nan=nan,
        overwrite=overwrite,
        max_error=max_error,
        compression=compression,
        part=part,
        progress="auto" if progress is True else progress or None,
    )
    encoder = keeping(encoder, keep)
    if wait:
        return run_precompute(source, encoder, cache_dir, name=name, settings=settings, engine=engine).cache
    if engine is not None:
        raise ConfigError(
            f"{arg('wait', False)} encodes in another process, on this machine. Leave wait or engine out"
        )
    return begin_precompute(source, encoder, cache_dir, name=name, settings=settings).cache


def begin_precompute(
    source: Source, encoder: Encoder | None, cache_dir: str | Path, *, name: str, settings: PrecomputeSettings
) -> PrecomputeReport:
    """As `run_precompute`, but what is missing is encoded by another process, in the background.

    The report is of what is there so far. Errors of that process are raised by whoever serves the cache.

    Raises:
        SourceError: Source and encoder cannot be sent to a process.
    """
    _require_devices(encoder, settings)
    tally, cache_dir = _Tally(), resolve_local(cache_dir, must_exist=False)
    recipe = recipe_of(source, encoder, cache_dir, settings)
    weights = None if encoder is None else encoder.weights()
    folder = open_folder(cache_dir, name, recipe, weights=weights)
    if not settings.overwrite and _ready(folder, settings) is not None:
        return run_precompute(source, encoder, cache_dir, name=name, settings=settings)
    filler = EncodeFiller(
        source, encoder, cache_dir, name=name, settings=settings, fingerprint=recipe.fingerprint
    )
    filling = filler.begin()
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
    if engine is None:
        _require_devices(encoder, settings)
    tally = _Tally()
    cache_dir = resolve_local(cache_dir, must_exist=False)
    recipe = recipe_of(source, encoder, cache_dir, settings)
    weights = None if encoder is None else encoder.weights()
    folder = open_folder(cache_dir, name, recipe, weights=weights)
    cache = None if settings.overwrite else _ready(folder, settings)
    if cache is None:
        with Interrupts() as interrupts, ExitStack() as turn:
            waited = take_turn(folder, turn, interrupts, quiet_s=_quiet_s(settings), shared=settings.together)
            if interrupts.signal is not None:
                raise Interrupted("stopped while waiting for another process; nothing was begun")
            if settings.overwrite and not waited and first_time(f"clear {folder.path}"):
                clear(folder)
                folder = open_folder(cache_dir, name, recipe, weights=weights)
            cache = _ready(folder, settings) if waited else None
            if cache is None:
                nothing = np.empty(0, np.int64)
                share = Share(
                    source=source,
                    encoder=encoder,
                    folder=folder,
                    settings=settings,
                    missing=nothing,
                    interrupts=interrupts,
                )
                cache = _fill(share, engine or encode_here, tally)
    check_quarantined(folder, settings)
    check_values(cache, settings)
    cache.filler = EncodeFiller(
        source, encoder, cache_dir, name=name, settings=settings, fingerprint=recipe.fingerprint
    )
    return _report(cache, folder, tally)


def _require_devices(encoder: Encoder | None, settings: PrecomputeSettings) -> None:
    """Refuse devices that this machine lacks, also where the cache is complete and `overwrite` left out."""
    if encoder is not None:
        require_devices(settings.device, *settings.devices)


def _ready(folder: Folder, settings: PrecomputeSettings) -> Cache | None:
    """The cache if nothing is left to do: no reader is started, nothing is encoded."""
    cache = folder.complete()
    if cache is None or (
        cache.quarantined and len(folder.missing(retry_quarantined=settings.retry_quarantined))
    ):
        return None
    return cache


def _fill(whole: Share, engine: Engine, tally: _Tally) -> Cache:
    """Encode all that is missing."""
    folder, settings = whole.folder, whole.settings
    if not settings.overwrite:
        # Without the lock each rank would count the same records.
        with lock_folder(folder.path, "adopt", timeout_s=INDEX_WAIT_S):
            tally.adopted = folder.adopt()
        whole = replace(whole, same=folder.same_samples() if whole.encoder is not None else None)
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
        encode_parts(folder, settings, encode, whole.interrupts, quiet_s=_quiet_s(settings))
        cache = folder.finish()
        lost = len(folder.missing(retry_transient=False))
        if not lost:
            return cache
        log.warning("%s proved damaged, to be encoded again", format_count(lost, "record"))
    raise IncompleteError(
        f"{folder.path} lacks {format_count(lost)} of {format_count(folder.recipe.count)} after "
        f"{MOST_PASSES} passes: something damages or removes what is written. Choose another cache folder"
    )


def _work(engine: Engine, share: Share, tally: _Tally) -> None:
    """Have a share encoded, and show it.

    Raises:
        Interrupted: A signal came.
        StokerError: As `Engine`.
    """
    settings = share.settings
    sink = automatic() if settings.progress == "auto" else settings.progress
    try:
        done = engine(share, sink)
        tally.add(done)
        if not done.finished:
            _raise_interrupted(share.folder, share.interrupts)
        _note_failures(share, done, sink)
    finally:
        if sink is not None:
            sink.close()


def _quiet_s(settings: PrecomputeSettings) -> float:
    """How long another process that encodes may show nothing: every stage within its deadline."""
    return sum(getattr(settings.timeouts, stage) for stage in Timeouts.__slots__)


def _raise_interrupted(folder: Folder, interrupts: Interrupts) -> None:
    folder.finish()  # so that `inspect` and `plan` need not read every shard to know what is there
    stored, count = folder.stored_count(), folder.recipe.count
    what = interrupts.signal.name if interrupts.signal is not None else "a signal"
    raise Interrupted(
        f"stopped by {what}: {format_count(stored)} of {format_count(count)} records are stored. "
        f"Run it again to encode the missing {format_count(count - stored)}"
    )


def _note_failures(share: Share, done: Done, sink: ProgressSink | None) -> None:
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


def _report(cache: Cache, folder: Folder, tally: _Tally) -> PrecomputeReport:
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
