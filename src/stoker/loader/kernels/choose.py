"""Which kernel converts an output while it is gathered."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.loader.fused import Fused
from stoker.loader.kernels.twin import Twin, TwinGather, Views
from stoker.loader.outputs import Output
from stoker.runtime.threads import Pool


def converting(
    view: Tensor, fused: Fused, batch: int, pool: Pool | None, *, static: bool
) -> Callable[..., Tensor]:
    """A gather from `view` that does what `fused` says; arguments as for `TwinGather`."""
    twin = TwinGather(view, fused, batch, pool=pool, static=static)
    # A kernel goes by float32, and from float64 to a narrow dtype that would round twice.
    if view.device.type != "cuda" or view.dtype == torch.float64:
        return twin
    triton_gather = _triton()
    if triton_gather is None:
        return twin
    return OrTwin(triton_gather.TritonGather(view, fused, batch, static=static), twin)


class OrTwin:
    """A kernel, until it turns out with the first batch that it does not run here: then its twin."""

    def __init__(self, kernel: Callable[..., Tensor], twin: Callable[..., Tensor]) -> None:
        self._gather, self._twin = kernel, twin
        self._tried = False

    def __call__(self, index: Tensor, *views: Views) -> Tensor:
        """Rows `index`, converted; `views` crop and mirror them."""
        if self._tried:
            return self._gather(index, *views)
        try:
            made = self._gather(index, *views)
        except (torch.OutOfMemoryError, Warning):
            raise  # memory may be there next time, and a warning that is an error is the caller's to see
        except Exception as error:  # noqa: BLE001 - a compiler for this very GPU fails in ways of its own
            _say(f"the kernel for {torch.cuda.get_device_name(index.device)} failed: {error}")
            self._gather = self._twin
            made = self._gather(index, *views)
        self._tried = True
        return made


def twin_for(output: Output, device: torch.device) -> Twin | None:
    """What converts rows of an output that were gathered otherwise; None: they are handed out as stored."""
    return None if output.fused is None else Twin(output.fused, output.row_shape, device)


@functools.cache
def _triton() -> Any:
    try:
        from stoker.loader.kernels import triton_gather
    except ImportError as error:
        _say(f"Triton is not here ({error})")
        return None
    except Warning:
        raise  # it is an error because the caller wants that
    except Exception as error:  # noqa: BLE001 - another version of Triton fails in ways of its own
        _say(f"this version of Triton cannot be used ({type(error).__name__}: {error})")
        return None
    return triton_gather


@functools.cache
def _say(why: str) -> None:
    logging.getLogger("stoker").warning(
        "%s; batches on the GPU are normalised and cast in plain torch: the same values, several passes", why
    )
