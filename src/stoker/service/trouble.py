"""Why the service is degraded, in words, for pages, `/health`, `/ready`, streams."""

from __future__ import annotations


class Trouble:
    """What does not work now, by part; safe to share between threads."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def note(self, part: str, why: str | None) -> None:
        """A part does not work, and why; None: it works."""
        if why is not None:
            self._why = {**self._why, part: why}
        elif part in self._why:
            self._why = {other: text for other, text in self._why.items() if other != part}

    @property
    def why(self) -> str | None:
        """All of it; None: the service is well."""
        return "; ".join(dict.fromkeys(self._why.values())) or None
