"""Precompute on a Ray cluster: `precompute(..., engine=RayEngine(address="auto"))`.

The driver, which is the process that asked, holds the claim of the cache, cuts what is missing into slices
(`slices.py`) and has each encoded by a task (`ray_task.py`), on whatever node has room. Tasks write shards of
their own to the cache folder or its address, which all nodes must see (`ray_folder.py`). Nothing is kept
elsewhere: when the driver is killed, so are its tasks, and the next run begins with what the folder lacks.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from stoker.precompute.progress import ProgressSink
from stoker.precompute.share import Done, Share
from stoker.scale.ray_cluster import RayCluster, ray, whoami
from stoker.scale.ray_folder import marked
from stoker.scale.ray_round import Round, Site
from stoker.scale.ray_settings import RaySettings
from stoker.scale.ray_task import Load
from stoker.sources.protocol import Proving
from stoker.sources.travel import packed

_OTHERWISE = "Or encode on this machine alone (--engine local)"


class RayEngine:
    """An `Engine` whose readers, encoders and writers are tasks of a Ray cluster.

    It connects when there is something to encode, and stays connected until `close`, or the end of a `with`.

    Args:
        settings: Which cluster and what of it; single settings by name win, as `RayEngine(num_gpus=1)`.

    Raises:
        ConfigError: A setting means nothing.
    """

    def __init__(self, settings: RaySettings | None = None, **changed: Any) -> None:
        self.settings = replace(settings or RaySettings(), **changed)
        self._cluster = RayCluster(self.settings)

    def __call__(self, share: Share, sink: ProgressSink | None) -> Done:
        """See `Engine`.

        Raises:
            SourceError: Source or encoder cannot be sent to other nodes.
            ConfigError: There is no such cluster, or a node does not fit: it sees other files, or has other
                versions.
            StalledError: The cluster does not answer, or gives no task a place.
            ResourceError: No node has what a task takes.
            StokerError: A task failed, or was lost too often.
        """
        if share.settings.readers != 0 and isinstance(share.source, Proving):
            with share.interrupts.raising():
                share.source.prove()
        payload = self._packed(share)
        self._cluster.connect(share.interrupts, store_bytes=len(payload))
        with marked(share.folder, whoami()) as folder:
            site = Site(
                cluster=self._cluster,
                settings=self.settings,
                payload=ray.put(np.frombuffer(payload, np.uint8)),
                folder=folder,
            )
            del payload
            return Round(share, sink, site).go()

    def close(self) -> None:
        """Let go of the cluster; one that we started ends."""
        self._cluster.close()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _packed(share: Share) -> bytes:
        settings = replace(
            share.settings, progress=None, part=(0, 1), devices=(), on_hang="exit", overwrite=False
        )
        load = Load(
            source=share.source,
            encoder=share.encoder,
            settings=settings,
            files=share.folder.recipe.files,
        )
        return packed(load, "job", otherwise=_OTHERWISE)
