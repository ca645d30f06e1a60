"""A small made-up data set in DexYCB's layout: noise for images, and labels that agree with each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

SERIALS = (
    "836212060125", "839512060362", "840412060917", "841412060263",
    "932122060857", "932122060861", "932122061900", "932122062010",
)  # fmt: skip


def write_dexycb(  # noqa: PLR0913 - how many of each, all by name
    root: Path,
    *,
    subjects: int = 2,
    sequences: int = 5,
    cameras: int = 2,
    frames: int = 2,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
) -> Path:
    """Write it below `root`, needs Pillow; the first frame of each sequence shows no hand.

    `joint_2d` is the projection of `joint_3d` by the camera that `calibration/` has for the images.

    Args:
        size: (height, width); the original has (480, 640).
    """
    random = np.random.default_rng(seed)
    for camera in range(cameras):
        _yaml(_intrinsics(root, camera), {"color": _camera(camera, size), "depth": _camera(camera, size)})
    for subject in range(subjects):
        calibration = f"20200709_{subject:06d}"
        betas = random.normal(size=10).round(6).tolist()
        _yaml(root / f"calibration/mano_{calibration}_right/mano.yml", {"betas": betas})
        for sequence in range(sequences):
            folder = root / f"20200709-subject-{subject + 1:02d}" / f"20200709_{sequence:06d}"
            ids = [1 + (sequence + k) % 21 for k in range(2 + sequence % 3)]
            meta = {
                "num_frames": frames,
                "serials": list(SERIALS[:cameras]),
                "mano_calib": [f"{calibration}_right"],
                "mano_sides": ["right"],
                "ycb_ids": ids,
                "ycb_grasp_ind": sequence % len(ids),
            }
            _yaml(folder / "meta.yml", meta)
            for camera in range(cameras):
                for frame in range(frames):
                    place = folder / SERIALS[camera]
                    _write_frame(place, frame, random, _camera(camera, size), len(ids), size)
    return root


def _intrinsics(root: Path, camera: int) -> Path:
    return root / f"calibration/intrinsics/{SERIALS[camera]}_640x480.yml"


def _camera(camera: int, size: tuple[int, int]) -> dict[str, float]:
    height, width = size
    focal = 0.96 * width + camera
    return {"fx": focal, "fy": focal + 0.5, "ppx": width / 2 - 1.5, "ppy": height / 2 + 0.5}


def _write_frame(
    folder: Path,
    frame: int,
    random: np.random.Generator,
    camera: dict[str, float],
    objects: int,
    size: tuple[int, int],
) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"color_{frame:06d}.jpg", quality=90)
    depth = random.integers(400, 1500, size, dtype=np.uint16)
    Image.fromarray(depth).save(folder / f"aligned_depth_to_color_{frame:06d}.png")
    joints = random.uniform((-0.1, -0.1, 0.6), (0.1, 0.1, 0.9), (1, 21, 3)).astype(np.float32)
    labels: dict[str, NDArray[np.generic]] = {
        "seg": random.integers(0, objects + 1, size, dtype=np.uint8),
        "pose_y": random.normal(size=(objects, 3, 4)).astype(np.float32),
        "pose_m": random.normal(size=(1, 51)).astype(np.float32),
        "joint_3d": joints,
        "joint_2d": _projected(joints, camera),
    }
    if frame == 0:  # DexYCB says so with -1 throughout
        for name in ("pose_m", "joint_3d", "joint_2d"):
            labels[name] = np.full_like(labels[name], -1)
    np.savez_compressed(folder / f"labels_{frame:06d}.npz", **labels)  # pyright: ignore[reportArgumentType]


def _projected(joints: NDArray[np.float32], camera: dict[str, float]) -> NDArray[np.float32]:
    x, y, z = np.moveaxis(joints.astype(np.float64), -1, 0)
    flat = [camera["fx"] * x / z + camera["ppx"], camera["fy"] * y / z + camera["ppy"]]
    return np.stack(flat, -1).astype(np.float32)


def _yaml(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
