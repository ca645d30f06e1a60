"""Validation in physical space: the decoder of a cache, and what its encoder loses.

Everything is made from the recipe and the weights stored beside the cache, so it is there without raw data.
What the encoder loses is measured on a few records against raw fields: those that the cache keeps, else
those of the source, which a thread reads while training goes on; storage that does not answer costs the
figure, and nothing else.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from stoker.encoders.decode import Decode, decoder_of
from stoker.encoders.keeping import KEEPING
from stoker.errors import StokerError
from stoker.precompute import EncodeFiller
from stoker.store import Cache
from stoker.store.convert import from_array
from stoker.store.local import LocalStorage
from stoker.store.strict_json import as_object
from stoker.threads import Pool, ending
from stoker.train.config import PhysicalSpace
from stoker.units import MIB

log = logging.getLogger("stoker")
SAMPLES = 4
"""Records that are compared with their raw fields."""
MAX_WEIGHTS_BYTES = 1024 * MIB
MAX_FIELD_BYTES = 32 * MIB
"""Of each of them the first steps, up to so many bytes of the field."""
WAIT_S = 5.0
"""Seconds to wait for those when training is over."""


def physical_space(cache: Cache) -> PhysicalSpace | None:
    """How to get from latents of `cache` to fields; None where its encoder has no decoder."""
    identity = as_object(cache.recipe.entries["encoder"])
    decode = _decoder(cache, identity)
    if identity is None or decode is None or "latent" not in cache.schema:
        return None
    lost = _Reconstruction(cache, decode, _field(identity))
    return PhysicalSpace(decode=decode, reconstruction=lost.finish)


def _decoder(cache: Cache, identity: Mapping[str, Any] | None) -> Decode | None:
    if identity is None:
        return None
    storage = LocalStorage(cache.path.parent.parent / "encoders")
    try:
        weights = load(storage.read(f"{identity['weights']}.safetensors", limit_bytes=MAX_WEIGHTS_BYTES))
        return decoder_of(identity, weights)
    except (OSError, StokerError, SafetensorError, KeyError) as error:
        log.info("no validation in physical space: the encoder's weights cannot be read (%s)", error)
        return None


def _field(identity: Mapping[str, Any]) -> str:
    """The field of the sample that the latents stand for."""
    config = identity["config"]
    inner = as_object(config.get("inner"))
    return str(config["field"]) if inner is None or identity["class"] != KEEPING else _field(inner)


class _Reconstruction:
    """Decoded records against raw fields, measured in a thread."""

    def __init__(self, cache: Cache, decode: Decode, field: str) -> None:
        # A handle of its own: the loader's closes and opens shards as it needs them.
        self._cache = Cache(cache.path, cache.recipe, cache.index)
        self._decode, self._field = decode, field
        filler = cache.filler
        # A copy, with files of its own: whoever mends the cache may be reading through the other one.
        self._source = copy.deepcopy(filler.source) if isinstance(filler, EncodeFiller) else None
        self._found: float | None = None
        # Of the loader's pools, whose threads do not end inside torch when the program does.
        self._ticket = Pool(1, "stoker-reconstruction").submit(self._run)

    def finish(self) -> float | None:
        """What was found; None: no raw field is at hand, or reading it takes too long."""
        self._ticket.wait(WAIT_S)
        return self._found

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._found = self._measure()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the report goes without this figure
            log.info("what the encoder loses was not measured: %s", error)

    def _measure(self) -> float | None:
        numbers = self._cache.numbers
        chosen = numbers[np.linspace(0, len(numbers) - 1, min(SAMPLES, len(numbers))).round().astype(int)]
        wrong = size = 0.0
        for number in np.unique(chosen).tolist():
            if ending():  # the exit waits for one sample, not for all of them
                return None
            record = self._cache[number]
            latents = record["latent"]
            if latents.ndim > 2:
                latents = latents[: max(1, MAX_FIELD_BYTES // self._decode(latents[:1]).nbytes)]
            raw = self._raw(number, record, len(latents))
            if raw is None:
                return None
            if latents.ndim > 2:
                raw = raw[: len(latents)]
            wrong += float((self._decode(latents).double() - raw).square().sum())
            size += float(raw.square().sum())
        return (wrong / size) ** 0.5 if size else None

    def _raw(self, number: int, record: Mapping[str, Tensor], steps: int) -> Tensor | None:
        if self._field in record:
            return record[self._field].double()
        if self._source is None:
            return None
        spec = self._source.schema()[self._field]
        sample = self._source.read(number, 0, steps) if spec.time else self._source.read(number)
        return from_array(np.ascontiguousarray(sample[self._field]), spec.dtype).double()
