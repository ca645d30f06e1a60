"""Question: what did a session on a GPU find, as files for `benchmarks/results` and as tables to read?

    python benchmarks/gpu_tables.py LOGS OUT

Reads the JSON lines that the steps of `gpu_session.sh` left in the folder LOGS, whatever steps there were. Writes to OUT
`gpu_serve.jsonl` and `gpu_probe.jsonl`, in the format of `benchmarks/results`, and `tables.md`, one table for each part.
Prints what is said at the end of a session: facts that are wrong, then each goal with what was reached.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SERVE = ("gather", "kernel", "load", "host", "train", "encode")
"""Parts of `gpu_serve.py`; those of the probe that are called alike have a field `ok`, or say `what`."""


def rows_of(logs: Path) -> tuple[Row | None, list[Row], list[Row]]:
    """The line of the hardware, the rows of `gpu_serve.py`, and those of the probe."""
    head, served, probed = None, list[Row](), list[Row]()
    for path in sorted(logs.glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut off when the time was over
                continue
            if not isinstance(row, dict):
                continue
            if "benchmark" in row:
                head = head or row
            elif "part" in row:
                (served if path.stem.startswith("b_") and row["part"] in SERVE else probed).append(row)
    return head, served, probed


def made_head() -> Row:
    """The line of the hardware, where no benchmark came so far as to write one."""
    try:
        from measure import commit, hardware

        return {"benchmark": "", "commit": commit(), "when": time.strftime("%Y-%m-%d"), **hardware()}
    except Exception as error:
        return {"benchmark": "", "when": time.strftime("%Y-%m-%d"), "unknown": str(error)[:200]}


def table(rows: list[Row]) -> str:
    """Rows as a table of Markdown; what all of them say alike is left out of it."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "part"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = ["" if row.get(name) is None else str(row[name]).replace("|", "/")[:80] for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(head: Row, served: list[Row], probed: list[Row]) -> str:
    """All tables, one for each part."""
    text = [f"# A session on {head.get('gpu') or 'a CPU'}, {head.get('when')}, commit {head.get('commit')}"]
    for source, rows in (("gpu_serve.py", served), ("gpu_probe.py", probed)):
        for part in dict.fromkeys(row["part"] for row in rows):
            own = [row for row in rows if row["part"] == part]
            text.append(f"## {part} ({source})\n{table(own)}")
    return "\n\n".join(text) + "\n"


def goals(served: list[Row], probed: list[Row]) -> Iterable[str]:
    """What was to be reached, and what was."""

    def best(rows: list[Row], name: str, choose: Callable[..., Any] = max) -> Any:
        found = [row[name] for row in rows if row.get(name) is not None]
        return choose(found) if found else None

    def of(part: str) -> list[Row]:
        return [row for row in served if row["part"] == part]

    large = [row for row in of("gather") if row.get("batch_MiB", 0) >= 64]
    small = [row for row in of("gather") if row.get("batch_MiB", 0) < 1]
    fed = [row for row in of("train") if str(row.get("feed", "")).startswith("stoker, device")]
    serving = [row for row in probed if row["part"] == "serving" and "waits_for_the_device" in row]
    for what, goal, found in (
        ("device tier from 64 MiB a batch, of a copy", "0.85", best(large, "of_copy")),
        ("host time of a small batch, us", "10", best(small, "host_us", min)),
        ("stall on the device tier, most", "0.01", best(fed, "stall")),
        ("filling, of page-locked copies", "0.9", best(of("load"), "of_pinned")),
        ("host tier, of page-locked copies", "0.9", best(of("host"), "of_pinned")),
        ("losses apart from those of a DataLoader, most", "0", best(of("train"), "curve_apart")),
        ("encoding, of the model alone", "", best(of("encode"), "of_model_alone")),
    ):
        if found is not None:
            yield f"{what}: {found}" + (f" (goal {goal})" if goal else "")
    waits = {
        str(row["way"]): row["waits_for_the_device"] for row in serving if row.get("waits_for_the_device")
    }
    if serving:
        told = ", ".join(f"{way} {count}" for way, count in sorted(waits.items(), key=lambda pair: -pair[1]))
        yield f"ways to serve: {len(serving)}; waits for the device in a batch: {told or 'none'}"


def main() -> None:
    logs, out = map(Path, sys.argv[1:3])
    head, served, probed = rows_of(logs)
    head = head or made_head()
    for name, rows in (("gpu_serve", served), ("gpu_probe", probed)):
        if rows:
            lines = [json.dumps(row) for row in ({**head, "benchmark": name}, *rows)]
            (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (out / "tables.md").write_text(tables(head, served, probed))
    for row in probed:
        if row.get("ok") is False:
            told = {name: value for name, value in row.items() if name not in ("ok", "part")}
            print(f"not ok: {row['part']} {json.dumps(told, default=str)[:200]}")
    for line in goals(served, probed):
        print(line)


if __name__ == "__main__":
    main()
