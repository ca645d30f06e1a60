"""Make tests/data/store_v2, small caches with packed fields that every later version must read.

Run once per format, never again for format 2: `python -m tests.data.make_store_v2`. The largest value of each
block is a power of two times that of the dtype, and all are whole steps, so packing loses nothing and this
file says what must come back.
"""

from __future__ import annotations

import shutil

import torch
from torch import Tensor

from stoker.schema import Field, Schema
from stoker.store import Failure, make_recipe, open_folder
from tests.data.make_store_v1 import HERE, QUARANTINED, GoldenSource

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
SCHEMA: Schema = {
    "latent": Field(shape=(3, 130), dtype="float32", time=True),
    "label": Field(shape=(), dtype="int64"),
}
RAGGED: Schema = {"tokens": Field(shape=(-1, 8), dtype="float32", ragged=True)}
CASES = [
    ("golden", SCHEMA, "int8"),
    ("golden_float8", SCHEMA, "float8_e4m3fn"),
    ("golden_ragged", RAGGED, "int8"),
]


def record(schema: Schema, number: int, dtype: str) -> dict[str, Tensor]:
    """What sample `number` holds: powers of two, with the largest number of the dtype in each block."""
    shape = (number, 8) if "tokens" in schema else (3, 130)
    values = 2.0 ** (torch.arange(shape[0] * shape[1]) % 6).reshape(shape)
    values[:, 1::2] *= -1
    values[:, 0] = values[:, -1] = LARGEST[dtype]
    values *= 2.0 ** (number - 3)
    if "tokens" in schema:
        return {"tokens": values}
    return {"latent": values, "label": torch.tensor(number * 10**12)}


def main() -> None:
    """Write all of them anew: a shard per part, rows out of order."""
    root = HERE / "store_v2"
    shutil.rmtree(root, ignore_errors=True)
    for name, schema, dtype in CASES:
        recipe = make_recipe(GoldenSource(schema), None, dtype=dtype)  # type: ignore[arg-type]
        folder = open_folder(root, name, recipe)
        for numbers in ([0, 1, 3, 2], [6, 4]):
            records = [record(schema, number, dtype) for number in numbers]
            writer = folder.writer()
            writer.append(
                numbers,
                {
                    n: [r[n] for r in records] if f.ragged else torch.stack([r[n] for r in records])
                    for n, f in schema.items()
                },
            )
            writer.commit()
        folder.quarantine(
            Failure(number=QUARANTINED, stage="read", error="OSError: torn", attempts=2, kind="sample")
        )
        folder.finish()
    for claim in root.rglob(".claim-*"):
        claim.unlink()


if __name__ == "__main__":
    main()
