"""Results as people read them: short lines and tables, figures with units, the next step last."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.checks import Validation
    from stoker.pipeline.demo import DemoResult
    from stoker.pipeline.inspect import CacheFolder, CacheSummary
    from stoker.pipeline.plan import PlanResult
    from stoker.pipeline.precompute import CacheResult, PrecomputeResult
    from stoker.pipeline.train import TrainResult
    from stoker.pipeline.why import Explanation
    from stoker.schema import Field, Json, Schema
    from stoker.train.config import EventSink, TrainReport

Cells: TypeAlias = tuple[str, ...]
"""One row of a table, with rich's markup; a row may be shorter than others."""
LEAST_WIDTH = 40
"""Columns that are worth wrapping text into."""
SHOWN = 20
"""Lines of one kind (damaged records, quarantined samples) before the rest becomes a count."""
DIGEST = re.compile(r"[0-9a-f]{32,}$")
"""How a value ends that nobody reads whole."""
STATUS_STYLE = {"pass": "green", "warn": "yellow", "fail": "red"}


def precompute(result: PrecomputeResult, console: Console) -> None:
    """Two lines per cache, then its quarantined samples."""
    rows: list[Cells] = []
    for cache in result.caches:
        rows += cache_rows(cache.name, cache, named=False)
        rows.append(("", escape(cache.place)))
    table(console, rows)
    for cache in result.caches:
        failures = [f"  sample {f['number']:,} ({f['stage']}: {f['error']})" for f in cache.failures]
        some(console, failures, f"{cache.name}: {len(failures)} quarantined")
        if failures:
            line = f"  stoker inspect {cache.place} lists them; --retry-quarantined tries again"
            console.print(escape(line), soft_wrap=True)


def plan(result: PlanResult, console: Console) -> None:
    """One table row per tier, then the reason."""
    rows: list[Cells] = [bold("tier", "records", "bytes", "load/batch", "stall")]
    for row in result.plan.rows:
        figures = (
            format_count(row.records) if row.records else "-",
            format_bytes(row.bytes) if row.records else "-",
            "-" if row.load_s is None else format_seconds(row.load_s),
            "-" if row.stall is None else format_percent(row.stall),
        )
        rows.append((row.tier, *figures, escape(row.note)))
    table(console, rows, fixed=5, right=range(1, 5), gap=2)
    console.print(escape(result.reason), soft_wrap=True)
    for line in filter(None, (result.advice, result.together, result.on_gpus)):
        console.print(escape(line), soft_wrap=True)


def train(result: TrainResult, console: Console) -> None:
    """What a run came to, its pictures, and how it started."""
    table(console, _train_rows("train", result))
    console.print(_startup(result), soft_wrap=True)


def events(say: Callable[[str], None]) -> EventSink:
    """A listener to the training loop that says what a person waits for: an epoch's figures, a resume."""

    def listen(kind: str, facts: Mapping[str, Json]) -> None:
        if kind == "epoch":
            errors = [
                f"{label} {_number(facts.get(key))}"
                for label, key in (
                    ("loss", "loss"), ("NRMSE", "val_nrmse"), ("persistence", "persistence_nrmse"),
                )
            ]  # fmt: skip
            stall = facts.get("stall")
            errors += [f"stall {format_percent(stall)}"] if isinstance(stall, float) else []
            say(f"epoch {facts.get('epoch')} · step {facts.get('step')} · " + " · ".join(errors))
        elif kind == "metrics":
            for line in metrics(facts):
                say(line)
        elif kind == "resume":
            say(f"resumed at step {facts.get('step')}, epoch {facts.get('epoch')}{_changes(facts)}")
        elif kind == "skip":
            say(f"passed over a checkpoint: {facts.get('why')}")

    return listen


def metrics(facts: Mapping[str, Any]) -> list[str]:
    """A row of figures: the start-up table, or an epoch's pace."""
    if "phases" in facts:
        phases = facts["phases"]
        total_s = sum(phase["seconds"] for phase in phases)
        last = {"name": "first batch in all", "seconds": total_s, "note": ""}
        rows: list[Mapping[str, Any]] = [*phases, last]
        said = [
            f"  {row['name']:<22}{format_seconds(row['seconds']):>10}   {row['note']}".rstrip()
            for row in rows
        ]
        absent = facts["gpu"]
        return said if absent is None else [*said, f"  GPU not measured: {absent}"]
    said = [format_seconds(facts["training/epoch_time_sec"])]
    rate, busy = facts.get("training/samples_per_sec"), facts.get("training/gpu_utilization_pct")
    said += [] if rate is None else [f"{format_count(rate)} samples/s"]
    said += [] if busy is None else [f"GPU {busy:.0f} % busy"]
    said += [f"cost so far {facts['cost/run']:.3g}"] if "cost/run" in facts else []
    return [f"epoch {facts['epoch']} took {' · '.join(said)}"]


def _changes(facts: Mapping[str, Json]) -> str:
    """What a resumed run has otherwise than before, as the event `resume` names it."""
    changed = facts.get("changed")
    pairs = changed.items() if isinstance(changed, dict) else ()
    said = [f"{name} was {pair[0]}, is {pair[1]}" for name, pair in pairs if isinstance(pair, list)]
    return f"; {'; '.join(said)}" if said else ""


def demo(result: DemoResult, console: Console) -> None:
    """The four steps and the two figures that matter."""
    console.print(escape(result.machine), "", sep="\n", soft_wrap=True)
    plan = result.plan
    rows: list[Cells] = [
        ("1  data", escape(result.data_line), format_seconds(result.data_s), escape(result.data_path))
    ]
    for number, cache in enumerate(result.caches):
        rows += cache_rows("" if number else "2  cache", cache, named=True)
    counts = f"{format_count(plan.records, 'record')} on the {plan.plan.tier} tier"
    rows += [("3  plan", counts, "", escape(held(plan))), *_train_rows("4  train", result.train)]
    table(console, rows, gap=2)
    console.print("", _startup(result.train), sep="\n", soft_wrap=True)


def inspect_folder(result: CacheFolder, console: Console) -> None:
    """Print one line per cache, then why the others cannot be opened."""
    rows: list[Cells] = [bold("name", "records", "size", "fields", "fingerprint")]
    for cache in result.caches:
        fields = ", ".join(f"{name} {field.shape}" for name, field in cache.fields.items())
        count = f"{format_count(cache.records)} of {format_count(cache.count)}"
        rows.append((escape(cache.name), count, format_bytes(cache.bytes), escape(fields), cache.fingerprint))
    table(console, rows, fixed=3, right=range(1, 3), gap=2)
    for name, why in result.unreadable.items():
        console.print(f"{escape(name)}: {escape(why)}", soft_wrap=True)


def _compressed(result: CacheSummary) -> str:
    if result.bytes == result.raw_bytes:
        return ""
    part = format_percent(result.bytes / result.raw_bytes)
    return f" ({part} of {format_bytes(result.raw_bytes)} uncompressed)"


def inspect(result: CacheSummary, console: Console) -> None:
    """Print one line per fact, then one per field."""
    missing = result.count - result.records - len(result.quarantined)
    counts = [f"{format_count(result.records)} of {format_count(result.count)} stored"]
    counts += [f"{format_count(len(result.quarantined))} quarantined"] if result.quarantined else []
    counts += [f"{format_count(missing)} not encoded yet"] if missing else []
    facts: list[Cells] = [
        ("cache", escape(result.name)),
        ("address" if result.address else "path", escape(result.address or result.path)),
        ("fingerprint", result.fingerprint),
        ("records", ", ".join(counts)),
        ("shards", f"{format_count(result.shards)}, {format_bytes(result.bytes)}{_compressed(result)}"),
    ]
    table(console, facts)
    console.print()
    rows: list[Cells] = [bold("field", "shape", "dtype", "mean", "std", "min", "max")]
    for name, described in result.fields.items():
        numbers: Mapping[str, object] = result.statistics.get(name) or {}
        errors: Mapping[str, object] = result.error.get(name) or {}
        figures = [_number(numbers.get(key)) for key in ("mean", "std", "min", "max")]
        rounded = f"largest rounding error {_number(errors['max'])}" if errors.get("max") else ""
        rows.append((name, escape(str(described.shape)), _dtype(described), *figures, rounded))
    table(console, rows, fixed=7, right=range(3, 7), gap=2)
    lines = [f"  sample {f['number']:,} ({f['stage']}: {f['error']})" for f in result.quarantined]
    some(console, lines, "quarantined")


def validate(result: Validation, console: Console) -> None:
    """One row per check, failures coloured, the verdict last."""
    styled = {row.status: f"[{STATUS_STYLE[row.status]}]{row.status}[/]" for row in result.rows}
    table(console, [(styled[row.status], row.check, escape(row.detail)) for row in result.rows], fixed=2)
    failed = sum(row.status == "fail" for row in result.rows)
    warned = sum(row.status == "warn" for row in result.rows)
    console.print(f"{failed} failed, {warned} to look at, {len(result.rows) - failed - warned} fine")


def why(result: Explanation, console: Console) -> None:
    """Each differing entry with both values, or that there is none."""
    console.print(f"a  {escape(result.a)}", f"b  {escape(result.b)}", sep="\n", soft_wrap=True)
    if result.same:
        console.print("same recipe")
        return
    rows = [(d.entry, f"{_short(d.a)}  ->  {_short(d.b)}", d.note) for d in result.differences]
    table(console, [tuple(map(escape, row)) for row in rows])


def cache_rows(label: str, cache: CacheResult, *, named: bool) -> list[Cells]:
    """Two rows; `named` repeats the cache's name where the label is another word."""
    if cache.encoded:
        counts = f"{format_count(cache.encoded)} of {format_count(cache.count)} encoded"
        counts += f", {format_count(cache.reused)} reused" if cache.reused else ""
        counts += f", {format_count(cache.adopted)} adopted" if cache.adopted else ""
        rate = cache.encoded / cache.seconds if cache.seconds > 0 else 0.0
        busy = cache.encode_seconds / cache.seconds if cache.seconds > 0 else 0.0
        more = f"{format_count(rate)} samples/s · encoder busy {format_percent(min(1.0, busy))}"
    else:
        counts = f"{format_count(len(cache.cache), 'record')} ready, nothing to encode"
        more = "source gone, cache used" if cache.source_gone else "same recipe"
        if cache.adopted:
            counts += f", {format_count(cache.adopted)} adopted"
            more = "their samples are unchanged"
    counts += f", {format_count(len(cache.failures))} quarantined"
    counts = f"{cache.name}: {counts}" if named else counts
    error = "" if not cache.error else f" · largest rounding error {cache.error:.1e}"
    made = f"{cache.cache.fingerprint} · {_fields(cache.fields)} · {format_bytes(cache.bytes)}{error}"
    return [(escape(label), escape(counts), format_seconds(cache.seconds), more), ("", made)]


def _train_rows(label: str, result: TrainResult) -> list[Cells]:
    report = result.report
    stall = "" if report.stall is None else f"stall {format_percent(report.stall)} · "
    errors = f"NRMSE {_number(report.val_nrmse)} (persistence {_number(report.persistence_nrmse)})"
    return [
        (label, result.extent, format_seconds(result.train_s), f"{stall}{report.tier} tier"),
        ("", errors),
        *([("", _physical(report))] if report.physical_nrmse is not None else []),
        *(("", line) for line in _waited(result)),
        ("", escape(" · ".join(result.pictures))),
    ]


def _physical(report: TrainReport) -> str:
    """Errors of decoded fields, and what the encoder itself loses."""
    lost = report.reconstruction_nrmse
    beside = f"persistence {_number(report.physical_persistence_nrmse)}"
    beside += "" if lost is None else f"; the encoder itself loses {_number(lost)}"
    return f"in physical space {_number(report.physical_nrmse)} ({beside})"


def _waited(result: TrainResult) -> list[str]:
    """What a run waited for, and its step beside one that never waits; nothing where neither is known."""
    report = result.report
    said: list[str] = []
    if report.ceiling_step_s is not None and report.step_s is not None:
        alone = format_seconds(report.ceiling_step_s)
        said.append(f"step {format_seconds(report.step_s)}, {alone} with its batch at hand")
    waits = [f"{part} {format_seconds(spent)}" for part, spent in report.parts.items() if spent >= 0.0005]
    said += [f"waited: {', '.join(waits)}"] if waits else []
    return [" · ".join(said)] if said else []


def _startup(result: TrainResult) -> str:
    begin, cache = format_seconds(result.first_batch_s), format_seconds(result.cache_s)
    again = "nothing was encoded" if result.cache_reused else "run it again: encoding is skipped"
    return f"first batch {begin} after {cache} of cache work · {again}"


def held(result: PlanResult) -> str:
    """Bytes by tier, and from which step on nothing waits."""
    tiers = [f"{format_bytes(row.bytes)} {row.tier}" for row in result.plan.rows if row.records]
    quiet = result.plan.no_stall_step_s
    return " · ".join([*tiers, *([] if quiet is None else [f"no stall from {format_seconds(quiet)} a step"])])


def _fields(schema: Schema) -> str:
    shown = [f"{escape(str(f.shape))} {_dtype(f)}" for f in schema.values() if f.shape]
    return ", ".join(shown) or "scalars"


def _dtype(field: Field) -> str:
    return f"{field.dtype} + scales" if field.packed else field.dtype


def bold(*names: str) -> Cells:
    """The heading of a table."""
    return tuple(f"[bold]{name}[/]" for name in names)


def table(
    console: Console, rows: Sequence[Cells], *, fixed: int = 1, right: Sequence[int] = (), gap: int = 3
) -> None:
    """Cells side by side. On a terminal too narrow for that, what follows the first `fixed` cells is wrapped
    beside them, or below where little room is left; by words, never in a path, so that it can be copied.
    """
    texts = [[Text.from_markup(cell) for cell in row] for row in rows]
    # The last cell of a row runs on as long as it is.
    counted = [[cell.cell_len for cell in row[: max(fixed, len(row) - 1)]] for row in texts]
    widths = [max(column) for column in zip_longest(*counted, fillvalue=0)]
    places = [sum(widths[:i]) + gap * i for i in range(len(widths) + 1)]
    if all(places[len(row) - 1] + row[-1].cell_len <= console.width for row in texts):
        fixed = len(places)
    indent = places[fixed] if fixed < len(places) and console.width - places[fixed] >= LEAST_WIDTH else 2
    for row in texts:
        for i, (cell, width) in enumerate(zip(row[:fixed], widths, strict=False)):
            cell.align("right" if i in right else "left", max(width, cell.cell_len))
        line = Text(" " * gap).join(row[:fixed])
        lines = _flow([cell.plain for cell in row[fixed:]], console.width - indent, gap)
        if lines and indent > 2:
            line.append(" " * (indent - line.cell_len) + lines.pop(0))
        line.rstrip()
        if line:
            console.print(line, soft_wrap=True)
        for piece in lines:
            console.print(Text(" " * indent + piece), soft_wrap=True)


def _flow(cells: Sequence[str], width: int, gap: int) -> list[str]:
    """Cells on lines of `width`, as many on each as fit.

    >>> _flow(["two words", "2.1 s", "a longer text"], 18, 2)
    ['two words  2.1 s', 'a longer text']
    """
    lines = [""]
    for cell in cells:
        joined = f"{lines[-1]}{' ' * gap}{cell}".strip()
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines += textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False)
    return [line for line in lines if line]


def some(console: Console, lines: list[str], title: str) -> None:
    """A title and the first lines; how many more there are."""
    if not lines:
        return
    console.print(escape(title))
    for line in lines[:SHOWN]:
        console.print(escape(line))
    if len(lines) > SHOWN:
        console.print(f"  and {format_count(len(lines) - SHOWN)} more; --json lists all")


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def _short(value: object) -> str:
    """A value; of a long digest only as much as tells it from others."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:16]}…{text[-8:]}" if DIGEST.search(text) and len(text) <= 80 else text
