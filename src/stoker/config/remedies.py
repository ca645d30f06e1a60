"""Show the arguments that an error names as settings.

Errors of the library name an argument of a call, `preset='well'`. On the command line that argument is the
setting `data.preset=well`. Errors mark such arguments with `stoker.errors.arg`, and nothing else is changed.
An argument is the setting whose last word it is, if there is only one.
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
from stoker.errors import MARK, StokerError

OTHER_NAMES: Mapping[str, str] = {
    "patch": "encoder.patch_size",
    "stride": "training.time_stride",
    "horizon": "training.rollout_horizon",
    "dtype": "training.latent_cache_dtype",
    "cache_dir": "training.latent_cache_dir",
    "wait": "precompute.wait",
}
"""Arguments whose setting has another last word, or one that several settings have."""


def in_settings(error: StokerError) -> str:
    """The message of `error` with the arguments that it names written as settings; all other text as it is.

    >>> from stoker.errors import ConfigError, arg
    >>> in_settings(ConfigError(f"preset=x.h5 has no layout. Use {arg('preset', 'well')}"))
    'preset=x.h5 has no layout. Use data.preset=well'
    >>> in_settings(ConfigError(f"choose a smaller {arg('horizon')}, or {arg('patch', (1, 4))}"))
    "choose a smaller training.rollout_horizon, or 'encoder.patch_size=[1, 4]'"
    """
    return MARK.sub(_as_setting, error.marked)


def _as_setting(found: re.Match[str]) -> str:
    name, _, given = found[1].partition("=")
    setting = name if name.startswith("--") or "." in name else setting_of().get(name)
    if setting is None:
        return found[2]
    if given in ("", "..."):
        return f"{setting}={given}" if given else setting
    try:
        value: Any = ast.literal_eval(given)
    except (ValueError, SyntaxError):
        value = given
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
