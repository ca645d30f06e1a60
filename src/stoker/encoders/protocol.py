"""The protocol of an encoder, and the fixed size of an encode batch.

An encoder is frozen: it is applied once to every sample and never again. So its identity (class, settings,
weights, version of its code) is part of the recipe, and its weights are stored next to the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stoker.arguments import check, whole
from stoker.errors import EncoderError
from stoker.schema import SHAPE_SUFFIX, Json, Schema
from stoker.units import MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatchSize:
    """Samples and steps encoded in one call. Part of the recipe, because kernels may give other last bits
    for other batch sizes; so it may depend on the schema alone, never on memory or device.

    Raises:
        EncoderError: The numbers contradict each other.
    """

    samples: int
    """Consecutive samples of one part per call; short batches are padded with zeros. With `lengths`, samples
    of one padded length per call, wherever they are in the dataset."""
    steps: int | None = None
    """Time steps per call when samples are cut over time (then `samples` is 1); None: whole samples."""
    lengths: tuple[int, ...] = ()
    """Lengths that ragged samples are padded to, ascending: each to the smallest that is not shorter. Longer
    samples, and empty ones, are encoded alone at their own length. `()`: each ragged sample is."""

    def __post_init__(self) -> None:
        """Refuse what no call can have; numbers of numpy become plain ones, which the recipe holds."""
        check({"samples": (self.samples, whole())}, EncoderError)
        object.__setattr__(self, "samples", int(self.samples))
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
        lengths = self.lengths
        ascending = all(low < high for low, high in itertools.pairwise(lengths))
        if lengths and (not ascending or lengths[0] < 1 or self.steps is not None):
            raise EncoderError(
                f"lengths {lengths} with steps {self.steps}: padded lengths ascend, are at least 1, and go "
                "with complete samples",
                hint="Give EncodeBatchSize lengths such as (32, 64, 128), and no steps",
            )

    @property
    def consecutive(self) -> int:
        """Consecutive samples that are read for one call; with `lengths` batches form later, from any."""
        return 1 if self.lengths else self.samples

    def padded(self, length: int) -> int | None:
        """Return what a sample of this length is padded to; None: it is encoded alone.

        >>> size = EncodeBatchSize(samples=8, lengths=(32, 64))
        >>> size.padded(33), size.padded(65), size.padded(0)
        (64, None, None)
        """
        return next((known for known in self.lengths if known >= length), None) if length else None


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
                axis 1 has that sample's length. bfloat16 fields arrive as bfloat16. Where
                `encode_batch_size` has `lengths`, a ragged field is `(n, L, *step)` with zeros behind the
                end of each sample, and `<field>.lengths` `(n,)` int64 is next to it. Rows that stand for no
                sample are zeros of length 1.

        Returns:
            Each field `(n, *shape)` on the same device; fresh tensors, not views of the input's memory
            unless passed through unchanged. Every field of the sample that should stay in the record
            (parameters) must be passed through here. With `lengths`, ragged fields are padded,
            `(n, L_out, *step)`. Their lengths are `<field>.lengths` if that is returned, else those of the
            input field of that name, else those of the first ragged input.

        A sample must not depend on its neighbors in the batch, nor on its padding. Precompute calls this in
        inference mode, with float32 products in full precision. An encoder that wants TF32 or the like sets
        torch's switches in here, and says so in `identity`.
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


class SampleShapes(Protocol):
    """A source, as far as an encoder asks it."""

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        ...


def schema_of(source: SampleShapes) -> Schema:
    """Return the fields of the samples of a source that encoders are made for.

    Raises:
        EncoderError: It is a Dataset or something else.
    """
    if not hasattr(source, "schema"):
        raise EncoderError(
            f"{source!r} is not a source", hint="For a Dataset give stoker.TorchSource(dataset)"
        )
    return source.schema()


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
MOST_PADDED = 16
"""Samples of a call at the largest of `lengths`: more of them wait longer for each other."""


def fixed_batch_size(
    inputs: Schema, outputs: Schema, *, cut_time: bool, lengths: tuple[int, ...] = ()
) -> EncodeBatchSize:
    """Return the batch size for samples of `inputs` that become records of `outputs`.

    Args:
        inputs, outputs: Ragged fields are encoded one sample at a time, unless `lengths` are given.
        cut_time: Time steps are independent, so that a large sample may be cut.
        lengths: What ragged samples are padded to.

    >>> from stoker.schema import Field
    >>> data = Field(shape=(201, 1, 1024, 1), dtype="float32", time=True)
    >>> fixed_batch_size({"data": data}, {}, cut_time=True)
    EncodeBatchSize(samples=10, steps=None, lengths=())
    """
    fields = [*inputs.values(), *outputs.values()]
    if lengths and any(field.ragged for field in inputs.values()):
        size_bytes = sum(field.size_bytes(lengths[-1] if field.ragged else None) for field in fields)
        most = min(MOST_PADDED, GROUP_BYTES // max(1, size_bytes))
        return EncodeBatchSize(samples=max(1, most), lengths=lengths)
    if any(field.ragged for field in fields):
        return EncodeBatchSize(samples=1)
    size_bytes = max(1, sum(field.size_bytes() for field in fields))
    steps = {field.shape[0] for field in fields if field.time}
    if cut_time and size_bytes > CUT_BYTES and len(steps) == 1:
        count = steps.pop()
        return EncodeBatchSize(samples=1, steps=max(1, min(count, GROUP_BYTES * count // size_bytes)))
    return EncodeBatchSize(samples=max(1, min(MOST_SAMPLES, GROUP_BYTES // size_bytes)))


def in_own_axes(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a field of a batch; a folded one in its own axes, `(1, *sizes, *rest)`, by its size field."""
    sizes = batch.get(name + SHAPE_SUFFIX)
    if sizes is None:
        return batch[name]
    return batch[name].reshape(1, *map(int, sizes[0]), *batch[name].shape[2:])


TOKEN_LENGTHS = (16, 32, 64, 128, 256, 512)
"""Lengths that sequences of tokens are padded to: each at most doubles, and a model meets few shapes."""
