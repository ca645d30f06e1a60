"""The data sets that jobs may name: registered where they are, or made by the service.

The registry keeps where a data set is and what was found there, never the data. Looking at it is done by
another process (`probes.py`): neither a damaged file nor dead storage harms the service.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field

from stoker.errors import ConfigError, ConflictError, NotFoundError
from stoker.plugins import load_extension
from stoker.schema import Json
from stoker.service.database import DATASETS, ENDED, JOBS, Database, State
from stoker.service.security import DataAccess
from stoker.sources.sql.query import has_password, parse_database_url, sqlite_url

# ----------------------------------------------------------------------------------------------------------
# What a data set is registered or generated with.


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


MADE = "made"
"""The check of a report that says whether a data set of the service was made."""
ACCESS = "access"
"""The check of a report that says whether the service may read a data set since this start."""
MAKER_S = 60.0
"""How long after it was noted a data set may have no job that makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One data set as it stood at one moment. Times are unix seconds by the database's clock."""

    id: str
    name: str
    kind: str
    """`radio`, `hdf5` or `images`."""
    origin: str
    """`registered` or `generated`."""
    spec: dict[str, Json]
    """Where it is and how it is opened; of a generated one also what it is made of."""
    facts: dict[str, Json]
    """What was found there: `samples` and more, by kind."""
    health: str
    """Of the last check: `unknown`, `making`, `good`, `doubtful`, `bad`."""
    report: list[dict[str, Json]]
    """Rows of that check: `check`, `status` (pass, warn, fail) and `detail`."""
    created: float
    checked: float | None


_FIELDS = tuple(DATASETS.c[field.name] for field in fields(Dataset))


class Datasets:
    """The data sets of a service.

    Args:
        database: Where they are listed.
        data: Folder of those that the service makes.
        check_path: Gives the real path of one that a request names, or refuses it (`paths.Roots.check`).
        probe: See `probes.probe`.
        access: What may be read since this start. Data sets that were registered under an earlier one stay,
            and are looked at if it allows them.
    """

    def __init__(
        self,
        database: Database,
        data: Path,
        check_path: Callable[[str], Path],
        *,
        probe: Callable[..., Any],
        access: DataAccess,
    ) -> None:
        self._database = database
        self._data = data.absolute()
        self._check_path = check_path
        self._probe = probe
        self._access = access

    def register(self, request: Registration) -> Dataset:
        """Take up a data set that is there; again with the same request: the same answer.

        Raises:
            ConfigError: The URL holds a password or is none.
            PathRefusedError: The path is outside the roots.
            SourceError: There is no such data, or not of this kind.
            Conflict: The name, or the set of rows, is registered as something else.
        """
        spec: dict[str, Any]
        if isinstance(request, RadioRows):
            id = str(request.set)
            spec = {"url": self._checked_url(request.url), "table": request.table, "set": id}
        else:
            id, spec = str(uuid.uuid4()), {"path": str(self._check_path(request.path))}
        facts: dict[str, Json] = self._probe("facts", request.kind, spec)
        if facts.pop("named_splits", False):
            spec["named_splits"] = True
        return self._insert(id, request.name, request.kind, "registered", spec, facts, "unknown")

    def generate(self, request: Generation) -> Dataset:
        """Note a data set that is to be made; the job that makes it names it in its `dataset_ids`.

        Raises:
            Conflict: The name, or the very same set, is there as something else.
        """

        made_of: dict[str, Json] = request.model_dump(mode="json", exclude={"name", "kind"})
        spec: dict[str, Any]
        if isinstance(request, GenerateRadio):
            radio = load_extension("service.radio")
            id = str(radio.RadioSpec(**request.model_dump(exclude={"name", "kind"})).dataset_id)
            url = sqlite_url(self._data / "radio.db")
            spec, count = {"url": url, "table": radio.TABLE, "set": id}, request.rows
        else:
            settings = sorted(made_of.items())
            id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"stoker-burgers-1 {settings}"))
            spec, count = {"path": str(self._data / f"{id}.hdf5")}, request.trajectories
        facts: dict[str, Json] = {"samples": count}
        return self._insert(
            id, request.name, request.kind, "generated", {**spec, "make": made_of}, facts, "making"
        )

    def get(self, id: str) -> Dataset:
        """One data set, by its id or its name.

        Raises:
            NotFound: There is none.
        """
        return self.resolve([id])[0]

    def list(self, *, kind: str | None = None, limit: int = 50, offset: int = 0) -> list[Dataset]:
        """Data sets of a kind or of any, the newest first."""
        query = sa.select(*_FIELDS).order_by(DATASETS.c.created.desc(), DATASETS.c.id)
        if kind is not None:
            query = query.where(DATASETS.c.kind == kind)
        with self._database.reading() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).mappings().all()
            found = _settled(self._database, connection, [Dataset(**row) for row in rows])
        return [self._as_allowed(one) for one in found]

    def count(self, kind: str | None = None) -> int:
        """How many there are of a kind, or of any."""
        query = sa.select(sa.func.count()).select_from(DATASETS)
        if kind is not None:
            query = query.where(DATASETS.c.kind == kind)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one()

    def resolve(self, ids: Sequence[str]) -> list[Dataset]:
        """The data sets that a job names by id or by name, in that order.

        Raises:
            NotFound: Some are not registered; all of them are named.
        """
        with self._database.reading() as connection:
            return [self._as_allowed(one) for one in _found(self._database, connection, ids)]

    def check_access(self, dataset: Dataset) -> None:
        """Refuse a data set that the service may not read since this start; errors as `DataAccess.check`."""
        self._access.check(dataset.spec)

    def inspect(self, id: str) -> Dataset:
        """One data set with figures as they are now; one that was being made is `unknown` once it is there.

        Raises:
            NotFound: There is none.
            SourceError: The data cannot be read any more.
            PathRefusedError, ConfigError: It may not be read since this start.
        """
        dataset = self.get(id)
        facts: dict[str, Json] = self._look_at("facts", dataset)
        facts.pop("named_splits", None)
        health = "unknown" if dataset.health == "making" else dataset.health
        return self._update(dataset.id, {"facts": facts, "health": health})

    def checked(self, id: str) -> Dataset:
        """Return a data set with a report of its health as it is now, and store nothing.

        Raises:
            NotFound: There is none.
            SourceError, StalledError: The data cannot be read at all.
            PathRefusedError, ConfigError: It may not be read since this start.
        """
        dataset = self.get(id)
        report: list[dict[str, Json]] = self._look_at("check", dataset)
        states = {str(row["status"]) for row in report}
        health = "bad" if "fail" in states else "doubtful" if "warn" in states else "good"
        return replace(dataset, report=report, health=health)

    def validate(self, id: str) -> Dataset:
        """Return a data set with a new report of its health, which is kept. Errors as `checked`."""
        found = self.checked(id)
        values = {"report": found.report, "health": found.health, "checked": self._database.wall}
        return self._update(found.id, values)

    def samples(self, id: str, *, limit: int = 20, offset: int = 0) -> list[dict[str, Json]]:
        """Some samples, as people look at them.

        Raises:
            NotFound: There is none.
            SourceError, StalledError: The data cannot be read.
            PathRefusedError, ConfigError: It may not be read since this start.
        """
        return self._look_at("samples", self.get(id), limit=limit, offset=offset)

    def delete(self, id: str) -> None:
        """Forget a data set. What the service made is removed with it, what was registered stays where it is.

        Raises:
            NotFound: There is none.
            Conflict: A job that has not ended names it.
        """
        with self._database.writing() as connection:
            (dataset,) = _found(self._database, connection, [id])
            query = sa.select(JOBS.c.id, JOBS.c.dataset_ids).where(JOBS.c.state.not_in(tuple(ENDED)))
            users = [row.id for row in connection.execute(query) if dataset.id in row.dataset_ids]
            if users:
                raise ConflictError(
                    f"data set {dataset.name!r} is needed by job {users[0]}"
                    f"{f' and {len(users) - 1} more' if len(users) > 1 else ''}. Cancel it first, or wait"
                )
            connection.execute(DATASETS.delete().where(DATASETS.c.id == dataset.id))
        if dataset.origin == "generated":
            self._probe("remove", dataset.kind, dataset.spec)

    def _checked_url(self, url: str) -> str:
        if has_password(url):
            raise ConfigError(
                "the database's URL holds a password, which is not kept here. Put it in ~/.pgpass of the "
                "service's user"
            )
        address = parse_database_url(url)
        if address.kind == "sqlite":
            return sqlite_url(self._check_path(address.target))
        self._access.check_server(url)
        return url

    def _look_at(self, what: str, dataset: Dataset, **given: Any) -> Any:
        self.check_access(dataset)
        return self._probe(what, dataset.kind, dataset.spec, **given)

    def _as_allowed(self, dataset: Dataset) -> Dataset:
        """The data set, `bad` with the reason where it may not be read since this start."""
        why = self._access.why_not(dataset.spec)
        if why is None:
            return dataset
        row: dict[str, Json] = {"check": ACCESS, "status": "fail", "detail": why}
        return replace(dataset, health="bad", report=[row])

    def _insert(  # noqa: PLR0913, PLR0917 - the columns
        self,
        id: str,
        name: str,
        kind: str,
        origin: str,
        spec: dict[str, Json],
        facts: dict[str, Json],
        health: str,
    ) -> Dataset:
        same = {"name": name, "kind": kind, "origin": origin, "spec": spec}
        made = (
            self._database.insert(DATASETS)
            .values(id=id, facts=facts, health=health, report=[], created=self._database.wall, **same)
            .on_conflict_do_nothing()
            .returning(*_FIELDS)
        )
        with self._database.writing() as connection:
            row = connection.execute(made).mappings().one_or_none()
            if row is None:
                there = sa.or_(DATASETS.c.id == id, DATASETS.c.name == name)
                row = connection.execute(sa.select(*_FIELDS).where(there)).mappings().first()
        if row is None:
            raise ConflictError(f"data set {name!r} was deleted while it was made. Ask again")
        found = Dataset(**row)
        if any(getattr(found, field) != value for field, value in same.items()):
            what = "is there under another name" if found.id == id else "is the name of another data set"
            raise ConflictError(
                f"{name!r} {what}: {found.name!r} ({found.id}). Use that one, or another name"
            )
        return found

    def _update(self, id: str, values: Mapping[str, Any]) -> Dataset:
        change = DATASETS.update().where(DATASETS.c.id == id).values(**values).returning(*_FIELDS)
        with self._database.writing() as connection:
            row = connection.execute(change).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"data set {id} was deleted meanwhile")
        return Dataset(**row)


def describe(database: Database, ids: Sequence[str]) -> list[dict[str, Json]]:
    """Data sets as a job's process is told of them, in the order of `ids`.

    Raises:
        NotFound: Some are not registered any more; all of them are named.
    """
    with database.reading() as connection:
        return [
            {"id": one.id, "name": one.name, "kind": one.kind, "spec": one.spec, "health": one.health}
            for one in _found(database, connection, ids)
        ]


def unmade(dataset: Dataset) -> str | None:
    """Return why a data set that the service was to make is not there; None where it is, or may still be."""
    rows = (row for row in dataset.report if row["check"] == MADE and row["status"] == "fail")
    return next((str(row["detail"]) for row in rows), None)


def _settled(database: Database, connection: sa.Connection, datasets: list[Dataset]) -> list[Dataset]:
    """Return data sets as they are: one whose job has ended is not being made."""
    if not any(one.health == "making" for one in datasets):
        return datasets
    now = connection.execute(sa.select(database.wall)).scalar_one()
    return [_as_made(connection, one, now) if one.health == "making" else one for one in datasets]


def _as_made(connection: sa.Connection, dataset: Dataset, now: float) -> Dataset:
    query = (
        sa.select(JOBS.c.id, JOBS.c.state)
        .where(JOBS.c.kind == "generation", JOBS.c.key.startswith(f"make {dataset.id} "))
        .order_by(JOBS.c.number.desc())
        .limit(1)
    )
    maker = connection.execute(query).first()
    if maker is None and now - dataset.created < MAKER_S:
        return dataset  # the request that notes it makes the job next
    if maker is not None and State(maker.state) not in ENDED:
        return dataset
    fact = "the job that was to make it is gone" if maker is None else f"job {maker.id} was {maker.state}"
    cure = "Delete the data set and make it again"
    if maker is not None:
        cure = "Resume that job, or delete the data set"
    row: dict[str, Json] = {"check": MADE, "status": "fail", "detail": f"not made: {fact}. {cure}"}
    return replace(dataset, health="bad", report=[row])


def _found(database: Database, connection: sa.Connection, ids: Sequence[str]) -> list[Dataset]:
    wanted = sa.or_(DATASETS.c.id.in_(ids), DATASETS.c.name.in_(ids))
    found = connection.execute(sa.select(*_FIELDS).where(wanted)).mappings().all()
    rows = _settled(database, connection, [Dataset(**row) for row in found])
    by_key = {one.name: one for one in rows} | {one.id: one for one in rows}
    if missing := [id for id in ids if id not in by_key]:
        raise NotFoundError(
            f"no data set is registered as {', '.join(missing)}. GET /api/v1/training/datasets lists them"
        )
    return [by_key[id] for id in ids]
