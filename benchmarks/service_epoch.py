"""How long is an epoch of the guide's job (4,030 radio rows, batch 256), and how long by a query a sample?

    python benchmarks/service_epoch.py [--save] [--postgres URL] [--rows N]

One network, one order of rows, five ways to come by a batch: `job`, all that a job does in an epoch (cache,
plan, loader, steps, judging 806 rows, checkpoint, a line); `loader`, its training steps alone; `ready`, steps on
batches that are there already, the limit; `memory`, a DataLoader that takes single rows from tensors and stacks
them; `query`, a statement a row on an open connection with a prepared statement, its JSON parsed. Batches are
compared first: all ways give the same numbers. Interleaved, once warm, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import stoker
from measure import interleaved, publish
from stoker.extras.radio.demo import (
    TABLE,
    RadioSpec,
    Triangulation,
    TriangulationModel,
    radio_columns,
    radio_where,
    write_radio,
)
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.run.fitting import fit, one_thread
from stoker.sources.sql.source import SQLSource
from stoker.sources.sql.values import METRES
from stoker.train.config import TrainConfig

BATCH = 256
SETTINGS = TrainConfig(epochs=5000, lr=1e-3, checkpoint_every=None, save_every_s=1.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("receivers", "signal_mask", "target")


@contextlib.contextmanager
def opened(url: str) -> Iterator[Callable[[str], tuple[Any, ...]]]:
    """Answers a key with its row."""
    names = "receiver_features, tx_latitude, tx_longitude"
    if url.startswith("postgres"):
        import psycopg

        with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
            sql = f"SELECT {names} FROM {TABLE} WHERE recording_session_id = %s::uuid"
            yield lambda key: connection.execute(sql, (key,)).fetchone()
    else:
        with contextlib.closing(sqlite3.connect(url)) as connection:
            sql = f"SELECT {names} FROM {TABLE} WHERE recording_session_id = ?"
            yield lambda key: connection.execute(sql, (key,)).fetchone()


def metres(center: Any, places: Any) -> tuple[Any, Any]:
    """North and east of `center`."""
    offset = (places - center) * METRES
    return offset[..., 0], offset[..., 1] * math.cos(math.radians(center[0]))


def sample_of(row: tuple[Any, ...], statistics: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a job's source makes of a row, as one writes it by hand."""
    entries, latitude, longitude = row
    entries = json.loads(entries) if isinstance(entries, str) else entries
    heard = np.array([entry["signal_present"] for entry in entries])
    places = np.array([(entry["rx_lat"], entry["rx_lon"]) for entry in entries])
    center = places[heard].mean(0)
    receivers, mask = np.zeros((7, 6)), np.ones(7, np.bool_)
    mask[: len(entries)] = ~heard
    for at, entry in enumerate(entries):
        receivers[at, 0] = (entry["snr_db"]["mean"] + 20) / 80
        receivers[at, 1] = (entry["psd_dbm_per_hz"]["mean"] + 180) / 80
        receivers[at, 2] = (entry["frequency_offset_hz"]["mean"] + 50) / 100
        receivers[at, 5] = heard[at]
    for at, far in zip((3, 4), metres(center, places), strict=True):
        own = statistics["receivers"]
        standard = (far - own["mean"][at - 3]) / own["deviation"][at - 3]
        receivers[: len(entries), at] = np.where(heard, standard, 0.0)
    own = statistics["target"]
    target = (np.array(metres(center, np.array([latitude, longitude]))) - own["mean"]) / own["deviation"]
    made = {
        "receivers": receivers.astype(np.float32),
        "signal_mask": mask,
        "target": target.astype(np.float32),
    }
    return {name: torch.from_numpy(value) for name, value in made.items()}


class Rival:
    """Steps on batches that another way provides."""

    def __init__(self, statistics: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = TriangulationModel(dropout=0.2)
        self.model.set_statistics(statistics)
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.lesson = Triangulation(self.model)

    def epoch(self, batches: Iterable[Mapping[str, Tensor]]) -> int:
        for given in batches:
            batch = {name: given[name].to(DEVICE) for name in FIELDS}
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.lesson.losses(batch).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if not math.isfinite(float(loss.detach())):
            raise SystemExit("the loss is not finite")
        return 1


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Single rows of tensors in memory."""

    def __init__(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        kept = list(batches)
        self.fields = {name: torch.cat([batch[name] for batch in kept]) for name in FIELDS}

    def __len__(self) -> int:
        return len(self.fields["target"])

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: values[number] for name, values in self.fields.items()}


def measure(url: str, spec: RadioSpec, folder: Path) -> dict[str, Any]:
    where = radio_where([str(spec.dataset_id)])
    rows = SQLSource(
        url, table=TABLE, key="recording_session_id", columns=radio_columns(), where=where, split="train",
        splits={"train": 0.8, "val": 0.2},
    )  # fmt: skip
    cache = stoker.precompute(rows, None, folder, name="train", progress=None)
    held_out = stoker.precompute(rows.for_split("val"), None, folder, name="val", progress=None)
    keys, statistics, epochs = rows.keys(), rows.statistics, count()
    loader = Loader(cache, BATCH, device=DEVICE, shuffle=True)
    ready = [{name: batch[name] for name in FIELDS} for batch in loader]
    rivals = {name: Rival(statistics) for name in ("loader", "ready", "memory", "query")}

    def in_epoch(order: Loader) -> Loader:
        order.set_epoch(next(epochs))
        return order

    with opened(url) as fetch:

        def asked(numbers: list[int]) -> dict[str, Tensor]:
            samples = [sample_of(fetch(keys[number]), statistics) for number in numbers]
            return {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}

        def queried() -> Iterator[dict[str, Tensor]]:
            order = torch.randperm(len(keys)).tolist()
            for first in range(0, len(order), BATCH):
                yield asked(order[first : first + BATCH])

        for batch in Loader(cache, BATCH, shuffle=False):
            again = asked(batch["index"].tolist())
            for name in FIELDS:
                torch.testing.assert_close(again[name], batch[name], rtol=1e-5, atol=1e-6)
        single = DataLoader(Rows(Loader(cache, BATCH, shuffle=True)), BATCH, shuffle=True)
        job = whole_epochs(cache, held_out, statistics, folder / "job")
        contenders = {
            "job": lambda: next(job),
            "loader": lambda: rivals["loader"].epoch(in_epoch(loader)),
            "ready": lambda: rivals["ready"].epoch(ready),
            "memory": lambda: rivals["memory"].epoch(single),
            "query": lambda: rivals["query"].epoch(queried()),
        }
        taken = interleaved(contenders, rounds=5)
    return {
        "rows": spec.rows, "batch": BATCH, "device": DEVICE, "tier": loader.plan.tier,
        **{f"{name}_epoch_ms": round(1e3 * s, 2) for name, s in taken.items()},
        "query_over_loader": round(taken["query"] / taken["loader"], 2),
        "query_over_job": round(taken["query"] / taken["job"], 2),
        "memory_over_loader": round(taken["memory"] / taken["loader"], 2),
        "loader_over_ready": round(taken["loader"] / taken["ready"], 3),
    }  # fmt: skip


def whole_epochs(cache: Any, held_out: Any, statistics: Mapping[str, Any], folder: Path) -> Iterator[int]:
    """Epochs of a job, one at a time: `fit` runs in a thread that waits at the end of each."""
    import queue
    import threading

    go: queue.Queue[None] = queue.Queue()
    done: queue.Queue[int] = queue.Queue()
    meter = StallMeter()
    torch.manual_seed(0)
    model = TriangulationModel(dropout=0.2)
    model.set_statistics(statistics)
    train = Loader(cache, BATCH, device=DEVICE, meter=meter, shuffle=True)
    val = Loader(held_out, BATCH, device=DEVICE, shuffle=False)

    def tell(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "epoch":
            with (folder / "events.jsonl").open("a") as file:
                file.write(json.dumps(facts) + "\n")
            done.put(1)
            go.get(timeout=600)

    def train_on() -> None:
        go.get(timeout=600)
        fit(Triangulation(model.to(DEVICE)), train, val, SETTINGS, folder=folder, meter=meter, on_event=tell)

    folder.mkdir()
    threading.Thread(target=train_on, daemon=True).start()
    while True:
        go.put(None)
        yield done.get(timeout=600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--postgres", help="URL of a database in which tables may be made")
    parser.add_argument("--rows", type=int, default=4030)
    arguments = parser.parse_args()
    spec, found = RadioSpec(rows=arguments.rows), []
    with tempfile.TemporaryDirectory() as folder, one_thread():
        urls = {"sqlite": str(Path(folder) / "radio.db")}
        if arguments.postgres:
            urls["postgresql"] = arguments.postgres
        for database, url in urls.items():
            write_radio(url, spec)
            found.append({"database": database, **measure(url, spec, Path(folder) / database)})
    publish("service_epoch", found, save=arguments.save)


if __name__ == "__main__":
    main()
