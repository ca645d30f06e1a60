"""Clean up a mirror: copies here; at the address only when asked, and only what serves nothing."""

from __future__ import annotations

import time
from pathlib import Path

from stoker.errors import ConfigError
from stoker.store.gc import GcItem, GcPolicy, GcReport
from stoker.store.local import LocalStorage
from stoker.store.mirror.root import MirrorRoot
from stoker.store.recipe import RECIPE_FILE
from stoker.store.superseded import drop_superseded, find_superseded, still_needed


def clean(root: Path, policy: GcPolicy, *, dry_run: bool = False, at_address: bool = False) -> GcReport:
    """Give back copies as `policy` says; any of them is fetched again when it is read.

    Args:
        root: The mirror.
        policy: `max_bytes` and `older_than_s` are of copies; with neither, none go.
        dry_run: Only list.
        at_address: Also remove shards at the address that serve nothing in the index there. Nobody can tell
            whether another machine has an earlier index open, so run it when none has.
    Raises:
        ConfigError: The policy is one for whole caches.
        StokerError: The address does not answer, or may not be written.
    """
    if policy.keep is not None or policy.force:
        raise ConfigError("--keep and --force are for folders of caches; here are copies of an address")
    mirror = MirrorRoot(root)
    report = GcReport(cache_dir=str(root), dry_run=dry_run)
    if at_address:
        _superseded(root, mirror.url, report)
    held = kept = mirror.space.held()
    report.bytes_before = held + sum(item.bytes for item in [*report.removed, *report.kept])
    if policy.older_than_s is not None:
        kept = min(kept, mirror.space.held(time.time() - policy.older_than_s))
    if policy.max_bytes is not None:
        kept = min(kept, policy.max_bytes)
    if count := held - kept:
        gone = count if dry_run else mirror.space.free(count)
        reason = f"copies of {mirror.url} that were unused longest"
        report.removed.append(GcItem(kind="copy", path=str(root), bytes=gone, reason=reason))
    if not at_address:
        report.unseen = (
            f"these are copies here; --at-address also removes shards at {mirror.url} that serve nothing"
        )
    return report


def _superseded(root: Path, url: str, report: GcReport) -> None:
    for recipe in sorted(root.glob(f"[!.]*/[!.]*/{RECIPE_FILE}")):
        folder = recipe.parent
        found = find_superseded(folder)
        for name, why in still_needed(folder, found.shards).items():
            size = found.shards.pop(name)
            report.kept.append(
                GcItem(kind="shard", path=_at(root, url, folder, name), bytes=size, reason=why)
            )
        sizes = LocalStorage(folder).sizes()
        found.damaged.clear()
        why = drop_superseded(folder, found) if found.shards and not report.dry_run else None
        for name in found.shards:
            item = GcItem(
                kind="shard",
                path=_at(root, url, folder, name),
                bytes=sizes.get(name, 0),
                reason=why or "its records serve from other shards",
            )
            (report.kept if why else report.removed).append(item)


def _at(root: Path, url: str, folder: Path, name: str) -> str:
    return f"{url}/{folder.relative_to(root)}/{name}"
