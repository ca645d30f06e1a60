"""A set of images in the memory of a GPU, as the earlier system named it.

Stored once, as bytes and with every field in its own dtype; normalized while it is served. The set is
on the device where it fits; where it does not, the rest comes from host memory and disk, and a line says so.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from stoker.cached import name_of
from stoker.encoders.features import FeatureEncoder
from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError
from stoker.extras.compat.settings import device_or_cpu
from stoker.loader import Loader
from stoker.loader.outputs import Normalization
from stoker.plan.resources import is_out_of_memory
from stoker.precompute import precompute
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource
from stoker.store import Cache
from stoker.store.format import record_bytes
from stoker.train.batch_size import disable_torch_compile, find_batch_size

disable_compile_for_debug = disable_torch_compile
"""The same: the earlier system kept `disable_torch_compile` in a module of this name."""

FOLDER_VARIABLE = "DEX_YCB_DIR"
"""Names the folder of the images where no `data_dir` is given; read at each call."""
DINOV2 = "facebook/dinov2-large"
"""The model of the earlier system; taken from the local cache of Hugging Face, never downloaded."""
IMAGE = "image"
"""The field that is normalized and cast."""
FEATURES = "dinov2_features"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, for bytes divided by 255, which the earlier system used."""

log = logging.getLogger("stoker")


class CachedSet(Protocol):
    """What a `GPUDataLoader` serves: a `GPUCachedDataset` of images or of rows."""

    shuffles: bool
    """True if the earlier system shuffled where it was not told."""

    def __len__(self) -> int: ...

    def loader(self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any) -> Loader:
        """Return a loader of the set."""
        ...

    def shaped(self, batch: Any) -> dict[str, Any]:
        """Return a batch of that loader under the earlier names."""
        ...


Set = TypeVar("Set", bound=CachedSet)


class GPUDataLoader(Generic[Set]):
    """Batches of a `GPUCachedDataset`; further arguments are those of `Loader`, or of a DataLoader.

    Args:
        dataset: What to serve.
        batch_size, drop_last: As in a DataLoader.
        shuffle: As in a DataLoader; None: as the earlier systems did, images yes, rows no.
    """

    def __init__(
        self,
        dataset: Set,
        batch_size: int = 1,
        shuffle: bool | None = None,
        drop_last: bool = False,
        **loader: Any,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        shuffle = dataset.shuffles if shuffle is None else shuffle
        self.loader = dataset.loader(batch_size, shuffle=shuffle, drop_last=drop_last, **loader)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator would keep each batch, and its memory, until the next one is there.
        return map(self.dataset.shaped, self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that decides the order, as `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)


class GPUCachedDataset:
    """A split of images, cached and served from the device.

    Args:
        split: `train`, `val` or `test`.
        max_samples: Draw so many of the split, evenly and by a seed; None: all.
        image_size: (height, width).
        device: `auto` or `cuda` (a GPU; the CPU with one line where torch sees none), or `cpu`.
        dtype: Of served images alone; joints, cameras and masks keep their own.
        cache_path: Folder of the caches.
        normalize: By ImageNet's mean and deviation; False: bytes / 255.
        load_dinov2_features: Give every image its `dinov2_features`, the mean of its patches, by the model in
            `dinov2_folder`.
        data_dir: Folder of the images, in DexYCB's layout; None: the variable DEX_YCB_DIR, read at each call.
        dataset: A `Source` or map-style Dataset with a field `image`, in place of `data_dir`.
        precompute: How to fill the cache, as for `stoker.cached`.
        dinov2_folder: Local folder of the model, see `stoker.FeatureEncoder`; None: facebook/dinov2-large,
            if an earlier download left it on this machine. Nothing is downloaded.

    Raises:
        ConfigError: No folder of images is given or it is not there; features are asked for and the model
            is not on this machine.
        StokerError: As `precompute`.

    Example:
        >>> GPUCachedDataset("train", data_dir="no/such/folder")
        Traceback (most recent call last):
        stoker.errors.ConfigError: data_dir is no/such/folder, which is not a folder...
    """

    shuffles = True

    def __init__(  # noqa: PLR0913, PLR0917 - the earlier system's signature
        self,
        split: str = "train",
        max_samples: int | None = 100_000,
        image_size: tuple[int, int] = (224, 224),
        device: str | torch.device = "auto",
        dtype: torch.dtype = torch.float32,
        cache_path: str | Path = "./gpu_cache",
        normalize: bool = True,
        load_dinov2_features: bool = False,
        *,
        data_dir: str | Path | None = None,
        dataset: Any = None,
        precompute: Mapping[str, Any] | None = None,
        dinov2_folder: str | Path | None = None,
    ) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(
                f"dtype is {dtype}", hint="Expected a float, as torch.bfloat16: images are normalized"
            )
        self.device = device_or_cpu(device, "images")
        self.split, self.dtype, self.normalize = split, dtype, normalize
        if load_dinov2_features and dinov2_folder is None:
            dinov2_folder = _local_dinov2()
        source = _source(split, max_samples, image_size, data_dir, dataset)
        settings: dict[str, Any] = {**(precompute or {})}
        encoder = None
        if load_dinov2_features:
            encoder = FeatureEncoder(str(dinov2_folder), "mean", field=IMAGE, output=FEATURES)
            settings = {"device": str(self.device), "keep": (IMAGE,), **settings}
        self.cache = _filled(source, encoder, cache_path, f"{_called(source, dataset)}_{split}", settings)
        self.image_size = image_size

    def __len__(self) -> int:
        """Return the number of stored images; `cache.quarantined` lists those that could not be read."""
        return len(self.cache)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one image with its fields, as it is served.

        Raises:
            IndexError: No such image.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} does not exist: this set has {len(self)}")
        number = int(self.cache.indices[index])
        batch = next(iter(self.loader(1, shuffle=False, indices=[number], tier="disk")))
        return {name: values[0] for name, values in batch.items()}

    @property
    def num_samples(self) -> int:
        """As `len`."""
        return len(self)

    def loader(self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any) -> Loader:
        """Return batches of the set, from the device where it fits."""
        bytes_ = self.cache.schema[IMAGE].dtype == "uint8"
        how = {IMAGE: Normalization(mean=MEAN if self.normalize else 0.0, std=STD if self.normalize else 1.0,
                                divisor=255.0 if bytes_ else 1.0)}  # fmt: skip
        cast = [] if self.dtype == torch.float32 else [_ImageCast(self.dtype)]
        own: dict[str, Any] = {
            "device": str(self.device),
            "shuffle": shuffle,
            "drop_last": drop_last,
            "normalize": how if bytes_ or self.normalize else None,
            **loader,
            "transforms": [*cast, *loader.get("transforms", ())],
        }
        return Loader(self.cache, batch_size=batch_size, **own)

    def get_batch_generator(
        self, batch_size: int, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Return the batches of one epoch; each call is the next epoch's order."""
        if not hasattr(self, "_generators"):
            self._generators: dict[tuple[int, bool, bool], Loader] = {}
        key = (batch_size, shuffle, drop_last)
        if key not in self._generators:
            self._generators[key] = self.loader(*key)
        return iter(self._generators[key])

    def shaped(self, batch: Any) -> dict[str, Any]:
        """Return a batch of `loader` as it is: its fields have the earlier names."""
        return batch

    def _get_memory_usage(self) -> float:
        """Return the gigabytes of the stored set."""
        return record_bytes(self.cache.schema) * len(self) / 1e9


class _ImageCast:
    """Images in another dtype; everything else as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, batch: Any, keys: Tensor) -> Any:
        batch[IMAGE] = batch[IMAGE].to(self._dtype)
        return batch


def create_gpu_cached_dataloaders(
    config: Mapping[str, Any],
) -> tuple[GPUDataLoader[GPUCachedDataset], GPUDataLoader[GPUCachedDataset]]:
    """Return the loaders of `train` (shuffled, without a short last batch) and of `val` (in order).

    Args:
        config: `gpu_max_samples` (100,000), `gpu_max_samples_val` (10,000), `gpu_cache_path` (`./gpu_cache`),
            `use_bfloat16` (True), `preload_dinov2` (False), `batch_size` (32); and, new, `data_dir` or
            `datasets` (`{"train": ..., "val": ...}`), `image_size`, `device`, `precompute`, `dinov2_folder`.
            Other keys of a notebook's dictionary have no effect here; one line lists them.

    Raises:
        ConfigError: A key looks like a misspelled one of the earlier system's.
        StokerError: As `GPUCachedDataset`.
    """
    _tell_unused(config)
    datasets: Mapping[str, Any] = config.get("datasets") or {}
    loaders: list[GPUDataLoader[GPUCachedDataset]] = []
    for split, most in (("train", "gpu_max_samples"), ("val", "gpu_max_samples_val")):
        dataset = GPUCachedDataset(
            split,
            config.get(most, 100_000 if split == "train" else 10_000),
            image_size=config.get("image_size", (224, 224)),
            device=config.get("device", "auto"),
            dtype=torch.bfloat16 if config.get("use_bfloat16", True) else torch.float32,
            cache_path=config.get("gpu_cache_path", "./gpu_cache"),
            load_dinov2_features=config.get("preload_dinov2", False),
            data_dir=config.get("data_dir"),
            dataset=datasets.get(split),
            precompute=config.get("precompute"),
            dinov2_folder=config.get("dinov2_folder"),
        )
        train = split == "train"
        loaders.append(GPUDataLoader(dataset, config.get("batch_size", 32), shuffle=train, drop_last=train))
    log.info(
        "%s", "; ".join(f"{len(loader.dataset)} images, {loader.loader.plan.reason}" for loader in loaders)
    )
    return loaders[0], loaders[1]


_EARLIER = (
    "gpu_max_samples", "gpu_max_samples_val", "gpu_cache_path", "use_bfloat16", "preload_dinov2",
    "batch_size",
)  # fmt: skip
_KEYS = {*_EARLIER, "data_dir", "datasets", "image_size", "device", "precompute", "dinov2_folder"}


def _tell_unused(config: Mapping[str, Any]) -> None:
    """Say which keys have no effect; refuse those that are nearly one of the earlier system's."""
    unused = sorted(str(key) for key in config if key not in _KEYS)
    for key in unused:
        if near := difflib.get_close_matches(key, _EARLIER, n=1, cutoff=0.9):
            raise ConfigError(
                f"config has the key {key!r}, which is not known", hint=f"Did you mean {near[0]!r}?"
            )
    if unused:
        why = " (images are stored as bytes; precompute.compression, as zstd, compresses them)"
        said = why if any("compress" in key.lower() for key in unused) else ""
        log.warning("these keys of config have no effect on the images: %s%s", ", ".join(unused), said)


def find_optimal_batch_size(
    model: nn.Module,
    dataset: GPUCachedDataset | Iterable[Any],
    initial: int = 64,
    maximum: int = 2048,
    *,
    step: Callable[[nn.Module, Any], object] | None = None,
    optimizer: Any = (),
) -> int:
    """Return the largest batch size with which the model trains within memory.

    The model, its gradients and the optimizer are put back as they were. Each size that was tried is a line
    in the log (level INFO).

    Args:
        model: Takes a batch (a dictionary of tensors) and returns a tensor, or a mapping or sequence with
            tensors; a model that takes something else needs `step`.
        dataset: What to draw the batch from; a loader does as well.
        initial, maximum: The first size that is tried, and the largest.
        step: One step of training with `backward()`, as `step(model, batch)`. None: `model(batch)`, the mean
            of what it returns (of `hand_joints` where there is one), and `backward()`.
        optimizer: As for `stoker.find_batch_size`, if `step` has one.

    Raises:
        ConfigError: A number is out of range, or the model returned nothing that has a gradient.
        ResourceError: Not even one image fits.
        Exception: Whatever the model raises that is not a shortage of memory, at once.
    """
    run, said = step or _mean_step, set[int]()

    def told(model: nn.Module, batch: Any) -> None:
        count = len(batch[IMAGE])
        try:
            run(model, batch)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                log.info("batch size %d does not fit", count)
            raise
        if count not in said:
            said.add(count)
            log.info("batch size %d works", count)

    images = isinstance(dataset, GPUCachedDataset)
    batches = dataset.loader(min(initial, len(dataset)), shuffle=False) if images else dataset
    return find_batch_size(model, batches, told, optimizer=optimizer, initial=initial, maximum=maximum)


def _mean_step(model: nn.Module, batch: Any) -> None:
    """Forward and backward through whatever the model returns."""
    returned = model(batch)
    if isinstance(returned, Mapping) and "hand_joints" in returned:
        returned = cast("Mapping[str, Any]", returned)["hand_joints"]
    means = [tensor.float().mean() for tensor in _tensors(returned) if tensor.requires_grad]
    if not means:
        raise ConfigError(
            f"model(batch) returned a {type(returned).__name__} without a tensor that has a gradient",
            hint="Give step=, a function of model and batch that ends with backward()",
        )
    torch.stack(means).sum().backward()  # pyright: ignore[reportUnknownMemberType]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*cast("Mapping[str, Any]", value).values()])
    elif isinstance(value, list | tuple):
        for one in cast("Sequence[Any]", value):
            yield from _tensors(one)


def _local_dinov2() -> str:
    """Return the folder that an earlier download of the model left on this machine."""
    try:
        hub = import_module("huggingface_hub")
        return str(hub.snapshot_download(DINOV2, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:  # not installed; not downloaded
        raise ConfigError(
            f"features were asked for, and {DINOV2} is not on this machine ({type(error).__name__}); "
            "nothing is downloaded",
            hint="Give dinov2_folder, a local folder with the model and its processor, as save_pretrained() "
            "writes it",
        ) from error


def _source(
    split: str, max_samples: int | None, size: Sequence[int], data_dir: str | Path | None, dataset: Any
) -> Source:
    if dataset is not None:
        source: Source = dataset if isinstance(dataset, Source) else TorchSource(dataset)
        if IMAGE not in source.schema():
            raise ConfigError(
                f"dataset has the fields {', '.join(source.schema())}", hint=f"Expected one named {IMAGE!r}"
            )
        if max_samples is None or max_samples >= len(source):
            return source
        raise ConfigError(
            f"max_samples={max_samples} and a dataset of {len(source)}: draw from it yourself, as "
            "torch.utils.data.Subset(dataset, indices), or give max_samples=None"
        )
    named = "data_dir" if data_dir is not None else FOLDER_VARIABLE
    folder = data_dir if data_dir is not None else os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise ConfigError(
            f"no folder of images: data_dir is not given, and the variable {FOLDER_VARIABLE} is not set",
            hint="Give one of them, a folder in DexYCB's layout; or dataset, any source or Dataset with a "
            "field 'image'",
        )
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{named} is {folder}, which is not a folder",
            hint="Expected one in DexYCB's layout, with calibration and 20200709-subject-01 in it",
        )
    from stoker.sources.images import ImageSource

    return ImageSource(folder, "dexycb", size=(size[0], size[1]), split=split, max_samples=max_samples)


def _called(source: Source, dataset: Any) -> str:
    return "dexycb" if dataset is None else name_of(source if isinstance(dataset, Source) else dataset)


def _filled(
    source: Source, encoder: Encoder | None, folder: str | Path, name: str, settings: Mapping[str, Any]
) -> Cache:
    return precompute(source, encoder, folder, name=name, **settings)
