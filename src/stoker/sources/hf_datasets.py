"""Samples from a loaded Hugging Face `datasets.Dataset`, read from its Arrow tables as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from stoker.errors import ConfigError, SourceError
from stoker.schema import Json, Sample, Schema
from stoker.sources.arrow import ArrowField, checked_columns, fields_of, import_arrow, sample_of
from stoker.sources.hdf5_open import FOREIGN_ERRORS
from stoker.sources.protocol import Part, SourceIdentity

VERSION = 1
"""Bumped by hand when the same dataset would give other samples."""
RUN = 256
"""Rows taken from the tables at a time."""


class DatasetsSource:
    """Rows of a `datasets.Dataset`: `DatasetsSource(load_dataset("...", split="train"))`.

    Its fingerprint, which changes with every `map`, `filter` or file, is its identity. Formats and transforms
    (`set_format`, `set_transform`) do not reach what is read; images and sound come as bytes.

    Args:
        dataset: One split, not a `DatasetDict`, and not streaming.
        columns: Which columns are fields; None: all, which must then be numbers, lists of numbers or bytes.

    Raises:
        ConfigError: It is no such dataset, or `columns` is no list of names.
        SourceError: A column holds no numbers.
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] | None = None) -> None:
        import_arrow("DatasetsSource")
        if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format")):
            raise ConfigError(
                f"DatasetsSource takes a datasets.Dataset, got {type(dataset).__name__}. Name a split, as "
                "load_dataset(..., split='train'); streaming ones have no numbers to read by"
            )
        self._dataset = dataset.with_format("arrow")
        self._fingerprint = str(dataset._fingerprint)
        self._fields: tuple[ArrowField, ...] = fields_of(
            dataset.features.arrow_schema, checked_columns(columns), where="the dataset"
        )
        self._block: tuple[int, Any] | None = None

    def __repr__(self) -> str:
        """Rows and fingerprint."""
        return f"DatasetsSource({len(self)} rows, {self._fingerprint})"

    def __getstate__(self) -> dict[str, Any]:
        """Rows that were read stay."""
        return {**self.__dict__, "_block": None}

    def __len__(self) -> int:
        """Rows."""
        return len(self._dataset)

    def schema(self) -> Schema:
        """Fields of every sample."""
        return {field.name: field.field for field in self._fields}

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one row; no field has time.

        Raises:
            SourceError: Damaged data, or a null; names row and column.
            IndexError: No such number.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} does not exist: this source has {len(self)}")
        first = number // RUN * RUN
        where = self.locate(number)
        try:
            if self._block is None or self._block[0] != first:
                self._block = (first, self._dataset[first : first + RUN])
            return sample_of(self._block[1], number - first, self._fields, where=where)
        except FOREIGN_ERRORS as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{where} cannot be read ({type(error).__name__}: {error})") from error

    def locate(self, number: int) -> str:
        """The row."""
        return f"{self!r}: row {number}"

    def runs(self) -> Sequence[range]:
        """Rows that are taken together."""
        return [range(first, min(first + RUN, len(self))) for first in range(0, len(self), RUN)]

    def keys(self) -> Sequence[str]:
        """Row numbers."""
        return [str(number) for number in range(len(self))]

    def identity(self) -> SourceIdentity:
        """The dataset's fingerprint, and which columns are read."""
        digest = hashlib.sha256(self._fingerprint.encode()).hexdigest()
        part = Part(name="dataset", count=len(self), digest=digest)
        settings: dict[str, Json] = {"columns": [list(field.path) for field in self._fields]}
        return SourceIdentity(kind=f"datasets/{VERSION}", parts=(part,), settings=settings)
