"""Whether an encoder works at all: brought to its device, and given a sample of zeros."""

from __future__ import annotations

import time

import torch

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved
from stoker.errors import EncoderError, ResourceError, StalledError, StokerError
from stoker.precompute.precision import full_precision
from stoker.runtime.threads import call_within
from stoker.schema import Schema
from stoker.store.convert import torch_dtype


def try_encoder(encoder: Encoder, schema: Schema, device: str, deadline_s: float) -> float:
    """Seconds to bring an encoder to its device and encode zeros, which short groups are padded with.

    Args:
        encoder: Left where it was.
        schema: Of the samples. Long ones are cut over time as for encoding; a ragged axis has one entry.
        device, deadline_s: Where it runs, and how long that may take.

    Raises:
        EncoderError: It fails, or does not return what its schema says.
        ResourceError: The device's memory does not suffice.
        StalledError: It is not done in time.
    """
    where, steps = torch.device(device), encoder.group(schema).steps

    def encode() -> float:
        begin = time.perf_counter()
        with moved(encoder, where):
            batch: dict[str, torch.Tensor] = {}
            for name, field in schema.items():
                length = 1 if field.ragged else steps if field.time and steps is not None else None
                shape = field.shape if length is None else (length, *field.shape[1:])
                batch[name] = torch.zeros((1, *shape), dtype=torch_dtype(field.dtype), device=where)
            with torch.inference_mode(), full_precision():
                found = encoder.encode(batch)
        if missing := encoder.schema(schema).keys() - found.keys():
            raise EncoderError(f"the encoder's schema promises {sorted(missing)}, which it did not return")
        return time.perf_counter() - begin

    try:
        return call_within(deadline_s, encode, "the encoder")
    except StalledError as error:
        raise EncoderError(f"the encoder did not encode a sample of zeros within {deadline_s:g} s") from error
    except StokerError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"the encoder has no memory on {device} for one sample: {error}") from error
    except Exception as error:
        raise EncoderError(
            f"the encoder fails on a sample of zeros on {device}: {type(error).__name__}: {error}"
        ) from error
