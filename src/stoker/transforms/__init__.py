"""Transforms of batches, on the device they are on, with randomness that belongs to the example.

A transform is a function `(batch, keys) -> batch` for `Loader(transforms=[...])`; `keys` holds an int64 per
example, equal for equal seed, epoch and example. So an augmented batch, too, is the same from every tier, at
every batch and world size, and after a resume. Those here move values (`Flip`, `Roll`, `Crop`, `Take`),
change them (`Normalize`, `Noise`) or give several of each example (`Views`); functions of one's own draw with
`uniform`, `normal`, `integers` and `bits`.
"""

from stoker.loader.order import bits, child_keys, integers, normal, uniform
from stoker.transforms.geometry import Crop, Flip, Roll, Take
from stoker.transforms.images import CropImages, Decode
from stoker.transforms.values import Noise, Normalize, Views

__all__ = [
    "Crop",
    "CropImages",
    "Decode",
    "Flip",
    "Noise",
    "Normalize",
    "Roll",
    "Take",
    "Views",
    "bits",
    "child_keys",
    "integers",
    "normal",
    "uniform",
]
