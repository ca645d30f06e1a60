"""What all sections of settings share: number types, names, paths, and strictness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from stoker.units import parse_bytes

SIZE_FORMAT = "bytes"
"""What the JSON schema of a setting in bytes says it is."""
PositiveInt: TypeAlias = Annotated[int, Field(ge=1, strict=True)]
CountInt: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Names: TypeAlias = str | Annotated[tuple[str, ...], Field(min_length=1)]


def _of_units(value: object) -> object:
    """Bytes of a size with a unit, as `100GB`; anything else as it is, for whoever judges numbers."""
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
    """A path whose `~` is the user's folder, as in the paths of data."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


Place: TypeAlias = Annotated[str, AfterValidator(_expanded)]


class SettingsSection(BaseModel):
    """What all sections share: no unknown names, no change after loading, numbers may stand for text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )


def as_names(value: Names) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    return (value,) if isinstance(value, str) else value
