"""Rows come out of memory as they lie in it, whatever units they are copied in."""

from __future__ import annotations

import pytest
import torch

from stoker.loader.gather import WORDS_FROM_BYTES, Gather
from stoker.loader.outputs import OutputSpec

ROWS, BATCH = 24, 8
DTYPES = [torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rows_of(dtype: torch.dtype, shape: tuple[int, ...], skipped: int = 0) -> torch.Tensor:
    """Random bits, `(ROWS, *shape)`, behind `skipped` numbers of the same memory."""
    numbers = ROWS * torch.Size(shape).numel()
    flat = torch.randint(0, 2 if dtype == torch.bool else 256, ((numbers + skipped) * dtype.itemsize,))
    return flat.to(torch.uint8).view(dtype)[skipped:].view(ROWS, *shape)


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", ["", "length", "place"])
@pytest.mark.parametrize("count", [BATCH, 3])
def test_large_rows_of_any_length_and_place_are_bit_identical(
    dtype: torch.dtype, odd: str, count: int
) -> None:
    width = WORDS_FROM_BYTES // dtype.itemsize // 4 + (odd == "length")
    view = rows_of(dtype, (4, width), skipped=1 if odd == "place" else 0)
    output = OutputSpec(name="x", field="x", index="record", dtype=dtype, shape=(4, width))
    index = torch.randperm(ROWS)[:count]
    batch = Gather(view, output, BATCH, None).direct()(index)
    assert batch.dtype == dtype
    assert batch.shape == (count, 4, width)
    assert bits(batch) == b"".join(bits(view[int(row)]) for row in index)


def test_a_batch_that_is_kept_is_not_written_over() -> None:
    width = 4 * WORDS_FROM_BYTES // 2
    view = rows_of(torch.float16, (width,))
    gather = Gather(
        view, OutputSpec(name="x", field="x", index="record", dtype=torch.float16, shape=(width,)), 8, None
    )
    kept = [gather(torch.arange(begin, begin + 8)) for begin in range(0, ROWS, 8)]
    assert b"".join(map(bits, kept)) == bits(view)
