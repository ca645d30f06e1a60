"""Kinds of sources: their names, what settings each has of its own, and which shared ones it takes.

Another kind is: its name in `Kind`; a section of its settings here, which `DataConfig` holds under that name;
its name at the shared settings that it takes, in `TAKEN_BY`; its encoder, in `DEFAULTS`; and
a function that makes the source, in `stoker.pipeline.kinds.BUILDERS`. docs/config.md and all messages follow
by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel

Kind: TypeAlias = Literal["hdf5", "images", "sql", "torch", "arrays", "tar", "parquet"]
"""What `data.kind` can be."""

KINDS: tuple[str, ...] = get_args(Kind)

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "files": ("hdf5", "arrays", "tar", "parquet"),
    "preset": ("hdf5",),
    "fields": ("hdf5", "arrays"),
    "include": ("hdf5",),
    "normalize": ("hdf5",),
    "dataset": ("torch",),
}
"""Settings of `data` that not every kind takes, with those that do; what is not here is for all."""

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    kind: {"encoder.kind": "identity"} for kind in KINDS if kind != "hdf5"
}
"""Defaults that are others for a kind, by dotted name: the grid encoder is for fields on a grid."""

ENCODER_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    encoder: {"training.latent_cache_dtype": None} for encoder in ("identity", "features", "module")
}
"""Those that are others for an encoder: latents bear 16 bits; keys, boxes and metres do not."""


OF_MODULE = (
    *("target", "arguments", "checkpoint_key", "checkpoint_prefix", "field", "output", "time", "version"),
)
"""Settings of `encoder` that are for `encoder.kind=module` alone."""


def with_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted name, with the defaults that follow from their kind of source and their encoder.

    >>> sorted(with_defaults({"data.kind": "sql"}))
    ['data.kind', 'encoder.kind', 'training.latent_cache_dtype']
    """
    kind = {"data.kind": "torch"} if given.get("data.dataset") is not None else {}
    known = {**kind, **given}
    own = {"encoder.kind": "module"} if given.get("encoder.target") is not None else {}
    known = {**DEFAULTS.get(str(known.get("data.kind")), {}), **own, **known}
    return {**ENCODER_DEFAULTS.get(str(known.get("encoder.kind")), {}), **known}


def misplaced_in_encoder(encoder: BaseModel, kind: str) -> Iterator[str]:
    """Settings of `encoder` that are given though its kind takes no notice of them."""
    for name in OF_MODULE if kind != "module" else ():
        if getattr(encoder, name) != type(encoder).model_fields[name].get_default():
            yield name


def misplaced(data: BaseModel, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings of `data` that are given though its kind takes no notice of them, and the kinds that would."""
    sections = {name: (name,) for name in KINDS if name in type(data).model_fields}
    for name, kinds in {**TAKEN_BY, **sections}.items():
        given = getattr(data, name) != type(data).model_fields[name].get_default(call_default_factory=True)
        if given and kind not in kinds:
            yield name, kinds
