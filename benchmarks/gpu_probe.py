"""Question: what only a GPU can show, asked of one: a JSON line for each fact, with `ok` where there is a right answer.

    PYTHONPATH=src:.:benchmarks python benchmarks/gpu_probe.py [PART ...] [--device cpu]

Each part runs in a process of its own, since a lost CUDA context takes all that comes after it. Exits 1 where a fact is
not ok or a part fails. With `--device cpu` everything is tried in this process, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import stoker
from stoker.loader import Loader, Normalization, OneOf, Rows, Span, Windows
from stoker.loader.gather import ConvertingGather
from stoker.loader.order import permutation_on
from stoker.loader.outputs import Conversion, find_conversion
from stoker.precompute.encode import BatchEncoder
from stoker.schema import Field
from stoker.train.loop import FiniteGuard
from stoker.transforms import Crop, DrawLatent, DropCondition, Flip, Noise
from tests.loader.caches import folded, trajectories, write_cache

LIMIT_S = 145.0
"""Seconds that one part may take."""
IMAGE = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), divisor=255)


class Probe:
    """What parts need: the device, a folder, and somebody to tell."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.folder = folder
        self.failed = False
        self._folders = 0

    def say(self, part: str, ok: bool | None = None, **facts: Any) -> None:
        self.failed = self.failed or ok is False
        print(
            json.dumps({"part": part, **({} if ok is None else {"ok": ok}), **facts}, default=str), flush=True
        )

    def new_folder(self) -> Path:
        self._folders += 1
        folder = self.folder / str(self._folders)
        folder.mkdir()
        return folder

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def times(self, work: Callable[[int], Any], turns: int = 300) -> tuple[float, float]:
        """Microseconds of a call until it returns, and until the device is done; fewer turns than its queue holds."""
        turns = turns if self.cuda else 3
        for turn in range(3):
            work(turn)
        self.wait()
        begin = time.perf_counter()
        for turn in range(turns):
            work(turn)
        returned = time.perf_counter() - begin
        self.wait()
        done = time.perf_counter() - begin
        return round(returned / turns * 1e6, 2), round(done / turns * 1e6, 2)


def env(probe: Probe) -> None:
    """What the machine has."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()[:600]
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)

    triton = importlib.util.find_spec("triton") is not None
    version = importlib.metadata.version("triton") if triton else None
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    probe.say(
        "env",
        ok=triton and headers.is_file() if probe.cuda else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=version,
        python=sys.version.split()[0],
        python_headers=headers.is_file(),
        gcc=said("gcc", "-dumpversion"),
        gpus=said("nvidia-smi", "-L"),
        free_and_total_bytes=torch.cuda.mem_get_info() if probe.cuda else None,
    )


def kernel(probe: Probe) -> None:
    """The kernel itself, with no way back to its twin: its bits, its speed at even and odd sizes, its launch."""
    if not probe.cuda:
        return
    from stoker.loader.triton_gather import TritonGather

    for side in (224, 225, 256, 518):
        rows = torch.randint(0, 256, (2048, 3, side, side), dtype=torch.uint8, device=probe.device)
        for dtype in ("bfloat16", "float32"):
            what = _fused((3, side, side), "uint8", IMAGE, dtype)
            begin = time.perf_counter()
            gather = TritonGather(rows, what, ConvertingGather(rows, what, 256, static=False).room)
            index = [torch.randint(2048, (256,), device=probe.device) for _ in range(4)]
            found = gather(index[0])
            probe.wait()
            compiled_s = time.perf_counter() - begin
            wanted = ConvertingGather(rows[index[0]].cpu(), what, 256)(torch.arange(256))
            host_us, us = probe.times(lambda turn, gather=gather, index=index: gather(index[turn % 4]), 60)
            moved = 256 * 3 * side * side * (1 + what.dtype.itemsize)
            same = torch.equal(found.cpu(), wanted)
            probe.say(
                "kernel", ok=same, side=side, dtype=dtype, same_bits=same, compile_s=round(compiled_s, 2),
                us=us, GB_s_moved=round(moved / us / 1e3), host_us=host_us,
            )  # fmt: skip
            del found
        del rows
    small = torch.zeros((4096, 512), dtype=torch.float16, device=probe.device)
    what = _fused((512,), "float16", None, "float32")
    gather = TritonGather(small, what, ConvertingGather(small, what, 256, static=False).room)
    index = [torch.randint(4096, (256,), device=probe.device)]
    probe.say("kernel", what="launch of a small batch", host_us=probe.times(lambda turn: gather(index[0]))[0])


def _fused(shape: tuple[int, ...], stored: str, how: Normalization | None, dtype: str) -> Conversion:
    what = find_conversion(Field(shape=shape, dtype=stored), how, dtype)
    assert what is not None
    return what


def _loaders(probe: Probe) -> dict[str, Callable[[], Loader]]:
    """A loader for every way to serve a GPU, over small caches."""
    count, folder = 4000 if probe.cuda else 64, probe.new_folder()
    timed = write_cache(folder, trajectories(count, 33, (16, 32)), timed=("latent", "time"), name="t")
    pixels = torch.randint(0, 256, (count, 3, 40, 40), dtype=torch.uint8)
    image = write_cache(folder, {"image": pixels}, name="i")
    ragged = write_cache(folder, {"u": [torch.randn(5 + n % 7, 8) for n in range(count)]}, name="r")
    packed = write_cache(folder, {"z": torch.randn(count, 16, 256)}, name="p", dtype="int8")
    bags = {
        "features": [torch.randn(5 + 37 * n % 200, 16) for n in range(count)],
        "label": torch.arange(count),
    }
    bag = write_cache(folder, bags, name="b")
    views = write_cache(
        folder, {"view": torch.randn(count, 4, 16, 16), "std": torch.rand(count, 4, 16, 16)}, name="v"
    )
    sizes = [torch.randn(4, *((8, 16), (16, 8), (12, 12))[n % 3]) for n in range(count)]
    shaped = write_cache(folder, folded("image", sizes, 3), name="s", axes={"image": ("4", "*", "*")})
    joined = stoker.zip(view=views, bag=bag, on="index")
    draw = DrawLatent(mean="view", std="std")
    windows, normalize = Windows(field="latent"), {"image": IMAGE}
    cut, noise = [Crop((32, 32), axes=(-2, -1)), Flip(axis=-1)], [Noise(std=0.1)]

    def made(cache: Any, tier: str = "device", **settings: Any) -> Callable[[], Loader]:
        size = {} if "batch_tokens" in settings else {"batch_size": 64 if probe.cuda else 16}
        return lambda: Loader(cache, tier=tier, device=probe.device, **{"shuffle": True, **size, **settings})

    return {
        "windows": made(timed, windows=windows),
        "windows, future, stride 2": made(timed, windows=Windows(field="latent", stride=2, horizon=3)),
        "images": made(image),
        "images normalized": made(image, normalize=normalize),
        "images cropped in the kernel": made(image, normalize=normalize, transforms=cut),
        "windows, Noise": made(timed, windows=windows, transforms=noise),
        "packed": made(packed),
        "ragged, lists": made(ragged),
        "ragged, padded": made(ragged, ragged="pad"),
        "8 random rows of bags": made(bag, choose={"features": Rows(8)}),
        "128 random rows of bags": made(bag, choose={"features": Rows(128)}),
        "crops of bags": made(bag, choose={"features": Span(32)}),
        "one of four views": made(views, choose={"view": OneOf("rotate"), "std": OneOf("rotate")}),
        "latents from moments": made(views, transforms=draw),
        "dropped conditions": made(bag, ragged="pad", transforms=DropCondition("label", p=0.1, null=0)),
        "batches of one shape": made(shaped, batch_by="shape"),
        "a budget of tokens": made(bag, batch_tokens=4096),
        "joined caches": made(joined, ragged="pad"),
        "host tier, bags": made(bag, "host"),
        "host tier": made(timed, "host", windows=windows),
        "host tier, Noise": made(timed, "host", windows=windows, transforms=noise),
        "disk tier": made(image, "disk", normalize=normalize),
    }


def serving(probe: Probe) -> None:
    """Host time, launches and waits for the device of one batch, each way, over an entire epoch that is not the first."""
    for name, make in _loaders(probe).items():
        try:
            probe.say("serving", ok=True, way=name, **_served(probe, make()))
        except Exception as error:
            probe.say("serving", ok=False, way=name, failed=_short(error))


def _served(probe: Probe, loader: Loader) -> dict[str, float]:
    for _ in range(2):  # fills and compiles, then settles
        for _ in loader:
            pass
        time.sleep(0.2 if probe.cuda else 0)
    probe.wait()
    begin = time.perf_counter()
    count = sum(1 for _ in loader)
    returned_s = time.perf_counter() - begin
    probe.wait()
    done_s = time.perf_counter() - begin
    facts = {
        "batches": count,
        "host_us": round(returned_s / count * 1e6, 1),
        "us": round(done_s / count * 1e6, 1),
    }
    if probe.cuda:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in loader:
                pass
            probe.wait()
        launches = sum(1 for event in seen.events() or () if event.device_type.name == "CUDA")
        facts["launches"] = round(launches / count, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in loader:
                pass
            torch.cuda.set_sync_debug_mode("default")
        waits = sum(1 for one in caught if "called a synchronizing" in str(one.message))
        facts["waits_for_the_device"] = round(waits / count, 3)
    return facts


def encoder_there(probe: Probe) -> None:
    """A module that is on the GPU already is an encoder, encodes there, and stays there."""
    module = torch.nn.Linear(8, 4).to(probe.device)
    cache = stoker.precompute(
        stoker.TorchSource(torch.utils.data.TensorDataset(torch.randn(20, 8))),
        stoker.ModuleEncoder(module, field="0"),
        probe.new_folder(),
        name="e",
        workers=0,
        progress=False,
    )
    found = next(module.parameters()).device
    probe.say("encoder_there", ok=found.type == probe.device.type and len(cache) == 20, device=found)


def static_transforms(probe: Probe) -> None:
    """With `static=True` what transforms return is at one address, too."""
    cache = write_cache(probe.new_folder(), trajectories(), timed=("latent", "time"))
    loader = Loader(
        cache, 16, windows=Windows(field="latent"), tier="device", device=probe.device, static=True, transforms=[Noise(std=0.1)]
    , shuffle=True)  # fmt: skip
    kept = [batch.z0 for batch in loader]
    addresses = len({z.data_ptr() for z in kept})
    probe.say("static_transforms", ok=addresses == 1, addresses=addresses, batches=len(kept))


def out_of_memory(probe: Probe) -> None:
    """An encoder that runs out of memory gets half a group, and nothing of the failed call is kept."""
    if not probe.cuda:
        return
    free = torch.cuda.mem_get_info()[0]
    calls: list[tuple[int, float]] = []

    class Hungry:
        def encode(self, batch: dict[str, Any]) -> dict[str, Any]:
            rows = len(batch["data"])
            calls.append((rows, round(torch.cuda.memory_allocated() / free, 2)))
            parts = [
                torch.empty(int(free * 0.07) * rows, dtype=torch.uint8, device=probe.device) for _ in range(2)
            ]
            del parts  # of 8 rows they are 1.1 times the memory there is
            return {"latent": batch["data"].clone()}

    field = Field(shape=(4,), dtype="float32")
    recipe: Any = SimpleNamespace(
        encoded={"latent": field}, encode_batch=SimpleNamespace(samples=8, steps=None)
    )
    encoder: Any = BatchEncoder(Hungry(), recipe, {"data": field}, device="cuda", nan="allow")  # type: ignore[arg-type]
    made, halved = encoder._call_with_halving({"data": torch.ones(8, 4)})
    right = halved and torch.equal(made["latent"], torch.ones(8, 4)) and max(part for _, part in calls) < 0.05
    probe.say("out_of_memory", ok=right, rows_and_part_allocated_before=calls)


def again(probe: Probe) -> None:
    """Memory that torch keeps of freed tensors is there for a loader made later."""
    if not probe.cuda:
        return
    make = _loaders(probe)["images"]
    kept = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.99), dtype=torch.uint8, device=probe.device)
    del kept
    probe.say("again", ok=True, batches=sum(1 for _ in make()))


def order(probe: Probe) -> None:
    """What making the order of an epoch takes on the device, of which the plan counts 64 bytes an example."""
    for count in (10_000_000, 50_000_000) if probe.cuda else (10_000, 50_000):
        if probe.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        made = permutation_on(probe.device, count, 1)
        probe.wait()
        took_s = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() if probe.cuda else made.nbytes
        each = round(peak / count, 1)
        probe.say("order", ok=each <= 64, examples=count, seconds=round(took_s, 4), bytes_each=each)
        del made


def capture(probe: Probe) -> None:
    """A CUDA graph can be captured while the threads of a loader copy and ask, in both modes.

    The product ran once before: no first call of cuBLAS can be captured, with or without a loader.
    """
    if not probe.cuda:
        return
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.randn(64, 512, device=probe.device) @ torch.randn(512, 512, device=probe.device)
    probe.wait()
    for mode in ("thread_local", "global"):
        loader = _loaders(probe)["host tier"]()
        weight = torch.randn(512, 512, device=probe.device)
        static, failed = torch.zeros(64, 512, device=probe.device), None
        try:
            for number, batch in enumerate(loader):
                static.copy_(batch.z0.reshape(len(batch.z0), -1)[:, :512])
                if number in (5, 10, 15, 20, 25):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        for _ in range(200):
                            static @ weight
                    graph.replay()
                if number == 60:
                    break
            probe.wait()
        except Exception as error:
            failed = _short(error)
        probe.say("capture", ok=failed is None, mode=mode, failed=failed)
        if failed:
            return  # the context may be lost


def other_gpus(probe: Probe) -> None:
    """Nothing is taken on GPU 0 by a loader and a guard of another."""
    if not probe.cuda or torch.cuda.device_count() < 2:
        probe.say("other_gpus", skipped="fewer than two GPUs")
        return
    pixels = torch.randint(0, 256, (512, 3, 64, 64), dtype=torch.uint8)
    cache = write_cache(probe.new_folder(), {"image": pixels})
    torch.zeros(1, device="cuda:1")
    before = _used_mib()
    for tier in ("device", "host"):
        for _ in Loader(cache, 16, tier=tier, device="cuda:1", shuffle=True):
            pass
    FiniteGuard(torch.device("cuda:1")).check()
    taken = _used_mib() - before
    probe.say("other_gpus", ok=taken < 100, MiB_taken_on_gpu_0=taken)


def _used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0])


def select(probe: Probe) -> None:
    """Gathers of rows that are 16 byte words, and of others; as they are, and as int64."""
    rows_of = (
        ("uint8 150528", torch.uint8, 150_528), ("uint8 150529", torch.uint8, 150_529),
        ("float16 512", torch.float16, 512), ("float16 24", torch.float16, 24),
        ("float32 4", torch.float32, 4), ("float16 100", torch.float16, 100),
    )  # fmt: skip
    for name, dtype, width in rows_of:
        size = width * dtype.itemsize
        count = max(64, min(200_000, (2 << 30) // size)) if probe.cuda else 64
        rows = torch.zeros((count, width), dtype=dtype, device=probe.device)
        for batch in (16, 256, 4096) if probe.cuda else (16,):
            if batch * size > 256 << 20:
                continue
            index = [torch.randint(count, (batch,), device=probe.device) for _ in range(8)]
            views = {"index_select": rows}
            if size % 8 == 0:
                views["index_select, int64 words"] = rows.view(torch.int64)
            for way, view in views.items():
                host_us, us = probe.times(
                    lambda turn, view=view, index=index: torch.index_select(view, 0, index[turn % 8])
                )
                speed = round(batch * size / us / 1e3, 1)
                probe.say(
                    "select", rows=name, batch=batch, way=way, host_us=host_us, us=us, GB_s_written=speed
                )
    source = torch.zeros(1 << (30 if probe.cuda else 20), dtype=torch.uint8, device=probe.device)
    target = torch.empty_like(source)
    _, us = probe.times(lambda turn: target.copy_(source), 20)
    probe.say("select", copy_GB_s_written=round(source.numel() / us / 1e3, 1))


def host(probe: Probe) -> None:
    """What one call costs the host, and what a small copy to the device costs while that is busy."""
    x = torch.zeros((256, 512), dtype=torch.float16, device=probe.device)
    probe.say("host", what="torch.empty", host_us=probe.times(lambda turn: torch.empty_like(x))[0])
    probe.say("host", what="add_", host_us=probe.times(lambda turn: x.add_(1))[0])
    if not probe.cuda:
        return
    busy = torch.randn(8192, 8192, device=probe.device, dtype=torch.bfloat16)
    numbers, pinned = torch.arange(256), torch.arange(256).pin_memory()
    copies: dict[str, Callable[[], Tensor]] = {
        "pageable": lambda: numbers.to(probe.device),
        "page-locked": lambda: pinned.to(probe.device, non_blocking=True),
    }
    for name, copy in copies.items():
        waits: list[float] = []

        def behind(turn: int, copy: Callable[[], Tensor] = copy, waits: list[float] = waits) -> None:
            busy @ busy
            begin = time.perf_counter()
            copy()
            waits.append(time.perf_counter() - begin)

        probe.times(behind, 20)
        median_us = round(1e6 * sorted(waits)[len(waits) // 2])
        probe.say("host", what=f"{name} copy of 2 KiB behind a product of 1.4 ms", host_us=median_us)


PARTS: dict[str, Callable[[Probe], None]] = {
    part.__name__: part
    for part in (
        env, kernel, serving, encoder_there, static_transforms, out_of_memory, again, order, capture, other_gpus,
        select, host,
    )
}  # fmt: skip


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _alone(part: str, device: str) -> bool:
    """Run a part in a process of its own; whether all was well."""
    command = [sys.executable, __file__, part, "--device", device, "--here"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        sys.stdout.write((error.stdout or b"").decode(errors="replace"))
        print(json.dumps({"part": part, "ok": False, "failed": f"not done after {LIMIT_S:g} s"}), flush=True)
        return False
    sys.stdout.write(done.stdout.decode(errors="replace"))
    said = done.stderr.decode(errors="replace")
    if done.returncode or "plain torch" in said:
        print(
            json.dumps({"part": part, "ok": False, "rc": done.returncode, "said": said[-1500:]}), flush=True
        )
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--here", action="store_true", help="in this process")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no parts: {', '.join(sorted(unknown))}. Expected {', '.join(PARTS)}")
    names = arguments.parts or list(PARTS)
    if not arguments.here and arguments.device != "cpu":
        failed = [name for name in names if not _alone(name, arguments.device)]
        sys.exit(bool(failed))
    with tempfile.TemporaryDirectory(prefix="stoker-gpu-probe-") as folder:
        probe = Probe(arguments.device, Path(folder))
        for name in names:
            PARTS[name](probe)
    sys.exit(probe.failed)


if __name__ == "__main__":
    main()
