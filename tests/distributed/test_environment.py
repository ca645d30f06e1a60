from __future__ import annotations

import pytest

from stoker.distributed.ranks import find_rank_environment
from stoker.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def test_torchrun_says_who_we_are() -> None:
    environment = find_rank_environment(TORCHRUN)

    assert environment is not None
    assert (
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.local_world_size,
    ) == (3, 4, 1, 2)
    assert (environment.host, environment.port, environment.launcher_store, environment.attempt) == (
        "node0",
        29500,
        True,
        "job/2",
    )


def test_a_restart_meets_elsewhere_than_the_start_before() -> None:
    """Or it would read what the dead ranks left there."""
    again = find_rank_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})

    assert again is not None
    assert again.attempt != "job/2"


@pytest.mark.parametrize(
    "environ", [{}, {"WORLD_SIZE": "1"}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}]
)
def test_one_process_is_alone(environ: dict[str, str]) -> None:
    assert find_rank_environment(environ) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "4"}, "RANK=4 of WORLD_SIZE=4"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),
    ],
)
def test_half_an_environment_is_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_rank_environment({**TORCHRUN, **change})
