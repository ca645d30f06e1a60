"""Types that all sections of settings share: number types, names, paths, and strictness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError, core_schema

from stoker.plugins import Group, plugins_of
from stoker.units import parse_bytes


@dataclass(frozen=True, slots=True)
class PluginName:
    """The type of a setting that names a plugin, or what the core has itself."""

    group: Group
    own: tuple[str, ...]
    """Names that are always known."""

    def names(self) -> list[str]:
        """Return all names that are known here, none of them imported."""
        return [*dict.fromkeys((*self.own, *plugins_of(self.group)))]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Make the validator."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Tell messages and docs the names."""
        return {**handler(schema), "enum": self.names()}

    def _known(self, name: str) -> str:
        if name not in self.names():
            raise PydanticCustomError("unknown_name", "the name is unknown")
        return name


SIZE_FORMAT = "bytes"
"""Format of a setting in bytes in the JSON schema."""
PositiveInt: TypeAlias = Annotated[int, Field(ge=1, strict=True)]
CountInt: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Names: TypeAlias = str | Annotated[tuple[str, ...], Field(min_length=1)]


def _of_units(value: object) -> object:
    """Return bytes of a size with a unit, as `100GB`; anything else as it is, to be judged as a number."""
    found = parse_bytes(value) if isinstance(value, str) else None
    return value if found is None else found


_SIZE: JsonDict = {"format": SIZE_FORMAT}
PositiveBytes: TypeAlias = Annotated[
    int, Field(ge=1, strict=True, json_schema_extra=_SIZE), BeforeValidator(_of_units)
]
CountBytes: TypeAlias = Annotated[
    int, Field(ge=0, strict=True, json_schema_extra=_SIZE), BeforeValidator(_of_units)
]


def _expanded(path: str) -> str:
    """Return a path whose `~` is the user's folder, as in the paths of data."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


Place: TypeAlias = Annotated[str, AfterValidator(_expanded)]


class SettingsSection(BaseModel):
    """Base of all sections: no unknown names, no change after loading, numbers may stand for text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )


def as_names(value: Names) -> tuple[str, ...]:
    """Return one name or several, as a tuple."""
    return (value,) if isinstance(value, str) else value


# ----------------------------------------------------------------------------------------------------------
# Settings of a torch Dataset that a configuration names by its import path.


class TorchConfig(SettingsSection):
    """A torch `Dataset` of your own, which `data.dataset` names (docs/how-to/datasets.md)."""

    arguments: dict[str, JsonValue] | None = None
    """Arguments that it is called with; `split` is added where it takes one."""
    version: str | None = None
    """Names its content; null: what can be seen of code, values and files."""
    time: tuple[str, ...] = ()
    """Fields whose axis 0 is time."""
    text: dict[str, JsonValue] | None = None
    """Treatment of text, by field: a list of words, `bytes` or `drop`."""
    random: Literal["refuse", "freeze"] = "refuse"
    """Refuse random output, or store one draw of it for good."""


# ----------------------------------------------------------------------------------------------------------
# Settings of engines beyond this machine.


_CLUSTER = r"^(auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})$"
"""Not `ray://`: a Ray client would be far from the cache folder. Run on a node, or submit a Ray job."""


class RayConfig(SettingsSection):
    """Precompute on a Ray cluster, with `precompute.engine: ray` (docs/how-to/ray.md)."""

    address: Annotated[str, Field(pattern=_CLUSTER, examples=["auto", "10.0.0.1:6379"])] | None = None
    """`auto` or `host:port` of a cluster that runs; null: one on this machine, while it is needed."""
    num_cpus: NonNegativeFloat | None = None
    """CPUs that a task takes; null: as many as torch has threads here, or a GPU's share of its node."""
    num_gpus: NonNegativeFloat | None = None
    """GPUs that a task takes; null: one where `training.device` is a GPU, else none."""
    max_retries: CountInt = 3
    """How often what a lost worker had may be lost again before the run ends."""
    placement: Literal["spread", "pack"] = "spread"
    """`spread` tasks over nodes, or `pack` one node after the other."""
    connect: PositiveFloat = 60.0
    """Seconds that the cluster may take to answer."""
    wait: PositiveFloat = 300.0
    """Seconds that it may have no place for any task, and that a task may take before it encodes."""
    slice: PositiveFloat = 600.0
    """Seconds of work in one task at most."""


def beside_engine(engine: str, given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Settings by dotted name that the engine in force takes no notice of, each with what to do instead.

    >>> [name for name, _ in beside_engine("local", {"precompute.ray.address": "auto"})]
    ['precompute.ray.address']
    """
    for name, value in given.items():
        if engine != "ray" and name.startswith("precompute.ray.") and value is not None:
            yield name, "Give precompute.engine=ray (--engine ray) with it, or leave it out"
        elif engine in ("local", "ray") and name == "precompute.options" and value:
            yield name, "It is for engines of other packages. Leave it out"
        elif engine != "local" and name == "precompute.wait" and value is False:
            yield name, "Encoding while training runs is done on this machine. Leave one of them out"
        elif engine == "ray" and name == "precompute.devices" and value:
            yield name, "There precompute.ray.num_gpus says what a task takes. Leave one of them out"


# ----------------------------------------------------------------------------------------------------------
# Settings of files that are brought here from elsewhere.


class FetchConfig(SettingsSection):
    """Files that `stoker data fetch` brings here (docs/how-to/fetch.md)."""

    files: dict[str, dict[str, JsonValue]] | None = None
    """By the name they get, as `{a.h5: {from: "b2:bucket/a.h5", sha256: "..."}}`; `a/` is a whole folder."""
    manifest: Place | None = None
    """A JSON file with more of them."""
    folder: Place | None = None
    """Where they go; null: `data.root`."""
    at_once: PositiveInt = 4
    """Files on their way at the same time."""
    tries: PositiveInt = 5
    """Tries in a row without a new byte, after which a file has failed."""
    deadline: PositiveFloat = 14400.0
    """Seconds for one file, pauses included."""
    stall: PositiveFloat = 60.0
    """Seconds without a byte, or an answer, after which a try has failed."""


# ----------------------------------------------------------------------------------------------------------
# Settings of the kinds of data that are files of other formats than the HDF5 of simulations.


class ArraysConfig(SettingsSection):
    """Trajectories of varying length in HDF5 or Zarr, grids in Zarr, `.npy` files."""

    layout: Literal["rows", "groups", "offsets", "particles", "mesh", "grid"] | None = None
    """Samples along axis 0, a group each, or flat with offsets; null: as in the first
    (docs/how-to/meshes.md)."""
    offsets: str | None = None
    """The array that says where each trajectory begins; null: `offsets`, `ptr` or the like."""
    attributes: tuple[str, ...] = ()
    """Numbers among the attributes of each group that are fields."""
    fill_missing: Flag = False
    """Take Zarr chunks that are not stored for their fill value."""


class TarConfig(SettingsSection):
    """Tar archives in the WebDataset layout."""

    members: tuple[str, ...] | None = None
    """Extensions to read, as `[jpg, cls]`; null: all of the first sample."""


class ParquetConfig(SettingsSection):
    """Rows of Parquet files."""

    columns: tuple[str, ...] | None = None
    """Columns that are fields; null: all, which must then be numbers, lists or bytes."""
    key: str | None = None
    """The column whose values name rows for splits; null: file and row."""


# ----------------------------------------------------------------------------------------------------------
# Settings of images.


class ImagesConfig(SettingsSection):
    """Images below `data.root`, of `data.kind: images` (docs/how-to/images.md)."""

    annotations: Literal["voc", "coco", "dexycb", "folder"] | None = None
    """Layout of the labels; `folder`: a folder for each class; null: images alone."""
    size: PositiveInt | tuple[PositiveInt, PositiveInt] = (224, 224)
    """`[height, width]` of stored images; with `fit: short` the length of the shorter side."""
    fit: Literal["stretch", "letterbox", "short"] = "stretch"
    """How an image is brought to that size; its labels go where its pixels go."""
    color: Literal["RGB", "L"] = "RGB"
    """`L`: grey."""
    store: Literal["pixels", "encoded"] = "pixels"
    """`encoded`: the bytes of the file, decoded when they are served."""
    filter: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """How pixels are weighed when an image is resized."""
    reduced: Flag = True
    """Decode JPEG at 1/2, 1/4 or 1/8 where that is enough for the size."""
    turned: Flag = True
    """Turn images as their EXIF orientation says."""
    max_samples: PositiveInt | None = None
    """Draw so many images of each split, evenly and by `data.seed`; null: all."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in the order of their numbers; null: those found."""
    max_objects: PositiveInt | None = None
    """Room for objects in an image; null: as many as the fullest image has."""
    ragged: Flag = False
    """Objects as ragged fields, in place of padded ones."""
    strict: Flag = False
    """Set an image aside if a box has no area inside it; `false`: mark the box as not valid."""
    setup: Literal["s0", "s1", "s2", "s3"] = "s0"
    """Of DexYCB: which samples are train, val and test."""
    extras: tuple[Literal["depth", "segmentation"], ...] = ()
    """Of DexYCB: maps to take along."""


# ----------------------------------------------------------------------------------------------------------
# Kinds of sources: their names, what settings each has of its own, and which shared ones it takes.
#
# Another kind is an entry point of the group `stoker.sources` (docs/how-to/plugins.md). One of Stoker
# itself has also: its name in `KINDS`; a section of its settings here, which `DataConfig` holds under that
# name; its name at the shared settings that it takes, in `TAKEN_BY`. docs/reference/config.md and all
# messages follow.


KINDS = ("hdf5", "images", "sql", "torch", "arrays", "tar", "parquet", "cache")
"""Kinds of Stoker itself; those of plugins have their settings in `data.options`."""

Kind: TypeAlias = Annotated[str, PluginName("stoker.sources", KINDS)]
"""Values of `data.kind`."""

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "files": ("hdf5", "arrays", "tar", "parquet", "cache"),
    "preset": ("hdf5",),
    "fields": ("hdf5", "arrays"),
    "include": ("hdf5",),
    "normalize": ("hdf5",),
    "dataset": ("torch",),
}
"""Settings of `data` that not every kind takes, with those that do; what is not here is for all."""

ENCODER_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    encoder: {"training.latent_cache_dtype": None} for encoder in ("identity", "features", "module")
}
"""Those that are others for an encoder: latents bear 16 bits; keys, boxes and metres do not."""


OF_MODULE = (
    *("target", "arguments", "checkpoint_key", "checkpoint_prefix", "field", "output", "time", "version"),
)
"""Settings of `encoder` that are for `encoder.kind=module` alone."""


def with_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted name, with the defaults that follow from their kind of source and their encoder.

    >>> sorted(with_defaults({"data.kind": "sql"}))
    ['data.kind', 'encoder.kind', 'training.latent_cache_dtype']
    """
    kind = {"data.kind": "torch"} if given.get("data.dataset") is not None else {}
    known = {**kind, **given}
    own = {"encoder.kind": "module"} if given.get("encoder.target") is not None else {}
    if known.get("data.kind", "hdf5") != "hdf5":  # the grid encoder is for fields on a grid
        own = {"encoder.kind": "identity", **own}
    known = {**own, **known}
    return {**ENCODER_DEFAULTS.get(str(known.get("encoder.kind")), {}), **known}


def misplaced_in_encoder(encoder: BaseModel, kind: str) -> Iterator[str]:
    """Yield settings of `encoder` that are given though its kind takes no notice of them."""
    for name in OF_MODULE if kind != "module" else ():
        if getattr(encoder, name) != type(encoder).model_fields[name].get_default():
            yield name


def misplaced(data: BaseModel, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings of `data` that are given though its kind takes no notice of them, and the kinds that would."""
    sections = {name: (name,) for name in KINDS if name in type(data).model_fields}
    others = tuple(name for name in plugins_of("stoker.sources") if name not in KINDS)
    shared = {name: (*kinds, *others) for name, kinds in TAKEN_BY.items() if name != "dataset"}
    for name, kinds in {**TAKEN_BY, **shared, **sections, "options": others}.items():
        given = getattr(data, name) != type(data).model_fields[name].get_default(call_default_factory=True)
        if given and kind not in kinds:
            yield name, kinds


# ----------------------------------------------------------------------------------------------------------
# Settings of rented machines, and of the script that one starts with.


class LaunchConfig(SettingsSection):
    """Machines that `stoker launch` starts, and what they do (docs/how-to/launch.md)."""

    repo: str | None = None
    """Where the machine gets the code from; null: the remote `origin`, over https."""
    install: Names = "."
    """Requirements for pip there: `.` (the code itself), or names with versions, as `stoker==0.1.0`."""
    constraints: Place | None = None
    """A file of the repository with pinned versions, for pip's `-c`."""
    command: str | None = None
    """Your own command, run by bash in place of `validate`, `precompute` and `train`; null runs these."""
    secrets: tuple[str, ...] = ()
    """Names of variables that the machine gets from here; values are in no script, command or log."""
    upload: str | None = None
    """A place of rclone, `remote:path`, for logs and checkpoints; a later machine resumes from there."""
    upload_minutes: PositiveFloat = 10.0
    """Minutes between two uploads during the run; there is one more at its end."""
    cache: str | None = None
    """A place of rclone that caches are pulled from and pushed to; null: they stay on the machine's disk."""
    auto_shutdown: Flag = True
    """Stop the machine (never destroy it) on success, failure and stall."""
    stall_minutes: PositiveFloat = 30.0
    """Minutes without a line in the log after which the run counts as stalled."""
    grace: PositiveInt = 120
    """Seconds from a notice to the end: three quarters to commit and to save, the rest to upload."""
    workdir: str = "/workspace/stoker"
    """Folder of code, data and logs on the machine."""
    image: str = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel"
    """Docker image."""
    gpu: str | None = None
    """Name of the GPU, as `RTX_4090`; null: any."""
    gpus: PositiveInt = 1
    """GPUs of one machine; as many ranks encode and train, under torchrun. `command` runs once, as it is."""
    gpu_memory: CountInt = 0
    """Least memory of one GPU, in GiB."""
    disk: PositiveInt = 64
    """Disk, in GiB."""
    region: Annotated[str, Field(pattern=r"^[A-Z]{2}$", examples=["DE", "US"])] | None = None
    """Country of the machine; null: any."""
    max_price: PositiveFloat | None = None
    """Most that an hour may cost, in dollars; null: any."""
    reliability: Fraction = 0.98
    """Least part of the time that the machine was up, as the provider counts."""
    scratch: Flag = True
    """Under Slurm, read data on network storage from copies on the node's own disk
    (docs/how-to/staging.md)."""


# ----------------------------------------------------------------------------------------------------------
# Settings of rows: those of a database that are samples, and those of a table that are joined to records.


class JoinConfig(SettingsSection):
    """Columns of a table to add to the records, by a key, when a run begins; nothing is encoded for them."""

    table: str | None = None
    """A .csv, .tsv or .parquet file, or a database's URL; null: nothing is joined."""
    key: Names = "index"
    """Column of the table that names the record, or columns that do together."""
    columns: dict[str, JsonValue] | tuple[str, ...] | None = None
    """Fields and their rules, as of `data.sql.columns`."""
    name: str | None = None
    """The table's name, in a database."""
    on: str = "index"
    """Meaning of the key: `index`, the sample's; `keys`, the source's; or a field with a whole number."""
    missing: Literal["refuse", "mask", "drop"] = "refuse"
    """Records without a row: an error, zeros with `<field>_known` false, or left out."""
    repeated: Literal["refuse", "mask", "drop"] = "refuse"
    """The same for keys that have several rows."""


class SqlConfig(SettingsSection):
    """Rows of a database as samples (docs/how-to/sql.md)."""

    url: str | None = None
    """`sqlite:///FILE`, or `postgresql://[USER@]HOST/DATABASE`; a password belongs in `~/.pgpass`."""
    table: str | None = None
    """The table, `NAME` or `SCHEMA.NAME`."""
    query: str | None = None
    """A SELECT in place of a table."""
    key: Names | None = None
    """Column, or columns, that tell rows apart; they order the samples and decide the splits."""
    columns: dict[str, JsonValue] | tuple[str, ...] | None = None
    """Fields and their rules, as `{power: float32}`, or names of columns that hold numbers."""
    where: str | None = None
    """Condition on the rows, in SQL."""
    version_query: str | None = None
    """Gives one row that changes whenever the rows do; an unchanged table is then not read again."""
    connect_s: PositiveFloat = 10.0
    """Seconds to be connected."""
    statement_s: PositiveFloat = 300.0
    """Seconds for one statement; the ordered read of all rows is one."""
    lock_s: PositiveFloat = 30.0
    """Seconds to wait for others who hold a lock."""
    attempts: PositiveInt = 4
    """Tries when there is no connection, or it is lost."""
