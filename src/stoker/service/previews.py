"""Samples as people look at them: figures of each field, thumbnails of images, plots of fields.

This runs in the process that reads the data (`probes.py`). What it returns is bounded: a picture has at most
`SIDE` pixels on a side, and a sample `MOST_PICTURES` of them.
"""

from __future__ import annotations

import base64
import io
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, StokerError
from stoker.schema import Json, Sample, Schema
from stoker.sources.protocol import Source
from stoker.units import MIB, format_bytes

SIDE = 96
"""Pixels of the longer side of a picture."""
MOST_PICTURES = 3
"""Pictures of one sample: steps of a field."""
READ_S = 8.0
"""How long samples are read for one answer; the others are listed without values."""
MOST_BYTES = 256 * MIB
"""Larger samples are read at `MOST_PICTURES` steps of their time axis, or not at all."""
_VIRIDIS = (
    "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"  # of matplotlib, at equal distances
)
_NOT_FINITE = 255
"""Color of values that are not finite: gray."""
Row = dict[str, Json]


def describe_samples(source: Source, limit: int, offset: int, *, pictures: bool) -> list[Row]:
    """Return samples with their values; one that cannot be read has `error` in their place.

    Args:
        source: Has the samples.
        limit: At most so many.
        offset: Of the first.
        pictures: Add `pictures`: `src` (a `data:` URL), `alt`, `caption`, `width` and `height` of each.

    Returns:
        `number`, `key`, `values`; with classes also `class`.
    """
    keys, until = source.keys(), time.monotonic() + READ_S
    found: list[Row] = []
    for number in range(offset, min(offset + limit, len(source))):
        row: Row = {"number": number, "key": keys[number]}
        try:
            if time.monotonic() > until:
                row["error"] = f"not read: the samples before it took {READ_S:g} s"
            else:
                row |= _described(source, number, keys[number], pictures=pictures)
        except StokerError as error:
            row["error"] = str(error)
        found.append(row)
    return found


def _described(source: Source, number: int, key: str, *, pictures: bool) -> Row:
    schema = source.schema()
    sample, steps = _read(source, schema, number)
    classes: Sequence[str] = getattr(source, "classes", ())
    row: Row = {"values": {name: _figures(value) for name, value in sample.items()}}
    if steps is not None:
        row["read"] = f"steps {', '.join(map(str, steps))} of {_steps(schema)}"
    if classes and "label" in sample:
        row["class"] = classes[int(sample["label"])]
    if pictures and classes:
        row["pictures"] = [_thumbnail(sample["image"], f"{key}, {row.get('class', 'image')}")]
    elif pictures:
        row["pictures"] = _plots(sample, schema, steps, getattr(source, "channels", {}), key)
    return row


def _steps(schema: Schema) -> int:
    return max((field.shape[0] for field in schema.values() if field.time), default=0)


def _read(source: Source, schema: Schema, number: int) -> tuple[Sample, list[int] | None]:
    """Return a sample; of a large one some steps, and which they are.

    No header says how large a ragged field is: `probes.MEMORY_BYTES` limits what its sample takes.
    """
    size = sum(field.size_bytes() for field in schema.values() if not field.ragged)
    if size <= MOST_BYTES:
        return source.read(number), None
    steps = _spread(_steps(schema))
    if len(steps) < 2 or size / _steps(schema) * len(steps) > MOST_BYTES:
        raise SourceError(f"it has {format_bytes(size)}, which is too much to show")
    pieces = [source.read(number, step, step + 1) for step in steps]
    timed = {name for name, field in schema.items() if field.time}
    return {
        name: np.concatenate([piece[name] for piece in pieces]) if name in timed else value
        for name, value in pieces[0].items()
    }, steps


def _spread(count: int) -> list[int]:
    """Return the first, the middle and the last of a number of steps.

    >>> _spread(101), _spread(2), _spread(1)
    ([0, 50, 100], [0, 1], [0])
    """
    return sorted({round(n * (count - 1) / (MOST_PICTURES - 1)) for n in range(MOST_PICTURES)})


def _figures(value: NDArray[Any]) -> Json:
    """Return a number or a few integers as they are, and of an array its shape, dtype and range."""
    if value.size == 1:
        one = value.reshape(()).item()
        return one if not isinstance(one, float) or np.isfinite(one) else str(one)
    if value.size <= 4 and value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
        return value.tolist()
    row: Row = {"shape": [*value.shape], "dtype": str(value.dtype)}
    numbers = value if np.issubdtype(value.dtype, np.number) else value.astype(np.uint8, casting="unsafe")
    finite = numbers[np.isfinite(numbers)]
    if finite.size < value.size:
        row["not_finite"] = value.size - int(finite.size)
    if finite.size:
        row |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean(dtype=float)),
        }
    return row


def _thumbnail(image: NDArray[Any], alt: str) -> Json:
    """Return an image `(C, H, W)`, uint8, as JPEG."""
    from PIL import Image

    pixels = np.moveaxis(image, 0, -1)
    shown = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    shown.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    shown.save(data, "JPEG", quality=85)
    return _picture("jpeg", data.getvalue(), shown.size, alt, "")


def _plots(
    sample: Mapping[str, NDArray[Any]],
    schema: Schema,
    steps: Sequence[int] | None,
    channels: Mapping[str, Sequence[str]],
    key: str,
) -> list[Json]:
    """Return plots of the largest field of a sample, of its first channel; none if all fields are numbers.

    All of them have one scale of colors, from the least value (dark) to the most.
    """
    arrays = {name: value for name, value in sample.items() if value.ndim > 1 and value.size > 1}
    if not arrays:
        return []
    name = max(arrays, key=lambda one: arrays[one].size)
    value, named = arrays[name][..., 0], channels.get(name, ())
    what = named[0] if len(named) > 1 else name
    finite = value[np.isfinite(value)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    scale = f"{low:.4g} to {high:.4g}"
    if not schema[name].time:
        return [_plot(_plane(value), low, high, f"{key}: {what} from {scale}", f"{what}, {scale}")]
    plane = [length for length in value.shape[1:] if length > 1]
    if len(plane) < 2 and steps is None:  # one axis in space: time goes down
        alt = f"{key}: {what} from {scale}; time goes down, {value.shape[0]} steps"
        caption = f"{what}, {scale}; time goes down"
        return [_plot(value.reshape(value.shape[0], -1), low, high, alt, caption)]
    chosen = [*enumerate(steps)] if steps is not None else [(step, step) for step in _spread(len(value))]
    return [
        _plot(_plane(value[at]), low, high, f"{key}: {what} at step {step}, {scale}", f"{what}, step {step}")
        for at, step in chosen
    ]


def _plane(value: NDArray[Any]) -> NDArray[Any]:
    """Return two axes of an array: of more than two the middle of the first ones."""
    value = value.squeeze()
    while value.ndim > 2:
        value = value[len(value) // 2]
    return np.atleast_2d(value)


def _plot(plane: NDArray[Any], low: float, high: float, alt: str, caption: str) -> Json:
    """Return values `(H, W)` between two limits as colors."""
    rows, columns = (np.linspace(0, n - 1, min(n, SIDE)).round().astype(int) for n in plane.shape)
    shown = plane[np.ix_(rows, columns)].astype(float)
    finite = np.isfinite(shown)
    scaled = np.where(finite, (shown - low) / ((high - low) or 1.0), 0.0).clip(0, 1)
    levels = np.where(finite, (scaled * (_NOT_FINITE - 1)).round(), _NOT_FINITE).astype(np.uint8)
    return _picture("png", encode_png(levels, viridis()), levels.shape[::-1], alt, caption)


def viridis() -> NDArray[np.uint8]:
    """Return 256 colors `(256, 3)`: from dark to light, and gray."""
    known = np.array([[*bytes.fromhex(one)] for one in _VIRIDIS.split()], float)
    at = np.linspace(0, len(known) - 1, _NOT_FINITE)
    colors = [np.interp(at, np.arange(len(known)), known[:, one]) for one in range(3)]
    return np.vstack([np.stack(colors, -1).round(), [[128, 128, 128]]]).astype(np.uint8)


def encode_png(levels: NDArray[np.uint8], palette: NDArray[np.uint8]) -> bytes:
    """Return colors of a palette `(256, 3)` by number `(H, W)` as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = levels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in levels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", palette.tobytes())
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )


def _picture(kind: str, data: bytes, size: Sequence[int], alt: str, caption: str) -> Json:
    src = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"src": src, "alt": alt, "caption": caption, "width": int(size[0]), "height": int(size[1])}
