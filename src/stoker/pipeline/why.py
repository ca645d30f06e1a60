"""Name the entries in which two recipes differ, so that a cache that was not used explains itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.config import load_config
from stoker.encoders.keeping import KEEPING
from stoker.errors import ConfigError, FormatError, StokerError
from stoker.pipeline.build import names_of_caches
from stoker.pipeline.caches import recipe_of
from stoker.pipeline.folders import cache_dir_of
from stoker.runtime.jsonio import as_object
from stoker.schema import JsonResult
from stoker.store import Difference, Recipe, diff_recipes, load_recipe, open_cache
from stoker.store.mirror.root import here, shown

WRAPPERS = {
    KEEPING: ("kept", "raw fields are kept on one side only"),
    "stoker.Normalized": ("normalised", "the encoder takes normalised values on one side only"),
}
"""Classes in the identity of encoders around another one, outermost first; their entry and its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(JsonResult):
    """How two recipes differ."""

    json_keys = ("same", "differences", "a", "b")

    a: str
    """Where the first recipe is from: a folder, or a configuration and cache name."""
    b: str
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether both have one fingerprint."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two recipes."""

    label: str
    recipe: Recipe
    folder: Path
    """The recipe's own folder, which need not exist."""


def explain(a: str | Path, b: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Explanation:
    """Compare the recipes of two caches or configurations.

    Args:
        a: A cache, a recipe's folder or a settings file.
        b: The other one. None: the folder beside `a` whose recipe differs least.
        overrides: `key=value`, over the settings files among the two.
    Raises:
        FormatError: There is no cache to compare with.
        ConfigError, SourceError: A settings file, or what it names, cannot be read.
    """
    if overrides and not any(path is not None and _is_config(path) for path in (a, b)):
        raise ConfigError(
            f"settings ({', '.join(overrides)}) were given beside caches alone. They belong to a settings "
            "file: compare with one, as c.yaml"
        )
    first = _side(a, None, overrides)
    if b is None:
        second = _nearest(first)
    else:
        second = _side(b, first.folder.parent.name if _is_config(b) else None, overrides)
    differences = differences_of(first.recipe, second.recipe)
    return Explanation(a=first.label, b=second.label, differences=tuple(differences))


def differences_of(a: Recipe, b: Recipe) -> list[Difference]:
    """As `diff_recipes`, in the terms of the settings: what wraps one encoder is one difference.

    Parts of a torch Dataset have no bytes that were compared, but probed samples.
    """
    found: list[Difference] = []
    for wrapper, (name, note) in WRAPPERS.items():
        inside = [_inside(recipe, wrapper) for recipe in (a, b)]
        if (inside[0] is None) != (inside[1] is None):
            said = ["no" if recipe is None else "yes" for recipe in inside]
            found.append(Difference(entry=f"encoder.{name}", a=said[0], b=said[1], note=note))
            a, b = inside[0] or a, inside[1] or b
    found += diff_recipes(a, b)
    if not str(b.entries["source"]["kind"]).startswith("torch/"):
        return found
    return [
        replace(d, note="probed samples or code differ") if d.entry.endswith(".digest") else d for d in found
    ]


def _inside(recipe: Recipe, wrapper: str) -> Recipe | None:
    """The recipe as it were without a wrapper around its encoder; None where there is none."""
    encoder = as_object(recipe.entries["encoder"]) or {}
    if encoder.get("class") != wrapper:
        return None
    return Recipe(entries={**recipe.entries, "encoder": encoder["config"]["inner"]})


def _is_config(path: str | Path) -> bool:
    return Path(path).suffix.lower() in {".yaml", ".yml"}


def _side(path: str | Path, name: str | None, overrides: Sequence[str]) -> _Side:
    """`name` picks one of a configuration's caches; None: the first."""
    if not _is_config(path):
        at = here(path)
        folder = at if (at / "recipe.json").is_file() else open_cache(at, require_complete=False).path
        return _Side(label=shown(folder), recipe=load_recipe(folder), folder=folder)
    config = load_config(path, overrides)
    known = names_of_caches(config)
    if name is not None and name not in known:
        raise ConfigError(f"{path} describes {', '.join(known)}, not {name}. Compare caches of one name")
    chosen = name or next(iter(known))
    recipe = recipe_of(config, *known[chosen])
    folder = cache_dir_of(config) / chosen / recipe.fingerprint
    return _Side(label=f"{path} ({chosen}, {recipe.fingerprint})", recipe=recipe, folder=folder)


def _nearest(side: _Side) -> _Side:
    """The recipe beside `side` that differs in the fewest entries; its own one if that has a cache."""
    found: list[tuple[int, str, _Side]] = []
    parent = side.folder.parent
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        own = folder.resolve() == side.folder.resolve()
        if own and not _is_from_config(side):
            continue
        try:
            recipe = load_recipe(folder)
        except (StokerError, OSError):
            continue
        other = _Side(label=shown(folder), recipe=recipe, folder=folder)
        found.append((len(differences_of(side.recipe, recipe)), folder.name, other))
    if not found:
        raise FormatError(
            f"{shown(parent)} holds no other cache to compare with. Give B, or run precompute first"
        )
    return min(found, key=lambda item: item[:2])[2]


def nearest_differences(recipe: Recipe, folder: Path) -> tuple[Path, list[Difference]] | None:
    """The recipe beside `folder` that differs least from `recipe`, and in what; None: there is no other."""
    side = _Side(label=shown(folder), recipe=recipe, folder=folder)
    try:
        other = _nearest(side)
    except FormatError:
        return None
    return other.folder, differences_of(other.recipe, recipe)


def _is_from_config(side: _Side) -> bool:
    return side.label != shown(side.folder)
