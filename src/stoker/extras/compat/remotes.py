"""Object storage of the earlier scripts: their variables as remotes of rclone, and what they fetched.

Nothing here moves a file or reads the environment: `stoker compat` does, with what comes out of this.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from stoker.errors import ConfigError, TransferError
from stoker.extras.fetch.origins import Listed
from stoker.extras.fetch.wanted import WantedFile

REMOTES = ("B2TRAIN", "UPSB2")
"""Names that the earlier launcher and the earlier fetch script gave the one remote."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "B2_KEY_ID": ("B2_ACCOUNT_ID", "KEY_ID", "ACCOUNT_ID"),
    "B2_APP_KEY": ("B2_APPLICATION_KEY", "APP_KEY", "APPLICATION_KEY"),
    "B2_BUCKET": ("B2_BUCKET_NAME", "BUCKET_NAME"),
    "B2_S3_ENDPOINT": ("S3_ENDPOINT",),
    "B2_S3_REGION": ("S3_REGION",),
}
"""Variables of the earlier scripts, and other names of each."""
TRACKER = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY")
"""Variables that the earlier launcher gave the machine for its tracker."""
LAYOUTS = ("pdebench/full/{task}", "PDEbench/pdebench/{task}_full_v1", "pdebench/{task}_full_v1")
"""Folders of a bucket that the earlier scripts looked for a task in."""
SPLITS = ("train", "val", "test")
_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$")
List = Callable[[str], Sequence[Listed]]
"""Lists all files below a place of rclone."""


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a `.env` file: NAME=VALUE lines, with or without quotes; nothing is evaluated.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / ".env"
    >>> _ = file.write_text("# keys\\nexport B2_KEY_ID='a b'\\nB2_BUCKET=lab\\n")
    >>> read_env_file(file)
    {'B2_KEY_ID': 'a b', 'B2_BUCKET': 'lab'}
    """
    found: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        if (match := _LINE.match(line)) is not None:
            name, value = match.groups()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name] = value[1:-1] if quoted else value
    return found


def variable(environment: Mapping[str, str], name: str) -> str:
    """Return the value of an earlier variable under any of its names; empty where it is not set."""
    return next((environment[one] for one in (name, *ALIASES[name]) if environment.get(one)), "")


def rclone_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that describe the earlier remote to rclone; none where there are no keys.

    Variables of these names that are set already stay as they are.
    """
    key, secret = variable(environment, "B2_KEY_ID"), variable(environment, "B2_APP_KEY")
    if not key or not secret:
        return {}
    endpoint, region = variable(environment, "B2_S3_ENDPOINT"), variable(environment, "B2_S3_REGION")
    described = {"TYPE": "b2", "ACCOUNT": key, "KEY": secret}
    if endpoint or region:
        described = {
            "TYPE": "s3", "PROVIDER": "Other", "ACCESS_KEY_ID": key, "SECRET_ACCESS_KEY": secret,
            "ENDPOINT": endpoint, "REGION": region, "ACL": "private", "NO_CHECK_BUCKET": "true",
        }  # fmt: skip
    names = {f"RCLONE_CONFIG_{one}_{part}": value for one in REMOTES for part, value in described.items()}
    return {name: value for name, value in names.items() if value and not environment.get(name)}


def bucket_of(environment: Mapping[str, str]) -> str:
    """Return the earlier bucket as a place of rclone, `UPSB2:BUCKET`.

    Raises:
        ConfigError: A variable is missing.
    """
    described = rclone_variables(environment) or any(
        environment.get(f"RCLONE_CONFIG_{name}_TYPE") for name in REMOTES
    )
    missing = [
        name
        for name in ("B2_KEY_ID", "B2_APP_KEY", "B2_BUCKET")
        if not variable(environment, name) and not (described and name != "B2_BUCKET")
    ]
    if missing:
        raise ConfigError(
            f"not set: {', '.join(missing)}. Export them or put them into .env; or name files in fetch.files "
            "of CONFIG and use `stoker fetch CONFIG`"
        )
    return f"{REMOTES[1]}:{variable(environment, 'B2_BUCKET')}"


def files_of_keys(keys: Sequence[str], prefix: str, bucket: str, listed: List) -> tuple[WantedFile, ...]:
    """Return the files that keys of the earlier fetch script mean: a file, `KEY.h5`, or all of a folder.

    Raises:
        ConfigError: No key is given; or one is not in the bucket, or is an archive. Names all of those.
        TransferError: The bucket cannot be listed.
    """
    if not keys:
        raise ConfigError("no key of a data set is given. Name some, or set WANDB_DATASETS to a,b")
    place = f"{bucket}/{prefix.strip('/')}".rstrip("/")
    files = {one.name: one for one in listed(place)}
    found: dict[str, Listed] = {}
    problems: list[str] = []
    for key in (one.strip().strip("/") for one in keys):
        names = _meant(key, files)
        if not names:
            problems.append(_not_there(key, files))
        for name in names:
            below = name.startswith(f"{key}/")
            kept = str(PurePosixPath(key).name / PurePosixPath(name).relative_to(key)) if below else ""
            found[kept or PurePosixPath(name).name] = files[name]
    if problems:
        raise ConfigError(f"{place}: {'; '.join(problems)}. Nothing was fetched")
    return _wanted(place, found)


def files_of_tasks(
    tasks: Sequence[str], bucket: str, listed: List, tell: Callable[[str], None]
) -> tuple[WantedFile, ...]:
    """Return the files of tasks, all shards of each split, from the first of `LAYOUTS` that has the task.

    Files keep their names: shard 000 is not made the only one.

    Args:
        tell: Gets a line for each split but `train` that is not there.

    Raises:
        ConfigError: A task has no training file. Names all of those.
        TransferError: The bucket does not answer.
    """
    found: dict[str, Listed] = {}
    places: dict[str, str] = {}
    problems: list[str] = []
    for task in tasks:
        place, files = _folder_of(task, bucket, listed)
        for split in SPLITS:
            pattern = re.compile(rf"{re.escape(task)}_{split}(_\d+)?\.(h5|hdf5)")
            names = [name for name in files if pattern.fullmatch(name)]
            if not names and split == "train":
                tried = ", ".join(f"{bucket}/{one.format(task=task)}" for one in LAYOUTS)
                problems.append(f"{task} has no file {task}_train.h5 or {task}_train_000.h5 in {tried}")
            elif not names:
                tell(f"{task}: no file of the split {split} in {place}")
            for name in names:
                found[name], places[name] = files[name], place
    if problems:
        raise ConfigError(f"{'; '.join(problems)}. Nothing was fetched")
    return tuple(one for name in found for one in _wanted(places[name], {name: found[name]}))


def _folder_of(task: str, bucket: str, listed: List) -> tuple[str, dict[str, Listed]]:
    """The first folder with files of a task, and these by name; the last one, empty, where none has any."""
    place = ""
    for layout in LAYOUTS:
        place = f"{bucket}/{layout.format(task=task)}"
        try:
            files = {one.name: one for one in listed(place)}
        except TransferError as error:
            if error.transient:
                raise
            continue  # this folder is not there
        if any(name.startswith(f"{task}_train") for name in files):
            return place, files
    return place, {}


def _meant(key: str, files: Iterable[str]) -> list[str]:
    names = [*files]
    for one in (key, f"{key}.h5"):
        if one in names:
            return [one]
    below = [name for name in names if name.startswith(f"{key}/")]
    ends = [name for name in names if name.endswith((f"/{key}", f"/{key}.h5"))]
    return below or (ends if len(ends) == 1 else [])


def _not_there(key: str, files: Iterable[str]) -> str:
    for archive in (f"{key}.tar.gz", f"{key}.tar"):
        if archive in files:
            return f"{key} is there as {archive}, which is not unpacked: name {archive}, then unpack it"
    near = difflib.get_close_matches(key, files, n=2, cutoff=0.5)
    return f"no file or folder {key}" + (f" (there is {', '.join(near)})" if near else "")


def _wanted(place: str, files: Mapping[str, Listed]) -> tuple[WantedFile, ...]:
    return tuple(
        WantedFile(name=name, source=f"{place}/{one.name}", bytes=one.bytes, algorithm=one.algorithm,
               digest=one.digest)
        for name, one in files.items()
    )  # fmt: skip
