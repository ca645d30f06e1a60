"""The rules by which every image of a source is brought to one size and colour."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from stoker.schema import Json
from stoker.sources.images.geometry import FitRule

Filter: TypeAlias = Literal["nearest", "box", "bilinear", "bicubic", "lanczos"]
Colour: TypeAlias = Literal["RGB", "L"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is done to every image."""

    size: tuple[int, int]
    """(height, width) wanted."""
    fit: FitRule = "stretch"
    colour: Colour = "RGB"
    filter: Filter = "bilinear"
    """Pillow's filter, which looks at all pixels that fall together when an image shrinks."""
    reduced: bool = True
    """Decode JPEG at 1/2, 1/4 or 1/8 where that is no smaller than the size wanted."""
    turned: bool = True
    """Turn images as their EXIF orientation says, like any viewer."""

    @property
    def channels(self) -> int:
        """3, or 1 for grey."""
        return 3 if self.colour == "RGB" else 1

    def to_json(self) -> dict[str, Json]:
        """The rules as they go into a recipe."""
        return {**asdict(self), "size": list(self.size)}
