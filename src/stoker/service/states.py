"""The states of a job and the moves between them.

    pending ─┐          ┌─▶ pausing ──▶ paused
    queued ──┴▶ running ┼─▶ completed
       ▲          │     ├─▶ failed
       └──────────┘     └─▶ cancelling ─▶ cancelled
      (its worker was lost, or stopped in order)

Every move is one UPDATE that names the states it may start from, so two who ask at once cannot both win.
A job that nobody works on is paused or cancelled at once; one that a worker holds goes through `pausing` or
`cancelling` until its process has ended, which is what keeps a job from running twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    """Accepted, not to be started before a moment: its last worker was lost, and the next waits a little."""
    QUEUED = "queued"
    """Any free worker takes it."""
    RUNNING = "running"
    """A worker holds it."""
    PAUSING = "pausing"
    """A worker holds it and makes a checkpoint."""
    PAUSED = "paused"
    """Waits for `resume`."""
    CANCELLING = "cancelling"
    """A worker holds it and ends its process."""
    COMPLETED = "completed"
    """Trained to the end, or as long as it paid."""
    FAILED = "failed"
    """Ended with an error, which the job names."""
    CANCELLED = "cancelled"
    """Ended because someone asked for it."""


WAITING = frozenset({State.PENDING, State.QUEUED})
"""A worker may take it."""
HELD = frozenset({State.RUNNING, State.PAUSING, State.CANCELLING})
"""A worker has a lease on it."""
ENDED = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
"""Nothing happens any more unless someone asks for it."""

MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.PENDING: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED}),
        State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED}),
        State.RUNNING: frozenset(
            {State.PENDING, State.QUEUED, State.PAUSING, State.CANCELLING, State.COMPLETED, State.FAILED}
        ),
        State.PAUSING: frozenset({State.PAUSED, State.CANCELLING, State.COMPLETED, State.FAILED}),
        State.CANCELLING: frozenset({State.CANCELLED, State.COMPLETED}),
        State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
        State.COMPLETED: frozenset({State.QUEUED}),
        State.FAILED: frozenset({State.QUEUED}),
        State.CANCELLED: frozenset({State.QUEUED}),
    }
)
"""The moves there are; the ways out of the last three are `resume` and `extend`."""


def before(state: State) -> frozenset[State]:
    """The states that a job may go to `state` from."""
    return frozenset(start for start, ends in MOVES.items() if state in ends)
