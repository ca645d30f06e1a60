"""The page of a run: figures, picture and settings in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } img { max-width: 100%; background: #fff; }
:root { color-scheme: light dark; }
"""
COLUMNS = ("epoch", "step", "loss", "val_nrmse", "persistence_nrmse", "rollout_nrmse", "stall", "seconds")


def write_report(
    path: Path, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Write the page beside the run's `curves.png`, which is put inside it."""
    picture = path.with_name("curves.png")
    image = ""
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="training curves" src="data:image/png;base64,{data}">'
    epochs = [row for row in rows if row.get("kind") == "epoch"]
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f'<td class="n">{_text(row.get(name))}</td>' for name in COLUMNS) + "</tr>"
        for row in epochs
    )
    title = html.escape(path.parent.name)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1>{_table(figures)}{image}<h2>Epochs</h2>"
        f"<table><tr>{head}</tr>{body}</table><h2>Settings</h2>{_table(config)}</html>\n",
        encoding="utf-8",
    )


def _table(entries: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="n">{_text(value)}</td></tr>'
        for name, value in entries.items()
    )
    return f"<table>{rows}</table>"


def _text(value: object) -> str:
    if value is None:
        return "-"
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
