"""The table of registered data sets."""

from __future__ import annotations

from sqlalchemy import JSON, CheckConstraint, Column, String, Table

from stoker.service.schema import METADATA, Real

DATASETS = Table(
    "datasets",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("kind", String(12), nullable=False),
    Column("origin", String(12), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("health", String(12), nullable=False),
    Column("report", JSON, nullable=False),
    Column("created", Real, nullable=False),
    Column("checked", Real),
    CheckConstraint("kind IN ('radio', 'hdf5', 'images')", name="known_dataset_kind"),
    CheckConstraint("health IN ('unknown', 'making', 'good', 'doubtful', 'bad')", name="known_health"),
)
"""A row a data set. `spec` says where it is and how to open it, `facts` what was found there, `report` the
rows of the last check; times are unix seconds by the database's wall clock."""
