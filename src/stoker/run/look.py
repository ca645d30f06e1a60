"""Look at raw data: what it is, and a configuration that reads it, each setting with a reason."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
import yaml

from stoker.config import Config, make_config
from stoker.config.load import holds_caches
from stoker.config.names import all_settings
from stoker.errors import (
    ConfigError,
    EncoderError,
    FormatError,
    SourceError,
    SplitError,
    StokerError,
    docs_url,
)
from stoker.run.build import build_sources
from stoker.run.context import Run
from stoker.schema import JsonResult, Schema
from stoker.sources.protocol import SplittableSource
from stoker.store.remote import SCHEMES
from stoker.train.operator import unequal_tokens
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.sources.protocol import Source

TOKENS, DIM = 16, 32
"""Tokens of a step, and numbers in each, that are proposed; fewer tokens where the grid has fewer points."""
SMALL_SET = 20
"""With fewer samples the usual 10 % for validation may be none."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
SPLIT_NAMES = ("train", "val", "test", "valid", "validation")
SQL_SUFFIXES = (".db", ".sqlite", ".sqlite3")
SQL_NUMBER = re.compile(
    r"^((tiny|small|medium|big)?int(eger)?\d*|(small|big)?serial|real|float\d*|double( precision)?|"
    r"numeric|decimal|bool(ean)?)( unsigned)?(\(.*\))?$",
    re.IGNORECASE,
)
MOST_SEEDS = 20
"""Seeds that are tried until every split of a few samples gets some."""
MOST_FILES = 10_000
"""Names of a folder that are looked at to see what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedSetting:
    """One line of a configuration."""

    name: str
    value: Any
    """As JSON has it."""
    why: str
    guessed: bool = False
    """It does not follow from the data: somebody who knows the data should check it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(JsonResult):
    """What was found, and the settings that read it."""

    json_keys = (*("path", "what", "samples", "fields", "facts", "settings", "questions", "trains", "cache"),)

    path: str
    what: str
    """In words, as `HDF5, in the layout of PDEBench`."""
    proposed: tuple[ProposedSetting, ...]
    samples: int = 0
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of a sample: dtype, shape and the meaning of axis 0."""
    facts: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    """What only somebody who knows the data can answer."""
    trains: bool = False
    """`stoker train` trains on it; else its cache is for a training loop of one's own."""
    cache: str = ""
    """Where its cache of the training split will be."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {one.name: one.value for one in self.proposed}

    def to_yaml(self) -> str:
        """Return the configuration, each line explained."""
        tree: dict[str, Any] = {}
        for one in self.proposed:
            *above, last = one.name.split(".")
            at = tree
            for name in above:
                at = at.setdefault(name, {})
            at[last] = one
        head = [
            f"{self.what}: {self.path}",
            f"Written by `stoker init`. {docs_url('reference/config')} explains every setting.",
        ]
        head += [f"Please check: {one}" for one in self.questions]
        return "\n".join((*(f"# {_one_line(text)}" for text in head), *_lines(tree))) + "\n"


def _lines(tree: Mapping[str, Any], depth: int = 0) -> list[str]:
    lines: list[str] = []
    for name, one in tree.items():
        indent = "  " * depth
        if isinstance(one, ProposedSetting):
            mark = "GUESSED: " if one.guessed else ""
            lines.append(f"{indent}{name}: {_flow(one.value)}  # {mark}{_one_line(one.why)}")
        else:
            lines += [*([] if depth else [""]), f"{indent}{name}:", *_lines(one, depth + 1)]
    return lines


def _one_line(text: str) -> str:
    """Return text without line ends: what follows one in a comment would be a setting."""
    return " ".join(text.split())


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def look(what: str, given: Mapping[str, Any] | None = None) -> Finding:
    """Return what is at a path, URL or import path, and settings that read it.

    Args:
        what: The data.
        given: Settings by dotted name that are known already; they win over what is proposed.

    Raises:
        ConfigError: It is not data that Stoker reads, or several kinds of it.
        SourceError: It cannot be read.
    """
    if not given:
        return _look(what)
    given = _by_setting(given)
    try:
        found = _look(what)
        proposed, text = found.proposed, found.what
    except StokerError:  # for want of what is given, perhaps
        proposed, text = _least(what), "read as the settings say"
    wanted = _with_given([one for one in proposed if not one.name.startswith("training.")], given)
    config = _config_of(wanted)
    if config.data.kind == "hdf5" and not any(one.name.startswith("encoder.") for one in wanted):
        source = build_sources(Run(config), ["train"])["train"]
        wanted = _with_given([*wanted, *_of_grid(source.schema(), source)], given)
    found = _from_settings(what, text, wanted)
    return replace(found, proposed=tuple(_with_given(found.proposed, given)))


def _by_setting(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of settings: `data.splits.train` and `.val` are one `data.splits`."""
    known = all_settings()
    found: dict[str, Any] = {}
    for name, value in given.items():
        words = name.split(".")
        setting = next((one for i in range(1, len(words)) if (one := ".".join(words[:i])) in known), None)
        if setting is None or not isinstance(found.get(setting, {}), dict):
            found[name] = value
            continue
        at = found.setdefault(setting, {})
        *above, last = words[setting.count(".") + 1 :]
        for word in above:
            at = at.setdefault(word, {})
        at[last] = value
    return found


def _with_given(proposed: Sequence[ProposedSetting], given: Mapping[str, Any]) -> list[ProposedSetting]:
    """Return settings with those that are given in place of others, or after them."""
    own = {
        name: ProposedSetting(name=name, value=value, why="as given to `stoker init`")
        for name, value in given.items()
    }
    kept = [own.get(one.name, one) for one in proposed]
    return [*kept, *(one for name, one in own.items() if name not in {one.name for one in kept})]


def _least(what: str) -> list[ProposedSetting]:
    """Return the settings that name data, for those that are given to say the rest.

    Raises:
        ConfigError: It is not data that Stoker reads.
    """
    if re.match(r"(sqlite|postgres(ql)?)://", what):
        return _named("sql", re.split(r"[/?]", what)[-1] or "rows", "data.sql.url", what)
    path = Path(what).expanduser()
    if not path.exists() and not _some_files(path):
        return _named("torch", what.rpartition(":")[2].lower(), "data.dataset", what)
    kind = _KINDS[_kind_of(path)]
    if kind == "sql":
        what = f"sqlite:///{quote(str(_files_of(path, _database_file)[0]))}"
        return _named(kind, _name_of(path), "data.sql.url", what)
    return _named(kind, _name_of(path), "data.root" if kind == "images" else "data.files", what)


def _named(kind: str, task: str, place: str, what: str) -> list[ProposedSetting]:
    return [
        ProposedSetting(name="data.kind", value=kind, why="the kind of the data"),
        ProposedSetting(name="data.task", value=re.sub(r"[^\w.+=-]+", "-", task), why="names the caches"),
        ProposedSetting(name=place, value=what, why="where it is"),
        *_of_splits(SMALL_SET),
    ]


def _look(what: str) -> Finding:
    if re.match(r"(sqlite|postgres(ql)?)://", what):
        return _rows(what)
    if not what:
        raise ConfigError("no data was named", hint="Give a file, a folder, a database URL, or module:Name")
    if what.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        return _caches(what, _mirror_of(what))
    if "://" in what:
        raise ConfigError(
            f"{_shown(what)} is neither a database nor a URL of caches that Stoker reads",
            hint="Expected sqlite:///FILE, postgresql://HOST/DATABASE, or caches at s3://BUCKET/FOLDER; "
            f"{_COPY}",
        )
    path = Path(what).expanduser()
    if not path.exists() and not _some_files(path):
        if re.fullmatch(r"[\w./-]+:\w+", what):
            return _dataset(what)
        raise ConfigError(
            f"{what} does not exist",
            hint="Expected a file, a folder or a quoted pattern, a database URL as sqlite:///FILE, or a "
            "Dataset by its import path, as module:Name",
        )
    if path.is_dir() and holds_caches(path):
        return _caches(str(path), path)
    kind = _kind_of(path)
    if kind is _images and not path.exists():
        raise ConfigError(
            f"{path} is a pattern, and images are read from a folder",
            hint=f"Name the folder, as `stoker init {_some_files(path)[0].parent}`",
        )
    return kind(path)


def _kind_of(path: Path) -> Callable[[Path], Finding]:
    """Return what looks at a file, or at the files of a folder.

    Raises:
        ConfigError: No file is of a known kind.
    """
    if path.is_dir() and path.suffix == ".zarr":
        return _arrays
    names = [path.name] if path.is_file() else [one.name for one in _some_files(path)]
    kinds = Counter(filter(None, map(_looker, names)))
    if not kinds:
        seen = ", ".join(sorted({Path(name).suffix or name for name in names})[:8]) or "nothing"
        raise ConfigError(
            f"{path} is not data that Stoker reads: found {seen}",
            hint="Expected HDF5, images, Parquet, tar, Zarr, .npy, or a SQLite file. Read anything else "
            "with a torch Dataset, and give its import path, as module:Name",
        )
    return max(kinds, key=lambda kind: kinds[kind])


def _some_files(place: Path) -> list[Path]:
    """Return files below a folder, or those of a pattern."""
    found: list[Path] = []
    pattern = place.relative_to(place.anchor)
    for one in place.rglob("*") if place.is_dir() else Path(place.anchor).glob(str(pattern)):
        if one.is_file() and not one.name.startswith("."):
            found.append(one)
        if len(found) >= MOST_FILES:
            break
    return found


def _looker(name: str) -> Callable[[Path], Finding] | None:
    suffix = Path(name).suffix.lower()
    kinds: Mapping[str, Callable[[Path], Finding]] = {
        **dict.fromkeys((".h5", ".hdf5", ".hdf", ".he5"), _simulations),
        **dict.fromkeys(IMAGE_SUFFIXES, _images),
        **dict.fromkeys(SQL_SUFFIXES, _database_file),
        ".parquet": _parquet,
        ".tar": _tar,
        ".npy": _arrays,
        ".zarr": _arrays,
    }
    return kinds.get(suffix)


# ----------------------------------------------------------------------------------------------------------
# Each kind of data.


def _files_of(path: Path, looker: Callable[[Path], Finding]) -> list[Path]:
    """Return the files of one kind, sorted: the path itself, or those below it."""
    return (
        [path] if path.is_file() else sorted(one for one in _some_files(path) if _looker(one.name) is looker)
    )


def _database_file(path: Path) -> Finding:
    files = _files_of(path, _database_file)
    if len(files) > 1:
        raise ConfigError(
            f"{path} holds {len(files)} databases", hint=f"Name one, as `stoker init {files[0]}`"
        )
    return _rows(f"sqlite:///{quote(str(files[0]))}")


def _simulations(path: Path) -> Finding:
    from stoker.sources.hdf5 import HDF5Source

    proposed = [
        ProposedSetting(name="data.task", value=_name_of(path), why="names the caches"),
        ProposedSetting(name="data.files", value=str(path), why="the file, a folder, a list or a glob"),
    ]
    questions: list[str] = []
    try:
        source = HDF5Source(str(path))
        schema, what = source.schema(), "HDF5 of simulations"
        preset = _preset_of(path)
        what = f"HDF5 in the layout of {preset[1]}" if preset else what
        if preset:
            proposed.append(
                ProposedSetting(name="data.preset", value=preset[0], why="the layout, as recognized")
            )
    except SourceError as error:
        try:
            fields = _guessed_fields(path)
        except OSError:  # not an HDF5 file, which the error says already
            fields = {}
        if not fields:
            raise
        source = HDF5Source(str(path), fields=fields)
        schema, what = source.schema(), "HDF5 in a layout that is not known"
        why = "datasets and their axes: n samples, t time, x y z space, c channels"
        proposed.append(ProposedSetting(name="data.fields", value=dict(fields), why=why, guessed=True))
        questions += [f"the axes of {name} are taken for {axes!r}" for name, axes in fields.items() if axes]
        questions.append(f"why it was not recognized: {error.fact}")
    proposed += _of_splits(len(source))
    proposed += _of_grid(schema, source)
    return _from_settings(str(path), what, proposed, questions=questions)


def _preset_of(path: Path) -> tuple[str, str] | None:
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    from stoker.sources.hdf5_formats import is_pdebench, is_well

    with h5py.File(_files_of(path, _simulations)[0], "r") as file:
        if is_well(file):
            return "well", "The Well"
        if is_pdebench(file):
            return "pdebench", "PDEBench"
    return None


def _guessed_fields(path: Path) -> dict[str, str]:
    """Return datasets with as many samples as most others, and a guess of their axes."""
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    shapes: dict[str, tuple[int, ...]] = {}
    with h5py.File(_files_of(path, _simulations)[0], "r") as file:

        def note(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.dtype.kind in "iufb" and item.ndim:
                shapes[name] = tuple(item.shape)

        file.visititems(note)
    large = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    if not large:
        return {}
    samples = Counter(shape[0] for shape in large.values()).most_common(1)[0][0]
    found = {name: _axes(shape) for name, shape in shapes.items() if shape[0] == samples}
    evolving = [name for name, axes in found.items() if " t " in axes]
    if len(evolving) == 1 and "data" not in found:  # the name of what the grid encoder takes
        (name,) = evolving
        found = {"data": f"{name}: {found.pop(name)}", **found}
    return found


def _axes(shape: Sequence[int]) -> str:
    """Return the most usual axes of a dataset of samples.

    >>> _axes((100, 50, 64)), _axes((100, 50, 64, 64)), _axes((100, 50, 64, 64, 2)), _axes((100,))
    ('n t x', 'n t y x', 'n t y x c', 'n')
    """
    return {1: "n", 2: "n x", 3: "n t x", 4: "n t x c" if shape[-1] <= 8 else "n t y x", 5: "n t y x c"}.get(
        len(shape), "n t z y x c"
    )


def _images(path: Path) -> Finding:
    from PIL import Image

    path = path.parent if path.is_file() else path  # images are read from a folder
    files = _files_of(path, _images)
    root = path if path.is_dir() else path.parent
    folders = [one.relative_to(root).parts[:-1] for one in files]
    below = [parts[1:] if parts[:1] and parts[0] in SPLIT_NAMES else parts for parts in folders]
    classes = sorted({parts[0] for parts in below if parts})
    voc, coco = (root / "Annotations").is_dir(), any(root.glob("annotations/*.json"))
    labels = "voc" if voc else "coco" if coco else "folder" if len(classes) > 1 else None
    sizes: Counter[tuple[int, int]] = Counter()
    broken: list[Path] = []
    for one in files[:: max(1, len(files) // 50)]:
        try:
            with Image.open(one) as image:
                sizes[image.height, image.width] += 1
        except OSError:
            broken.append(one)
    if not sizes:
        raise SourceError(
            f"{broken[0]} cannot be read as an image, nor can others of {path}", hint="Check the files"
        )
    usual, _ = sizes.most_common(1)[0]
    size = usual if len(sizes) == 1 and max(usual) <= 256 else (224, 224)
    share = "all" if len(sizes) == 1 else "most"
    facts = [f"{format_count(len(files))} images, {share} of {usual[0]} x {usual[1]}"]
    if broken:
        facts.append(
            f"{len(broken)} of those looked at cannot be read, as {broken[0]}: repair them, or allow "
            "some with precompute.max_quarantined"
        )
    why = {
        "voc": "Pascal VOC: Annotations/*.xml",
        "coco": "COCO: annotations/*.json",
        "folder": f"a folder for each class: {', '.join(classes[:5])}",
        None: "no labels were found",
    }
    proposed = [
        ProposedSetting(name="data.kind", value="images", why=f"images ({docs_url('how-to/images')})"),
        ProposedSetting(name="data.task", value=_name_of(path), why="names the caches"),
        ProposedSetting(name="data.root", value=str(root), why="the folder with the images"),
        ProposedSetting(name="data.images.annotations", value=labels, why=why[labels]),
        ProposedSetting(name="data.images.size", value=[*size], why="[height, width] of stored images"),
        *_of_splits(len(files)),
        ProposedSetting(
            name="encoder.kind", value="identity", why="store decoded pixels; `features` runs a vision model"
        ),
    ]
    return _from_settings(str(path), "images", proposed, facts=facts)


_COPY = "copy raw files to this machine first, as with `stoker data fetch`, and name the copy"


def _mirror_of(url: str) -> Path:
    """Return the local folder that stands for the caches at a URL.

    Raises:
        ConfigError: There are no caches.
        StokerError: As `resolve_local`.
    """
    from stoker.store.storage import resolve_local

    with suppress(FormatError):  # nothing is there
        folder = resolve_local(url)
        if holds_caches(folder):
            return folder
    raise ConfigError(
        f"there are no caches at {url}", hint=f"Check the URL. Only caches are read from one: {_COPY}"
    )


def _caches(what: str, folder: Path) -> Finding:
    """Return what the caches of a folder hold.

    Args:
        what: The folder or its URL, as the settings name it.
        folder: Of this machine.
    """
    from stoker.store.source import CacheSource

    source = CacheSource(folder)
    source.schema()
    name = re.sub(r"_(train|val|test)$", "", source.caches[0].name)
    proposed = [
        ProposedSetting(name="data.kind", value="cache", why="records that are encoded already"),
        ProposedSetting(name="data.task", value=name, why="names the caches"),
        ProposedSetting(name="data.files", value=what, why="the cache, or a folder with caches by name"),
        *_of_splits(len(source)),
        ProposedSetting(name="encoder.kind", value="identity", why="take the records as they are"),
    ]
    return _from_settings(what, "records of a cache", proposed)


def _rows(url: str) -> Finding:
    if _PASSWORD.search(url):
        raise ConfigError(
            f"{_shown(url)} holds a password, which would be copied into every run's folder",
            hint="Put it in ~/.pgpass or PGPASSWORD, and leave it out of the URL",
        )
    table, columns, keys, others_there = _table_of(url)
    declared = bool(keys)
    keys = keys or [name for name in columns if name.lower() in ("id", "key", "uuid", "rowid", "number")][:1]
    numbers = [name for name, kind in columns.items() if SQL_NUMBER.search(kind) and name not in keys]
    others = [name for name in columns if name not in numbers and name not in keys]
    if not keys or not numbers:
        raise ConfigError(
            f"{url}: table {table!r} has {'no column of numbers' if keys else 'no primary key'}; its "
            f"columns are {', '.join(columns)}",
            hint=f"Write data.sql.key and data.sql.columns yourself ({docs_url('how-to/sql')})",
        )
    proposed = [
        ProposedSetting(name="data.kind", value="sql", why=f"rows of a database ({docs_url('how-to/sql')})"),
        ProposedSetting(name="data.task", value=table.rpartition(".")[2], why="names the caches"),
        ProposedSetting(name="data.sql.url", value=url, why="a password belongs in ~/.pgpass"),
        ProposedSetting(
            name="data.sql.table",
            value=table,
            why="the table, NAME or SCHEMA.NAME",
            guessed=bool(others_there),
        ),
        ProposedSetting(
            name="data.sql.key",
            value=keys if len(keys) > 1 else keys[0],
            why="tells rows apart, decides the splits",
            guessed=not declared,
        ),
        ProposedSetting(name="data.sql.columns", value=numbers, why="columns of numbers, each a field"),
        *_of_splits(SMALL_SET),
        ProposedSetting(name="encoder.kind", value="identity", why="store the numbers as they are"),
    ]
    questions: list[str] = []
    if others_there:
        questions.append(f"{table} is the largest of the tables; others are {', '.join(others_there[:8])}")
    if not declared:
        questions.append(f"the table has no primary key; {keys[0]} is taken for one")
    if others:
        questions.append(f"columns that are left out, since they are not numbers: {', '.join(others)}")
    return _from_settings(url, "rows of a database", proposed, questions=questions)


_PASSWORD = re.compile(r"(?<=//)([^/:@]*):[^@/]*@")


def _shown(url: str) -> str:
    """Return a URL without its password."""
    return _PASSWORD.sub(r"\1:***@", url)


_Table: TypeAlias = "tuple[str, dict[str, str], list[str], list[str]]"


def _table_of(url: str) -> _Table:
    """Return the largest table of a database, its columns by type, its primary key, and the other tables.

    Raises:
        SourceError: There is no table, or the database does not answer.
    """
    if not url.startswith("sqlite"):
        return _postgres_table_of(url)
    path = Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))
    if not path.is_file():
        raise SourceError(f"{url}: {path} is not a file", hint="Expected sqlite:///FILE")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=10)) as connection:
            names = [
                row[0]
                for row in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
                )
            ]
            if not names:
                raise SourceError(f"{url} has no table", hint="Check the path")
            quoted = {name: '"' + name.replace('"', '""') + '"' for name in names}
            rows = {
                name: connection.execute(f"SELECT count(*) FROM {text}").fetchone()[0]  # noqa: S608 - quoted
                for name, text in quoted.items()
            }
            table = max(rows, key=lambda name: rows[name])
            found = connection.execute(f"PRAGMA table_info({quoted[table]})").fetchall()
    except sqlite3.Error as error:
        raise SourceError(f"{url} cannot be read as SQLite: {error}", hint="Check the path") from error
    others = sorted(name for name in names if name != table)
    return table, {row[1]: row[2] for row in found}, [row[1] for row in found if row[5]], others


_POSTGRES_TABLES = """
SELECT n.nspname || '.' || c.relname, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
ORDER BY pg_relation_size(c.oid) DESC, 1
"""
_POSTGRES_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), COALESCE(i.indisprimary, false)
FROM pg_attribute a
LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey)
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def _postgres_table_of(url: str) -> _Table:
    try:
        import psycopg
    except ImportError as error:
        raise ConfigError(f"{url} needs psycopg", hint="Install it: pip install 'stoker[sql]'") from error
    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            tables = connection.execute(_POSTGRES_TABLES).fetchall()
            if not tables:
                raise SourceError(f"{url} has no table", hint="Check the database")
            rows = connection.execute(_POSTGRES_COLUMNS, (tables[0][1],)).fetchall()
    except psycopg.Error as error:
        raise SourceError(
            f"{url} cannot be read: {str(error).strip()}", hint="Check host, database and user"
        ) from error
    names = [row[0].removeprefix("public.") for row in tables]
    columns = {row[0]: row[1] for row in rows}
    return names[0], columns, [row[0] for row in rows if row[2]], names[1:]


def _dataset(name: str) -> Finding:
    proposed = [
        ProposedSetting(name="data.dataset", value=name, why="a torch Dataset, or what makes it"),
        ProposedSetting(name="data.task", value=name.rpartition(":")[2].lower(), why="names the caches"),
        ProposedSetting(name="encoder.kind", value="identity", why="store items as they are; or `module`"),
        *_of_splits(SMALL_SET),
    ]
    return _from_settings(name, "a torch Dataset", proposed)


def _parquet(path: Path) -> Finding:
    from stoker.sources.tables import readable_columns

    kept, refused = readable_columns(_files_of(path, _parquet)[0])
    columns = ProposedSetting(name="data.parquet.columns", value=kept, why="columns, each a field")
    left_out = ", ".join(f"{name} ({why})" for name, why in refused.items())
    return _from_files(
        *(path, "parquet", "rows of Parquet files", docs_url("how-to/sources")),
        more=[columns] if refused and kept else [],
        questions=[f"columns that are left out, since they are not numbers: {left_out}"] if refused else [],
    )


def _tar(path: Path) -> Finding:
    return _from_files(path, "tar", "tar archives in the WebDataset layout", docs_url("how-to/sources"))


def _arrays(path: Path) -> Finding:
    return _from_files(path, "arrays", "arrays in Zarr or .npy", docs_url("how-to/meshes"))


def _from_files(
    path: Path,
    kind: str,
    what: str,
    page: str,
    *,
    more: Sequence[ProposedSetting] = (),
    questions: Sequence[str] = (),
) -> Finding:
    proposed = [
        ProposedSetting(name="data.kind", value=kind, why=f"{what} ({page})"),
        ProposedSetting(name="data.task", value=_name_of(path), why="names the caches"),
        ProposedSetting(name="data.files", value=str(path), why="a path, a list or a glob"),
        *more,
        *_of_splits(SMALL_SET),
        ProposedSetting(name="encoder.kind", value="identity", why="store samples as they are; or `module`"),
    ]
    return _from_settings(str(path), what, proposed, questions=questions)


_KINDS: Mapping[Callable[[Path], Finding], str] = {
    _simulations: "hdf5",
    _images: "images",
    _database_file: "sql",
    _parquet: "parquet",
    _tar: "tar",
    _arrays: "arrays",
}


# ----------------------------------------------------------------------------------------------------------
# What all kinds share.


def _of_splits(samples: int) -> list[ProposedSetting]:
    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    why = "shares of the splits, drawn by data.seed"
    if samples < SMALL_SET:
        shares, why = (
            {"train": 0.6, "val": 0.4},
            "the set is small, so validation gets more of it",
        )
    return [ProposedSetting(name="data.splits", value=shares, why=why)]


def _of_grid(schema: Schema, source: Source) -> list[ProposedSetting]:
    """Return settings of the encoder and of training, for fields on a grid."""
    from stoker.encoders.grid import GridEncoder

    data = schema.get("data")
    if data is None or (not data.time and len(schema) > 1 and not _steady_input(schema)):
        return [ProposedSetting(name="encoder.kind", value="identity", why="store fields as they are")]
    points = int(np.prod(data.shape[data.time : -1]))
    try:
        encoder = GridEncoder.for_source(source, tokens=min(TOKENS, points), dim=DIM)
    except EncoderError:
        return [ProposedSetting(name="encoder.kind", value="identity", why="store fields as they are")]
    steady = _steady_input(schema)
    given = (
        [ProposedSetting(name="data.input", value=steady, why="the field that data follows from")]
        if steady
        else []
    )
    return [
        *given,
        ProposedSetting(name="latent.dim", value=encoder.dim, why="numbers in a token"),
        ProposedSetting(name="latent.tokens", value=encoder.tokens, why="tokens of one time step"),
        ProposedSetting(
            name="encoder.patch_size",
            value=[*encoder.patch],
            why=f"points of a patch on the grid {encoder.grid}",
        ),
    ]


def _of_windows(schema: Schema) -> list[ProposedSetting]:
    """Return settings to train the operator."""
    states = [name for name, one in schema.items() if one.evolves]
    several = len(states) > 1 and not {"data", "latent"} & {*states}
    alike = unequal_tokens({name: schema[name].shape[1:] or (1,) for name in states}) is None
    named = ProposedSetting(
        name="training.state_fields",
        value=states if alike else states[:1],
        why="fields with time that are learned",
        guessed=True,
    )
    return [
        *([named] if several else []),
        ProposedSetting(name="training.batch_size", value=64, why="windows in a batch"),
        ProposedSetting(name="training.epochs", value=20, why="passes over the training split"),
        ProposedSetting(name="training.lr", value=1e-3, why="learning rate"),
    ]


def _of_target(schema: Schema, *, guess: bool) -> list[ProposedSetting]:
    """Return settings to learn one field from the others; none where nothing can be learned so.

    Without a field of a usual name, the `guess` is the last one, as in the items `(x, y)` of a Dataset.
    """
    from stoker.run.context import TARGETS, fields_to_learn

    numbers = fields_to_learn(schema)
    known = next((name for name in TARGETS if name in numbers), None)
    if len(numbers) < 2 or any(one.evolves for one in schema.values()) or not (known or guess):
        return []
    why = "the field that is predicted from the others"
    return [
        ProposedSetting(name="training.target", value=known or numbers[-1], why=why, guessed=known is None),
        ProposedSetting(name="training.batch_size", value=64, why="records in a batch"),
        ProposedSetting(name="training.epochs", value=10, why="passes over the training split"),
        ProposedSetting(name="training.lr", value=1e-3, why="learning rate"),
    ]


def _steady_input(schema: Schema) -> str | None:
    """Return the field that a steady solution follows from: the only other one on its grid."""
    data = schema["data"]
    same = [name for name, one in schema.items() if name != "data" and one.shape[:-1] == data.shape[:-1]]
    return same[0] if not data.time and len(same) == 1 and len(data.shape) > 2 else None


def _from_settings(
    path: str,
    what: str,
    proposed: Sequence[ProposedSetting],
    *,
    facts: Sequence[str] = (),
    questions: Sequence[str] = (),
) -> Finding:
    """Return what a source that is built from settings says of the data."""
    without = [one for one in proposed if one.name not in ("data.splits", "data.seed")]
    few = [*without, *_of_splits(1)]
    try:
        for given in (proposed, few, *([*few, _of_seed(seed)] for seed in range(1, MOST_SEEDS))):
            with suppress(SplitError):  # too few samples for so many splits
                return _built(path, what, given, facts, questions)
    except ConfigError:  # of data that is divided already, or of something else, which is raised again
        pass
    return _built(path, what, without, facts, questions)


def _of_seed(seed: int) -> ProposedSetting:
    return ProposedSetting(name="data.seed", value=seed, why="with it every split gets samples")


def _built(
    path: str,
    what: str,
    proposed: Sequence[ProposedSetting],
    facts: Sequence[str],
    questions: Sequence[str],
) -> Finding:
    config = _config_of(proposed)
    sources = build_sources(Run(config), [*(config.data.splits or ("train",))])
    train = sources["train"]
    whole = train.for_split(None) if isinstance(train, SplittableSource) else None
    count = sum(len(source) for source in sources.values()) if whole is None else len(whole)
    return _found(path, what, sources["train"], proposed, questions, facts=facts, samples=count)


def _config_of(proposed: Sequence[ProposedSetting]) -> Config:
    nested: dict[str, Any] = {}
    for one in proposed:
        *above, last = one.name.split(".")
        at = nested
        for name in above:
            at = at.setdefault(name, {})
        at[last] = one.value
    return make_config(nested, where="stoker init")


def _found(  # noqa: PLR0913 - what was found, by name
    path: str,
    what: str,
    source: Source,
    proposed: Sequence[ProposedSetting],
    questions: Sequence[str],
    *,
    facts: Sequence[str] = (),
    samples: int = 0,
) -> Finding:
    schema = source.schema()
    config = _config_of(proposed)
    if odd := next((one for one in proposed if "${" in str(one.value)), None):
        raise ConfigError(
            f"{odd.name} holds '${{', which stands for another setting there", hint=f"Rename {odd.value!r}"
        )
    operator = config.encoder.kind == "grid" or any(one.evolves for one in schema.values())
    learned = _of_windows(schema) if operator else _of_target(schema, guess=config.data.kind != "images")
    asked = [f"{one.value} is taken for the field to predict" for one in learned if one.guessed]
    own = (
        *learned,
        ProposedSetting(name="training.latent_cache_dir", value=".stoker", why="where caches go"),
        ProposedSetting(
            name="training.run_dir", value=f"runs/{config.data.tasks[0]}", why="where results go"
        ),
    )
    size = sum(one.size_bytes() for one in schema.values() if not one.ragged)
    return Finding(
        path=path,
        what=what,
        proposed=(*proposed, *own),
        samples=samples or len(source),
        fields={name: _described(schema, name) for name in schema},
        facts=(*facts, f"a sample is {format_bytes(size)} decoded") if size else tuple(facts),
        questions=(*questions, *asked),
        trains=bool(learned) and (samples or len(source)) > 1,
        cache=f".stoker/{config.data.tasks[0]}_train",
    )


def _described(schema: Schema, name: str) -> str:
    one = schema[name]
    axes = "time along axis 0" if one.time else "length varies" if one.ragged else ""
    return f"{one.dtype} {one.shape}{', ' * bool(axes)}{axes}"


def _name_of(path: Path) -> str:
    """Return a name for the caches: that of the file, in letters that a cache's name may have."""
    named = path.resolve() if path.exists() else path.resolve().parent  # of a pattern
    return re.sub(r"[^\w.+=-]+", "-", named.stem).strip("-.") or "data"


def all_settings_yaml() -> str:
    """Return every setting with its default and its meaning, all commented out."""
    from stoker.config.names import Setting, every_node

    lines = ["# Every setting with its default. Remove the # of those that you change."]
    for node in every_node():
        text = " ".join(node.text.split())
        depth = "  " * node.name.count(".")
        key = node.name.rpartition(".")[2]
        if isinstance(node, Setting):
            lines.append(f"{depth}# {key}: {_flow(node.default)}  # {text}")
        else:
            lines.append(f"{'' if depth else chr(10)}{depth}# {key}:  # {text}")
    return "\n".join(lines).lstrip("\n") + "\n"
