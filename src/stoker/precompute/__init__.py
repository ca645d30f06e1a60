"""Source and encoder in, cache out: supervised readers, the encoder in this process, one writer.

The path of a sample:

    reader.py      a subprocess reads a group into a slot of its arena        (fill, arena, beat, wire)
    supervisor.py  hands out work, enforces deadlines, replaces readers       (worker, queue, ledger, limits)
    roster.py      readers at work, one in reserve, those that cannot be ended (process, output, patience)
    encode.py      the encoder, on fixed groups, in the calling process       (allocator, watchdog)
    write_thread.py  converts, checksums, seals                               (space)
    engine.py      puts them together                                         (pace, progress, interrupts)

`filler.py` encodes single groups for a loader, `spot_check.py` compares some with what is stored.

`reader.py` must start in a tenth of a second, so importing this package imports none of the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.precompute.engine import precompute, run_precompute
    from stoker.precompute.filler import EncodeFiller
    from stoker.precompute.progress import LineProgress, ProgressSink, Snapshot
    from stoker.precompute.settings import Deadlines, PrecomputeReport, PrecomputeSettings

__all__ = [
    "Deadlines",
    "EncodeFiller",
    "LineProgress",
    "PrecomputeReport",
    "PrecomputeSettings",
    "ProgressSink",
    "Snapshot",
    "precompute",
    "run_precompute",
]

_HOMES = {
    "precompute": "engine",
    "run_precompute": "engine",
    "EncodeFiller": "filler",
    "LineProgress": "progress",
    "ProgressSink": "progress",
    "Snapshot": "progress",
    "Deadlines": "settings",
    "PrecomputeReport": "settings",
    "PrecomputeSettings": "settings",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
