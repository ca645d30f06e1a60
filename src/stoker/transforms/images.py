"""Turn stored images into images of one size: decode encoded ones, crop those of one short side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, to_device
from stoker.loader.order import uniform
from stoker.runtime.threads import Pool
from stoker.sources.images.geometry import Rules

TIMEOUT_S = 120.0
"""For all images of one batch."""


class Decode:
    """Images that `ImageSource(store="encoded")` stored as files, decoded to `(B, C, H, W)` uint8 by threads.

    With the settings of the source (`size`, `fit`, `colour`, `filter`, `reduced`, `turned`) the images are
    those that it would have stored as pixels, and its labels fit them.

    Args:
        size: (height, width).
        field: The field with the encoded images.
        threads: How many decode; None: one for each processor of this process.
        **rules: See `stoker.sources.images.geometry.Rules`.

    Raises:
        ConfigError: `fit="short"`, which gives images of various sizes.
    """

    def __init__(
        self, size: tuple[int, int], *, field: str = "image", threads: int | None = None, **rules: Any
    ) -> None:
        self._rules = Rules(size=size, **rules)
        if self._rules.fit == "short":
            raise ConfigError("Decode(fit='short') gives images of various sizes. Give stretch or letterbox")
        self._field = field
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool: Pool | None = None

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with its images decoded, on the device that it is on.

        Raises:
            DecodeError: Bytes that are no image; what precompute stored has been decoded once.
        """
        encoded = _on_host(_listed(batch, self._field, 1))
        if self._pool is None:
            self._pool = Pool(self._threads, "stoker-decode")
        tickets = [
            self._pool.submit(lambda own=encoded[part :: self._threads]: [self._one(x) for x in own])
            for part in range(min(self._threads, len(encoded)))
        ]
        images = torch.empty(
            (len(encoded), self._rules.channels, *self._rules.size), dtype=torch.uint8, device="cpu"
        )
        for part, ticket in enumerate(tickets):
            for place, pixels in enumerate(ticket.result(TIMEOUT_S, "decoding the images of a batch")):
                images[part + place * self._threads] = torch.from_numpy(pixels)
        made = RecordBatch(batch)
        made[self._field] = images.to(keys.device)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Settings travel; threads stay."""
        return {**self.__dict__, "_pool": None}

    def _one(self, encoded: Tensor) -> np.ndarray:  # pyright: ignore[reportMissingTypeArgument]
        from stoker.sources.images.decode import decode

        return decode(encoded.numpy().tobytes(), self._rules, where="a stored image")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CropImages:
    """Images that `ImageSource(size=256, fit="short")` stored, cropped to `(B, C, H, W)` uint8.

    Boxes, keypoints, joints and cameras move along; boxes are cut at the crop, and those outside it
    are no longer valid.
    """

    size: tuple[int, int] = field(kw_only=False)
    """(height, width), no more than the short side."""
    random: bool = True
    """Each example at a place of its own, any as likely as another; else in the middle."""

    def __call__(self, batch: Any, keys: Tensor) -> RecordBatch:
        """Return the batch with its images cropped."""
        images = _listed(batch, "image", 2)
        shapes = batch["image_shape"].to(torch.int64)
        room = shapes - to_device(torch.tensor(self.size), shapes.device)
        place = (
            uniform(keys, 2).to(torch.float64)
            if self.random
            else torch.full(room.shape, 0.5, dtype=torch.float64, device=room.device)
        )
        corners = (place.to(room.device) * (room + 1)).floor().to(torch.int64).minimum(room)
        (height, width), crops = self.size, list[Tensor]()
        numbers: list[list[int]] = torch.cat([shapes, corners], 1).tolist()  # waits for the device, once
        for image, (high, wide, top, left) in zip(images, numbers, strict=True):
            if high < height or wide < width:
                raise ConfigError(
                    f"CropImages({self.size}) is larger than an image of {high} x {wide}. Crop less, or "
                    "store a longer short side"
                )
            whole = image.view(high, wide, image.shape[1])
            crops.append(whole[top : top + height, left : left + width].permute(2, 0, 1))
        made = RecordBatch(batch)
        made["image"] = torch.stack(crops)
        made["image_shape"] = shapes - room
        self._move_labels(made, corners)
        return made

    def _move_labels(self, batch: RecordBatch, corners: Tensor) -> None:
        """Boxes, points and cameras of the crops, in place of those of the whole images."""
        height, width = self.size
        shift = corners.flip(1).to(torch.float32)  # x, y
        if "boxes" in batch:
            limit = to_device(torch.tensor((width, height, width, height)), shift.device)
            shifted = _shifted(batch["boxes"], shift.repeat(1, 2))
            moved = _like(shifted, [boxes.clamp(min=0).minimum(limit) for boxes in _rows(shifted)])
            keep = [(b[..., 2] > b[..., 0]) & (b[..., 3] > b[..., 1]) for b in _rows(moved)]
            batch["boxes"] = moved
            batch["boxes_valid"] = _like(
                moved, [v & k for v, k in zip(_rows(batch["boxes_valid"]), keep, strict=True)]
            )
        for name in ("keypoints", "hand_joints_2d"):
            if name in batch:
                batch[name] = _shifted(batch[name], shift)
        if "camera_intrinsics" in batch:
            cameras = batch["camera_intrinsics"].clone()
            cameras[:, :2, 2] -= shift
            batch["camera_intrinsics"] = cameras


def _on_host(images: list[Tensor]) -> Sequence[Tensor]:
    """Return the same in host memory, in one copy, made where the caller's stream is the current one."""
    if images[0].device.type == "cpu":
        return images
    whole: Any = torch.cat(images).cpu()
    return whole.split([len(image) for image in images])


def _listed(batch: Any, name: str, axes: int) -> list[Tensor]:
    """Return the images of a batch, one tensor each.

    Raises:
        ConfigError: They are not as `ImageSource` stored them.
    """
    fields = cast("dict[str, Any]", batch) if isinstance(batch, dict) else {}
    if _are_images(fields.get(name), axes):
        return cast("list[Tensor]", fields[name])
    others = [other for other, values in fields.items() if _are_images(values, axes)]
    fact = (
        f"field {name!r} holds {_described(fields[name])}, not stored images"
        if name in fields
        else f"a batch has no field {name!r}; it has {', '.join(fields) or 'none'}"
    )
    if axes == 1 and others:
        hint = f"Give the field: Decode(size, field={others[0]!r})"
    elif f"{name}.offsets" in fields:
        hint = "Leave ragged='pack' out of the Loader, so that each image is a tensor of its own"
    elif axes == 1 and isinstance(fields.get(name), Tensor) and fields[name].dim() == 4:
        hint = "They are pixels already: leave Decode out"
    elif axes == 1:
        hint = (
            "Decode takes the bytes of image files: cache them with ImageSource(..., store='encoded'), or a "
            "TarSource with jpg or png members and Decode(size, field='jpg')"
        )
    else:
        hint = "CropImages takes the images of a cache of ImageSource(..., fit='short')"
    raise ConfigError(f"{fact}. {hint}")


def _are_images(values: Any, axes: int) -> bool:
    found = cast("list[Any]", values) if isinstance(values, list) else []
    return bool(found) and all(
        isinstance(value, Tensor) and value.dim() == axes and value.dtype == torch.uint8 for value in found
    )


def _described(values: Any) -> str:
    """Return dtype and shape of a field of a batch."""
    if isinstance(values, list):
        found = cast("list[Any]", values)
        return f"a list of {_described(found[0])}" if found else "nothing"
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
    return type(values).__name__


def _rows(values: Any) -> Sequence[Tensor]:
    return cast("Sequence[Tensor]", values if isinstance(values, list) else list(values))


def _like(values: Any, rows: list[Tensor]) -> Any:
    return rows if isinstance(values, list) else torch.stack(rows)


def _shifted(values: Any, by: Tensor) -> Any:
    """Return every example less its row of `by`, padded or ragged."""
    return _like(values, [row - own for row, own in zip(_rows(values), by, strict=True)])
