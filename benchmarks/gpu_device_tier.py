"""Question: what does a batch from the device tier cost, against a device-to-device copy of the same bytes?

W1 (1 KiB records, batch 256), W2w (pairs of 1 KiB steps, batch 256 and 65,536) and W3 (uint8 images, batch 256 and 1,024). `gather` is the
batch's bytes over the time per batch in a full epoch; `copy` is `out.copy_(in)` of as many bytes, the device's own limit, both counted in
bytes served. `host_us` is the time the host spends per batch (launches and Python), the wall time of an epoch that nobody waits for.

    python benchmarks/gpu_device_tier.py [--save]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import stoker
from measure import publish
from serve_memory import Records, cache_of


def copy_rate(size_bytes: int) -> float:
    """Bytes a second of a device-to-device copy of `size_bytes`, counted once."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        target.copy_(source)
    torch.cuda.synchronize()
    return 50 * size_bytes / (time.perf_counter() - begin)


def epoch(loader: stoker.Loader) -> tuple[float, float, int]:
    """Seconds of an epoch until the device is done, seconds until the host is, batches."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    count = 0
    for _batch in loader:
        count += 1
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return time.perf_counter() - begin, host, count


def measure(
    name: str, cache: stoker.Cache, batch: int, batch_bytes: int, windows: Any = None
) -> dict[str, Any]:
    loader = stoker.Loader(cache, batch, tier="device", device="cuda", windows=windows, drop_last=True)
    epoch(loader)
    best = min((epoch(loader) for _ in range(5)), key=lambda taken: taken[0])
    rate, copy = batch_bytes * best[2] / best[0], copy_rate(batch_bytes)
    return {
        "workload": name, "batch": batch, "batch_MiB": round(batch_bytes / 2**20, 2),
        "us_per_batch": round(best[0] / best[2] * 1e6, 1), "host_us": round(best[1] / best[2] * 1e6, 1),
        "gather_GB_s": round(rate / 1e9, 1), "copy_GB_s": round(copy / 1e9, 1), "of_copy": round(rate / copy, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = Records({"latent": torch.randn(20_000, 16, 32).half(), "params": torch.randn(20_000, 4)})
        rows.append(measure("W1", cache_of(records, folder / "w1", 4), 256, 256 * 1040))
        steps = Records({"latent": torch.randn(2_000, 101, 16, 32).half()}, time=("latent",))
        cache = cache_of(steps, folder / "w2", 4)
        for batch in (256, 65_536):
            rows.append(measure("W2w", cache, batch, 2 * batch * 1024, stoker.Windows()))
        images = Records({"image": torch.randint(0, 256, (8_192, 3, 224, 224), dtype=torch.uint8)})
        cache = cache_of(images, folder / "w3", 4)
        for batch in (256, 1_024):
            rows.append(measure("W3", cache, batch, batch * 3 * 224 * 224))
    publish("gpu_device_tier", rows, save=arguments.save)


if __name__ == "__main__":
    main()
