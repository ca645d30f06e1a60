"""Say a remedy in the words of the settings file.

Errors of the library name a cure as the argument of a call: `preset='well'`, `patch=(1, 8)`, `readers=0`.
Whoever wrote a settings file knows `data.preset=well` instead. One is made of the other: an argument is the
setting whose last word it is, if there is only one.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from stoker.config.names import all_settings

OTHER_NAMES: Mapping[str, str] = {
    "patch": "encoder.patch_size",
    "stride": "training.time_stride",
    "horizon": "training.rollout_horizon",
    "dtype": "training.latent_cache_dtype",
    "cache_dir": "training.latent_cache_dir",
}
"""Arguments whose setting has another last word."""

_REMEDY = re.compile(
    r"(?<![\w.,;:/=+-])(?P<name>[a-z_]+)="
    r"(?P<value>'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|\w+(?:\.\w+)*)?"
)


def in_settings(message: str) -> str:
    """`message` with every argument that it names written as the setting of that meaning.

    >>> in_settings("Use preset='well', or declare fields={'u': 'n t x'}")
    "Use data.preset=well, or declare 'data.fields={u: n t x}'"
    >>> in_settings("choose a smaller horizon=, or device=cpu")
    'choose a smaller training.rollout_horizon, or training.device=cpu'
    >>> in_settings("patch (1, 5) does not divide. Use patch=(1, 4)")
    "patch (1, 5) does not divide. Use 'encoder.patch_size=[1, 4]'"
    """
    return _REMEDY.sub(_as_setting, message)


def _as_setting(found: re.Match[str]) -> str:
    setting = setting_of().get(found["name"])
    if setting is None:
        return found[0]
    if found["value"] is None:
        return setting
    try:
        value: Any = ast.literal_eval(found["value"])
    except (ValueError, SyntaxError):
        value = found["value"]  # a bare word, as in `tier=auto`
    return shlex.quote(f"{setting}={_as_yaml(value)}")


def _as_yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    plain = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    return yaml.safe_dump(plain, default_flow_style=True, width=1_000_000).removesuffix("...\n").strip()


@cache
def setting_of() -> Mapping[str, str]:
    """The setting of each argument that has one."""
    leaves = {name: name.rpartition(".")[2] for name in all_settings()}
    count = Counter(leaves.values())
    return {leaf: name for name, leaf in leaves.items() if count[leaf] == 1} | dict(OTHER_NAMES)
