"""DexYCB: hands holding objects, eight cameras, a folder for each subject, sequence and camera.

`<subject>/<date_time>/<serial>/{color_%06d.jpg, labels_%06d.npz, aligned_depth_to_color_%06d.png}`, with
`<subject>/<date_time>/meta.yml` and `calibration/`. What labels mark with -1 is zero here, with a mask.

Source: layout and the four setups from the toolkit of Chao et al., "DexYCB", CVPR 2021.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from stoker.errors import ConfigError, DecodeError, SourceError, SplitError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.files import natural_key
from stoker.sources.image_geometry import Fit
from stoker.sources.images import Entry, Listing, read_file, require_folder

Setup: TypeAlias = Literal["s0", "s1", "s2", "s3"]
Extra: TypeAlias = Literal["depth", "segmentation"]
EXTRAS: tuple[Extra, ...] = ("depth", "segmentation")
SIDES = ("left", "right")
MAX_OBJECTS = 10

Rule: TypeAlias = Callable[[int, int, int], bool]
"""True if a place (subject, camera, sequence), counted from 0, belongs to a split."""

SETUPS: Mapping[Setup, Mapping[str, Rule]] = {
    "s0": {
        "train": lambda subject, camera, sequence: sequence % 5 != 4,
        "val": lambda subject, camera, sequence: sequence % 5 == 4 and subject in (0, 1),
        "test": lambda subject, camera, sequence: sequence % 5 == 4 and subject not in (0, 1),
    },
    "s1": {
        "train": lambda subject, camera, sequence: subject in (0, 1, 2, 3, 4, 5, 9),
        "val": lambda subject, camera, sequence: subject == 6,
        "test": lambda subject, camera, sequence: subject in (7, 8),
    },
    "s2": {
        "train": lambda subject, camera, sequence: camera < 6,
        "val": lambda subject, camera, sequence: camera == 6,
        "test": lambda subject, camera, sequence: camera == 7,
    },
    "s3": {
        "train": lambda subject, camera, sequence: sequence // 5 not in (3, 7, 11, 15, 19),
        "val": lambda subject, camera, sequence: sequence // 5 in (3, 19),
        "test": lambda subject, camera, sequence: sequence // 5 in (7, 11, 15),
    },
}
"""Seen subjects, cameras and objects; unseen subjects; unseen cameras; unseen grasped objects."""

_FILE_BYTES = 1 << 26


class DexYcb:
    """The layout of DexYCB.

    Args:
        root: The folder with `calibration` and the subjects.
        setup: Which samples are train, val and test.
        extras: `depth` (millimetres) and `segmentation`, which are as large as images and left out otherwise.
    """

    def __init__(self, root: Path, setup: Setup, extras: Sequence[Extra]) -> None:
        if setup not in SETUPS:
            raise ConfigError(f"setup {setup!r} is unknown", hint=f"DexYCB has {', '.join(SETUPS)}")
        if unknown := [name for name in extras if name not in EXTRAS]:
            raise ConfigError(f"extras {unknown} are unknown", hint=f"DexYCB has {', '.join(EXTRAS)}")
        self._root = root
        self._setup: Setup = setup
        self._extras = tuple(name for name in EXTRAS if name in extras)
        self._size: tuple[int, int] | None = None
        self._metas: dict[str, Mapping[str, Any]] = {}

    def for_size(self, size: tuple[int, int] | None) -> DexYcb:
        """Return the same for stored images of (height, width), which maps share; None: of various sizes."""
        self._size = size
        if size is None and self._extras:
            raise ConfigError(
                "depth and segmentation need images of one size", hint=f"Give {arg('fit', 'stretch')}"
            )
        return self

    def listing(self) -> Listing:
        """See `Catalog`; places count among the folders that are there, in the order of their names."""
        require_folder(self._root / "calibration", "the root of DexYCB, with calibration/ and subjects")
        every: list[Entry] = []
        splits: dict[str, list[Entry]] = {"train": [], "val": [], "test": []}
        for subject, subject_dir in _numbered(self._root, lambda name: "subject" in name):
            place = _subject_place(subject_dir.name, subject)
            for sequence, sequence_dir in _numbered(subject_dir):
                for camera, camera_dir in _numbered(sequence_dir):
                    names = sorted(path.name for path in camera_dir.glob("color_*.jpg"))
                    below = camera_dir.relative_to(self._root).as_posix()
                    some = [
                        Entry(key=f"{below}/{n.removesuffix('.jpg')}", image=f"{below}/{n}") for n in names
                    ]
                    every += some
                    for split, rule in SETUPS[self._setup].items():
                        if rule(place, camera, sequence):
                            splits[split] += some
        present = {split: entries for split, entries in splits.items() if entries}
        if every and not present:
            raise SplitError(f"{self._root}: none of its samples is in a split of setup {self._setup}")
        return Listing(every=every, splits=present)

    def schema(self) -> Schema:
        """Return hands, objects, camera; depth and segmentation where they were asked for."""
        schema: Schema = {
            "hand_joints": Field(shape=(21, 3), dtype="float32"),
            "hand_joints_2d": Field(shape=(21, 2), dtype="float32"),
            "hand_joints_valid": Field(shape=(21,), dtype="bool"),
            "has_hand": Field(shape=(), dtype="bool"),
            "mano_pose": Field(shape=(51,), dtype="float32"),
            "mano_shape": Field(shape=(10,), dtype="float32"),
            "mano_side": Field(shape=(), dtype="int64"),
            "object_poses": Field(shape=(MAX_OBJECTS, 3, 4), dtype="float32"),
            "object_ids": Field(shape=(MAX_OBJECTS,), dtype="int64"),
            "objects_valid": Field(shape=(MAX_OBJECTS,), dtype="bool"),
            "num_objects": Field(shape=(), dtype="int64"),
            "grasped_object": Field(shape=(), dtype="int64"),
            "camera_intrinsics": Field(shape=(3, 3), dtype="float32"),
        }
        for name in self._extras:
            assert self._size is not None
            schema[name] = Field(shape=self._size, dtype="int32")
        return schema

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """Return all labels of one frame."""
        found = _labels(self._root / _labels_file(entry))
        meta, where = self._meta(entry), str(self._root / _labels_file(entry))
        sample = {**_hand(found, fit), **_objects(found, meta, where)}
        side = str(meta["mano_sides"][0])
        if side not in SIDES:
            raise DecodeError(
                f"{where}: its sequence is of a {side!r} hand", hint=f"Expected {' or '.join(SIDES)}"
            )
        betas = self._yaml(_mano_file(meta))["betas"]
        sample["mano_side"] = np.asarray(SIDES.index(side), dtype=np.int64)
        sample["mano_shape"] = _array(betas, (10,), np.float32, f"{_mano_file(meta)}: betas")
        sample["camera_intrinsics"] = fit.camera(self._camera(entry))
        return {**sample, **self._maps(entry, found, fit, where)}

    def _camera(self, entry: Entry) -> NDArray[np.float64]:
        name = _camera_file(entry)
        try:
            color = self._yaml(name)["color"]
            fx, fy, x, y = (float(color[key]) for key in ("fx", "fy", "ppx", "ppy"))
        except (KeyError, TypeError, ValueError) as error:
            raise DecodeError(
                f"{self._root / name} lacks fx, fy, ppx or ppy of the color camera ({error!r})", hint="Fix it"
            ) from error
        return np.array([[fx, 0, x], [0, fy, y], [0, 0, 1]])

    def _maps(self, entry: Entry, found: Mapping[str, NDArray[Any]], fit: Fit, where: str) -> Sample:
        from stoker.sources.image_decoding import decode_map, nearest_map

        maps: Sample = {}
        if "depth" in self._extras:
            path = self._root / _depth_file(entry)
            maps["depth"] = decode_map(read_file(path), fit, where=str(path))
        if "segmentation" in self._extras:
            values = found["seg"]
            if values.shape != fit.before:
                raise DecodeError(
                    f"{where}: seg is {values.shape}, the image {fit.before}", hint="Both must be alike"
                )
            maps["segmentation"] = nearest_map(values, fit)
        return maps

    def files(self, entry: Entry) -> Iterable[str]:
        """Yield labels, the sequence's and the cameras' descriptions, and depth where it was asked for."""
        yield _labels_file(entry)
        yield _meta_file(entry)
        yield _camera_file(entry)
        if "depth" in self._extras:
            yield _depth_file(entry)
        with suppress(SourceError):  # then the samples of this sequence are quarantined when they are read
            yield _mano_file(self._meta(entry))

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """Return None: labels come from files."""
        return None

    def settings(self) -> dict[str, Json]:
        """Return setup and extras; the rule of the split decides which samples exist."""
        return {"setup": self._setup, "extras": list(self._extras), "max_objects": MAX_OBJECTS}

    def _meta(self, entry: Entry) -> Mapping[str, Any]:
        name = _meta_file(entry)
        meta = self._yaml(name)
        for key in ("mano_calib", "mano_sides", "ycb_ids", "ycb_grasp_ind"):
            if key not in meta:
                raise DecodeError(f"{self._root / name} has no {key}", hint="Copy or download it again")
        return meta

    def _yaml(self, name: str) -> Mapping[str, Any]:
        if name not in self._metas:
            path = self._root / name
            try:
                content: Any = yaml.safe_load(read_file(path, _FILE_BYTES))
            except yaml.YAMLError as error:
                raise DecodeError(f"{path} is not YAML: {error}", hint="Copy or download it again") from error
            if not isinstance(content, dict):
                raise DecodeError(f"{path} holds no entries", hint="Copy or download it again")
            self._metas[name] = cast("Mapping[str, Any]", content)
        return self._metas[name]


def _numbered(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterable[tuple[int, Path]]:
    """Return folders below one, with their places in natural order."""
    found = sorted(
        (child for child in folder.iterdir() if child.is_dir() and wanted(child.name)),
        key=lambda child: natural_key(child.name),
    )
    return enumerate(found)


def _subject_place(name: str, place: int) -> int:
    """Return the number in `20200709-subject-01`, from 0: the same when others are not there."""
    number = name.rpartition("-")[2]
    return int(number) - 1 if number.isdigit() else place


def _labels_file(entry: Entry) -> str:
    folder, _, name = entry.key.rpartition("/")
    return f"{folder}/labels_{name.removeprefix('color_')}.npz"


def _depth_file(entry: Entry) -> str:
    folder, _, name = entry.key.rpartition("/")
    return f"{folder}/aligned_depth_to_color_{name.removeprefix('color_')}.png"


def _meta_file(entry: Entry) -> str:
    return f"{'/'.join(entry.key.split('/')[:2])}/meta.yml"


def _camera_file(entry: Entry) -> str:
    return f"calibration/intrinsics/{entry.key.split('/')[2]}_640x480.yml"


def _mano_file(meta: Mapping[str, Any]) -> str:
    return f"calibration/mano_{meta['mano_calib'][0]}/mano.yml"


def _labels(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of one labels file; nothing in it is unpickled."""
    try:
        with np.load(io.BytesIO(read_file(path, _FILE_BYTES)), allow_pickle=False) as file:
            found = {name: file[name] for name in ("seg", "pose_y", "pose_m", "joint_3d", "joint_2d")}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, SourceError):
            raise
        raise DecodeError(f"{path} is damaged: {error}", hint="Copy or download it again") from error
    found["pose_m"] = _array(found["pose_m"], (1, 51), np.float32, f"{path}: pose_m")[0]
    found["joint_3d"] = _array(found["joint_3d"], (1, 21, 3), np.float32, f"{path}: joint_3d")[0]
    found["joint_2d"] = _array(found["joint_2d"], (1, 21, 2), np.float32, f"{path}: joint_2d")[0]
    return found


def _hand(found: Mapping[str, NDArray[Any]], fit: Fit) -> Sample:
    """Return joints and pose, zero where the labels say -1; there is a hand when any joint is labelled."""
    joints, flat = found["joint_3d"], found["joint_2d"]
    valid = ~((joints == -1).all(-1) | (flat == -1).all(-1))
    pose = found["pose_m"]
    return {
        "hand_joints": np.where(valid[:, None], joints, np.float32(0)),
        "hand_joints_2d": np.where(valid[:, None], fit.points(flat), np.float32(0)),
        "hand_joints_valid": valid,
        "has_hand": np.asarray(valid.any()),
        "mano_pose": pose if valid.any() else np.zeros_like(pose),
    }


def _objects(found: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], where: str) -> Sample:
    poses, ids = found["pose_y"], [int(number) for number in meta["ycb_ids"]]
    count = len(ids)
    if poses.shape != (count, 3, 4):
        raise DecodeError(
            f"{where}: pose_y is {poses.shape}, its sequence names {count} objects",
            hint=f"Expected ({count}, 3, 4)",
        )
    if count > MAX_OBJECTS:
        raise DecodeError(f"{where}: {count} objects, there is room for {MAX_OBJECTS}")
    valid = np.zeros(MAX_OBJECTS, dtype=np.bool_)
    valid[:count] = ~(poses == -1).all((1, 2))
    stored = np.zeros((MAX_OBJECTS, 3, 4), dtype=np.float32)
    stored[:count] = poses * valid[:count, None, None]
    numbers = np.zeros(MAX_OBJECTS, dtype=np.int64)
    numbers[:count] = ids
    return {
        "object_poses": stored,
        "object_ids": numbers,
        "objects_valid": valid,
        "num_objects": np.asarray(count, dtype=np.int64),
        "grasped_object": np.asarray(int(meta["ycb_grasp_ind"]), dtype=np.int64),
    }


def _array(values: Any, shape: tuple[int, ...], dtype: Any, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"{where} holds other things than numbers: {error}") from error
    if array.shape != shape:
        raise DecodeError(f"{where} is {array.shape}", hint=f"Expected {shape}")
    return array
