"""The files to fetch, their names and where they come from: read strictly, since others write manifests.

A name says where below one folder a file goes. It may not lead out of that folder, be hidden, or be the
folder of another name.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker.config.models import Config
from stoker.errors import ConfigError
from stoker.runtime.jsonio import parse_json
from stoker.runtime.partial import Algorithm

ALGORITHMS: Mapping[Algorithm, int] = {"sha256": 64, "sha1": 40, "md5": 32}
"""Digests that may be declared, the strongest first, and their hexadecimal digits."""
MANIFEST_BYTES = 64 * 1024 * 1024
NAME_BYTES, PART_BYTES = 1024, 200
"""A part of a name leaves room for the suffixes of partial files; file systems end at 255."""


class _Entry(BaseModel):
    """One file as a manifest describes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: Annotated[str, Field(alias="from", min_length=1, max_length=8192)]
    bytes: Annotated[int, Field(ge=0)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    sha1: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{40}$")] | None = None
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A file to fetch."""

    name: str
    """Its path below the folder."""
    source: str
    """Where it comes from: a URL, `remote:path`, or a path."""
    bytes: int | None = None
    """Its declared size, if any."""
    algorithm: Algorithm | None = None
    digest: str = ""
    """The declared digest of its content, lower case; empty: none is declared."""


class _FolderEntry(BaseModel):
    """One folder as a manifest describes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: Annotated[str, Field(alias="from", min_length=1, max_length=8192)]
    match: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    count: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFolder:
    """A folder of which all files are fetched."""

    name: str
    """Its path below the folder of all; ends in a slash."""
    source: str
    """Where it comes from: `remote:path`, or a path."""
    match: str | None = None
    """A pattern that the names of files end in, as `*_train_*.h5`; None: all."""
    count: int | None = None
    """The declared number of files, if any."""


def wanted_files(config: Config) -> tuple[WantedFile | WantedFolder, ...]:
    """Return all files and folders in `fetch.files`, then those of `fetch.manifest`.

    Raises:
        ConfigError: An entry is wrong, or both name the same file.
    """
    own = parse_wanted(config.fetch.files or {}, f"{config.where}: fetch.files")
    if config.fetch.manifest is None:
        return own
    more = read_manifest(Path(config.fetch.manifest))
    twice = {one.name for one in own} & {one.name for one in more}
    if twice:
        raise ConfigError(
            f"{config.where}: fetch.files and fetch.manifest both name {min(twice)!r}. Name it once"
        )
    return (*own, *more)


def parse_wanted(files: Mapping[str, Mapping[str, Any]], where: str) -> tuple[WantedFile | WantedFolder, ...]:
    """Return the files of a mapping of names to `{from, bytes, sha256}`; a name that ends in / is a folder.

    Raises:
        ConfigError: Entries or names are wrong; lists all of them.
    """
    problems: list[str] = []
    found: list[WantedFile | WantedFolder] = []
    for name, entry in files.items():
        folder = name.endswith("/")
        if why := _wrong_name(name.removesuffix("/")) if name != "./" else None:
            problems.append(f"{where}: the name {name!r} {why}")
            continue
        try:
            kind = _FolderEntry if folder else _Entry
            found.append(_wanted(name, kind.model_validate(dict(entry))))
        except ValidationError as error:
            problems += [f"{where}: {name}: {_say(one, folder)}" for one in error.errors()]
    problems += [f"{where}: {line}" for line in _clashes(one.name.removesuffix("/") for one in found)]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(found)


def check_names(files: Iterable[WantedFile]) -> None:
    """Check the names of all files, including those that a folder listed.

    Raises:
        ConfigError: One leads out, comes twice, or is a file in one entry and a folder in another.
    """
    names = [one.name for one in files]
    problems = [f"the name {name!r} {why}" for name in names if (why := _wrong_name(name))]
    problems += [f"{name!r} is wanted twice" for name, count in Counter(names).items() if count > 1]
    problems += _clashes(names)
    if problems:
        raise ConfigError("\n".join(problems))


def read_manifest(path: Path) -> tuple[WantedFile | WantedFolder, ...]:
    """Return the files of a JSON manifest, `{"files": {name: {"from": ..., "bytes": ..., "sha256": ...}}}`.

    Raises:
        ConfigError: It cannot be read, is not JSON, names a file twice, or an entry is wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES + 1)
        if len(data) > MANIFEST_BYTES:
            raise ConfigError(f"{path} is larger than {MANIFEST_BYTES:,} bytes, too large for a manifest")
        content = parse_json(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Expected a manifest") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not a manifest: {error}") from error
    files = cast("dict[str, Any]", content).get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or set(cast("dict[str, Any]", content)) != {"files"}:
        raise ConfigError(f'{path} is not a manifest: expected {{"files": {{name: {{"from": ...}}}}}}')
    entries = cast("dict[str, Any]", files)
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {name!r} is not a mapping. Expected {{from, bytes, sha256}}")
    return parse_wanted(entries, str(path))


def _wanted(name: str, entry: _Entry | _FolderEntry) -> WantedFile | WantedFolder:
    if isinstance(entry, _FolderEntry):
        return WantedFolder(name=name, source=entry.source, match=entry.match, count=entry.count)
    for algorithm in ALGORITHMS:
        digest = getattr(entry, algorithm)
        if digest is not None:
            return WantedFile(
                name=name,
                source=entry.source,
                bytes=entry.bytes,
                algorithm=algorithm,
                digest=digest.lower(),
            )
    return WantedFile(name=name, source=entry.source, bytes=entry.bytes)


def _say(problem: Any, folder: bool) -> str:
    place = ".".join(map(str, problem["loc"]))
    known = "from, match, count" if folder else "from, bytes, sha256, sha1, md5"
    said = f"is not known (there are: {known})" if problem["type"] == "extra_forbidden" else problem["msg"]
    return f"{place}: {said}"


def _wrong_name(name: str) -> str | None:
    """Return why a name is refused; None: it is accepted.

    >>> _wrong_name("burgers/train_000.h5"), _wrong_name("../x")
    (None, "has a part '..', which may not begin with a dot")
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid text"
    if not 0 < size <= NAME_BYTES:
        return f"has {size} bytes, expected 1 to {NAME_BYTES}"
    if any(unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp"} for letter in name) or "\\" in name:
        return "has a character that a file name should not have"
    for part in name.split("/"):
        if not part:
            return "is absolute, or has an empty part. Expected a path below the folder"
        if part.startswith((".", "~", "-")):
            sign = {".": "a dot", "~": "a tilde", "-": "a dash"}[part[0]]
            return f"has a part {part!r}, which may not begin with {sign}"
        if len(part.encode()) > PART_BYTES:
            return f"has a part of {len(part.encode())} bytes, expected at most {PART_BYTES}"
    return None


def _clashes(names: Iterable[str]) -> list[str]:
    """Return a line for each name that is a file in one entry and a folder in another."""
    files = set(names)
    above = {name.rsplit("/", count)[0]: name for name in files for count in range(1, name.count("/") + 1)}
    return [f"{name!r} is a file, and the folder of {above[name]!r}" for name in sorted(files & above.keys())]
