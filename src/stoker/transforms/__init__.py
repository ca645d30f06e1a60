"""Transforms of batches, on the device they are on, with randomness that belongs to the example.

README.md has the map of this folder.
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
