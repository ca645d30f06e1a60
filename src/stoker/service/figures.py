"""What the service finds out about itself and its machine, each so that a hang costs that one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.plan.resources import probe
from stoker.service.machine import gpus
from stoker.service.recent import Patience, Recent

if TYPE_CHECKING:
    from stoker.service.folders import StateFolder
    from stoker.service.jobs import Jobs
    from stoker.service.states import State

WAIT_S = 2.0
"""How long a figure is waited for: three that hang still leave a scrape its ten seconds."""
SCAN_S = 20.0
"""How long the folders of caches are waited for: less than an answer may take."""
FOLDERS, FOLDER_S = 8, 10.0
"""Folders of single caches that are looked into at once, and how long each look may take."""


class Figures:
    """Asks the database, the disk, the driver of the GPUs and the folder of caches."""

    def __init__(self, folder: StateFolder, jobs: Jobs) -> None:
        self.jobs: Recent[dict[State, int]] = Recent(jobs.counts, "the count of jobs", wait_s=WAIT_S)
        """Jobs by state."""
        self.disk: Recent[tuple[int | None, int | None]] = Recent(
            lambda: _room(folder), f"the disk of {folder.path}", wait_s=WAIT_S
        )
        """Bytes and inodes that are free for us."""
        self.gpus: Recent[list[dict[str, Any]]] = Recent(gpus, "the driver of the GPUs", wait_s=WAIT_S)
        """A row a GPU."""
        self.caches: Recent[list[dict[str, Any]]] = Recent(
            lambda: find_caches(folder), f"the folder of caches {folder.caches}", wait_s=SCAN_S
        )
        """A row for every cache that jobs have made."""
        self.folders = Patience(at_once=FOLDERS, wait_s=FOLDER_S)
        """Looks into single folders of caches."""


def _room(folder: StateFolder) -> tuple[int | None, int | None]:
    found = probe(path=folder.path)
    return found.disk_bytes, found.disk_inodes


def find_caches(folder: StateFolder) -> list[dict[str, Any]]:
    """A row for every cache below a state folder, found by looking into each."""
    from stoker.store.gc_scan import scan

    return [
        {
            "name": found.name,
            "fingerprint": found.path.name,
            "bytes": found.bytes,
            "complete": found.complete,
            "unused_s": max(0.0, found.unused_s),
            "claims": found.live_claims(),
            "broken": found.broken,
        }
        for found in scan(folder.caches)
    ]
