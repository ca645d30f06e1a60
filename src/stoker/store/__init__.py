"""The cache on disk: formats 1 to 3, described in docs/format.md.

recipe.py      what determines the bytes; why.py says how two recipes differ, digests.py digests source files
folder.py      one fingerprint's folder being filled: missing, adopt, quarantine, finish
writer.py      records -> shards (convert.py, shard_write.py, statistics.py, sums.py)
cache.py       shards -> records (index.py, shard_read.py, field_read.py, blocks.py, header.py, columns.py);
               verify.py reads them all, lost.py says which shards are gone
open_shards.py which shards a process has open, and what is known of the others (shard_facts.py, offsets.py)
catalog.py     what shards there are, and the index made from them (rows.py says which rows serve);
               adopt.py takes over a sibling's, same_samples.py finds single records in other caches,
               copies.py copies them
compressed.py  compressed shards, read as if they were ordinary ones
layout.py      where columns lie, pure arithmetic
compact.py     short shards into full ones; repair.py sets damaged ones aside
growing.py     what is there of a cache that is being filled, and in which order that is done
gc.py          removes what nobody needs (gc_scan.py, superseded.py); use.py says who needs a folder and who
               changes it
local.py       a folder of files; failures.py
mirror/        a local folder that stands for caches at an address: blocks are fetched when they are read;
               push and pull. remote/ is what is there
protocols.py   what the store asks of storage, and a loader of whoever can fill gaps
"""

from stoker.store.cache import BadRecord, Cache, VerifyReport, open_cache
from stoker.store.failures import Failure
from stoker.store.folder import Folder, open_folder
from stoker.store.format import Column
from stoker.store.index import Index, Segments, load_recipe
from stoker.store.joins import Join, Joined, JoinReport, join_table
from stoker.store.mirror.transfer import TransferReport, Wanted, pull, push
from stoker.store.recipe import Difference, Digests, FileDigest, Recipe, RecipePart, diff_recipes, make_recipe
from stoker.store.shard import Shard
from stoker.store.write import RecordWriter, WriterSettings

__all__ = [
    "BadRecord",
    "Cache",
    "Column",
    "Difference",
    "Digests",
    "Failure",
    "FileDigest",
    "Folder",
    "Index",
    "Join",
    "JoinReport",
    "Joined",
    "Recipe",
    "RecipePart",
    "RecordWriter",
    "Segments",
    "Shard",
    "TransferReport",
    "VerifyReport",
    "Wanted",
    "WriterSettings",
    "diff_recipes",
    "join_table",
    "load_recipe",
    "make_recipe",
    "open_cache",
    "open_folder",
    "pull",
    "push",
]
