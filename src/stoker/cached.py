"""One line for any torch `Dataset`: encode once, then serve."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from stoker.arguments import FLAG, PATH, TEXT, check, or_none
from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError, arg
from stoker.loader import Loader
from stoker.loader.choose import as_choices
from stoker.loader.loader import give_structure
from stoker.loader.options import (
    IGNORED,
    REFUSED,
    TAKEN,
    check_kinds,
    take_dataloader_arguments,
    unknown_argument,
    whole_numbers,
)
from stoker.loader.order import order_text
from stoker.loader.outputs import check_dtype, check_names
from stoker.plan.resources import encode_on, resolve_device
from stoker.precompute.engine import precompute as fill_cache
from stoker.precompute.inputs import as_encoder, as_source
from stoker.runtime.locks import FileLock
from stoker.runtime.mounts import storage_of
from stoker.runtime.processes.child import LIGHT, TORCH, preload
from stoker.schema import dtype_name, without_sizes
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource
from stoker.sources.torch_items import ItemStructure, encoded_structure
from stoker.store.storage import resolve_local

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from stoker.sources.torch_items import Rule

log = logging.getLogger("stoker")
OURS = ("source", "encoder", "cache_dir", "name", "wait")
"""Arguments of `precompute` that `cached` gives itself; all others may be given in `precompute=`."""


def cached(  # noqa: PLR0913 - the public face; every setting is named by the caller
    dataset: Dataset[Any] | Source,
    encoder: Encoder | nn.Module | None = None,
    *,
    cache_dir: str | Path | None = ".stoker",
    name: str | None = None,
    batch_size: int = 64,
    device: str | torch.device = "auto",
    precompute: Mapping[str, Any] | None = None,
    wait: bool = True,
    version: str | None = None,
    random: Literal["refuse", "freeze"] = "refuse",
    text: Mapping[str, Rule] | None = None,
    time: Sequence[str] = (),
    **loader: Any,
) -> Loader:
    """Return a loader over everything in `dataset`, which is read and encoded on the first call alone.

    Its batches have the structure of the dataset's items: of `(image, label)` tuples comes
    `for images, labels in loader`, of dictionaries a dictionary with the same keys. Sample indices are
    `batch.index` of tuples and dictionaries. One field that the encoder replaces by another keeps its place;
    an encoder that makes more fields gives dictionaries. A `Source` gives dictionaries with the key `index`.

    Args:
        dataset: Any map-style dataset, or a `Source`.
        encoder: An `Encoder`, or a frozen module, which takes the field `data`, the only field, or the first
            of a tuple (else wrap it in a `ModuleEncoder`). None: samples as they are.
        cache_dir: Folder of caches, or a URL such as `s3://bucket/caches`: the cache is made in
            `<cache_dir>/<name>/<fingerprint>`. None: in memory, removed together with the loader.
        name: Name of the cache; None: the class of the dataset, in lower case.
        batch_size: Samples, or windows, in a batch. Leave it out with `batch_tokens`.
        device: Where the encoder runs and batches are wanted: `cpu`, `cuda[:i]`, or `auto`, a GPU if there is
            one.
        precompute: How to fill the cache, by the names of `stoker.precompute`: `{"dtype": "float16"}` is the
            dtype of storage. Those that a `Loader` does not have may also be given as they are:
            `workers=4`, `timeouts={"read": 60}`, `nan="allow"`, `max_quarantined=0.01`, ...
        wait: False: serve what is encoded by now, while another process encodes the rest; see
            `stoker.precompute`.
        version: Names the content of a dataset, in place of what can be seen of it; see `TorchSource`.
        random: `"freeze"` stores one draw of a dataset whose output is random; `"refuse"` raises.
        text: What becomes of text in items, by field: a list of words, `"bytes"` or `"drop"`.
        time: Fields of items whose axis 0 is time, so that windows may be cut from them.
        **loader: Further arguments of `Loader`; its `dtype` is that of batches.

    Returns:
        A loader over the complete cache, or with `wait=False` over what there is of it.

    Raises:
        ConfigError: An argument is unknown or malformed; nothing was encoded.
        StokerError: As `precompute` and `Loader`.

    Examples:
        >>> import stoker, torch
        >>> images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8)
        >>> dataset = torch.utils.data.TensorDataset(images, torch.arange(100) % 10)
        >>> loader = stoker.cached(dataset, batch_size=32, shuffle=True)
        >>> for images, labels in loader:
        ...     print(images.shape, labels.dtype)
        torch.Size([32, 3, 8, 8]) torch.int64
        torch.Size([32, 3, 8, 8]) torch.int64
        torch.Size([32, 3, 8, 8]) torch.int64
        torch.Size([4, 3, 8, 8]) torch.int64
    """
    check({"cache_dir": (cache_dir, or_none(PATH)), "name": (name, or_none(TEXT)), "wait": (wait, FLAG)})
    settings = _known({} if precompute is None else precompute)
    direct = {name: loader.pop(name) for name in _direct_names() if name in loader}
    if twice := direct.keys() & settings.keys():
        raise ConfigError(f"{min(twice)} is given twice, alone and in precompute=", hint="Give it once")
    encoding: dict[str, Any] = {"device": device, **settings, **direct}
    encoding["wait"] = wait
    device = str(resolve_device(device))
    if encoding["device"] is not None:  # None: where the encoder's weights are
        encode_on(encoding["device"])
    if loader.get("batch_tokens") is not None and batch_size == 64:
        batch_size = 1  # it was left out, as a `Loader` has it
    _check_loader(batch_size, loader)
    own: dict[str, Any] = {"version": version, "random": random, "text": text, "time": time}
    source = as_source(dataset, **own)
    if source is dataset:
        _refuse_settings(source, own)
    if encoding.get("workers") and (
        cache_dir is None or not Path(cache_dir, name or name_of(dataset)).exists()
    ):
        preload(TORCH if isinstance(source, TorchSource) else LIGHT)  # while items are probed here
    encoder = as_encoder(encoder, source)
    if loader.get("windows") is None and "index" in source.schema():
        check_names(source.schema() if encoder is None else encoder.schema(source.schema()))
    encoding["name"] = name or name_of(dataset)
    own = {"batch_size": batch_size, "device": device, **loader}
    if cache_dir is None:
        made = _in_memory(source, encoder, encoding, own)
    else:
        made = Loader(
            fill_cache(source, encoder, resolve_local(cache_dir, must_exist=False), **encoding), **own
        )
    if isinstance(source, TorchSource) and loader.get("windows") is None:
        give_structure(made, _structure_of(source, encoder, made))
    return made


def _structure_of(source: TorchSource, encoder: Encoder | None, loader: Loader) -> ItemStructure:
    """Return the structure of batches: that of items, if every field of records has a place in it."""
    schema, stored = without_sizes(source.schema()), without_sizes(loader.dataset.schema)
    ragged = any(field.ragged for field in stored.values())
    if ragged and (loader.options.ragged != "list" or loader.options.batch_tokens is not None):
        log.info(
            "batches are dictionaries: ragged= and batch_tokens= add masks, lengths or offsets to the fields "
            "of items"
        )
        return None
    if any(group.tells(stored) for group in loader.options.choose):
        log.info("batches are dictionaries: choose= adds lengths or starts to the fields of items")
        return None
    found = encoded_structure(source.structure(), schema, stored)
    if not isinstance(found, bool):
        return found
    log.info(
        "batches are dictionaries of %s: with this encoder they cannot have the structure of items",
        ", ".join(loader.dataset.schema),
    )
    return None


def _in_memory(
    source: Source, encoder: Encoder | None, encoding: Mapping[str, Any], loader: Mapping[str, Any]
) -> Loader:
    """Return a loader with a cache of its own in memory, each record of it there once."""
    folder = MemoryFolder()
    try:
        made = Loader(fill_cache(source, encoder, folder.path, **encoding), **loader)
    except BaseException:
        folder.remove()
        raise
    folder.goes_with(made)
    return made


def name_of(dataset: object) -> str:
    """Return the cache's name: the class of the dataset, in lower case."""
    return type(dataset).__name__.lower()


def _refuse_settings(source: Source, own: Mapping[str, Any]) -> None:
    """Refuse settings of a Dataset where there is a source, which has its own.

    Raises:
        ConfigError: As said.
    """
    defaults = inspect.signature(cached).parameters
    if given := [name for name, value in own.items() if value != defaults[name].default]:
        raise ConfigError(
            f"{', '.join(f'{name}=' for name in given)}: settings of a Dataset, and {source!r} is a source",
            hint="Give them to the source",
        )


def _known(settings: object) -> Mapping[str, Any]:
    """`settings`, if it holds nothing but settings of `precompute`."""
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"precompute is {settings!r}", hint="Expected its settings by name, as {'workers': 4}"
        )
    given, names = cast("Mapping[str, Any]", settings), _precompute_names()
    for name in given:
        if name not in names:
            near = get_close_matches(str(name), names, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Expected one of {', '.join(sorted(names))}"
            raise ConfigError(f"precompute={{{name!r}: ...}} is not a setting of precompute", hint=hint)
    return given


def _check_loader(batch_size: object, loader: Mapping[str, Any]) -> None:
    """Refuse before anything is encoded what `Loader` would refuse after it."""
    if whole_numbers(batch_size=batch_size)[0] < 1:
        raise ConfigError(f"batch_size is {batch_size}", hint="Expected at least 1")
    as_choices(loader.get("choose"))
    check_kinds(loader.get("windows"), loader.get("transforms", ()), loader.get("reserve_bytes"))
    if (dtype := loader.get("dtype")) is not None:
        check_dtype(dtype_name(dtype))
    of_loader = dict(inspect.signature(Loader.__init__).parameters)
    of_cached = inspect.signature(cached).parameters
    del of_loader["self"], of_loader["cache"]  # the cache is made here
    others = {name: value for name, value in loader.items() if name not in of_loader}
    for name in others:
        if name not in (*IGNORED, *REFUSED, *TAKEN):
            raise ConfigError(f"cached() {unknown_argument(name, {**of_cached, **of_loader})}")
    order_text(loader.get("shuffle", False), loader.get("partition", "global"))
    take_dataloader_arguments(others)


def _direct_names() -> list[str]:
    """Return the settings of `precompute` that no argument of `cached` or `Loader` is called like."""
    taken = {*inspect.signature(cached).parameters, *inspect.signature(Loader.__init__).parameters}
    return [name for name in _precompute_names() if name not in taken]


def _precompute_names() -> list[str]:
    return [name for name in inspect.signature(fill_cache).parameters if name not in OURS]


# ----------------------------------------------------------------------------------------------------------
# A folder for a cache in memory: in the system's memory file system, removed together with its user.
#
# Its files are the pages that are served, mapped as they are: nothing is on a disk, and nothing is there
# twice. It counts against the limits of this process, which are asked before the first sample
# (`Resources.disk_bytes` of such a folder). A process that is killed cannot tidy up: its folder is unlocked
# then, and the next to make one removes it.


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the memory file system itself, not a place for temporary files
_OWNER = ".owner"
_YOUNG_S = 60.0
"""A folder without a lock that is younger may be about to get one."""


class MemoryFolder:
    """A new folder in memory, which is locked while it is in use.

    Raises:
        ConfigError: There is no such file system, or it cannot be written.
    """

    def __init__(self, base: Path = SHARED_MEMORY) -> None:
        mount = storage_of(base) if base.is_dir() else None
        if mount is None or not mount.in_memory or not os.access(base, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{arg('cache_dir', None)} keeps the cache in memory, in {base}, which is not there, not in "
                "memory, or cannot be written",
                hint=f"Give a folder, as {arg('cache_dir', '.stoker')}",
            )
        prefix = f"stoker-{os.getuid()}-"
        for left in base.glob(f"{prefix}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._lock = FileLock(self.path / _OWNER)
        self._lock.acquire(timeout_s=10.0)  # another process may be looking whether it is in use
        self._owner = os.getpid()

    def goes_with(self, user: object) -> None:
        """Remove it when `user` is collected, or this process ends."""
        weakref.finalize(user, self.remove)

    def remove(self) -> None:
        """Give the memory back; what is mapped of it stays until it is let go of. A fork does nothing."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()
            self._owner = -1


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a process that ended without doing so."""
    with suppress(OSError), FileLock(folder / _OWNER, create=False) as lock:
        was_locked = lock.path.exists()
        if lock.acquire() and (was_locked or time.time() - folder.stat().st_mtime > _YOUNG_S):
            shutil.rmtree(folder, ignore_errors=True)
