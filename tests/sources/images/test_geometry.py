from __future__ import annotations

import numpy as np
import pytest

from stoker.sources.image_geometry import FitRule, fit_image


@pytest.mark.parametrize(
    ("before", "size", "rule", "inner", "canvas", "corner"),
    [
        ((480, 640), (224, 224), "stretch", (224, 224), (224, 224), (0, 0)),
        ((480, 640), (100, 300), "stretch", (100, 300), (100, 300), (0, 0)),
        ((640, 480), (224, 224), "letterbox", (224, 168), (224, 224), (0, 28)),
        ((30, 40), (224, 224), "letterbox", (168, 224), (224, 224), (28, 0)),
        ((640, 480), (256, 256), "short", (341, 256), (341, 256), (0, 0)),
        ((1, 4000), (224, 224), "letterbox", (1, 224), (224, 224), (111, 0)),
    ],
)
def test_an_image_is_brought_to_its_size(before, size, rule: FitRule, inner, canvas, corner) -> None:
    fit = fit_image(before, size, rule)

    assert (fit.inner, fit.canvas, fit.corner) == (inner, canvas, corner)


def test_edges_of_the_image_stay_its_edges_and_height_is_not_taken_for_width() -> None:
    fit = fit_image((480, 640), (120, 320), "stretch")

    assert fit.boxes(np.array([[0, 0, 640, 480], [320, 240, 640, 480]])).tolist() == [
        [0, 0, 320, 120],
        [160, 60, 320, 120],
    ]


def test_a_point_stays_on_its_pixel() -> None:
    """Halved, pixels 0 and 1 become pixel 0, whose center lies at 0: their common edge was at 0.5."""
    fit = fit_image((4, 4), (2, 2), "stretch")

    assert fit.points(np.array([[0.5, 0.5], [2.5, 0.5]])).tolist() == [[0, 0], [1, 0]]


@pytest.mark.parametrize("rule", ["stretch", "letterbox"])
def test_the_camera_projects_to_where_the_points_went(rule: FitRule) -> None:
    camera = np.array([[615.0, 0, 312.5], [0, 616.0, 245.5], [0, 0, 1]])
    joints = np.random.default_rng(0).uniform((-0.2, -0.2, 0.5), (0.2, 0.2, 1.0), (50, 3))
    fit = fit_image((480, 640), (224, 200), rule)

    moved = fit.points(project(camera, joints))

    assert np.allclose(project(fit.camera(camera), joints), moved, atol=1e-3)


def project(camera: np.ndarray, points: np.ndarray) -> np.ndarray:
    flat = points @ camera.T
    return flat[:, :2] / flat[:, 2:]
