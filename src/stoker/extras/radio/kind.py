"""Radio rows of a database as a kind of data of the service: read, checked, generated and trained on."""

from __future__ import annotations

import datetime
import sqlite3
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy as sa
from sqlalchemy import exc

from stoker.errors import SourceError, StalledError, docs_url
from stoker.extras.radio.demo import (
    COLUMNS,
    TABLE,
    RadioSpec,
    Triangulation,
    TriangulationModel,
    radio_columns,
    radio_where,
    remove_radio,
    write_radio,
)
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import Json
from stoker.service.kinds import READ, Kind, Reading, Spec, check_row
from stoker.sources.sql.databases import connect_read_only, driver
from stoker.sources.sql.query import parse_database_url, sqlite_url
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.run.fitting import Learner
    from stoker.run.precompute import CacheResult
    from stoker.service.job_config import JobConfig
    from stoker.service.journal import Journal
    from stoker.service.runs import Facts, JobRun

STATEMENT_MS = 20_000
"""Timeout of a statement, since a user waits for the answer."""
NEEDED = (
    "recording_session_id", "receiver_features", "tx_latitude", "tx_longitude", "gdop", "mean_snr_db",
    "num_receivers_detected", "num_receivers_in_sample", "timestamp", "dataset_id",
)  # fmt: skip
"""Columns that training, its limits and the report of health read."""
SHOWN = (
    "recording_session_id", "timestamp", "tx_latitude", "tx_longitude", "mean_snr_db",
    "num_receivers_detected", "gdop",
)  # fmt: skip
"""Columns that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioSet:
    """The rows of one data set in a table.

    Raises:
        SourceError: The database does not answer, or the table does not exist. Names no user or password.
    """

    url: str
    table: str
    set: str
    """Its UUID, as rows have it in `dataset_id`."""

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> RadioSet:
        """Return the rows of the `spec` of a data set."""
        return cls(url=spec["url"], table=spec["table"], set=spec["set"])

    def rows(self) -> int:
        """Return the number of rows."""
        table = self._table()
        query = sa.select(sa.func.count()).select_from(table).where(self._own(table))
        with self._connected() as connection:
            return int(connection.execute(query).scalar_one())

    def facts(self) -> dict[str, Json]:
        """Return figures over all rows."""
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
        """Return columns of `NEEDED` that the table lacks."""
        schema, _, name = self.table.rpartition(".")
        with self._connected() as connection:
            try:
                found = {one["name"] for one in sa.inspect(connection).get_columns(name, schema or None)}
            except exc.NoSuchTableError as error:
                raise SourceError(
                    f"{self._where} has no table {self.table}", hint="Check its name"
                ) from error
        return [name for name in NEEDED if name not in found]

    def samples(self, limit: int, offset: int) -> list[dict[str, Json]]:
        """Return some rows in the order of their keys."""
        table = self._table()
        query = (
            sa.select(*(table.c[name] for name in SHOWN))
            .where(self._own(table))
            .order_by(table.c.recording_session_id)
            .limit(limit)
            .offset(offset)
        )
        with self._connected() as connection:
            rows = connection.execute(query).mappings().all()
        return [{name: _plain(value) for name, value in row.items()} for row in rows]

    @property
    def _is_sqlite(self) -> bool:
        return parse_database_url(self.url).kind == "sqlite"

    @property
    def _where(self) -> str:
        return parse_database_url(self.url).shown

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
        """Open a read-only connection."""
        address = parse_database_url(self.url)
        if address.kind == "sqlite":
            path = Path(address.target).absolute()
            if not path.is_file():
                raise SourceError(f"{address.shown}: no such file", hint="Expected a SQLite database")
            # Opened here, since a URL of SQLAlchemy would decode the path a second time.
            engine = sa.create_engine(
                "sqlite://", creator=lambda: connect_read_only(path), poolclass=sa.NullPool
            )
        else:
            limits = f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}"
            options = f"{address.options.get('options', '')} {limits} -c default_transaction_read_only=on"
            psycopg = driver()
            engine = sa.create_engine(
                "postgresql+psycopg://",
                # What was read from the URL: SQLAlchemy would read it in another way.
                creator=lambda: psycopg.connect(address.target, connect_timeout=5, options=options.strip()),
                poolclass=sa.NullPool,
            )
        try:
            with engine.connect() as connection:
                yield connection
        except exc.DBAPIError as error:
            text = address.hide(str(error.orig).strip().partition("\n")[0])
            raise SourceError(f"{address.shown}: {text}", hint="Check the database and the table") from None
        finally:
            engine.dispose()


def _plain(value: Any) -> Json:
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def facts(spec: Spec) -> dict[str, Json]:
    """Return figures over all rows.

    Raises:
        SourceError: The table lacks a column, or has no rows of the data set.
    """
    own = RadioSet.of(spec)
    if missing := own.missing_columns():
        raise SourceError(
            f"table {own.table} has no column {', '.join(missing)}",
            hint=f"Expected the measurements that {docs_url('how-to/sql')} describes",
        )
    found = own.facts()
    if not found["rows"]:
        raise SourceError(f"table {own.table} has no rows of data set {own.set}", hint="Check the id")
    return {"samples": found.pop("rows"), **found}


def check(spec: Spec, reading: Reading) -> list[dict[str, Json]]:
    """Return a report over all rows, by figures that the database computes."""
    del reading
    found: dict[str, Any] = RadioSet.of(spec).facts()
    count = found["rows"]
    rows = [
        check_row("rows", "pass" if count else "fail", f"{format_count(count)} rows"),
        check_row(READ, "pass", f"{format_count(count)} of {format_count(count)} rows"),
    ]
    for name, what in (
        ("without_place", "without the transmitter's place"),
        ("place_out_of_range", "with an invalid place on the earth"),
    ):
        bad = found[name] or 0
        rows.append(check_row(name, "fail" if bad else "pass", f"{format_count(bad)} rows {what}"))
    bad = found["without_gdop"] or 0
    told = f"{format_count(bad)} rows without gdop, which count as 50"
    rows.append(check_row("gdop", "warn" if bad else "pass", told))
    most = found["most_receivers"] or 0
    told = f"{found['least_receivers']} to {most} receivers a row"
    if most > 7:
        told += f"; a job takes 7 unless it has max_receivers={most}"
    rows.append(check_row("receivers", "warn" if most > 7 else "pass", told))
    snr = f"mean signal to noise {found['least_snr_db']} to {found['most_snr_db']} dB"
    return [*rows, check_row("signal", "pass", snr)]


def samples(spec: Spec, limit: int, offset: int, *, pictures: bool = False) -> list[dict[str, Json]]:
    """Return some rows; there are no pictures of them."""
    del pictures
    return RadioSet.of(spec).samples(limit, offset)


def remove(spec: Spec) -> None:
    """Remove the rows of a generated data set."""
    remove_radio(str(spec["url"]), str(spec["set"]))


def settings(config: JobConfig, datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where the rows are, and the rules by which they become samples."""
    spec: Mapping[str, Any] = datasets[0]["spec"]
    sets = [str(one["spec"]["set"]) for one in datasets]
    return {
        "data.kind": "sql",
        "data.task": "radio",
        "data.sql.url": spec["url"],
        "data.sql.table": spec["table"],
        "data.sql.key": "recording_session_id",
        "data.sql.columns": radio_columns(config.max_receivers),
        "data.sql.where": radio_where(sets, min_snr_db=config.min_snr_db, max_gdop=config.max_gdop),
    }


@contextmanager
def _named_limits(config: JobConfig) -> Generator[None]:
    """Have an error of a job whose limits leave no row name these limits, not the condition in SQL."""
    try:
        yield
    except SourceError as error:
        _, found, dropped = error.fact.partition(" drops all ")
        limits = {"min_snr_db": config.min_snr_db, "max_gdop": config.max_gdop}
        given = ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
        if not found or not given:
            raise
        raise SourceError(f"{given}: drops all {dropped}", hint="Clone the job with a looser limit") from None


def train(run: JobRun) -> dict[str, Any]:
    """Train a network that says where a transmitter is, and how sure that is; return the results, by name."""
    from stoker.run.fitting import one_thread
    from stoker.service.runs import train_records

    with one_thread(), _named_limits(run.config):
        return train_records(
            run, _rows_learner, architecture="triangulation", figures=("rmse_m", "p50_m", "p68_m", "p95_m")
        )


def _rows_learner(run: JobRun, caches: Sequence[CacheResult]) -> tuple[Learner, Facts, Facts]:
    from stoker.service.runs import source_of
    from stoker.sources.sql.source import SQLSource

    source = source_of(caches[0])
    if not isinstance(source, SQLSource):
        raise SourceError(f"{caches[0].name} is not made of the rows of a database")
    model = TriangulationModel(dropout=run.config.dropout_rate)
    model.set_statistics(source.statistics)
    told = {"dropped": _dropped(run, caches), "database": source.where_it_is}
    return Triangulation(model), {"statistics": dict(source.statistics)}, told


def _dropped(run: JobRun, caches: Sequence[CacheResult]) -> int:
    """Return how many rows of the data sets `min_snr_db` and `max_gdop` leave out."""
    datasets = cast("Sequence[Mapping[str, Any]]", run.job.datasets)
    there = sum(RadioSet.of(one["spec"]).rows() for one in datasets)
    return max(0, there - sum(one.count for one in caches))


PROGRESS_S = 1.0
WAIT_S = 3600.0
"""Timeout of waiting for another job that writes to the same database."""


def generate(spec: Spec, journal: Journal) -> bool:
    """Generate the rows unless they exist; return True if they had to be made.

    Raises:
        StalledError: Another job locked the database for too long.
    """
    wanted, path = RadioSpec(**spec["make"]), Path(parse_database_url(str(spec["url"])).target)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_folder(path.parent, "generate") as free:
        if not free:
            journal.tell("progress", {"message": f"waits for {lock_holder(path.parent, 'generate')}"})
    with lock_folder(path.parent, "generate", timeout_s=WAIT_S) as free:
        if not free:
            raise StalledError(
                f"{path} was locked by {lock_holder(path.parent, 'generate')} for {WAIT_S:g} s",
                hint="See its job",
            )
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # jobs read while other sets are written
        return write_radio(path, wanted, _RowProgress(journal, wanted.rows).tell)


class _RowProgress:
    """Writes the progress of the generation to the journal, about each second."""

    def __init__(self, journal: Journal, rows: int) -> None:
        self._journal, self._rows = journal, rows
        self._due = 0.0

    def tell(self, number: int) -> None:
        """Write it if that is due."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + PROGRESS_S
        message = f"{format_count(number)} of {format_count(self._rows, 'row')} are made"
        self._journal.tell("progress", {"message": message, "progress": number / self._rows})


def place(name: str, made_of: Mapping[str, Any], data: Path) -> tuple[str, dict[str, Json], int]:
    """Return id, spec and number of rows of a data set to generate."""
    wanted = RadioSpec(name=name, **made_of)
    id, url = str(wanted.dataset_id), sqlite_url(data / "radio.db")
    spec: dict[str, Json] = {"url": url, "table": TABLE, "set": id, "make": {**made_of, "name": name}}
    return id, spec, wanted.rows


RADIO = Kind(
    facts=facts,
    check=check,
    samples=samples,
    settings=settings,
    train=train,
    place=place,
    generate=generate,
    remove=remove,
)
"""The table of the kind `radio`."""
