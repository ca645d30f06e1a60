"""Which machines see one folder, with ranks as threads of one process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.distributed.group import RankGroup
from stoker.distributed.ranks import (
    SINGLE_PROCESS,
    RankEnvironment,
    Ranks,
    find_rank_environment,
    nodes_that_share,
)
from stoker.errors import IncompleteError
from stoker.run.precompute import CacheResult, agreed
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.test_engine import run

LAUNCHED = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}  # fmt: skip


def seen_by(folders: list[Path]) -> list[list[int]]:
    """What each rank finds; rank `r` is on machine `r // 2`, whose cache folder is `folders[r // 2]`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def look(rank: int) -> list[int]:
        environment = RankEnvironment(
            rank=rank, world_size=2 * len(folders), local_rank=rank % 2, local_world_size=2,
            node_rank=rank // 2,
            num_nodes=len(folders), host="127.0.0.1", port=port, launcher_store=False, attempt="0",
        )  # fmt: skip
        with RankGroup(environment, timeout_s=30.0) as ranks:
            return nodes_that_share(folders[rank // 2], ranks)

    with ThreadPoolExecutor(2 * len(folders)) as pool:
        return list(pool.map(look, range(2 * len(folders))))


def test_machines_that_see_one_folder_are_found_whatever_its_path(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (tmp_path / "link").symlink_to(one)

    assert seen_by([one, other, tmp_path / "link"]) == [[0, 2], [0, 2], [1], [1], [0, 2], [0, 2]]
    assert not [*one.iterdir(), *other.iterdir()], "the marks are gone"
    assert nodes_that_share(one, SINGLE_PROCESS) == [0]


@pytest.mark.parametrize(
    ("said", "node"),
    [({}, (1, 2)), ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, (0, 1))],
    ids=["by the ranks of a machine", "as torchrun says"],
)
def test_a_rank_knows_its_machine(said: dict[str, str], node: tuple[int, int]) -> None:
    environment = find_rank_environment(LAUNCHED | said)

    assert environment is not None
    assert (environment.node_rank, environment.num_nodes) == node


class Other(Ranks):
    """Rank 0 of two, beside one that says the same but for some words."""

    world_size = 2

    def __init__(self, mine: str, theirs: str) -> None:
        self.mine, self.theirs = mine, theirs

    def all_gather(self, text: str, what: str) -> list[str]:
        del what
        return [text, text.replace(self.mine, self.theirs)]


def test_ranks_that_see_other_records_do_not_train(tmp_path: Path) -> None:
    cache = run(FakeSource((24,)), FakeEncoder(), tmp_path, workers=0).cache
    results = [CacheResult(cache=cache, split="train", encoded=12)]

    (both,) = agreed(results, Other("nothing", ""), [0])
    assert (both.encoded, both.reused) == (24, 0)
    with pytest.raises(IncompleteError, match=r"c: rank 0 sees 24 records of recipe .*, rank 1 23 of"):
        agreed(results, Other(" 24,", " 23,"), [0])
