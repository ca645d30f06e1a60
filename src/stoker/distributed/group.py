"""The ranks of a run over torch.distributed: agreement, sums and gradients, each wait with a timeout.

Ranks meet at a key-value store that the launcher keeps (`torchrun`), else rank 0. Short texts go over it.
Numbers and gradients go over a process group, which is made when it is first needed. That is not before the
caches are ready, since encoding takes longer than any timeout of a collective.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.nn.parallel import DistributedDataParallel

from stoker.distributed.ranks import RankEnvironment, Ranks
from stoker.errors import StalledError, StokerError
from stoker.runtime.threads import start_thread

# ----------------------------------------------------------------------------------------------------------
# Which ranks are alive, and which ended with which message.
#
# Every rank counts up a number of its own at the meeting point, from a thread: a process that was killed,
# stopped or cut off from the network does not. One that ends by an error leaves a note there. This is
# looked at when a wait fails, so that the message can name who was waited for.


BEAT_S = 0.5
SILENT_S = 10.0
"""A rank whose count stays the same for so long has ended."""


def meet(env: RankEnvironment, timeout_s: float, *, host: bool) -> Any:
    """Return a connection to the meeting point; `host`: this call may open it, where no launcher does.

    Raises:
        StalledError: No process opened it within `timeout_s` seconds.
    """
    try:
        store = TCPStore(
            env.host,
            env.port,
            is_master=host and not env.launcher_store and env.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise StalledError(
            f"rank {env.rank} of {env.world_size} found no meeting point at {env.host}:{env.port} within "
            f"{timeout_s:g} s",
            hint="Rank 0 or the launcher should have opened it: is MASTER_ADDR right?",
        ) from error
    return PrefixStore(f"stoker/{env.attempt}", store)


def ignore_sigterm() -> Any:
    """Return a launcher that lost one rank asks the others to end: after they have said which one it was.

    Returns the handler of before, for who wants it back; None outside the main thread, which has no say.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return signal.SIG_DFL if before is None else before


@contextmanager
def _deaf_to_sigterm() -> Generator[None]:
    before = ignore_sigterm()
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class RankHeartbeat:
    """This rank's count, and a look at those of the others."""

    def __init__(self, env: RankEnvironment, timeout_s: float) -> None:
        self._env = env
        self._store = meet(env, timeout_s, host=False)
        self._ended = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self.at = "its start"
        """What this rank is doing, in words, for the ranks that wait for it."""
        self._thread = start_thread(self._beat, "stoker-heartbeat")

    def _beat(self) -> None:
        mine = meet(self._env, SILENT_S, host=False)  # one connection serves one thread at a time
        number = time.time_ns()
        while not self._ended.wait(BEAT_S):
            number += 1
            try:
                mine.set(f"beat/{self._env.rank}", f"{number} {self.at}")
            except RuntimeError:  # the meeting point is gone: its rank is to blame
                return

    def stop(self) -> None:
        """Count no more."""
        self._ended.set()
        self._thread.join(2 * BEAT_S)

    def leave_note(self, text: str, *, hint: str = "", asked: bool = False) -> None:
        """Say why this rank ends, what to do, and if it was asked to end; other ranks may be gone."""
        note = {"text": text, "hint": hint, "asked": asked}
        try:
            self._store.set(f"ended/{self._env.rank}", json.dumps(note))
        except RuntimeError:
            return

    def leave(self) -> None:
        """Say that all is done. Rank 0 goes last where it keeps the meeting point: others may read there."""
        until = time.monotonic() + SILENT_S
        try:
            self._store.set(f"left/{self._env.rank}", "1")
            while self._env.rank == 0 and not self._env.launcher_store and time.monotonic() < until:
                if all(self._has_left(rank) for rank in range(1, self._env.world_size)):
                    return
                time.sleep(BEAT_S / 10)
        except RuntimeError:  # another process has closed it
            return

    def _note(self, rank: int) -> dict[str, Any] | None:
        """Return the note in which a rank said why it ended; None: it left none."""
        return json.loads(self._read(f"ended/{rank}", "null"))

    def blame(self, what: str, since: float, *, asked: bool = False) -> StalledError | None:
        """Whose fault it is that a wait failed; None: no rank ended, and all are alive.

        Args:
            what: What the ranks were at.
            since: When the wait began, on `time.monotonic`.
            asked: This rank was asked to end, and those that were asked as well are not to blame.
        """
        with _deaf_to_sigterm():
            return self._blame(what, since, asked=asked)

    def _blame(self, what: str, since: float, *, asked: bool) -> StalledError | None:
        others = [rank for rank in range(self._env.world_size) if rank != self._env.rank]
        try:
            first, begun = {rank: self._count(rank) for rank in others}, time.monotonic()
            while True:
                if asked:
                    others = [rank for rank in others if not self._in_order(rank)]
                if (ended := self.ended(others, what, since, asked=asked)) is not None:
                    return ended
                still = [rank for rank in others if self._count(rank) == first[rank]]
                if not still:
                    return None
                if time.monotonic() - begun > SILENT_S:
                    return self._gone(still, what, since)
                time.sleep(BEAT_S / 2)
        except RuntimeError:  # the meeting point itself is gone
            return self._gone([0], what, since)

    def _has_left(self, rank: int) -> bool:
        """Return True if a rank said that it is done, or why it ends."""
        return self._store.check([f"left/{rank}"]) or self._note(rank) is not None

    def _in_order(self, rank: int) -> bool:
        """True if a rank was asked to end, or is done; one that never came was asked before it could."""
        note = self._note(rank)
        return note["asked"] if note else self._store.check([f"left/{rank}"]) or not self._count(rank)

    def ended(
        self, ranks: Sequence[int], what: str, since: float, *, asked: bool = False
    ) -> StalledError | None:
        """Return True if one of `ranks` left a note, or has stopped counting; arguments as for `blame`."""
        for rank in ranks:
            note = self._note(rank)
            if note is not None and not (asked and note["asked"]):
                return StalledError(note["text"], hint=note["hint"])
        now, silent = time.monotonic(), list[int]()
        for rank in ranks:
            count = self._count(rank)
            before, moved = self._seen.get(rank, ("", now))
            if count != before:
                self._seen[rank] = count, now
            elif count and now - moved > SILENT_S:
                silent.append(rank)
        return self._gone(silent, what, since) if silent else None

    def _count(self, rank: int) -> str:
        """Return how far a rank has counted, and what it is at; empty before its first count."""
        return self._read(f"beat/{rank}", "")

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Return what these ranks say they are doing."""
        return ", ".join(
            f"rank {rank} is at {self._count(rank).partition(' ')[2] or 'nothing yet'}" for rank in ranks
        )

    def _read(self, key: str, default: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else default

    def _gone(self, ranks: list[int], what: str, since: float) -> StalledError:
        env, several = self._env, len(ranks) > 1
        who = ("ranks " if several else "rank ") + ", ".join(map(str, ranks))
        return StalledError(
            f"{who} of {env.world_size} ended without a message (killed, stopped or cut off): rank "
            f"{env.rank} waited {time.monotonic() - since:.1f} s for {'them' if several else 'it'} at "
            f"{what}. All ranks end now",
            hint="Run it again, with as many ranks as there are, to continue from what is stored",
        )


TIMEOUT_S = 300.0
"""How long a rank waits for the others, unless settings say otherwise."""
_LOOK_S = 0.5


class RankGroup(Ranks):
    """This process among the others; entered, it is counted among the living, and leaves a note on error."""

    def __init__(self, env: RankEnvironment, *, timeout_s: float = TIMEOUT_S) -> None:
        """Go to the meeting point.

        Raises:
            StalledError: There is none.
        """
        self.rank, self.world_size = env.rank, env.world_size
        self.local_rank, self.local_world_size = env.local_rank, env.local_world_size
        self.node_rank, self.num_nodes = env.node_rank, env.num_nodes
        self._timeout_s = timeout_s
        self._store = meet(env, timeout_s, host=True)
        self._heartbeat = RankHeartbeat(env, timeout_s)
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
                self._heartbeat.stop()
            return
        if self._connected:
            with suppress(RuntimeError):  # others may have gone first
                dist.destroy_process_group()
        self._heartbeat.leave()
        self._heartbeat.stop()

    def _end_by(self, error: BaseException) -> None:
        """Leave a note of why this rank ends.

        Raises:
            StalledError: Another rank was lost, which that names: this one was asked to end for it, or a
                message to the lost one failed.
        """
        asked = isinstance(error, KeyboardInterrupt)
        if asked or (isinstance(error, RuntimeError) and not isinstance(error, StokerError)):
            lost = self._heartbeat.blame("its own end", time.monotonic(), asked=asked)
            if lost is not None:
                self._heartbeat.leave_note(lost.fact, hint=lost.hint)
                raise lost from error
        hint = error.hint if isinstance(error, StokerError) else ""
        told = error.fact if isinstance(error, StokerError) else str(error) or type(error).__name__
        if not isinstance(error, StalledError):
            told = f"rank {self.rank} ended: {told}"
        self._heartbeat.leave_note(told, hint=hint, asked=asked)

    def all_gather(self, text: str, what: str) -> list[str]:
        """See `Ranks`."""
        number, self._told, begun = self._told, self._told + 1, time.monotonic()
        with self.waiting(what):
            self._store.set(f"told/{number}/{self.rank}", json.dumps(text))
            keys = [f"told/{number}/{rank}" for rank in range(self.world_size)]
            while missing := [rank for rank in range(self.world_size) if not self._store.check([keys[rank]])]:
                self._look_for(missing, what, begun)
            return [json.loads(self._store.get(key)) for key in keys]

    def _look_for(self, missing: list[int], what: str, begun: float) -> None:
        """Wait a little for ranks that did not come yet, unless they never will."""
        if (ended := self._heartbeat.ended(missing, what, begun)) is not None:
            raise ended
        if time.monotonic() - begun > self._timeout_s:
            raise self._late(missing, what)
        time.sleep(_LOOK_S / 10)

    def all_sum(self, values: Sequence[float], what: str) -> list[float]:
        """See `Ranks`."""
        if not values:
            return []
        return self._gathered(torch.tensor(values, dtype=torch.float64, device="cpu"), what).sum(0).tolist()

    def all_mean(self, values: Tensor, what: str) -> Tensor:
        """See `Ranks`."""
        return self._gathered(values.detach().cpu(), what).mean(0).to(values)

    def _gathered(self, values: Tensor, what: str) -> Tensor:
        """Return the values of all ranks, `(world_size, ...)`, on the host."""
        self._connect()
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        with self.waiting(what):
            dist.all_gather(found, values.contiguous())
        return torch.stack(found)

    def data_parallel(self, module: nn.Module) -> nn.Module:
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
                world_size=self.world_size,
                timeout=timedelta(seconds=self._timeout_s),
            )
        self._connected = True

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """See `Ranks`."""
        before, self._heartbeat.at, begun = self._heartbeat.at, what, time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch has no class of its own for what fails between processes
            blamed = self._heartbeat.blame(what, begun)
            if blamed is None and time.monotonic() - begun >= self._timeout_s:
                blamed = self._late([r for r in range(self.world_size) if r != self.rank], what)
            if blamed is None:
                raise
            raise blamed from error
        finally:
            self._heartbeat.at = before

    def _late(self, ranks: list[int], what: str) -> StalledError:
        return StalledError(
            f"rank {self.rank} of {self.world_size} waited {self._timeout_s:g} s at {what}, and not all "
            f"came: {self._heartbeat.whereabouts(ranks)}",
            hint="Give more time with training.rank_deadline, or look at what holds them up",
        )
