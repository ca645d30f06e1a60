"""Question: samples a second from Zarr, cold and warm, for the engines of insitubatch's own benchmark and for Stoker?

insitubatch (github.com/emfdavid/insitubatch) trains from Zarr in place, and compares its loader with others by
`bench/engines.py`. Its suite runs as it is, over data that its generator makes: float32 fields of the shape of coarse
ERA5, compressed. Stoker is one more engine. Its first epoch fills the cache, and the figures of `cold` include that
(all samples are encoded, also the fifth that is not for training).

- `naive`: one chunk after another, no shuffle: the floor. `workers`: DataLoader. `xbatcher`: the usual stack.
  `insitu none`: reads anew in each epoch. `insitu resident`: keeps the decoded training set in a memory map.
  `memory`: all in one array before its clock starts: the ceiling.
- `cold`: the first epoch, with no page of the data in memory. `warm`: the second. `chunk 8`: of 8 samples.
- All columns are the original's. `ttfb_ms`: milliseconds to the first batch of the epoch.

    python benchmarks/third_party/run.py insitu_engines --save
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory_limit import drop_pages
from shared import arguments, save

KEPT = ("samples_per_s", "mb_per_s", "ttfb_ms", "seconds", "rss_anon_mb", "rss_file_mb")


def main() -> None:
    given = arguments("insitu_engines", __doc__)
    sys.path[:0] = [str(given.original), str(given.original / "src")]
    import bench.run as suite
    from bench import engines
    from insitubatch import SplitName, open_geometries, split_by_chunk

    import stoker  # here, since worker processes import this file again

    data, scratch = given.work / "zarr", given.work / "zarr-scratch"

    def of_stoker(cfg: Any, cache: Path) -> list[Any]:
        """An engine of this benchmark: one result for each epoch."""
        geometry = open_geometries(engines.build_store(cfg.backend, cfg.url))[cfg.var]
        train = split_by_chunk(geometry, fractions=(0.8, 0.1, 0.1)).sample_indices(SplitName.TRAIN, geometry)
        loader: list[stoker.Loader] = []

        def epoch() -> Iterator[Any]:
            if not loader:  # in the first epoch's time
                source = stoker.ArraySource(
                    cfg.url.removeprefix("file://"), layout="rows", fields={cfg.var: cfg.var}
                )
                options = {
                    "batch_size": cfg.batch_size,
                    "shuffle": cfg.shuffle,
                    "seed": cfg.seed,
                    "indices": train,
                }
                loader.append(stoker.cached(source, cache_dir=cache, **options))
            yield from loader[0]

        results = []
        for number in range(cfg.epochs):
            drive = engines._drive(
                epoch(), lambda batch: len(batch[cfg.var]), cfg.compute_ms, cfg.max_batches
            )
            results.append(engines._result(cfg, geometry, number, *drive))
        return results

    theirs = engines.run

    def run(
        cfg: Any, *, cache_dir: str | None = None, store_kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        drop_pages(path for path in data.rglob("*") if path.is_file())
        if cfg.engine == "stoker":
            return of_stoker(cfg, Path(cache_dir or scratch))
        return theirs(cfg, cache_dir=cache_dir, store_kwargs=store_kwargs)

    vars(suite)["run"] = run
    for old in (data, scratch):
        shutil.rmtree(old, ignore_errors=True)
    found = suite.run_suite(
        out=given.work / "insitu.jsonl",
        data_dir=data,
        cache_dir=scratch,
        chunk_sizes=(1, 8) if given.quick else (1, 8, 32),
        engines=("naive", "workers", "xbatcher", "insitu", "memory", "stoker"),
        caches=("none", "resident"),
        n_samples=128 if given.quick else 640,
        inner=(64, 64) if given.quick else (361, 720),
        batch_size=16,
        epochs=2,
        worker_sweep=(2,),
    )
    rows = [
        {
            "data": f"chunk {one.sample_chunk}",
            "engine": f"insitu {one.cache}" if one.engine == "insitu" else one.engine,
            "pass": "cold" if one.epoch == 0 else "warm",
            **{name: round(getattr(one, name), 2) for name in KEPT},
        }
        for one in found
    ]
    for old in (data, scratch):
        shutil.rmtree(old)
    save("insitu_engines", given.original, rows, given)


if __name__ == "__main__":
    main()
