"""Encoders made of encoders: fields kept or selected, several variants, samples normalized, steady pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.module import bound_module, describe_function, qualified_name
from stoker.encoders.protocol import EncodeBatchSize, Encoder, fixed_batch_size
from stoker.encoders.weights import digest_weights, module_weights, weights_device
from stoker.errors import ConfigError, EncoderError, RecordError, arg
from stoker.schema import LENGTHS_SUFFIX, SHAPE_SUFFIX, Field, Json, Sample, Schema, as_json
from stoker.splitmix import GAMMA, keys_of, mix, mix_, signed
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# Fields of the raw sample stored next to the encoder's output, for losses on the fields themselves.


KEEPING = "stoker.Keeping"
"""The class in the identity."""


def field_names(fields: str | Sequence[str]) -> tuple[str, ...]:
    """Return names, one or several, each once and sorted: their order changes nothing."""
    return tuple(sorted({fields} if isinstance(fields, str) else {*fields}))


def keep_fields(encoder: Encoder | None, fields: str | Sequence[str]) -> Encoder | None:
    """Return the same encoder, with raw `fields` in its records.

    None stays None: it stores samples as they are, so all of their fields are there.
    """
    names = field_names(fields)
    return encoder if encoder is None or not names else FieldKeepingEncoder(encoder, names)


def select_fields(encoder: Encoder | None, fields: str | Sequence[str]) -> Encoder | None:
    """Return the same encoder, with only `fields` of its records; none named: all."""
    names = field_names(fields)
    return FieldSelectingEncoder(encoder, names) if names else encoder


class FieldKeepingEncoder:
    """Encoder that hands on to `inner` and adds raw fields to its records; satisfies `Encoder`."""

    def __init__(self, inner: Encoder, fields: Sequence[str]) -> None:
        self.inner = inner
        self._fields = tuple(fields)

    @property
    def independent_steps(self) -> bool:
        """As `inner`."""
        return self.inner.independent_steps

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the schema of `inner`, and the kept fields as they are in the sample.

        Raises:
            EncoderError: A field is missing, or in the record of `inner` already.
        """
        record = self.inner.schema(sample_schema)
        for name in self._fields:
            if name not in sample_schema:
                raise EncoderError(
                    f"keep names {name!r}, samples have only {', '.join(sorted(sample_schema))}",
                    hint="Keep one of those, or leave keep out",
                )
            if name in record:
                raise EncoderError(
                    f"keep names {name!r}, which the encoder hands on: it is in the record already",
                    hint="Leave it out of keep",
                )
        kept = {name: replace(sample_schema[name], kept=True) for name in self._with_sizes(sample_schema)}
        names = {f"{name}{k}" for name in kept for k in (0, 1)}
        if twice := sorted(names & (record.keys() | kept.keys())):
            raise EncoderError(
                f"records have a field {twice[0]!r}, which is what windows call a kept field at z0 or z1",
                hint="Give the field another name in its source",
            )
        return {**record, **kept}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """As `inner`."""
        return self.inner.encode_batch_size(sample_schema)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode, and pass the kept fields through."""
        return {**self.inner.encode(batch), **{name: batch[name] for name in self._with_sizes(batch)}}

    def variants(self, sample_schema: Schema) -> dict[str, int]:
        """Return the fields of `inner` with variants, as `VariantEncoder`."""
        return variants_of(self.inner, sample_schema)

    def _with_sizes(self, sample: Mapping[str, object]) -> list[str]:
        """Return the kept fields, and those that hold their sizes."""
        sizes = [name + SHAPE_SUFFIX for name in self._fields]
        return [*self._fields, *(name for name in sizes if name in sample)]

    def to(self, device: torch.device) -> None:
        """Move the weights of `inner`."""
        self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return those of `inner`."""
        return self.inner.weights()

    def identity(self) -> dict[str, Json]:
        """Return the kept fields, and the identity of `inner`."""
        inner = self.inner.identity()
        config: dict[str, Json] = {"fields": list(self._fields), "inner": inner}
        return {"class": KEEPING, "config": config, "weights": inner.get("weights"), "version": 1}


# ----------------------------------------------------------------------------------------------------------
# Some fields of a record, and no others.


class FieldSelectingEncoder:
    """Encoder whose records have some fields of those of `inner`; satisfies `Encoder`.

    Args:
        inner: What encodes; None: fields of the sample, as they are.
        fields: Names of the fields to store.
    """

    def __init__(self, inner: Encoder | None, fields: Sequence[str]) -> None:
        self.inner = inner
        self._fields = field_names(fields)

    @property
    def independent_steps(self) -> bool:
        """As `inner`; without one, a record is the sample."""
        return self.inner is None or self.inner.independent_steps

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the named fields of the record of `inner`.

        Raises:
            EncoderError: There is no such field, or none is named.
        """
        record = sample_schema if self.inner is None else self.inner.schema(sample_schema)
        for name in self._fields:
            if name not in record:
                what = "the sample" if self.inner is None else "the record"
                raise EncoderError(
                    f"a cache is to store field {name!r}; {what} has {', '.join(sorted(record))}",
                    hint="Name some of those",
                )
        if not self._fields:
            raise EncoderError("a cache is to store no field", hint="Name one or more")
        return {name: field for name, field in record.items() if name in self._with_sizes(record)}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """As `inner`; without one about 8 MiB."""
        if self.inner is None:
            return fixed_batch_size(sample_schema, self.schema(sample_schema), cut_time=True)
        return self.inner.encode_batch_size(sample_schema)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode, and return the named fields."""
        record = batch if self.inner is None else self.inner.encode(batch)
        return {name: record[name] for name in self._with_sizes(record)}

    def variants(self, sample_schema: Schema) -> dict[str, int]:
        """Return the fields with variants, as `VariantEncoder`."""
        return {
            name: count
            for name, count in variants_of(self.inner, sample_schema).items()
            if name in self._with_sizes({name: None})
        }

    def _with_sizes(self, record: Iterable[str]) -> list[str]:
        """Return the named fields in a record, and those that hold their sizes."""
        return [name for name in record if name.removesuffix(SHAPE_SUFFIX) in self._fields]

    def to(self, device: torch.device) -> None:
        """Move the weights of `inner`."""
        if self.inner is not None:
            self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return those of `inner`."""
        return {} if self.inner is None else self.inner.weights()

    def identity(self) -> dict[str, Json]:
        """Return the named fields, and the identity of `inner`."""
        inner = None if self.inner is None else self.inner.identity()
        config: dict[str, Json] = {"fields": list(self._fields), "inner": inner}
        weights = None if inner is None else inner.get("weights")
        return {"class": "stoker.Selecting", "config": config, "weights": weights, "version": 1}


# ----------------------------------------------------------------------------------------------------------
# Several variants of each sample, by an augmentation whose randomness comes from the sample's content.
#
# A key is a digest of the bytes of the sample, mixed with the seed and the number of the variant. So a
# variant stays what it is when samples are added, moved or removed, in any group, and in another cache that
# holds the sample. A number of the sample would do none of that. The digest is computed on the device of the
# batch: a sum of mixed words, which has the same bits in whatever order it is summed.


Augmentation: TypeAlias = "Callable[[Any, Tensor], Any]"
"""`f(batch, keys)`: fields `(n, *shape)` by name, and a key for each of the n samples, int64; returns the
fields."""
_WORDS = 1 << 20
"""Words that are digested at a time."""


def variants_of(encoder: object, sample_schema: Schema) -> dict[str, int]:
    """Return how many variants an encoder makes of each field of a record; without those that have none."""
    ask = getattr(encoder, "variants", None)
    return {} if ask is None else ask(sample_schema)


class _FieldBatch(dict[str, Tensor]):
    """Fields as transforms of batches take them."""

    position: Any = None


class VariantEncoder:
    """Encoder that augments each sample several times and encodes each variant; satisfies `Encoder`.

    The variants are axis 0 of the field in a record, `(variants, *shape)`. A field that augmentation and
    encoder both hand on untouched, as a label, is stored once: they return the tensor that they were given.

    Args:
        inner: What encodes each variant; None: the variants are stored as they are.
        variants: Number of variants, 1 or more.
        augment: One or more functions `f(batch, keys)`, in order; all that is random in them follows from
            `keys`, int64 `(n,)`, as in `stoker.transforms`.
        seed: Another one gives other variants.

    Raises:
        ConfigError: There is no augmentation, or less than one variant.
        EncoderError: Nothing tells an augmentation from another: it has no source text.
    """

    def __init__(
        self,
        inner: Encoder | None,
        variants: int,
        augment: Augmentation | Sequence[Augmentation],
        *,
        seed: int = 0,
    ) -> None:
        self.inner, self._seed = inner, int(seed)
        self._augment = (augment,) if callable(augment) else tuple(augment)
        if not isinstance(cast("object", variants), int) or variants < 1 or not self._augment:
            raise ConfigError(
                f"{arg('variants', variants)} with {len(self._augment)} augmentations",
                hint="Give 1 variant or more, and a function f(batch, keys) that makes them",
            )
        for function in self._augment:
            if not callable(function):
                raise ConfigError(
                    f"augment holds {function!r}", hint="Expected functions f(batch, keys) of fields by name"
                )
        self._count = variants
        self._described: Json = [describe_augmentation(function) for function in self._augment]
        self._known: tuple[Schema, Schema, Schema, frozenset[str]] | None = None

    @property
    def independent_steps(self) -> bool:
        """False: an augmentation sees the entire sample."""
        return False

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the record of `inner`, with an axis of variants in fields that are not handed on.

        Found by a sample of zeros.

        Raises:
            EncoderError: An augmentation fails on zeros, or changes a field that differs in length.
        """
        _, record, once = self._probe(sample_schema)
        found: Schema = {}
        for name, field in record.items():
            if name not in once and field.ragged:
                raise EncoderError(
                    f"field {name!r} differs in length between samples, so its variants cannot be stored",
                    hint="Crop or pad it to one length in the augmentation, or leave variants out",
                )
            several = replace(field, shape=(self._count, *field.shape), time=False)
            found[name] = field if name in once else several
        return found

    def variants(self, sample_schema: Schema) -> dict[str, int]:
        """Return the number of variants of each field that has any."""
        _, record, once = self._probe(sample_schema)
        return {name: self._count for name in record if name not in once}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the batch size of `inner` for one variant; samples are not cut over time."""
        augmented, record, _ = self._probe(sample_schema)
        if self.inner is None:
            return fixed_batch_size(sample_schema, record, cut_time=False)
        return EncodeBatchSize(samples=self.inner.encode_batch_size(augmented).samples)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Augment and encode each variant, in calls of the size of the batch.

        Raises:
            EncoderError: A field that was handed on for a sample of zeros is not handed on for this one.
        """
        keys, made = content_keys(batch), list[dict[str, Tensor]]()
        once = frozenset[str]() if self._known is None else self._known[3]
        for variant in range(self._count):
            given = {name: value if name in once else value.clone() for name, value in batch.items()}
            augmented = self._augmented(given, self._keys(keys, variant))
            record = augmented if self.inner is None else self.inner.encode(augmented)
            for name in once & record.keys():
                if record[name] is not batch[name]:
                    raise EncoderError(
                        f"field {name!r} was handed on untouched for a sample of zeros, and is changed now",
                        hint="Have the augmentation change a field always, or never",
                    )
            made.append(record)
        return {
            name: value if name in once else torch.stack([record[name] for record in made], 1)
            for name, value in made[0].items()
        }

    def _keys(self, keys: Tensor, variant: int) -> Tensor:
        return mix_(keys ^ signed(mix(mix(self._seed + GAMMA) ^ (variant + 1) * GAMMA)))

    def _augmented(self, batch: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        found: Any = _FieldBatch(batch)
        for place, function in enumerate(self._augment):
            found = function(found, keys_of(place, keys))
        if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
            raise EncoderError(
                f"an augmentation returned a {type(found).__name__}",
                hint="Return the batch: tensors by the name of their field",
            )
        return dict(cast("Mapping[str, Tensor]", found))

    def _probe(self, sample_schema: Schema) -> tuple[Schema, Schema, frozenset[str]]:
        """Return the fields of an augmented sample and of a record, and which of these are handed on."""
        if self._known is None or self._known[0] != sample_schema:
            with torch.inference_mode(False), torch.no_grad():
                self._known = (dict(sample_schema), *self._look(sample_schema))
        return self._known[1:]

    def _look(self, sample_schema: Schema) -> tuple[Schema, Schema, frozenset[str]]:
        device = torch.device("cpu") if self.inner is None else weights_device(self.inner)
        zeros = {
            name: torch.zeros(
                (1, *((4, *field.shape[1:]) if field.ragged else field.shape)),
                dtype=getattr(torch, field.dtype),
                device=device,
            )
            for name, field in sample_schema.items()
        }
        before = {name: value._version for name, value in zeros.items()}
        try:
            found = self._augmented(zeros, torch.zeros(1, dtype=torch.int64, device=device))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            shapes = {name: tuple(value.shape) for name, value in zeros.items()}
            raise EncoderError(
                f"the augmentation failed on one sample of zeros {shapes}: {type(error).__name__}: {error}",
                hint="It is called as f(batch, keys), with fields (n, *shape) by name",
            ) from error
        untouched = {
            name
            for name, value in zeros.items()
            if found.get(name) is value and value._version == before[name]
        }
        augmented: Schema = {}
        for name, value in found.items():
            known = sample_schema.get(name)
            if known is not None and name in untouched:
                augmented[name] = known
                continue
            time = known is not None and known.time and value.ndim > 1
            dtype = str(value.dtype).removeprefix("torch.")
            augmented[name] = Field(shape=tuple(value.shape[1:]), dtype=dtype, time=time)
            if known is not None and known.ragged:
                raise EncoderError(
                    f"the augmentation changes field {name!r}, which differs in length between samples",
                    hint="Leave it as it is, or give samples of one length",
                )
        if self.inner is None:
            return augmented, augmented, frozenset(untouched & augmented.keys())
        record = self.inner.schema(augmented)
        try:
            encoded = self.inner.encode(dict(found))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise EncoderError(
                f"the encoder failed on one augmented sample of zeros: {type(error).__name__}: {error}",
                hint="With variants, it must take batches of one sample too",
            ) from error
        once = {name for name in untouched & record.keys() if encoded.get(name) is found[name]}
        return augmented, record, frozenset(once)

    def to(self, device: torch.device) -> None:
        """Move `inner`, and modules that augment."""
        for function in self._augment:
            if (module := bound_module(function)) is not None:
                module.to(device)
        if self.inner is not None:
            self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return those of `inner`."""
        return {} if self.inner is None else self.inner.weights()

    def identity(self) -> dict[str, Json]:
        """Return the number of variants, seed and augmentation, and the identity of `inner`."""
        inner = None if self.inner is None else self.inner.identity()
        config: dict[str, Json] = {
            "variants": self._count,
            "seed": self._seed,
            "augment": self._described,
            "inner": inner,
        }
        weights = None if inner is None else inner.get("weights")
        return {"class": "stoker.Variants", "config": config, "weights": weights, "version": 1}


def content_keys(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a word for each sample that follows from names, dtypes, shapes and bytes of its fields.

    Args:
        batch: Fields `(n, *shape)`.

    Returns:
        `(n,)` int64 on the device of the batch, the same on every device.

    >>> twice = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    >>> one, other, again = content_keys({"x": twice}).tolist()
    >>> one == again, one == other
    (True, False)
    """
    first = next(iter(batch.values()))
    keys = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)
    for name, value in sorted(batch.items()):
        text = f"{name} {value.dtype} {tuple(value.shape[1:])}"
        base = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        rows = value.reshape(len(value), -1).contiguous()
        rows = rows.view(torch.uint8) if rows.shape[1] else rows.new_zeros((len(rows), 0), dtype=torch.uint8)
        for begin in range(0, rows.shape[1], 8 * _WORDS):
            part = rows[:, begin : begin + 8 * _WORDS]
            flat = torch.nn.functional.pad(part, (0, -part.shape[1] % 8)).reshape(-1)
            flat = flat.clone() if flat.storage_offset() % 8 else flat  # words begin at multiples of 8
            words = flat.view(torch.int64).view(len(rows), -1)
            places = torch.arange(words.shape[1], device=words.device) + begin // 8
            keys += mix_(words ^ keys_of(base, places)).sum(1)
        keys = mix_(keys ^ signed(base))
    return keys


def describe_augmentation(function: Augmentation) -> Json:
    """Return what tells an augmentation from another: class and settings, code, weights.

    Raises:
        EncoderError: It has no source text.
    """
    if type(function).__module__.partition(".")[0] == "stoker" and is_dataclass(cast("object", function)):
        named = [one.name for one in fields(cast("Any", function))]
        settings = {name: _setting(getattr(function, name)) for name in named}
        return {"class": qualified_name(function), "settings": settings, "version": 1}
    try:
        described: Json = describe_function(function)
    except EncoderError as error:
        raise EncoderError(
            f"an augmentation cannot be described: {error.problem.fact}",
            hint="Give a function or class of a file of yours, whose text tells when it changes",
        ) from error
    module = bound_module(function)
    return {"code": described, "weights": None if module is None else digest_weights(module_weights(module))}


def _setting(value: Any) -> Json:
    if isinstance(value, list | tuple):
        return [_setting(one) for one in cast("Sequence[Any]", value)]
    return describe_augmentation(value) if callable(value) else as_json(value)


# ----------------------------------------------------------------------------------------------------------
# Normalize a field with statistics of the training samples before it is encoded.
#
# The identity carries the rule (method, field, digest of the samples it was fitted on). The numbers are
# derived from it; they are kept to seven digits, so that the last bits of a sum, which may differ between
# machines, do not make another encoder.


NORMALIZED = "stoker.Normalized"
"""The class in the identity."""
PIECE_BYTES = 64 * MIB
"""Samples larger than this are read in pieces along time."""


class FitSource(Protocol):
    """Source as far as fitting needs it; every `Source` has it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def schema(self) -> Schema:
        """Return fields of every sample."""
        ...

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Return one sample, or `start:stop` of its fields with time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatistics:
    """Shift and scale that normalize values: `(value - shift) / scale`, one pair per channel."""

    field: str
    """Field of the sample that they belong to."""
    method: Literal["standard", "minmax"]
    """`standard`: mean 0, deviation 1. `minmax`: the range of the training samples becomes [0, 1]."""
    shift: tuple[float, ...]
    """Mean or minimum per channel (the last axis; a scalar field has one)."""
    scale: tuple[float, ...]
    """Deviation or range per channel; 1 where the channel is constant."""
    digest: str
    """The sha256 of the values fitted on, in order: which training samples these are."""


def fit_statistics(
    source: FitSource, field: str, method: Literal["standard", "minmax"] = "standard"
) -> FieldStatistics:
    """Go once over `source` in number order and sum in float64. Give it the training split only.

    Raises:
        EncoderError: The field is missing or the source is empty.
        RecordError: A value is NaN or infinite.
    """
    schema = source.schema()
    if method not in ("standard", "minmax"):
        raise EncoderError(f"method must be 'standard' or 'minmax', got {method!r}")
    if field not in schema or len(source) == 0:
        raise EncoderError(f"no values of field {field!r} in {len(source)} samples with {sorted(schema)}")
    digest = hashlib.sha256()
    sums: _Sums | None = None
    for number in range(len(source)):
        for piece in _pieces(source, number, field, schema[field]):
            values = np.ascontiguousarray(piece).reshape(-1, piece.shape[-1] if piece.ndim else 1)
            digest.update(values.view(np.uint8).data)
            part = _Sums.of(_from_bfloat16(values) if schema[field].dtype == "bfloat16" else values)
            if not np.isfinite(part.square).all():
                raise RecordError(
                    f"sample {number}, field {field!r}: NaN or infinity, so it has no statistics",
                    hint="Exclude it",
                )
            sums = part if sums is None else sums.joined(part)
    assert sums is not None
    standard = method == "standard"
    spread = np.sqrt(sums.square / sums.count) if standard else sums.high - sums.low
    shift = sums.mean if standard else sums.low
    scale = np.where(spread > 1e-12 * np.abs(shift), spread, 1.0)
    return FieldStatistics(
        field=field,
        method=method,
        shift=tuple(float(f"{value:.7g}") for value in shift),
        scale=tuple(float(f"{value:.7g}") for value in scale),
        digest=digest.hexdigest(),
    )


class NormalizedEncoder:
    """Encoder that normalizes one field, then hands on to `inner` (None: keeps it as the record).

    Satisfies `Encoder`. The field reaches `inner` as float32.
    """

    def __init__(self, inner: Encoder | None, statistics: FieldStatistics) -> None:
        self.inner = inner
        self._statistics = statistics
        self._shift = torch.tensor(statistics.shift, dtype=torch.float32, device="cpu")
        self._scale = torch.tensor(statistics.scale, dtype=torch.float32, device="cpu")

    @property
    def independent_steps(self) -> bool:
        """As `inner`; without one, normalizing is by element."""
        return self.inner is None or self.inner.independent_steps

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the schema of `inner` for the normalized samples.

        Raises:
            EncoderError: The field is missing or has another number of channels.
        """
        normalized = self._normalized(sample_schema)
        return normalized if self.inner is None else self.inner.schema(normalized)

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the batch size of `inner`; without one about 8 MiB."""
        normalized = self._normalized(sample_schema)
        if self.inner is None:
            return fixed_batch_size(sample_schema, normalized, cut_time=True)
        return self.inner.encode_batch_size(normalized)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Normalize to fresh memory, then encode."""
        name = self._statistics.field
        values = batch[name].to(torch.float32)
        shift, scale = self._shift, self._scale
        if values.ndim == 1:  # a scalar field has one channel and no axis of channels
            shift, scale = shift[0], scale[0]
        scaled = {**batch, name: (values - shift).div_(scale)}
        if (lengths := batch.get(name + LENGTHS_SUFFIX)) is not None:  # padding stays zeros
            padding = torch.arange(values.shape[1], device=values.device)[None] >= lengths[:, None]
            scaled[name][padding] = 0
        return scaled if self.inner is None else self.inner.encode(scaled)

    def to(self, device: torch.device) -> None:
        """Move statistics and `inner` to `device`."""
        self._shift, self._scale = self._shift.to(device), self._scale.to(device)
        if self.inner is not None:
            self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return `normalize.shift` and `normalize.scale` per channel, then the weights of `inner`."""
        inner: Mapping[str, Tensor] = {} if self.inner is None else self.inner.weights()
        return {"normalize.shift": self._shift, "normalize.scale": self._scale, **inner}

    def identity(self) -> dict[str, Json]:
        """Return the rule, the training samples it was fitted on, and the identity of `inner`."""
        rule = self._statistics
        inner: dict[str, Json] | None = None if self.inner is None else self.inner.identity()
        config: dict[str, Json] = {"field": rule.field, "method": rule.method, "fitted_on": rule.digest}
        return {
            "class": NORMALIZED,
            "config": {**config, "inner": inner},
            "weights": digest_weights(self.weights()),
            "version": 1,
        }

    def _normalized(self, sample_schema: Schema) -> Schema:
        name, channels = self._statistics.field, len(self._statistics.shift)
        field = sample_schema.get(name)
        if field is None or (field.shape[-1] if field.shape else 1) != channels:
            shape = None if field is None else field.shape
            raise EncoderError(
                f"statistics are of field {name!r} with {channels} channels, samples have {name!r} of shape "
                f"{shape}",
                hint="Fit them on the source that is encoded",
            )
        plain = Field(shape=field.shape, dtype="float32", time=field.time, ragged=field.ragged)
        return {**sample_schema, name: plain}


@dataclass(frozen=True, slots=True)
class _Sums:
    """Count, mean, summed square of deviations and range per channel, all float64."""

    count: int
    mean: NDArray[np.float64]
    square: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @staticmethod
    def of(values: NDArray[Any]) -> _Sums:
        """Sums of `(count, channels)`."""
        exact = values.astype(np.float64)
        mean = exact.mean(0)
        return _Sums(len(exact), mean, np.square(exact - mean).sum(0), exact.min(0), exact.max(0))

    def joined(self, other: _Sums) -> _Sums:
        """Both together. Source: Chan, Golub and LeVeque, 1979, which loses no digits to the mean."""
        count = self.count + other.count
        step = other.mean - self.mean
        return _Sums(
            count,
            self.mean + step * (other.count / count),
            self.square + other.square + np.square(step) * (self.count * other.count / count),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pieces(source: FitSource, number: int, field: str, spec: Field) -> Iterator[NDArray[Any]]:
    """Return the field of one sample, large ones cut along time."""
    whole = spec.ragged or not spec.time or spec.size_bytes() <= PIECE_BYTES
    steps = 0 if whole else max(1, PIECE_BYTES // max(1, spec.row_bytes))
    if whole:
        yield source.read(number)[field]
        return
    for start in range(0, spec.shape[0], steps):
        yield source.read(number, start, min(start + steps, spec.shape[0]))[field]


# ----------------------------------------------------------------------------------------------------------
# Encode samples without time as a pair: the input of a steady problem, and its solution.
#
# Darcy flow has a permeability and a pressure, and no time. Each is encoded by an encoder of its own. The
# record has `latent_input` and `latent`, without a time axis. An operator learns the map between them.


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
                raise EncoderError(
                    f"an encoder of {name!r} makes {', '.join(schema)}", hint="Expected 'latent'"
                )
            pair[name] = schema["latent"]
        one, other = pair[INPUT], pair[SOLUTION]
        if one.time or other.time:
            raise EncoderError(
                f"the input's latent is {one.shape} and the solution's {other.shape}, with a time axis",
                hint="A steady problem has none: leave data.input out, and train from one step to the next",
            )
        if replace(one, dtype=other.dtype) != other:
            raise EncoderError(
                f"the input's latent is {one.shape} and the solution's {other.shape}",
                hint="One operator maps one to the other: give both the same number of tokens and dim",
            )
        return {SOLUTION: other, INPUT: one, **{name: found[name] for name in _shared(given, found)}}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """About 8 MiB of samples and latents a call."""
        return fixed_batch_size(sample_schema, self.schema(sample_schema), cut_time=False)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode both fields of a batch."""
        given, found = self._input.encode(batch), self._solution.encode(batch)
        pair = {SOLUTION: found["latent"], INPUT: given["latent"]}
        return {**pair, **{name: found[name] for name in _shared(given, found)}}

    def to(self, device: torch.device) -> None:
        """Move the weights of both."""
        self._input.to(device)
        self._solution.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return those of both, as `input.NAME` and `solution.NAME`."""
        parts = {"input": self._input.weights(), "solution": self._solution.weights()}
        return {f"{part}.{name}": value for part, own in parts.items() for name, value in own.items()}

    def identity(self) -> dict[str, Json]:
        """Return the identities of both."""
        config: dict[str, Json] = {"input": self._input.identity(), "solution": self._solution.identity()}
        return {"class": STEADY, "config": config, "weights": digest_weights(self.weights()), "version": 1}


def is_steady(fields: Iterable[str]) -> bool:
    """Return True if records with these fields hold a steady problem."""
    return {INPUT, SOLUTION} <= {*fields}


def weights_of(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of one encoder, `input` or `solution`, by its own names."""
    start = f"{part}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def _shared(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in other if name in one and name != "latent"]
