from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stoker.config.earlier import EARLIER
from stoker.config.names import all_sections, all_settings
from tools.settings_page import describe_settings

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference"


def test_the_page_is_up_to_date() -> None:
    """Make it again with `python tools/settings_page.py > docs/reference/config.md`."""
    assert (DOCS / "config.md").read_text() == describe_settings()


def test_every_setting_is_explained() -> None:
    page = describe_settings()

    for setting in all_settings().values():
        assert setting.text.endswith("."), setting.name
        assert f"`{setting.name}`" in page
    for section in all_sections().values():
        assert section.text.endswith("."), section.name
    for name in EARLIER:
        assert f"`{name}`" in page


def test_the_page_prints_itself() -> None:
    done = subprocess.run(
        [sys.executable, "tools/settings_page.py"],
        cwd=DOCS.parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, describe_settings())


def test_settings_load_without_torch() -> None:
    """`stoker --help` and wrong settings should answer at once."""
    code = "import sys, stoker.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
