"""Fields of the raw sample stored next to the encoder's output, for losses on the fields themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.encoders.protocol import Encoder, Group
from stoker.errors import EncoderError
from stoker.schema import SHAPE_SUFFIX, Json, Schema

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEEPING = "stoker.Keeping"
"""The class in the identity."""


def field_names(fields: str | Sequence[str]) -> tuple[str, ...]:
    """Names, one or several, each once and sorted: their order changes nothing."""
    return tuple(sorted({fields} if isinstance(fields, str) else {*fields}))


def keeping(encoder: Encoder | None, fields: str | Sequence[str]) -> Encoder | None:
    """The same encoder, with raw `fields` in its records.

    None stays None: it stores samples as they are, so all of their fields are there.
    """
    names = field_names(fields)
    return encoder if encoder is None or not names else Keeping(encoder, names)


class Keeping:
    """Encoder that hands on to `inner` and adds raw fields to its records; satisfies `Encoder`."""

    def __init__(self, inner: Encoder, fields: Sequence[str]) -> None:
        self.inner = inner
        self._fields = tuple(fields)

    @property
    def independent_steps(self) -> bool:
        """As `inner`."""
        return self.inner.independent_steps

    def schema(self, sample_schema: Schema) -> Schema:
        """The schema of `inner`, and the kept fields as they are in the sample.

        Raises:
            EncoderError: A field is missing, or in the record of `inner` already.
        """
        record = self.inner.schema(sample_schema)
        for name in self._fields:
            if name not in sample_schema:
                raise EncoderError(
                    f"keep names {name!r}, samples have only {', '.join(sorted(sample_schema))}. "
                    "Keep one of those, or leave keep out"
                )
            if name in record:
                raise EncoderError(
                    f"keep names {name!r}, which the encoder hands on: it is in the record already. "
                    "Leave it out of keep"
                )
        kept = {name: replace(sample_schema[name], kept=True) for name in self._with_sizes(sample_schema)}
        names = {f"{name}{k}" for name in kept for k in (0, 1)}
        if twice := sorted(names & (record.keys() | kept.keys())):
            raise EncoderError(
                f"records have a field {twice[0]!r}, which is what windows call a kept field at z0 or z1. "
                "Give the field another name in its source"
            )
        return {**record, **kept}

    def group(self, sample_schema: Schema) -> Group:
        """As `inner`."""
        return self.inner.group(sample_schema)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode, and pass the kept fields through."""
        return {**self.inner.encode(batch), **{name: batch[name] for name in self._with_sizes(batch)}}

    def _with_sizes(self, sample: Mapping[str, object]) -> list[str]:
        """The kept fields, and those that hold their sizes."""
        sizes = [name + SHAPE_SUFFIX for name in self._fields]
        return [*self._fields, *(name for name in sizes if name in sample)]

    def to(self, device: torch.device) -> None:
        """Move the weights of `inner`."""
        self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Those of `inner`."""
        return self.inner.weights()

    def identity(self) -> dict[str, Json]:
        """The kept fields, and the identity of `inner`."""
        inner = self.inner.identity()
        config: dict[str, Json] = {"fields": list(self._fields), "inner": inner}
        return {"class": KEEPING, "config": config, "weights": inner.get("weights"), "version": 1}
