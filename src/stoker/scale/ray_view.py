"""All workers of a round in one view: their words put together into the snapshots that one machine shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.precompute.parcel import ReaderView
from stoker.precompute.progress import ProgressSink, Rate, Snapshot
from stoker.precompute.share import Share
from stoker.store import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How far a task says it is."""

    node: str = ""
    process: tuple[str, int, int] = ("", 0, 0)
    """Ray's name of the node, the number of the process there, and when that began by the node's clock."""
    stage: str = ""
    """`prepare`, `read` until something is encoded, then `encode`."""
    encoded: int = 0
    written_bytes: int = 0
    sample: int = -1
    """The first of the group in hand."""
    call_s: float = 0.0
    busy: float = 0.0
    shard_fill: tuple[int, int] = (0, 0)
    last_failure: str = ""


class Views:
    """Shows a round."""

    def __init__(self, share: Share, sink: ProgressSink | None, *, device: str) -> None:
        self._share, self._sink, self._device = share, sink, device
        self._begun = time.monotonic()
        self._shown = 0.0
        self._rate = Rate(self._begun)
        self._aside = len(share.folder.failures().keys() - set(share.missing.tolist()))
        self._record_bytes = 0.0
        """Of one record as stored, about: tasks that have ended are counted in records."""
        self.last_note = ""
        """The latest of what tasks said, as a sentence."""

    def note(self, text: str) -> None:
        """Pass on what a task said."""
        self.last_note = f"It said last: {text}. "
        if self._sink is not None:
            self._sink.note(text)

    def show(self, views: Sequence[View], encoded: int, failures: Sequence[Failure], *, last: bool) -> None:
        """Show where the round stands, if it is time for that."""
        now = time.monotonic()
        if self._sink is None or (not last and now - self._shown < self._sink.interval_s):
            return
        self._shown = now
        self._sink.update(self._snapshot(now, views, encoded, failures))

    def _snapshot(
        self, now: float, views: Sequence[View], encoded: int, failures: Sequence[Failure]
    ) -> Snapshot:
        share, working = self._share, [view for view in views if view.stage != "prepare"]
        total, told = share.folder.recipe.count, sum(view.encoded for view in working)
        encoded += told
        nodes = len({view.node for view in views})
        samples = [view.sample for view in working if view.sample >= 0]
        calls = [view.call_s for view in working if view.call_s]
        first = min(samples, default=-1)
        if told:
            self._record_bytes = sum(view.written_bytes for view in working) / told
        return Snapshot(
            name=share.folder.name,
            total=total,
            done=total - len(share.missing) + encoded + len(failures),
            encoded=encoded,
            seconds=now - self._begun,
            rate=self._rate(now, encoded),
            written_bytes=int(encoded * self._record_bytes),
            readers=tuple(
                ReaderView(number=i + 1, stage=view.stage, sample=view.sample, seconds=0.0, name=view.node)
                for i, view in enumerate(views)
            ),
            device=f"{self._device}, {len(views)} tasks on {nodes} nodes",
            group=range(first, max(samples, default=-1) + 1) if samples else range(0),
            call_s=sum(calls) / len(calls) if calls else 0.0,
            busy=sum(view.busy for view in working) / len(working) if working else 0.0,
            shard_fill=(
                sum(view.shard_fill[0] for view in working),
                sum(view.shard_fill[1] for view in working),
            ),
            quarantined=self._aside + len(failures),
            last_failure=next((view.last_failure for view in views if view.last_failure), ""),
        )
