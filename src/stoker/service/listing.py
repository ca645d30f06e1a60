"""Which jobs a list shows and in which order, and the tags of jobs.

The database filters, sorts and counts. It finds the numbers of a page first, and then reads the rows of that
page. A row has the configuration of its job, and a sort of complete rows would move all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import sqlalchemy as sa

from stoker.errors import ConfigError
from stoker.service.database import DATASETS, JOBS, State

Sort = Literal[
    "created", "-created", "name", "-name", "state", "-state", "loss", "-loss", "duration", "-duration"
]
"""Orders of a list; with `-` the largest, the newest or the last of the alphabet comes first."""
SORTS: tuple[Sort, ...] = get_args(Sort)
NEWEST: Sort = "-created"
SORT_LABELS: Mapping[Sort, str] = MappingProxyType(
    {
        "-created": "Newest",
        "created": "Oldest",
        "name": "Name, A to Z",
        "-name": "Name, Z to A",
        "state": "State",
        "loss": "Best loss",
        "-duration": "Longest",
        "duration": "Shortest",
    }
)
"""The orders that the form of the list offers; the head of its table has the others as well."""
MAX_TAGS = 10
TAG_LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs a list shows; without arguments all of them, the newest first."""

    text: str = ""
    """In the name, a tag, the reason of a failure or the name of a data set, or at the start of the id."""
    states: frozenset[State] = frozenset()
    """In one of these states; empty: in any."""
    kind: str | None = None
    """`training` or `generation`."""
    dataset: str | None = None
    """Id or name of a data set that the jobs use."""
    tags: tuple[str, ...] = ()
    """All of these tags."""
    sort: Sort = NEWEST

    @property
    def is_everything(self) -> bool:
        """Return True if every job is shown."""
        return not (self.text or self.states or self.kind or self.dataset or self.tags)


def condition(chosen: JobFilter) -> sa.ColumnElement[bool]:
    """Return the condition for the jobs of a filter."""
    tags, used = sa.type_coerce(JOBS.c.tags, sa.Text), sa.cast(JOBS.c.dataset_ids, sa.Text)
    parts: list[sa.ColumnElement[bool]] = []
    if chosen.states:
        parts.append(JOBS.c.state.in_(tuple(chosen.states)))
    if chosen.kind:
        parts.append(JOBS.c.kind == chosen.kind)
    parts += [tags.contains(f"\n{tag}\n", autoescape=True) for tag in chosen.tags]
    if chosen.dataset:
        id, name = DATASETS.c.id, DATASETS.c.name
        named = sa.select(id).where(name == chosen.dataset).scalar_subquery()
        # An id is a UUID: no character of it is special in LIKE or escaped in JSON.
        parts.append(sa.or_(used.contains(f'"{chosen.dataset}"', autoescape=True), used.contains(named)))
    if text := chosen.text.strip():
        of_dataset = sa.exists().where(
            DATASETS.c.name.icontains(text, autoescape=True), used.contains(DATASETS.c.id)
        )
        parts.append(
            sa.or_(
                JOBS.c.name.icontains(text, autoescape=True),
                JOBS.c.error.icontains(text, autoescape=True),
                tags.icontains(text, autoescape=True),
                JOBS.c.id.istartswith(text, autoescape=True),
                of_dataset,
            )
        )
    return sa.and_(sa.true(), *parts)


def elapsed(wall: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    """Return the seconds that workers had a job, up to now; as `Job.elapsed_s`."""
    return JOBS.c.worked_s + sa.func.coalesce(wall - JOBS.c.taken, 0.0)


def order(sort: Sort, wall: sa.ColumnElement[float]) -> Sequence[sa.ColumnElement[object]]:
    """Return the columns of an order; jobs without a value come last, and the newest of equal ones first.

    Args:
        sort: The order.
        wall: `Database.wall`.
    """
    counts = sa.or_(JOBS.c.taken.is_not(None), JOBS.c.ended.is_not(None))  # as `views.took`
    took = sa.case((sa.and_(JOBS.c.started.is_not(None), counts), elapsed(wall)))
    columns: Mapping[str, sa.ColumnElement[object]] = {
        "created": JOBS.c.number,
        "name": sa.func.lower(JOBS.c.name),
        "state": JOBS.c.state,
        "loss": JOBS.c.best_val_loss,
        "duration": took,
    }
    column = columns[sort.removeprefix("-")]
    first = column.desc() if sort.startswith("-") else column.asc()
    if sort.removeprefix("-") in ("loss", "duration"):
        first = first.nulls_last()
    return (first, JOBS.c.number.desc())


def check_tags(tags: Iterable[str]) -> list[str]:
    """Return tags in order, each once.

    >>> check_tags(["night", " baseline ", "night"])
    ['baseline', 'night']

    Raises:
        ConfigError: There are too many, or one is empty, too long, or has a comma or a hidden character.
    """
    found = sorted({tag.strip() for tag in tags})
    for tag in found:
        if not 1 <= len(tag) <= TAG_LENGTH or not tag.isprintable() or "," in tag:
            raise ConfigError(
                f"the tag {tag[:TAG_LENGTH]!r} ({len(tag)} characters) cannot be used",
                hint=f"Expected 1 to {TAG_LENGTH} printable characters without commas",
            )
    if len(found) > MAX_TAGS:
        raise ConfigError(f"{len(found)} tags are given", hint=f"Expected at most {MAX_TAGS} of a job")
    return found
