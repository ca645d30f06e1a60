"""What lies in a cache folder, for whoever cleans it up: fingerprints with their use, weights, leftovers."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stoker.atomic import explained
from stoker.errors import FormatError
from stoker.store.adopt import FINGERPRINT
from stoker.store.catalog import known_index
from stoker.store.local import TEMPORARY, LocalFile
from stoker.store.lost import without_lost
from stoker.store.recipe import RECIPE_FILE, Recipe, load_recipe
from stoker.store.strict_json import as_object
from stoker.store.use import unused_for_s
from stoker.units import format_seconds

GONE = ".gone-"
"""Prefix of what is being removed."""
CLAIM = ".claim-"
WEIGHTS = "encoders"
TWO_DAYS_S = 2 * 86400.0


@dataclass(slots=True, kw_only=True, eq=False)
class FoundFolder:
    """One fingerprint's folder."""

    path: Path
    files: dict[str, int]
    """Bytes by name of every regular file in it."""
    inodes: dict[str, tuple[int, int]]
    """Device and inode by name: a file may be linked from several folders."""
    unused_s: float
    linked: bool
    """It lies behind a symbolic link, so it is not ours to remove."""
    sequence: int | None = None
    """Of its index; None without a sound one."""
    complete: bool = False
    weights: str = ""
    """Digest of its encoder's weights, as the recipe names it."""
    broken: str = field(default="")
    """Why its recipe cannot be read; empty where it can."""

    @property
    def name(self) -> str:
        """The cache's name."""
        return self.path.parent.name

    @property
    def unused_text(self) -> str:
        """Time since its last use."""
        long = self.unused_s >= TWO_DAYS_S
        return f"{self.unused_s / 86400:.0f} days" if long else format_seconds(self.unused_s)

    def live_claims(self) -> list[str]:
        """Purposes of the claims that somebody holds now."""
        names = [name for name in sorted(self.files) if name.startswith(CLAIM)]
        return [name.removeprefix(CLAIM) for name in names if _is_held(self.path / name)]


def scan(cache_dir: Path) -> list[FoundFolder]:
    """Every fingerprint's folder below `cache_dir`, by name; folders behind links as well."""
    found: list[FoundFolder] = []
    for parent in sorted(cache_dir.iterdir()):
        if parent.name.startswith(".") or parent.name == WEIGHTS or not parent.is_dir():
            continue
        for path in sorted(parent.iterdir()):
            if FINGERPRINT.fullmatch(path.name) and path.is_dir():
                found.append(_look(path, linked=parent.is_symlink() or path.is_symlink()))
    return found


def _look(path: Path, *, linked: bool) -> FoundFolder:
    folder = FoundFolder(path=path, files={}, inodes={}, unused_s=unused_for_s(path), linked=linked)
    for file in path.iterdir():
        if file.is_file() and not file.is_symlink():
            status = file.stat()
            folder.files[file.name] = status.st_size
            folder.inodes[file.name] = (status.st_dev, status.st_ino)
    try:
        recipe = load_recipe(path)
    except (FormatError, OSError) as error:
        folder.broken = str(error)
        return folder
    folder.weights = _weights_of(recipe)
    index = known_index(path, recipe)
    if index is not None:
        folder.sequence = index.sequence
        folder.complete = without_lost(index, path, folder.files)[0].complete
    return folder


def _weights_of(recipe: Recipe) -> str:
    return str((as_object(recipe.entries["encoder"]) or {}).get("weights", ""))


def _is_held(path: Path) -> bool:
    try:
        file = LocalFile(path)
    except (FormatError, OSError):
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks: no claim says anything
    finally:
        file.close()
    return False


def dead_temporaries(place: Path, *, remove: bool) -> Iterator[tuple[Path, int]]:
    """Temporaries in a folder whose writers are dead, with their bytes; removed on the way if asked."""
    for path in sorted(place.glob(f"{TEMPORARY}*")):
        try:
            file = LocalFile(path)
        except (FormatError, OSError):
            continue
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                path.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            file.close()
        yield path, file.size


def leftovers(cache_dir: Path) -> Iterator[tuple[Path, int]]:
    """Folders whose removal was cut short, with their bytes."""
    for path in sorted(cache_dir.glob(f"*/{GONE}*")):
        if path.is_dir() and not path.is_symlink() and not path.parent.is_symlink():
            yield path, sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def never_begun(folder: FoundFolder) -> bool:
    """Whether a kill came between the making of a folder and its recipe."""
    return RECIPE_FILE not in folder.files and all(name.startswith(TEMPORARY) for name in folder.files)


def weights_in(cache_dir: Path) -> dict[Path, int]:
    """Bytes of each file of weights, those included whose removal was cut short."""
    folder = cache_dir / WEIGHTS
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(TEMPORARY))
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
