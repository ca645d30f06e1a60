"""A source whose records are a function of part and number, and ways to fill a cache with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.schema import Field, Json, Schema
from stoker.sources.protocol import Part, SourceIdentity
from stoker.store import Cache, Folder, Recipe, WriterSettings, make_recipe, open_folder
from stoker.store.values import torch_dtype

SCHEMA: Schema = {
    "latent": Field(shape=(9, 4, 8), dtype="float32", time=True),
    "nu": Field(shape=(), dtype="float32"),
}
RAGGED: Schema = {
    "tokens": Field(shape=(-1, 5), dtype="float32", ragged=True),
    "label": Field(shape=(), dtype="int64"),
}


class FakeSource:
    """Parts by name and count; `salt` stands for the content of a part."""

    def __init__(
        self,
        schema: Schema = SCHEMA,
        parts: Sequence[tuple[str, int]] = (("a", 10), ("b", 6)),
        *,
        salt: Mapping[str, str] | None = None,
        settings: Mapping[str, Json] | None = None,
    ) -> None:
        self.fields, self.parts = schema, [*parts]
        self.salt, self.settings = dict(salt or {}), dict(settings or {})

    def __len__(self) -> int:
        return sum(count for _, count in self.parts)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        return {name: value.numpy()[start:stop] for name, value in self.record(number).items()}

    def runs(self) -> list[range]:
        return [range(len(self))]

    def keys(self) -> list[str]:
        return [str(number) for number in range(len(self))]

    def schema(self) -> Schema:
        return self.fields

    def identity(self) -> SourceIdentity:
        parts = tuple(
            Part(
                name=name,
                count=count,
                digest=hashlib.sha256((name + self.salt.get(name, "")).encode()).hexdigest(),
            )
            for name, count in self.parts
        )
        return SourceIdentity(kind="fake/1", parts=parts, settings=self.settings)

    def record(self, number: int) -> dict[str, Tensor]:
        """The record of a global number, the same wherever its part stands among others."""
        for name, count in self.parts:
            if number < count:
                return make_record(self.fields, name, number)
            number -= count
        raise IndexError(number)


def make_record(schema: Schema, part: str, local: int) -> dict[str, Tensor]:
    """Pseudo-random values, a function of part, number and field."""
    record: dict[str, Tensor] = {}
    for name, field in schema.items():
        seed = int.from_bytes(hashlib.sha256(f"{part} {local} {name}".encode()).digest()[:8], "little")
        generator = np.random.default_rng(seed)
        shape = (int(generator.integers(0, 7)), *field.shape[1:]) if field.ragged else field.shape
        if field.dtype.startswith(("float", "bfloat")):
            values = torch.from_numpy(np.asarray(generator.standard_normal(shape)))
        else:
            values = torch.from_numpy(
                np.asarray(generator.integers(0, 2 if field.dtype == "bool" else 100, shape))
            )
        record[name] = values.to(torch_dtype(field.dtype))
    return record


def batch_of(source: FakeSource, numbers: Sequence[int]) -> dict[str, Tensor | list[Tensor]]:
    """Records as an encoder would hand them over."""
    records = [source.record(number) for number in numbers]
    return {
        name: [r[name] for r in records] if field.ragged else torch.stack([r[name] for r in records])
        for name, field in source.fields.items()
    }


def fill(
    folder: Folder,
    source: FakeSource,
    numbers: Iterable[int] | None = None,
    *,
    group: int = 4,
    **settings: Any,
) -> None:
    """Append records part by part in groups, and seal them."""
    writer = folder.writer(WriterSettings(**settings))
    by_part: dict[int, list[int]] = {}
    for number in range(len(source)) if numbers is None else numbers:
        by_part.setdefault(folder.recipe.part_of(number)[0], []).append(number)
    for members in by_part.values():
        for begin in range(0, len(members), group):
            chunk = members[begin : begin + group]
            writer.append(chunk, batch_of(source, chunk))
    writer.commit()


def make_cache(root: Path, source: FakeSource | None = None, *, dtype: Any = None, **settings: Any) -> Cache:
    """A whole cache called `x`."""
    source = source or FakeSource()
    folder = open_folder(root, "x", make_recipe(source, None, dtype=dtype))
    fill(folder, source, **settings)
    return folder.finish()


def expected(source: FakeSource, recipe: Recipe, number: int) -> dict[str, Tensor]:
    """A record as it should come back."""
    return {
        name: rounded(value, recipe.schema[name].dtype)
        if recipe.schema[name].quantized
        else value.to(torch_dtype(recipe.schema[name].dtype))
        for name, value in source.record(number).items()
    }


def rounded(values: Tensor, dtype: str) -> Tensor:
    """What packing leaves of values of ordinary size, block by block, as plainly as can be written."""
    out = np.zeros(values.shape, np.float32)
    width = max(1, values.shape[-1])
    lines, results = values.float().numpy().reshape(-1, width), out.reshape(-1, width)
    for line, result in zip(lines, results, strict=True):
        for begin in range(0, width, 128):
            block = line[begin : begin + 128]
            step = np.float32(np.abs(block).max() / (127 if dtype == "int8" else 448))
            if not step:
                continue
            if dtype == "int8":
                ratio = np.rint(block / step) + 0.0  # int8 has no negative zero
            else:
                ratio = torch.from_numpy(block / step).to(torch.float8_e4m3fn).float().numpy()
            result[begin : begin + 128] = ratio.astype(np.float32) * step
    return torch.from_numpy(out)


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two records are equal in fields, dtypes, shapes and every bit."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and bits(a[n]) == bits(b[n]) for n in a
    )


def bits(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return b"" if not values.numel() else values.reshape(-1).clone().view(torch.uint8).numpy().tobytes()


def assert_whole(cache: Cache, source: FakeSource, numbers: Iterable[int] | None = None) -> None:
    """Every record (or those of `numbers`) comes back as it should."""
    numbers = [*range(len(source))] if numbers is None else [*numbers]
    assert cache.indices.tolist() == sorted(numbers)
    for number in numbers:
        assert same_bits(cache[number], expected(source, cache.recipe, number)), number
