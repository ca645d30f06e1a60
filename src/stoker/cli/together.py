"""The ranks of a command that `torchrun` started; the launcher's environment is read here alone."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.errors import ConfigError
from stoker.scale.place import Place, find_place

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.scale.ranks import Ranks


def own_place() -> Place | None:
    """The place of this process; None: it runs alone, or nothing sensible is said."""
    try:
        return find_place(os.environ)
    except ConfigError:
        return None  # said by `joined`, where it matters


def name_of_rank() -> str:
    """How lines of this process begin: empty for rank 0, which speaks for the run."""
    place = own_place()
    return "" if place is None or place.rank == 0 else f"rank {place.rank}: "


@contextmanager
def joined(config: Config) -> Generator[Ranks]:
    """The ranks that do this command together.

    Raises:
        ConfigError: The environment speaks of several ranks and makes no sense.
        StalledError: The meeting point of the ranks is not there.
    """
    place = find_place(os.environ)
    if place is None:
        from stoker.scale.ranks import ALONE

        yield ALONE
        return
    from stoker.scale.group import RankGroup
    from stoker.scale.pulse import ignore_sigterm

    with RankGroup(place, deadline_s=config.training.rank_deadline) as ranks:
        try:
            yield ranks
        except BaseException:
            ignore_sigterm()  # it ends by itself now, and what it says must not become an interrupt
            raise


def refuse_ranks(command: str) -> None:
    """Refuse to do `command` once per rank.

    Raises:
        ConfigError: This is one of several ranks.
    """
    place = find_place(os.environ)
    if place is not None:
        raise ConfigError(
            f"`stoker {command}` runs in one process, and this is rank {place.rank} of {place.world}. Run it "
            "without torchrun; train and precompute are made for several"
        )
