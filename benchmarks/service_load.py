"""How fast is the service read while a job trains, and does the job wait for its data any longer?

    python benchmarks/service_load.py [--save] [--rate 200] [--seconds 15] [--turns 3]

`stoker serve` with one worker trains the guide's job (4,030 radio rows, batch 256). In turns, so that drift hits
both alike: quiet, then `rate` reads a second (a page of jobs, one job, its metrics, the end of its log, in equal
parts), sent when they are due whether or not earlier ones were answered. A read's time counts from when it was
due, so a server that falls behind is seen to. Stall and seconds of epochs are those that the job itself reports.
The sender runs on the same machine and its part of the processor is part of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import publish
from stoker.service.client import Client

CONNECTIONS = 16
EPOCHS = 5000


class Reader:
    """Keeps connections open and sends each read when it is due."""

    def __init__(self, port: int, token: str, job: str) -> None:
        api, head = "/api/v1/training", f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        paths = (f"{api}/jobs", f"{api}/jobs/{job}", f"{api}/jobs/{job}/metrics", f"{api}/jobs/{job}/logs")
        self.requests = [f"GET {path} HTTP/1.1\r\n{head}".encode() for path in paths]
        self.port = port
        self.free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self.seconds: list[float] = []
        self.failed = 0

    async def one(self, request: bytes, due: float) -> None:
        pair = await self.free.get()
        reader, writer = pair
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            self.seconds.append(time.perf_counter() - due)
            self.failed += not head.startswith(b"HTTP/1.1 200")
        except (OSError, EOFError, StopIteration):
            self.failed += 1
            pair = await asyncio.open_connection("127.0.0.1", self.port)
        self.free.put_nowait(pair)

    async def run(self, rate: float, seconds: float) -> None:
        self.free = asyncio.Queue()  # a queue belongs to one event loop
        for _ in range(CONNECTIONS):
            self.free.put_nowait(await asyncio.open_connection("127.0.0.1", self.port))
        begin, sent = time.perf_counter(), []
        for n in range(int(rate * seconds)):
            due = begin + n / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent.append(asyncio.create_task(self.one(self.requests[n % len(self.requests)], due)))
        await asyncio.wait_for(asyncio.gather(*sent), 60)
        while not self.free.empty():
            self.free.get_nowait()[1].close()


def measure(client: Client, token: str, arguments: argparse.Namespace) -> dict[str, Any]:
    made = client.generate({"kind": "radio", "name": "radio", "rows": 4030})
    wait(client, made["job"]["id"], lambda job: job["status"] == "completed")
    config = {"dataset_ids": ["radio"], "batch_size": 256, "epochs": EPOCHS, "early_stop_patience": 0}
    job = client.submit({"job_name": "guide", "config": config})["id"]
    wait(client, job, lambda found: found["current_epoch"] >= 20)
    reader = Reader(int(client.address.rpartition(":")[2]), token, job)
    rows: dict[str, list[dict[str, Any]]] = {"quiet": [], "read": []}
    for _ in range(arguments.turns):
        for phase, found in rows.items():
            first = client.job(job)["job"]["current_epoch"] + 1
            if phase == "quiet":
                time.sleep(arguments.seconds)
            else:
                asyncio.run(reader.run(arguments.rate, arguments.seconds))
            found.extend(client.metrics(job, limit=1000, after=first))
    client.act(job, "cancel")
    stall = {phase: statistics.mean(row["stall"] for row in found) for phase, found in rows.items()}
    epoch_s = {phase: statistics.median(row["seconds"] for row in found) for phase, found in rows.items()}
    times = sorted(reader.seconds)
    return {
        "rate": arguments.rate,
        "reads": len(times),
        "failed": reader.failed,
        "p50_ms": round(1e3 * times[len(times) // 2], 2),
        "p99_ms": round(1e3 * times[int(len(times) * 0.99)], 2),
        "max_ms": round(1e3 * times[-1], 2),
        "epochs": {phase: len(found) for phase, found in rows.items()},
        "stall": {phase: round(value, 5) for phase, value in stall.items()},
        "stall_points": round(100 * (stall["read"] - stall["quiet"]), 3),
        "epoch_s": {phase: round(value, 4) for phase, value in epoch_s.items()},
    }


def wait(client: Client, job: str, done: Any) -> None:
    deadline = time.monotonic() + 120
    while not done(found := client.job(job)["job"]):
        if found["status"] == "failed" or time.monotonic() > deadline:
            raise SystemExit(f"the job did not get there: {found}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        words = ["serve", "--port", "0", "--state-dir", str(state), "--workers", "1", "--json"]
        process = subprocess.Popen([sys.executable, "-m", "stoker", *words], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            token = (state / "token").read_text().strip()
            row = measure(Client(address, token), token, arguments)
        finally:
            process.terminate()
            process.wait(90)
    publish("service_load", [row], save=arguments.save)


if __name__ == "__main__":
    main()
