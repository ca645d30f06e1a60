"""Which kernel converts an output while it is gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.loader.fused import Fused
from stoker.loader.kernels.twin import Twin, TwinGather
from stoker.loader.outputs import Output
from stoker.loader.pool import Pool


def converting(
    view: Tensor, fused: Fused, batch: int, pool: Pool | None, *, static: bool
) -> Callable[[Tensor], Tensor]:
    """A gather from `view` that does what `fused` says; arguments as for `TwinGather`."""
    return TwinGather(view, fused, batch, pool, static=static)


def twin_for(output: Output, device: torch.device) -> Twin | None:
    """What converts rows of an output that were gathered otherwise; None: they are handed out as stored."""
    return None if output.fused is None else Twin(output.fused, output.row_shape, device)
