"""From a cache and a plan to batches, the same bytes from every tier.

loader.py      the face: settings in, batches out; place.py: where it is, state.py: what is saved of that
whole.py       what serves a complete cache, filling.py: one beside its filling; engine.py: the moving parts
decide.py      what is served from where, before a record is read; mend.py: damaged records made again
order.py       which example comes at which position of an epoch, on the host or made on a GPU;
               ranks.py: which of those are ours
windows.py     trajectories cut into examples; places.py: where each record lies
chunks.py      positions -> rows, many batches at a time and ahead of need
outputs.py     what a batch is made of; assembly.py puts it together, however it was cut;
               gather.py: columns from memory; disk.py: from shards
read_ahead.py  fetches from elsewhere what comes next: horizon.py knows it, reach.py in which blocks it lies
fused.py       what is done to values on the way: normalise, cast, crop, mirror; kernels/: by what;
               lowering.py: transforms that can be done there
residency.py   which shards are in memory now (memory.py, mapped.py: host, device.py: GPU)
watch.py       when that should change; partial.py: batches for a device that does not hold everything
mixture.py     several caches as one stream: turns.py says whose step it is, members.py has their loaders,
               conditions.py aligns what examples carry along, mixture_state.py
ragged.py      fields of varying length as one tensor: padded, or packed; points.py: particles and meshes
buffers.py     memory of large batches; batch.py, transform.py, arguments.py
keyed.py       random numbers for transforms, by example; draws.py, subsets.py: which examples, and how often
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
