"""An item of a Dataset gives the same fields whichever way it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SourceError
from stoker.sources.torch_items import PlainItems, flatten_item

DTYPES = ["float16", "float32", "float64", "uint8", "int32", "int64", "bool", ">f4", "uint16"]


def array(dtype: str, shape: tuple[int, ...], value: int) -> np.ndarray[Any, Any]:
    return np.full(shape, value).astype(dtype)


def tensor(dtype: str, shape: tuple[int, ...], value: int) -> torch.Tensor:
    return torch.full(shape, value).to(getattr(torch, dtype))


shapes = st.sampled_from([(), (2,), (3, 2), (0,)])
values = st.integers(0, 3)
leaves = st.one_of(
    st.builds(array, st.sampled_from(DTYPES), shapes, values),
    st.builds(tensor, st.sampled_from(["float32", "float64", "bfloat16", "uint8", "bool"]), shapes, values),
    st.builds(lambda n: torch.arange(12.0).reshape(3, 4).T[: n + 1], values),
    st.builds(lambda n: np.arange(12.0, dtype=np.float32).reshape(3, 4).T[: n + 1], values),
    st.builds(lambda n: torch.ones(2, requires_grad=True) * n, values),
    st.builds(np.float32, values),
    st.sampled_from([0, 1, 2**63, True, False, 0.5, float("inf"), 1e300]),
    st.builds(lambda n: {"a": n, "b": [n, n]}, values),
)
items = st.one_of(
    leaves,
    st.dictionaries(st.sampled_from("xyz"), leaves, min_size=1),
    st.lists(leaves, min_size=1, max_size=3),
    st.lists(leaves, min_size=1, max_size=3).map(tuple),
)


def flattened(item: Any) -> dict[str, np.ndarray[Any, Any]] | None:
    try:
        return {name: found for name, (found, _) in flatten_item(item, where="item 0").items()}
    except SourceError:
        return None


def plain_and_wanted(
    first: Any, second: Any
) -> Iterator[tuple[PlainItems, Any, dict[str, np.ndarray[Any, Any]] | None]]:
    """Yield the short way for items like the first, each item, and what the long way reads of it."""
    if (known := flattened(first)) is None:
        return
    plain = PlainItems(first, flatten_item(first, where="item 0"))
    yield plain, first, known
    yield plain, second, flattened(second)


@given(items, items)
def test_the_short_way_reads_what_the_long_way_does_or_leaves_it(first: Any, second: Any) -> None:
    for plain, item, wanted in plain_and_wanted(first, second):
        read = plain.read(item)
        if read is None:
            continue
        assert wanted is not None
        assert list(read) == list(wanted)
        for name, values in read.items():
            assert (values.dtype, values.shape) == (wanted[name].dtype, wanted[name].shape), name
            assert values.tobytes() == wanted[name].tobytes()
            assert values.flags.owndata
            assert values.flags.c_contiguous


@given(items, items)
def test_what_is_read_into_rows_is_what_is_read_or_is_left(first: Any, second: Any) -> None:
    known = flattened(first) or {}
    for plain, item, wanted in plain_and_wanted(first, second):
        rows = {name: np.full((3, *values.shape), 7, values.dtype) for name, values in known.items()}
        if not plain.read_into(item, {name: values[1, ...] for name, values in rows.items()}):
            continue
        assert wanted is not None
        assert rows.keys() == wanted.keys()
        for name, values in rows.items():
            assert values.dtype == wanted[name].dtype
            assert values[1].tobytes() == wanted[name].tobytes()
            assert (values[::2] == np.array(7).astype(values.dtype)).all()


def test_flat_items_of_arrays_and_tensors_are_read_the_short_way() -> None:
    for item in (
        np.ones((2, 3), np.uint8),
        torch.ones(3),
        (torch.ones(2), 3),
        {"x": np.ones(2, np.float32), "label": 1, "seen": True},
    ):
        found = flatten_item(item, where="item 0")
        assert PlainItems(item, found).read(item) is not None
        assert PlainItems(item, found).read_into(
            item, {name: values.copy() for name, (values, _) in found.items()}
        )
