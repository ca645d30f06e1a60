"""Make tests/data/store_v3, small caches of compressed shards that every later version must read.

Run once per format, never again for format 3: `python -m tests.data.make_store_v3`.
"""

from __future__ import annotations

import shutil

import torch
from torch import Tensor

from stoker.schema import Field, Schema
from stoker.store import WriterSettings, make_recipe, open_folder
from tests.data.make_store_v1 import HERE, GoldenSource

SCHEMA: Schema = {
    "latent": Field(shape=(3, 130), dtype="float32", time=True),
    "label": Field(shape=(), dtype="int64"),
}
RAGGED: Schema = {"tokens": Field(shape=(-1, 64), dtype="float32", ragged=True)}
CASES = [("golden", SCHEMA, "zstd"), ("golden_ragged", RAGGED, "lz4")]
NUMBERS = ([0, 1, 3, 2], [6, 4, 5])


def record(schema: Schema, number: int) -> dict[str, Tensor]:
    """What sample `number` holds."""
    shape = (2 * number, 64) if "tokens" in schema else (3, 130)
    values = (torch.arange(shape[0] * shape[1]) % 7).reshape(shape) + float(number)
    if "tokens" in schema:
        return {"tokens": values}
    return {"latent": values, "label": torch.tensor(number * 10**12)}


def main() -> None:
    """Write all of them anew: a compressed shard per part, rows out of order."""
    root = HERE / "store_v3"
    shutil.rmtree(root, ignore_errors=True)
    for name, schema, compression in CASES:
        folder = open_folder(root, name, make_recipe(GoldenSource(schema), None))  # type: ignore[arg-type]
        for numbers in NUMBERS:
            records = [record(schema, number) for number in numbers]
            writer = folder.writer(WriterSettings(compression=compression))  # type: ignore[arg-type]
            writer.append(
                numbers,
                {
                    n: [r[n] for r in records] if f.ragged else torch.stack([r[n] for r in records])
                    for n, f in schema.items()
                },
            )
            writer.commit()
        folder.finish()
    for claim in root.rglob(".claim-*"):
        claim.unlink()


if __name__ == "__main__":
    main()
