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

from tests.pins.golden import save

KINDS = ("fingerprints", "identities", "orders", "batches", "states")


def main(kinds: list[str]) -> None:
    """Write these kinds, or all."""
    for kind in kinds or KINDS:
        cases: Mapping[str, Callable[[], Any]] = import_module(f"tests.pins.{kind}").CASES
        save(kind, {name: make() for name, make in cases.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
