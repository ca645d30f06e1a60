"""The page of a run: figures, picture and settings in one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.runtime.files import replacing
from stoker.train.config import TrainReport
from stoker.train.curves import curves_as_svg, draw_curves
from stoker.units import format_count, format_percent, format_seconds

STYLE = """
:root { color-scheme: light dark; --line: #9995; --dim: #6b6b6b; }
@media (prefers-color-scheme: dark) { :root { --dim: #9a9a9a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; }
dd small { color: var(--dim); font-size: .85rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
.curves svg { width: 100%; height: auto; } .curves text { fill: currentColor; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: right; border-bottom: 1px solid var(--line);
white-space: nowrap; vertical-align: top; }
th { font-weight: 600; } .names td, .names th { text-align: left; }
.names td:first-child { color: var(--dim); }
.names td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
summary { margin-top: 1rem; cursor: pointer; font-weight: 600; }
"""

Format = Callable[[Any], str]


def _figure(value: float) -> str:
    return f"{value:.3g}"


EPOCHS: Mapping[str, tuple[str, Format]] = {
    "epoch": ("epoch", format_count),
    "step": ("steps", format_count),
    "loss": ("loss", _figure),
    "val_nrmse": ("NRMSE", _figure),
    "persistence_nrmse": ("persistence", _figure),
    "rollout_nrmse": ("roll-out NRMSE", _figure),
    "rollout_persistence_nrmse": ("persistence", _figure),
    "physical_nrmse": ("physical NRMSE", _figure),
    "physical_persistence_nrmse": ("persistence", _figure),
    "stall": ("stall", format_percent),
    "seconds": ("time", format_seconds),
}
"""Columns of the table of epochs: heading and form by the name in `metrics.jsonl`."""


OF_A_TASK: Mapping[str, str] = {
    **{name: heading for name, (heading, _) in EPOCHS.items() if name.endswith("nrmse")},
    "reconstruction_nrmse": "encoder's own",
}
"""Columns of the table of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table that the caller adds to the page of a run."""

    title: str
    rows: Sequence[Sequence[str]]
    """Cells as plain text; the first of a row says what it is about."""
    heading: Sequence[str] = ()
    folded: bool = False
    """Shown when it is asked for."""

    def to_html(self) -> str:
        """The table, all text escaped."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.heading)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows
        )
        table = f'<div class="wide"><table class="names">{head and f"<tr>{head}</tr>"}{body}</table></div>'
        title = html.escape(self.title)
        return _folded(title, table) if self.folded else f"<h2>{title}</h2>{table}"


def write_report(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    report: TrainReport,
    config: Mapping[str, Any],
    more: Sequence[Section] = (),
) -> None:
    """Draw `curves.png` in a run's folder, and write `report.html`, which holds the same curves.

    Args:
        rows: Lines of `metrics.jsonl`.
        report, config: What the run came to, and its settings.
        more: Tables of the caller.
    """
    curves = folder / "curves.png"
    draw_curves(rows, curves)
    title = html.escape(folder.resolve().name)
    starts = [row for row in rows if row.get("kind") == "start"]
    parts = [
        f"<h1>{title}</h1>",
        _summary(report),
        f'<div class="curves">{"".join(curves_as_svg(rows))}</div>',
        _tasks(report),
        f"<h2>Epochs</h2>{_epochs([row for row in rows if row.get('kind') == 'epoch'])}",
        *(section.to_html() for section in more),
        _folded("Training", _names(config)),
        *(_folded(f"From step {row['step']:,} on", _names(row, without=("kind", "step"))) for row in starts),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )
    with replacing(folder / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def _summary(report: TrainReport) -> str:
    """The most important figures, each error with its persistence."""
    stall = _or_dash(report.stall, format_percent)
    figures = {
        "validation NRMSE": _error(report.val_nrmse, report.persistence_nrmse),
        "lowest": _or_dash(report.best_val_nrmse, _figure),
        "roll-out NRMSE": _error(report.rollout_nrmse, report.rollout_persistence_nrmse),
        **_physical(report),
        "stall": stall + (f" <small>{html.escape(report.tier)} tier</small>" if report.tier else ""),
        "time of a step": _or_dash(report.step_s or None, format_seconds)
        + ("" if report.ceiling_step_s is None else _alone(report.ceiling_step_s)),
        "epochs, steps": f"{format_count(report.epochs)}, {format_count(report.steps)}",
    }
    shown = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items())
    return f"<dl>{''.join(shown)}</dl>"


def _tasks(report: TrainReport) -> str:
    """The errors of each task; nothing where there is only one."""
    if not report.tasks:
        return ""
    names = [name for name in OF_A_TASK if any(name in errors for errors in report.tasks.values())]
    head = "".join(f"<th>{OF_A_TASK[name]}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{html.escape(task)}</td>"
        + "".join(f"<td>{_or_dash(errors.get(name), _figure)}</td>" for name in names)
        + "</tr>"
        for task, errors in report.tasks.items()
    )
    return f'<h2>Tasks</h2><table class="names"><tr><th></th>{head}</tr>{rows}</table>'


def _physical(report: TrainReport) -> dict[str, str]:
    """Errors of decoded fields and of the encoder itself; nothing without a decoder."""
    if report.physical_nrmse is None:
        return {}
    lost = _or_dash(report.reconstruction_nrmse, _figure)
    return {
        "physical NRMSE": _error(report.physical_nrmse, report.physical_persistence_nrmse),
        "physical roll-out NRMSE": _error(
            report.physical_rollout_nrmse, report.physical_rollout_persistence_nrmse
        ),
        "encoder's own error": f"{lost} <small>raw fields against decoded records</small>",
    }


def _alone(ceiling_s: float) -> str:
    """The time of a step that never waits, next to that of the run's steps."""
    return f" <small>{format_seconds(ceiling_s)} with its batch at hand</small>"


def _error(error: float | None, persistence: float | None) -> str:
    beside = "" if persistence is None else f" <small>persistence {_figure(persistence)}</small>"
    return _or_dash(error, _figure) + beside


def _folded(title: str, body: str) -> str:
    """Shown when it is asked for."""
    return f"<details><summary>{title}</summary>{body}</details>"


def _epochs(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = {
        name: column
        for name, column in EPOCHS.items()
        if not name.startswith("physical") or any(name in row for row in rows)
    }
    head = "".join(f"<th>{heading}</th>" for heading, _ in shown.values())
    cells = (
        "".join(f"<td>{_or_dash(row.get(name), form)}</td>" for name, (_, form) in shown.items())
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _names(entries: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_or_dash(value, _text)}</td></tr>"
        for name, value in entries.items()
        if name not in without
    )
    return f'<table class="names">{rows}</table>'


def _text(value: object) -> str:
    return html.escape(f"{value:g}" if isinstance(value, float) else str(value))


def _or_dash(value: Any, form: Format) -> str:
    return "-" if value is None else form(value)
