"""Choose the fixed group of an encoder from schemas alone.

The group is part of the recipe, since kernels may give other last bits for other batch sizes. So nothing
here looks at memory, devices or the number of samples.
"""

from __future__ import annotations

from stoker.encoders.protocol import Group
from stoker.schema import Schema
from stoker.units import MIB

GROUP_BYTES = 8 * MIB
"""Input and output of one call: small enough for the caches of a CPU, large enough that a call is cheap.

Source: `performance.md`, 4-8 samples of (201, 1024) float32 a call were best.
"""
CUT_BYTES = 64 * MIB
"""Samples (input and output) above this are cut over time, where time steps are independent."""
MOST_SAMPLES = 256


def fixed_group(inputs: Schema, outputs: Schema, *, cut_time: bool) -> Group:
    """The group for samples of `inputs` that become records of `outputs`.

    Args:
        inputs, outputs: Ragged fields are encoded one sample at a time.
        cut_time: Time steps are independent, so that a large sample may be cut.

    >>> from stoker.schema import Field
    >>> fixed_group({"data": Field(shape=(201, 1, 1024, 1), dtype="float32", time=True)}, {}, cut_time=True)
    Group(samples=10, steps=None)
    """
    fields = [*inputs.values(), *outputs.values()]
    if any(field.ragged for field in fields):
        return Group(samples=1)
    size_bytes = max(1, sum(field.size_bytes() for field in fields))
    steps = {field.shape[0] for field in fields if field.time}
    if cut_time and size_bytes > CUT_BYTES and len(steps) == 1:
        count = steps.pop()
        return Group(samples=1, steps=max(1, min(count, GROUP_BYTES * count // size_bytes)))
    return Group(samples=max(1, min(MOST_SAMPLES, GROUP_BYTES // size_bytes)))
