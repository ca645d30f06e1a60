"""Make tests/data/store_v1, the small cache that every later version must read.

Run once per format, never again for format 1: `python -m tests.data.make_store_v1`. Values are integers and
their halves, so that this file says what they must be without any random generator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from stoker.schema import Field, Schema
from stoker.sources.protocol import Part, SourceIdentity
from stoker.store import Failure, make_recipe, open_folder

HERE = Path(__file__).parent
NAME = "golden"
SCHEMA: Schema = {
    "latent": Field(shape=(5, 3), dtype="float32", time=True),
    "half": Field(shape=(2,), dtype="float32"),
    "label": Field(shape=(), dtype="int64"),
}
RAGGED: Schema = {"tokens": Field(shape=(-1, 2), dtype="uint8", ragged=True)}
PARTS = (("first.h5", 4), ("second.h5", 3))
QUARANTINED = 5


class GoldenSource:
    """Seven samples in two parts; the last but one cannot be encoded."""

    def __init__(self, schema: Schema) -> None:
        self.fields = schema

    def __len__(self) -> int:
        return 7

    def schema(self) -> Schema:
        return self.fields

    def identity(self) -> SourceIdentity:
        parts = tuple(
            Part(name=name, count=n, digest=name.encode().hex(), values={"Nu": 0.5}) for name, n in PARTS
        )
        return SourceIdentity(kind="golden/1", parts=parts, settings={"layout": "n t c"})


def record(schema: Schema, number: int) -> dict[str, Tensor]:
    """What sample `number` holds."""
    if "tokens" in schema:
        return {"tokens": (torch.arange(2 * number) + number).to(torch.uint8).reshape(number, 2)}
    return {
        "latent": (torch.arange(15) + 100 * number).float().reshape(5, 3),
        "half": torch.tensor([number / 2, -number]),
        "label": torch.tensor(number * 10**12),
    }


def make(root: Path, name: str, schema: Schema) -> None:
    """Write one cache: a shard per part, rows out of order."""
    dtypes = {"latent": "float16", "half": "bfloat16"} if "latent" in schema else None
    recipe = make_recipe(GoldenSource(schema), None, dtype=dtypes)  # type: ignore[arg-type]
    folder = open_folder(root, name, recipe)
    for numbers in ([0, 1, 3, 2], [6, 4]):
        writer = folder.writer()
        records = [record(schema, number) for number in numbers]
        batch = {
            field: [r[field] for r in records]
            if schema[field].ragged
            else torch.stack([r[field] for r in records])
            for field in schema
        }
        writer.append(numbers, batch)
        writer.commit()
    folder.quarantine(
        Failure(number=QUARANTINED, stage="read", error="OSError: torn", attempts=2, kind="sample")
    )
    folder.finish()


def main() -> None:
    """Write both caches anew."""
    root = HERE / "store_v1"
    shutil.rmtree(root, ignore_errors=True)
    make(root, NAME, SCHEMA)
    make(root, f"{NAME}_ragged", RAGGED)
    for claim in root.rglob(".claim-*"):
        claim.unlink()


if __name__ == "__main__":
    main()
