"""Other loaders over the same records, for `serve_memory.py` and `headline.py`: each as its own documentation has it.

`workers` are worker processes of those that have them; 0: everything in the calling process.

Those that are not installed are left out by name; nothing is imported before it is wanted. To install what installs
beside this torch:

    pip install -r benchmarks/requirements.txt
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

Epoch = Callable[[], Iterator[Any]]
"""One shuffled pass, batch by batch."""


def tensordict_memmap(fields: dict[str, Tensor], folder: Path, batch: int, workers: int = 0) -> Epoch:
    """`TensorDict.memmap_` behind a DataLoader that asks for a batch at a time."""
    from tensordict import TensorDict

    rows = TensorDict(dict(fields), batch_size=[_count(fields)]).memmap_(str(folder))
    loader = DataLoader(rows, batch, shuffle=True, drop_last=True, collate_fn=lambda x: x)
    return lambda: iter(loader)


def monai_cache(fields: dict[str, Tensor], _folder: Path, batch: int, _workers: int = 0) -> Epoch:
    """`CacheDataset` with everything cached."""
    from monai.data import CacheDataset
    from monai.data import DataLoader as MonaiLoader

    dataset = CacheDataset(_items(fields), transform=lambda item: item, cache_rate=1.0, progress=False)
    loader = MonaiLoader(dataset, batch_size=batch, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def hf_datasets(fields: dict[str, Tensor], folder: Path, batch: int, workers: int = 0) -> Epoch:
    """Arrow with a binary column per field, memory-mapped; a batch's rows are joined and viewed as a tensor.

    This is the file that `datasets.map` caches, read faster than its torch format reads it.
    """
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    columns = {name: [row.numpy().tobytes() for row in rows] for name, rows in fields.items()}
    Dataset.from_dict(columns).save_to_disk(str(folder))
    stored = load_from_disk(str(folder))

    def gather(chosen: list[int]) -> dict[str, Tensor]:
        found = stored[chosen]
        return {
            name: torch.frombuffer(bytearray(b"".join(found[name])), dtype=rows.dtype).view(
                batch, *rows.shape[1:]
            )
            for name, rows in fields.items()
        }

    if workers:
        loader = _by_batches(gather, _count(fields), batch, workers)
        return lambda: iter(loader)
    return lambda: map(gather, _shuffled(_count(fields), batch))


def spdl_pipeline(fields: dict[str, Tensor], _folder: Path, batch: int, _workers: int = 0) -> Epoch:
    """A pipeline with a hand-written gather of whole batches in one thread beside."""
    from spdl.pipeline import PipelineBuilder

    def gather(chosen: list[int]) -> dict[str, Tensor]:
        ids = torch.as_tensor(chosen)
        return {name: torch.index_select(rows, 0, ids) for name, rows in fields.items()}

    def epoch() -> Iterator[Any]:
        source = _shuffled(_count(fields), batch)
        pipeline = PipelineBuilder().add_source(source).pipe(gather).add_sink(4).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def torchdata_nodes(fields: dict[str, Tensor], _folder: Path, batch: int, _workers: int = 0) -> Epoch:
    """Nodes: sampler, batcher, mapper."""
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    def gather(chosen: list[int]) -> dict[str, Tensor]:
        ids = torch.as_tensor(chosen)
        return {name: torch.index_select(rows, 0, ids) for name, rows in fields.items()}

    sampler = SamplerWrapper(RandomSampler(range(_count(fields))))
    loader = Loader(Mapper(Batcher(sampler, batch, drop_last=True), gather))
    return lambda: iter(loader)


def grain_map(fields: dict[str, Tensor], _folder: Path, batch: int, _workers: int = 0) -> Epoch:
    """`MapDataset` over records in memory, shuffled and batched."""
    import grain

    arrays = {name: rows.numpy() for name, rows in fields.items()}

    class Source:
        def __len__(self) -> int:
            return _count(fields)

        def __getitem__(self, number: Any) -> dict[str, Any]:
            return {name: array[number] for name, array in arrays.items()}

    def epoch() -> Iterator[Any]:
        shuffled = grain.MapDataset.source(Source()).shuffle(seed=next(seeds))
        return iter(shuffled.batch(batch, drop_remainder=True).to_iter_dataset())

    seeds = itertools.count()
    return epoch


def lit_data(fields: dict[str, Tensor], folder: Path, batch: int, workers: int = 0) -> Epoch:
    """Optimized chunks, streamed from local disk."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=64 << 20)
    for number, item in enumerate(_items(fields)):
        writer.add_item(number, item)
    writer.done()
    writer.merge(1)
    dataset = StreamingDataset(str(folder), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(
        dataset, batch_size=batch, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: iter(loader)


def mosaic_streaming(fields: dict[str, Tensor], folder: Path, batch: int, workers: int = 0) -> Epoch:
    """MDS shards on local disk."""
    from streaming import MDSWriter, StreamingDataset

    columns = {
        name: f"ndarray:{rows.numpy().dtype}:{','.join(map(str, rows.shape[1:]))}"
        for name, rows in fields.items()
    }
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for item in _items(fields):
            writer.write({name: value.numpy() for name, value in item.items()})
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=batch)
    loader = DataLoader(
        dataset, batch_size=batch, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: iter(loader)


def web_dataset(fields: dict[str, Tensor], folder: Path, batch: int, workers: int = 0) -> Epoch:
    """Tar shards of `.npy` members, shuffled in a buffer."""
    import webdataset

    folder.mkdir()
    shard = _count(fields) // 8  # each worker reads entire shards
    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=shard, verbose=0) as writer:
        for number, item in enumerate(_items(fields)):
            members = {f"{name}.npy": value.numpy() for name, value in item.items()}
            writer.write({"__key__": f"{number:06d}", **members})
    names = [f"{name}.npy" for name in fields]
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls)).shuffle(2_000).decode().to_tuple(*names)
    loader = webdataset.WebLoader(
        dataset.batched(batch, partial=False),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: iter(loader)


RIVALS: dict[str, tuple[str, str, Callable[..., Epoch], int]] = {
    "tensordict memmap": ("tensordict", "tensordict", tensordict_memmap, 200),
    "MONAI CacheDataset": ("monai", "monai", monai_cache, 10),
    "HF datasets": ("datasets", "datasets", hf_datasets, 40),
    "SPDL": ("spdl", "spdl", spdl_pipeline, 400),
    "torchdata nodes": ("torchdata", "torchdata", torchdata_nodes, 400),
    "Grain": ("grain", "grain", grain_map, 10),
    "LitData": ("litdata", "litdata", lit_data, 10),
    "Mosaic streaming": ("streaming", "mosaicml-streaming", mosaic_streaming, 10),
    "WebDataset": ("webdataset", "webdataset", web_dataset, 10),
}
"""Module, distribution, how to make it, and how many batches a turn takes at most."""
MOST_BYTES = 160 << 20
"""Rivals that copy the records to files of their own get the first of them, up to this."""


def rivals(fields: dict[str, Tensor], folder: Path, batch: int) -> dict[str, tuple[Epoch, int]]:
    """Those that are installed and work, with the batches that a turn takes at most; others are named."""
    record_bytes = sum(rows[0].nbytes for rows in fields.values())
    few = {name: rows[: max(2 * batch, MOST_BYTES // record_bytes)] for name, rows in fields.items()}
    found: dict[str, tuple[Epoch, int]] = {}
    for name, (module, _, make, most) in RIVALS.items():
        if importlib.util.find_spec(module) is None:
            print(f"left out: {name} is not installed", file=sys.stderr)
            continue
        try:
            epoch = make(few, folder / module, batch)
            next(epoch())
        except Exception as error:
            print(f"left out: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        found[name] = (epoch, most)
    return found


def versions() -> dict[str, str]:
    """Of the rivals that are installed."""
    return {
        distribution: importlib.metadata.version(distribution)
        for module, distribution, _, _ in RIVALS.values()
        if importlib.util.find_spec(module) is not None
    }


def _count(fields: dict[str, Tensor]) -> int:
    return len(next(iter(fields.values())))


class _Gathered(Dataset[Any]):
    """A batch for each list of numbers, as `DataLoader(batch_size=None)` asks for them."""

    def __init__(self, gather: Callable[[list[int]], Any]) -> None:
        self.gather = gather

    def __getitem__(self, chosen: list[int]) -> Any:
        return self.gather(chosen)


def _by_batches(gather: Callable[[list[int]], Any], count: int, batch: int, workers: int) -> DataLoader[Any]:
    """A DataLoader whose workers gather entire batches."""
    sampler = BatchSampler(RandomSampler(range(count)), batch, drop_last=True)
    return DataLoader(
        _Gathered(gather),
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def _items(fields: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: rows[n].clone() for name, rows in fields.items()} for n in range(_count(fields))]


def _shuffled(count: int, batch: int) -> list[list[int]]:
    order = np.random.default_rng().permutation(count)
    return [part.tolist() for part in np.split(order[: count // batch * batch], count // batch)]
