"""From a cache and a plan to batches, the same bytes from every tier.

README.md has the map of this folder.
"""

from stoker.loader.assembly import Pad
from stoker.loader.batch import PointBatch, RecordBatch, TaskBatch, WindowBatch
from stoker.loader.fused import Normalise
from stoker.loader.loader import Loader
from stoker.loader.mixture import Mixture
from stoker.loader.order import Weights, subset
from stoker.loader.windows import Windows

__all__ = [
    "Loader",
    "Mixture",
    "Normalise",
    "Pad",
    "PointBatch",
    "RecordBatch",
    "TaskBatch",
    "Weights",
    "WindowBatch",
    "Windows",
    "subset",
]
