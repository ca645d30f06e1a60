"""Question: which decoder makes 3 x 224 x 224 uint8 of JPEGs fastest, on one core, and how far are its pixels from Pillow's?

Contenders get the bytes of a file in memory. `scaled` decodes at half size where the format allows it (Pillow's `draft`),
then resizes to the size wanted; `full` decodes everything first. What is not installed is left out, by name. Processor
time over all files, medians of interleaved rounds, one thread. `differs` is the mean difference of a pixel from that of Pillow
by the same way, of 255.

    python benchmarks/decode_jpeg.py --folder IMAGES [--save] [--rounds 5] [--only WORD]
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from measure import medians, publish
from stoker.sources.image_decoding import decode, decoder
from stoker.sources.image_geometry import Rules

SIZE = 224
Pixels = NDArray[np.uint8]
Decoder = Callable[[bytes], Pixels]


def planes(pixels: Pixels) -> Pixels:
    """`(H, W, C)` as a fresh `(C, H, W)`."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def resized(pixels: Pixels) -> Pixels:
    """To the size wanted, with Pillow."""
    return planes(np.asarray(Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR)))


def pillow(data: bytes, *, scaled: bool) -> Pixels:
    image = Image.open(io.BytesIO(data))
    if scaled:
        image.draft("RGB", (SIZE, SIZE))
    return planes(np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)))


def stoker_decode(data: bytes, *, scaled: bool) -> Pixels:
    return decode(data, Rules(size=(SIZE, SIZE), reduced=scaled), where="a file")[0]


def of_simplejpeg() -> dict[str, Decoder]:
    import simplejpeg

    def run(data: bytes, **size: int) -> Pixels:
        return resized(simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, **size))

    return {
        "simplejpeg, full": run,
        "simplejpeg, scaled": partial(run, min_height=SIZE, min_width=SIZE, min_factor=1),
    }


def of_torchvision() -> dict[str, Decoder]:
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    def run(data: bytes) -> Pixels:
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        return resize(image, [SIZE, SIZE], antialias=True).numpy()

    return {"torchvision, full": run}


def of_opencv() -> dict[str, Decoder]:
    import cv2

    cv2.setNumThreads(1)

    def run(data: bytes, how: int) -> Pixels:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), how)
        return planes(
            cv2.cvtColor(cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB)
        )

    return {
        "OpenCV, full": partial(run, how=cv2.IMREAD_COLOR),
        "OpenCV, scaled": partial(run, how=cv2.IMREAD_REDUCED_COLOR_2),
    }


def of_imagecodecs() -> dict[str, Decoder]:
    from imagecodecs import jpeg8_decode

    return {"imagecodecs, full": lambda data: resized(jpeg8_decode(data))}


def of_spdl() -> dict[str, Decoder]:
    import spdl.io

    filters = spdl.io.get_video_filter_desc(scale_width=SIZE, scale_height=SIZE, pix_fmt="rgb24")

    def run(data: bytes) -> Pixels:
        frames = spdl.io.decode_packets(spdl.io.demux_image(data), filter_desc=filters)
        return planes(spdl.io.to_numpy(spdl.io.convert_frames(frames)))

    return {"spdl_io, full": run}


def contenders(data: bytes) -> dict[str, Decoder]:
    """All that are installed, and can decode one file."""
    found: dict[str, Decoder] = {}
    for scaled in (True, False):
        name = "scaled" if scaled else "full"
        found[f"Stoker, {name}"] = partial(stoker_decode, scaled=scaled)
        found[f"Pillow, {name}"] = partial(pillow, scaled=scaled)
    for make in (of_simplejpeg, of_torchvision, of_opencv, of_imagecodecs, of_spdl):
        try:
            made = make()
            for run in made.values():
                run(data)
            found.update(made)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"left out: {make.__name__[3:]}: {str(error)[:200]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = [path.read_bytes() for path in sorted(arguments.folder.rglob("*.jpg"))]
    decoders = {name: run for name, run in contenders(files[0]).items() if arguments.only in name}

    def all_with(run: Decoder) -> float:
        begin = time.process_time()
        for data in files:
            run(data)
        return time.process_time() - begin

    def distance_from_pillow(name: str) -> float:
        twin = partial(pillow, scaled=name.endswith("scaled"))
        far = [np.abs(decoders[name](data).astype(np.int16) - twin(data)).mean() for data in files[:20]]
        return round(float(np.mean(far)), 3)

    taken = medians({name: partial(all_with, run) for name, run in decoders.items()}, rounds=arguments.rounds)
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "pillow": decoder(),
            "images": f"{arguments.folder.name}, {len(files)} files",
            "images_per_s": round(len(files) / seconds),
            "differs": distance_from_pillow(name),
        }
        for name, seconds in taken.items()
    ]
    publish("decode_jpeg", rows, save=arguments.save)


if __name__ == "__main__":
    main()
