"""Which machines of a run see the same files in a folder: found out, not asked.

Each machine leaves a file with a random name, tells it to the others, and looks for theirs.
Nothing else tells: a path that is equal on two machines may be one folder or two, and a file system that
can be shared may not be.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path

from stoker.scale.ranks import Ranks

_AT = "a look at which machines share the cache folder"


def nodes_that_share(folder: Path, ranks: Ranks) -> list[int]:
    """The machines that see what this one writes into `folder`, itself among them, ascending.

    All ranks are to make this call. A machine that cannot write there shares no folder.

    Raises:
        StalledError: A rank did not come.
    """
    if ranks.nodes == 1:
        return [0]
    mark = folder / f".node-{secrets.token_hex(8)}"
    left = ranks.local_rank == 0 and _leave(mark)
    try:
        told = [
            json.loads(text) for text in ranks.tell(json.dumps([ranks.node, mark.name if left else ""]), _AT)
        ]
        names = {node: name for node, name in told if name}
        seen = [node for node, name in names.items() if (folder / name).exists()] if left else []
        views = [json.loads(text) for text in ranks.tell(json.dumps([ranks.node, seen]), _AT)]
    finally:
        with suppress(OSError):
            mark.unlink()
    sees = {node: frozenset(found) for node, found in views if found}
    mine = sees.get(ranks.node, frozenset())
    both = {node for node in mine if ranks.node in sees.get(node, frozenset())}
    return sorted(both | {ranks.node})


def _leave(mark: Path) -> bool:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"")
    except OSError:
        return False
    return True
