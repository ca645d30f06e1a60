"""What lies in a cache folder, for whoever cleans it up: fingerprints with their use, weights, leftovers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import FormatError
from stoker.runtime.disk import explained
from stoker.runtime.files import TEMPORARY_NAME, dead_temporaries
from stoker.runtime.locks import FOLDER_LOCK, try_lock
from stoker.store.adopt import FINGERPRINT
from stoker.store.catalog import known_index
from stoker.store.local import LocalFile
from stoker.store.lost import without_lost
from stoker.store.recipe import RECIPE_FILE, Recipe, load_recipe
from stoker.store.strict_json import as_object
from stoker.store.use import unused_for_s
from stoker.units import format_seconds

GONE = ".gone-"
"""Prefix of what is being removed."""
GONE_FOLDER = re.compile(rf"{re.escape(GONE)}{FINGERPRINT.pattern}-[0-9a-f]+")
WEIGHTS = "encoders"
WEIGHTS_NAME = re.compile(rf"({re.escape(GONE)})?[0-9a-f]{{16,64}}\.safetensors")
TWO_DAYS_S = 2 * 86400.0


@dataclass(slots=True, kw_only=True, eq=False)
class FoundFolder:
    """One fingerprint's folder."""

    path: Path
    linked: bool
    """It lies behind a symbolic link, so it is not ours to remove."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by name of every regular file in it."""
    inodes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Device and inode by name: a file may be linked from several folders."""
    unused_s: float = 0.0
    """0 where the folder cannot be looked into."""
    sequence: int | None = None
    """Of its index; None without a sound one."""
    complete: bool = False
    """Every sample is stored or quarantined, and not most of them quarantined: that is a run which failed."""
    weights: str = ""
    """Digest of its encoder's weights, as the recipe names it."""
    broken: str = ""
    """Why its recipe cannot be read; empty where it can."""

    @property
    def name(self) -> str:
        """The cache's name."""
        return self.path.parent.name

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(self.files.values())

    @property
    def unused_text(self) -> str:
        """Time since its last use."""
        long = self.unused_s >= TWO_DAYS_S
        return f"{self.unused_s / 86400:.0f} days" if long else format_seconds(self.unused_s)

    def live_claims(self) -> list[str]:
        """Purposes of the claims that somebody holds now."""
        names = [name for name in sorted(self.files) if name.startswith(FOLDER_LOCK)]
        return [name.removeprefix(FOLDER_LOCK) for name in names if _is_held(self.path / name)]


def scan(cache_dir: Path) -> list[FoundFolder]:
    """Every fingerprint's folder below `cache_dir`, by name; folders behind links as well.

    Raises:
        FormatError: A folder of caches cannot be listed, so nobody can tell which weights they need.
    """
    found: list[FoundFolder] = []
    for parent in sorted(cache_dir.iterdir()):
        if parent.name.startswith(".") or parent.name == WEIGHTS or not parent.is_dir():
            continue
        try:
            paths = sorted(parent.iterdir())
        except PermissionError as error:
            raise FormatError(
                f"{parent} cannot be listed: {error.strerror}. Run as somebody who may see every cache in it"
            ) from error
        for path in paths:
            if FINGERPRINT.fullmatch(path.name) and path.is_dir():
                found.append(_look(path, linked=parent.is_symlink() or path.is_symlink()))
    return found


def _look(path: Path, *, linked: bool) -> FoundFolder:
    folder = FoundFolder(path=path, linked=linked)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a temporary that has got its name meanwhile
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        folder.files[entry.name] = status.st_size
                        folder.inodes[entry.name] = (status.st_dev, status.st_ino)
        folder.unused_s = unused_for_s(path)
        recipe = load_recipe(path)
    except (FormatError, OSError) as error:
        folder.broken = str(error)
        return folder
    folder.weights = _weights_of(recipe)
    index = known_index(path, recipe)
    if index is not None:
        folder.sequence = index.sequence
        index = without_lost(index, path, folder.files)[0]
        folder.complete = index.complete and 2 * len(index.quarantined) <= recipe.count
    return folder


def _weights_of(recipe: Recipe) -> str:
    return str((as_object(recipe.entries["encoder"]) or {}).get("weights", ""))


def _is_held(path: Path) -> bool:
    try:
        file = LocalFile(path)
    except (FormatError, OSError):
        return False
    try:
        # A shared lock meets the holder's, and a descriptor that only reads can have it everywhere.
        return not try_lock(file.fileno(), shared=True)
    except OSError:
        return False
    finally:
        file.close()


def leftovers(cache_dir: Path) -> Iterator[tuple[Path, int]]:
    """Folders whose removal was cut short, with their bytes."""
    for path in sorted(cache_dir.glob(f"*/{GONE}*")):
        linked = path.is_symlink() or path.parent.is_symlink()
        if GONE_FOLDER.fullmatch(path.name) and path.is_dir() and not linked:
            yield path, sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def never_begun(folder: FoundFolder) -> bool:
    """Whether a kill came between the making of a folder and its recipe."""
    return RECIPE_FILE not in folder.files and all(map(TEMPORARY_NAME.fullmatch, folder.files))


def remove_never_begun(folder: FoundFolder) -> None:
    """Remove such a folder, unless somebody has begun it after all."""
    for _ in dead_temporaries(folder.path, remove=True):
        pass
    with suppress(OSError):  # not empty
        folder.path.rmdir()


def weights_in(cache_dir: Path) -> dict[Path, int]:
    """Bytes of each file of weights, those included whose removal was cut short.

    None where `encoders` is a link: caches elsewhere may need what lies there.
    """
    folder = cache_dir / WEIGHTS
    if folder.is_symlink():
        return {}
    paths = sorted(path for path in folder.glob("*.safetensors") if WEIGHTS_NAME.fullmatch(path.name))
    return {path: path.stat().st_size for path in paths if path.is_file() and not path.is_symlink()}


def digest_of(weights: Path) -> str:
    """The digest that a recipe names a file of weights by."""
    return weights.name.removeprefix(GONE).removesuffix(".safetensors")


def remove_weights(cache_dir: Path, path: Path) -> bool:
    """Remove weights unless a recipe that names them appeared; returns whether they went.

    They are renamed away before recipes are looked at again: a writer puts its recipe first and then looks
    for the weights, so either we see its recipe or it misses the weights and writes them anew.
    """
    plain = path.with_name(f"{digest_of(path)}.safetensors")
    hidden = path.with_name(f"{GONE}{plain.name}")
    with explained(path):
        path.rename(hidden)
        if any(folder.broken or folder.weights == plain.stem for folder in scan(cache_dir)):
            hidden.rename(plain)
            return False
        hidden.unlink()
    return True
