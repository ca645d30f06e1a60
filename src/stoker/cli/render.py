"""Results as people read them: short lines and tables, figures with units, the next step last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.demo import DemoResult
    from stoker.pipeline.inspect import CacheSummary, VerifyResult
    from stoker.pipeline.plan import PlanResult
    from stoker.pipeline.precompute import CacheResult, PrecomputeResult
    from stoker.pipeline.train import TrainResult
    from stoker.pipeline.validate import Validation
    from stoker.pipeline.why import Explanation
    from stoker.schema import Json, Schema
    from stoker.train.config import EventSink

SHOWN = 20
"""Lines of one kind (damaged records, quarantined samples) before the rest becomes a count."""
STATUS_STYLE = {"pass": "green", "warn": "yellow", "fail": "red"}


def precompute(result: PrecomputeResult, console: Console) -> None:
    """Two lines per cache, then its quarantined samples."""
    table = _grid(gap=3)
    for cache in result.caches:
        _cache_rows(table, cache.name, cache, named=False)
        table.add_row("", escape(str(cache.cache.path)))
    _print(console, table)
    for cache in result.caches:
        failures = [f"  sample {f['number']:,} ({f['stage']}: {f['error']})" for f in cache.failures]
        _some(console, failures, f"{cache.name}: {len(failures)} quarantined")
        if failures:
            line = f"  stoker inspect {cache.cache.path} lists them; --retry-quarantined tries again"
            console.print(escape(line), soft_wrap=True)


def plan(result: PlanResult, console: Console) -> None:
    """One table row per tier, then the reason."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier")
    for name in ("records", "bytes", "load/batch", "stall"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for row in result.plan.rows:
        table.add_row(
            row.tier,
            format_count(row.records) if row.records else "-",
            format_bytes(row.bytes) if row.records else "-",
            "-" if row.load_s is None else format_seconds(row.load_s),
            "-" if row.stall is None else format_percent(row.stall),
            escape(row.note),
        )
    _print(console, table)
    console.print(escape(result.reason), soft_wrap=True)


def train(result: TrainResult, console: Console) -> None:
    """What a run came to, its pictures, and how it started."""
    table = _grid(gap=3)
    _train_rows(table, "train", result)
    _print(console, table)
    console.print(_startup(result))


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
        elif kind == "resume":
            say(f"resumed at step {facts.get('step')}, epoch {facts.get('epoch')}")
        elif kind == "skip":
            say(f"passed over a checkpoint: {facts.get('why')}")

    return listen


def demo(result: DemoResult, console: Console) -> None:
    """The four steps and the two figures that matter."""
    console.print(escape(result.machine), "", sep="\n")
    table = _grid(gap=2)
    table.add_row(
        "1  data", escape(result.data_line), format_seconds(result.data_s), escape(result.data_path)
    )
    for number, cache in enumerate(result.caches):
        _cache_rows(table, "2  cache" if not number else "", cache, named=True)
    plan = result.plan
    table.add_row(
        "3  plan",
        f"{format_count(plan.records)} records on the {plan.plan.tier} tier",
        "",
        escape(_held(plan)),
    )
    _train_rows(table, "4  train", result.train)
    _print(console, table)
    console.print()
    console.print(_startup(result.train))


def inspect(result: CacheSummary, console: Console) -> None:
    """One line per fact, then one per field."""
    state = "complete" if result.complete else "incomplete"
    table = _grid(gap=3)
    table.add_row("cache", escape(result.name))
    table.add_row("path", escape(result.path))
    table.add_row("fingerprint", result.fingerprint)
    table.add_row("records", f"{format_count(result.records)} of {format_count(result.count)}, {state}")
    table.add_row("quarantined", format_count(len(result.quarantined)))
    table.add_row("shards", f"{format_count(result.shards)}, {format_bytes(result.bytes)}")
    _print(console, table)
    console.print()
    fields = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("field", "shape", "dtype"):
        fields.add_column(name)
    for name in ("mean", "std", "min", "max", "rounding error"):
        fields.add_column(name, justify="right")
    for name, field in result.fields.items():
        numbers: Mapping[str, object] = result.statistics.get(name) or {}
        errors: Mapping[str, object] = result.error.get(name) or {}
        fields.add_row(
            name,
            escape(str(field.shape)),
            field.dtype,
            *(_number(numbers.get(key)) for key in ("mean", "std", "min", "max")),
            _number(errors.get("max")),
        )
    _print(console, fields)
    lines = [f"  sample {f['number']:,} ({f['stage']}: {f['error']})" for f in result.quarantined]
    _some(console, lines, "quarantined")


def verify(result: VerifyResult, console: Console) -> None:
    """The count that is right, then what is not."""
    damaged = len({bad.index for bad in result.bad if bad.index >= 0})
    console.print(
        f"{format_count(result.records - damaged)} of {format_count(result.records)} "
        "records match their checksums"
    )
    lines = [f"  sample {bad.index:,} in {bad.shard}: {bad.why}" for bad in result.bad]
    _some(console, lines, f"{len(result.bad)} damaged")
    if lines:
        console.print(
            "remove the damaged shards and run the same precompute again: only their records are encoded"
        )


def validate(result: Validation, console: Console) -> None:
    """One row per check, failures coloured, the verdict last."""
    table = _grid(gap=3)
    for row in result.rows:
        style = STATUS_STYLE[row.status]
        table.add_row(f"[{style}]{row.status}[/{style}]", row.check, escape(row.detail))
    _print(console, table)
    failed = sum(row.status == "fail" for row in result.rows)
    warned = sum(row.status == "warn" for row in result.rows)
    console.print(f"{failed} failed, {warned} to look at, {len(result.rows) - failed - warned} fine")


def why(result: Explanation, console: Console) -> None:
    """Each differing entry with both values, or that there is none."""
    console.print(f"a  {escape(result.a)}", f"b  {escape(result.b)}", sep="\n")
    if result.same:
        console.print("same recipe")
        return
    table = _grid(gap=3)
    for difference in result.differences:
        values = f"{_short(difference.a)}  ->  {_short(difference.b)}"
        table.add_row(escape(difference.entry), escape(values), escape(difference.note))
    _print(console, table)


def _cache_rows(table: Table, label: str, cache: CacheResult, *, named: bool) -> None:
    """Two rows; `named` repeats the cache's name where the label is another word."""
    if cache.encoded:
        counts = f"{format_count(cache.encoded)} of {format_count(cache.count)} encoded"
        counts += f", {format_count(cache.reused)} reused" if cache.reused else ""
        rate = cache.encoded / cache.seconds if cache.seconds > 0 else 0.0
        busy = cache.encode_seconds / cache.seconds if cache.seconds > 0 else 0.0
        more = f"{format_count(rate)} samples/s · encoder busy {format_percent(min(1.0, busy))}"
    else:
        counts = f"{format_count(len(cache.cache))} records ready, nothing to encode"
        more = "source gone, cache used" if cache.source_gone else "same recipe"
    counts += f", {format_count(len(cache.failures))} quarantined"
    counts = f"{cache.name}: {counts}" if named else counts
    table.add_row(escape(label), escape(counts), format_seconds(cache.seconds), more)
    error = "" if not cache.error else f" · largest rounding error {cache.error:.1e}"
    table.add_row(
        "", f"{cache.cache.fingerprint} · {_fields(cache.fields)} · {format_bytes(cache.bytes)}{error}"
    )


def _train_rows(table: Table, label: str, result: TrainResult) -> None:
    spent = format_seconds(result.train_s)
    report = result.report
    counts = f"{format_count(report.epochs)} epochs, {format_count(report.steps)} steps"
    stall = "" if report.stall is None else f"stall {format_percent(report.stall)} · "
    table.add_row(label, counts, spent, f"{stall}{report.tier} tier")
    table.add_row("", f"NRMSE {_number(report.val_nrmse)} (persistence {_number(report.persistence_nrmse)})")
    table.add_row("", escape(" · ".join(result.pictures)))


def _startup(result: TrainResult) -> str:
    begin, cache = format_seconds(result.first_batch_s), format_seconds(result.cache_s)
    again = "nothing was encoded" if result.cache_reused else "run it again: encoding is skipped"
    return f"first batch {begin} after {cache} of cache work · {again}"


def _held(result: PlanResult) -> str:
    """Bytes by tier, and from which step on nothing waits."""
    held = [f"{format_bytes(row.bytes)} {row.tier}" for row in result.plan.rows if row.records]
    quiet = result.plan.no_stall_step_s
    return " · ".join([*held, *([] if quiet is None else [f"no stall from {format_seconds(quiet)} a step"])])


def _fields(schema: Schema) -> str:
    shown = [f"{escape(str(f.shape))} {f.dtype}" for f in schema.values() if f.shape]
    return ", ".join(shown) or "scalars"


def _grid(*, gap: int) -> Table:
    table = Table.grid(padding=(0, gap, 0, 0))
    for _ in range(4):
        table.add_column(overflow="fold")
    return table


def _print(console: Console, table: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with console.capture() as capture:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _some(console: Console, lines: list[str], title: str) -> None:
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
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}…{text[-8:]}"
