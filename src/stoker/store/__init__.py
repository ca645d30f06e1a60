"""The cache on disk: formats 1 to 3, described in docs/reference/format.md.

README.md has the map of this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.store.cache import Cache, open_cache
from stoker.store.failures import Failure
from stoker.store.folder import Folder, open_folder
from stoker.store.format import Column
from stoker.store.index import Index, Segments, load_recipe
from stoker.store.recipe import Difference, Digests, FileDigest, Recipe, RecipePart, diff_recipes, make_recipe
from stoker.store.shard import Shard
from stoker.store.verify import BadRecord, VerifyReport
from stoker.store.write import RecordWriter, WriterSettings

if TYPE_CHECKING:
    from stoker.store.joins import Join, JoinedColumns, JoinReport, join_table
    from stoker.store.transfer import RecordSelection, TransferReport, pull, push

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
    "JoinedColumns",
    "Recipe",
    "RecipePart",
    "RecordSelection",
    "RecordWriter",
    "Segments",
    "Shard",
    "TransferReport",
    "VerifyReport",
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

_OF_JOINS = ("Join", "JoinReport", "JoinedColumns", "join_table")
_OF_TRANSFER = ("RecordSelection", "TransferReport", "pull", "push")


def __getattr__(name: str) -> Any:
    """Import what few runs need when it is first asked for (PEP 562)."""
    if name in _OF_JOINS:
        from stoker.store import joins as home
    elif name in _OF_TRANSFER:
        from stoker.store import transfer as home
    else:
        raise AttributeError(f"module 'stoker.store' has no attribute {name!r}")
    return getattr(home, name)
