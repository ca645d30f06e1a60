"""Source and encoder in, cache out: supervised workers, the encoder in a child, one writer.

README.md has the map of this folder.

`worker.py` must start in a tenth of a second, so importing this package imports none of the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.precompute.background import EncodeFiller
    from stoker.precompute.engine import begin_precompute, precompute, run_precompute
    from stoker.precompute.measure import EncodeBatch, measure_encode_batch
    from stoker.precompute.progress import LineProgress, ProgressSink, Snapshot
    from stoker.precompute.run import encode_here
    from stoker.precompute.settings import PrecomputeReport, PrecomputeSettings, Timeouts

__all__ = [
    "EncodeBatch",
    "EncodeFiller",
    "LineProgress",
    "PrecomputeReport",
    "PrecomputeSettings",
    "ProgressSink",
    "Snapshot",
    "Timeouts",
    "begin_precompute",
    "encode_here",
    "measure_encode_batch",
    "precompute",
    "run_precompute",
]

_HOMES = {
    "begin_precompute": "engine",
    "encode_here": "run",
    "precompute": "engine",
    "run_precompute": "engine",
    "EncodeBatch": "measure",
    "measure_encode_batch": "measure",
    "EncodeFiller": "background",
    "LineProgress": "progress",
    "ProgressSink": "progress",
    "Snapshot": "progress",
    "Timeouts": "settings",
    "PrecomputeReport": "settings",
    "PrecomputeSettings": "settings",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
