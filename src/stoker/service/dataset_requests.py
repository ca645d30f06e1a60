"""What a data set is registered or generated with."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Name
    """Under which it is shown, and may be named in jobs; no two share one."""


class RadioRows(_Request):
    """Radio rows that are in a database."""

    kind: Literal["radio"]
    url: Annotated[str, Field(min_length=1, max_length=1000)]
    """`sqlite:///FILE` below a root, or `postgresql://[USER@]HOST/DATABASE`; without a password."""
    set: uuid.UUID
    """What its rows have in `dataset_id`; the registered data set has the same id."""
    table: Annotated[str, Field(min_length=1, max_length=200)] = "measurement_features"
    """The table, or `SCHEMA.TABLE`."""


class Simulations(_Request):
    """Simulations in HDF5 files."""

    kind: Literal["hdf5"]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A file, or a folder of files, below a root."""


class Images(_Request):
    """Images in a folder for each class."""

    kind: Literal["images"]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """The folder, below a root; its folders are classes, or `train` and `val` with classes in them."""


class GenerateRadio(_Request):
    """Radio rows to be made."""

    kind: Literal["radio"]
    rows: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 4030
    """Accepted measurements."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Equal settings give equal rows."""
    power_dbm: Annotated[float, Field(ge=0, le=80, strict=True)] = 37.0
    """What transmitters send."""
    least_receivers: Annotated[int, Field(ge=1, le=7, strict=True)] = 3
    """Receivers that hear it, at least."""
    least_snr_db: Annotated[float, Field(ge=-20, le=40, strict=True)] = 5.0
    """Mean signal to noise over those, at least."""
    most_gdop: Annotated[float, Field(gt=1, le=1000, strict=True)] = 150.0
    """How badly the receivers' places may suit, at most."""


class GenerateSimulations(_Request):
    """Solutions of Burgers' equation to be made."""

    kind: Literal["hdf5"]
    trajectories: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 64
    """Independent initial states."""
    steps: Annotated[int, Field(ge=2, le=2001, strict=True)] = 101
    """Stored states of each."""
    points: Annotated[int, Field(ge=16, le=4096, multiple_of=2, strict=True)] = 256
    """Grid points."""
    viscosity: Annotated[float, Field(gt=0, le=10, strict=True)] = 0.01
    """The factor of u_xx."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Decides the initial states."""


Registration = Annotated[RadioRows | Simulations | Images, Field(discriminator="kind")]
"""A data set that is there."""
Generation = Annotated[GenerateRadio | GenerateSimulations, Field(discriminator="kind")]
"""A data set to be made."""
