from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from stoker.errors import DecodeError
from stoker.sources.image_decoding import decode, decode_map
from stoker.sources.image_geometry import Rules, fit_image
from tests.sources.images.pictures import encoded, square

RULES = Rules(size=(24, 32))
GREY = Rules(size=(8, 8), color="L", filter="nearest")
COLOR = Rules(size=(8, 8), filter="nearest")


def pixels_of(data: bytes, rules: Rules = RULES) -> np.ndarray:
    return decode(data, rules, where="a.jpg")[0]


def flat(mode: str, value: object) -> Image.Image:
    return Image.new(mode, (8, 8), value)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(flat("L", 77), (77, 77, 77), id="grey"),
        pytest.param(flat("1", 1), (255, 255, 255), id="bitmap"),
        pytest.param(flat("RGBA", (200, 100, 50, 255)), (200, 100, 50), id="opaque"),
        pytest.param(flat("RGBA", (200, 100, 50, 0)), (0, 0, 0), id="transparent"),
        pytest.param(flat("LA", (200, 51)), (40, 40, 40), id="grey over black"),
        pytest.param(Image.fromarray(np.full((8, 8), 0x4DFF, np.uint16)), (0x4D,) * 3, id="16 bits"),
        pytest.param(flat("RGB", (1, 2, 3)).quantize(4), (1, 2, 3), id="palette"),
    ],
)
def test_every_kind_becomes_rgb_by_its_rule(image: Image.Image, expected: tuple[int, ...]) -> None:
    assert pixels_of(encoded(image), COLOR)[:, 4, 4].tolist() == list(expected)


def test_cmyk_is_converted_not_read_as_four_channels() -> None:
    data = encoded(flat("CMYK", (0, 255, 255, 0)), "JPEG", quality=100)

    assert np.abs(pixels_of(data, COLOR)[:, 4, 4].astype(int) - [255, 0, 0]).max() < 6


def test_grey_has_one_channel() -> None:
    assert pixels_of(encoded(flat("RGB", (255, 0, 0))), GREY).shape == (1, 8, 8)


def test_floats_are_refused_with_a_reason() -> None:
    with pytest.raises(DecodeError, match="holds floats"):
        pixels_of(encoded(flat("F", 0.5), "TIFF"))


def test_height_comes_before_width() -> None:
    assert pixels_of(encoded(square((48, 64), (0, 0, 64, 24)))).shape == (3, 24, 32)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_viewers_turn_it(orientation: int) -> None:
    from PIL import ImageOps

    random = np.random.default_rng(1).integers(0, 256, (6, 10, 3), np.uint8)
    stored = Image.fromarray(np.kron(random, np.ones((8, 8, 1), np.uint8)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, "PNG", exif=exif)

    pixels, fit = decode(data, Rules(size=(24, 40), filter="box"), where="a.png")

    import io

    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wanted = np.asarray(shown.resize((40, 24), Image.Resampling.BOX)).transpose(2, 0, 1)
    assert fit.before == (shown.height, shown.width)
    assert np.array_equal(pixels, wanted)


def test_orientation_can_be_left_alone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(square((48, 64), (0, 0, 8, 8)), "JPEG", exif=exif)

    assert decode(data, RULES, where="")[1].before == (64, 48)
    assert decode(data, Rules(size=(24, 32), turned=False), where="")[1].before == (48, 64)


def test_reduced_decoding_gives_the_same_picture_at_the_same_place() -> None:
    """Odd sizes: 1/2 of 321 x 243 ends in half a pixel, which must not shift what lies beside it."""
    from PIL import ImageFilter

    image = square((243, 321), (60, 30, 200, 150)).filter(ImageFilter.GaussianBlur(6))
    data = encoded(image, "JPEG", quality=95, subsampling=0)
    rules = Rules(size=(81, 107))

    fast = pixels_of(data, rules).astype(int)
    full = pixels_of(data, Rules(size=(81, 107), reduced=False)).astype(int)

    assert not np.array_equal(fast, full)
    assert np.abs(fast - full).max() <= 4


def test_a_letterbox_is_black_beside_the_image() -> None:
    pixels, fit = decode(encoded(flat("RGB", (9, 9, 9))), Rules(size=(8, 16), fit="letterbox"), where="")

    assert fit.corner == (0, 4)
    assert (pixels[0, 0] == [0] * 4 + [9] * 8 + [0] * 4).all()


def png(size: tuple[int, int], depth: int, color: int, **chunks: bytes) -> bytes:
    """A PNG of one's own making, `size` as width and height."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    parts = {"IHDR": struct.pack(">IIBBBBB", *size, depth, color, 0, 0, 0), **chunks, "IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind.encode(), body) for kind, body in parts.items())


@pytest.mark.parametrize(
    ("depth", "color", "row", "transparent", "expected"),
    [
        pytest.param(16, 0, (0x4DFF, 0x4D00, 0xFFFF), (0x4DFF,), (0, 0x4D, 0xFF), id="grey of 16 bits"),
        pytest.param(8, 0, (10, 11, 255), (10,), (0, 11, 255), id="grey of 8 bits"),
        pytest.param(4, 0, (0x24, 0xF0), (2,), (0, 68, 255), id="grey of 4 bits"),
        pytest.param(2, 0, (0b10_01_11_00,), (2,), (0, 85, 255), id="grey of 2 bits"),
        pytest.param(8, 2, (10, 0, 0, 11, 0, 0, 255, 0, 0), (10, 0, 0), (0, 11, 255), id="8 bits"),
        pytest.param(
            16, 2, (0x10FE, 0, 0, 0x11FE, 0, 0, 0xFFFF, 0, 0), (0x10FE, 0, 0), (0, 0x11, 255), id="16 bits"
        ),
    ],
)
def test_the_transparent_color_of_a_png_is_laid_over_black(
    depth: int, color: int, row: tuple[int, ...], transparent: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    line = b"\0" + struct.pack(f">{len(row)}{'H' if depth == 16 else 'B'}", *row)
    own = struct.pack(f">{len(transparent)}H", *transparent)
    data = png((3, 2), depth, color, tRNS=own, IDAT=zlib.compress(2 * line))

    assert tuple(pixels_of(data, Rules(size=(2, 3), filter="nearest"))[0, 0].tolist()) == expected


def bomb() -> bytes:
    """A PNG that says it is 60,000 pixels wide and high."""
    return png((60_000, 60_000), 8, 2, IDAT=b"")


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))
JPEG, PNG = encoded(NOISE, "JPEG", quality=95), encoded(NOISE)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"<html>not found</html>", "is not an image", id="not an image"),
        pytest.param(JPEG[: len(JPEG) // 2], "cannot be decoded.*truncated", id="truncated"),
        pytest.param(JPEG[:-2000], "cannot be decoded.*truncated", id="end missing"),
        pytest.param(JPEG[:100], "is damaged", id="header alone"),
        pytest.param(PNG[:-2000], "truncated", id="truncated png"),
        pytest.param(bomb(), "is too large", id="bomb"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n", "is not an image", id="a program"),
    ],
)
def test_what_cannot_be_decoded_is_an_error_that_names_the_file(data: bytes, says: str) -> None:
    with pytest.raises(DecodeError, match=rf"(?s)/data/a\.jpg.*{says}|/data/a\.jpg {says}"):
        decode(data, RULES, where="/data/a.jpg")


def test_the_content_counts_not_the_suffix() -> None:
    assert pixels_of(encoded(flat("RGB", (1, 2, 3))), COLOR)[:, 0, 0].tolist() == [1, 2, 3]


def test_maps_keep_their_numbers() -> None:
    depth = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20
    fit = fit_image((48, 64), (24, 32), "stretch")

    found = decode_map(encoded(Image.fromarray(depth)), fit, where="d.png")

    assert found.dtype == np.int32
    assert np.array_equal(found, depth[1::2, 1::2])


def test_a_map_of_another_size_is_refused() -> None:
    with pytest.raises(DecodeError, match="8 x 8, its color image 48 x 64"):
        decode_map(encoded(flat("L", 1)), fit_image((48, 64), (24, 32), "stretch"), where="d.png")
