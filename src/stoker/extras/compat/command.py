"""`stoker compat`: the scripts of the earlier latent cache, with their flags and the meaning that those had.

A settings file of then is read as it was meant: `training.batch_size` counts trajectories, pairs begin a
stride apart, `num_workers` reads in parallel, and sections of other programs are said once and left out.
Everything below the settings is what `stoker precompute`, `train` and `validate` do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, command_output, joined
from stoker.cli.flags import (
    ConfigFlag,
    Debug,
    EarlierFlags,
    EarlierPrecomputeFlags,
    Epochs,
    Json,
    Manifest,
    Splits,
    Stage,
    Words,
    config_and_overrides,
    split_words,
    spread_flags,
)
from stoker.cli.training import load_settings, run_training
from stoker.errors import ConfigError, EncoderError, SourceError, SplitError
from stoker.extras.fetch import command as fetching
from stoker.extras.launch import command as launching
from stoker.sources.files import canonical_split
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.config.models import Config as Settings
    from stoker.extras.compat.encoder import ConvertedEncoder
    from stoker.extras.fetch.origins import Listed
    from stoker.extras.fetch.wanted import WantedFile
    from stoker.extras.launch.plan import LaunchPlan
    from stoker.extras.launch.vast import VastClient
    from stoker.run.context import Run
    from stoker.schema import Json as JsonValue


ROOT_VARIABLE = "PDEBENCH_ROOT"
"""Folder of the raw files, which won over `data.root`."""

group = typer.Typer(
    name="compat",
    help="The scripts of the earlier systems, with their flags and settings files as they were meant.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; without a GPU: cpu.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatFlags(EarlierPrecomputeFlags):
    """The flags with the meaning that they had."""

    device: Device = None
    batch_size: Annotated[
        int | None, typer.Option(help="Has no effect: samples are encoded in fixed groups.")
    ] = None
    num_workers: Annotated[
        int | None, typer.Option(help="Processes that read; 0 reads in this one. Default: as many as pay.")
    ] = None
    parallel: Annotated[
        bool | None,
        typer.Option(
            "--parallel/--no-parallel", help="--no-parallel without --num-workers reads in this process."
        ),
    ] = None
    pin_memory: Annotated[bool | None, typer.Option("--pin-memory", help="Has no effect.")] = None


@spread_flags
def precompute(  # noqa: PLR0913  one parameter per flag that is not a setting
    words: Words = None,
    *,
    config: ConfigFlag = None,
    splits: Splits = None,
    manifest: Manifest = None,
    skip_auto_copy: Annotated[
        bool, typer.Option("--skip-auto-copy", help="Has no effect: nothing is asked on a terminal.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="As --debug.")] = False,
    as_json: Json = False,
    debug: Debug = False,
    flags: CompatFlags,
) -> None:
    """Encode, as `precompute_latent_cache.py` did.

    Returns at once when nothing is missing. A changed setting makes another cache.

    \b
    Example:
      stoker compat precompute --config configs/train_burgers_32dim.yaml --tasks burgers1d \\
        --splits train val --device cuda --num-workers 4 --manifest reports/precompute.json
    """
    with command_output(as_json=as_json, debug=debug or verbose) as out:
        path, overrides = config_and_overrides(words or [], config)
        if flags.batch_size is not None:
            out.note("--batch-size has no effect: samples are encoded in fixed groups, whatever the machine")
        if skip_auto_copy:
            out.note("--skip-auto-copy has no effect: nothing is copied unless data.stage says so")
        workers = _workers(out, flags.num_workers, flags.parallel)
        asked = replace(flags, batch_size=None, parallel=None, num_workers=workers)
        overrides = asked.settings(overrides)
        if flags.parallel and not flags.num_workers:
            overrides.append("training.use_parallel_encoding=true")
        settings = load_earlier(out, path, overrides)
        from stoker.cli import output
        from stoker.run.precompute import precompute_config

        with joined(settings) as run:
            wanted, missing = _existing(run, split_words(splits or []))
            for error in missing:
                out.note(f"skipped: {error}")
            result = precompute_config(run, splits=wanted, manifest=manifest)
        if result.caches and not any(cache.encoded for cache in result.caches):
            out.note("Cache is valid and up-to-date, skipping regeneration. --overwrite encodes again")
        out.show(result, output.precompute)
        if result.exit_code or missing:
            raise typer.Exit(result.exit_code or missing[0].exit_code)


def _existing(run: Run, splits: list[str]) -> tuple[list[str], list[SplitError]]:
    """Splits that every task has, and why others are left out, so that one that lacks stops none of the rest.

    Raises:
        SplitError: None is there.
    """
    from stoker.run.build import build_source

    there: list[str] = []
    missing: list[SplitError] = []
    for split in splits:
        try:
            for part in run.parts():
                len(build_source(part, canonical_split(split)))
            there.append(split)
        except SplitError as error:
            missing.append(error)
        except SourceError:
            there.append(split)  # `precompute_config` meets it again, and says it or does without the source
    if missing and not there:
        raise missing[0]
    return there, missing


def _workers(out: CommandOutput, workers: int | None, parallel: bool | None) -> int | None:
    """How many processes read: `--no-parallel` kept the encoder out of the loader, never the workers."""
    if parallel is None:
        return workers
    if parallel:
        return workers or None
    if workers:
        out.note(f"--no-parallel: {workers} workers read, and this process encodes, as it always does here")
    return workers or 0


def train(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    words: Words = None,
    config: ConfigFlag = None,
    stage: Stage = None,
    epochs: Epochs = None,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Encode what is missing, then train as `train.py`.

    \b
    Example:
      stoker compat train --config configs/train_burgers_32dim.yaml --stage operator --epochs 3
      stoker compat train --config configs/train_burgers_32dim.yaml training.batch_size=8
    """
    with command_output(as_json=as_json, debug=debug) as out:
        path, overrides = config_and_overrides(words or [], config)
        given = {"training.epochs": epochs, "training.device": device}
        overrides += [f"{name}={value}" for name, value in given.items() if value is not None]
        settings = load_earlier(out, path, overrides)
        from stoker.run.stages import with_epochs

        run_training(out, with_epochs(settings, stage, epochs), stage=stage)


def validate(
    words: Words = None, config: ConfigFlag = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Check before a long run, as `validate_config.py`.

    \b
    Example:
      stoker compat validate --config configs/train_burgers_32dim.yaml
    """
    with command_output(as_json=as_json, debug=debug) as out:
        path, overrides = config_and_overrides(words or [], config)
        from stoker.cli import output
        from stoker.run.validate import validate_config

        given = [*overrides, *_root_of_environment(out, overrides)]
        result = validate_config(path, given, environment=os.environ, earlier=True)
        out.show(result, output.validate)
        if result.exit_code:
            raise typer.Exit(result.exit_code)


def load_earlier(out: CommandOutput, path: Path, overrides: list[str]) -> Settings:
    """Return the settings of an earlier file as they were meant; what has no effect is said."""
    from stoker.extras.compat.settings import on_available_device

    given = [*overrides, *_root_of_environment(out, overrides)]
    return on_available_device(load_settings(out, path, given, earlier=True))


def _root_of_environment(out: CommandOutput, overrides: list[str]) -> list[str]:
    """`data.root` as the environment says it, unless the command line does."""
    root = os.environ.get(ROOT_VARIABLE)
    if not root or any(word.startswith(("data.root=", "data.files=")) for word in overrides):
        return []
    out.note(f"data.root is {root}, of {ROOT_VARIABLE}")
    return [f"data.root={root}"]


# ----------------------------------------------------------------------------------------------------------
# The command that converts weights of the earlier grid encoder.


def convert_encoder(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    old: Annotated[Path, typer.Argument(metavar="OLD.pt", readable=False, help="Its weights (state_dict).")],
    out: Annotated[Path, typer.Option(metavar="NEW.safetensors", help="Where to write.")],
    grid: Annotated[str, typer.Option(metavar="H,W", help="Points of the grid; 1D data: 1,W.")],
    patch: Annotated[int, typer.Option(help="Its patch_size.")],
    tokens: Annotated[int, typer.Option(help="Its latent_len.")],
    channels: Annotated[int, typer.Option(help="Channels of its fields together.")] = 1,
    fourier: Annotated[str, typer.Option(metavar="K,K", help="Its fourier_frequencies.")] = "1,2",
    key: Annotated[str | None, typer.Option(help="The entry of OLD with the weights.")] = None,
    prefix: Annotated[str, typer.Option(help="Take names that begin so, and cut it off.")] = "",
    original: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Makes the original, to take its positions and compare."),
    ] = None,
    field: Annotated[str, typer.Option(help="The name that the original has for its field.")] = "data",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert weights of the earlier grid encoder.

    For encoder.kind=grid. Possible where its stem is untrained and its pooling takes equal rectangles; else
    the layer that stands in the way is named. The result is compared with the earlier computation.

    \b
    Example:
      stoker compat convert-encoder old.pt --out new.safetensors --grid 64,64 --patch 4 --tokens 16
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from stoker.extras.compat.encoder import convert_encoder as convert
        from stoker.extras.compat.encoder import original_forward

        points = _numbers(grid, "--grid", 2)
        size = (points[0], points[1])
        forward = None
        if original is not None:
            forward = original_forward(_original(original, old, key, prefix), size, field)
        result = convert(
            old, out, grid=size, patch=patch, tokens=tokens, channels=channels,
            fourier=_numbers(fourier, "--fourier"), key=key, prefix=prefix, original=forward,
        )  # fmt: skip
        output.show(result, _show)


def _original(spec: str, old: Path, key: str | None, prefix: str) -> Any:
    """The original module, with the weights."""
    from torch import nn

    from stoker.encoders.weights import load_checkpoint
    from stoker.run.user_code import UserCode

    code = UserCode(
        setting="--original", spec=spec, of="a function that makes the original", arguments="nothing",
        error=EncoderError,
    )  # fmt: skip
    module = code.call(code.find(), {})
    if not isinstance(module, nn.Module):
        raise ConfigError(f"--original {spec} makes a {type(module).__qualname__}. {code.form}")
    load_checkpoint(module, old, key=key, prefix=prefix)
    return module.eval()


def _numbers(text: str, flag: str, count: int | None = None) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if (count is not None and len(found) != count) or (not found and text):
        raise ConfigError(
            f"{flag} {text}: expected {count or 'some'} whole numbers, as {'64,64' if count else '1,2'}"
        )
    return found


def _show(result: ConvertedEncoder, console: Console) -> None:
    console.print(
        escape(
            f"{result.out}: patch {result.patch}, {result.tokens} tokens of {result.dim} numbers; differs by "
            f"at most {result.max_difference:.2g} from the {result.checked_against}, latents up to "
            f"{result.max_latent:.3g}"
        ),
        soft_wrap=True,
    )
    console.print(escape("use it with: " + " ".join(result.settings)), soft_wrap=True)


# ----------------------------------------------------------------------------------------------------------
# `stoker compat vast_launch`, `fetch_datasets_b2`, `setup_vast_data`: earlier flags and variables.
#
# Each flag works, or is refused with what does the same now. Variables of object storage (B2_*) become
# remotes of rclone for the time of a command; their values are in no script, command or log.


LIST_S = 600.0
ENV_FILE = Path(".env")

EnvFile = Annotated[Path, typer.Option(readable=False, help="Variables that are not exported.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show it, and send nothing.")]


_REFUSED: Mapping[str, str] = {
    "--no-precompute": "the machine encodes only what is missing. launch.cache=REMOTE:PATH brings complete "
    "caches there first",
    "--use-lightning": "a launch trains with `stoker train`. With Lightning, train from a script of your own "
    "(docs/trainers.md) in `stoker launch script`",
    "--cache-version": "caches are named by what is in them. launch.cache=REMOTE:PATH pulls and pushes them",
    "--resume-from-wandb": "checkpoints come from launch.upload=REMOTE:PATH: the same launch again continues "
    "from the last upload",
    "--resume-mode": "a launch continues where launch.upload has checkpoints, else it begins. Another "
    "training.run_dir is another run",
}
"""Flags that nothing here could honor, and what does the same now."""
_VERBS_REFUSED: Mapping[str, str] = {
    "set-key": "a key on a command line is seen by others. Set VAST_API_KEY, or put the key into "
    f"{launching.KEY_FILES[0]}",
    "preprocess": "encoding has no machine of its own. `stoker precompute CONFIG` encodes here and `stoker "
    "push` brings the cache to a remote; with launch.cache=REMOTE:PATH a rented machine does both",
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
        raise ConfigError(f"{verb} is not taken: {why}")
    if verb not in VERBS:
        raise ConfigError(f"{verb!r} is nothing that vast_launch does. Expected {', '.join(VERBS[:4])}")


def _search(out: CommandOutput, overrides: list[str], limit: int) -> None:
    """Offers that fit, the cheapest first; no settings file is needed."""
    from stoker.config import load_config
    from stoker.extras.launch.plan import offers_query
    from stoker.extras.launch.vast import Offers

    found = launching.vast_client().offers(offers_query(load_config(None, overrides)))
    out.show(Offers(offers=tuple(found[:limit])), launching.render_offers)


def _show_variables(out: CommandOutput) -> None:
    """Which earlier variables are set here, and what becomes of each; no value is shown or stored."""
    from stoker.extras.compat.remotes import ALIASES, TRACKER, rclone_variables, variable

    environment = _environment(ENV_FILE)
    rows = [
        Variable(name=name, is_set=bool(variable(environment, name)), use=_USES[name]) for name in ALIASES
    ]
    rows += [
        Variable(name=name, is_set=bool(environment.get(name)), use="launch.secrets: the machine gets it")
        for name in TRACKER
    ]
    key = bool(os.environ.get("VAST_API_KEY"))
    rows.append(Variable(name="VAST_API_KEY", is_set=key, use="the provider; the machine never gets it"))
    made = tuple(sorted(rclone_variables(environment)))
    out.show(Variables(rows=tuple(rows), made=made), render_variables)


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
        from stoker.extras.compat.remotes import bucket_of, files_of_keys

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
        from stoker.extras.compat.remotes import bucket_of, files_of_tasks

        environment = _environment(env_file)
        if environment.get("CACHE_VERSION"):
            raise ConfigError(f"CACHE_VERSION is not taken: {_REFUSED['--cache-version']}, `stoker pull` one")
        if environment.get("CHECKSUM"):
            out.note("CHECKSUM has no effect: digests that the bucket keeps are always compared")
        with _remotes(environment):
            files = files_of_tasks(tasks.replace(",", " ").split(), bucket_of(environment), _listed, out.note)
            _fetch(out, files, root or _data_root(environment), dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An earlier variable, and what becomes of it."""

    name: str
    is_set: bool
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """All earlier variables of a launch."""

    rows: tuple[Variable, ...]
    made: tuple[str, ...]
    """Variables that describe the remotes to rclone."""

    def to_json(self) -> dict[str, JsonValue]:
        """The keys that scripts rely on."""
        rows: list[JsonValue] = [{"name": row.name, "set": row.is_set, "use": row.use} for row in self.rows]
        return {"variables": rows, "made": [*self.made]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What would be fetched."""

    folder: Path
    files: tuple[WantedFile, ...]

    def to_json(self) -> dict[str, JsonValue]:
        """The keys that scripts rely on."""
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


def render_variables(result: Variables, console: Console) -> None:
    """One line for each."""
    for row in result.rows:
        state = "set    " if row.is_set else "not set"
        console.print(f"{row.name:<16} {state}  {escape(row.use)}", soft_wrap=True)
    if result.made:
        console.print(f"rclone gets {', '.join(result.made)}", soft_wrap=True)


def render_files(result: Files, console: Console) -> None:
    """One line for each."""
    for one in result.files:
        size = "" if one.bytes is None else f"  {format_bytes(one.bytes)}"
        console.print(f"{escape(one.name)} from {escape(one.source)}{size}", soft_wrap=True)
    console.print(f"{len(result.files)} files to {escape(str(result.folder))}; nothing was fetched")


def _plan(out: CommandOutput, path: Path, overrides: list[str], auto_shutdown: bool | None) -> LaunchPlan:
    """What would run, with the earlier variables: remotes of rclone, and the tracker's as secrets."""
    from stoker.config import load_config
    from stoker.extras.compat.remotes import TRACKER, rclone_variables

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
    from stoker.run.stages import only_stage, stages_of

    if only_stage(config, stage) is not None and len(stages_of(config)) > 1:
        raise ConfigError(
            f"--stage {stage} is not taken: the machine runs `stoker train CONFIG`, which trains all of its "
            f"stages ({', '.join(one.name for one in stages_of(config))}). Take --stage all, or have only "
            "the first ones trained: --run-arg stages=[operator]"
        )


def _check_upload(plan: LaunchPlan, path: Path) -> None:
    if plan.config.launch.upload is None:
        raise ConfigError(
            f"{path}: launch.upload is not set, so nothing of an earlier machine is kept. Set it to "
            "REMOTE:PATH before the first launch; a machine that was stopped still has its disk"
        )


def _check_branch(branch: str) -> None:
    if branch == "auto":
        return
    from stoker.extras.launch.plan import is_checked_out

    if not is_checked_out(Path.cwd(), branch):
        raise ConfigError(
            f"--branch {branch} is not the commit that is checked out here, which is what the machine gets. "
            f"git checkout {branch}, then launch"
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
    """The environment, and what a `.env` file adds to it."""
    from stoker.extras.compat.remotes import read_env_file

    if not env_file.is_file():
        if env_file != ENV_FILE:
            raise ConfigError(f"{env_file} does not exist. Expected a file of NAME=VALUE lines")
        return dict(os.environ)
    return {**read_env_file(env_file), **os.environ}


@contextmanager
def _remotes(environment: Mapping[str, str]) -> Generator[None]:
    """Describe the earlier remotes to rclone, which reads the environment, for the time of a command."""
    from stoker.extras.compat.remotes import rclone_variables

    made = rclone_variables(environment)
    os.environ.update(made)
    try:
        yield
    finally:
        for name in made:
            os.environ.pop(name, None)


def _data_root(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("WORKDIR", ".")) / environment.get("DATA_ROOT", "data/pdebench")


def _listed(place: str) -> list[Listed]:
    from stoker.extras.fetch.origins import list_remote

    return list_remote(place, LIST_S)


def _fetch(out: CommandOutput, files: tuple[WantedFile, ...], folder: Path, dry_run: bool) -> None:
    from stoker.extras.fetch.run import FetchSettings, fetch_files
    from stoker.extras.launch.script import without_secrets

    if dry_run:
        out.show(Files(folder=folder, files=files), render_files)
        return
    with fetching.listening(out) as listen:
        report = fetch_files(files, folder, FetchSettings(redact=without_secrets), listen=listen)
    out.show(report, fetching.render)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


group.command(cls=EarlierFlags)(precompute)
group.command(name="precompute_latent_cache", cls=EarlierFlags, hidden=True)(precompute)
group.command()(train)
group.command()(validate)
group.command(name="validate_config", hidden=True)(validate)
group.command(name="vast_launch")(vast_launch)
group.command(name="fetch_datasets_b2")(fetch_datasets_b2)
group.command(name="setup_vast_data")(setup_vast_data)
group.command("convert-encoder")(convert_encoder)
