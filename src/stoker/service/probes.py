"""Read facts, checks and samples of data sets in a separate process (`probe`).

A damaged file can crash the library that reads it, and storage can stop answering. Neither must affect the
service, so it waits for the process up to a timeout and then kills it.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import sqlalchemy as sa
from sqlalchemy import exc

from stoker import errors
from stoker.errors import SourceError, StalledError, StokerError, docs_url
from stoker.plugins import load_extension
from stoker.runtime.processes.child import TORCH, Child
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.heartbeat import anonymous_file
from stoker.schema import Json, schema_to_json
from stoker.service.connections import use_password
from stoker.service.security import data_paths
from stoker.sources.files import confine_sources, find_files, split_of
from stoker.sources.protocol import Source
from stoker.sources.splits import DEFAULT_SPLITS
from stoker.sources.sql.databases import connect_read_only
from stoker.sources.sql.query import parse_database_url
from stoker.units import format_count

TIMEOUT_S = 60.0
MODULES = (*TORCH, "stoker.service.probes")
"""Modules that are imported before the process starts."""
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 4096


def probe(
    what: str, kind: str, spec: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S, **given: Any
) -> Any:
    """Return the result of a function of `PROBES` from another process.

    Args:
        what: Name of the function.
        kind, spec: Of the data set.
        timeout_s: How long it may take.
        given: Further arguments of the function; and `password`, of the connection of the spec's URL.

    Raises:
        SourceError: The data is invalid, or reading it crashed the process.
        StalledError: It took too long.
    """
    until = time.monotonic() + timeout_s
    request = json.dumps({"what": what, "kind": kind, "spec": dict(spec), **given})
    output = anonymous_file("stoker-probe")
    try:
        child = Child(
            "stoker.service.probes:serve", what="a process to read data", payload=request.encode(),
            output=output, modules=MODULES,
        )  # fmt: skip
        try:
            said = _answer_of(child, until)
        finally:
            child.stop(0.0)
            child.close()
        last = os.pread(output, _TAIL_BYTES, max(0, os.fstat(output).st_size - _TAIL_BYTES))
    finally:
        os.close(output)
    if said is None:
        raise StalledError(
            f"reading {_shown(spec)} took more than {timeout_s:g} s and was ended. The storage or the "
            "database does not answer, or the data set is very large"
        )
    try:
        answer = cast("dict[str, Any]", json.loads(said))
    except ValueError:
        line = last.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise SourceError(
            f"reading {_shown(spec)} crashed its process: it {child.exit}: {line}. The data may be damaged"
        ) from None
    if "error" in answer:
        of_class: type[StokerError] = getattr(errors, str(answer.get("class")), SourceError)
        raise of_class(str(answer["error"]), hint=str(answer["hint"]))
    return answer["found"]


def _answer_of(child: Child, until: float) -> bytes | None:
    """Return all output of a process up to its end; None if it does not end in time."""
    pieces: list[bytes] = []
    try:
        while True:
            child.socket.settimeout(max(0.001, until - time.monotonic()))
            piece = child.socket.recv(_PIECE_BYTES)
            if not piece:
                break
            pieces.append(piece)
    except TimeoutError:
        return None
    except ConnectionError:
        pass  # it was killed
    return b"".join(pieces) if child.wait(max(0.0, until - time.monotonic())) else None


def _shown(spec: Mapping[str, Any]) -> str:
    return parse_database_url(str(spec["url"])).shown if "url" in spec else str(spec.get("path", ""))


def serve(connection: Connection) -> None:
    """Answer the request of `probe` in the process that it started."""
    request: dict[str, Any] = json.loads(connection.payload)
    use_password(request.pop("password", None))
    confine_sources(data_paths([request["spec"], *(one["spec"] for one in request.get("datasets", ()))]))
    answer: dict[str, Json]
    try:
        answer = {"found": PROBES[request.pop("what")](request.pop("kind"), request.pop("spec"), **request)}
    except StokerError as error:
        answer = {"error": error.fact, "hint": error.hint, "class": type(error).__name__}
    connection.socket.sendall(json.dumps(answer).encode())


# ----------------------------------------------------------------------------------------------------------
# Sets of radio rows in a database: figures and a few rows, never all.


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
MOST_SHOWN = 100


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
            .limit(min(limit, MOST_SHOWN))
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
        known = load_extension("service.radio").COLUMNS
        columns = [sa.column(column) for column in known if column != "dataset_id"]
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
            raise SourceError(f"{address.shown}: {text}", hint="Check the database and the table") from None
        finally:
            engine.dispose()


def _plain(value: Any) -> Json:
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float) else str(value)


_READ = 8
"""Number of samples that a check reads, spread over the data set."""
Spec = Mapping[str, Any]


def facts(kind: str, spec: Spec) -> dict[str, Json]:
    """Return figures of a data set, only from headers and names.

    Raises:
        SourceError: It cannot be opened, or is not a data set of its kind.
    """
    if kind == "radio":
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
    _refuse_links(Path(str(spec["path"])))
    source = _source(kind, spec)
    common: dict[str, Json] = {"samples": len(source), "fields": schema_to_json(source.schema())}
    classes = getattr(source, "classes", ())
    if kind == "images":
        if len(classes) < 2:
            raise SourceError(
                f"{spec['path']} has {len(classes)} folders of images",
                hint="Expected two or more, one per class",
            )
        common["classes"] = list(classes)
    return {**common, "named_splits": _named_splits(kind, spec)}


def check(kind: str, spec: Spec) -> list[dict[str, Json]]:
    """Return one row per check: `check`, `status` (pass, warn, fail) and `detail`."""
    return _check_radio(RadioSet.of(spec)) if kind == "radio" else _check_samples(_source(kind, spec), kind)


def samples(kind: str, spec: Spec, limit: int = 20, offset: int = 0) -> list[dict[str, Json]]:
    """Return some samples in a readable form."""
    if kind == "radio":
        return RadioSet.of(spec).samples(limit, offset)
    source = _source(kind, spec)
    numbers = range(offset, min(offset + min(limit, MOST_SHOWN), len(source)))
    keys = source.keys()
    return [{"number": number, "key": keys[number]} for number in numbers]


def remove(kind: str, spec: Spec) -> None:
    """Remove a generated data set."""
    if kind == "radio":
        load_extension("service.radio").remove_radio(str(spec["url"]), str(spec["set"]))
    else:
        Path(str(spec["path"])).unlink(missing_ok=True)


def plan(
    _kind: str,
    _spec: Spec,
    *,
    config: Mapping[str, Any],
    datasets: Sequence[Mapping[str, Any]],
    caches: str,
    run_dir: str,
) -> dict[str, Json]:
    """Return where the records of a job would be served from, without encoding anything.

    Raises:
        StokerError: The data cannot be read, or no plan fits.
    """
    from stoker.run.context import Run
    from stoker.run.plan import plan_config
    from stoker.service.job_config import JobConfig, settings_of

    wanted = JobConfig.model_validate(dict(config))
    settings = settings_of(wanted, datasets, caches=caches, run_dir=run_dir, epochs=wanted.epochs)
    return plan_config(Run(settings)).to_json()


PROBES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"facts": facts, "check": check, "samples": samples, "remove": remove, "plan": plan}
)


def _source(kind: str, spec: Spec) -> Source:
    if kind == "images":
        from stoker.sources.images import ImageSource

        return ImageSource(spec["path"], "folder", (64, 64))
    from stoker.sources.hdf5 import HDF5Source

    return HDF5Source(spec["path"])


def _named_splits(kind: str, spec: Spec) -> bool:
    """Return True if the data names its training and validation parts."""
    if kind == "images":
        from stoker.sources.images import split_folders

        return bool(split_folders(Path(str(spec["path"]))))
    root, paths = find_files(str(spec["path"]))
    return all(split_of(str(path.relative_to(root)), DEFAULT_SPLITS) for path in paths)


def _refuse_links(path: Path) -> None:
    """Refuse a folder with links that lead out of it."""
    root = path.resolve()
    for entry in root.rglob("*") if root.is_dir() else ():
        if entry.is_symlink() and not entry.resolve().is_relative_to(root):
            raise SourceError(f"{entry} is a link that leads out of {path}", hint="Put the file itself there")


def _check_radio(own: RadioSet) -> list[dict[str, Json]]:
    found: dict[str, Any] = own.facts()
    count = found["rows"]
    rows = [_row("rows", "pass" if count else "fail", f"{format_count(count)} rows")]
    for name, what in (
        ("without_place", "without the transmitter's place"),
        ("place_out_of_range", "with an invalid place on the earth"),
    ):
        bad = found[name] or 0
        rows.append(_row(name, "fail" if bad else "pass", f"{format_count(bad)} rows {what}"))
    bad = found["without_gdop"] or 0
    told = f"{format_count(bad)} rows without gdop, which count as 50"
    rows.append(_row("gdop", "warn" if bad else "pass", told))
    most = found["most_receivers"] or 0
    told = f"{found['least_receivers']} to {most} receivers a row"
    if most > 7:
        told += f"; a job takes 7 unless it has max_receivers={most}"
    rows.append(_row("receivers", "warn" if most > 7 else "pass", told))
    snr = f"mean signal to noise {found['least_snr_db']} to {found['most_snr_db']} dB"
    return [*rows, _row("signal", "pass", snr)]


def _check_samples(source: Source, kind: str) -> list[dict[str, Json]]:
    count = len(source)
    rows = [_row("samples", "pass", format_count(count, "sample"))]
    if kind == "images":
        keys = source.keys()
        names: Counter[str] = Counter(key.split("/")[-2] for key in keys if "/" in key)
        least = min(names.values(), default=0)
        told = ", ".join(f"{name} {format_count(n)}" for name, n in islice(names.most_common(), 10))
        rows.append(_row("classes", "pass" if least > 1 else "warn", told))
    bad: list[str] = []
    for number in sorted({round(n * (count - 1) / (_READ - 1)) for n in range(_READ)}):
        try:
            sample = source.read(number)
        except SourceError as error:
            bad.append(str(error))
            continue
        for name, value in sample.items():
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                bad.append(f"sample {number}: {name} holds a NaN or an infinity")
    told = "; ".join(bad[:3]) or "the samples that were read are complete and finite"
    return [*rows, _row("content", "fail" if bad else "pass", told)]


def _row(check: str, status: str, detail: str) -> dict[str, Json]:
    return {"check": check, "status": status, "detail": detail}
