"""Source and encoder in, cache out: supervised readers, the encoder in this process, one writer.

The path of a sample:

    reader.py      a child reads a group into a slot of its arena  (reading, arena)
    workers.py     hands out work, enforces timeouts, replaces readers  (queue, runtime/processes)
    encode.py      the encoder, on fixed groups
    encoder_processes.py  calls it in a child for each device;  in_process.py  in the calling process
    run.py         the loop over the stages, and the writer: converts, checksums, seals  (progress, space)

`engine.py` has what is missing encoded when it is its turn (share); `stages.py` builds the stages and encodes
on this machine. `heartbeat.py` says where the encoder stands, to a guardian or to the owner of the child.
`measure.py` times the stages on a few samples, tries an encoder on zeros, and measures encode batches.
`background.py` encodes single groups for a loader, compares some with what is stored, and runs all of it in
`fill_process.py` while a training serves what is there.

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
