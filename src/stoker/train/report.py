"""The page of a run: figures, picture and settings in one HTML file that needs nothing else."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stoker.runtime.files import replace_atomically
from stoker.train.config import TrainReport
from stoker.units import format_count, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# Draw the curves of a run: training loss, validation errors and persistence, stall.


Rows: TypeAlias = Sequence[Mapping[str, Any]]
Points: TypeAlias = Sequence[tuple[int, float]]

MARGIN = 1.3
"""Factor between the curves and the ends of a logarithmic axis: what hardly changes looks flat."""
BLUE, ORANGE, GREY, TEXT = "#1f6fb4", "#d9731a", "#9aa5b1", "#24313f"
TASKS = (BLUE, ORANGE, "#3a8f5c", "#8a5bb0", "#b0413e", "#5b6b78")
"""Colors of tasks, where there are several; with more of them they come again."""
OF_TASK = "val_nrmse/"
"""How the error of one task of several begins; `objective.judge` writes them."""
STALL_TOPS = (10, 25, 50, 100)
"""Ends of the stall's axis in per cent: the first that holds all of it, so that a small stall looks small."""


def draw_curves(rows: Rows, path: Path) -> None:
    """Write a PNG from the lines of `metrics.jsonl`; works without a display and leaves pyplot alone."""
    # Here because it takes half a second, and most runs are longer.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04)
    for axes, draw in zip(figure.subplots(1, 3), _panels(rows), strict=True):
        _prepare(axes)
        draw(axes)
    with replace_atomically(path) as temporary:
        figure.savefig(temporary, format="png")


def curves_as_svg(rows: Rows) -> list[str]:
    """Return the same three as SVG without a background, their text in the color of the page around them."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn: list[str] = []
    for number, draw in enumerate(_panels(rows)):
        figure: Any = Figure(figsize=(4.4, 3.3), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        _prepare(axes)
        draw(axes)
        text = io.StringIO()
        # Names within the picture must differ from those of the others on the page.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": str(number), "font.family": "sans-serif"}):
            about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=about)
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r'\bid="([\w.]+_\d+)"', rf'id="{number}-\1"', svg)
        for ink in (TEXT, "#000000", "#262626"):
            svg = svg.replace(ink, "currentColor")
        drawn.append(svg)
    return drawn


def _panels(rows: Rows) -> tuple[Callable[[Any], None], ...]:
    """Return what draws each of the three pictures."""
    steps = [row for row in rows if row.get("kind") == "step"]
    epochs = [row for row in rows if row.get("kind") == "epoch"]
    return (
        lambda axes: _draw_loss(axes, steps, epochs),
        lambda axes: _draw_errors(axes, epochs),
        lambda axes: _draw_stall(axes, epochs),
    )


def _prepare(axes: Any) -> None:
    axes.tick_params(which="both", labelsize=8, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(which="major", color=GREY, alpha=0.25, linewidth=0.6)


def _draw_loss(axes: Any, steps: Rows, epochs: Rows) -> None:
    """Draw the loss over steps: between two lines of the log, over each epoch, and in validation."""
    whole = _of_records(epochs)
    _label(axes, "loss" if whole else "training loss: error² / (change in a step)²", "step")
    _line(
        axes, _points(steps, "step", "loss"), BLUE, "recent steps", alpha=0.4, linewidth=1.0, markersize=0.0
    )
    _line(axes, _points(epochs, "step", "loss"), BLUE, "epoch")
    _line(axes, _points(epochs, "step", "val_loss"), ORANGE, "validation")
    _logarithmic(axes)
    _whole_numbers(axes, 0, max((row["step"] for row in [*steps, *epochs]), default=0))


def _draw_errors(axes: Any, epochs: Rows) -> None:
    """Validation errors, each with its own persistence as a dashed line of the same color; of several tasks
    those of one step. Of classes the accuracy, with that of the most common class.
    """
    if any(_points(epochs, "epoch", "accuracy", least=-1.0)):
        _draw_accuracy(axes, epochs)
        return
    measured = any(_points(epochs, "epoch", "val_nrmse"))
    _label(axes, "validation NRMSE" if measured else "validation NRMSE: not measured", "epoch")
    tasks = list(
        dict.fromkeys(name[len(OF_TASK) :] for row in epochs for name in row if name.startswith(OF_TASK))
    )
    for name, persistence, label, color in [
        (f"{OF_TASK}{task}", f"persistence_nrmse/{task}", task, TASKS[place % len(TASKS)])
        for place, task in enumerate(tasks)
    ] or [
        ("val_nrmse", "persistence_nrmse", "NRMSE" if _of_records(epochs) else "one step", BLUE),
        ("rollout_nrmse", "rollout_persistence_nrmse", "roll-out", ORANGE),
    ]:
        _line(axes, _points(epochs, "epoch", name), color, label)
        for _, still in _points(epochs, "epoch", persistence)[-1:]:  # it is the same in every epoch
            dashed = {"linestyle": "--", "linewidth": 1.2, "alpha": 0.8}
            guess = "guessing the mean" if _of_records(epochs) else f"{label}, persistence"
            axes.axhline(still, color=color, label=guess, **dashed)
    _logarithmic(axes)
    _whole_numbers(axes, 1, max((row["epoch"] for row in epochs), default=1))


def _draw_accuracy(axes: Any, epochs: Rows) -> None:
    _label(axes, "validation accuracy", "epoch")
    points = [(epoch, 100 * part) for epoch, part in _points(epochs, "epoch", "accuracy", least=-1.0)]
    _line(axes, points, BLUE, "accuracy")
    for _, part in _points(epochs, "epoch", "baseline_accuracy")[-1:]:
        axes.axhline(
            100 * part, color=GREY, linestyle="--", linewidth=1.2, label="guessing the most common class"
        )
    axes.set_ylim(0, 104)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.legend(fontsize=8, frameon=False, labelcolor=TEXT)
    _whole_numbers(axes, 1, max((row["epoch"] for row in epochs), default=1))


def _of_records(epochs: Rows) -> bool:
    """Return True if a field of records without time was learned."""
    return any("val_loss" in row for row in epochs)


def _draw_stall(axes: Any, epochs: Rows) -> None:
    """Draw the part of each epoch's time that was spent waiting for data."""
    points = _points(epochs, "epoch", "stall", least=-1.0)
    percent = [(epoch, 100 * stall) for epoch, stall in points]
    _label(axes, "stall: not measured", "epoch")
    if points:
        mean = sum(stall for _, stall in points) / len(points)
        axes.set_title(f"stall: {format_percent(mean)} of the time", fontsize=10, loc="left", color=TEXT)
        axes.fill_between(*zip(*percent, strict=True), color=BLUE, alpha=0.12, linewidth=0)
    _line(axes, percent, BLUE, "")
    highest = max((stall for _, stall in percent), default=0.0)
    axes.set_ylim(0, next(top for top in STALL_TOPS if highest <= top))
    axes.yaxis.set_major_formatter("{x:g} %")
    _whole_numbers(axes, 1, max((row["epoch"] for row in epochs), default=1))


def _points(rows: Rows, x: str, y: str, *, least: float = 0.0) -> Points:
    """Return `(x, y)` of the rows that have `y` above `least`: a logarithmic axis has no place for 0."""
    return [(row[x], row[y]) for row in rows if row.get(y) is not None and row[y] > least]


def _line(axes: Any, points: Points, color: str, label: str, **style: float) -> None:
    """Draw a line; each point has a mark while there are few of them."""
    if points:
        size = 3.0 if len(points) <= 40 else 0.0
        shown: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": size, **style}
        axes.plot(*zip(*points, strict=True), color=color, label=label or None, **shown)


def _label(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    axes.set_xlabel(x, fontsize=9, color=TEXT)


def _logarithmic(axes: Any) -> None:
    """Make a logarithmic axis with plain numbers, and a legend; nothing if nothing is drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = [float(value) for line in axes.lines for value in line.get_ydata()]
    if not values:
        axes.set_yticks([])
        return
    low, high = min(values) / MARGIN, max(values) * MARGIN
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    decades = math.log10(high / low)
    # A range of a decade or two holds one power of ten, or none.
    marked = (1, 1.5, *range(2, 10)) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=marked))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8, frameon=False, labelcolor=TEXT)


def _whole_numbers(axes: Any, first: int, last: int) -> None:
    """Set ticks at whole numbers, a handful of them whatever the length of the run."""
    from matplotlib.ticker import MaxNLocator

    margin = 0.03 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


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
    "val_loss": ("validation loss", _figure),
    "accuracy": ("accuracy", format_percent),
    "baseline_accuracy": ("most common class", format_percent),
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
class ReportTable:
    """A table that the caller adds to the page of a run."""

    title: str
    rows: Sequence[Sequence[str]]
    """Cells as plain text; the first of a row says what it is about."""
    heading: Sequence[str] = ()
    folded: bool = False
    """Shown when it is asked for."""

    def to_html(self) -> str:
        """Return the table, all text escaped."""
        table, title = _table(self.rows, self.heading), html.escape(self.title)
        return _folded(title, table) if self.folded else f"<h2>{title}</h2>{table}"


def write_report(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    report: TrainReport,
    config: Mapping[str, Any],
    more: Sequence[ReportTable] = (),
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
    with replace_atomically(folder / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def _summary(report: TrainReport) -> str:
    """Return the most important figures, each error with its persistence."""
    stall = _or_dash(report.stall, format_percent)
    errors = {
        "validation NRMSE": _error(report.val_nrmse, report.persistence_nrmse),
        "lowest": _or_dash(report.best_val_nrmse, _figure),
        "roll-out NRMSE": _error(report.rollout_nrmse, report.rollout_persistence_nrmse),
        **_physical(report),
    }
    figures = {
        **(errors if report.target is None else _learned(report)),
        "stall": stall + (f" <small>{html.escape(report.tier)} tier</small>" if report.tier else ""),
        "time of a step": _or_dash(report.step_s or None, format_seconds) + _alone(report),
        "epochs, steps": f"{format_count(report.epochs)}, {format_count(report.steps)}",
    }
    shown = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items())
    return f"<dl>{''.join(shown)}</dl>"


def _learned(report: TrainReport) -> dict[str, str]:
    """Return the figures of a run that learned one field of records, each next to a guess."""
    target = html.escape(report.target or "")
    if report.accuracy is not None:
        most = f"guessing the most common class: {_or_dash(report.baseline_accuracy, format_percent)}"
        found = {f"accuracy of {target}": f"{format_percent(report.accuracy)} <small>{most}</small>"}
    else:
        mean = f"guessing the mean: {_or_dash(report.persistence_nrmse, _figure)}"
        found = {f"NRMSE of {target}": f"{_or_dash(report.val_nrmse, _figure)} <small>{mean}</small>"}
    return {
        **found,
        "validation loss": _or_dash(report.val_loss, _figure),
        "lowest": _or_dash(report.best_val_loss, _figure),
    }


def _tasks(report: TrainReport) -> str:
    """Return the errors of each task; nothing where there is only one."""
    if not report.tasks:
        return ""
    names = [name for name in OF_A_TASK if any(name in errors for errors in report.tasks.values())]
    rows = (
        [task, *(_or_dash(errors.get(name), _figure) for name in names)]
        for task, errors in report.tasks.items()
    )
    return f"<h2>Tasks</h2>{_table(rows, ['', *(OF_A_TASK[name] for name in names)])}"


def _physical(report: TrainReport) -> dict[str, str]:
    """Return errors of decoded fields and of the encoder itself; nothing without a decoder."""
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


def _alone(report: TrainReport) -> str:
    """Return the time of a step that never waits, if that of the run's steps is longer."""
    alone_s = report.ceiling_step_s
    if alone_s is None or report.step_s is None or alone_s >= report.step_s:
        return ""
    return f" <small>{format_seconds(alone_s)} without loading</small>"


def _error(error: float | None, persistence: float | None) -> str:
    guess = "" if persistence is None else f" <small>persistence {_figure(persistence)}</small>"
    return _or_dash(error, _figure) + guess


def _folded(title: str, body: str) -> str:
    """Return an element that is closed at first."""
    return f"<details><summary>{title}</summary>{body}</details>"


def _epochs(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = {name: column for name, column in EPOCHS.items() if any(name in row for row in rows)}
    if _of_records(rows) and "persistence_nrmse" in shown:
        shown["persistence_nrmse"] = ("guessing the mean", _figure)
    cells = ([_or_dash(row.get(name), form) for name, (_, form) in shown.items()] for row in rows)
    return _table(cells, [heading for heading, _ in shown.values()], style="")


def _names(entries: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    return _table((name, _or_dash(value, _text)) for name, value in entries.items() if name not in without)


def _table(rows: Iterable[Sequence[str]], heading: Sequence[str] = (), style: str = ' class="names"') -> str:
    """Return a table of plain text, which is escaped here."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table{style}>{line("th", heading) if heading else ""}{body}</table></div>'


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _or_dash(value: Any, form: Format) -> str:
    return "-" if value is None else form(value)
