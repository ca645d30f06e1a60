"""Values for the templates: what pages show of jobs, charts, caches and settings."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from stoker.config.names import all_settings
from stoker.errors import NotFoundError
from stoker.service.database import ENDED_STATES, HELD_STATES, WAITING_STATES, Event, State
from stoker.service.datasets import Dataset
from stoker.service.job_config import (
    MAX_IMAGE_SIDE,
    SETTINGS,
    UNUSED_FIELDS,
    WITHOUT_EFFECT,
    JobConfig,
)
from stoker.service.jobs import KINDS, Job
from stoker.service.kinds import IMAGE_SIZE, READ
from stoker.service.listing import MAX_TAGS, NEWEST, SORTS, JobFilter
from stoker.service.models import utc
from stoker.service.services import Services
from stoker.store.storage import NOTED_EVERY_S
from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.service.listing import Sort

PACE_EPOCHS = 6
"""Last epochs that tell how long the others take."""
USERS = 100
"""Newest jobs of a data set that are shown, and of all that are searched for users of a cache."""
LEAST_PROGRESS = 0.02
"""Part of the job that must be done before the time left is told, while there are no two epochs."""
WIDTH, HEIGHT = 96, 24
"""Size of a spark line in its own units."""
ACTIONS: tuple[tuple[str, str, frozenset[State]], ...] = (
    ("pause", "Pause", WAITING_STATES | {State.RUNNING}),
    ("resume", "Resume", frozenset({State.PAUSED, State.CANCELLED, State.FAILED})),
    ("cancel", "Cancel", WAITING_STATES | {State.RUNNING, State.PAUSING, State.PAUSED}),
)
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str, float], ...]], ...] = (
    ("Loss", "", (("train_loss", "training", 1), ("val_loss", "validation", 1))),
    ("Validation error", "m", (("p50_m", "median", 1), ("p95_m", "95 %", 1), ("rmse_m", "rmse", 1))),
    ("Validation error", "", (("val_nrmse", "NRMSE", 1), ("persistence_nrmse", "persistence", 1))),
    ("Validation accuracy", "%", (("accuracy", "accuracy", 100),)),
    ("Learning rate", "", (("learning_rate", "rate", 1), ("lr", "rate", 1))),
    ("Stall and GPU", "%", (("stall", "stall", 100), ("gpu_utilization_pct", "GPU busy", 1))),
)
"""Title, unit, and lines: name in a row of metrics, label and factor."""
BETTER: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("train_loss", "val_loss", "p50_m", "p95_m", "rmse_m", "val_nrmse"), "lower"),
        "accuracy": "higher",
    }
)
"""Whether the lower or the higher of two figures is the better one; of others neither is."""
BRIEF_STATES = frozenset({State.PENDING, State.PAUSING, State.CANCELLING})
"""States of a moment."""
COLUMNS: tuple[tuple[str, str | None, bool], ...] = (
    ("Job", "name", False), ("State", "state", False), ("Progress", None, False), ("Loss", None, True),
    ("Best", "loss", True), ("Trend", None, False), ("Stall", None, True), ("Tier", None, False),
    ("Duration", "-duration", True), ("Created", "-created", True),
)  # fmt: skip
"""Columns of the list of jobs: label, order of its first click, and whether it has numbers."""
TIERS = ("device", "host", "disk", "encode")
KIND_LABELS: Mapping[str, str] = MappingProxyType(
    {"radio": "radio rows", "hdf5": "simulations", "images": "images"}
)
IMAGE_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "data.images.size": f"[height, width] of images, each a whole number from 1 to {MAX_IMAGE_SIDE}.",
        "data.images.fit": "How an image is brought to that size: stretch or letterbox.",
    }
)
"""Meaning of settings that take less in a job than in docs/reference/config.md."""
FIRST_FIELDS = ("dataset_ids", "epochs", "batch_size", "learning_rate", "preload_to_gpu")
"""Fields of the form that are visible at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One part of a bar; position and width are in thousandths of the bar."""

    label: str
    text: str
    kind: str
    """Selects the color."""
    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """One setting of a new job."""

    name: str
    """As in `JobConfig`; a member of `settings` as `settings.model.width`."""
    label: str
    about: str
    kind: str
    """`number`, `integer`, `boolean`, `choice`, `text`, `list`, or `setting`: JSON or else text."""
    value: Any
    default: str = ""
    """Of a member of `settings`: shown while the field is empty."""
    choices: tuple[str, ...] = ()
    lowest: float | None = None
    highest: float | None = None
    kinds: tuple[str, ...] = ()
    """Kinds of data sets that it applies to; empty: all."""


def actions(job: Job) -> list[tuple[str, str]]:
    """Return the actions that a job allows now: the end of the address and the label of the button."""
    return [(name, words) for name, words, states in ACTIONS if job.state in states]


FILTER_NAMES = frozenset({"q", "status", "kind", "dataset", "tag", "sort"})
"""Parts of the address of a list of jobs, the same as of `GET /jobs`."""


def filter_of(pairs: Sequence[tuple[str, str]]) -> JobFilter:
    """Return the filter in an address; a part without a value, as an empty field of a form, is left out.

    Raises:
        NotFoundError: A value is not one of those that exist.
    """
    given = {name: [value for key, value in pairs if key == name and value] for name in FILTER_NAMES}
    last = {name: values[-1] for name, values in given.items() if values}
    kind, sort = last.get("kind"), last.get("sort", NEWEST)
    known = kind in (None, *KINDS) and sort in SORTS and all(state in [*State] for state in given["status"])
    if not known:
        raise NotFoundError("nothing is at this address", hint="See the list of jobs")
    return JobFilter(
        text=last.get("q", "")[:200], states=frozenset(map(State, given["status"])), kind=kind,
        dataset=last.get("dataset"), tags=tuple(dict.fromkeys(given["tag"]))[:MAX_TAGS],
        sort=cast("Sort", sort),
    )  # fmt: skip


def query_of(which: JobFilter, number: int = 1) -> str:
    """Return a filter and the number of a page as the query of an address; empty for all jobs.

    >>> query_of(JobFilter(text="a b", states=frozenset({State.QUEUED}), sort="loss"), 2)
    'q=a+b&status=queued&sort=loss&number=2'
    """
    states = [state.value for state in State if state in which.states]
    single = {"q": which.text, "kind": which.kind, "dataset": which.dataset}
    sort = None if which.sort == NEWEST else which.sort
    parts = {**single, "sort": sort, "number": number if number > 1 else None}
    pairs = {"q": parts.pop("q"), "status": states, "tag": [*which.tags], **parts}
    return urlencode({name: value for name, value in pairs.items() if value}, doseq=True)


def list_link(which: JobFilter, number: int = 1, **changes: Any) -> str:
    """Return the address of the list of a filter with changes."""
    query = query_of(replace(which, **changes), number)
    return f"/?{query}" if query else "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChip:
    """A state in the filter of the list; its link adds it, or takes it away."""

    name: str
    count: int
    is_on: bool
    href: str


def state_chips(which: JobFilter, counts: Mapping[State, int]) -> list[StateChip]:
    """Return the states to filter by; those of a moment only while a job is in them."""
    shown = [one for one in State if counts[one] or one in which.states or one not in BRIEF_STATES]
    return [
        StateChip(
            name=one.value, count=counts[one], is_on=one in which.states,
            href=list_link(which, states=which.states ^ {one}),
        )
        for one in shown
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnHead:
    """The head of a column of the list."""

    label: str
    is_number: bool
    href: str | None
    """Sorts by this column; None: it cannot be sorted by."""
    direction: str | None
    """`ascending` or `descending` if the list is sorted by it."""


def column_heads(which: JobFilter) -> list[ColumnHead]:
    """Return the heads of the list: a link sorts by its column, a second click the other way."""
    return [_head(which, *column) for column in COLUMNS]


def _head(which: JobFilter, label: str, sort: str | None, is_number: bool) -> ColumnHead:
    if sort is None:
        return ColumnHead(label=label, is_number=is_number, href=None, direction=None)
    name = sort.removeprefix("-")
    direction = {name: "ascending", f"-{name}": "descending"}.get(which.sort)
    if direction:
        sort = name if which.sort.startswith("-") else f"-{name}"
    return ColumnHead(label=label, is_number=is_number, href=list_link(which, sort=sort), direction=direction)


def took(job: Job, now: float) -> str:
    """Return how long workers had a job that has ended or runs; the time between attempts is not counted."""
    if job.started is None or (job.ended is None and job.taken is None):
        return "–"
    return format_seconds(job.elapsed_s(now))


def tone(state: State) -> str:
    """Return the color of a state: `busy`, `wait`, `good`, `bad` or `off`."""
    if state in HELD_STATES:
        return "busy"
    tones = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "off"}
    return tones.get(state, "wait")


def is_live(job: Job) -> bool:
    """Return True if a job may change without a request."""
    return job.state not in ENDED_STATES and job.state is not State.PAUSED


def bar(values: Sequence[tuple[str, float, str, str]]) -> list[BarPart]:
    """Return the parts of a bar for values, each a label, an amount, its text and a kind.

    >>> [(part.label, part.x, part.width) for part in bar([("a", 1, "1 s", "k"), ("b", 3, "3 s", "k")])]
    [('a', 0.0, 250.0), ('b', 250.0, 750.0)]
    """
    total = sum(value for _, value, _, _ in values)
    parts: list[BarPart] = []
    x = 0.0
    for label, value, text, kind in values:
        width = 1000 * value / total if total else 0.0
        parts.append(BarPart(label=label, text=text, kind=kind, x=round(x, 2), width=round(width, 2)))
        x += width
    return parts


def tier_bar(started: Event | None) -> list[BarPart]:
    """Return records by tier, from the `started` event of a job."""
    return tier_parts(started.data.get("tiers") if started else None)


def tier_parts(tiers: object) -> list[BarPart]:
    """Return records by tier as parts of a bar; empty unless `tiers` is a mapping."""
    if not isinstance(tiers, Mapping):
        return []
    held = [(tier, float(str(tiers.get(tier) or 0))) for tier in TIERS]
    return bar([(tier, count, format_count(count, "record"), tier) for tier, count in held if count])


def expected_stall(plan: Mapping[str, Any]) -> str:
    """Return the stall of a plan as text, or the shortest step that does not wait.

    >>> expected_stall({"predicted_stall": None, "no_stall_step_s": 0.002})
    'none at steps of 2 ms or longer'
    """
    if (stall := plan.get("predicted_stall")) is not None:
        low, high = plan.get("predicted_stall_low"), plan.get("predicted_stall_high")
        likely = "" if low is None or high is None else f" ({format_percent(low)} to {format_percent(high)})"
        return f"{format_percent(stall)}{likely}"
    if (step_s := plan.get("no_stall_step_s")) is not None:
        return f"none at steps of {format_seconds(step_s)} or longer"
    return "not known until all records are encoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarJob:
    """A job on the same data."""

    id: str
    name: str
    batch_size: int | None


def similar_job(services: Services, config: JobConfig) -> tuple[SimilarJob | None, float | None]:
    """Return a job on the same data that has finished epochs, and the seconds that one takes.

    The newest with the same batch size, else the newest.
    """
    found: tuple[SimilarJob, float] | None = None
    wanted = services.datasets.resolve(config.dataset_ids)
    words = {word for one in wanted for word in (one.id, one.name)}
    for job in services.jobs.list(JobFilter(kind="training", dataset=wanted[0].id), limit=USERS):
        is_same = len(job.dataset_ids) == len(wanted) and words.issuperset(job.dataset_ids)
        if job.epoch < 1 or not is_same:
            continue
        after = max(0, job.epoch - PACE_EPOCHS)
        rows = cast(
            "Sequence[Mapping[str, Any]]", services.jobs.metrics(job.id, limit=PACE_EPOCHS, after=after)
        )
        took = [row["seconds"] + (row.get("eval_seconds") or 0.0) for row in rows if row.get("seconds")]
        if took:
            size = cast("Any", job.config.get("batch_size"))
            one = SimilarJob(id=job.id, name=job.name, batch_size=size), sum(took) / len(took)
            if size == config.batch_size:
                return one
            found = found or one
    return found or (None, None)


def spark(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the points of a line through the losses of a job's epochs, newest last; empty below two losses.

    >>> spark([{"train_loss": 2.0}, {"train_loss": 1.0}])
    '0.0,2.0 96.0,22.0'
    """
    values = [row.get("val_loss", row.get("train_loss")) for row in rows]
    known = [float(value) for value in values if isinstance(value, int | float)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span, step = (high - low) or 1.0, WIDTH / (len(known) - 1)
    room = HEIGHT - 4
    return " ".join(f"{i * step:.1f},{2 + room * (high - one) / span:.1f}" for i, one in enumerate(known))


def charts() -> list[dict[str, Any]]:
    """Return what the script of a page may draw; it leaves out lines without a number in any row."""
    return [
        {
            "title": title,
            "unit": unit,
            "series": [{"name": name, "label": label, "factor": factor} for name, label, factor in lines],
        }
        for title, unit, lines in CHARTS
    ]


def run_of(job: Job, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the script of a page draws of a job: its rows of metrics, its start and its best epoch."""
    began = job.created if job.started is None else job.started
    return {"name": job.name, "rows": rows, "began": began, "best": job.best_epoch, "loss": job.best_val_loss}


def charts_by_quantity() -> list[dict[str, Any]]:
    """Return the charts of `charts` with one quantity each, for a line per job."""
    found: list[dict[str, Any]] = []
    for chart in charts():
        labels = [*dict.fromkeys(line["label"] for line in chart["series"])]
        for label in labels:
            title = chart["title"] if len(labels) == 1 else f"{chart['title']}, {label}"
            series = [line for line in chart["series"] if line["label"] == label]
            found.append({"title": title, "unit": chart["unit"], "series": series})
    return found


def differences(
    configs: Sequence[Mapping[str, Any]], kinds: Sequence[str | None]
) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all configurations: name, and the text in each.

    Args:
        configs: The configurations.
        kinds: Kind of data of each; a field without an effect on it is an en dash. None: it is not known.

    >>> differences([{"seed": 0, "settings": {"a": 1}}, {"seed": 0, "settings": {}}], ["hdf5", "hdf5"])
    [('settings.a', ['1', 'default'])]
    """
    each = [dict(flat({**config, "settings": config.get("settings") or {}})) for config in configs]
    for one in each:
        one.pop("settings", None)
    names = dict.fromkeys(name for one in each for name in one)
    rows = [(name, [one.get(name, "default") for one in each]) for name in names]
    return [
        (name, [text if has_effect(name, kind) else "–" for text, kind in zip(texts, kinds, strict=True)])
        for name, texts in rows
        if len(set(texts)) > 1
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of one of several jobs."""

    text: str
    is_best: bool = False
    """Better than that of another job, and worse than none."""


def outcomes(
    jobs: Sequence[Job], rows: Sequence[Sequence[Mapping[str, Any]]], *, same_caches: bool = True
) -> list[tuple[str, list[Figure]]]:
    """Return what came of jobs: name of a figure, and that of each job; the best loss comes first.

    Figures of `CHARTS` are those of the best epoch, or of the last without validation.

    Args:
        jobs: The jobs.
        rows: Metrics of each.
        same_caches: False: losses are of different inputs, so none is the best.
    """
    losses = [job.best_val_loss if job.best_epoch else None for job in jobs]
    texts = [
        f"{number(job.best_val_loss)} in epoch {job.best_epoch}" if job.best_epoch else "–" for job in jobs
    ]
    kept = [
        next((row for row in of_job if row["epoch"] == job.best_epoch), of_job[-1] if of_job else {})
        for job, of_job in zip(jobs, rows, strict=True)
    ]
    found = [("Best validation loss", _ranked(losses, texts, "lower" if same_caches else None))]
    for chart in charts_by_quantity():
        values = [
            next((row[one["name"]] * one["factor"] for one in chart["series"] if _is_number(row, one)), None)
            for row in kept
        ]
        if any(value is not None for value in values):
            unit = f" ({chart['unit']})" if chart["unit"] else ""
            better = next((BETTER[one["name"]] for one in chart["series"] if one["name"] in BETTER), None)
            better = better if same_caches or chart["unit"] else None
            found.append((chart["title"] + unit, _ranked(values, [*map(number, values)], better)))
    took = ["–" if job.started is None or job.ended is None else format_seconds(job.worked_s) for job in jobs]
    epochs = [f"{job.epoch} of {job.epochs}" for job in jobs]
    rest = [("Epochs", epochs), ("Duration", took), ("Tier", [job.tier or "–" for job in jobs])]
    return [*found, *((name, [Figure(text=text) for text in texts]) for name, texts in rest)]


def _ranked(values: Sequence[float | None], texts: Sequence[str], better: str | None) -> list[Figure]:
    """Return figures with the best marked, to the digits that are shown."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    shown = {number(value) for value in known}
    best = number(max(known) if better == "higher" else min(known)) if better and len(shown) > 1 else None
    return [
        Figure(text=text, is_best=best is not None and number(value) == best)
        for value, text in zip(values, texts, strict=True)
    ]


def _is_number(row: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    return isinstance(row.get(line["name"]), int | float)


def thinned(rows: Sequence[Mapping[str, Any]], best: int | None, most: int) -> list[Mapping[str, Any]]:
    """Return about `most` of the rows, evenly, with the first, the last and that of the epoch `best`.

    >>> [row["epoch"] for row in thinned([{"epoch": n} for n in range(1, 10)], 6, 4)]
    [1, 4, 6, 7, 9]
    """
    step = max(1, -(-len(rows) // most))
    last = len(rows) - 1
    return [row for i, row in enumerate(rows) if i % step == 0 or i == last or row["epoch"] == best]


def figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a data set as names and texts; fields with shape and dtype.

    >>> figures({"samples": 4030, "fields": {"u": {"shape": [101, 256], "dtype": "float32"}}})
    [('samples', '4,030'), ('field u', '101 × 256, float32')]
    """
    rest = {name: value for name, value in facts.items() if name != "fields"}
    shapes = {
        f"field {name}": f"{' × '.join(map(str, field['shape'])) or 'a number'}, {field['dtype']}"
        for name, field in facts.get("fields", {}).items()
    }
    return [(name.replace("_", " "), _figure(value)) for name, value in rest.items()] + [*shapes.items()]


def read_by_check(report: Sequence[Mapping[str, Any]]) -> str:
    """Return which samples a check has read, in words; empty if the report does not say."""
    return next((f"{row['detail']} read" for row in report if row["check"] == READ), "")


HISTOGRAM_BINS = 12


def histograms(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a histogram for each column of numbers: bars in a box of 120 by 32, and the same in words.

    >>> (one,) = histograms([{"snr": 1.0, "name": "a"}, {"snr": 2.0, "name": "b"}, {"snr": 2.0, "name": "c"}])
    >>> one["name"], one["text"], [bar["height"] for bar in one["bars"]]
    ('snr', '1 to 2, median 2', [16.0, 32.0])
    """
    found: list[dict[str, Any]] = []
    for name in rows[0] if rows else ():
        values = sorted(
            float(row[name])
            for row in rows
            if isinstance(row[name], int | float)
            and not isinstance(row[name], bool)
            and math.isfinite(row[name])
        )
        if len(values) < 2 or values[0] == values[-1]:
            continue
        width = (values[-1] - values[0]) / HISTOGRAM_BINS
        counts = Counter(min(int((value - values[0]) / width), HISTOGRAM_BINS - 1) for value in values)
        most = max(counts.values())
        bars = [
            {
                "x": at * 120 / HISTOGRAM_BINS,
                "width": 120 / HISTOGRAM_BINS - 1,
                "y": 32 - 32 * count / most,
                "height": 32 * count / most,
            }
            for at, count in sorted(counts.items())
        ]
        text = f"{number(values[0])} to {number(values[-1])}, median {number(values[len(values) // 2])}"
        found.append({"name": name, "text": text, "bars": bars, "rows": len(values)})
    return found


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_of(value)
    return format_count(value) if isinstance(value, int) else number(value)


LABELS: Mapping[str, str] = MappingProxyType(
    {
        "dataset_ids": "Data set",
        "epochs": "Epochs",
        "batch_size": "Batch size",
        "learning_rate": "Learning rate",
        "preload_to_gpu": "Keep data on the GPU",
        "num_workers": "Workers",
        "validation_split": "Validation split",
        "weight_decay": "Weight decay",
        "dropout_rate": "Dropout",
        "lr_scheduler": "Learning rate schedule",
        "warmup_epochs": "Warmup epochs",
        "early_stop_patience": "Early stopping patience",
        "early_stop_delta": "Early stopping minimum delta",
        "max_grad_norm": "Gradient clipping",
        "accelerator": "Device",
        "min_snr_db": "Minimum SNR (dB)",
        "max_gdop": "Maximum GDOP",
        "max_receivers": "Maximum receivers",
        "seed": "Seed",
    }
)
"""Labels of the fields of `JobConfig` in the form of a new job."""
NOT_OFFERED = frozenset({"model_architecture", "settings"})
"""Fields of `JobConfig` that the form lacks: the data decides on one, the other has a field per name."""


def form_fields(values: Mapping[str, Any]) -> tuple[list[FormField], list[FormField]]:
    """Return the settings of a new job that have an effect: the visible ones, and the others.

    Args:
        values: Settings to begin with, as those of another job; the rest has its default values.
    """
    schema = JobConfig.model_json_schema()
    found = {
        name: _form_field(name, spec, values.get(name, spec.get("default")))
        for name, spec in schema["properties"].items()
        if name not in WITHOUT_EFFECT and name not in NOT_OFFERED
    }
    first = [found.pop(name) for name in FIRST_FIELDS]
    return first, list(found.values())


def _form_field(name: str, spec: Mapping[str, Any], value: Any) -> FormField:
    kinds = [one for one in spec.get("anyOf", [spec]) if one.get("type") != "null"]
    chosen = kinds[0]
    kind = str(chosen.get("type", "text"))
    choices = tuple(str(one) for one in chosen.get("enum", ()))
    return FormField(
        name=name,
        label=LABELS[name],
        about=str(spec.get("description", "")),
        kind="choice" if choices else {"array": "list", "string": "text"}.get(kind, kind),
        value=value,
        choices=choices,
        lowest=chosen.get("minimum", chosen.get("exclusiveMinimum")),
        highest=chosen.get("maximum"),
        kinds=kinds_of(name),
    )


def settings_fields(values: Mapping[str, Any], *, encoders: bool) -> list[FormField]:
    """Return the members of `settings` for each kind of data; an empty field keeps the default.

    Args:
        values: Settings to begin with.
        encoders: True if the operator allowed encoders.
    """
    kinds: dict[str, list[str]] = {}
    for kind, names in SETTINGS.items():
        for name in names:
            if encoders or name not in ("encoder.target", "encoder.arguments"):
                kinds.setdefault(name, []).append(kind)
    return [_settings_field(name, tuple(of), values) for name, of in kinds.items()]


def _settings_field(name: str, kinds: tuple[str, ...], values: Mapping[str, Any]) -> FormField:
    setting = all_settings()[name]
    default = [*IMAGE_SIZE] if name == "data.images.size" else setting.default
    about = IMAGE_TEXTS.get(name, f"{setting.text} Expected {setting.expects}.")
    return FormField(
        name=f"settings.{name}",
        label=name,
        about=about.replace("`", ""),
        kind="setting",
        value=_as_typed(values[name]) if name in values else "",
        default=_as_typed(default),
        kinds=kinds,
    )


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def dataset_label(dataset: Dataset) -> str:
    """Return a data set as a choice: its name, kind and size."""
    samples = dataset.facts.get("samples")
    size = format_count(samples, "sample") if isinstance(samples, int) else "size unknown"
    state = ", being generated" if dataset.health == "making" else ""
    return f"{dataset.name} ({KIND_LABELS[dataset.kind]}, {size}{state})"


def kinds_of(field: str) -> tuple[str, ...]:
    """Return the kinds of data sets that a field of `JobConfig` applies to; empty if it applies to all.

    >>> kinds_of("max_gdop"), kinds_of("epochs")
    (('radio',), ())
    """
    kinds = tuple(kind for kind, unused in UNUSED_FIELDS.items() if field not in unused)
    return () if len(kinds) == len(UNUSED_FIELDS) else kinds


def has_effect(field: str, kind: str | None) -> bool:
    """Return True if a field of `JobConfig` has an effect on a kind of data; all have if that is None.

    >>> has_effect("max_gdop", "images"), has_effect("max_gdop", "radio")
    (False, True)
    """
    return field not in WITHOUT_EFFECT and field not in UNUSED_FIELDS.get(kind or "", ())


def number(value: float | None) -> str:
    """Return a figure with four significant digits, large ones to the unit, or an en dash for None.

    >>> number(0.123456), number(None), number(1234567.0), number(2e12)
    ('0.1235', '–', '1,234,567', '2e+12')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def text_of(value: Any) -> str:
    """Return a value of a setting, a recipe or a sample as text; an en dash where it is empty.

    >>> [text_of(one) for one in (True, None, {}, ["a", 1], {"a": None}, 0.001)]
    ['yes', '–', '–', 'a, 1', '{"a": null}', '0.001']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, dict | list | tuple) and not value):
        return "–"
    if isinstance(value, list | tuple) and not any(isinstance(one, dict | list | tuple) for one in value):
        return ", ".join(map(text_of, value))
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def ago(seconds: float) -> str:
    """Return a time span as text.

    >>> ago(0.2), ago(75), ago(7300), ago(200_000)
    ('now', '75 s ago', '2 h 1 min ago', '2 days ago')
    """
    if seconds < 1:
        return "now"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days ago"
    return f"{format_seconds(round(seconds))} ago"


def roughly_ago(seconds: float) -> str:
    """Return a time span as text in its largest unit.

    >>> roughly_ago(7), roughly_ago(75), roughly_ago(7300), roughly_ago(200_000)
    ('7 s ago', '1 min ago', '2 h ago', '2 days ago')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if size <= seconds < 2 * 86400:
            return f"{seconds // size:.0f} {unit} ago"
    return ago(seconds)


def last_used(seconds: float) -> str:
    """Return the time since a cache was used as text; it is noted at most once an hour.

    >>> last_used(75), last_used(7300), last_used(200_000)
    ('within the last hour', '2 h ago', '2 days ago')
    """
    return "within the last hour" if seconds < NOTED_EVERY_S else roughly_ago(seconds)


def field_text(value: Any) -> str:
    """Return a field of a sample as text: a number, or shape, dtype and range of an array.

    >>> field_text({"shape": [2, 3], "dtype": "float32", "min": 0.0, "max": 1.0, "mean": 0.5})
    '2 × 3 float32, 0 to 1, mean 0.5'
    """
    if not isinstance(value, dict):
        return number(value) if isinstance(value, float) else text_of(value)
    field = cast("dict[str, Any]", value)
    text = f"{' × '.join(map(str, field['shape']))} {field['dtype']}"
    if "min" in field:
        text += f", {number(field['min'])} to {number(field['max'])}, mean {number(field['mean'])}"
    return text + (f", {field['not_finite']:,} not finite" if "not_finite" in field else "")


FILTERS: dict[str, Any] = {
    "ago": ago,
    "roughly_ago": roughly_ago,
    "utc": utc,
    "bytes": format_bytes,
    "count": format_count,
    "field": field_text,
    "last_used": last_used,
    "number": number,
    "percent": format_percent,
    "seconds": format_seconds,
    "took": took,
    "tone": tone,
    "value": text_of,
}
"""Filters of the templates."""


def left_s(job: Job, rows: Sequence[Mapping[str, Any]], started: Event | None, now: float) -> float | None:
    """Return the seconds that a job still takes, at the pace of its last epochs; None: not known.

    Args:
        job: The job.
        rows: Its last epochs.
        started: When its training began; epochs before that were of an earlier attempt.
        now: Unix seconds.
    """
    if job.state not in HELD_STATES or job.progress >= 1.0:
        return None
    rows = [row for row in rows if started is not None and row["at"] >= started.at]
    if len(rows) > 1:
        pace_s = (rows[-1]["at"] - rows[0]["at"]) / (rows[-1]["epoch"] - rows[0]["epoch"])
        return max(0.0, pace_s * job.epochs * (1.0 - job.progress))
    if started is None or job.attempt > 1 or job.progress < LEAST_PROGRESS:
        return None
    return (now - started.at) * (1.0 - job.progress) / job.progress


def times(job: Job, ahead: int, left: float | None, now: float) -> list[tuple[str, str]]:
    """Return the elapsed and the remaining time of a job, or its place in the queue, as names and texts."""
    if job.state in WAITING_STATES:
        return [
            ("Waits for a worker", "it is next" if ahead == 0 else f"{format_count(ahead, 'job')} before it")
        ]
    if job.started is None:
        return []
    return [
        ("Elapsed", format_seconds(job.elapsed_s(now))),
        *([] if left is None else [("Time left", f"about {format_seconds(left)}")]),
    ]


def flat(entries: Any, before: str = "") -> list[tuple[str, str]]:
    """Return a nested recipe as rows."""
    rows: list[tuple[str, str]] = []
    for name, value in entries.items():
        if isinstance(value, dict) and value:
            rows += flat(value, f"{before}{name}.")
        else:
            rows.append((f"{before}{name}", text_of(value)))
    return rows
