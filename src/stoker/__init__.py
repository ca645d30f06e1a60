"""Stoker keeps the GPU fed: encode once, keep it verified, serve from the fastest place that fits.

sources/      raw samples by number: HDF5 simulations, images, any torch `Dataset`
encoders/     frozen encoders: grid, any `nn.Module`, normalization
precompute/   source + encoder -> cache, resumable, hang-proof
store/        the cache: recipe and fingerprint, shards with checksums, index
plan/         which records are served from where, and why
loader/       cache + plan -> batches, the same bytes from every tier
transforms    changes to a batch on its device, random by example
integrations  adapters for training frameworks
profile/      where the time of any training loop goes
train/        a reference operator and its training loop
config/       settings files;  run/, cli/   whole runs, and the `stoker` command
plugins.py    what packages add: sources, engines, exporters, commands, trackers
extras/       what the core does without; compat/ and export.py are public names of two of them
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.cached import cached
    from stoker.encoders.features import FeatureEncoder
    from stoker.encoders.grid import GridEncoder
    from stoker.encoders.language import HiddenStates, TextEncoder, TopK
    from stoker.encoders.latents import VAEEncoder
    from stoker.encoders.mesh import MeshEncoder
    from stoker.encoders.module import ModuleEncoder
    from stoker.encoders.protocol import Encoder
    from stoker.encoders.remote import RemoteEncoder
    from stoker.extras.adopt.run import adopt
    from stoker.loader import (
        Loader,
        Mixture,
        Normalization,
        OneOf,
        Pad,
        Rows,
        Span,
        Weights,
        Windows,
        subset,
    )
    from stoker.loader.zipped import Zip, zip
    from stoker.precompute import Timeouts, precompute
    from stoker.profile.run import profile
    from stoker.sources.arrays import ArraySource
    from stoker.sources.hdf5 import HDF5Source
    from stoker.sources.images import ImageSource
    from stoker.sources.meshes import MeshSource
    from stoker.sources.protocol import Source
    from stoker.sources.sql.source import SQLSource
    from stoker.sources.tables import DatasetsSource, ParquetSource
    from stoker.sources.tar import TarSource
    from stoker.sources.tokenize import Tokenize
    from stoker.sources.torch_dataset import TorchSource
    from stoker.store import Cache, open_cache
    from stoker.store.in_place import index_in_place
    from stoker.store.source import CacheSource
    from stoker.train.batch_size import find_batch_size

__version__ = "0.1.0"

__all__ = [
    "ArraySource",
    "Cache",
    "CacheSource",
    "DatasetsSource",
    "Encoder",
    "FeatureEncoder",
    "GridEncoder",
    "HDF5Source",
    "HiddenStates",
    "ImageSource",
    "Loader",
    "MeshEncoder",
    "MeshSource",
    "Mixture",
    "ModuleEncoder",
    "Normalization",
    "OneOf",
    "Pad",
    "ParquetSource",
    "RemoteEncoder",
    "Rows",
    "SQLSource",
    "Source",
    "Span",
    "StokerError",
    "TarSource",
    "TextEncoder",
    "Timeouts",
    "Tokenize",
    "TopK",
    "TorchSource",
    "VAEEncoder",
    "Weights",
    "Windows",
    "Zip",
    "__version__",
    "adopt",
    "cached",
    "find_batch_size",
    "index_in_place",
    "open_cache",
    "precompute",
    "profile",
    "subset",
    "zip",
]

_HOMES = {
    "ArraySource": "stoker.sources.arrays",
    "Cache": "stoker.store",
    "CacheSource": "stoker.store.source",
    "DatasetsSource": "stoker.sources.tables",
    "Encoder": "stoker.encoders.protocol",
    "FeatureEncoder": "stoker.encoders.features",
    "GridEncoder": "stoker.encoders.grid",
    "HDF5Source": "stoker.sources.hdf5",
    "HiddenStates": "stoker.encoders.language",
    "ImageSource": "stoker.sources.images",
    "Loader": "stoker.loader",
    "MeshEncoder": "stoker.encoders.mesh",
    "MeshSource": "stoker.sources.meshes",
    "Mixture": "stoker.loader",
    "ModuleEncoder": "stoker.encoders.module",
    "Normalization": "stoker.loader",
    "OneOf": "stoker.loader",
    "Pad": "stoker.loader",
    "ParquetSource": "stoker.sources.tables",
    "RemoteEncoder": "stoker.encoders.remote",
    "Rows": "stoker.loader",
    "SQLSource": "stoker.sources.sql.source",
    "Source": "stoker.sources.protocol",
    "Span": "stoker.loader",
    "TarSource": "stoker.sources.tar",
    "TextEncoder": "stoker.encoders.language",
    "Timeouts": "stoker.precompute",
    "Tokenize": "stoker.sources.tokenize",
    "TopK": "stoker.encoders.language",
    "TorchSource": "stoker.sources.torch_dataset",
    "VAEEncoder": "stoker.encoders.latents",
    "Weights": "stoker.loader",
    "Windows": "stoker.loader",
    "adopt": "stoker.extras.adopt.run",
    "cached": "stoker.cached",
    "find_batch_size": "stoker.train.batch_size",
    "index_in_place": "stoker.store.in_place",
    "open_cache": "stoker.store",
    "precompute": "stoker.precompute",
    "profile": "stoker.profile.run",
    "Zip": "stoker.loader.zipped",
    "subset": "stoker.loader",
    "zip": "stoker.loader.zipped",
}
"""Where each public name is defined; imported on first use, so that `import stoker` costs nothing."""

_MODULES = ("compat", "errors", "export", "integrations", "testing", "transforms")
"""Public modules, `stoker.transforms.Flip`, also imported on first use."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562)."""
    if name in _MODULES:
        return import_module(f"stoker.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}. Public names: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted(__all__)


class _PublicModule(ModuleType):
    """This module, in which `precompute` and `cached` stay the functions.

    Each (and `profile`) shares its name with the module that defines it. Importing a submodule sets it as an
    attribute of its package. So after `import stoker.precompute.worker`, `stoker.precompute(...)` would not
    be callable.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _PublicModule
