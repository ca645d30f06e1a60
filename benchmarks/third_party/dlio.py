"""Question: how busy does DLIO find its simulated accelerator with its own loaders, and with Stoker?

DLIO (github.com/argonne-lcf/dlio_benchmark) reads batches and sleeps for as long as a training step takes on an H100 or
A100. It reports the fraction of time in those steps, `au`. Its settings are kept, but for the number of files: the
set is about twice the memory that a run may use (a control group, page cache included). Pages of its files are dropped
before each run. This is not an MLPerf Storage result: these have rules on set size, accelerators and repetitions.

- `built in`: DLIO's own loader with its own settings, PyTorch's DataLoader (unet3d) or tf.data (cosmoflow, resnet50).
- `built in, 2 threads`: the same with a reader for each core.
- `stoker`: `stoker.cached` of the samples as bytes (cosmoflow, resnet50), so that each epoch serves as many bytes as
  the built-in loader reads. For unet3d of what DLIO's reader hands over, resized to 2 MiB of 140: what Stoker is for,
  and only right where training resizes without random numbers. That of MLPerf crops at random.

`au` is the mean over epochs, in percent, as DLIO has it. It leaves the first step of an epoch out, for which the built-in
loader waits longest where a set is small: its workers read several batches by then. So in `au_all_steps` all steps of all
epochs count. `start_s` is spent before the first epoch; Stoker fills its cache there if `filled`. `au_in_total` counts
that time too. `epochs_s` are seconds of each epoch.

    python benchmarks/third_party/run.py dlio --only unet3d --save
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ != "__main__":  # DLIO imports this module for its loader
    from dlio_benchmark.common.enumerations import DataLoaderType, FormatType
    from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

    import stoker

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """DLIO's samples, as bytes; with `side` the square that its readers hand over."""

        def __init__(self, args: Any, side: int | None) -> None:
            self.files = sorted(args.file_list_train)
            self.each = args.num_samples_per_file
            self.is_npz, self.side = args.format is FormatType.NPZ, side

        def __len__(self) -> int:
            return len(self.files) * self.each

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            path, row = self.files[number // self.each], number % self.each
            data = self.of_npz(path, row) if self.is_npz else self.of_tfrecord(Path(path), row)
            if self.side is not None:
                data = data[: self.side**2].reshape(self.side, self.side)
            return {"sample": torch.from_numpy(data)}

        def of_npz(self, path: str, row: int) -> np.ndarray[Any, Any]:
            return np.load(path)["x"][..., row].reshape(-1)

        def of_tfrecord(self, path: Path, row: int) -> np.ndarray[Any, Any]:
            """The record of one sample, found by the index that DLIO writes: lines of offset and size."""
            index = path.parent.parent / "index" / "train" / f"{path.name}.idx"
            offset, size = map(int, index.read_text().splitlines()[row].split())
            return np.fromfile(path, np.uint8, size - 16, offset=offset + 12)  # without lengths and checksums

    class StokerLoader(BaseDataLoader):  # type: ignore[misc]
        """DLIO's extension point `data_loader_classname`."""

        def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
            super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)

        def read(self) -> None:
            begin, cache = time.perf_counter(), Path(os.environ["STOKER_CACHE"])
            is_filled = not cache.exists()
            side = self._args.max_dimension if os.environ["STOKER_RESIZES"] else None
            self.loader = stoker.cached(
                Samples(self._args, side),
                cache_dir=cache,
                batch_size=self.batch_size,
                shuffle=True,
                drop_last=True,
                rank=self._args.my_rank,
                world_size=self._args.comm_size,
            )
            facts = {"start_s": round(time.perf_counter() - begin, 2), "filled": is_filled}
            print("stoker facts", json.dumps({**facts, "loader": str(self.loader)}), flush=True)

        def next(self) -> Iterator[Any]:
            yield from self.loader

        def finalize(self) -> None:
            pass


GIB = 1 << 30
SETS = {"unet3d": (56, 4, 3), "cosmoflow": (3000, 4, 3), "resnet50": (30, 2, 2)}
"""Files (of 146 MB, 2.8 MB, 143 MB), the memory limit in GiB, and epochs."""
QUICK = {"unet3d": (21, 4, 2), "cosmoflow": (200, 2, 2), "resnet50": (5, 2, 2)}
CONTENDERS = ("built in", "built in, 2 threads", "stoker")


def main() -> None:
    from memory_limit import drop_pages, memory_group, run_in
    from shared import arguments, save

    given = arguments(
        "dlio",
        __doc__,
        only={"choices": list(SETS), "default": "unet3d"},
        accelerators={"nargs": "*", "default": ["h100", "a100"]},
    )
    files, limit_gib, epochs = (QUICK if given.quick else SETS)[given.only]
    data = given.work / given.only
    settings = [
        f"++workload.dataset.data_folder={data}/data",
        f"++workload.dataset.num_files_train={files}",
        f"++workload.train.epochs={epochs}",
        "++workload.workflow.checkpoint=False",
    ]
    paths = os.pathsep.join([str(given.original), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "DFTRACER_ENABLE": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {
        "STOKER_CACHE": f"{data}/cache",
        "STOKER_RESIZES": "yes" if given.only == "unet3d" else "",
    }

    def dlio(group: Path | str, accelerator: str, *more: str) -> str | None:
        command = [sys.executable, "-m", "dlio_benchmark.main", f"workload={given.only}_{accelerator}"]
        done = run_in(
            group,
            [*command, *settings, *more, f"hydra.run.dir={data}/run"],
            environment,
            capture_output=True,
            timeout=900,
            cwd=data,
        )
        if done.returncode == -signal.SIGKILL:
            return None
        if done.returncode:
            raise SystemExit(f"DLIO ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
        return done.stdout

    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    rows: list[dict[str, Any]] = []
    try:
        dlio("", "h100", "++workload.workflow.generate_data=True", "++workload.workflow.train=False")
        with memory_group(limit_gib * GIB) as group:
            for contender in CONTENDERS:
                for accelerator in given.accelerators:
                    more = ["++workload.reader.read_threads=2"] if "2 threads" in contender else []
                    if contender == "stoker":
                        more.append("++workload.reader.data_loader_classname=dlio.StokerLoader")
                        more.append("++workload.reader.data_loader_sampler=index")
                    drop_pages(path for path in data.rglob("*") if path.is_file())
                    said = dlio(group, accelerator, *more)
                    limit = f"{limit_gib} GiB" if isinstance(group, Path) else group
                    rows.append({"workload": given.only, "accelerator": accelerator, "contender": contender})
                    rows[-1] |= {"set_gib": size_gib(data / "data"), "memory": limit}
                    rows[-1] |= {"failed": "out of memory"} if said is None else measured(data / "run", said)
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(data, ignore_errors=True)
    save(f"dlio_{given.only}", given.original, rows, given)


def size_gib(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / GIB, 2)


def measured(run: Path, said: str) -> dict[str, Any]:
    """DLIO's own figures of a run, and what the loader of Stoker said."""
    metric = json.loads((run / "summary.json").read_text())["metric"]
    stats = json.loads((run / "0_per_epoch_stats.json").read_text())
    output = json.loads((run / "0_output.json").read_text())
    epochs = [float(stats[epoch]["duration"]) for epoch in sorted(stats, key=int)]
    steps = [output[epoch]["compute"]["block1"] for epoch in sorted(stats, key=int)]
    facts = [json.loads(line[13:]) for line in said.splitlines() if line.startswith("stoker facts ")]
    start = facts[0]["start_s"] if facts else 0.0
    return {
        "au": round(metric["train_au_mean_percentage"], 1),
        "au_epochs": [round(au, 1) for au in metric["train_au_percentage"]],
        "steps": len(steps[0]),
        "epochs_s": epochs,
        "au_all_steps": round(100 * sum(map(sum, steps)) / sum(epochs), 1),
        "au_in_total": round(100 * sum(map(sum, steps)) / (sum(epochs) + start), 1),
        **(facts[0] if facts else {}),
    }


if __name__ == "__main__":
    main()
