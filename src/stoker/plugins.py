"""Find what packages add to Stoker: sources, engines, exporters, commands and trackers, by name.

A package names what it adds in entry points of its `pyproject.toml`. Stoker's own are found in the same
way, and they are the only way from the core to `stoker.extras` (docs/how-to/plugins.md).

| group               | where a name is used               | what it names                                   |
|---------------------|------------------------------------|-------------------------------------------------|
| `stoker.sources`    | `data.kind: NAME`                  | `make(data, task, split)`, returns a `Source`   |
| `stoker.engines`    | `precompute.engine: NAME`          | `make(config)`, a context that yields an engine |
| `stoker.exporters`  | `stoker cache export --to NAME`    | an `Exporter`                                   |
| `stoker.commands`   | `stoker NAME`, `stoker GROUP NAME` | a function for typer, or a `typer.Typer`        |
| `stoker.trackers`   | `training.trackers: [NAME]`        | `make()`, returns a `Tracker`                   |
| `stoker.extensions` | one place of the core for each     | what that place calls; for Stoker's own extras  |

Nothing of a package is imported before its name is used. A name that two packages give is refused when it
is used, and so is a plugin that cannot be imported; everything else works.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from stoker.errors import ConfigError, docs_url

PACKAGE = "stoker"
Group: TypeAlias = Literal[
    "stoker.sources",
    "stoker.engines",
    "stoker.exporters",
    "stoker.commands",
    "stoker.trackers",
    "stoker.extensions",
]


GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One name of a group."""

    group: Group
    """The group of entry points, as `stoker.sources`."""
    name: str
    """The name that users write."""
    target: str
    """`module:attribute`, or `module` alone."""
    package: str
    """The distribution that gives it."""
    others: tuple[str, ...] = ()
    """Further distributions that give the same name, which makes it unusable."""

    @property
    def is_own(self) -> bool:
        """True if it is Stoker's own."""
        return self.package == PACKAGE

    def require_one_package(self) -> None:
        """Refuse a name that several packages give.

        Raises:
            ConfigError: It is one.
        """
        if self.others:
            raise ConfigError(
                f"{self.name!r} of the group {self.group} is given by several packages: "
                f"{', '.join(sorted((self.package, *self.others)))}",
                hint="Uninstall all but one of them",
            )

    def load(self) -> Any:
        """Return what it names, imported.

        Raises:
            ConfigError: It cannot be imported, or another package gives the same name.
        """
        self.require_one_package()
        try:
            return EntryPoint(self.name, self.target, self.group).load()
        except (Exception, SystemExit) as error:  # code of others runs here, which may raise anything
            raise ConfigError(
                f"{self.name!r} of the group {self.group} cannot be imported from the package "
                f"{self.package} ({self.target}): {type(error).__name__}: {error}",
                hint=f"Install what it needs, or correct or uninstall {self.package}",
            ) from error


def plugins_of(group: Group) -> Mapping[str, Plugin]:
    """Return all plugins of a group by name, Stoker's own first; none of them is imported.

    Args:
        group: The group of entry points: `stoker.sources`, `stoker.engines`, `stoker.exporters`,
            `stoker.commands` or `stoker.trackers`.

    Examples:
        >>> from stoker.plugins import plugins_of
        >>> "safetensors" in plugins_of("stoker.exporters")
        True
    """
    return _found(group, tuple(sys.path))


def find_plugin(group: Group, name: str, setting: str) -> Plugin:
    """Return the plugin of a name, not imported yet.

    Args:
        group: The group of entry points, as `stoker.sources`.
        name: The name that a user wrote.
        setting: What names it, for the message, as `data.kind`.

    Raises:
        ConfigError: No package gives it, or several do.

    Examples:
        >>> from stoker.plugins import find_plugin
        >>> find_plugin("stoker.exporters", "safetensors", "--to").package
        'stoker'
    """
    known = plugins_of(group)
    if name in known:
        known[name].require_one_package()
        return known[name]
    if not any(plugin.is_own for plugin in known.values()):
        raise ConfigError(
            f"{setting} names {name!r}, and no entry point of Stoker itself is known: it runs from files "
            "that were not installed",
            hint="Install it: pip install stoker, or pip install -e . in a checkout",
        )
    noun = group.removeprefix("stoker.").removesuffix("s")
    raise ConfigError(
        f"{setting} names {name!r}, which is not a {noun}",
        hint=f"Expected some of {', '.join(known)}, or an entry point of the group {group} "
        f"({docs_url('how-to/plugins')})",
    )


def load_extension(name: str) -> Any:
    """Import the extra that one place of the core names, as `demo.radio`.

    Raises:
        ConfigError: As `find_plugin` and `Plugin.load`.
    """
    return find_plugin("stoker.extensions", name, "an extension").load()


@lru_cache(maxsize=32)
def _found(group: Group, _path: tuple[str, ...]) -> Mapping[str, Plugin]:
    """Return all plugins of a group by name; `_path` is `sys.path`, where packages are looked for."""
    installed = [(point, point.dist.name if point.dist else "?") for point in entry_points(group=group)]
    own = _points_of_checkout().get(group)
    if own is None:
        own = {point.name: point.value for point, package in installed if package == PACKAGE}
    known = {name: Plugin(group, name, target, PACKAGE) for name, target in own.items()}
    for point, package in installed:
        first = known.get(point.name)
        if package == PACKAGE:
            continue
        if first is None:
            known[point.name] = Plugin(group, point.name, point.value, package)
        elif package not in (first.package, *first.others):
            known[point.name] = replace(first, others=(*first.others, package))
    return known


def _points_of_checkout() -> Mapping[str, Mapping[str, str]]:
    """Return the entry points in the `pyproject.toml` of a checkout that this package runs from; else none.

    The metadata of an editable install are those of the day it was made, while the code is that of today.
    """
    file = Path(__file__).parents[2] / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return {}
    return project.get("entry-points", {}) if project.get("name") == PACKAGE else {}
