"""Bytes of an image file to pixels, by declared rules; the only module here that imports Pillow.

The content says what a file is, not its name. Every picture becomes 8 bits, RGB or gray. Palettes are looked
up, alpha is laid over black, and 16 bits keep their upper 8. CMYK is converted without color profiles, and of
several frames the first is taken. What Pillow cannot decode to the last byte is an error, never a gray area.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features
from PIL import __version__ as pillow_version

from stoker.errors import DecodeError
from stoker.sources.image_geometry import Color, Fit, Rules, fit_image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""Formats that are opened; others (some of which run programs) are taken as not an image."""
MAX_PIXELS = 89_478_485
"""Pillow's own limit, above which a small file may be meant to fill the memory."""
_ORIENTATION = 0x0112
_PNG_DEPTH = 24
"""Offset in a PNG of the bits of a sample."""
_TURNS: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


def decoder() -> str:
    """Name and version of what decodes; another version may give other bits for the same file.

    >>> decoder().startswith("pillow ")
    True
    """
    turbo = features.version("libjpeg_turbo")
    jpeg = f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"
    return f"pillow {pillow_version}, {jpeg}, webp {features.version('webp')}"


def decode(data: bytes, rules: Rules, *, where: str) -> tuple[NDArray[np.uint8], Fit]:
    """Pixels `(C, H, W)` of one image, and how they were made from the original.

    Raises:
        DecodeError: Not an image, truncated, too large, or of a kind without a rule.
    """
    image, turn = _opened(data, rules, where)
    sideways = turn in _SIDEWAYS
    width, height = image.size
    fit = fit_image((width, height) if sideways else (height, width), rules.size, rules.fit)
    inner = fit.inner[::-1] if sideways else fit.inner
    try:
        box = None
        if rules.reduced:
            drafted = image.draft(None, (inner[1], inner[0]))
            box = None if drafted is None else drafted[1]
        image = _plain(image, data, rules.color, where)
        image = image.resize((inner[1], inner[0]), Image.Resampling[rules.filter.upper()], box=box)
    except (MemoryError, DecodeError):
        raise
    except Exception as error:
        raise DecodeError(
            f"{where} cannot be decoded: {error}", hint="Copy or download it again, or leave it out"
        ) from error
    if turn in _TURNS:
        image = image.transpose(_TURNS[turn])
    return _on_canvas(image, fit), fit


def decode_map(data: bytes, fit: Fit, *, where: str) -> NDArray[np.int32]:
    """Return whole numbers `(H, W)` of a gray image (depths, classes), each taken from the nearest pixel.

    Raises:
        DecodeError: Not an image, truncated, of several channels or of another size than its color image.
    """
    image, _ = _opened(data, None, where)
    if (image.height, image.width) != fit.before:
        raise DecodeError(
            f"{where} is {image.height} x {image.width}, its color image {fit.before[0]} x {fit.before[1]}",
            hint="Both must be of one size",
        )
    try:
        values = np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{where} cannot be decoded: {error}", hint="Copy or download it again") from error
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise DecodeError(
            f"{where} holds {values.dtype} {values.shape}", hint="Expected whole numbers (H, W)"
        )
    return nearest_map(values, fit)


def nearest_map(values: NDArray[Any], fit: Fit) -> NDArray[np.int32]:
    """Return a map `(h, w)` on the stored image, each value from the pixel under its center, else 0."""
    rows = ((np.arange(fit.inner[0]) + 0.5) / fit.scale[0]).astype(np.int64)
    columns = ((np.arange(fit.inner[1]) + 0.5) / fit.scale[1]).astype(np.int64)
    placed = np.zeros(fit.canvas, np.int32)
    placed[_inside(fit)] = values[np.ix_(rows, columns)]
    return placed


def _opened(data: bytes, rules: Rules | None, where: str) -> tuple[Image.Image, int]:
    """Return the image, not decoded yet, and its EXIF orientation where that counts."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:  # before EXIF is asked for, which decodes a PNG
            raise _too_large(where, f"{image.width} x {image.height} pixels")
        turn = image.getexif().get(_ORIENTATION, 1) if rules is not None and rules.turned else 1
    except (MemoryError, DecodeError):
        raise
    except UnidentifiedImageError as error:
        raise DecodeError(
            f"{where} is not an image that can be read ({len(data):,} bytes, begins with {data[:8]!r})",
            hint=f"Expected one of {', '.join(FORMATS)}. Copy or download it again, or leave it out",
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(where, str(error)) from error
    except Exception as error:
        raise DecodeError(f"{where} is damaged: {error}", hint="Copy or download it again") from error
    return image, turn if isinstance(turn, int) else 1


def _too_large(where: str, what: str) -> DecodeError:
    hint = f"Up to {MAX_PIXELS:,} pixels are decoded; make it smaller first"
    return DecodeError(f"{where} is too large: {what}", hint=hint)


def _plain(image: Image.Image, data: bytes, color: Color, where: str) -> Image.Image:
    """Return the image decoded, as 8 bits in `color`."""
    transparent = image.info.get("transparency")
    if image.format == "PNG" and transparent is not None and image.mode in ("L", "RGB"):
        image.info["transparency"] = _in_8_bits(transparent, data[_PNG_DEPTH])
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        # What is transparent is laid over black, and `fromarray` would forget about it.
        seen = values if transparent is None else np.where(values == transparent, 0, values)
        image = Image.fromarray((seen >> 8).astype(np.uint8))
    elif image.mode == "I":
        values = np.asarray(image)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:
            raise DecodeError(
                f"{where} holds numbers {low:,}..{high:,}", hint="Expected 8 or 16 bits a pixel"
            )
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise DecodeError(f"{where} holds floats", hint="Expected 8 or 16 bits a pixel: convert it first")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.new("RGBA", over.size, (0, 0, 0, 255))
        image.alpha_composite(over)
    image.load()
    return image if image.mode == color else image.convert(color)  # which would copy what is right already


def _in_8_bits(color: int | tuple[int, ...], depth: int) -> int | tuple[int, ...]:
    """Return the transparent color of a PNG in the 8 bits of Pillow's pixels.

    The file gives it in `depth` bits; Pillow widens or cuts pixels to 8, but leaves this color as it is.
    Source: the tRNS chunk in the PNG specification, and Pillow's modes `L;2`, `L;4` and `RGB;16B`.

    >>> _in_8_bits(2, 4), _in_8_bits((0x1234, 0, 0xFFFF), 16)
    (34, (18, 0, 255))
    """
    if isinstance(color, tuple):
        return tuple(value >> 8 for value in color) if depth == 16 else color
    return color * 255 // (2**depth - 1)


def _on_canvas(image: Image.Image, fit: Fit) -> NDArray[np.uint8]:
    """Pixels `(C, H, W)` of an image in RGB or gray, black around it."""
    bands = image.getbands()
    canvas = np.zeros((len(bands), *fit.canvas), np.uint8)
    for channel, band in zip(canvas, bands, strict=True):
        # Band by band, as Pillow packs each into a row of its own: quicker than to turn (H, W, C) about.
        channel[_inside(fit)] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(fit.inner)
    return canvas


def _inside(fit: Fit) -> tuple[slice, slice]:
    """Return the place of the image on its canvas."""
    top, left = fit.corner
    return slice(top, top + fit.inner[0]), slice(left, left + fit.inner[1])
