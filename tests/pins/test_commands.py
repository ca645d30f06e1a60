"""Exit codes and JSON keys of all commands as released: scripts read them."""

from __future__ import annotations

import pytest
import torch

from tests.pins import commands, golden

# One test for all: they run one after another in one project, which several test processes would each make.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is said of a GPU has more keys"),
]


def compare(kind: str, steps: tuple[commands.Step, ...]) -> None:
    """Compare what the commands do now with the golden values."""
    wanted = golden.load(kind)
    assert set(wanted) == set(commands.names(steps))

    found = commands.run_all(steps)

    assert {name: one for name, one in found.items() if one != wanted[name]} == {}


def test_every_command_keeps_its_exit_code_and_its_keys() -> None:
    compare("commands", commands.STEPS)


@pytest.mark.slow
def test_commands_that_take_long_keep_them_too() -> None:
    compare("long_commands", commands.LONG_STEPS)
