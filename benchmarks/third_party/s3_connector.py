"""Question: samples a second from an S3 server, in the benchmark of Amazon's S3 Connector for PyTorch?

`s3torchbenchmarking` reads each object of a data set and keeps its length (its model "entitlement": the fastest that a
training could be). Its `run_experiment` runs as it is, over images of its own generator, against SeaweedFS on loopback.
For Stoker `make_dataset` makes a loader, and `make_dataloader` hands it on. Stoker serves the bytes of each object.

- `s3iterabledataset`, `s3mapdataset`: the connector, with 0 and 2 workers. `stoker, local cache`: filled from the
  objects. `stoker, cache in S3`: the cache is on the same server, with a local copy of blocks that were fetched.
- `make_s`: seconds until the loader is there; Stoker fills its cache in them. `epochs_s`: seconds of each epoch.
- `samples_per_s`: over all epochs. The original calls this figure `throughput_mibs`, and counts samples.

The model and the images need neither torchvision nor transformers, which its module imports: mocks stand for both. The
endpoint of the server is given to `from_prefix`, since the original has no setting for it.

    python benchmarks/third_party/run.py s3_connector --save
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from shared import BENCHMARKS, arguments, save

import stoker

CONTENDERS = [(kind, workers) for kind in ("s3iterabledataset", "s3mapdataset") for workers in (0, 2)]
CONTENDERS += [("stoker, local cache", 0), ("stoker, cache in S3", 0)]


def read_bytes(object_: Any) -> tuple[torch.Tensor, str]:
    return torch.frombuffer(bytearray(object_.read()), dtype=torch.uint8), object_.key


def load(checkout: Path) -> Any:
    """The original's module."""
    import lightning

    assert lightning  # before mocks take the place of what it looks for
    for name in ("torchvision", "torchvision.transforms", "transformers"):
        sys.modules[name] = MagicMock()
    sys.modules["s3torchbenchmarking.dcp_fsdp.llama_model_config"] = MagicMock()
    sys.path.insert(0, str(checkout / "s3torchbenchmarking" / "src"))
    from s3torchbenchmarking.dataset import benchmark

    return benchmark


def fill_bucket(server: Any, count: int) -> None:
    """What the original's `s3torch-datagen` uploads, without shards."""
    from s3torchbenchmarking.datagen import build_pipeline

    for sample in build_pipeline(count, (496, 387), 0, "JPEG"):
        server.put(f"images/{sample.label}", sample.data.getvalue())


def timed(make: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    def run(*words: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        made = make(*words, **options)
        took.append(time.perf_counter() - begin)
        return made

    return run


def main() -> None:
    given = arguments("s3_connector", __doc__)
    # Of the environment that run.py makes; --help needs none of them.
    from omegaconf import OmegaConf
    from s3torchconnector import S3ClientConfig, S3IterableDataset, S3MapDataset

    sys.path[:0] = [str(BENCHMARKS.parent)]
    from tests.store.s3_server import an_s3_server

    module, cache = load(given.original), given.work / "s3-cache"
    shutil.rmtree(cache, ignore_errors=True)
    theirs = {name: getattr(module, name) for name in ("make_dataset", "make_dataloader")}
    rows = []
    with an_s3_server() as server:
        os.environ.update(server.variables())
        options = {"endpoint": server.url, "s3client_config": S3ClientConfig(force_path_style=True)}
        for made in (S3IterableDataset, S3MapDataset):
            endpoint = SimpleNamespace(from_prefix=partial(made.from_prefix, **options))
            vars(module)[made.__name__] = endpoint
        fill_bucket(server, 100 if given.quick else 3_000)

        def of_stoker(where: str | Path, **_: Any) -> stoker.Loader:
            objects = S3MapDataset.from_prefix(
                f"s3://{server.bucket}/images", region="us-east-1", transform=read_bytes, **options
            )
            return stoker.cached(
                objects, cache_dir=where, batch_size=128, text={"1": "drop"}, version="images"
            )

        for kind, workers in CONTENDERS:
            took: list[float] = []
            where = f"s3://{server.bucket}/caches" if kind.endswith("S3") else cache
            make = partial(of_stoker, where) if kind.startswith("stoker") else theirs["make_dataset"]
            vars(module)["make_dataset"] = timed(make, took)
            passed_on = (
                (lambda dataset, **_: dataset) if kind.startswith("stoker") else theirs["make_dataloader"]
            )
            vars(module)["make_dataloader"] = passed_on
            loader = {
                "kind": kind,
                "num_workers": workers,
                "batch_size": 128,
                "s3reader": {"type": "sequential"},
            }
            config = {
                **{"model": "entitlement", "dataset": "images", "sharding": False, "epochs": 3},
                **{"s3": {"bucket": server.bucket, "region": "us-east-1"}, "dataloader": loader},
            }
            metrics = module.run_experiment.__wrapped__(OmegaConf.create(config))["metrics"]
            epochs = [round(value, 3) for value in metrics["epoch_durations_s"]]
            row = {"contender": kind, "workers": workers, "make_s": round(took[0], 2), "epochs_s": epochs}
            rows.append(row | {"samples_per_s": round(metrics["throughput_mibs"], 1), "server": server.kind})
    shutil.rmtree(cache)
    save("s3_connector", given.original, rows, given)


if __name__ == "__main__":
    main()
