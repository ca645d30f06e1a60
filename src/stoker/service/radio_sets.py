"""Sets of radio rows in a database, as the registry looks at them: figures and a few rows, never all."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from stoker.errors import SourceError
from stoker.pipeline.radio_store import COLUMNS, SETS
from stoker.schema import Json
from stoker.sources.sql.address import parse_address
from stoker.sources.sql.sqlite import connect_read_only

STATEMENT_MS = 20_000
"""Somebody waits for the answer."""
NEEDED = (
    "recording_session_id", "receiver_features", "tx_latitude", "tx_longitude", "gdop", "mean_snr_db",
    "num_receivers_detected", "num_receivers_in_sample", "timestamp", "dataset_id",
)  # fmt: skip
"""Columns that training, its bounds and the report of health read."""
SHOWN = (
    "recording_session_id", "timestamp", "tx_latitude", "tx_longitude", "mean_snr_db",
    "num_receivers_detected", "gdop",
)  # fmt: skip
"""Columns of a row as it is shown."""
MOST_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioSet:
    """The rows of one data set in a table.

    Raises:
        SourceError: The database does not answer, or there is no such table; names neither user nor password.
    """

    url: str
    table: str
    set: str
    """Its UUID, as rows have it in `dataset_id`."""

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> RadioSet:
        """The rows that the `spec` of a registered data set names."""
        return cls(url=spec["url"], table=spec["table"], set=spec["set"])

    def rows(self) -> int:
        """How many there are."""
        table = self._table()
        query = sa.select(sa.func.count()).select_from(table).where(self._own(table))
        with self._connected() as connection:
            return int(connection.execute(query).scalar_one())

    def facts(self) -> dict[str, Json]:
        """Figures over all rows."""
        table = self._table()
        c, f = table.c, sa.func
        nowhere = sa.or_(c.tx_latitude.is_(None), c.tx_longitude.is_(None))
        outside = sa.or_(sa.func.abs(c.tx_latitude) > 90, sa.func.abs(c.tx_longitude) > 180)
        query = sa.select(
            f.count().label("rows"),
            f.sum(sa.case((nowhere, 1), else_=0)).label("without_place"),
            f.sum(sa.case((outside, 1), else_=0)).label("place_out_of_range"),
            f.sum(sa.case((c.gdop.is_(None), 1), else_=0)).label("without_gdop"),
            f.min(c.mean_snr_db).label("least_snr_db"),
            f.max(c.mean_snr_db).label("most_snr_db"),
            f.min(c.gdop).label("least_gdop"),
            f.max(c.gdop).label("most_gdop"),
            f.min(c.num_receivers_in_sample).label("least_receivers"),
            f.max(c.num_receivers_in_sample).label("most_receivers"),
            f.min(c.timestamp).label("first"),
            f.max(c.timestamp).label("last"),
        ).where(self._own(table))
        with self._connected() as connection:
            row = connection.execute(query).mappings().one()
        return {name: _plain(value) for name, value in row.items()}

    def missing_columns(self) -> list[str]:
        """Columns of `NEEDED` that the table lacks."""
        schema, _, name = self.table.rpartition(".")
        with self._connected() as connection:
            try:
                found = {one["name"] for one in sa.inspect(connection).get_columns(name, schema or None)}
            except exc.NoSuchTableError as error:
                raise SourceError(f"{self._where} has no table {self.table}. Check its name") from error
        return [name for name in NEEDED if name not in found]

    def samples(self, limit: int, offset: int) -> list[dict[str, Json]]:
        """Some rows in the order of their keys."""
        table = self._table()
        query = (
            sa.select(*(table.c[name] for name in SHOWN))
            .where(self._own(table))
            .order_by(table.c.recording_session_id)
            .limit(min(limit, MOST_SHOWN))
            .offset(offset)
        )
        with self._connected() as connection:
            rows = connection.execute(query).mappings().all()
        return [{name: _plain(value) for name, value in row.items()} for row in rows]

    def is_noted(self, rows: int) -> bool:
        """Whether a set that is generated is complete: it is noted in the transaction of its rows."""
        sets = sa.table(SETS, sa.column("id", self._id_type()), sa.column("num_samples"))
        query = sa.select(sets.c.num_samples).where(sets.c.id == self._id())
        try:
            with self._connected() as connection:
                return connection.execute(query).scalar() == rows
        except SourceError:
            return False

    @property
    def _is_sqlite(self) -> bool:
        return parse_address(self.url).kind == "sqlite"

    @property
    def _where(self) -> str:
        return parse_address(self.url).shown

    def _id_type(self) -> sa.types.TypeEngine[Any]:
        return sa.Text() if self._is_sqlite else sa.Uuid()

    def _id(self) -> Any:
        return self.set if self._is_sqlite else uuid.UUID(self.set)

    def _table(self) -> sa.TableClause:
        schema, _, name = self.table.rpartition(".")
        columns = [sa.column(column) for column in COLUMNS if column != "dataset_id"]
        own = sa.column("dataset_id", self._id_type())
        return sa.table(name, *columns, own, schema=schema or None)

    def _own(self, table: sa.TableClause) -> sa.ColumnElement[bool]:
        return table.c.dataset_id == self._id()

    @contextmanager
    def _connected(self) -> Generator[sa.Connection]:
        """A connection that reads only, for one look."""
        address = parse_address(self.url)
        if address.kind == "sqlite":
            path = Path(address.target).absolute()
            if not path.is_file():
                raise SourceError(f"{address.shown}: no such file. Expected a SQLite database")
            # Opened here: a URL of SQLAlchemy would decode the path once more.
            engine = sa.create_engine(
                "sqlite://", creator=lambda: connect_read_only(path), poolclass=sa.NullPool
            )
        else:
            limits = f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}"
            options = f"{limits} -c default_transaction_read_only=on"
            engine = sa.create_engine(
                sa.make_url(address.target).set(drivername="postgresql+psycopg"),
                connect_args={
                    "connect_timeout": 5,
                    "options": options,
                },
                poolclass=sa.NullPool,
            )
        try:
            with engine.connect() as connection:
                yield connection
        except exc.DBAPIError as error:
            text = address.hide(str(error.orig).strip().partition("\n")[0])
            raise SourceError(f"{address.shown}: {text}. Check the database and the table") from None
        finally:
            engine.dispose()


def _plain(value: Any) -> Json:
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float) else str(value)
