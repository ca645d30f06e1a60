"""The ranks of a run over torch.distributed: agreement, sums and gradients, each wait with a deadline.

Ranks meet at a key-value store that the launcher keeps (`torchrun`), else rank 0. Short words go over it;
numbers and gradients over a process group, which is made when it is first needed: not before the caches are
ready, since encoding takes longer than any deadline of a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import StalledError, StokerError
from stoker.scale.place import Place
from stoker.scale.pulse import Pulse, meet
from stoker.scale.ranks import Ranks

DEADLINE_S = 300.0
"""How long a rank waits for the others, unless settings say otherwise."""
_LOOK_S = 0.5


class RankGroup(Ranks):
    """This process among the others; entered, it is counted among the living, and leaves a note on error."""

    def __init__(self, place: Place, *, deadline_s: float = DEADLINE_S) -> None:
        """Go to the meeting point.

        Raises:
            StalledError: There is none.
        """
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.node, self.nodes = place.node, place.nodes
        self._deadline_s = deadline_s
        self._store = meet(place, deadline_s, host=True)
        self._pulse = Pulse(place, deadline_s)
        self._told = 0
        self._connected = False

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            try:
                self._end_by(error)
            finally:
                self._pulse.stop()
            return
        if self._connected:
            with suppress(RuntimeError):  # others may have gone first
                dist.destroy_process_group()
        self._pulse.leave()
        self._pulse.stop()

    def _end_by(self, error: BaseException) -> None:
        """Leave a note of why this rank ends.

        Raises:
            StalledError: Another rank was lost, which that names: this one was asked to end for it, or a
                message to the lost one failed.
        """
        asked = isinstance(error, KeyboardInterrupt)
        if asked or (isinstance(error, RuntimeError) and not isinstance(error, StokerError)):
            lost = self._pulse.blame("its own end", time.monotonic(), asked=asked)
            if lost is not None:
                self._pulse.leave_note(str(lost))
                raise lost from error
        told = str(error) or type(error).__name__
        self._pulse.leave_note(
            told if isinstance(error, StalledError) else f"rank {self.rank} ended: {told}", asked=asked
        )

    def tell(self, text: str, what: str) -> list[str]:
        """See `Ranks`."""
        number, self._told, begun = self._told, self._told + 1, time.monotonic()
        with self.waiting(what):
            self._store.set(f"told/{number}/{self.rank}", json.dumps(text))
            keys = [f"told/{number}/{rank}" for rank in range(self.world)]
            while missing := [rank for rank in range(self.world) if not self._store.check([keys[rank]])]:
                self._look_for(missing, what, begun)
            return [json.loads(self._store.get(key)) for key in keys]

    def _look_for(self, missing: list[int], what: str, begun: float) -> None:
        """Wait a little for ranks that did not come yet, unless they never will."""
        if (ended := self._pulse.ended(missing, what, begun)) is not None:
            raise ended
        if time.monotonic() - begun > self._deadline_s:
            raise StalledError(self._late(missing, what))
        time.sleep(_LOOK_S / 10)

    def sums(self, values: Sequence[float], what: str) -> list[float]:
        """See `Ranks`."""
        if not values:
            return []
        return self._gathered(torch.tensor(values, dtype=torch.float64, device="cpu"), what).sum(0).tolist()

    def mean(self, values: Tensor, what: str) -> Tensor:
        """See `Ranks`."""
        return self._gathered(values.detach().cpu(), what).mean(0).to(values)

    def _gathered(self, values: Tensor, what: str) -> Tensor:
        """The values of all ranks, `(world, ...)`, on the host."""
        self._connect()
        found = [torch.empty_like(values) for _ in range(self.world)]
        with self.waiting(what):
            dist.all_gather(found, values.contiguous())
        return torch.stack(found)

    def wrapped(self, module: nn.Module) -> nn.Module:
        """See `Ranks`."""
        self._connect()
        with self.waiting("the first weights"):
            return DistributedDataParallel(module)

    def _connect(self) -> None:
        if self._connected:
            return
        with self.waiting("the start of training"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self._deadline_s),
            )
        self._connected = True

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """See `Ranks`."""
        before, self._pulse.at, begun = self._pulse.at, what, time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch has no class of its own for what fails between processes
            blamed = self._pulse.blame(what, begun)
            if blamed is None and time.monotonic() - begun >= self._deadline_s:
                blamed = StalledError(self._late([r for r in range(self.world) if r != self.rank], what))
            if blamed is None:
                raise
            raise blamed from error
        finally:
            self._pulse.at = before

    def _late(self, ranks: list[int], what: str) -> str:
        return (
            f"rank {self.rank} of {self.world} waited {self._deadline_s:g} s at {what}, and not all came: "
            f"{self._pulse.whereabouts(ranks)}. Give more time with training.rank_deadline, or look at what "
            "holds them up"
        )
