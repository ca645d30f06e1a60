"""Ranks as threads of one process: enough for all that goes over the meeting point."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from stoker.cli.command import joined
from stoker.config import Config
from stoker.distributed import group
from stoker.distributed.group import RankGroup
from stoker.distributed.ranks import SINGLE_PROCESS, RankEnvironment
from stoker.errors import ConfigError, Interrupted, StalledError


@pytest.fixture
def join() -> Callable[..., RankGroup]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def make(rank: int, *, world_size: int = 2, timeout_s: float = 20.0) -> RankGroup:
        environment = RankEnvironment(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, host="127.0.0.1",
            port=port, launcher_store=False, attempt="0",
        )  # fmt: skip
        return RankGroup(environment, timeout_s=timeout_s)

    return make


@pytest.fixture
def sigterm() -> Generator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_alone_there_is_nobody_to_wait_for() -> None:
    assert SINGLE_PROCESS.is_rank_zero
    assert SINGLE_PROCESS.all_gather("x", "here") == ["x"]
    assert SINGLE_PROCESS.any(True, "here")
    assert not SINGLE_PROCESS.any(False, "here")


def test_every_rank_hears_all_in_order(join: Callable[..., RankGroup]) -> None:
    def say(rank: int) -> list[list[str]]:
        with join(rank, world_size=3) as ranks:
            return [ranks.all_gather(f"{word} {rank}", "a talk") for word in ("one", "two")]

    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(say, range(3)))

    assert heard == [[["one 0", "one 1", "one 2"], ["two 0", "two 1", "two 2"]]] * 3


def test_a_rank_that_ends_by_an_error_ends_the_others_with_its_words(join: Callable[..., RankGroup]) -> None:
    def fail() -> None:
        with join(1):
            raise ConfigError("latent.dim is 7")

    with join(0, timeout_s=60.0) as ranks, ThreadPoolExecutor() as pool:
        failed = pool.submit(fail)
        with pytest.raises(StalledError, match=r"rank 1 ended: latent\.dim is 7"):
            ranks.all_gather("here", "the checkpoint")
        with pytest.raises(ConfigError):
            failed.result(20)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(join: Callable[..., RankGroup]) -> None:
    with (
        join(0, timeout_s=1.0) as ranks,
        join(1),
        pytest.raises(StalledError, match=r"waited 1 s at the checkpoint.*rank 1 is at"),
    ):
        ranks.all_gather("here", "the checkpoint")


def test_a_rank_that_stops_counting_is_gone_before_the_deadline(
    join: Callable[..., RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "SILENT_S", 1.0)
    with join(0, timeout_s=60.0) as ranks, join(1) as other:
        time.sleep(2 * group.BEAT_S)
        other._heartbeat.stop()
        begun = time.monotonic()
        with pytest.raises(StalledError, match=r"rank 1 of 2 ended without a message.*at the checkpoint"):
            ranks.all_gather("here", "the checkpoint")
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("request_", [KeyboardInterrupt(), Interrupted("SIGTERM after step 3")])
def test_who_is_asked_to_end_since_a_rank_was_lost_names_it(
    join: Callable[..., RankGroup],
    monkeypatch: pytest.MonkeyPatch,
    request_: BaseException,
) -> None:
    """A launcher asks the others to end as soon as one rank is gone, before any of them could notice."""
    monkeypatch.setattr(group, "SILENT_S", 1.0)
    survivor = join(0)
    with join(1) as lost:
        time.sleep(2 * group.BEAT_S)
        lost._heartbeat.stop()
        with (
            pytest.raises(StalledError, match=r"rank 1 of 2 ended without a message.*at its own end"),
            survivor,
        ):
            raise request_


def test_a_command_that_ends_by_an_error_is_not_cut_short_by_its_launcher(
    monkeypatch: pytest.MonkeyPatch, sigterm: None
) -> None:
    """It asks all ranks to end as soon as one has ended, and that must not become an interrupt."""
    monkeypatch.setattr(group, "RankGroup", lambda *_, **__: nullcontext(SINGLE_PROCESS))
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(StalledError), joined(Config()):
        raise StalledError

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize("request_", [KeyboardInterrupt(), Interrupted("SIGTERM after step 3")])
def test_ranks_that_are_all_asked_to_end_are_interrupted(
    join: Callable[..., RankGroup], request_: BaseException
) -> None:
    def end(rank: int) -> None:
        with join(rank, world_size=3) as ranks:
            ranks.all_gather("here", "the start")
            time.sleep(0.7 * rank)  # by then the one before has gone, and left its note
            raise request_

    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(end, rank) for rank in range(3)]
        for one in ended:
            with pytest.raises(type(request_)):
                one.result(60)


def test_a_rank_that_is_done_is_not_lost(
    join: Callable[..., RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = join(0)
    with join(1):
        time.sleep(2 * group.BEAT_S)
    monkeypatch.setattr(group, "SILENT_S", 1.0)
    with pytest.raises(KeyboardInterrupt), last:
        raise KeyboardInterrupt


def test_no_meeting_point_is_said(join: Callable[..., RankGroup]) -> None:
    with pytest.raises(StalledError, match="found no meeting point at 127"):
        join(1, timeout_s=1.0)
