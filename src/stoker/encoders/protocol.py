"""The protocol of an encoder, and the fixed size of an encode batch.

An encoder is frozen: it is applied once to every sample and never again. So its identity (class, settings,
weights, version of its code) is part of the recipe, and its weights are stored next to the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stoker.schema import Json, Schema
from stoker.units import MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatchSize:
    """Samples and steps encoded in one call. Part of the recipe, because kernels may give other last bits
    for other batch sizes; so it may depend on the schema alone, never on memory or device.
    """

    samples: int
    """Consecutive samples of one part per call; short batches are padded with zeros."""
    steps: int | None = None
    """Time steps per call when samples are cut over time (then `samples` is 1); None: whole samples."""
    lengths: tuple[int, ...] = ()
    """Lengths that ragged samples are padded to, ascending: each to the smallest that is not shorter, and
    `samples` of one length are encoded in one call. Longer ones are encoded alone. Empty: one at a time."""


@runtime_checkable
class Encoder(Protocol):
    """Turns raw samples into tensors once, so that training never has to."""

    @property
    def independent_steps(self) -> bool:
        """True if output step t depends on input step t alone, so that long samples may be cut over time."""
        ...

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the fields of a record as encoded, before any storage dtype.

        Args:
            sample_schema: Fields of the samples, by name.

        Raises:
            EncoderError: The samples lack a field, or have a shape that this encoder cannot take.
        """
        ...

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size of an encode batch, from the schema alone.

        Args:
            sample_schema: Fields of the samples, by name.
        """
        ...

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode one batch of `n` samples.

        Args:
            batch: Each field `(n, *shape)` on the device given to `to`; with ragged fields `n` is 1 and
                axis 1 has that sample's length. bfloat16 fields arrive as bfloat16.

        Returns:
            Each field `(n, *shape)` on the same device; fresh tensors, not views of the input's memory
            unless passed through unchanged. Every field of the sample that should stay in the record
            (parameters) must be passed through here.

        A sample must not depend on its neighbors in the batch. Precompute calls this in inference mode, with
        float32 products in full precision. An encoder that wants TF32 or the like sets torch's switches in
        here, and says so in `identity`.
        """
        ...

    def to(self, device: torch.device) -> None:
        """Move weights to a device.

        Args:
            device: Where batches will be.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the exact weights, by name; empty for an encoder without any."""
        ...

    def identity(self) -> dict[str, Json]:
        """Return what changes the output: `{"class", "config", "weights" (sha256 by content), "version"}`."""
        ...


# ----------------------------------------------------------------------------------------------------------
# Choose the fixed encode batch of an encoder from schemas alone.
#
# Its size is part of the recipe, since kernels may give other last bits for other batch sizes. So nothing
# here looks at memory, devices or the number of samples.


GROUP_BYTES = 8 * MIB
"""Input and output of one call: small enough for the caches of a CPU, large enough that a call is cheap.

Source: `performance.md`, 4-8 samples of (201, 1024) float32 a call were best.
"""
CUT_BYTES = 64 * MIB
"""Samples (input and output) above this are cut over time, where time steps are independent."""
MOST_SAMPLES = 256


def fixed_batch_size(inputs: Schema, outputs: Schema, *, cut_time: bool) -> EncodeBatchSize:
    """Return the batch size for samples of `inputs` that become records of `outputs`.

    Args:
        inputs, outputs: Ragged fields are encoded one sample at a time.
        cut_time: Time steps are independent, so that a large sample may be cut.

    >>> from stoker.schema import Field
    >>> data = Field(shape=(201, 1, 1024, 1), dtype="float32", time=True)
    >>> fixed_batch_size({"data": data}, {}, cut_time=True)
    EncodeBatchSize(samples=10, steps=None, lengths=())
    """
    fields = [*inputs.values(), *outputs.values()]
    if any(field.ragged for field in fields):
        return EncodeBatchSize(samples=1)
    size_bytes = max(1, sum(field.size_bytes() for field in fields))
    steps = {field.shape[0] for field in fields if field.time}
    if cut_time and size_bytes > CUT_BYTES and len(steps) == 1:
        count = steps.pop()
        return EncodeBatchSize(samples=1, steps=max(1, min(count, GROUP_BYTES * count // size_bytes)))
    return EncodeBatchSize(samples=max(1, min(MOST_SAMPLES, GROUP_BYTES // size_bytes)))
