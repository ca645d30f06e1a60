from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.loader import Normalization
from stoker.loader.gather import ConvertingGather, RowConverter, cut_images
from stoker.loader.outputs import Conversion, find_conversion
from stoker.runtime.threads import Pool
from stoker.schema import Field

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def stored(dtype: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype == "uint8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator).mul(3).to(getattr(torch, dtype))


def conversion(shape: tuple[int, ...], dtype: str, wanted: str | None, **normalize: Any) -> Conversion:
    found = find_conversion(Field(shape=shape, dtype=dtype), Normalization(**normalize), wanted)
    assert found is not None
    return found


def by_rule(rows: Tensor, what: Conversion) -> Tensor:
    """The rule, value by value in numpy: product and sum each rounded to float32, then the cast."""
    flat = rows.reshape(len(rows), -1)
    channel = np.arange(flat.shape[1]) // what.inner % len(what.scale)
    scale, shift = (np.array(v, dtype=np.float32)[channel] for v in (what.scale, what.shift))
    product = flat.to(torch.float32).numpy() * scale
    return torch.from_numpy(product + shift).to(what.dtype).reshape(rows.shape)


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 24, 20), -3), ((5, 7, 3), -1), ((6, 3, 4), -2)], ids=["chw", "hwc", "middle"]
)
def test_values_follow_the_rule_to_the_last_bit(
    shape: tuple[int, ...], axis: int, dtype: str, wanted: str
) -> None:
    rows = stored(dtype, 9, *shape)
    what = conversion(shape, dtype, wanted, mean=MEAN, std=STD, axis=axis, divisor=255)
    index = torch.tensor([8, 0, 3, 3])

    got = ConvertingGather(rows, what, 4)(index)

    assert got.dtype == getattr(torch, wanted)
    assert torch.equal(got, by_rule(rows[index], what))
    assert torch.equal(got, RowConverter(what, shape, rows.device)(rows[index]))


def test_the_result_is_what_users_write_by_hand() -> None:
    rows = stored("uint8", 6, 3, 8, 8)
    what = conversion((3, 8, 8), "uint8", None, mean=MEAN, std=STD, divisor=255)

    got = ConvertingGather(rows, what, 6)(torch.arange(6))

    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(got.double(), (rows.double() / 255 - mean) / std, rtol=0, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 160, 160), (3, 16, 16)], ids=["row-by-row", "rows-together"])
def test_large_batches_are_converted_in_pieces_by_threads(
    shape: tuple[int, ...], wanted: str, threads: int
) -> None:
    rows = stored("uint8", 64, *shape)
    what = conversion(shape, "uint8", wanted, mean=MEAN, std=STD, divisor=255)
    batch = 4 * (5 << 20) // (4 * rows[0].numel())
    index = torch.randint(0, 64, (batch,), generator=torch.Generator().manual_seed(1))
    gather = ConvertingGather(rows, what, batch, pool=Pool(threads - 1, "test") if threads > 1 else None)

    for _ in range(3):
        got = gather(index)
        assert torch.equal(got, by_rule(rows[index], what))
    assert torch.equal(gather(index[:5]), by_rule(rows[index[:5]], what))


def test_a_batch_that_somebody_holds_is_not_written_to_again() -> None:
    rows = stored("uint8", 8, 3, 200, 200)
    what = conversion((3, 200, 200), "uint8", None, mean=0.5, std=0.25, divisor=255)
    gather = ConvertingGather(rows, what, 8)

    held = gather(torch.arange(8))
    kept = held.clone()
    gather(torch.arange(8).flip(0))

    assert torch.equal(held, kept)


def test_static_gathers_write_to_one_place() -> None:
    rows = stored("uint8", 8, 3, 5, 5)
    what = conversion((3, 5, 5), "uint8", "float16", mean=MEAN, std=STD, divisor=255)
    gather = ConvertingGather(rows, what, 4, static=True)

    first = gather(torch.arange(4))
    second = gather(torch.arange(4, 8))

    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, by_rule(rows[4:], what))


@pytest.mark.parametrize("rows", [stored("uint8", 6, 3, 12, 10), stored("float32", 6, 12, 10)])
def test_crops_and_mirrors_are_those_of_slices(rows: Tensor) -> None:
    begins = torch.tensor([[0, 0], [2, 1], [4, 3], [1, 3], [3, 0], [4, 2]])
    flips = torch.tensor([True, False, True, False, False, True])

    got = cut_images(rows, (8, 7), begins, flips)

    for image, one, (y, x), flip in zip(rows, got, begins.tolist(), flips.tolist(), strict=True):
        expected = image[..., y : y + 8, x : x + 7]
        assert torch.equal(one, expected.flip(-1) if flip else expected)
    assert torch.equal(cut_images(rows, (8, 6), None, None), rows[..., 2:10, 2:8])


def test_cropped_images_are_normalised_by_their_own_channels() -> None:
    rows = stored("uint8", 6, 3, 12, 10)
    whole = conversion((3, 12, 10), "uint8", "bfloat16", mean=MEAN, std=STD, divisor=255)
    cropped = Conversion(dtype=whole.dtype, crop=(9, 8), flip=True, **_normalizing(whole))
    begins, flips = torch.tensor([[3, 2], [0, 1], [2, 2], [1, 0]]), torch.tensor([True, True, False, False])
    index = torch.tensor([5, 1, 1, 0])

    got = ConvertingGather(rows, cropped, 4)(index, (begins, flips))

    assert torch.equal(got, cut_images(by_rule(rows[index], whole), (9, 8), begins, flips))


def _normalizing(what: Conversion) -> dict[str, Any]:
    return {"scale": what.scale, "shift": what.shift, "inner": what.inner}
