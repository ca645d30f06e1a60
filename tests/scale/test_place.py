from __future__ import annotations

import pytest

from stoker.errors import ConfigError
from stoker.scale.place import find_place

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def test_torchrun_says_who_we_are() -> None:
    place = find_place(TORCHRUN)

    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world) == (3, 4, 1, 2)
    assert (place.host, place.port, place.kept, place.attempt) == ("node0", 29500, True, "job/2")


def test_a_restart_meets_elsewhere_than_the_start_before() -> None:
    """Or it would read what the dead ranks left there."""
    again = find_place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})

    assert again is not None
    assert again.attempt != "job/2"


@pytest.mark.parametrize(
    "environ", [{}, {"WORLD_SIZE": "1"}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}]
)
def test_one_process_is_alone(environ: dict[str, str]) -> None:
    assert find_place(environ) is None


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
        find_place({**TORCHRUN, **change})
