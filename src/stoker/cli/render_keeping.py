"""Results of the commands that look after caches, as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from stoker.cli.render import SHOWN, bold, some, table
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.pipeline.import_pt import ImportResult
    from stoker.pipeline.keep import RepairResult
    from stoker.pipeline.staging import StageReport
    from stoker.store import BadRecord, VerifyReport
    from stoker.store.compact import CompactReport
    from stoker.store.gc import GcItem, GcReport


def verify(result: VerifyReport, console: Console) -> None:
    """The count that is right, then what is not by shard, then what was not looked at."""
    console.print(_matching(result.records, result.bad))
    count = len(_samples(result.bad))
    title = f"{format_count(count)} damaged" if count else "damaged, and no record with it"
    some(console, _by_shard(result.bad), title)
    if result.bad:
        console.print(
            "stoker verify PATH --repair sets them aside, and says how they are encoded again", soft_wrap=True
        )
    if result.unchecked:
        console.print(f"not looked at: {'; '.join(result.unchecked)}", soft_wrap=True)


def stage(result: StageReport, console: Console) -> None:
    """A line for each task, and where its copies are."""
    for one in result.tasks:
        files = f"{format_count(one.files, 'file')}, {format_bytes(one.bytes)}"
        if not one.staged:
            console.print(
                f"[bold]{escape(one.task)}[/]  not staged: {escape(one.reason)} ({files})", soft_wrap=True
            )
            continue
        copied = f"{format_bytes(one.copied_bytes)} copied in {format_seconds(one.seconds)}"
        console.print(f"[bold]{escape(one.task)}[/]  {files}, {copied}: {escape(one.reason)}", soft_wrap=True)
        console.print(f"  {escape(str(one.path))}", soft_wrap=True)


def repair(result: RepairResult, console: Console) -> None:
    """What was set aside, and what to do about the rest."""
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
    some(console, [f"  {shard}: {why}" for shard, why in report.unread], "not readable now")
    if result.encoded is not None:
        console.print(f"encoded again: {format_count(result.encoded)}")
    if result.ok:
        console.print("complete: every sample is stored or quarantined")
        return
    from stoker.pipeline.keep import number_ranges

    count = len(result.missing)
    have = f"{format_count(count, 'sample')} {'has' if count == 1 else 'have'}"
    samples = f"{have} to be encoded: {number_ranges(result.missing)}"
    console.print(escape(samples), soft_wrap=True)
    console.print(escape(f"  {result.command}"), soft_wrap=True)
    made = "folder and options of the first import" if result.imported else "settings that made it"
    console.print(f"  with the {made}", soft_wrap=True)


def compact(result: CompactReport, console: Console) -> None:
    """Shards before and after, and what is left behind."""
    if result.merged:
        console.print(
            f"{format_count(result.merged, 'shard')} became {format_count(result.written)}: "
            f"{format_count(result.records, 'record')} moved, {format_count(result.shards_before, 'shard')} "
            f"before, {format_count(result.shards_after)} now, {format_bytes(result.bytes_before)} became "
            f"{format_bytes(result.bytes_after)}",
            soft_wrap=True,
        )
    else:
        console.print(f"nothing to merge: {format_count(result.shards_after, 'shard')}")
    if result.superseded_bytes:
        size = format_bytes(result.superseded_bytes)
        console.print(
            f"{size} of superseded shards stay for open readers; {_cleaner(result)} removes them",
            soft_wrap=True,
        )
    left = [f"  {shard}: {_fact(shard, why)}" for shard, why in result.left]
    some(console, left, "left as they are, being damaged")
    if result.left:
        console.print("stoker verify PATH --repair sets the records aside")


def _cleaner(result: CompactReport) -> str:
    """The command that removes what a compaction left."""
    if result.address is None:
        return "stoker gc"
    folder = result.address.rsplit("/", 2)[0]
    return escape(f"stoker gc {folder} --at-address")


def gc(result: GcReport, console: Console) -> None:
    """Each thing with its size and reason, then what stays although the policy names it."""
    _items(console, result.removed, "would be removed" if result.dry_run else "removed")
    _items(console, result.kept, "kept")
    left = format_bytes(result.bytes_left)
    if result.removed:
        freed = format_bytes(result.bytes_removed)
        console.print(f"{freed} {'would be' if result.dry_run else 'are'} freed, {left} are kept")
    else:
        console.print(f"nothing to remove, {left} are kept")
    if result.unseen:
        console.print(escape(result.unseen), soft_wrap=True)


def import_pt(result: ImportResult, console: Console) -> None:
    """What was stored, and every sample that was not."""
    cache = result.cache
    counts = f"{format_count(result.imported)} imported, {format_count(result.reused)} there before, "
    counts += f"{format_count(len(result.failures))} missing or broken"
    table(
        console,
        [
            (escape(cache.name), counts, format_seconds(result.seconds)),
            ("", escape(str(cache.path))),
        ],
    )
    some(console, [f"  sample {f['number']:,}: {f['error']}" for f in result.failures], "not imported")
    lines = [
        f"  {name}: in {format_count(count)} file{'s' * (count > 1)}"
        for name, count in result.left_out.items()
    ]
    some(console, lines, "left out, since no field can hold text, lists or nothing")
    if result.ignored:
        files = "1 other file" if result.ignored == 1 else f"{format_count(result.ignored)} other files"
        console.print(f"{files} ignored")
    console.print(escape(f"stoker.open_cache({str(cache.path)!r}) serves what is there"), soft_wrap=True)
    if result.failures:
        console.print("once the files are fixed, the same command makes a cache of all", soft_wrap=True)


def _matching(records: int, bad: Sequence[BadRecord]) -> str:
    sound = format_count(records - len(_samples(bad)))
    return f"{sound} of {format_count(records)} records match their checksums"


def _samples(bad: Sequence[BadRecord]) -> list[int]:
    return sorted({record.index for record in bad if record.index >= 0})


def _by_shard(bad: Sequence[BadRecord]) -> list[str]:
    """One line for each file: what is wrong, and with which samples."""
    by_file: dict[str, list[BadRecord]] = {}
    for record in bad:
        by_file.setdefault(record.shard, []).append(record)
    return [
        f"  {file}{_damaged(_samples(found))}: {_fact(file, found[0].why)}" for file, found in by_file.items()
    ]


def _fact(file: str, why: str) -> str:
    """What is wrong with a file, without its path and the advice, which the lines around it give."""
    return why.rpartition(f"{file}: ")[2].partition(". `stoker ")[0]


def _damaged(numbers: Sequence[int]) -> str:
    """How many samples of a shard are damaged, and which, as far as they fit."""
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
        alike.setdefault((item.kind, item.reason, place), []).append(item)
    rows = [bold(title, "size", "why", "")]
    for (kind, reason, place), found in alike.items():
        many = len(found) > 1
        path = place if many else found[0].path
        name = f"{format_count(len(found))} × {kind}" if many else kind
        rows.append((name, format_bytes(sum(item.bytes for item in found)), escape(reason), escape(path)))
    if items:
        table(console, rows, right=(1,))
