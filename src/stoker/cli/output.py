"""Results as people read them: short lines and tables, figures with units, the next step last."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.run.caches import CacheFolder, CacheSummary, Explanation, FoundRecords
    from stoker.run.demo import DemoResult
    from stoker.run.plan import PlanResult, TaskPlans
    from stoker.run.precompute import CacheResult, PrecomputeResult, RepairResult
    from stoker.run.staging import StageReport
    from stoker.run.train import TrainResult
    from stoker.run.validate import Validation
    from stoker.schema import Field, Json, Schema
    from stoker.store import BadRecord, VerifyReport
    from stoker.store.gc import GcItem, GcReport
    from stoker.store.maintain import CompactReport
    from stoker.train.config import EventSink, TrainReport

Cells: TypeAlias = tuple[str, ...]
"""One row of a table, with rich's markup; a row may be shorter than others."""
LEAST_WIDTH = 40
"""Columns that are worth wrapping text into."""
SHOWN = 20
"""Lines of one kind (damaged records, quarantined samples) before the rest becomes a count."""
DIGEST = re.compile(r"[0-9a-f]{32,}$")
"""The end of a value that is too long to be read."""
STATUS_STYLE = {"pass": "green", "warn": "yellow", "fail": "red"}


def precompute(result: PrecomputeResult, console: Console) -> None:
    """Print two lines per cache, then its quarantined samples, then the tasks that failed."""
    rows: list[Cells] = []
    for cache in result.caches:
        rows += cache_rows(cache.name, cache, named=False)
        rows.append(("", escape(str(cache.address or cache.path))))
    table(console, rows)
    for cache in result.caches:
        failures = [f"  sample {f['number']:,} ({f['stage']}: {f['error']})" for f in cache.failures]
        some(console, failures, f"{cache.name}: {len(failures)} quarantined")
        if failures:
            place = cache.address or cache.path
            line = f"  stoker cache show {place} lists them; --retry-quarantined tries again"
            console.print(escape(line))
    for failure in result.failed:
        console.print(escape(f"task {failure.task} failed: {failure.error}"))


def plan(result: PlanResult, console: Console) -> None:
    """Print one table row per tier, then the reason."""
    from stoker.plan.trials import format_range

    ranged = any(row.stall_range is not None for row in result.plan.rows)
    likely = ("likely",) if ranged else ()
    rows: list[Cells] = [bold("tier", "records", "bytes", "load/batch", "stall", *likely)]
    for row in result.plan.rows:
        figures = [
            format_count(row.records) if row.records else "-",
            format_bytes(row.bytes) if row.records else "-",
            "-" if row.load_s is None else format_seconds(row.load_s),
            "-" if row.stall is None else format_percent(row.stall),
        ]
        if ranged:
            figures.append("-" if row.stall_range is None else format_range(row.stall_range))
        rows.append((row.tier, *figures, escape(row.note)))
    table(console, rows, fixed=len(rows[0]), right=range(1, len(rows[0])), gap=2)
    console.print(escape(result.reason))
    for line in filter(None, (result.advice, result.together, result.on_gpus)):
        console.print(escape(line))


def train(result: TrainResult, console: Console) -> None:
    """Print what a run came to, its pictures, how it started, and each task's own errors."""
    table(console, _train_rows("train", result))
    console.print(_startup(result))
    _task_errors(result, console)


def events(say: Callable[[str], None]) -> EventSink:
    """Return a listener to the training loop that prints an epoch's figures, or a resume."""

    def listen(kind: str, facts: Mapping[str, Json]) -> None:
        if kind == "epoch":
            errors = [f"loss {_number(facts.get('loss'))}"]
            if "val_loss" in facts:  # of records without time
                errors.append(_supervised(facts))
            else:
                errors += [
                    f"NRMSE {_number(facts.get('val_nrmse'))}",
                    f"persistence {_number(facts.get('persistence_nrmse'))}",
                ]
            stall = facts.get("stall")
            errors += [f"stall {format_percent(stall)}"] if isinstance(stall, float) else []
            say(f"epoch {facts.get('epoch')} · step {facts.get('step')} · " + " · ".join(errors))
        elif kind == "learns":
            many = f"{facts['classes']} classes" if facts["classes"] else "numbers"
            say(f"learns {facts['target']} ({many}) from {', '.join(cast('list[str]', facts['inputs']))}")
        elif kind == "metrics":
            for line in metrics(facts):
                say(line)
        elif kind == "resume":
            say(f"resumed at step {facts.get('step')}, epoch {facts.get('epoch')}{_changes(facts)}")
        elif kind == "skip":
            say(f"passed over a checkpoint: {facts.get('why')}")

    return listen


def metrics(facts: Mapping[str, Any]) -> list[str]:
    """Return a row of figures: the start-up table, or an epoch's pace."""
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
    """Name the settings that a resumed run has otherwise than before, from the event `resume`."""
    changed = facts.get("changed")
    pairs = changed.items() if isinstance(changed, dict) else ()
    said = [f"{name} was {pair[0]}, is {pair[1]}" for name, pair in pairs if isinstance(pair, list)]
    return f"; {'; '.join(said)}" if said else ""


def demo(result: DemoResult, console: Console) -> None:
    """Print the four steps and the two figures that matter."""
    console.print(escape(result.machine), "", sep="\n")
    plan = result.plan
    rows: list[Cells] = [
        ("1  data", escape(result.data_line), format_seconds(result.data_s), escape(result.data))
    ]
    for number, cache in enumerate(result.caches):
        rows += cache_rows("" if number else "2  cache", cache, named=True)
    counts = f"{format_count(plan.records, 'record')} on the {plan.plan.tier} tier"
    rows += [("3  plan", counts, "", escape(held(plan))), *_train_rows("4  train", result.train)]
    table(console, rows, gap=2)
    console.print("", _startup(result.train), sep="\n")


def inspect_folder(result: CacheFolder, console: Console) -> None:
    """Print one line per cache, then why the others cannot be opened."""
    rows: list[Cells] = [bold("name", "records", "size", "fields", "fingerprint")]
    for cache in result.caches:
        fields = ", ".join(f"{name} {field.shape}" for name, field in cache.fields.items())
        count = f"{format_count(cache.records)} of {format_count(cache.count)}"
        rows.append((escape(cache.name), count, format_bytes(cache.bytes), escape(fields), cache.fingerprint))
    table(console, rows, fixed=3, right=range(1, 3), gap=2)
    for name, why in result.unreadable.items():
        console.print(f"{escape(name)}: {escape(why)}")


def records(result: FoundRecords, console: Console) -> None:
    """Print a block for each record, a line for each of its fields."""
    for record in result.records:
        key = "" if record["key"] is None else f", key {record['key']}"
        console.print(escape(f"sample {record['index']}{key}"), style="bold")
        fields = cast("Mapping[str, Mapping[str, object]]", record["fields"])
        rows = [
            (f"  {name}", str(field["dtype"]), escape(str(field["values"]))) for name, field in fields.items()
        ]
        table(console, rows, fixed=2)
    shown = len(result.records)
    if shown < result.count:
        console.print(f"{format_count(result.count - shown)} more; --limit shows more of them")
    elif not shown:
        console.print("no record meets the condition")


def _compressed(result: CacheSummary) -> str:
    if result.bytes == result.raw_bytes:
        return ""
    part = format_percent(result.bytes / result.raw_bytes)
    return f" ({part} of {format_bytes(result.raw_bytes)} uncompressed)"


def inspect(result: CacheSummary, console: Console) -> None:
    """Print one line per fact, then one per field."""
    lost = sum(cast("int", one["records"]) for one in result.missing_shards)
    missing = result.count - result.records - len(result.quarantined) - lost
    counts = [f"{format_count(result.records)} of {format_count(result.count)} stored"]
    counts += [f"{format_count(len(result.quarantined))} quarantined"] if result.quarantined else []
    counts += [f"{format_count(lost)} in missing shards"] if lost else []
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
    _missing_shards(result, console)


def _missing_shards(result: CacheSummary, console: Console) -> None:
    """Print the shards that are gone, and what encodes their records again."""
    gone = result.missing_shards
    lines: list[str] = []
    for one in gone:
        size, expected, count = (cast("int", one[key]) for key in ("bytes", "expected_bytes", "records"))
        cut = "" if one["bytes"] is None else f", {size:,} bytes there, expected {expected:,}"
        lines.append(f"  {one['shard']}: {format_count(count, 'record')}{cut}")
    some(console, lines, "missing shards")
    if gone:
        place = shlex.quote(result.address or result.path)
        console.print("Run again what made the cache: it encodes these records again, and only those")
        console.print(escape(f"  stoker cache verify {place} --repair says which command that is"))


def validate(result: Validation, console: Console) -> None:
    """Print one row per check, failures colored, the verdict last."""
    styled = {row.status: f"[{STATUS_STYLE[row.status]}]{row.status}[/]" for row in result.rows}
    table(console, [(styled[row.status], row.check, escape(row.detail)) for row in result.rows], fixed=2)
    failed = sum(row.status == "fail" for row in result.rows)
    warned = sum(row.status == "warn" for row in result.rows)
    console.print(f"{failed} failed, {warned} to look at, {len(result.rows) - failed - warned} fine")


def why(result: Explanation, console: Console) -> None:
    """Print each differing entry with both values, or that nothing differs."""
    console.print(f"a  {escape(result.a)}", f"b  {escape(result.b)}", sep="\n")
    if result.same:
        console.print("same recipe")
        return
    rows = [(d.entry, f"{_short(d.a)}  ->  {_short(d.b)}", d.note) for d in result.differences]
    table(console, [tuple(map(escape, row)) for row in rows])


def cache_rows(label: str, cache: CacheResult, *, named: bool) -> list[Cells]:
    """Return two rows; `named` repeats the cache's name where the label is another word."""
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
        if cache.cache.recipe.entries.get("in_place"):
            more = "served from the files they are in"
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
    if report.target is not None:
        errors = escape(f"{report.target}: {_supervised(result.to_json())}")
    return [
        (label, result.extent, format_seconds(result.train_s), f"{stall}{report.tier} tier"),
        ("", errors),
        *([("", _physical(report))] if report.physical_nrmse is not None else []),
        *(("", line) for line in _waited(result)),
        ("", escape(" · ".join(result.pictures))),
    ]


def _supervised(figures: Mapping[str, Any]) -> str:
    """Return how well a field was predicted, next to a guess that looks at nothing."""
    if (accuracy := figures.get("accuracy")) is not None:
        most = format_percent(figures["baseline_accuracy"])
        return f"accuracy {format_percent(accuracy)} (guessing the most common class: {most})"
    error, mean = _number(figures.get("val_nrmse")), _number(figures.get("persistence_nrmse"))
    return f"NRMSE {error} (guessing the mean: {mean})"


def _physical(report: TrainReport) -> str:
    """Return errors of decoded fields, and what the encoder itself loses."""
    lost = report.reconstruction_nrmse
    compared = f"persistence {_number(report.physical_persistence_nrmse)}"
    compared += "" if lost is None else f"; the encoder itself loses {_number(lost)}"
    return f"in physical space {_number(report.physical_nrmse)} ({compared})"


def _waited(result: TrainResult) -> list[str]:
    """Return what a run waited for, and its step next to one that never waits; nothing if unknown."""
    report = result.report
    said: list[str] = []
    if report.step_s is not None:
        said.append(f"step {format_seconds(report.step_s)}")
        if report.ceiling_step_s is not None and report.ceiling_step_s < report.step_s:
            said[0] += f" ({format_seconds(report.ceiling_step_s)} without loading)"
    waits = [f"{part} {format_seconds(spent)}" for part, spent in report.parts.items() if spent >= 0.0005]
    said += [f"waited in total: {', '.join(waits)}"] if waits else []
    return [" · ".join(said)] if said else []


def _startup(result: TrainResult) -> str:
    begin, cache = format_seconds(result.first_batch_s), format_seconds(result.cache_s)
    again = "nothing was encoded" if result.cache_reused else "run it again: encoding is skipped"
    return f"first batch {begin} after {cache} of cache work · {again}"


def held(result: PlanResult) -> str:
    """Return bytes by tier, and from which step on nothing waits."""
    tiers = [f"{format_bytes(row.bytes)} {row.tier}" for row in result.plan.rows if row.records]
    quiet = result.plan.no_stall_step_s
    return " · ".join([*tiers, *([] if quiet is None else [f"no stall from {format_seconds(quiet)} a step"])])


def _fields(schema: Schema) -> str:
    shown = [f"{escape(str(f.shape))} {_dtype(f)}" for f in schema.values() if f.shape]
    return ", ".join(shown) or "scalars"


def _dtype(field: Field) -> str:
    return f"{field.dtype} + scales" if field.quantized else field.dtype


def bold(*names: str) -> Cells:
    """Return the heading of a table."""
    return tuple(f"[bold]{name}[/]" for name in names)


def table(
    console: Console, rows: Sequence[Cells], *, fixed: int = 1, right: Sequence[int] = (), gap: int = 3
) -> None:
    """Print cells side by side. On a narrow terminal, text after the first `fixed` cells wraps next to them.

    It wraps below them where little room is left. Lines break between words and never in a path, so that it
    can be copied.
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
            console.print(line)
        for piece in lines:
            console.print(Text(" " * indent + piece))


def _flow(cells: Sequence[str], width: int, gap: int) -> list[str]:
    """Return cells on lines of `width`, as many on each as fit.

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
    """Print a title, the first lines, and how many more follow."""
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
    """Return a value: of a long digest only as much as tells it from others."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return ", ".join(f"{name} {_short(one)}" for name, one in pairs)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:16]}…{text[-8:]}" if DIGEST.search(text) and len(text) <= 80 else text


# ----------------------------------------------------------------------------------------------------------
# Results of the commands that look after caches, as people read them.


def verify(result: VerifyReport, console: Console, path: str) -> None:
    """Print the count of intact records of a cache, then damage by shard, then what was not checked."""
    from stoker.store.format import KEYS_FILE

    console.print(_matching(result.records, result.bad))
    count = len(_samples(result.bad))
    title = f"{format_count(count)} damaged" if count else "damaged, and no record with it"
    some(console, _by_shard(result.bad), title)
    if any(one.shard != KEYS_FILE for one in result.bad):
        command = f"stoker cache verify {shlex.quote(path)} --repair"
        console.print(escape(f"{command} sets them aside, and says how to encode them again"), soft_wrap=True)
    if result.unchecked:
        console.print(f"not looked at: {'; '.join(result.unchecked)}")


def stage(result: StageReport, console: Console) -> None:
    """Print a line for each task, and where its copies are."""
    for one in result.tasks:
        files = f"{format_count(one.files, 'file')}, {format_bytes(one.bytes)}"
        if not one.staged:
            console.print(f"[bold]{escape(one.task)}[/]  not staged: {escape(one.reason)} ({files})")
            continue
        copied = f"{format_bytes(one.copied_bytes)} copied in {format_seconds(one.seconds)}"
        console.print(f"[bold]{escape(one.task)}[/]  {files}, {copied}: {escape(one.reason)}")
        console.print(f"  {escape(str(one.path))}")


def repair(result: RepairResult, console: Console) -> None:
    """Print what was set aside, and what to do about the rest."""
    report = result.report
    rows = [
        ("read", format_count(report.records, "record")),
        ("damaged or lost", format_count(len(_samples(report.bad)))),
        ("shards set aside", _count(report.set_aside)),
        ("shards gone", _count(report.lost)),
        ("temporaries swept", format_count(report.swept)),
        ("index", escape(_index(result))),
    ]
    table(console, rows)
    some(console, _by_shard(report.bad), "damaged")
    some(console, [f"  {one.shard}: {one.why}" for one in report.unread], "not readable now")
    if result.encoded is not None:
        console.print(f"encoded again: {format_count(result.encoded)}")
    if result.ok:
        console.print("complete: every sample is stored or quarantined")
        return
    from stoker.run.precompute import number_ranges

    count = len(result.missing)
    have = f"{format_count(count, 'sample')} {'has' if count == 1 else 'have'}"
    samples = f"{have} to be encoded: {number_ranges(result.missing)}"
    console.print(escape(samples))
    console.print(escape(f"  {result.command}"))
    made = "folder and options of the first import" if result.imported else "settings that made it"
    console.print(f"  with the {made}")


def compact(result: CompactReport, console: Console) -> None:
    """Print shards before and after, and what is left behind."""
    if result.merged:
        console.print(
            f"{format_count(result.merged, 'shard')} became {format_count(result.written)}: "
            f"{format_count(result.records, 'record')} moved, {format_count(result.shards_before, 'shard')} "
            f"before, {format_count(result.shards_after)} now, {format_bytes(result.bytes_before)} became "
            f"{format_bytes(result.bytes_after)}"
        )
    else:
        console.print(f"nothing to merge: {format_count(result.shards_after, 'shard')}")
    if result.superseded_bytes:
        size = format_bytes(result.superseded_bytes)
        stay = f"{size} of superseded shards stay for processes that have them open"
        console.print(f"{stay}; {_cleaner(result)} removes them")
    left = [f"  {one.shard}: {_fact(one.shard, one.why)}" for one in result.left]
    some(console, left, "left as they are, being damaged")
    if result.left:
        console.print("stoker cache verify PATH --repair sets the records aside")


def _cleaner(result: CompactReport) -> str:
    """Return the command that removes what a compaction left."""
    if result.address is None:
        return "stoker cache gc"
    folder = result.address.rsplit("/", 2)[0]
    return escape(f"stoker cache gc {folder} --at-address")


def gc(result: GcReport, console: Console) -> None:
    """Print what becomes of each cache and by which rule, then other items with their size and reason."""
    goes = "would be removed" if result.dry_run else "removed"
    if result.caches:
        rows = [bold("cache", "size", "last used", "", "why")]
        for one in sorted(result.caches, key=lambda one: (not one.removed, one.name, one.fingerprint)):
            ago = "now" if one.unused_s < 60 else f"{format_seconds(one.unused_s)} ago"
            cells = (f"{one.name}/{one.fingerprint}", format_bytes(one.bytes), ago)
            rows.append((*map(escape, cells), goes if one.removed else "kept", escape(one.rule)))
        table(console, rows, fixed=4, right=range(1, 3), gap=2)
    of_caches = {f"{result.cache_dir}/{one.name}/{one.fingerprint}" for one in result.caches}
    _items(console, [item for item in result.removed if item.path not in of_caches], goes)
    _items(console, [item for item in result.kept if item.path not in of_caches], "kept")
    left = format_bytes(result.bytes_left)
    if result.removed:
        freed = format_bytes(result.bytes_removed)
        console.print(f"{freed} {'would be' if result.dry_run else 'are'} freed, {left} are kept")
    else:
        console.print(f"nothing to remove, {left} are kept")
    if result.unseen:
        console.print(escape(result.unseen))


def _matching(records: int, bad: Sequence[BadRecord]) -> str:
    sound = format_count(records - len(_samples(bad)))
    return f"{sound} of {format_count(records)} records match their checksums"


def _samples(bad: Sequence[BadRecord]) -> list[int]:
    return sorted({record.index for record in bad if record.index >= 0})


def _by_shard(bad: Sequence[BadRecord]) -> list[str]:
    """Return one line for each file: what is wrong, and with which samples."""
    by_file: dict[str, list[BadRecord]] = {}
    for record in bad:
        by_file.setdefault(record.shard, []).append(record)
    return [
        f"  {file}{_damaged(_samples(found))}: {_fact(file, found[0].why)}" for file, found in by_file.items()
    ]


def _fact(file: str, why: str) -> str:
    """Return the fact about a file, without its path and the advice, which the lines around it give."""
    return why.rpartition(f"{file}: ")[2].partition(". `stoker ")[0]


def _damaged(numbers: Sequence[int]) -> str:
    """Say how many samples of a shard are damaged, and which, as far as they fit."""
    if not numbers:
        return ""
    which = ", ".join(f"{number:,}" for number in numbers[:SHOWN])
    more = f" and {format_count(len(numbers) - SHOWN)} more" if len(numbers) > SHOWN else ""
    return f": {format_count(len(numbers))} damaged, sample{'s' * (len(numbers) > 1)} {which}{more}"


def _count(names: list[str]) -> str:
    return f"{format_count(len(names))}{': ' + escape(', '.join(names[:3])) if names else ''}"


def _index(result: RepairResult) -> str:
    why = result.report.index
    return f"generation {result.report.generation}" + (f", made again: {why}" if why else "")


def _items(console: Console, items: list[GcItem], title: str) -> None:
    """One line for each thing; the shards of a folder that go or stay for one reason share one."""
    alike: dict[tuple[str, str, str], list[GcItem]] = {}
    for item in items:
        place = item.path if item.kind in ("fingerprint", "weights") else str(Path(item.path).parent)
        kind = "cache" if item.kind == "fingerprint" else item.kind
        alike.setdefault((kind, item.reason, place), []).append(item)
    rows = [bold(title, "size", "why", "")]
    for (kind, reason, place), found in alike.items():
        many = len(found) > 1
        path = place if many else found[0].path
        name = f"{format_count(len(found))} × {kind}" if many else kind
        rows.append((name, format_bytes(sum(item.bytes for item in found)), escape(reason), escape(path)))
    if items:
        table(console, rows, right=(1,))


# ----------------------------------------------------------------------------------------------------------
# Results of several tasks as people read them.


COLUMNS = {
    "val_nrmse": "NRMSE",
    "persistence_nrmse": "persistence",
    "rollout_nrmse": "roll-out",
    "rollout_persistence_nrmse": "persistence",
    "physical_nrmse": "physical",
    "physical_persistence_nrmse": "persistence",
    "reconstruction_nrmse": "encoder's own",
}
"""Errors of a task in the order of their columns; those in physical space are there with a decoder."""


def plan_of_tasks(result: TaskPlans, console: Console) -> None:
    """Print a row for each task and tier that holds some of it, then the reasons."""
    rows: list[Cells] = [bold("task", "tier", "records", "bytes")]
    for task, each in result.tasks.items():
        for row in each.plan.rows:
            if row.records:
                rows.append((escape(task), row.tier, format_count(row.records), format_bytes(row.bytes)))
    table(console, rows, fixed=4, right=range(2, 4), gap=2)
    for task, each in result.tasks.items():
        console.print(escape(f"{task}: {each.reason}"))


def _task_errors(result: TrainResult, console: Console) -> None:
    """Print the errors of each task of several."""
    tasks = result.report.tasks
    names = [name for name in COLUMNS if any(name in errors for errors in tasks.values())]
    rows: list[Cells] = [bold("task", *(COLUMNS[name] for name in names))]
    for task, errors in tasks.items():
        rows.append((escape(task), *(_number(errors.get(name)) for name in names)))
    if tasks:
        table(console, rows, fixed=len(names) + 1, right=range(1, len(names) + 1), gap=2)


# ----------------------------------------------------------------------------------------------------------
# A training run in progress: one screen on a terminal, a line every ten seconds without one.
#
# Both are drawn from the events of the training loop alone. The picture is made by `draw`, a pure function
# of `TrainScreen`; so what is on the screen can be tested without one.


LINE_S = 10.0
"""Seconds between two lines without a terminal."""
BAR = 28
"""Columns of a bar."""
PARTS = ("fetch", "read", "gather", "copy", "transform", "wait")


@dataclass(slots=True, kw_only=True)
class TrainScreen:
    """Facts about a run, filled by its events."""

    name: str = ""
    tiers: dict[str, int] = field(default_factory=dict[str, int])
    """Records per tier, as planned."""
    step: int = 0
    total: int = 0
    epoch: int = 0
    loss: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The last interval of the meter."""
    marks: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """Clock, step and examples at the ends of the last two epochs, or at the first interval before these."""
    now: tuple[float, int, int] = (0.0, 0, 0)
    """The same at the last interval."""
    error: float | None = None
    """Validation error of the last epoch."""

    def take(self, kind: str, facts: Mapping[str, Json], now_s: float) -> None:
        """Take in one event, which came at `now_s` of a clock."""
        known = cast("Mapping[str, Any]", facts)
        if kind == "serve":
            self.tiers, self.name = known["tiers"], known["name"]
        elif kind in ("start", "stage"):
            self.step, self.total, self.marks = known["step"], known["total"], []
        elif kind == "step":
            self.step, self.loss, self.epoch = known["step"], known["loss"], known["epoch"]
        elif kind == "stall":
            self.step, self.epoch = known["step"], known["epoch"]
            self.last = known if known.get("examples", 1) else self.last  # none: an epoch has just begun
            self.now = (now_s, self.step, self.now[2] + known.get("examples", 0))
            self.marks = self.marks or [self.now]  # what precedes the first interval happens once
        elif kind == "epoch":
            self.error = known.get("val_nrmse")
            self.now = (now_s, self.step, self.now[2])
            self.marks = [*self.marks[-1:], self.now]

    # Rate and time left are of one measurement: wall time since the end of the last epoch but one. It has
    # an entire epoch as soon as there is one, so validation and checkpoints have their part in both.

    @property
    def rate(self) -> float | None:
        """Examples a second; None before it is known."""
        spent_s, _, examples = self._lately()
        return examples / spent_s if spent_s > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds to go; None before the pace is known."""
        spent_s, steps, _ = self._lately()
        return (self.total - self.step) * spent_s / steps if steps else None

    def _lately(self) -> tuple[float, int, int]:
        """Return seconds, steps and examples since the first mark."""
        if not self.marks:
            return 0.0, 0, 0
        (then_s, step, examples), (now_s, last, total) = self.marks[0], self.now
        return now_s - then_s, last - step, total - examples

    def parts(self) -> dict[str, float]:
        """Return the stages waited for in the last interval, as parts of its wall time."""
        spent_s = self.last.get("wait_s", 0.0) + self.last.get("step_s", 0.0)
        found = self.last.get("parts", {})
        return {part: found.get(part, 0.0) / spent_s if spent_s else 0.0 for part in PARTS}


def draw(screen: TrainScreen) -> Group:
    """Return one screen: how far, how fast, waiting for what, and from where it is served."""
    head = Table.grid(padding=(0, 2))
    left = "" if screen.left_s is None else f"{format_seconds(screen.left_s)} left"
    head.add_row(
        Text(screen.name or "train", style="bold"),
        ProgressBar(total=max(1, screen.total), completed=screen.step, width=BAR),
        f"step {format_count(screen.step)} of {format_count(screen.total)}",
        f"epoch {screen.epoch}",
        left,
    )
    figures = [] if screen.rate is None else [f"{format_count(screen.rate)} samples/s"]
    figures += [] if screen.loss is None else [f"loss {screen.loss:.3g}"]
    figures += [] if screen.error is None else [f"NRMSE {screen.error:.3g}"]
    lost = screen.last.get("lost")
    figures += [] if lost is None else [f"{format_percent(lost)} below its compute-only ceiling"]
    return Group(head, Text("  " + " · ".join(figures)), _waits(screen), _tiers(screen))


def _waits(screen: TrainScreen) -> RenderableType:
    stall = screen.last.get("stall")
    table = Table.grid(padding=(0, 2))
    if stall is None:
        return Text("  stall  measured in a moment", style="dim")
    color = "green" if stall < 0.02 else "yellow" if stall < 0.1 else "red"
    figure = Text(format_percent(stall), style=color)
    table.add_row("  stall ", _bar(stall, color), figure, " · ".join(_said(screen)))
    return table


def _said(screen: TrainScreen) -> list[str]:
    """Return the parts of the wait that are long enough to name."""
    return [f"{part} {format_percent(value)}" for part, value in screen.parts().items() if value >= 0.0005]


def _tiers(screen: TrainScreen) -> Table:
    """Return a bar per tier: the share of examples it serves now, and the records meant for it."""
    served = cast("Mapping[str, int]", screen.last.get("tiers", {}))
    total = sum(served.values())
    table = Table.grid(padding=(0, 2))
    for tier, records in screen.tiers.items():
        share = served.get(tier, 0) / total if total else 0.0
        if records or share:
            meant = format_count(records, "record")
            table.add_row(f"  {tier:<6}", _bar(share, "blue"), format_percent(share) + " of batches", meant)
    return table


def _bar(fraction: float, style: str) -> ProgressBar:
    done = min(1.0, fraction)
    return ProgressBar(total=1.0, completed=done, width=BAR, complete_style=style, finished_style=style)


def line(screen: TrainScreen) -> str:
    """Return the same in one line."""
    parts = [f"step {format_count(screen.step)} of {format_count(screen.total)}"]
    parts += [] if screen.rate is None else [f"{format_count(screen.rate)} samples/s"]
    parts += [] if screen.loss is None else [f"loss {screen.loss:.3g}"]
    waits = _said(screen)
    stall = format_percent(screen.last.get("stall", 0.0))
    parts.append(f"stall {stall}" + (f" ({', '.join(waits)})" if waits else ""))
    served = cast("Mapping[str, int]", screen.last.get("tiers", {}))
    if served:
        parts.append(f"{max(served, key=lambda tier: served[tier])} tier")
    parts += [] if screen.left_s is None else [f"{format_seconds(screen.left_s)} left"]
    return " · ".join(parts)


class TrainDisplay:
    """Listens to the training loop and shows it; `listen` is the `EventSink`."""

    def __init__(
        self,
        say: Callable[[str], None],
        show: Callable[[TrainScreen], None] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` draws a screen; None: `say` gets a line every `LINE_S` instead."""
        self._screen = TrainScreen()
        self._say = say
        self._show = show
        self._clock = clock
        self._due_s = clock() + LINE_S

    def listen(self, kind: str, facts: Mapping[str, Json]) -> None:
        """Take in one event, and show what is due."""
        now_s = self._clock()
        self._screen.take(kind, facts, now_s)
        if self._show is not None:
            if kind in ("serve", "start", "stage", "stall", "epoch"):
                self._show(self._screen)
        elif kind == "stall" and now_s >= self._due_s:
            self._due_s = now_s + LINE_S
            self._say(line(self._screen))


@contextmanager
def watching(console: Console, say: Callable[[str], None], *, live: bool) -> Generator[EventSink]:
    """Show a run while the block lasts; what is printed meanwhile appears above the screen.

    Args:
        console: Where the screen is drawn.
        say: Prints one line.
        live: Draw a screen; else lines.
    """
    if not live:
        yield TrainDisplay(say, None).listen
        return
    view = Live(console=console, auto_refresh=False, transient=True)

    def show(screen: TrainScreen) -> None:
        view.start()  # not before training: what encodes has a screen of its own
        view.update(draw(screen), refresh=True)

    try:
        yield TrainDisplay(say, show).listen
    finally:
        view.stop()
