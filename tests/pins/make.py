"""Write the golden values of `tests/pins/golden/` anew: `python -m tests.pins.make [KIND ...]`.

This may be run to add cases: `git diff` then shows lines added, and no line changed. Never run it to make a
failing test pass. A value that changes means that caches of users are encoded again, that a run continues
with other batches, or that a script no longer finds what it reads. Where that is meant, a note in
`docs/design/` says whom it hits and what they do, the changelog names it, and the commit that changes the
value holds both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tests.pins import commands
from tests.pins.golden import save

KINDS = (
    *("fingerprints", "identities", "orders", "batches", "states", "files"),
    *("commands", "long_commands"),
)


def values(kind: str) -> Mapping[str, Any]:
    """Return the values of one kind as they are now."""
    if kind in ("commands", "long_commands"):
        return commands.run_all(commands.STEPS if kind == "commands" else commands.LONG_STEPS)
    cases: Mapping[str, Callable[[], Any]] = import_module(f"tests.pins.{kind}").CASES
    return {name: make() for name, make in cases.items()}


def main(kinds: list[str]) -> None:
    """Write these kinds, or all."""
    for kind in kinds or KINDS:
        save(kind, values(kind))


if __name__ == "__main__":
    main(sys.argv[1:])
