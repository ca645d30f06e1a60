"""What is handed to whoever encodes: this process with its readers, or many of them elsewhere.

`engine.py` knows whose turn it is, what is missing, and what to do about what comes back; an `Engine` does
the work between. `here.py` is the one of this machine, `stoker.scale.ray_engine` that of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.progress import ProgressSink
from stoker.precompute.settings import PrecomputeSettings
from stoker.sources.protocol import Source
from stoker.store import Failure, Folder
from stoker.store.same_samples import SameSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Samples to encode, and how."""

    source: Source
    encoder: Encoder | None
    folder: Folder
    """Where records go; its recipe says in which groups they are encoded."""
    settings: PrecomputeSettings
    missing: NDArray[np.int64]
    """Numbers of the samples, ascending."""
    interrupts: Interrupts
    """A signal ends the work early, with what is encoded sealed."""
    lasts_s: float = float("inf")
    """Time from the first group on after which the work ends early in the same way."""
    compare_first: bool = True
    """See `GroupEncoder`; False where the same process has done so for an earlier share."""
    same: SameSamples | None = None
    """Records of sibling caches that samples may be recognized in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of a share."""

    finished: bool = True
    """False: a signal came first, or the time was up."""
    encoded: int = 0
    """Records that were encoded and handed to the store."""
    adopted: int = 0
    """Records of sibling caches that were stored for samples which were recognized."""
    encode_seconds: float = 0.0
    """Time inside the encoder, of all that there were."""
    readers: int = 0
    """Reader processes at the end."""
    lost_readers: int = 0
    abandoned_readers: int = 0
    failures: tuple[Failure, ...] = ()
    """Samples set aside meanwhile."""


Engine: TypeAlias = Callable[[Share, ProgressSink | None], Done]
"""Encodes a share, and returns when all of it is stored or set aside, a signal came, or time is up.

Raises:
    StokerError: The work cannot go on; what was encoded until then is stored.
"""
