"""The tables of the service, the same on SQLite and PostgreSQL.

Times named `created`, `started`, `ended` and `at` are unix seconds by the database's wall clock and are only
shown. Times named `lease_until` and `not_before` are seconds of `Database.lease_clock` and are only compared.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.engine import Dialect

from stoker.service.states import State

VERSION = 1
"""Version of these tables; `upgrade.py` knows the way from every earlier one."""
METADATA = MetaData()
"""Every table of the service; other modules add theirs here."""


class Real(TypeDecorator[float]):
    """A double that comes back as a float: SQLite answers 1 where 1.0 was stored."""

    impl = Double
    cache_ok = True

    def process_result_value(self, value: float | None, dialect: Dialect) -> float | None:
        """See the class."""
        return None if value is None else float(value)


_COUNTER = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up by itself in INTEGER alone

JOBS = Table(
    "jobs",
    METADATA,
    Column("number", _COUNTER, primary_key=True, autoincrement=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("key", String(200), unique=True),
    Column("digest", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("state", String(12), nullable=False),
    Column("config", JSON, nullable=False),
    Column("dataset_ids", JSON, nullable=False),
    Column("parent", String(36)),
    Column("created", Real, nullable=False),
    Column("started", Real),
    Column("ended", Real),
    Column("worker", String(100)),
    Column("attempt", Integer, nullable=False, default=0),
    Column("losses", Integer, nullable=False, default=0),
    Column("lease_until", Real),
    Column("not_before", Real, nullable=False, default=0.0),
    Column("position", BigInteger, nullable=False, default=0),
    Column("epoch", Integer, nullable=False, default=0),
    Column("epochs", Integer, nullable=False),
    Column("progress", Real, nullable=False, default=0.0),
    Column("message", Text, nullable=False, default=""),
    Column("train_loss", Real),
    Column("val_loss", Real),
    Column("best_val_loss", Real),
    Column("best_epoch", Integer),
    Column("learning_rate", Real),
    Column("stall", Real),
    Column("tier", String(20)),
    Column("checkpoint", Text),
    Column("error", Text),
    Column("exit_code", Integer),
    CheckConstraint("state IN ({})".format(", ".join(f"'{state}'" for state in State)), name="known_state"),
    CheckConstraint("kind IN ('training', 'generation')", name="known_kind"),
    Index("jobs_by_state", "state", "number"),
    sqlite_autoincrement=True,
)
"""A row a job. `attempt` counts claims and is the fencing token; `losses` counts attempts that ended without
a result since the last epoch; `position` is how far the worker has read in the job's `events.jsonl`."""

METRICS = Table(
    "metrics",
    METADATA,
    Column("job", String(36), ForeignKey(JOBS.c.id, ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("at", Real, nullable=False),
    Column("data", JSON, nullable=False),
)
"""A row an epoch; an epoch that is trained again after a crash replaces its row."""

EVENTS = Table(
    "events",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("job", String(36), nullable=False),
    Column("kind", String(12), nullable=False),
    Column("at", Real, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_of_job", "job", "number"),
)
"""What happened, in the order in which it was committed; pruned by age and count."""

COUNTERS = Table(
    "counters",
    METADATA,
    Column("name", String(20), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`event`: the number given last."""

META = Table(
    "meta",
    METADATA,
    Column("name", String(20), primary_key=True),
    Column("value", Text, nullable=False),
)
"""`version` of the tables; `boot` of the machine that the lease clock belongs to."""
