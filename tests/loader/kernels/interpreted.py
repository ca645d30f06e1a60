"""Compare the Triton kernel with its twin, value by value, in Triton's interpreter on the CPU.

Run by `test_triton_gather.py` with TRITON_INTERPRET=1, which has to be set before Triton is imported. The
interpreter cuts bfloat16 off where a GPU rounds to the nearest (Triton 3.9), so there alone the values may
differ by one step of that dtype; `tests/gpu` asks for the same bits.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor

from stoker.loader.gather import ConvertingGather, view_for
from stoker.loader.outputs import Conversion, Normalization, OutputSpec, find_conversion
from stoker.loader.triton_gather import TritonGather
from stoker.schema import Field

DEVICE = "cpu"
"""Where the kernel runs; the twin is always asked on the CPU."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GENERATOR = torch.Generator().manual_seed(5)


def rows_of(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=GENERATOR).mul(3).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=GENERATOR).to(dtype)


def same(got: Tensor, expected: Tensor) -> bool:
    got = got.cpu()
    if got.dtype == torch.bfloat16 and DEVICE == "cpu":
        close = torch.isclose(got.float(), expected.float(), rtol=2**-7, atol=1e-30)
        return bool(close.all())
    return got.dtype == expected.dtype and torch.equal(got, expected)


def compare(view: Tensor, what: Conversion, index: Tensor, *, views: Any = (None, None)) -> None:
    converter = ConvertingGather(view, what, len(index))(index, views)
    there, views = strided_on(view), tuple(v if v is None else v.to(DEVICE) for v in views)
    kernel = TritonGather(there, what, ConvertingGather(there, what, len(index)).room)
    index = index.to(DEVICE)
    assert same(kernel(index, views), converter), (view.shape, view.dtype, what)
    assert same(kernel(index[:1], tuple(v if v is None else v[:1] for v in views)), converter[:1])


def strided_on(view: Tensor) -> Tensor:
    """The same view, overlaps and all, of a copy of its memory on `DEVICE`."""
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return whole.to(DEVICE).as_strided(view.shape, view.stride(), view.storage_offset())


def normalised_and_cast() -> None:
    stored = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.bool)
    wanted = ("float32", "float16", "bfloat16")
    for dtype, name, (shape, axis) in itertools.product(
        stored, wanted, [((3, 32, 32), -3), ((7, 9, 3), -1), ((5, 3, 4), -2), ((), -1)]
    ):
        field = Field(shape=shape, dtype=str(dtype).removeprefix("torch."))
        many = {"mean": MEAN, "std": STD} if shape else {"mean": 0.5, "std": 0.3}
        rows, index = rows_of(dtype, 6, *shape), torch.tensor([5, 0, 2, 2, 4])
        what = find_conversion(field, Normalization(axis=axis, divisor=2, **many), name)
        assert what is not None
        compare(rows, what, index)
        if dtype.is_floating_point:
            compare(rows, Conversion(dtype=getattr(torch, name)), index)


def windows() -> None:
    field = Field(shape=(9, 4, 6), dtype="float16", time=True)
    source = rows_of(torch.float16, 5, 9, 4, 6)
    what = find_conversion(field, Normalization(mean=range(6), std=range(1, 7), axis=-1), "float32")  # type: ignore[arg-type]
    assert what is not None
    for lag, count, every in [(0, None, 1), (2, None, 1), (1, 3, 2), (3, 1, 4)]:
        shape = (4, 6) if count is None else (count, 4, 6)
        output = OutputSpec(
            name="z", field="latent", index="steps:9", shape=shape, dtype=torch.float16,
            lag=lag, count=count, every=every,
        )  # fmt: skip
        compare(view_for(output, field, source), what, torch.tensor([0, 30, 9, 1]))


def crops_and_mirrors() -> None:
    rows, index = rows_of(torch.uint8, 6, 3, 12, 10), torch.tensor([5, 1, 1, 0])
    begins, flips = torch.tensor([[3, 2], [0, 1], [2, 2], [1, 0]]), torch.tensor([True, True, False, False])
    whole = find_conversion(
        Field(shape=(3, 12, 10), dtype="uint8"), Normalization(mean=MEAN, std=STD, divisor=255), None
    )
    assert whole is not None
    for crop, flip in [((9, 8), True), ((9, 8), False), (None, True)]:
        what = Conversion(
            dtype=whole.dtype, crop=crop, flip=flip, scale=whole.scale, shift=whole.shift, inner=whole.inner
        )
        compare(rows, what, index, views=(begins if crop else None, flips if flip else None))
        if crop and not flip:
            compare(rows, what, index)


def static() -> None:
    rows = rows_of(torch.uint8, 6, 3, 5, 5)
    what = find_conversion(
        Field(shape=(3, 5, 5), dtype="uint8"), Normalization(mean=MEAN, std=STD, divisor=255), None
    )
    assert what is not None
    view = rows.to(DEVICE)
    gather = TritonGather(view, what, ConvertingGather(view, what, 2, static=True).room)
    first = gather(torch.tensor([1, 2], device=DEVICE))
    assert gather(torch.tensor([3, 0], device=DEVICE)).data_ptr() == first.data_ptr()
    assert same(first, ConvertingGather(rows, what, 2)(torch.tensor([3, 0])))
    assert gather(torch.tensor([], dtype=torch.int64, device=DEVICE)).shape == (0, 3, 5, 5)


def other_default_dtype() -> None:
    rows = rows_of(torch.uint8, 6, 3, 5, 5)
    what = find_conversion(
        Field(shape=(3, 5, 5), dtype="uint8"), Normalization(mean=MEAN, std=STD, divisor=255), None
    )
    assert what is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        compare(rows, what, torch.tensor([5, 0, 2, 2, 4]))
    finally:
        torch.set_default_dtype(torch.float32)


CHECKS = (normalised_and_cast, windows, crops_and_mirrors, static, other_default_dtype)


if __name__ == "__main__":
    for check in CHECKS:
        check()
        sys.stdout.write(check.__name__ + "\n")
