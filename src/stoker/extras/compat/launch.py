"""`stoker compat vast_launch`, `fetch_datasets_b2` and `setup_vast_data`: earlier flags and variables.

Each flag works, or is refused with what does the same now. Variables of object storage (B2_*) become remotes
of rclone for the time of a command; their values are in no script, command or log.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, Debug, Json, Words, command_output, config_and_overrides
from stoker.errors import ConfigError, Problem, TransferError, docs_url
from stoker.extras.fetch import command as fetching
from stoker.extras.launch import command as launching
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.extras.fetch.origins import ListedFile, WantedFile
    from stoker.extras.launch.plan import LaunchPlan
    from stoker.extras.launch.vast import VastClient
    from stoker.schema import Json as JsonValue

LIST_S = 600.0
ENV_FILE = Path(".env")

EnvFile = Annotated[Path, typer.Option(readable=False, help="Variables that are not exported.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show it, and send nothing.")]


_REFUSED: Mapping[str, str] = {
    "--no-precompute": "the machine encodes only what is missing. launch.cache=REMOTE:PATH brings complete "
    "caches there first",
    "--use-lightning": "a launch trains with `stoker train`. With Lightning, train from a script of your own "
    f"({docs_url('how-to/trainers')}) in `stoker launch script`",
    "--cache-version": "caches are named by what is in them. launch.cache=REMOTE:PATH pulls and pushes them",
    "--resume-from-wandb": "checkpoints come from launch.upload=REMOTE:PATH: the same launch again continues "
    "from the last upload",
    "--resume-mode": "a launch continues where launch.upload has checkpoints, else it begins. Another "
    "training.run_dir is another run",
}
"""Flags that nothing here could honor, and what does the same now."""
_VERBS_REFUSED: Mapping[str, Problem] = {
    "set-key": Problem(
        "a key on a command line is seen by others",
        f"Set VAST_API_KEY, or put the key into {launching.KEY_FILES[0]}",
    ),
    "preprocess": Problem(
        "encoding has no machine of its own",
        "`stoker precompute CONFIG` encodes here and `stoker push` brings the cache to a remote; with "
        "launch.cache=REMOTE:PATH a rented machine does both",
    ),
}
VERBS = ("launch", "search", "resume", "setup-env", *_VERBS_REFUSED)


def vast_launch(  # noqa: PLR0913, PLR0917 (one parameter per flag of the earlier script)
    verb: Annotated[str, typer.Argument(metavar="launch|search|resume|setup-env", help="What to do.")],
    words: Words = None,
    config: Annotated[
        Path | None, typer.Option("--config", readable=False, help="The settings file, committed and pushed.")
    ] = None,
    offer_id: Annotated[int | None, typer.Option(help="Rent this offer; default: the cheapest.")] = None,
    gpu: Annotated[str | None, typer.Option(help="launch.gpu, as RTX_4090; default: any.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="launch.gpus.")] = None,
    image: Annotated[str | None, typer.Option(help="launch.image.")] = None,
    disk: Annotated[int | None, typer.Option(help="launch.disk, in GiB.")] = None,
    region: Annotated[str | None, typer.Option(help="launch.region, as DE.")] = None,
    stage: Annotated[str, typer.Option(help="all, or the one stage that CONFIG has.")] = "all",
    repo_url: Annotated[str | None, typer.Option(help="launch.repo.")] = None,
    branch: Annotated[str, typer.Option(help="Has to be at the commit that is checked out here.")] = "auto",
    workdir: Annotated[str | None, typer.Option(help="launch.workdir.")] = None,
    auto_shutdown: Annotated[
        bool | None, typer.Option("--auto-shutdown/--no-auto-shutdown", help="launch.auto_shutdown.")
    ] = None,
    dry_run: DryRun = False,
    retries: Annotated[int, typer.Option(min=0, help="Look for an offer again, so many times.")] = 0,
    retry_wait: Annotated[float, typer.Option(min=0, metavar="S", help="Seconds between two looks.")] = 20.0,
    run_arg: Annotated[list[str] | None, typer.Option(help="A setting, KEY=VALUE; repeat it.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="search: offers to show.")] = 20,
    no_precompute: Annotated[bool, typer.Option("--no-precompute", hidden=True, help="Refused.")] = False,
    use_lightning: Annotated[bool, typer.Option("--use-lightning", hidden=True, help="Refused.")] = False,
    cache_version: Annotated[str | None, typer.Option(hidden=True, help="Refused.")] = None,
    resume_from_wandb: Annotated[str | None, typer.Option(hidden=True, help="Refused.")] = None,
    resume_mode: Annotated[str | None, typer.Option(hidden=True, help="Refused, but `allow`.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rent a machine, as `vast_launch.py` did.

    launch rents and runs, search shows offers, resume continues from the last upload, setup-env shows which
    earlier variables are set. Flags that cannot be honored are refused with what does the same now.

    \b
    Example:
      stoker compat vast_launch launch --config configs/train_burgers_32dim.yaml --gpu RTX_4090 --dry-run
      stoker compat vast_launch search --gpu RTX_4090 --num-gpus 2
    """
    with command_output(as_json=as_json, debug=debug) as out:
        _refuse_verb(verb)
        given: Mapping[str, object] = {
            "--no-precompute": no_precompute, "--use-lightning": use_lightning,
            "--cache-version": cache_version, "--resume-from-wandb": resume_from_wandb,
            "--resume-mode": resume_mode if resume_mode != "allow" else None,
        }  # fmt: skip
        for flag, value in given.items():
            if value:
                raise ConfigError(f"{flag} is not taken: {_REFUSED[flag]}")
        machine = {
            "gpu": gpu, "gpus": num_gpus, "image": image, "disk": disk, "region": region, "repo": repo_url,
            "workdir": workdir,
        }  # fmt: skip
        settings = [f"launch.{key}={value}" for key, value in machine.items() if value is not None]
        if verb == "setup-env":
            _show_variables(out)
        elif verb == "search":
            _search(out, [*(words or []), *settings], limit)
        else:
            _check_branch(branch)
            path, overrides = config_and_overrides([*(words or []), *_run_args(run_arg)], config)
            plan = _plan(out, path, [*overrides, *settings], auto_shutdown)
            _check_stage(plan.config, stage)
            if verb == "resume":
                _check_upload(plan, path)
            if not dry_run and retries:
                _wait_for_offer(out, launching.vast_client(), plan, retries, retry_wait)
            launching.rent(out, plan, offer_id, dry_run=dry_run)


def _refuse_verb(verb: str) -> None:
    if why := _VERBS_REFUSED.get(verb):
        raise ConfigError.of_all([why.within(f"{verb} is not taken: ")])
    if verb not in VERBS:
        raise ConfigError(f"{verb!r} is not a verb of vast_launch", hint=f"Expected {', '.join(VERBS[:4])}")


def _search(out: CommandOutput, overrides: list[str], limit: int) -> None:
    """Offers that fit, the cheapest first; no settings file is needed."""
    from stoker.config import load_config
    from stoker.extras.launch.plan import offers_query
    from stoker.extras.launch.vast import OfferList

    found = launching.vast_client().offers(offers_query(load_config(None, overrides)))
    out.show(OfferList(offers=tuple(found[:limit])), launching.render_offers)


def _show_variables(out: CommandOutput) -> None:
    """Print the earlier variables that are set here, and what becomes of each, without any value."""
    environment = _environment(ENV_FILE)
    rows = [
        EarlierVariable(name=name, is_set=bool(variable(environment, name)), use=_USES[name])
        for name in ALIASES
    ]
    rows += [
        EarlierVariable(
            name=name, is_set=bool(environment.get(name)), use="launch.secrets: the machine gets it"
        )
        for name in TRACKER
    ]
    key = bool(os.environ.get("VAST_API_KEY"))
    rows.append(
        EarlierVariable(name="VAST_API_KEY", is_set=key, use="the provider; the machine never gets it")
    )
    made = tuple(sorted(rclone_variables(environment)))
    out.show(EarlierVariables(rows=tuple(rows), made=made), render_variables)


def fetch_datasets_b2(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Data sets; default: WANDB_DATASETS, as a,b.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", readable=False, help="Default: DATA_ROOT.")
    ] = None,
    env_file: EnvFile = ENV_FILE,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch by key, as `fetch_datasets_b2.sh` did.

    Checked, resumed, several at once. Variables: B2_KEY_ID, B2_APP_KEY, B2_BUCKET, B2_S3_ENDPOINT,
    B2_S3_REGION, B2_PREFIX (pdebench), WANDB_DATASETS, DATA_ROOT (data/pdebench), WORKDIR, DRY_RUN=1.

    \b
    Example:
      stoker compat fetch_datasets_b2 burgers1d_full_v1 --dry-run
    """
    with command_output(as_json=as_json, debug=debug) as out:
        environment = _environment(env_file)
        named = keys or [one for one in environment.get("WANDB_DATASETS", "").split(",") if one.strip()]
        if environment.get("CLEAN_OLD_SPLITS") not in (None, "", "0"):
            out.note(
                "CLEAN_OLD_SPLITS has no effect: no local file is removed before the new one is complete"
            )
        prefix = environment.get("B2_PREFIX", "pdebench")
        with _remotes(environment):
            files = files_of_keys(named, prefix, bucket_of(environment), _listed)
            _fetch(out, files, to or _data_root(environment), dry_run or environment.get("DRY_RUN") == "1")


def setup_vast_data(
    tasks: Annotated[str, typer.Argument(metavar="TASKS", help='Names, as "burgers1d advection1d".')],
    root: Annotated[
        Path | None, typer.Argument(metavar="DIR", readable=False, help="Default: data/pdebench.")
    ] = None,
    env_file: EnvFile = ENV_FILE,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch the files of tasks, with all shards.

    As `setup_vast_data.sh` was meant to. No training file is an error; files keep their names, and existing
    ones are compared, not trusted.

    \b
    Example:
      stoker compat setup_vast_data "burgers1d advection1d" data/pdebench
    """
    with command_output(as_json=as_json, debug=debug) as out:
        environment = _environment(env_file)
        if environment.get("CACHE_VERSION"):
            raise ConfigError(
                f"CACHE_VERSION is not taken: {_REFUSED['--cache-version']}, `stoker cache pull` one"
            )
        if environment.get("CHECKSUM"):
            out.note("CHECKSUM has no effect: digests that the bucket keeps are always compared")
        with _remotes(environment):
            files = files_of_tasks(tasks.replace(",", " ").split(), bucket_of(environment), _listed, out.note)
            _fetch(out, files, root or _data_root(environment), dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierVariable:
    """An earlier variable, and what becomes of it."""

    name: str
    is_set: bool
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierVariables:
    """All earlier variables of a launch."""

    rows: tuple[EarlierVariable, ...]
    made: tuple[str, ...]
    """Variables that describe the remotes to rclone."""

    def to_json(self) -> dict[str, JsonValue]:
        """Return the keys that scripts rely on."""
        rows: list[JsonValue] = [{"name": row.name, "set": row.is_set, "use": row.use} for row in self.rows]
        return {"variables": rows, "made": [*self.made]}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPreview:
    """What would be fetched."""

    folder: Path
    files: tuple[WantedFile, ...]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the keys that scripts rely on."""
        rows: list[JsonValue] = [
            {"name": one.name, "from": one.source, "bytes": one.bytes} for one in self.files
        ]
        return {"folder": str(self.folder), "files": rows}


_USES: Mapping[str, str] = {
    "B2_KEY_ID": "the remotes B2TRAIN and UPSB2 of rclone",
    "B2_APP_KEY": "the same",
    "B2_BUCKET": "fetch_datasets_b2 and setup_vast_data; in CONFIG: B2TRAIN:BUCKET/...",
    "B2_S3_ENDPOINT": "the remotes, of type s3; without it and a region: of type b2",
    "B2_S3_REGION": "the same",
}


def render_variables(result: EarlierVariables, console: Console) -> None:
    """Print one line for each."""
    for row in result.rows:
        state = "set    " if row.is_set else "not set"
        console.print(f"{row.name:<16} {state}  {escape(row.use)}", soft_wrap=True)
    if result.made:
        console.print(f"rclone gets {', '.join(result.made)}", soft_wrap=True)


def render_files(result: FetchPreview, console: Console) -> None:
    """Print one line for each."""
    for one in result.files:
        size = "" if one.bytes is None else f"  {format_bytes(one.bytes)}"
        console.print(f"{escape(one.name)} from {escape(one.source)}{size}", soft_wrap=True)
    console.print(f"{len(result.files)} files to {escape(str(result.folder))}; nothing was fetched")


def _plan(out: CommandOutput, path: Path, overrides: list[str], auto_shutdown: bool | None) -> LaunchPlan:
    """What would run, with the earlier variables: remotes of rclone, and the tracker's as secrets."""
    from stoker.config import load_config

    environment = _environment(ENV_FILE)
    named = load_config(path, overrides).launch.secrets
    if more := [name for name in TRACKER if environment.get(name) and name not in named]:
        out.note(f"the machine gets {', '.join(more)} (launch.secrets)")
        overrides = [*overrides, f"launch.secrets=[{','.join([*named, *more])}]"]
    environment |= rclone_variables(environment)
    plan = launching.planned(out, path, overrides, "vast", auto_shutdown, environment=environment)
    if plan.config.launch.gpu is None:
        out.note("launch.gpu is not set: any GPU, the cheapest first (the earlier default was A100_PCIE)")
    return plan


def _run_args(run_arg: list[str] | None) -> list[str]:
    for one in run_arg or []:
        if "=" not in one or one.startswith("-"):
            raise ConfigError(
                f"--run-arg {one} is not taken: the machine runs `stoker train CONFIG KEY=VALUE`, so give a "
                "setting, as --run-arg training.epochs=3"
            )
    return run_arg or []


def _check_stage(config: Config, stage: str) -> None:
    from stoker.run.context import only_stage, stages_of

    if only_stage(config, stage) is not None and len(stages_of(config)) > 1:
        raise ConfigError(
            f"--stage {stage} is not taken: the machine runs `stoker train CONFIG`, which trains all of its "
            f"stages ({', '.join(one.name for one in stages_of(config))})",
            hint="Take --stage all, or have only the first ones trained: --run-arg stages=[operator]",
        )


def _check_upload(plan: LaunchPlan, path: Path) -> None:
    if plan.config.launch.upload is None:
        raise ConfigError(
            f"{path}: launch.upload is not set, so nothing of an earlier machine is kept",
            hint="Set it to REMOTE:PATH before the first launch; a machine that was stopped still has its "
            "disk",
        )


def _check_branch(branch: str) -> None:
    if branch == "auto":
        return
    from stoker.extras.launch.plan import is_checked_out

    if not is_checked_out(Path.cwd(), branch):
        raise ConfigError(
            f"--branch {branch} is not the commit that is checked out here, which is what the machine gets",
            hint=f"git checkout {branch}, then launch",
        )


def _wait_for_offer(
    out: CommandOutput, client: VastClient, plan: LaunchPlan, retries: int, wait_s: float
) -> None:
    """Look for an offer until there is one, `retries` times at most; renting itself is never repeated."""
    for number in range(retries):
        if client.offers(plan.query()):
            return
        out.note(f"no offer fits; looking again in {wait_s:g} s ({number + 1} of {retries})")
        time.sleep(wait_s)


def _environment(env_file: Path) -> dict[str, str]:
    """Return the environment, and what a `.env` file adds to it."""
    if not env_file.is_file():
        if env_file != ENV_FILE:
            raise ConfigError(f"{env_file} does not exist", hint="Expected a file of NAME=VALUE lines")
        return dict(os.environ)
    return {**read_env_file(env_file), **os.environ}


@contextmanager
def _remotes(environment: Mapping[str, str]) -> Generator[None]:
    """Describe the earlier remotes to rclone, which reads the environment, for the time of a command."""
    made = rclone_variables(environment)
    os.environ.update(made)
    try:
        yield
    finally:
        for name in made:
            os.environ.pop(name, None)


def _data_root(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("WORKDIR", ".")) / environment.get("DATA_ROOT", "data/pdebench")


def _listed(place: str) -> list[ListedFile]:
    from stoker.extras.fetch.origins import list_remote

    return list_remote(place, LIST_S)


def _fetch(out: CommandOutput, files: tuple[WantedFile, ...], folder: Path, dry_run: bool) -> None:
    from stoker.extras.fetch.run import fetch_files
    from stoker.extras.launch.script import without_secrets

    if dry_run:
        out.show(FetchPreview(folder=folder, files=files), render_files)
        return
    with fetching.listening(out) as listen:
        report = fetch_files(files, folder, redact=without_secrets, listen=listen)
    out.show(report, fetching.render)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


# ----------------------------------------------------------------------------------------------------------
# Object storage of the earlier scripts: their variables as remotes of rclone, and the files they fetched.


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
ListFiles = Callable[[str], "Sequence[ListedFile]"]
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
            f"not set: {', '.join(missing)}",
            hint="Export them or put them into .env; or name files in fetch.files of CONFIG and use `stoker "
            "data fetch CONFIG`",
        )
    return f"{REMOTES[1]}:{variable(environment, 'B2_BUCKET')}"


def files_of_keys(keys: Sequence[str], prefix: str, bucket: str, listed: ListFiles) -> tuple[WantedFile, ...]:
    """Return the files that keys of the earlier fetch script mean: a file, `KEY.h5`, or all of a folder.

    Raises:
        ConfigError: No key is given; or one is not in the bucket, or is an archive. Names all of those.
        TransferError: The bucket cannot be listed.
    """
    if not keys:
        raise ConfigError("no key of a data set is given", hint="Name some, or set WANDB_DATASETS to a,b")
    place = f"{bucket}/{prefix.strip('/')}".rstrip("/")
    files = {one.name: one for one in listed(place)}
    found: dict[str, ListedFile] = {}
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
    tasks: Sequence[str], bucket: str, listed: ListFiles, tell: Callable[[str], None]
) -> tuple[WantedFile, ...]:
    """Return the files of tasks, all shards of each split, from the first of `LAYOUTS` that has the task.

    Files keep their names: shard 000 is not made the only one.

    Args:
        tell: Gets a line for each split but `train` that is not there.

    Raises:
        ConfigError: A task has no training file. Names all of those.
        TransferError: The bucket does not answer.
    """
    found: dict[str, ListedFile] = {}
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


def _folder_of(task: str, bucket: str, listed: ListFiles) -> tuple[str, dict[str, ListedFile]]:
    """Return the first folder with files of a task, and these by name; else the last one, empty."""
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


def _wanted(place: str, files: Mapping[str, ListedFile]) -> tuple[WantedFile, ...]:
    from stoker.extras.fetch.origins import WantedFile

    return tuple(
        WantedFile(name=name, source=f"{place}/{one.name}", bytes=one.bytes, algorithm=one.algorithm,
               digest=one.digest)
        for name, one in files.items()
    )  # fmt: skip
