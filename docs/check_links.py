"""Fail on links of the Markdown pages that lead nowhere: to a missing file or a missing heading.

    python docs/check_links.py      prints one line per dead link; exit code 1 where there is one

Anchors are made as GitHub makes them: lower case, spaces to hyphens, other punctuation dropped, `-1` for a
repeat. Links to other hosts are not followed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Return the anchor of every heading of a page."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(path: Path) -> Iterator[str]:
    """Yield every link of a page that leads nowhere, and why."""
    for match in LINK.finditer(FENCED.sub("", path.read_text())):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = path.parent / target if target else path
        if not page.exists():
            yield f"{match['target']}: no such file"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
            yield f"{match['target']}: no such heading"


def main() -> int:
    """Check all pages; the exit code."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lines = [f"{page.relative_to(ROOT)}: {dead}" for page in sorted(pages) for dead in dead_links(page)]
    sys.stderr.writelines(f"{line}\n" for line in lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
