"""Question: are the times that `stoker plan --simulate` predicts those that runs here then take?

Whole epochs and whole precomputes on this machine, of the parts below. The simulator is told what was measured by
itself just before and, where it is quick to do, just after (their mean): a step with nothing to load, batches with no step, reading, encoding and writing of a few samples each
alone, the start of a precompute with eight samples, gradients summed with nothing else going on, and of the throttled store
the rate and latency that it was set to. It is never told what a combination of them took. `error` is predicted over
measured, less 1: the median over rounds in which primitives and run take turns. `bare_error` is that of the guess that
nothing waits for anything (steps alone; of precompute the encoder alone), so that one sees what there was to predict.

- serve: W2-like windows (batch 256) from host memory and from the disk tier (page cache), steps that sleep 2, 5, 20 ms.
- partial: whole records of 103 KiB, a part of them in host memory, the rest from disk; steps of 5 ms.
- encode: every sample read and encoded for each batch in the same process, steps of 2 and 20 ms.
- precompute: a cheap and a dear encoder, gzip HDF5, 1 and 2 workers, fresh processes.
- ranks: 1, 2, 4 ranks under torchrun on the same cores; steps multiply matrices, then sum 1 MiB of gradients (gloo).
- store: 1 and 2 nodes (processes in step) read from one throttled store: fixed rate and latency.
- filling: the first epoch beside the encoding (`wait=False`), cheap and dear encoder.

`within` is the part of the rounds that the predicted range held, `width` that range over what was measured.

    python benchmarks/simulate.py [--save] [--only serve ranks] [--rounds 3]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stoker
from measure import RESULTS, publish
from partial_residency import reserve
from plan_stall import alone, sleeping
from precompute_wall import alone as alone_process
from precompute_wall import make_encoder, write
from serve_memory import Records, cache_of
from stoker.extras.simulation.run import simulate
from stoker.extras.simulation.scenario import Scenario
from stoker.loader.outputs import make_outputs
from stoker.plan import BatchLoad, Interval, probe
from stoker.plan.trials import next_interval
from stoker.precompute import PrecomputeSettings
from stoker.precompute.measure import Trial, try_stages
from stoker.run.plan import served_loads
from stoker.store import make_recipe

Found = tuple[float, float, float, Interval | None]
"""Predicted, measured and bare seconds, and the range of the predicted ones."""
WINDOWS = stoker.Windows()
TRAJECTORIES, BATCH = 800, 256
RECORDS, RECORD_BATCH = 2_000, 16
SAMPLES, TRIED = 160, 64
STORE_BYTES_S, STORE_LATENCY_S, STORE_THREADS = 60e6, 4e-3, 4
STORE_RECORDS, STORE_BATCH = 640, 32
RANK_BATCH, RANK_PRODUCTS, RANK_GRADIENTS = 64, 20, 1 << 18
FILL_S = 1.0
STARTED = 20
"""Samples, encoded one by one, of the run that shows how long a filling takes to start: with 16 encode batches or
fewer it has no process for the encoder, whose import of torch is a good part of that."""
PRIMITIVES = 3
"""Times that a step and a sum of gradients are timed, of which a range is made."""
STEPS = 200
LONG_S = 200.0


def latents(count: int) -> Records:
    rows = torch.randn(count, 101, 16, 32, generator=torch.Generator().manual_seed(0)).half()
    return Records({"latent": rows}, time=("latent",))


def scenario_of(
    cache: stoker.Cache, windows: stoker.Windows | None, batch: int, step_s: float, **more: Any
) -> Scenario:
    """A run on this machine over a cache: its sizes, and what else is known."""
    outputs = make_outputs(cache.schema, windows, None)
    each = 1 if windows is None else windows.count(cache.schema["latent"].shape[0])
    given: dict[str, Any] = {
        "host_memory_bytes": probe().host_bytes, "cores": float(len(os.sched_getaffinity(0))), "step_cpus": 0.0,
        "disk_bytes_s": 1e12, "epochs": 1,
    }  # fmt: skip
    return Scenario(
        records=len(cache),
        record_bytes=cache.schema["latent"].size_bytes(),
        batch=batch,
        examples=len(cache) * each,
        example_bytes=sum(output.example_bytes for output in outputs),
        step_s=step_s,
        **(given | more),
    )


def mean_load(*loads: BatchLoad) -> BatchLoad:
    ranges = [one.alone_range for one in loads if one.alone_range is not None]
    return BatchLoad(
        **{
            n: statistics.fmean(getattr(one, n) for one in loads)
            for n in ("alone_s", "direct_s", "overlapped_s")
        },
        alone_range=Interval(min(low for low, _ in ranges), max(high for _, high in ranges))
        if ranges
        else None,
    )


def spanned(**times: tuple[float, ...]) -> dict[str, Interval]:
    """The range of each time that was measured several times."""
    found = {name: next_interval(each) for name, each in times.items()}
    return {name: Interval(max(0.0, one.low), one.high) for name, one in found.items() if one is not None}


def stage_spans(*tried: dict[str, float]) -> dict[str, Interval]:
    """Stages that were tried before and after: from the smallest to the largest time."""
    return {name: Interval(*sorted(one[name] for one in tried)[:: len(tried) - 1]) for name in tried[0]}


def epoch_of(loader: Any, step: Callable[[], None]) -> float:
    """Seconds of an epoch; those before it fill memory and are not counted."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < FILL_S:
        for _ in loader:
            pass
    begin = time.perf_counter()
    for _ in loader:
        step()
    return time.perf_counter() - begin


def serve(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    cache = cache_of(latents(TRAJECTORIES), folder, shards=4)

    def once(tier: str, length_s: float) -> Found:
        step = sleeping(length_s)
        primitives = [(alone(step), served_loads(cache, WINDOWS, BATCH, tiers=[tier])[tier])]
        loader = stoker.Loader(cache, BATCH, windows=WINDOWS, tier=tier, drop_last=True, shuffle=True)
        measured = epoch_of(loader, step)
        primitives.append((alone(step), served_loads(cache, WINDOWS, BATCH, tiers=[tier])[tier]))
        step_s = statistics.fmean(each for each, _ in primitives)
        served = {tier: mean_load(*(load for _, load in primitives))}
        steps = Interval(*sorted(each for each, _ in primitives))
        scenario = scenario_of(cache, WINDOWS, BATCH, step_s, served=served, ranges={"step_s": steps})
        way = simulate(scenario).way(tier)
        return way.epoch_s, measured, scenario.batches * step_s, way.epoch_range_s

    for tier in ("host", "disk"):
        for length_s in (2e-3, 5e-3, 20e-3):
            yield f"{tier}, step {length_s * 1e3:g} ms", lambda t=tier, s=length_s: once(t, s)


def partial(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    cache = cache_of(latents(RECORDS), folder, shards=40)
    step = sleeping(5e-3)

    def once(fraction: float) -> Found:
        step_s = alone(step)
        served = served_loads(cache, None, RECORD_BATCH)
        few = served_loads(cache, None, RECORD_BATCH // 4)
        loader = stoker.Loader(
            cache, RECORD_BATCH, reserve_bytes=reserve(cache, fraction), drop_last=True, shuffle=True
        )
        measured = epoch_of(loader, step)
        step_s = (step_s + alone(step)) / 2
        held = loader.plan.records_by_tier()["host"] / len(cache)  # free memory moves while others use it
        size = len(cache) * cache.schema["latent"].size_bytes()
        scenario = scenario_of(
            cache, None, RECORD_BATCH, step_s, served=served, host_memory_bytes=int(held * size / 0.8) + 1,
            fixed_s={"disk": fixed(few["disk"].direct_s, served["disk"].direct_s)},
        )  # fmt: skip
        found = {way.name: way for way in simulate(scenario).ways}
        way = found.get("tiers", found["disk"])
        return way.epoch_s, measured, scenario.batches * step_s, way.epoch_range_s

    for fraction in (0.25, 0.5, 0.75):
        yield f"{fraction:.0%} in host memory, step 5 ms", lambda f=fraction: once(f)


def fixed(few_s: float, many_s: float) -> float:
    """What is of a batch and not of its examples, from batches of a quarter as many."""
    return min(many_s, max(0.0, (4 * few_s - many_s) / 3))


def stages(source: Any, encoder: Any, folder: Path) -> dict[str, float]:
    """Seconds of reading, encoding and writing one sample, each with nothing beside it."""
    trial = Trial()
    recipe = make_recipe(source, encoder, dtype="float16")
    settings = PrecomputeSettings(dtype="float16", progress=None)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        try_stages(source, encoder, (Path(place), "trial", recipe), settings, trial)
    begin = time.perf_counter()
    count = min(len(source), 64)  # neighbors, as workers have them
    for number in range(count):
        source.read(number)
    read_s = (time.perf_counter() - begin) / count
    return {"read_s": read_s, "encode_s": trial.encode_s, "write_s": trial.writes_s / trial.records}


def encode(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    path, tried = folder / "gzip.h5", folder / "tried.h5"
    write(path, SAMPLES, "gzip")
    write(tried, TRIED, "gzip")
    some = stoker.HDF5Source(tried, preset="pdebench")
    source, encoder = stoker.HDF5Source(path, preset="pdebench"), make_encoder("mlp")

    def epoch(batch: int, step: Callable[[], None]) -> float:
        begin = time.perf_counter()
        for first in range(0, SAMPLES, batch):
            read = [source.read(number) for number in range(first, first + batch)]
            stacked = {name: torch.stack([torch.from_numpy(one[name]) for one in read]) for name in read[0]}
            with torch.inference_mode():
                encoder.encode(stacked)
            step()
        return time.perf_counter() - begin

    def once(length_s: float) -> Found:
        step = sleeping(length_s)
        steps, tried = [alone(step)], [stages(some, encoder, folder)]
        measured = epoch(8, step)
        steps.append(alone(step))
        tried.append(stages(some, encoder, folder))
        step_s, made = statistics.fmean(steps), {n: statistics.fmean(t[n] for t in tried) for n in tried[0]}
        scenario = Scenario(
            records=SAMPLES, record_bytes=101 * 16 * 32 * 2, batch=8, step_s=step_s, step_cpus=0.0, workers=0,
            host_memory_bytes=probe().host_bytes, cores=2, disk_bytes_s=1e12, ranges=stage_spans(*tried), **made,
        )  # fmt: skip
        way = simulate(scenario).way("encode")
        return way.epoch_s, measured, scenario.batches * step_s, way.epoch_range_s

    for length_s in (2e-3, 20e-3):
        yield f"encoded for each batch, step {length_s * 1e3:g} ms", lambda s=length_s: once(s)


def precompute(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    path, small, tried = (folder / f"{name}.h5" for name in ("gzip", "small", "tried"))
    for file, count in ((path, SAMPLES), (small, 8), (tried, TRIED)):
        write(file, count, "gzip")

    def once(kind: str, workers: int) -> Found:
        before, few = child("stages", tried, kind, folder), wall(small, kind, 1)
        measured = wall(path, kind, workers)
        after = child("stages", tried, kind, folder)
        made = {name: (before[name] + after[name]) / 2 for name in before}
        start_s = max(0.0, few - 8 * sum(made.values()))
        scenario = Scenario(
            records=SAMPLES, record_bytes=1.0, batch=1, step_s=1.0, host_memory_bytes=1, cores=2, disk_bytes_s=1e12,
            workers=workers, start_s=start_s, ranges=stage_spans(before, after), **made,
        )  # fmt: skip
        found = simulate(scenario)
        return found.encoding.seconds, measured, SAMPLES * made["encode_s"], found.ways[0].encoding_range_s

    def wall(data: Path, kind: str, workers: int) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            found = alone_process("precompute", 1, data, kind, Path(place) / "cache", workers)
        return found["wall_s"] - found["digest_s"]

    for kind in ("grid", "mlp"):
        for workers in (1, 2):
            name = {"grid": "cheap", "mlp": "dear"}[kind]
            yield (
                f"{name} encoder, {workers} reader{'s' * (workers > 1)}",
                lambda k=kind, r=workers: once(k, r),
            )


def child(mode: str, *arguments: object, ranks: int = 1) -> dict[str, float]:
    """What `--child mode` prints, in a fresh process or as ranks under torchrun; the first rank's."""
    launcher = (
        ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, __file__, "--child", mode, *map(str, arguments)],
        capture_output=True, text=True, timeout=LONG_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def child_stages(path: str, kind: str, folder: str) -> dict[str, float]:
    return stages(stoker.HDF5Source(path, preset="pdebench"), make_encoder(kind), Path(folder))


def ranks(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    cache = cache_of(latents(TRAJECTORIES // 8), folder, shards=4)
    cores = len(os.sched_getaffinity(0))

    def once(count: int) -> Found:
        ones = tuple(child("step")["products_s"] for _ in range(PRIMITIVES))
        one, two = statistics.fmean(ones), child("step", ranks=2)
        worth = 2 * one / two["products_s"]  # cores may share what they compute with
        syncs = (
            tuple(child("sync", ranks=count)["sync_s"] for _ in range(PRIMITIVES)) if count > 1 else (0.0,)
        )
        sync_s = statistics.fmean(syncs)
        served = served_loads(cache, WINDOWS, RANK_BATCH, tiers=["host"])
        scenario = scenario_of(
            cache, WINDOWS, RANK_BATCH, one, served=served, gpus=count, step_cpus=1.0, sync_s=sync_s,
            cores=min(float(cores), worth), step_spread=two["spread"] if count > 1 else 0.0,
            ranges=spanned(step_s=ones, sync_s=syncs),
        )  # fmt: skip
        measured = child("rank", cache.path, ranks=count)["epoch_s"]
        way = simulate(scenario).way("host")
        return way.epoch_s, measured, scenario.batches * one, way.epoch_range_s

    for count in (1, 2, 4):
        yield f"{count} rank{'s' * (count > 1)} on {cores} cores", lambda n=count: once(n)


def products() -> Callable[[], None]:
    """A step of a fixed amount of work on one core."""
    matrix = torch.randn(256, 256)

    def step() -> None:
        for _ in range(RANK_PRODUCTS):
            torch.mm(matrix, matrix)

    return step


def child_step() -> dict[str, float]:
    """A step with nothing to load, on every rank at once and without a word among them."""
    joined()
    step = products()
    alone(step)
    if dist.is_initialized():
        dist.barrier()
    took: list[float] = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        took.append(time.perf_counter() - begin)
    return said(
        {"products_s": statistics.fmean(took), "spread": statistics.stdev(took) / statistics.fmean(took)}
    )


def joined() -> tuple[int, int]:
    """This process's rank among how many; the group is begun."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def child_sync() -> dict[str, float]:
    joined()
    gradients = torch.zeros(RANK_GRADIENTS)
    begin, count = 0.0, 100
    for number in range(count + 10):
        if number == 10:
            begin = time.perf_counter()
        dist.all_reduce(gradients)
    return said({"sync_s": (time.perf_counter() - begin) / count})


def said(found: dict[str, float]) -> dict[str, float]:
    """The first rank's alone is printed; all end together."""
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank:
            sys.exit(0)
    return found


def child_rank(path: str) -> dict[str, float]:
    rank, world_size = joined()
    gradients = torch.zeros(RANK_GRADIENTS)
    loader = stoker.Loader(
        stoker.open_cache(path),
        RANK_BATCH,
        windows=WINDOWS,
        tier="host",
        rank=rank,
        world_size=world_size,
        drop_last=True,
        shuffle=True,
    )
    product = products()

    def step() -> None:
        product()
        if world_size > 1:
            dist.all_reduce(gradients)

    return said({"epoch_s": epoch_of(loader, step)})


class Throttle:
    """One store that all processes read from: its bytes go out one after another, each request late by the latency."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._next = mmap.mmap(self._file.fileno(), 8)

    def wait(self, size: int) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        begin = max(time.monotonic(), struct.unpack("d", self._next[:])[0])
        self._next[:] = struct.pack("d", begin + size / STORE_BYTES_S)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, begin + size / STORE_BYTES_S + STORE_LATENCY_S - time.monotonic()))


def throttled(path: Path) -> None:
    """Have all files of caches in this process come from the throttled store."""
    from stoker.store.format import LocalFile

    read = LocalFile.read_into

    def slow(self: Any, offset: int, out: memoryview) -> None:
        Throttle(path).wait(len(out))
        read(self, offset, out)

    LocalFile.read_into = slow  # type: ignore[method-assign]
    LocalFile.read_cached = lambda *_: False  # type: ignore[method-assign,assignment]


def store(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    cache = cache_of(latents(STORE_RECORDS), folder, shards=4)
    (folder / "throttle").write_bytes(struct.pack("d", 0.0))

    def once(nodes: int, length_s: float) -> Found:
        step_s = alone(sleeping(length_s))
        sync_s = child("sync", ranks=nodes)["sync_s"] if nodes > 1 else 0.0
        served = served_loads(cache, None, STORE_BATCH, tiers=["disk"])
        scenario = scenario_of(
            cache, None, STORE_BATCH, step_s, served=served, nodes=nodes, store="throttled", network_bytes_s=1e12,
            store_bytes_s=STORE_BYTES_S, store_latency_s=STORE_LATENCY_S, requests=STORE_THREADS, fetch_bytes=1, sync_s=sync_s,
        )  # fmt: skip
        measured = child("store", cache.path, folder / "throttle", length_s, ranks=nodes)["epoch_s"]
        way = simulate(scenario).way("store")
        return way.epoch_s, measured, scenario.batches * step_s, way.epoch_range_s

    for nodes in (1, 2):
        for length_s in (20e-3, 80e-3):
            name = f"{nodes} node{'s' * (nodes > 1)}, store of 60 MB/s and 4 ms, step {length_s * 1e3:g} ms"
            yield name, lambda n=nodes, s=length_s: once(n, s)


def child_store(path: str, throttle: str, length_s: str) -> dict[str, float]:
    rank, world_size = joined()
    cache = stoker.open_cache(path)
    loader = stoker.Loader(
        cache, STORE_BATCH, tier="disk", rank=rank, world_size=world_size, drop_last=True, shuffle=True
    )
    throttled(Path(throttle))
    gradients = torch.zeros(RANK_GRADIENTS)

    def step() -> None:
        time.sleep(float(length_s))
        if world_size > 1:
            dist.all_reduce(gradients)

    begin = time.perf_counter()
    for _ in loader:
        step()
    return said({"epoch_s": time.perf_counter() - begin})


def filling(folder: Path) -> Iterator[tuple[str, Callable[[], Found]]]:
    path, small, tried = (folder / f"{name}.h5" for name in ("gzip", "small", "tried"))
    for file, count in ((path, SAMPLES), (small, STARTED), (tried, TRIED)):
        write(file, count, "gzip")

    def once(kind: str, length_s: float) -> Found:
        before, step_s = child("stages", tried, kind, folder), alone(sleeping(length_s))
        with tempfile.TemporaryDirectory(dir=folder) as place:
            measured = child("beside", path, kind, place, length_s, 8)["epoch_s"]
        after = child("stages", tried, kind, folder)
        made = {name: (before[name] + after[name]) / 2 for name in before}
        starts = tuple(start(kind, sum(made.values())) for _ in range(PRIMITIVES))
        scenario = Scenario(
            records=SAMPLES, record_bytes=1.0, batch=8, step_s=step_s, host_memory_bytes=1, cores=2, step_cpus=0.0,
            disk_bytes_s=1e12, fill_start_s=statistics.fmean(starts),
            ranges=stage_spans(before, after) | spanned(fill_start_s=starts), **made,
        )  # fmt: skip
        found = simulate(scenario)
        return (
            found.first_epoch_while_encoding_s,
            measured,
            scenario.batches * step_s,
            found.first_epoch_while_encoding_range_s,
        )

    def start(kind: str, made_s: float) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            few = child("beside", small, kind, place, 0.0, STARTED, 1)["epoch_s"]
        return max(0.0, few - STARTED * made_s)

    for kind, length_s in (("grid", 20e-3), ("mlp", 20e-3), ("grid", 200e-3)):
        name = {"grid": "cheap", "mlp": "dear"}[kind]
        yield (
            f"first epoch beside a {name} encoder, step {length_s * 1e3:g} ms",
            lambda k=kind, s=length_s: once(k, s),
        )


def child_beside(
    path: str, kind: str, place: str, length_s: str, batch: str, encode_batch: str = ""
) -> dict[str, float]:
    """From the call of precompute to the end of the epoch."""
    source, encoder = stoker.HDF5Source(path, preset="pdebench"), make_encoder(kind)
    together = int(encode_batch) if encode_batch else None
    make_recipe(source, encoder, dtype="float16")  # digests the file, which is not what is asked
    step = sleeping(float(length_s))
    begin = time.perf_counter()
    cache = stoker.precompute(
        source, encoder, Path(place), name="bench", dtype="float16", workers=1, wait=False, progress=None,
        encode_batch=together,
    )  # fmt: skip
    for _ in stoker.Loader(cache, int(batch), shuffle=True):
        step()
    return {"epoch_s": time.perf_counter() - begin}


CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "stages": child_stages, "step": child_step, "sync": child_sync, "rank": child_rank, "store": child_store,
    "beside": child_beside,
}  # fmt: skip
PARTS = {each.__name__: each for each in (serve, partial, encode, precompute, ranks, store, filling)}


def rows_of(part: str, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        cases = dict(PARTS[part](Path(folder)))
        taken: dict[str, list[Found]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                taken[name].append(case())
    for name, found in taken.items():
        predicted, measured, bare = (statistics.median(each[at] for each in found) for at in range(3))
        errors = [p / m - 1 for p, m, *_ in found]
        likely = [(one, m) for _, m, _, one in found if one is not None]
        rows.append(
            {
                "part": part, "what": name, "predicted_s": round(predicted, 3), "measured_s": round(measured, 3),
                "error": round(statistics.median(errors), 4), "bare_error": round(bare / measured - 1, 3),
                "errors": [round(error, 3) for error in errors],
                "within": statistics.fmean(one.low <= m <= one.high for one, m in likely) if likely else None,
                "width": round(statistics.median(one.width / m for one, m in likely), 3) if likely else None,
            }
        )  # fmt: skip
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        mode, *rest = arguments.child
        print(json.dumps(CHILDREN[mode](*rest)))
        return
    torch.set_num_threads(1)
    kept = RESULTS / "simulate.jsonl"
    before = [json.loads(line) for line in kept.read_text().splitlines()[1:]] if kept.exists() else []
    rows = before
    for part in arguments.only:
        rows = [row for row in rows if row["part"] != part] + rows_of(
            part, 1 if arguments.quick else arguments.rounds
        )
        rows.sort(key=lambda row: [*PARTS].index(row["part"]))
        publish("simulate", rows, save=arguments.save)  # what is measured is kept if the rest is broken off


if __name__ == "__main__":
    main()
