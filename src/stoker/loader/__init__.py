"""From a cache and a plan to batches, the same bytes from every tier.

README.md has the map of this folder.
"""

from typing import TYPE_CHECKING

from stoker.loader.assembly import Pad
from stoker.loader.batch import PointBatch, RecordBatch, TaskBatch, WindowBatch, Windows
from stoker.loader.choose import OneOf, Rows, Span
from stoker.loader.loader import Loader
from stoker.loader.order import Weights
from stoker.loader.outputs import Normalization
from stoker.loader.records import subset

if TYPE_CHECKING:
    from stoker.loader.mixture import Mixture

__all__ = [
    "Loader",
    "Mixture",
    "Normalization",
    "OneOf",
    "Pad",
    "PointBatch",
    "RecordBatch",
    "Rows",
    "Span",
    "TaskBatch",
    "Weights",
    "WindowBatch",
    "Windows",
    "subset",
]


def __getattr__(name: str) -> object:
    """Import `Mixture` when it is first asked for: most runs have one cache."""
    if name != "Mixture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stoker.loader.mixture import Mixture

    return Mixture
