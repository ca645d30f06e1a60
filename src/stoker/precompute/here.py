"""Encode a share on this machine: readers beside this process, the encoder and the writer in it.

Of several devices each has an encoder in a process of its own (`crew.py`).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

from stoker.plan.devices import resolve_device
from stoker.plan.resources import Resources, probe
from stoker.precompute.crew import Crew
from stoker.precompute.encoding import Encoding
from stoker.precompute.guarded import guard_page
from stoker.precompute.pace import Pace
from stoker.precompute.parcel import Feed
from stoker.precompute.progress import ProgressSink
from stoker.precompute.run import Run, Standing
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.share import Done, Share
from stoker.precompute.space import fit_copies, fit_memory
from stoker.precompute.stages import Bench
from stoker.precompute.supervisor import Supervisor
from stoker.runtime.libc import keep_freed_memory, release_memory
from stoker.sources.held import held_bytes
from stoker.sources.protocol import Proving, Source
from stoker.units import MIB

_READERS_A_CORE = 2
"""At most; a reader that waits for storage needs no core. `Pace` takes back those that do not help."""
_READER_MIND_BYTES = MIB
"""Less than that in a source is nothing beside the interpreter that reads it."""


def encode_here(share: Share, sink: ProgressSink | None) -> Done:
    """Encode in this process, with readers of its own: the `Engine` of one machine.

    Raises:
        StokerError: As `run_precompute`.
    """
    source, folder = share.source, share.folder
    share = replace(share, settings=_on_device(share, sink))
    settings, copies = _with_copies(source, share.settings)
    if settings.readers != 0 and isinstance(source, Proving):
        with share.interrupts.raising():
            source.prove()
    resources = probe(path=folder.path)
    settings, most = fit_memory(source.schema(), folder.recipe, settings, resources)
    most = max(1, min(most, copies, _useful(resources)))
    pace = Pace(most=most, processors=resources.cpus)
    bench = Bench(source, share.encoder, folder, settings, missing=share.missing, interrupts=share.interrupts)
    try:
        return _encode(bench, sink, share, pace)
    finally:
        with suppress(OSError):  # not empty: a reader was lost, and its log is to be read
            bench.logs.rmdir()
        release_memory()


def _on_device(share: Share, sink: ProgressSink | None) -> PrecomputeSettings:
    """The settings with the device that `auto` stands for here."""
    settings = share.settings
    if settings.device != "auto":
        return settings
    if share.encoder is None:
        device = "cpu"
    elif sink is None:
        device = resolve_device("auto")
    else:
        device = resolve_device("auto", lambda line: sink.note(f"{share.folder.name}: {line}"))
    return replace(settings, device=str(device), devices=())


def _with_copies(source: Source, settings: PrecomputeSettings) -> tuple[PrecomputeSettings, int]:
    """The settings, and how many readers may have a copy of what the source holds (`fit_copies`)."""
    held = 0 if settings.readers == 0 else held_bytes(source)
    if held < _READER_MIND_BYTES:
        return settings, sys.maxsize
    resources = probe()
    wanted = settings.readers or _useful(resources)
    return fit_copies(held, settings, resources, wanted=wanted)


def _useful(resources: Resources) -> int:
    """Readers that the cores have use for."""
    return _READERS_A_CORE * int(resources.cpus)


def _encode(bench: Bench, sink: ProgressSink | None, share: Share, pace: Pace) -> Done:
    """Start the stages, run them, and end them in an order that keeps what was encoded."""
    if guard_page() is not None:  # a process of ours
        keep_freed_memory()
    settings, feed = bench.settings, bench.feed(cores=pace.most // _READERS_A_CORE)
    pace.most = min(pace.most, bench.most_readers)
    writer = encoding = None
    try:
        if not isinstance(feed, Supervisor) and sink is not None:
            sink.note(f"{bench.name}: readers=0, reading in this process: in order and without deadlines")
        encoding = _encoding(bench, feed, share)  # the readers are starting meanwhile
        writer = bench.writer()
        run = Run(
            bench.stages(feed, encoding, writer),
            Standing(
                name=bench.name,
                total=bench.folder.recipe.count if settings.part[1] == 1 else len(bench.missing),
                missing=len(bench.missing),
                quarantined=len(bench.quarantined),
                device=", ".join(settings.devices) or settings.device,
            ),
            interrupts=share.interrupts,
            sink=sink,
            pace=pace if settings.readers is None else None,
        )
        try:
            finished = run.go(lasts_s=share.lasts_s)
        finally:
            encoding.clock.alive(bounded=False)
            feed.close()
            encoding.close()
            bench.seal(writer)
        writer.check()
        bench.leave_device()
    except BaseException:
        feed.close()
        if encoding is not None:
            encoding.close()
        if writer is not None:
            writer.abandon()
        raise
    supervised = isinstance(feed, Supervisor)
    return Done(
        finished=finished,
        encoded=run.encoded,
        adopted=writer.copied,
        encode_seconds=encoding.clock.seconds,
        readers=feed.readers if supervised else 0,
        lost_readers=feed.losses if supervised else 0,
        abandoned_readers=feed.abandoned if supervised else 0,
        failures=tuple(bench.ledger.failures),
    )


def _encoding(bench: Bench, feed: Feed, share: Share) -> Encoding:
    """Whoever encodes; a feed that waits for readers wakes up for it, and for signals."""
    inner = bench.encoding(feed, compare_first=share.compare_first)
    if isinstance(inner, Crew):
        inner.watch(share.interrupts.fd)
    if isinstance(feed, Supervisor):
        feed.wake_fd = inner.fd if isinstance(inner, Crew) else share.interrupts.fd
    return inner if share.encoder is None else bench.recognizing(inner, share.same)
