"""Settings of a torch Dataset that a configuration names by its import path."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from stoker.config.section import SettingsSection


class TorchConfig(SettingsSection):
    """A torch `Dataset` of your own, which `data.dataset` names (docs/sources.md)."""

    arguments: dict[str, JsonValue] | None = None
    """What it is called with; `split` is added where it takes one."""
    identity: str | None = None
    """Names its content; null: what can be seen of code, values and files."""
    time: tuple[str, ...] = ()
    """Fields whose axis 0 is time."""
    text: dict[str, JsonValue] | None = None
    """What becomes of text, by field: a list of words, `bytes` or `drop`."""
    random: Literal["refuse", "freeze"] = "refuse"
    """Whether random output is refused, or one draw of it stored for good."""
