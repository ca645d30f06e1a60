"""From a URL to the local folder that stands for it."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Literal, TypeAlias, cast

from stoker.errors import ConfigError, FormatError
from stoker.runtime.files import make_folder, write_file
from stoker.runtime.jsonio import canonical_json
from stoker.runtime.threads import map_in_order
from stoker.store.format import FINGERPRINT, INDEX_FILE, RECIPE_FILE, WEIGHTS_FOLDER
from stoker.store.mirror.blocks import USED_FILE, require_holes
from stoker.store.mirror.folder import MARKER, open_remote, opened_root, read_marker, root_of
from stoker.store.remote import Remote, RemoteObject, Retries, is_url, local_path, parse_url
from stoker.store.storage import open_storage
from stoker.store.use import exclusive_use

MIRROR_DIR = Path(".stoker/mirror")
Limit: TypeAlias = "int | Literal['as it is'] | None"


def mirror_limit(folder: Path) -> int | None:
    """Return how many bytes are kept here of what is put into a folder, or below it; None: all."""
    found = root_of(folder) or root_of(folder / "name" / "fingerprint")
    return None if found is None else found[0].space.limit_bytes


def mirror_url(folder: Path) -> str | None:
    """Return the URL that a mirror, or a folder in one, stands for; None: it is a plain folder."""
    folder = folder.absolute()
    if (folder / MARKER).exists():
        return read_marker(folder)[0]
    found = root_of(folder)
    return None if found is None else f"{found[0].url}/{found[1]}"


def display_path(folder: Path) -> str:
    """Return a folder for messages: its URL where it has one, else its path."""
    return mirror_url(folder) or str(folder)


def make_root(path: Path, url: str, limit_bytes: int | None) -> None:
    """Make a folder stand for a URL, or change its limit.

    Raises:
        FormatError: It stands for another URL.
        ConfigError: A limit cannot be kept there.
        ReadOnlyError: The folder cannot be made.
    """
    known = read_marker(path) if (path / MARKER).exists() else None
    if known == (url, limit_bytes):
        return
    if known is not None and known[0] != url:
        raise FormatError(f"{path} stands for {known[0]}, not for {url}. Choose another mirror_dir")
    make_folder(path, 0o700)
    if limit_bytes is not None:
        require_holes(path)
    (path / USED_FILE).touch(mode=0o600)
    text = canonical_json({"format": 1, "limit_bytes": limit_bytes, "url": url})
    write_file(path / MARKER, text.encode())
    if (root := opened_root(path)) is not None:
        root.space.limit_bytes = limit_bytes


def resolve_local(place: str | Path, *, must_exist: bool = True) -> Path:
    """Return the local path of a place: of a URL that of its mirror, of a path itself.

    Raises:
        ConfigError: It is no place at all: empty, or not text.
        FormatError: There is nothing at the URL, and `must_exist`.
        StokerError: As `attach_mirror`.
    """
    text = str(place) if isinstance(cast("object", place), str | Path) else ""
    if not text or "\0" in text:
        raise ConfigError(f"the path of the cache is {place!r}. Expected a path, as 'data/latent_cache'")
    return attach_mirror(place, must_exist=must_exist) if is_url(place) else Path(place)


def attach_mirror(
    url: str | Path,
    mirror_dir: str | Path = MIRROR_DIR,
    limit_bytes: Limit = "as it is",
    *,
    must_exist: bool = False,
) -> Path:
    """Return the local folder that stands for a URL, with recipes and indexes as they are there now.

    Args:
        url: Of a folder of caches, of one cache (its folders by fingerprint), or of one fingerprint.
        mirror_dir: Where mirrors are kept, each in a folder of its own.
        limit_bytes: Bytes of shards that are kept here; None: as many as fit; by default as it was, and at
            first None.
        must_exist: Refuse a URL at which there is nothing.
    Raises:
        ConfigError: It is not a URL, or a package is missing; or the limit cannot be kept there.
        FormatError: There is nothing.
        ServiceError, StalledError: The place refuses, or does not answer.
    """
    url = parse_url(url)
    folders, objects = _list(open_remote(url), "")
    if must_exist and not folders and not objects:
        raise FormatError(f"there is no cache at {url}. Check the address, or run precompute")
    depth = _depth(folders, objects)
    top, inside = _split(url, depth)
    root = local_path(mirror_dir, "mirror_dir").absolute() / _folder_name(top)
    if limit_bytes == "as it is":
        limit_bytes = read_marker(root)[1] if (root / MARKER).exists() else None
    make_root(root, top, limit_bytes)
    remote = open_remote(top)
    if depth == 2:
        names = [inside]
    elif depth == 1:
        names = [f"{inside}/{folder}" for folder in folders]
    else:
        below = map_in_order(lambda name: (name, _list(remote, name)[0]), folders, what=f"listing {url}")
        names = [f"{name}/{folder}" for name, found in below for folder in found]
    names = [name for name in names if FINGERPRINT.fullmatch(name.rpartition("/")[2])]
    for _ in map_in_order(lambda name: _bring(root / name), names, what=f"reading what is at {url}"):
        pass
    _remove_gone(root, inside, {*names}, remote)
    (root / inside).mkdir(mode=0o700, parents=True, exist_ok=True)
    return root / inside


def _list(remote: Remote, folder: str) -> tuple[list[str], list[RemoteObject]]:
    folders, objects = Retries().run(lambda: remote.list(folder), f"list {remote.url}/{folder}".rstrip("/"))
    return [name for name in folders if not name.startswith(".") and name != WEIGHTS_FOLDER], objects


def _depth(folders: list[str], objects: list[RemoteObject]) -> int:
    """Return how many folders below the one that holds caches by name."""
    if any(one.name == RECIPE_FILE for one in objects):
        return 2
    return 1 if any(map(FINGERPRINT.fullmatch, folders)) else 0


def _split(url: str, depth: int) -> tuple[str, str]:
    """Return the URL of the folder that holds caches by name, and what is below it."""
    top, inside = url, ""
    for _ in range(depth):
        top, _, last = top.rpartition("/")
        inside = f"{last}/{inside}" if inside else last
    if depth and (top.endswith((":/", "//"))):
        raise ConfigError(f"{url}: caches lie in <folder>/<name>/<fingerprint>, and here a folder is missing")
    return top, inside


def _folder_name(url: str) -> str:
    """Return a folder's name that says which URL it stands for, and differs for each."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-60:].strip("-")
    return f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _bring(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = open_storage(folder)
    for name in (RECIPE_FILE, INDEX_FILE):
        storage.version(name)  # fetches it, unless the cache was begun and has none yet


def _remove_gone(root: Path, inside: str, names: set[str], remote: Remote) -> None:
    """Remove what stands for a folder that is not there any more, unless a process has it open."""
    for recipe in root.glob(f"[!.]*/[!.]*/{RECIPE_FILE}"):
        name = str(recipe.parent.relative_to(root))
        if name in names or not (name == inside or name.startswith(inside and f"{inside}/")):
            continue
        if _is_there(remote, f"{name}/{RECIPE_FILE}"):
            continue  # begun since the list was made
        with exclusive_use(recipe.parent) as nobody:
            if nobody:
                shutil.rmtree(recipe.parent, ignore_errors=True)


def _is_there(remote: Remote, name: str) -> bool:
    try:
        Retries().run(lambda: remote.head(name), f"head {remote.url}/{name}")
    except FileNotFoundError:
        return False
    return True
