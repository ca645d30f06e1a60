"""Settings of files that are brought here from elsewhere."""

from __future__ import annotations

from pydantic import JsonValue

from stoker.config.section import Place, PositiveFloat, PositiveInt, SettingsSection


class FetchConfig(SettingsSection):
    """Files that `stoker fetch` brings here (docs/fetch.md)."""

    files: dict[str, dict[str, JsonValue]] | None = None
    """By the name they get, as `{a.h5: {from: "b2:bucket/a.h5", sha256: "..."}}`; `a/` is a whole folder."""
    manifest: Place | None = None
    """A JSON file with more of them."""
    folder: Place | None = None
    """Where they go; null: `data.root`."""
    at_once: PositiveInt = 4
    """Files on their way at the same time."""
    tries: PositiveInt = 5
    """Tries in a row without a new byte, after which a file has failed."""
    deadline: PositiveFloat = 14400.0
    """Seconds for one file, pauses included."""
    stall: PositiveFloat = 60.0
    """Seconds without a byte, or an answer, after which a try has failed."""
