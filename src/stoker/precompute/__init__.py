"""Source and encoder in, cache out: supervised readers, the encoder in this process, one writer.

The path of a sample:

    reader.py      a subprocess reads a group into a slot of its arena  (fill, unchanged, arena, layout)
    supervisor.py  hands out work, enforces deadlines, replaces readers (worker, queue, ledger, limits, wire)
    roster.py      readers at work, in reserve, that do not end         (process, patience)
    encode.py      the encoder, on fixed groups, in the calling process (parcel, precision)
    write_thread.py  converts, checksums, seals                         (space)

`engine.py` has what is missing encoded when it is its turn (turn, interrupts, verdict, share): `here.py` by
this process, `stages.py` builds its stages, `run.py` is the loop over them (pace, progress, live),
`in_process.py` reads without readers.
`watchdog.py` calls the encoder, in a thread that can be left behind (interrupts).
`clock.py` says where the encoder stands: to it, or through `guarded.py` to the guardian.
`filler.py` encodes single groups for a loader, `spot_check.py` compares some with what is stored.
`trial.py` times the stages one after another on a few samples, `probe_encoder.py` tries an encoder on zeros.
`encode_batch.py` measures how many samples a call of an encoder should have.
`draws.py` tells an encoder that draws random numbers; `recognize.py` keeps back samples that another cache
has the records of.
`background.py` runs all of it in `fill_process.py`, beside a training that serves what is there.

`reader.py` must start in a tenth of a second, so importing this package imports none of the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.precompute.background import EncodeFiller
    from stoker.precompute.engine import begin_precompute, precompute, run_precompute
    from stoker.precompute.measure import EncodeBatch, measure_encode_batch
    from stoker.precompute.progress import LineProgress, ProgressSink, Snapshot
    from stoker.precompute.settings import Deadlines, PrecomputeReport, PrecomputeSettings
    from stoker.precompute.stages import encode_here

__all__ = [
    "Deadlines",
    "EncodeBatch",
    "EncodeFiller",
    "LineProgress",
    "PrecomputeReport",
    "PrecomputeSettings",
    "ProgressSink",
    "Snapshot",
    "begin_precompute",
    "encode_here",
    "measure_encode_batch",
    "precompute",
    "run_precompute",
]

_HOMES = {
    "begin_precompute": "engine",
    "encode_here": "stages",
    "precompute": "engine",
    "run_precompute": "engine",
    "EncodeBatch": "measure",
    "measure_encode_batch": "measure",
    "EncodeFiller": "background",
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
