"""Bring the tables of a database up to the version that this code uses, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sqlalchemy as sa

from stoker.errors import ConfigError, FormatError
from stoker.service.schema import COUNTERS, JOBS, META, METADATA, VERSION

_LOCK = (
    0x73746F6B  # any number: PostgreSQL's own lock, so that two who start at once do this one after the other
)
STEPS: Mapping[int, Callable[[sa.Connection], None]] = {}
"""How to get from a version to the next; the first release has none."""


def bring_up_to_date(connection: sa.Connection, boot: str) -> None:
    """Make what is missing and end the leases that were taken by a clock that no longer runs.

    Args:
        connection: In a transaction that writes.
        boot: `Database.boot()`.

    Raises:
        FormatError: The tables are of a newer version than this code knows.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    METADATA.create_all(connection, tables=[META, COUNTERS])
    found = _value(connection, "version")
    if found is not None and int(found) > VERSION:
        raise FormatError(
            f"the service's database has tables of version {found}; this version of stoker knows {VERSION}. "
            "Use the stoker that wrote it, or a newer one"
        )
    for version in range(int(found or VERSION), VERSION):
        STEPS[version](connection)
    METADATA.create_all(connection)
    if found is None:
        connection.execute(COUNTERS.insert().values(name="event", value=0))
    if found != str(VERSION):
        _set(connection, "version", str(VERSION))
    if _value(connection, "boot") != boot:
        connection.execute(JOBS.update().where(JOBS.c.lease_until.is_not(None)).values(lease_until=-1.0))
        connection.execute(JOBS.update().values(not_before=0.0))
        _set(connection, "boot", boot)


def _value(connection: sa.Connection, name: str) -> str | None:
    return connection.execute(sa.select(META.c.value).where(META.c.name == name)).scalar()


def _set(connection: sa.Connection, name: str, value: str) -> None:
    changed = connection.execute(META.update().where(META.c.name == name).values(value=value))
    if not changed.rowcount:
        connection.execute(META.insert().values(name=name, value=value))


def claim_folder(connection: sa.Connection, folder: str) -> None:
    """Bind the database to a state folder, known by `folder`, the first time; later see that it is the same.

    Raises:
        ConfigError: It is another one.
    """
    found = _value(connection, "folder")
    if found is None:
        _set(connection, "folder", folder)
    elif found != folder:
        raise ConfigError(
            "the database belongs to a service with another state folder: its jobs have their checkpoints "
            "there. Start the service with that folder, or with a database of its own"
        )
