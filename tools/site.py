"""Build the documentation's site, and the hooks of mkdocs that make its pages from the repository.

    python tools/site.py            into site/VERSION/, with versions.json and index.html above it
    python tools/site.py --check    into a folder that is removed: fails on a dead link, anchor or reference

`README.md` and other files of the root are pages of the site too (`ROOT_PAGES`). Links that lead out of docs/
become links to the repository. Comments that steer `tools/pages.py` are left out.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""Files of the root, and the page that each becomes."""
REPOSITORY = "https://github.com/stoker-data/stoker"


class Counted(logging.Handler):
    """Counts warnings of mkdocs and its plugins."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one more."""
        self.warnings += 1


FENCED = re.compile(r"(^(?P<fence>`{3,}).*?^(?P=fence)\s*?$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<before>\]\(|\b(?:src|srcset|href)=\")(?P<target>[^)\s\"#]+)(?P<anchor>#[^)\s\"]*)?")
STEERING = re.compile(r"^<!-- run:.*?-->\n", re.DOTALL | re.MULTILINE)


def destination(path: str) -> str | None:
    """Return the page or file of the site that a file of the repository becomes; None: it is not there."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    inside = path.startswith("docs/") and (ROOT / path).is_file()
    return path.removeprefix("docs/") if inside else None


def relinked(text: str, path: str) -> str:
    """Return a page's Markdown with links for the site; `path` is that of its file in the repository."""

    def link(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if re.match(r"[a-z]+:|//", target):
            return match[0]
        named = os.path.normpath(Path(path).parent / target)
        there = destination(named)
        if there is None:
            kind = "tree" if (ROOT / named).is_dir() else "blob"
            return f"{match['before']}{REPOSITORY}/{kind}/main/{named}{anchor}"
        return f"{match['before']}{os.path.relpath(there, Path(destination(path) or path).parent)}{anchor}"

    pieces = FENCED.split(STEERING.sub("", text))
    # With two groups, `split` gives text, block, its fence, text, ...
    return "".join(
        LINK.sub(link, piece) if i % 3 == 0 else piece for i, piece in enumerate(pieces) if i % 3 < 2
    )


def on_files(files: Any, config: Any) -> Any:
    """Add the pages made from files of the root (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the Markdown of a page with links for the site (a hook of mkdocs)."""
    made = {page: name for name, page in ROOT_PAGES.items()}
    place = page.file.src_uri
    if place not in made and (
        place in {"LOG.md", "features.md", "migration.md"} or place.startswith("design/")
    ):
        page.meta["search"] = {"exclude": True}
    return relinked(markdown, made.get(place, f"docs/{place}"))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page that asks no other host for its search (a hook of mkdocs)."""
    ours = os.path.relpath("javascripts/worker.js", Path(page.url).parent)
    return output.replace("https://unpkg.com/iframe-worker/shim", ours)


def build(folder: Path) -> int:
    """Build the site into `folder`; return 1, with lines that say why, if a link or a name leads nowhere."""
    from mkdocs.commands import build as command
    from mkdocs.config import load_config

    said = logging.StreamHandler()
    said.setLevel(logging.WARNING)
    counted = Counted()
    logger = logging.getLogger("mkdocs")
    logger.addHandler(said)
    logger.addHandler(counted)
    command.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return 1 if counted.warnings else 0


def main() -> int:
    """Build the site, or check that it builds."""
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as folder:
            return build(Path(folder))
    full = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    version = ".".join(full.split(".")[:2])
    site = ROOT / "site"
    if failed := build(site / version):
        return failed
    # The menu of versions reads this file; each version that is published adds a row and a folder.
    (site / "versions.json").write_text(
        json.dumps([{"version": version, "title": version, "aliases": ["latest"]}]) + "\n"
    )
    first = f"{version}/index.html"
    (site / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={first}">'
        f'<link rel="canonical" href="{first}"><a href="{first}">Stoker {version}</a>\n'
    )
    print(site / first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
