"""From a cache and a plan to batches, the same bytes from every tier.

```
order ─▶ chunks ─▶ gather (memory) ─┐
   ▲    (filling)  disk (shards)   ─┴▶ assembly ─▶ transform ─▶ batch
 windows, places       ▲ placement: which shards are in which memory (tiers)
```

loader.py      the public class; serves a complete cache, or one that is being filled; repairs damaged records
design.py      what is served from where, decided before a record is read; `Engine`: the parts that move
options.py     arguments, and those of a PyTorch `DataLoader`; state.py: what is saved of a place in an epoch
order.py       which example comes at which position of an epoch, and which positions are this rank's
filling.py     the order while a cache is being filled, and its chunks as records become available
windows.py     trajectories cut into examples; places.py: in which shard and row each record is
chunks.py      positions to rows, many batches at a time and before they are needed
outputs.py     the tensors of a batch and their roles; fused.py: what is done to values on the way
gather.py      columns from memory (triton_gather.py: on a GPU); disk.py: from shards, or from several tiers
assembly.py    puts columns together: records, windows, lists joined; batch.py: what comes out
transform.py   what is done to a batch afterwards
tiers.py       memory of the host and of a GPU; placement.py: which shards are in it, and when that changes
prefetch.py    batches made while the step computes; blocks of remote caches fetched before they are needed
mixture.py     several caches as one stream
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
