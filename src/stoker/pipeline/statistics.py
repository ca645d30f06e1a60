"""Statistics of the train split, fitted once and kept beside the caches.

They belong to the encoder, so a fingerprint needs them on every start; reading all samples again for that
would undo what a cache is for. What is kept is found by the content of the train split, not by its name.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.encoders.normalize import Statistics, fit_statistics
from stoker.errors import FormatError, ReadOnlyError, ResourceError
from stoker.schema import canonical_json, digest_json
from stoker.sources.protocol import Source
from stoker.store import Digests, make_recipe
from stoker.store.local import LocalStorage
from stoker.store.strict_json import read_strict

FOLDER = ".statistics"
LIMIT_BYTES = 1 << 20


def train_statistics(source: Source, field: str, *, digests: Digests, cache_dir: Path) -> Statistics:
    """Mean and deviation of `field` over all samples of `source`, the train split; from disk when known.

    Raises:
        EncoderError, RecordError: As `fit_statistics`.
    """
    content = make_recipe(source, None, digests=digests).entries["source"]
    name = f"{digest_json([content, field])[:32]}.json"
    folder = LocalStorage(cache_dir / FOLDER)
    with suppress(OSError, FormatError, KeyError, TypeError):
        kept = read_strict(folder.read(name, limit_bytes=LIMIT_BYTES), where=name)
        if kept.get("check") == digest_json(kept["statistics"]):
            return _from_json(kept["statistics"])
    statistics = fit_statistics(source, field)
    data = asdict(statistics)
    # A folder that cannot be written is no error here: then they are fitted again next time.
    with suppress(ReadOnlyError, ResourceError, OSError):
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.put(name, canonical_json({"statistics": data, "check": digest_json(data)}).encode())
    return statistics


def _from_json(data: dict[str, Any]) -> Statistics:
    return Statistics(
        field=data["field"],
        method=data["method"],
        shift=tuple(data["shift"]),
        scale=tuple(data["scale"]),
        digest=data["digest"],
    )
