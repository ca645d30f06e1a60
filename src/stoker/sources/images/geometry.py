"""Where a resize takes boxes, points and cameras.

Pixels are squares: pixel `i` reaches from `i` to `i + 1` as an edge, and its centre has the coordinate `i`
as a point. So edges (boxes) are scaled, and points (joints, principal points) are scaled about the corner of
the image, which for them lies at -0.5: a joint stays on the pixel that it was on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

FitRule: TypeAlias = Literal["stretch", "letterbox", "short"]
"""`stretch`: both axes are scaled to the size wanted. `letterbox`: both alike, what is left of the size
is black, half on either side. `short`: both alike, so that the shorter axis has the size wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How an image of one size becomes one of another."""

    before: tuple[int, int]
    """(height, width) as shown, in pixels."""
    inner: tuple[int, int]
    """(height, width) after scaling."""
    canvas: tuple[int, int]
    """(height, width) of what is stored; `inner` lies inside it."""
    corner: tuple[int, int]
    """(top, left) of `inner` on the canvas."""

    @property
    def scale(self) -> tuple[float, float]:
        """Stored pixels per original one, (y, x)."""
        return self.inner[0] / self.before[0], self.inner[1] / self.before[1]

    def boxes(self, boxes: NDArray[Any]) -> NDArray[np.float32]:
        """Boxes `(n, 4)` of edges x0, y0, x1, y1, moved to the stored image."""
        y, x = self.scale
        top, left = self.corner
        moved = np.asarray(boxes, dtype=np.float64) * (x, y, x, y) + (left, top, left, top)
        return moved.astype(np.float32)

    def points(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Points `(..., 2)` of pixel centres x, y, moved to the stored image."""
        y, x = self.scale
        top, left = self.corner
        moved = (np.asarray(points, dtype=np.float64) + 0.5) * (x, y) - 0.5 + (left, top)
        return moved.astype(np.float32)

    def camera(self, matrix: NDArray[Any]) -> NDArray[np.float32]:
        """A camera matrix `(3, 3)` for the stored image: it projects to the points that `points` gives."""
        y, x = self.scale
        top, left = self.corner
        move = np.array([[x, 0, 0.5 * x - 0.5 + left], [0, y, 0.5 * y - 0.5 + top], [0, 0, 1]])
        return (move @ np.asarray(matrix, dtype=np.float64)).astype(np.float32)


def fit_image(before: tuple[int, int], size: tuple[int, int], rule: FitRule) -> Fit:
    """How an image of `before` (height, width) is brought to `size`.

    >>> fit_image((480, 640), (224, 224), "letterbox")
    Fit(before=(480, 640), inner=(168, 224), canvas=(224, 224), corner=(28, 0))
    >>> fit_image((480, 640), (256, 256), "short").canvas
    (256, 341)
    """
    height, width = before
    if rule == "stretch":
        return Fit(before=before, inner=size, canvas=size, corner=(0, 0))
    pick = min if rule == "letterbox" else max
    scale = pick(size[0] / height, size[1] / width)
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    canvas = size if rule == "letterbox" else inner
    corner = ((canvas[0] - inner[0]) // 2, (canvas[1] - inner[1]) // 2)
    return Fit(before=before, inner=inner, canvas=canvas, corner=corner)
