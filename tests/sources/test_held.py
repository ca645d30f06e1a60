"""What a source holds in memory is counted without pickling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import stoker
from stoker.sources.pickling import estimate_pickle_bytes

ARRAY = np.zeros(250_000)
TENSOR = torch.zeros(500_000)


@dataclass
class Holder:
    """Something that holds something."""

    value: Any


@pytest.mark.parametrize(
    "value",
    [
        ARRAY, TENSOR, {"a": ARRAY, "b": [b"x" * 1_000_000]}, [np.full(30, n) for n in range(10_000)],
        [float(n) for n in range(300_000)], [ARRAY] * 5_000, [TENSOR[:10], TENSOR[10:]],
        np.array([b"%d" % n + b"x" * 500 for n in range(5_000)], object), Holder(Holder(ARRAY)),
        [Holder(np.full(1_000, n)) for n in range(300)], torch.utils.data.TensorDataset(TENSOR, TENSOR),
    ],
)  # fmt: skip
def test_it_is_near_the_size_of_the_pickle(value: object) -> None:
    pickled = len(cloudpickle.dumps(value))

    assert pickled / 2 < estimate_pickle_bytes(value) < pickled * 2


def test_what_a_source_leaves_out_of_its_pickle_does_not_count() -> None:
    class Lazy:
        def __init__(self) -> None:
            self.opened = ARRAY

        def __getstate__(self) -> dict[str, Any]:
            return {"opened": None}

    assert estimate_pickle_bytes(Lazy()) < 1000
    assert estimate_pickle_bytes(stoker.TorchSource(torch.utils.data.TensorDataset(TENSOR))) > TENSOR.nbytes
