"""What every adapter shares: its arguments, the proof that the original is unmodified, saved rows."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

from originals import ORIGINALS  # noqa: E402

from measure import publish  # noqa: E402


def arguments(name: str, about: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """Parse `--original`, `--work`, `--save`, `--quick`, and what else an adapter takes."""
    parser = argparse.ArgumentParser(description=(about or name).splitlines()[0])
    parser.add_argument("--original", type=Path, required=True, help="a checkout at the pinned revision")
    parser.add_argument("--work", type=Path, required=True, help="folder for data, caches and logs")
    parser.add_argument("--save", action="store_true", help="replace the file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    for option, how in more.items():
        parser.add_argument(f"--{option}", **how)
    given = parser.parse_args()
    given.original, given.work = given.original.resolve(), given.work.resolve()
    if obstacle := ORIGINALS[name].obstacle(given.original):
        parser.error(obstacle)
    given.work.mkdir(parents=True, exist_ok=True)
    return given


def state_of(name: str, checkout: Path) -> dict[str, str]:
    """Return where the original comes from, its revision, and `unmodified` or what differs."""
    original = ORIGINALS[name]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no")
    if (digest := original.digest(checkout)) != original.sha256:
        state = f"modified: sha256 of {original.main} is {digest[:12]}"
    elif changed:
        state = f"modified: {changed}"
    else:
        state = "unmodified"
    found = git("rev-parse", "HEAD") if (checkout / ".git").exists() else original.revision
    return {"original": original.url, "revision": found or original.revision, "state": state}


def save(name: str, checkout: Path, rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Print the rows, and with `--save` replace `benchmarks/results/third_party_<name>.jsonl`."""
    original = name.split("_", 1)[0] if name not in ORIGINALS else name
    publish(
        f"third_party_{name}",
        [state_of(original, checkout), *rows],
        save=given.save and not given.quick,
    )
