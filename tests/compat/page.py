"""Code of the migration page, so that each snippet is run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def snippets(heading: str) -> list[str]:
    """The code blocks of one section, in order."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```(?:python|bash)\n(.*?)```", section, re.DOTALL)
