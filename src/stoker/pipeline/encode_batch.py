"""Decide `precompute.encode_batch: auto`, so that all runs over the same data use one number.

The number of samples in a call is in the recipe. It would be another on another machine, or on a busy day,
and then everything would be encoded again. So what is stored decides first: the number under which this
encoder has most records of this shape. Then what was measured before, noted in the cache folder. Only when
there is neither is it measured, by one process for all. See docs/design/039-encode-batch-size.md.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.config import Config
from stoker.encoders.protocol import Encoder
from stoker.errors import FormatError, ReadOnlyError, ResourceError, StalledError, StokerError
from stoker.pipeline.folders import cache_dir_of
from stoker.plan.resources import resolve_device
from stoker.precompute.measure import EncodeBatch, measure_encode_batch
from stoker.runtime.files import make_folder
from stoker.runtime.jsonio import read_strict
from stoker.runtime.locks import lock_folder
from stoker.scale.ranks import Ranks
from stoker.schema import Schema, canonical_json, digest_json
from stoker.sources.protocol import Source
from stoker.store import load_recipe
from stoker.store.cache import open_unnoted
from stoker.store.storage import open_storage
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.pipeline.build import Job

log = logging.getLogger("stoker")
FOLDER = ".encode_batch"
LIMIT_BYTES = 1 << 20
WAIT_S = 600.0
"""Seconds to wait for a process that measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The number in force."""

    samples: int | None
    """None: the fixed rule."""
    where: str
    """The reason for it, in words."""


def settled_batch(config: Config, task: str, encoder: Encoder | None, source: Source) -> Settled | None:
    """Return the number in force for the caches of a task; None where `auto` has nothing to go by yet.

    Args:
        config: The settings of the task.
        task, encoder, source: One of its caches; all splits share the number.

    Raises:
        EncoderError: The encoder does not fit the samples.
    """
    asked = config.precompute.encode_batch
    if asked != "auto" or encoder is None:
        return Settled(samples=None if asked == "auto" else asked, where="precompute.encode_batch")
    folder, records = cache_dir_of(config), encoder.schema(source.schema())
    identity = encoder.identity()
    counts = Counter[int | None]()
    for path in sorted(folder.glob(f"{task}_*/*/recipe.json")):
        with suppress(StokerError, OSError, KeyError):
            recipe = load_recipe(path.parent)
            same = recipe.entries["encoder"] == json.loads(canonical_json(identity))
            if same and _shapes(recipe.encoded) == _shapes(records):
                samples = recipe.group.samples if recipe.group.steps is None else None
                counts[samples] += 1 + _stored(path.parent)
    if counts:
        best = max(counts, key=lambda samples: (counts[samples], -(samples or 0)))
        return Settled(samples=best, where="the number of the cache that is there")
    return _noted(folder, _key(identity, records))


def measured_jobs(config: Config, task: str, jobs: Sequence[Job], device: str, ranks: Ranks) -> list[Job]:
    """Return the jobs of a task with the number of samples that their encoder is to be given in a call.

    Where `auto` has nothing to go by, it is measured here, by the first rank, and noted.

    Args:
        config, task, jobs: As `build_jobs` gives them.
        device: Where the encoder runs.
        ranks: All are to make this call.

    Raises:
        EncoderError, ResourceError: The encoder does not work.
        StalledError: The encoder, or the process that measures, does not come back.
    """
    first = jobs[0]
    if config.precompute.encode_batch != "auto" or first.encoder is None:
        return list(jobs)
    told: list[str] = []
    if ranks.leads:
        settled = settled_batch(config, task, first.encoder, first.source) or _measure(config, jobs, device)
        log.info("%s: encode batch %s (%s)", task, _say(settled.samples), settled.where)
        told = [json.dumps(settled.samples)]
    samples = json.loads(ranks.tell(told[0] if told else "null", "the size of an encode batch")[0])
    return [replace(job, encode_batch=samples) for job in jobs]


def measure_jobs(config: Config, jobs: Sequence[Job], device: str) -> EncodeBatch:
    """Measure the encoder of a task, up to the samples of its largest file.

    Raises:
        StokerError: As `measure_encode_batch`.
    """
    first = jobs[0]
    assert first.encoder is not None
    most = max(part.count for job in jobs for part in job.source.identity().parts)
    return measure_encode_batch(
        first.encoder,
        first.source.schema(),
        str(resolve_device(device)),
        most=max(1, most),
        deadline_s=config.precompute.deadlines.encode,
    )


def _measure(config: Config, jobs: Sequence[Job], device: str) -> Settled:
    """Measure once for all processes that share the cache folder, and note what came out."""
    first, folder = jobs[0], cache_dir_of(config)
    assert first.encoder is not None
    key = _key(first.encoder.identity(), first.encoder.schema(first.source.schema()))
    try:
        make_folder(folder / FOLDER)
        with lock_folder(folder / FOLDER, key, timeout_s=WAIT_S) as got:
            if not got:
                raise StalledError(
                    f"another process has measured the encode batch in {folder / FOLDER} for {WAIT_S:g} s. "
                    "End it, or give precompute.encode_batch a number"
                )
            known = _noted(folder, key)
            if known is not None:
                return known
            found = measure_jobs(config, jobs, device)
            open_storage(folder / FOLDER).put(f"{key}.json", canonical_json(found.to_json()).encode())
    except (ReadOnlyError, OSError):  # nothing can be stored there either
        found = measure_jobs(config, jobs, device)
    return Settled(samples=found.samples, where=f"measured on {found.device}: {found.why}")


def _noted(folder: Path, key: str) -> Settled | None:
    with suppress(OSError, FormatError, KeyError):
        note = open_storage(folder / FOLDER).read(f"{key}.json", limit_bytes=LIMIT_BYTES)
        found = read_strict(note, where=f"{FOLDER}/{key}.json")
        samples = found["samples"]
        if samples is None or (type(samples) is int and samples > 0):
            return Settled(samples=samples, where=f"measured before on {found['device']}")
    return None


def _key(identity: object, records: Schema) -> str:
    return digest_json([identity, _shapes(records)])[:32]


def _shapes(schema: Schema) -> list[list[object]]:
    return [[name, list(field.shape)] for name, field in sorted(schema.items())]


def _stored(folder: Path) -> int:
    try:
        return len(open_unnoted(folder, require_complete=False))
    except (StokerError, ResourceError, OSError):
        return 0


def _say(samples: int | None) -> str:
    return "by the fixed rule" if samples is None else f"of {format_count(samples, 'sample')}"
