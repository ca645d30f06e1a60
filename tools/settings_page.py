"""The page docs/reference/config.md, made from the models, so that it cannot fall behind them."""

from __future__ import annotations

import re

from stoker.config.earlier import IGNORED, RENAMED, SWITCHES
from stoker.config.names import Setting, SettingGroup, every_node, shown

HEAD = """# Settings

Made from `src/stoker/config` by `python tools/settings_page.py > docs/reference/config.md`; edit it there.

A configuration is a YAML file; `key.sub=value` on the command line wins over the file, the file over the
defaults below. Values are YAML (`training.lr=1e-4`, `data.files=[a.h5, b.h5]`, `data.limit=null`), and
`${data.task}` stands for another setting's value. An unknown name is an error that names the nearest; a
setting given twice is an error too. Paths are relative to the folder the command runs in.
"""

TABLE = """
| setting | takes | default | meaning |
|---|---|---|---|
"""

EARLIER_HEAD = """
## Names of earlier systems

Accepted, so that existing files keep working. In one file, or on one command line, give a setting under one
name only. What has no effect any more is said once at the start of a run.

| earlier name | now |
|---|---|
"""


def describe_settings() -> str:
    """docs/reference/config.md as text."""
    lines = [HEAD]
    for node in every_node():
        if isinstance(node, SettingGroup):
            lines.append(f"\n## {node.name}\n{node.text}\n{TABLE}")
        elif "." in node.name:
            lines.append(_row(node))
    lines.append(f"\n## Top level\n{TABLE}")
    lines += [_row(node) for node in every_node() if isinstance(node, Setting) and "." not in node.name]
    return "".join(lines) + EARLIER_HEAD + "".join(f"| `{name}` | {now} |\n" for name, now in _earlier())


def _row(setting: Setting) -> str:
    text = re.sub(r"\bdocs/([\w/-]+)\.md", _link, " ".join(setting.text.split()))
    return f"| `{setting.name}` | {setting.expects} | `{shown(setting.default)}` | {text} |\n"


def _link(page: re.Match[str]) -> str:
    folder, _, name = page[1].partition("/")
    return f"[{name.replace('-', ' ')}]({'' if folder == 'reference' else f'../{folder}/'}{name}.md)"


def _earlier() -> list[tuple[str, str]]:
    rows = [(name, f"`{now}`") for name, now in RENAMED.items()]
    for name, positions in SWITCHES.items():
        ((position, (target, value)),) = positions.items()
        rows.append((name, f"`{shown(position)}` sets `{target}` to `{value}`; else nothing"))
    rows += [(name, f"no effect: {why}") for name, why in IGNORED.items()]
    return rows


if __name__ == "__main__":
    print(describe_settings(), end="")
