"""Encode samples without time as a pair: the input of a steady problem, and its solution.

Darcy flow has a permeability and a pressure, and no time. Each is encoded by an encoder of its own. The
record has `latent_input` and `latent`, without a time axis. An operator learns the map between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.encoders.protocol import Encoder, Group, fixed_group
from stoker.encoders.weights import digest_weights
from stoker.errors import EncoderError
from stoker.schema import Field, Json, Schema

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEADY = "stoker.SteadyEncoder"
"""The class in the identity."""
INPUT, SOLUTION = "latent_input", "latent"
"""Fields of a record."""


class SteadyEncoder:
    """Encoder of two fields of a sample without time; satisfies `Encoder`.

    Args:
        input: Encoder whose `latent` becomes `latent_input`, `(L, D)`.
        solution: Encoder whose `latent` is that of the solution, of the same shape.

    Fields that both pass through (parameters) stay in the record.

    >>> from stoker import GridEncoder
    >>> size = {"channels": 1, "grid": (16, 16), "patch": (4, 4), "tokens": 16, "dim": 16}
    >>> encoder = SteadyEncoder(GridEncoder(**size, field="nu"), GridEncoder(**size))
    >>> plane = Field(shape=(16, 16, 1), dtype="float32")
    >>> {name: field.shape for name, field in encoder.schema({"data": plane, "nu": plane}).items()}
    {'latent': (16, 16), 'latent_input': (16, 16)}
    """

    def __init__(self, input: Encoder, solution: Encoder) -> None:
        self._input, self._solution = input, solution

    @property
    def independent_steps(self) -> bool:
        """True: there is one step."""
        return True

    def schema(self, sample_schema: Schema) -> Schema:
        """Return `latent` and `latent_input`, and the fields that both encoders pass through.

        Raises:
            EncoderError: A sample has time, or the two latents differ in shape.
        """
        given, found = self._input.schema(sample_schema), self._solution.schema(sample_schema)
        pair: dict[str, Field] = {}
        for name, schema in ((INPUT, given), (SOLUTION, found)):
            if "latent" not in schema:
                raise EncoderError(f"an encoder of {name!r} makes {', '.join(schema)}. Expected 'latent'")
            pair[name] = schema["latent"]
        one, other = pair[INPUT], pair[SOLUTION]
        if one.time or other.time:
            raise EncoderError(
                f"the input's latent is {one.shape} and the solution's {other.shape}, with a time axis. A "
                "steady problem has none: leave data.input out, and train from one step to the next"
            )
        if replace(one, dtype=other.dtype) != other:
            raise EncoderError(
                f"the input's latent is {one.shape} and the solution's {other.shape}. One operator maps "
                "one to the other: give both the same number of tokens and dim"
            )
        return {SOLUTION: other, INPUT: one, **{name: found[name] for name in _shared(given, found)}}

    def group(self, sample_schema: Schema) -> Group:
        """About 8 MiB of samples and latents a call."""
        return fixed_group(sample_schema, self.schema(sample_schema), cut_time=False)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode both fields of a group."""
        given, found = self._input.encode(batch), self._solution.encode(batch)
        pair = {SOLUTION: found["latent"], INPUT: given["latent"]}
        return {**pair, **{name: found[name] for name in _shared(given, found)}}

    def to(self, device: torch.device) -> None:
        """Move the weights of both."""
        self._input.to(device)
        self._solution.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Those of both, as `input.NAME` and `solution.NAME`."""
        parts = {"input": self._input.weights(), "solution": self._solution.weights()}
        return {f"{part}.{name}": value for part, own in parts.items() for name, value in own.items()}

    def identity(self) -> dict[str, Json]:
        """The identities of both."""
        config: dict[str, Json] = {"input": self._input.identity(), "solution": self._solution.identity()}
        return {"class": STEADY, "config": config, "weights": digest_weights(self.weights()), "version": 1}


def is_steady(fields: Iterable[str]) -> bool:
    """Return whether records with these fields hold a steady problem."""
    return {INPUT, SOLUTION} <= {*fields}


def weights_of(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of one encoder, `input` or `solution`, by its own names."""
    start = f"{part}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def _shared(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in other if name in one and name != "latent"]
