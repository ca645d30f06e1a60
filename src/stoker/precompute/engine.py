"""Fill a cache from a source and an encoder: resume what is missing, or return at once."""

from __future__ import annotations

import logging
import re
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import weights_device
from stoker.encoders.wrappers import keep_fields
from stoker.errors import ConfigError, IncompleteError, Interrupted, Problem, RecordError, StokerError, arg
from stoker.plan.resources import Resources, encode_on, probe, require_devices
from stoker.precompute.background import EncodeFiller, FillTask, folder_mark, recipe_of
from stoker.precompute.encoder_processes import unpickled
from stoker.precompute.inputs import as_encoder, as_source
from stoker.precompute.progress import ProgressSink, automatic
from stoker.precompute.queue import precompute_argument, retry_hint
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
from stoker.runtime.disk import FreeSpace, explain_disk_errors
from stoker.runtime.files import sync_folder
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.runtime.processes.child import LIGHT, TORCH, preload
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.wire import Frame, WorkerChannel
from stoker.runtime.signals import Interrupts, first_time
from stoker.schema import DtypeName, Schema, columns_of, dtype_names
from stoker.sources.files import confine_sources
from stoker.sources.pickling import estimate_pickle_bytes
from stoker.sources.protocol import Source
from stoker.store import Cache, Failure, Folder, Recipe, open_folder
from stoker.store.cache import FilledCache
from stoker.store.compressed import Compression
from stoker.store.format import INDEX_FILE
from stoker.store.storage import INDEX_WAIT_S, mirror_limit, open_storage, resolve_local
from stoker.store.write import OPEN_PARTS
from stoker.units import MIB, format_count, format_percent

if TYPE_CHECKING:
    import torch
    from torch import nn
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
MOST_PASSES = 3
"""Making the index may find records damaged, which costs another pass."""


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


def precompute(  # noqa: PLR0913  the public face: every setting by name, as in the documentation
    source: Source | Dataset[Any],
    encoder: Encoder | nn.Module | None,
    cache_dir: str | Path,
    *,
    name: str,
    dtype: DtypeName | Mapping[str, DtypeName] | None = None,
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
        source: What to read: a source, or any map-style Dataset, see `TorchSource`.
        encoder: What to apply: an encoder, or a frozen module, which takes the field `data`, the only field,
            or the first of a tuple; see `ModuleEncoder`. None stores samples as they are.
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
        keep: Fields of the raw sample to store next to what the encoder makes of it.
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
        encoder, with which a loader has damaged records encoded again.

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
    source = as_source(source)
    encoder = as_encoder(encoder, source)
    if device is None:
        device = "cpu" if encoder is None else str(weights_device(encoder))
    devices = encode_on(device)
    settings = PrecomputeSettings(
        dtype=dtype_names(dtype),
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
    encoder = keep_fields(encoder, keep)
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
    if engine is None:
        _require_devices(encoder, settings)
    tally = _RunCounts()
    cache_dir = resolve_local(cache_dir, must_exist=False)
    start_early = partial(_start_early, encoder, settings) if engine is None else None
    recipe = recipe_of(source, encoder, cache_dir, settings, on_large_file=start_early)
    weights = None if encoder is None else encoder.weights()
    folder = open_folder(cache_dir, name, recipe, weights=weights)
    cache = None if settings.overwrite else _ready(folder, settings)
    if cache is None:
        with Interrupts() as interrupts, ExitStack() as turn:
            waited = take_turn(
                folder, turn, interrupts, quiet_s=settings.timeouts.total_s, shared=settings.together
            )
            if interrupts.signal is not None:
                raise Interrupted("stopped while waiting for another process; nothing was begun")
            if settings.overwrite and not waited and first_time(f"clear {folder.path}"):
                clear(folder)
                folder = open_folder(cache_dir, name, recipe, weights=weights)
            cache = _ready(folder, settings) if waited else None
            if cache is None:
                nothing = np.empty(0, np.int64)
                share = EncodeShare(
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
        encode_parts(folder, settings, encode, whole.interrupts, quiet_s=settings.timeouts.total_s)
        cache = folder.finish()
        lost = len(folder.missing(retry_transient=False))
        if not lost:
            return cache
        log.warning("%s proved damaged, to be encoded again", format_count(lost, "record"))
    raise IncompleteError(
        f"{folder.path} lacks {format_count(lost)} of {format_count(folder.recipe.count)} after "
        f"{MOST_PASSES} passes: something damages or removes what is written",
        hint="Choose another cache folder",
    )


def _work(engine: Engine, share: EncodeShare, tally: _RunCounts) -> None:
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


def _raise_interrupted(folder: Folder, interrupts: Interrupts) -> None:
    folder.finish()  # so that `inspect` and `plan` need not read every shard to know what is there
    stored, count = folder.stored_count(), folder.recipe.count
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


# ----------------------------------------------------------------------------------------------------------
# Whether a finished cache is good enough, and how to say which samples it lacks.


_LISTED = 20
_FEW = 8


def check_quarantined(folder: Folder, settings: PrecomputeSettings) -> None:
    """Compare the samples set aside with what these settings allow.

    Raises:
        IncompleteError: Too many; lists them with stage and error.
    """
    failures = folder.failures()
    count, max_quarantined = folder.recipe.count, settings.max_quarantined
    if not too_many(folder, max_quarantined):
        return
    enough = _allowing(len(failures) / count)
    without = precompute_argument(f"max_quarantined={enough}", f"{{'max_quarantined': {enough}}}")
    raise IncompleteError(
        f"{format_count(count - len(failures))} of {format_count(count, 'sample')} stored, "
        f"{format_count(len(failures))} quarantined ({format_percent(len(failures) / count)}; "
        f"at most {format_percent(max_quarantined)} are allowed)\n"
        + "\n".join(describe_failures(failures))
        + f"\nAll of them, with stage and error: failures-*.jsonl in {folder.path}",
        hint=f"{_advice(failures, settings.nan)}. To continue without them: {without}",
    )


def too_many(folder: Folder, max_quarantined: float) -> bool:
    """Return True if more samples were set aside than is allowed."""
    return len(folder.failures()) > max_quarantined * folder.recipe.count


def check_values(cache: Cache, settings: PrecomputeSettings) -> None:
    """Compare what is stored with what these settings allow; an earlier run may have allowed more.

    Raises:
        RecordError: Values that are NaN or infinite, or rounding above `max_error`.
    """
    again = f"Encode it again with {arg('overwrite', True)}"
    for name, statistics in cache.statistics.items():
        if settings.nan == "reject" and statistics["nonfinite"]:
            raise RecordError(
                f"{cache.path}: field {name!r} holds {format_count(statistics['nonfinite'])} values that "
                f"are NaN or infinite, stored with {arg('nan', 'allow')}",
                hint=f"{again}, or allow them again",
            )
    for name, error in cache.index.error.items():
        if settings.max_error is not None and error["max"] > settings.max_error:
            raise RecordError(
                f"{cache.path}: field {name!r} was rounded by up to {error['max']:.2g} of a record's "
                f"largest value, max_error is {settings.max_error:.2g}",
                hint="Use a wider storage dtype, or raise it",
            )


_OWN = re.compile(r"\S*/\S+|\d+")
"""Parts of an error that are those of one sample: paths and numbers."""


def describe_failures(failures: Mapping[int, Failure]) -> list[str]:
    """Return a line for each of the first twenty kinds of errors, with the samples that have it.

    Errors are of one kind if they differ in a path or a number alone: ten images that cannot be read.
    """
    alike: dict[tuple[str, int, str], list[int]] = {}
    for number, failure in sorted(failures.items()):
        kind = _OWN.sub("", failure.error)
        alike.setdefault((failure.stage, failure.attempts, kind), []).append(number)
    listed = [*alike.items()][:_LISTED]
    lines: list[str] = []
    for (stage, attempts, _), numbers in listed:
        errors = {failures[number].error for number in numbers}
        first = "" if len(errors) == 1 else f"sample {format_count(numbers[0])}: "
        error = failures[numbers[0]].error
        lines.append(f"  {_samples(numbers)} ({stage}, attempts {attempts}): {first}{error}")
    if more := len(failures) - sum(len(numbers) for _, numbers in listed):
        lines.append(f"  and {format_count(more)} more")
    return lines


def _samples(numbers: Sequence[int]) -> str:
    """Return samples by number, the first few of many.

    >>> _samples([7]), _samples([2, 3]), _samples(range(12))
    ('sample 7', '2 samples: 2, 3', '12 samples: 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    if len(numbers) == 1:
        return f"sample {format_count(numbers[0])}"
    few = ", ".join(format_count(number) for number in numbers[:_FEW])
    return f"{format_count(len(numbers), 'sample')}: {few}" + (", ..." if len(numbers) > _FEW else "")


def _advice(failures: Mapping[int, Failure], nan: str) -> str:
    if all(failure.kind == "transient" for failure in failures.values()):
        return "These may pass: when the storage answers, run it again to try them again"
    return f"Once they are fixed, {retry_hint({failure.stage for failure in failures.values()}, nan)}"


def _allowing(share: float) -> float:
    """Return the next larger round share: 0.01, 0.05, 0.1, ...

    >>> _allowing(0.026), _allowing(0.6)
    (0.05, 1.0)
    """
    return next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if step >= share), 1.0)


# ----------------------------------------------------------------------------------------------------------
# Whether the disk holds what is about to be written; asked before the first sample.


_SHARD_BYTES = 256 * MIB
_RESERVE_BYTES = 16 * MIB
_OVERHEAD = 1.01
_SPARE_INODES = 16


def needed_bytes(schema: Schema, records: int) -> int:
    """Return the bytes of that many records with checksums; ragged fields count as empty."""
    columns = columns_of(schema)
    each = sum(field.size_bytes(0 if field.ragged else None) for field in columns.values())
    return int(records * (each + 8 + 8 * len(columns)) * _OVERHEAD)


def check_space(folder: Path, schema: Schema, records: int, resources: Resources) -> None:
    """Compare what is needed with what is free, in bytes and in inodes.

    Raises:
        ResourceError: It does not fit; nothing has been written.
    """
    needed = needed_bytes(schema, records)
    if (limit := mirror_limit(folder)) is not None:  # what is uploaded makes room here
        needed = min(needed, limit + OPEN_PARTS * _SHARD_BYTES)
    files = needed // _SHARD_BYTES + 1 + _SPARE_INODES
    free_bytes = sys.maxsize if resources.disk_bytes is None else resources.disk_bytes
    FreeSpace(free_bytes, resources.disk_inodes).require(
        folder,
        needed,
        f"{format_count(records)} records need",
        reserve_bytes=_RESERVE_BYTES,
        files=files,
        advice="choose another cache folder, or a smaller dtype",
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
