"""Validation in physical space: the decoder of a cache, and what its encoder loses.

For the grid encoder all is made from the recipe and the weights stored next to the cache, so it is there
without raw data. A module of the user's own decodes itself, by its method `decode`, if its code is at hand.
What the encoder loses is measured on a few records against raw fields: those that the cache keeps, else
those of the source. A thread reads these while training runs; if storage does not answer, only the figure is
missing.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from stoker.encoders.grid import Decode, GridEncoder, decoder_of, encode_of
from stoker.encoders.wrappers import KEEPING, STEADY, FieldKeepingEncoder, NormalizedEncoder, SteadyEncoder
from stoker.errors import ConfigError, StokerError
from stoker.precompute import EncodeFiller
from stoker.runtime.jsonio import as_object
from stoker.runtime.threads import Pool, is_exiting
from stoker.schema import unfolded
from stoker.store import Cache
from stoker.store.storage import open_storage
from stoker.store.values import from_array
from stoker.train.config import FieldSpace, PhysicalSpace
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.encoders.mesh import PointDecoder

log = logging.getLogger("stoker")
SAMPLES = 4
"""Records that are compared with their raw fields."""
MAX_WEIGHTS_BYTES = 1024 * MIB
MAX_BASES_BYTES = 256 * MIB
"""Of waves at the points of records that validation keeps."""
MAX_FIELD_BYTES = 32 * MIB
"""Of each of them the first steps, up to so many bytes of the field."""
WAIT_S = 5.0
"""Seconds to wait for those when training is over."""


def physical_space(cache: Cache) -> PhysicalSpace | None:
    """Return the map from latents of `cache` to fields; None where its encoder has no decoder."""
    identity = as_object(cache.recipe.entries["encoder"])
    if identity is not None and (mesh := _mesh_identity(identity)) is not None:
        weights = _weights(cache, identity)
        return None if weights is None else mesh_space(cache, mesh, weights)
    if identity is None or "latent" not in cache.schema:
        return None
    decode = _made(cache, identity, decoder_of, _own_decoder(cache))
    if decode is None:
        return None
    lost = _grid_reconstruction(cache, decode, _field(identity))
    return PhysicalSpace(decode=decode, reconstruction=lost.finish)


def field_space(cache: Cache) -> FieldSpace:
    """Return the raw field and the encoder's maps that a decoder on latents of `cache` is trained with.

    Raises:
        ConfigError: It holds samples as they are, so that there is nothing to decode; or no raw field.
    """
    identity = as_object(cache.recipe.entries["encoder"])
    if identity is None:
        raise ConfigError(
            f"{cache.path} holds samples as they are, and a decoder is trained on what an encoder made",
            hint="Leave training.use_inverse_losses and the stage decoder out, or set encoder.kind=grid",
        )
    name = _field(identity)
    kept = cache.schema.get(name)
    if kept is None or not kept.kept:
        raise ConfigError(
            f"{cache.path} keeps no raw field {name!r}, which a decoder is trained on",
            hint=f"Encode with precompute.keep={name}",
        )
    return FieldSpace(
        field=name,
        decode=_made(cache, identity, decoder_of),
        encode=_made(cache, identity, encode_of),
    )


def _made(
    cache: Cache, identity: Mapping[str, Any], make: Callable[..., Decode | None], *more: Any
) -> Decode | None:
    """Return the map that `make` gives from weights next to the caches; None: they cannot be read."""
    weights = _weights(cache, identity)
    try:
        return None if weights is None else make(identity, weights, *more)
    except KeyError as error:
        log.info("no validation in physical space: the encoder's weights lack %s", error)
        return None


def _weights(cache: Cache, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    storage = open_storage(cache.path.parent.parent / "encoders")
    try:
        return load(storage.read(f"{identity['weights']}.safetensors", limit_bytes=MAX_WEIGHTS_BYTES))
    except (OSError, StokerError, SafetensorError) as error:
        log.info("no validation in physical space: the encoder's weights cannot be read (%s)", error)
        return None


def _own_decoder(cache: Cache) -> Decode | None:
    """Return the decoder of a module of the user's own, if it gives fields as they are in the samples."""
    filler = cache.filler
    if not isinstance(filler, EncodeFiller) or "latent" not in cache.schema:
        return None
    encoder = filler.encoder
    while isinstance(encoder, FieldKeepingEncoder | NormalizedEncoder):
        encoder = encoder.inner
    if isinstance(encoder, GridEncoder | SteadyEncoder):
        return None  # recipe and weights are enough for these
    from stoker.encoders.module import ModuleEncoder  # large, and few runs have one

    if not isinstance(encoder, ModuleEncoder):
        return None
    field = _field(as_object(cache.recipe.entries["encoder"]) or {})
    decode = encoder.decoder(len(cache.schema["latent"].step_shape))
    if decode is None or field != _field(encoder.identity()):  # another field than what is normalized
        return None
    try:
        found = decode(torch.zeros(1, *cache.schema["latent"].step_shape)).shape[1:]
    except Exception as error:  # noqa: BLE001 - the user's code: the report goes without these figures
        log.warning("no validation in physical space: the encoder's decode fails on zeros: %s", error)
        return None
    wanted = filler.source.schema()[field].step_shape
    if tuple(found) == wanted:
        return decode
    log.warning(
        "no validation in physical space: the encoder's decode gives %s for a step, field %s has %s",
        *(tuple(found), field, wanted),
    )
    return None


def _mesh_identity(identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the identity of the mesh encoder that made the latents; None: another one did."""
    if identity["class"] == KEEPING:
        return _mesh_identity(identity["config"]["inner"])
    return identity if identity["class"] == "stoker.MeshEncoder" else None


def mesh_space(cache: Cache, identity: Mapping[str, Any], weights: Mapping[str, Tensor]) -> PhysicalSpace:
    """Return the maps from latents of the mesh encoder to fields at the points of each record."""
    from stoker.encoders.mesh import PointDecoder

    config = identity["config"]
    decoder = PointDecoder(weights, config["channels"])
    lost = _point_reconstruction(cache, decoder, config)
    return PhysicalSpace(decode=_PointMaps(cache, decoder), reconstruction=lost.finish)


class _PointMaps:
    """Decodes at the points of each record; keeps the waves at the points of the last ones."""

    def __init__(self, cache: Cache, decoder: PointDecoder) -> None:
        self._cache = Cache(cache.path, cache.recipe, cache.index)  # a handle of its own, as below
        self._decoder = decoder
        self._bases: OrderedDict[int, Tensor] = OrderedDict()

    def of(self, number: int, latents: Tensor) -> Tensor:
        """As `DecodeByRecord.of`."""
        if number not in self._bases:
            self._bases[number] = self._decoder.basis(self._cache[number]["coords"]).to(latents.device)
            while len(self._bases) > 1 and sum(b.nbytes for b in self._bases.values()) > MAX_BASES_BYTES:
                self._bases.popitem(last=False)
        self._bases.move_to_end(number)
        return self._decoder.at(latents, self._bases[number])


def _field(identity: Mapping[str, Any]) -> str:
    """Return the field of the sample that the latents stand for: of several, the first."""
    config = identity["config"]
    if identity["class"] == STEADY:
        return _field(config["solution"])
    inner = as_object(config.get("inner"))
    if inner is not None and identity["class"] == KEEPING:
        return _field(inner)
    return config["field"] if isinstance(config["field"], str) else str(config["field"][0])


class _Reconstruction:
    """Decoded records against raw fields, measured in a thread."""

    def __init__(
        self,
        cache: Cache,
        names: Sequence[str],
        decode: Callable[[Mapping[str, Tensor]], Tensor],
        join: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> None:
        """Begin.

        Args:
            cache: Holds the records.
            names: The raw fields that they stand for.
            decode: From a record to the field, of trajectories the first steps.
            join: From raw fields to one as the encoder was given it.
        """
        # A handle of its own: the loader's closes and opens shards as it needs them.
        self._cache = Cache(cache.path, cache.recipe, cache.index)
        filler = cache.filler
        # A copy, with files of its own: what repairs the cache may be reading through the other one.
        self._source = copy.deepcopy(filler.source) if isinstance(filler, EncodeFiller) else None
        self._names, self._decode, self._join = names, decode, join
        self._found: float | None = None
        # Of the loader's pools, whose threads do not end inside torch when the program does.
        self._ticket = Pool(1, "stoker-reconstruction", all_cores=True).submit(self._run)

    def finish(self) -> float | None:
        """Return the error found; None: no raw field is available, or reading it takes too long."""
        self._ticket.wait(WAIT_S)
        return self._found

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._found = self._measure()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the report goes without this figure
            log.info("what the encoder loses was not measured: %s", error)

    def _measure(self) -> float | None:
        numbers = self._cache.indices
        chosen = numbers[np.linspace(0, len(numbers) - 1, min(SAMPLES, len(numbers))).round().astype(int)]
        wrong = size = 0.0
        for number in np.unique(chosen).tolist():
            if is_exiting():  # the exit waits for one sample, not for all of them
                return None
            record = self._cache[number]
            decoded = self._decode(record)
            steps = len(decoded) if self._cache.schema["latent"].time else None
            fields = self._fields(number, record, steps)
            if fields is None:
                return None
            raw = self._join({name: fields[name][:steps].double() for name in self._names})
            wrong += float((decoded.double() - raw).square().sum())
            size += float(raw.square().sum())
        return (wrong / size) ** 0.5 if size else None

    def _fields(
        self, number: int, record: Mapping[str, Tensor], steps: int | None
    ) -> Mapping[str, Tensor] | None:
        """Return a mapping with the raw fields, of at least the first `steps`; None: no raw data."""
        if all(name in record for name in self._names):
            return record
        if self._source is None:
            return None
        schema = self._source.schema()
        sample = self._source.read(number) if steps is None else self._source.read(number, 0, steps)
        own = {n: from_array(np.ascontiguousarray(a), schema[n].dtype) for n, a in sample.items()}
        return unfolded(own, schema)


def _first_steps(latents: Tensor, step_bytes: int) -> Tensor:
    """Return latents of a trajectory, as many steps as memory is spent on."""
    return latents[: max(1, MAX_FIELD_BYTES // max(1, step_bytes))]


def _grid_reconstruction(cache: Cache, decode: Decode, field: str) -> _Reconstruction:
    """Of fields that a decoder gives on a grid."""

    def decoded(record: Mapping[str, Tensor]) -> Tensor:
        latents = record["latent"]
        if cache.schema["latent"].time:
            latents = _first_steps(latents, decode(latents[:1]).nbytes)
        return decode(latents)

    return _Reconstruction(cache, [field], decoded, lambda raw: raw[field])


def _point_reconstruction(cache: Cache, decoder: PointDecoder, config: Mapping[str, Any]) -> _Reconstruction:
    """Of fields at points: raw ones are displacement from the first step in place of positions."""

    def decoded(record: Mapping[str, Tensor]) -> Tensor:
        basis = decoder.basis(record["coords"])
        return decoder.at(_first_steps(record["latent"], 4 * len(basis) * config["channels"]), basis)

    def joined(raw: Mapping[str, Tensor]) -> Tensor:
        moved = {n: v - v[:1] if n == config["moving"] else v for n, v in raw.items()}
        return torch.cat([values.reshape(*values.shape[:2], -1) for values in moved.values()], dim=-1)

    return _Reconstruction(cache, config["fields"], decoded, joined)
