"""What there is to know of a data set, by kind; done in a process of its own (`look.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stoker.errors import SourceError
from stoker.pipeline.radio_store import remove_radio
from stoker.schema import Json, schema_to_json
from stoker.service.radio_sets import MOST_SHOWN, RadioSet
from stoker.sources.files import find_files, split_of
from stoker.sources.protocol import Source
from stoker.sources.splits import DEFAULT_SPLITS
from stoker.units import format_count

_READ = 8
"""Samples that a check reads, spread over the data set."""
Spec = Mapping[str, Any]


def facts(kind: str, spec: Spec) -> dict[str, Json]:
    """Figures of a data set, from headers and names alone.

    Raises:
        SourceError: It cannot be opened, or is none.
    """
    if kind == "radio":
        own = _radio(spec)
        if missing := own.missing_columns():
            raise SourceError(
                f"table {own.table} has no column {', '.join(missing)}. Expected the measurements that "
                "docs/sql.md describes"
            )
        found = own.facts()
        if not found["rows"]:
            raise SourceError(f"table {own.table} has no row of data set {own.set}. Check the id")
        return {"samples": found.pop("rows"), **found}
    _refuse_links(Path(str(spec["path"])))
    source = _source(kind, spec)
    common: dict[str, Json] = {"samples": len(source), "fields": schema_to_json(source.schema())}
    classes = getattr(source, "classes", ())
    if kind == "images":
        if len(classes) < 2:
            raise SourceError(
                f"{spec['path']} has {len(classes)} folders of images. Expected two or more, one a class"
            )
        common["classes"] = list(classes)
    return {**common, "named_splits": _named_splits(kind, spec)}


def check(kind: str, spec: Spec) -> list[dict[str, Json]]:
    """Rows of pass, warn and fail: `check`, `status`, `detail`."""
    return _check_radio(_radio(spec)) if kind == "radio" else _check_samples(_source(kind, spec), kind)


def samples(kind: str, spec: Spec, limit: int = 20, offset: int = 0) -> list[dict[str, Json]]:
    """Some samples, as people look at them."""
    if kind == "radio":
        return _radio(spec).samples(limit, offset)
    source = _source(kind, spec)
    numbers = range(offset, min(offset + min(limit, MOST_SHOWN), len(source)))
    keys = source.keys()
    return [{"number": number, "key": keys[number]} for number in numbers]


def remove(kind: str, spec: Spec) -> None:
    """Remove a data set that the service made."""
    if kind == "radio":
        remove_radio(str(spec["url"]), str(spec["set"]))
    else:
        Path(str(spec["path"])).unlink(missing_ok=True)


def plan(
    _kind: str,
    _spec: Spec,
    *,
    config: Mapping[str, Any],
    datasets: Sequence[Mapping[str, Any]],
    caches: str,
    run_dir: str,
) -> dict[str, Json]:
    """Return where the records of a job would be served from; nothing is encoded.

    Raises:
        StokerError: The data cannot be read, or no plan fits.
    """
    from stoker.pipeline.plan import plan_config
    from stoker.service.runs.settings import settings_of
    from stoker.service.training_config import TrainingConfig

    wanted = TrainingConfig.model_validate(dict(config))
    settings = settings_of(wanted, datasets, caches=caches, run_dir=run_dir, epochs=wanted.epochs)
    return plan_config(settings).to_json()


LOOKS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"facts": facts, "check": check, "samples": samples, "remove": remove, "plan": plan}
)


def _radio(spec: Spec) -> RadioSet:
    return RadioSet.of(spec)


def _source(kind: str, spec: Spec) -> Source:
    if kind == "images":
        from stoker.sources.images.source import ImageSource

        return ImageSource(spec["path"], "folder", (64, 64))
    from stoker.sources.hdf5 import HDF5Source

    return HDF5Source(spec["path"])


def _named_splits(kind: str, spec: Spec) -> bool:
    """Whether the data says itself what is for training and what for validation."""
    if kind == "images":
        from stoker.sources.images.files import split_folders

        return bool(split_folders(Path(str(spec["path"]))))
    root, paths = find_files(str(spec["path"]))
    return all(split_of(str(path.relative_to(root)), DEFAULT_SPLITS) for path in paths)


def _refuse_links(path: Path) -> None:
    """Nothing below the folder may lead out of it."""
    root = path.resolve()
    for entry in root.rglob("*") if root.is_dir() else ():
        if entry.is_symlink() and not entry.resolve().is_relative_to(root):
            raise SourceError(f"{entry} is a link that leads out of {path}. Put the file itself there")


def _check_radio(own: RadioSet) -> list[dict[str, Json]]:
    found: dict[str, Any] = own.facts()
    count = found["rows"]
    rows = [_row("rows", "pass" if count else "fail", f"{format_count(count)} rows")]
    for name, what in (
        ("without_place", "without the transmitter's place"),
        ("place_out_of_range", "whose place is none on the earth"),
    ):
        bad = found[name] or 0
        rows.append(_row(name, "fail" if bad else "pass", f"{format_count(bad)} rows {what}"))
    bad = found["without_gdop"] or 0
    told = f"{format_count(bad)} rows without gdop, which count as 50"
    rows.append(_row("gdop", "warn" if bad else "pass", told))
    most = found["most_receivers"] or 0
    told = f"{found['least_receivers']} to {most} receivers a row"
    if most > 7:
        told += f"; a job takes 7 unless it has max_receivers={most}"
    rows.append(_row("receivers", "warn" if most > 7 else "pass", told))
    snr = f"mean signal to noise {found['least_snr_db']} to {found['most_snr_db']} dB"
    return [*rows, _row("signal", "pass", snr)]


def _check_samples(source: Source, kind: str) -> list[dict[str, Json]]:
    count = len(source)
    rows = [_row("samples", "pass", format_count(count, "sample"))]
    if kind == "images":
        keys = source.keys()
        names: Counter[str] = Counter(key.split("/")[-2] for key in keys if "/" in key)
        least = min(names.values(), default=0)
        told = ", ".join(f"{name} {format_count(n)}" for name, n in islice(names.most_common(), 10))
        rows.append(_row("classes", "pass" if least > 1 else "warn", told))
    bad: list[str] = []
    for number in sorted({round(n * (count - 1) / (_READ - 1)) for n in range(_READ)}):
        try:
            sample = source.read(number)
        except SourceError as error:
            bad.append(str(error))
            continue
        for name, value in sample.items():
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                bad.append(f"sample {number}: {name} holds a NaN or an infinity")
    told = "; ".join(bad[:3]) or "those read are whole and finite"
    return [*rows, _row("content", "fail" if bad else "pass", told)]


def _row(check: str, status: str, detail: str) -> dict[str, Json]:
    return {"check": check, "status": status, "detail": detail}
