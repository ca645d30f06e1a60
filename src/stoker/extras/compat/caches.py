"""Checks of the earlier latent cache before training: is it complete, does it fit, is it the right one.

Folders are caches of Stoker, or those of the earlier system: `sample_00000.pt` and so on. Files of the
latter are read in a limited child process and never by `torch.load` here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from stoker.config import Config
from stoker.errors import FormatError, IncompleteError, SourceError, StokerError
from stoker.extras.adopt.pt import MAX_FILE_BYTES, PtReader, RefusedFileError
from stoker.extras.compat.settings import config_of
from stoker.plan.resources import probe
from stoker.run.caches import data_is_gone, find_without_source, locate, recipe_of
from stoker.run.context import Run
from stoker.run.validate import CheckRow
from stoker.runtime.jsonio import canonical_json, read_object
from stoker.runtime.mounts import storage_of
from stoker.schema import columns_of
from stoker.store import Cache, open_cache
from stoker.store.format import is_fixed, record_bytes
from stoker.store.storage import open_storage
from stoker.units import GIB, MIB, format_bytes

log = logging.getLogger("stoker")
SAMPLE_FILE = re.compile(r"sample_(\d{5,9})\.pt")
METADATA_FILE = ".cache_metadata.json"
SAFETY_MARGIN = 0.2
HEX_DIGITS = 12


class CacheIncompleteError(IncompleteError, ValueError):
    """`Cache incomplete: x/N`; a ValueError, as it was."""


def check_cache_complete(cache_dir: str | Path, num_samples: int) -> tuple[bool, int]:
    """Return whether so many records are stored, and how many are.

    In a cache, the records of its index count. In a folder of `sample_00000.pt`, files below `num_samples`
    count if they are complete archives of `torch.save`. A file of other content does not count, and a log
    line names the first.
    """
    stored = stored_in(cache_dir)
    if isinstance(stored, dict):
        files = stored
        good = {number for number, path in files.items() if number < num_samples and _is_archive(path)}
        bad = [path for number, path in files.items() if number < num_samples and number not in good]
        if bad:
            log.warning("%s is not a complete file of torch.save, and %d in all are not", bad[0], len(bad))
        return len(good) >= num_samples, len(good)
    count = 0 if stored is None else len(stored)
    return stored is not None and stored.complete and count >= num_samples, count


def estimate_cache_size_mb(cache_dir: str | Path, num_samples: int = 10) -> float:
    """Return the MiB that all records take in memory.

    Of a cache this is exact. Of a folder of `sample_00000.pt` the first `num_samples` files are read, and
    their mean counts for each.

    Raises:
        StokerError: No cache was found, or a file is not one of the earlier cache.
    """
    files = sample_files(cache_dir)
    if not files or _cache_of(cache_dir) is not None:
        return bytes_in_memory(open_cache(cache_dir, require_complete=False)) / MIB
    first = EarlierReader().read([files[number] for number in sorted(files)[: max(1, num_samples)]])
    sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in first]
    return sum(sizes) / len(sizes) * len(files) / MIB


def check_sufficient_ram(required_mb: float, safety_margin: float = SAFETY_MARGIN) -> bool:
    """Return whether this process may take so many MiB and the margin, within its control group's limit."""
    return probe().host_bytes >= required_mb * MIB * (1 + safety_margin)


def compute_cache_hash(cfg: Mapping[str, Any] | str | Path | Config) -> str:
    """Return twelve hexadecimal digits that change with what decides the bytes of the caches.

    Where the raw data is there, they are made of the fingerprints: data, encoder, storage dtype. Where it is
    not, they are made of the settings alone, and a line says so: such a hash changes with `data.root` and
    with no byte of the data. The order of tasks never counts.

    Raises:
        StokerError: A setting is wrong, or the data is there and cannot be read.
    """
    config = config_of(cfg)
    run = Run(config)
    if any(data_is_gone(part) for part in run.parts()):
        log.info("the cache hash is of the settings alone: no raw data was found below %s", _place(config))
        return settings_hash(config)
    return _digits([recipe_of(run.for_task(task), run.split).fingerprint for task in sorted(run.tasks)])


def settings_hash(config: Config) -> str:
    """Return twelve digits of the settings that decide the caches, without a look at the data."""
    plain = config.to_dict()
    data = cast("dict[str, Any]", plain["data"])
    data["task"] = sorted(Run(config).tasks)
    training = cast("dict[str, Any]", plain["training"])
    wanted = {
        "data": {name: value for name, value in data.items() if not name.startswith("stage")},
        "latent": plain["latent"],
        "encoder": plain["encoder"],
        "keep": config.precompute.keep,
        "dtype": training["latent_cache_dtype"],
    }
    return _digits([json.dumps(wanted, sort_keys=True)])


def save_cache_metadata(cache_dir: str | Path, cfg: Any, config_hash: str | None = None) -> Path:
    """Write `.cache_metadata.json` into the folder of the caches; the cache itself needs none.

    Args:
        cache_dir: The folder, made where it is not there.
        cfg: The settings: a mapping, an OmegaConf object or a file.
        config_hash: None: `compute_cache_hash(cfg)`.

    Returns:
        The file.
    """
    config = config_of(cfg)
    folder = Path(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "config_hash": config_hash or compute_cache_hash(config),
        "settings_hash": settings_hash(config),
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "latent_dim": config.latent.dim,
        "latent_tokens": config.latent.tokens,
        "data_task": config.data.task if isinstance(config.data.task, str) else [*config.data.task],
    }
    open_storage(folder).put(METADATA_FILE, canonical_json(content).encode())
    return folder / METADATA_FILE


def check_cache_valid(cache_dir: str | Path, cfg: Any) -> bool:
    """Return whether the folder's metadata is of these settings and of this data; a line says why.

    A cache of Stoker checks itself when it is opened, and `stoker cache verify` reads it. This compares
    `.cache_metadata.json`: its hash, or where the raw data is gone the part that is of settings.

    Args:
        cache_dir: The folder that `save_cache_metadata` wrote to.
        cfg: The settings, or a hash of `compute_cache_hash`.
    """
    try:
        known = read_metadata(cache_dir)
    except (FormatError, FileNotFoundError) as error:
        log.info("Cache invalid (%s)", error)
        return False
    if isinstance(cfg, str) and len(cfg) == HEX_DIGITS and not Path(cfg).exists():
        wanted = cfg
    else:
        wanted = compute_cache_hash(cfg)
    if wanted not in (known["config_hash"], known.get("settings_hash")):
        log.info("Cache invalid (hash mismatch: %s != %s)", known["config_hash"], wanted)
        return False
    hours = (time.time() - datetime.fromisoformat(known["generated_at"]).timestamp()) / 3600
    log.info("Cache valid (hash=%s, age=%.1fh)", wanted, hours)
    return True


def read_metadata(cache_dir: str | Path) -> dict[str, Any]:
    """Return what `.cache_metadata.json` says.

    Raises:
        FileNotFoundError: The folder has no such file.
        FormatError: It is not JSON, or lacks an entry.
    """
    path = Path(cache_dir) / METADATA_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        known = read_object(path)
        datetime.fromisoformat(known["generated_at"])
        str(known["config_hash"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} is not the metadata of a cache ({type(error).__name__}: {error})",
            hint="Remove it; save_cache_metadata writes it again",
        ) from error
    return known


def validate_cache(cfg: Any) -> list[CheckRow]:
    """Return rows about the caches of these settings, as `stoker validate` shows them.

    `cache dir`, `cache metadata`, and for each task `cache NAME`: how many records are ready, and what is
    missing. A cache that is not made yet is a warning.
    """
    config = config_of(cfg)
    folder = Run(config).cache_dir
    if not folder.is_dir():
        return [
            CheckRow(check="cache dir", status="warn", detail=f"{folder} is not there: not generated yet")
        ]
    rows = [
        CheckRow(check="cache dir", status="pass", detail=f"{folder} exists"),
        _metadata_row(folder, config),
    ]
    for name, cache, why in _caches(config):
        if cache is None:
            rows.append(CheckRow(check=f"cache {name}", status="warn", detail=why))
        else:
            status = "pass" if cache.complete else "warn"
            detail = f"{len(cache)}/{cache.recipe.count} records in {cache.path}"
            rows.append(CheckRow(check=f"cache {name}", status=status, detail=detail))
    return rows


def validate_ram_for_cache(cfg: Any) -> list[CheckRow]:
    """Return a row for each cache: do all of its records fit into memory at once, with a fifth to spare.

    A cache that does not fit is a warning: a `Loader` serves from disk what memory does not hold.
    """
    config = config_of(cfg)
    if not Run(config).cache_dir.is_dir():
        return [CheckRow(check="cache ram", status="pass", detail="skipped (no cache)")]
    rows: list[CheckRow] = []
    for name, cache, _ in _caches(config):
        if cache is None:
            rows.append(CheckRow(check=f"cache ram {name}", status="pass", detail="skipped (not generated)"))
            continue
        needed, free = bytes_in_memory(cache), probe().host_bytes
        fits = check_sufficient_ram(needed / MIB)
        detail = f"RAM {'sufficient' if fits else 'insufficient'}: {format_bytes(needed)} needed, " + (
            f"{format_bytes(free)} available" + ("" if fits else "; the rest is served from disk")
        )
        rows.append(CheckRow(check=f"cache ram {name}", status="pass" if fits else "warn", detail=detail))
    return rows


def _metadata_row(folder: Path, config: Config) -> CheckRow:
    check = "cache metadata"
    try:
        known = read_metadata(folder)
    except FileNotFoundError:
        detail = f"no {METADATA_FILE}; each cache has its recipe in it, which decides"
        return CheckRow(check=check, status="pass", detail=detail)
    except FormatError as error:
        return CheckRow(check=check, status="fail", detail=str(error), exit_code=error.exit_code)
    if check_cache_valid(folder, config):
        return CheckRow(check=check, status="pass", detail=f"metadata valid, hash={known['config_hash']}")
    detail = f"metadata is of other settings or data, hash={known['config_hash']}; caches of these are made"
    return CheckRow(check=check, status="warn", detail=detail)


def _caches(config: Config) -> list[tuple[str, Cache | None, str]]:
    """Return name and cache of each task and wanted split; without a cache: None, and why."""
    found: list[tuple[str, Cache | None, str]] = []
    for part in Run(config).parts():
        for split in part.splits:
            name, why = f"{part.task}_{split}", "not generated yet"
            try:
                gone = find_without_source(part, [split])
                cache = gone[split] if gone else locate(part, split).cache
            except (StokerError, OSError) as error:
                cache, why = None, str(error)
            found.append((name, cache, why))
    return found


def _digits(parts: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:HEX_DIGITS]


def _place(config: Config) -> str:
    return config.data.root if config.data.files is None else str(config.data.files)


def sample_files(cache_dir: str | Path) -> dict[int, Path]:
    """Return the `sample_00000.pt` files of a folder by number; empty where it has none."""
    found: dict[int, Path] = {}
    with suppress(OSError):
        for path in Path(cache_dir).iterdir():
            match = SAMPLE_FILE.fullmatch(path.name)
            if match and path.name == f"sample_{int(match[1]):05d}.pt" and path.is_file():
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def _is_archive(path: Path) -> bool:
    """Return True if a file is an archive as of `torch.save`, complete to its end; nothing is loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


class EarlierReader:
    """Reads earlier files in a limited child, which stays for the next call of the same process."""

    def __init__(self) -> None:
        self._child: PtReader | None = None
        self._pid = self._limit_bytes = 0
        self._ending: weakref.finalize[..., EarlierReader] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # another process starts a child of its own

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()

    def read(self, paths: Sequence[Path]) -> list[dict[str, Tensor]]:
        """Return the tensors of some files: `latent`, `param_*`, `bc_*`.

        Raises:
            SourceError: A file is not one of the earlier cache; it is named.
        """
        found: list[dict[str, Tensor]] = []
        reader = self._reader(max((path.stat().st_size for path in paths), default=0))
        for path in paths:
            try:
                tensors = reader.read(path).tensors
                if "latent" not in tensors or tensors["latent"].dim() != 3:
                    raise RefusedFileError("it has no 'latent' (T, L, D)")
                found.append(tensors)
            except RefusedFileError as refused:
                raise SourceError(
                    f"{path} is not a sample of the earlier cache: {refused}",
                    hint="Remove it and encode again, or import the others with `stoker cache adopt "
                    "FOLDER --out CACHE_DIR --name NAME`",
                ) from refused
        return found

    def _reader(self, largest_bytes: int) -> PtReader:
        limit_bytes = min(largest_bytes, MAX_FILE_BYTES)
        if self._child is None or self._pid != os.getpid() or limit_bytes > self._limit_bytes:
            if self._ending is not None:
                self._ending()
            self._child, self._pid, self._limit_bytes = PtReader(limit_bytes), os.getpid(), limit_bytes
            self._ending = weakref.finalize(self, _end, self._child, self._pid)
        return self._child


def _end(child: PtReader, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has a copy of its parent's, which is not its to end
        child.close()


def stored_in(cache_dir: str | Path) -> Cache | dict[int, Path] | None:
    """Return the cache of a folder, else its `sample_00000.pt` files; None, with a line, for neither."""
    try:
        return open_cache(cache_dir, require_complete=False)
    except (StokerError, OSError) as error:
        files = sample_files(cache_dir)
        if not files:
            log.info("%s", error)
        return files or None


def _cache_of(cache_dir: str | Path) -> Cache | None:
    stored = stored_in(cache_dir)
    return stored if isinstance(stored, Cache) else None


def bytes_in_memory(cache: Cache) -> int:
    """Return the bytes that all records take in memory."""
    columns = columns_of(cache.schema)
    if is_fixed(cache.schema):
        return record_bytes(columns) * len(cache)
    ragged = {name: int(cache.lengths(name).sum()) for name, field in columns.items() if field.ragged}
    return sum(
        ragged[name] * field.row_bytes if name in ragged else field.size_bytes() * len(cache)
        for name, field in columns.items()
    )


def get_optimal_workers(
    requested: int | None = None, encoder_size_mb: float = 200, batch_size: int = 1
) -> int:
    """Return how many workers memory and processors allow, at most 8 and at most `requested`.

    Counts what this process may use: its control group's limits and its processors, not the machine's. 0 asks
    for none. `precompute.workers: null` finds a number by measuring.
    """
    if requested == 0:
        return 0
    found = probe()
    each = (encoder_size_mb / 1000 + 0.1 * batch_size) * GIB
    most = max(1, min(int(found.host_bytes / each), int(found.cpus), 8))
    return most if requested is None else min(requested, most)


def is_network_storage(path: str | Path) -> bool:
    """Return whether a path is on a file system whose data is on another machine; `data.stage` copies it."""
    where = storage_of(Path(path))
    return where is not None and where.network
