"""From a configuration and its repository to what a machine does, and to the request that rents one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from stoker.config import load_config
from stoker.config.models import Config
from stoker.config.names import schema_of, wrong_fields
from stoker.config.sections import LaunchConfig, as_names
from stoker.errors import ConfigError, StalledError, StokerError
from stoker.extras.fetch.origins import wanted_files
from stoker.extras.launch.script import API, StartScript, shown_in
from stoker.run.context import Run
from stoker.run.validate import CheckRow, failed
from stoker.runtime.processes.child import run_program
from stoker.schema import Json
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# Check what has to be right before a machine is paid for: the code where it will look, the secrets here.


GIT_S = 30.0
_SSH = re.compile(r"^(?:ssh://)?git@([^:/]+)[:/](.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCode:
    """The code that the machine will run."""

    repo: str
    commit: str
    folder: str
    """Of the repository, where the command was given."""
    config: str
    """The settings file, from there."""


def find_code(config: Path, repo: str | None, *, need_pushed: bool) -> LaunchCode:
    """Return the commit that is checked out, if it holds the configuration as it is here.

    Args:
        repo: In place of the remote `origin`.
        need_pushed: Whether the commit has to be known to be at a remote.

    Raises:
        ConfigError: No repository, a configuration that is not committed as it is, or a commit not pushed.
        StalledError: git does not answer.
    """
    if not config.is_file():
        raise ConfigError(f"{config} does not exist", hint="Expected a YAML file with settings")
    where = Path.cwd()
    top = Path(_git(where, "rev-parse", "--show-toplevel").strip())
    place = config.resolve()
    if not place.is_relative_to(top):
        raise ConfigError(
            f"{config} is outside of the repository {top}, all that the machine gets", hint="Move it"
        )
    if not _git(where, "ls-files", "--", str(place)).strip():
        raise ConfigError(f"{config} is not committed", hint=f"git add {config}, then commit and push")
    changed = _git(where, "status", "--porcelain", "--", str(place)).strip()
    if changed:
        raise ConfigError(f"{config} has changes that are not committed", hint="Commit and push them")
    commit = _git(where, "rev-parse", "HEAD").strip()
    if need_pushed and not _git(where, "branch", "-r", "--contains", commit).strip():
        raise ConfigError(
            f"commit {commit[:12]} is not at any remote known here", hint="Push it: the machine fetches it"
        )
    return LaunchCode(
        repo=_address(repo or _git(where, "remote", "get-url", "origin").strip()),
        commit=commit,
        folder=os.path.relpath(where.resolve(), top.resolve()),
        config=os.path.relpath(place, where.resolve()),
    )


def changed_files(where: Path, command: str | None = None) -> list[str]:
    """Return files that differ from the commit; the machine will not have these changes.

    Args:
        where: A folder of the repository.
        command: Files that it names and that git neither knows nor ignores are among them.
    """
    lines = _git(where, "status", "--porcelain", "--untracked-files=no").splitlines()
    words = [
        word for word in re.split(r"[\s;&|<>()'\"]+", command or "") if not word.startswith(("/", "..", "-"))
    ]
    named = [word for word in words if word and _is_file(where / word)]
    unknown = _git(where, "ls-files", "--others", "--exclude-standard", "--", *named) if named else ""
    return [line[3:] for line in lines if line.strip()] + unknown.splitlines()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def is_checked_out(where: Path, branch: str) -> bool:
    """Return True if a branch, as git knows it here, is at the commit that is checked out.

    Raises:
        ConfigError: The branch or the repository does not exist.
        StalledError: git does not answer.
    """
    wanted = _git(where, "rev-parse", "--verify", "--end-of-options", f"{branch}^{{commit}}")
    return wanted == _git(where, "rev-parse", "HEAD")


def _address(url: str) -> str:
    """Return an address that a machine without our keys can use.

    >>> _address("git@github.com:me/project.git")
    'https://github.com/me/project.git'
    """
    if (found := _SSH.match(url)) is not None:
        return f"https://{found[1]}/{found[2]}"
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "the address of the repository carries a password",
            hint="Take it out, and give the machine a token as GIT_TOKEN (launch.secrets)",
        )
    return url


def _git(where: Path, *words: str) -> str:
    try:
        result = run_program(["git", "-C", where, *words], timeout_s=GIT_S)
    except FileNotFoundError:
        raise ConfigError(
            "git is not installed", hint="The machine gets the code by git: install it"
        ) from None
    except StalledError:
        raise StalledError(f"git {words[0]} did not answer for {GIT_S:g} s in {where}") from None
    if result.code:
        raise ConfigError(
            f"git {words[0]} failed in {where}: {result.last_error_line}",
            hint="A machine gets the code from a repository with a remote: make one, or name it as "
            "launch.repo",
        )
    return result.output.decode(errors="replace")


def variables_for(
    names: Iterable[str], places: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the machine needs, with their values.

    Args:
        names: Those that the settings name.
        places: Addresses that it reads and writes; a remote of rclone brings its variables.

    Raises:
        ConfigError: One is not set here, or a remote is not configured by variables.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set here, and launch.secrets "
            "promises it to the machine",
            hint="Set it, or take it out of launch.secrets",
        )
    found = {name: environment[name] for name in names}
    for remote in sorted({_remote(place) for place in places} - {""}):
        prefix = f"RCLONE_CONFIG_{remote.upper().replace('-', '_')}_"
        own = {name: value for name, value in environment.items() if name.startswith(prefix)}
        if f"{prefix}TYPE" not in own:
            raise ConfigError(
                f"the rclone remote {remote}: is not described by variables here ({prefix}TYPE and so on), "
                "which the machine gets",
                hint="Set them; a file of rclone does not travel",
            )
        found |= own
    return found


def _remote(place: str) -> str:
    """Return the name of the rclone remote of a place; empty: it is not a remote."""
    name, colon, rest = place.partition(":")
    return "" if not colon or "/" in name or rest.startswith("//") else name


Target: TypeAlias = Literal["vast", "box", "slurm"]
HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """All that is needed to start a run elsewhere."""

    name: str
    target: Target
    config: Config
    code: LaunchCode
    onstart: str
    """The script."""
    variables: Mapping[str, str]
    """Variables for the machine's environment; secrets, so only their names are shown."""

    @property
    def label(self) -> str:
        """The name under which the provider's lists show machines of this run."""
        return f"stoker:{self.name}"

    def request(self, *, shown: bool) -> dict[str, Json]:
        """Return the body of the call that rents a machine.

        Args:
            shown: For people to see: values of variables are left out.
        """
        own = self.config.launch
        return {
            "client_id": "me",
            "image": own.image,
            "disk": own.disk,
            "label": self.label,
            "runtype": "ssh",
            "target_state": "running",
            "env": {name: HIDDEN if shown else value for name, value in self.variables.items()},
            "onstart": self.onstart,
        }

    def query(self) -> dict[str, Any]:
        """Return the filters of the search for offers."""
        return offers_query(self.config)


def offers_query(config: Config) -> dict[str, Any]:
    """Return the filters of the search for offers, as `launch` of a configuration has them."""
    own = config.launch
    query: dict[str, Any] = {
        "verified": {"eq": True},
        "num_gpus": {"eq": own.gpus},
        "disk_space": {"gte": own.disk},
        "reliability2": {"gte": own.reliability},
        "type": "on-demand",
        "allocated_storage": own.disk,
    }
    if own.gpu is not None:
        query["gpu_name"] = {"eq": own.gpu.replace("_", " ")}
    if own.gpu_memory:
        query["gpu_ram"] = {"gte": own.gpu_memory * 1024}
    if own.max_price is not None:
        query["dph_total"] = {"lte": own.max_price}
    if own.region is not None:
        query["geolocation"] = {"in": [own.region]}
    return query


def plan_launch(
    path: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    target: Target,
    auto_shutdown: bool | None = None,
    api: str = API,
) -> LaunchPlan:
    """Return the plan of a run on another machine, after checking everything that can be checked here.

    Raises:
        ConfigError: The configuration, the repository, a secret or the script is not as it should be.
    """
    config = load_config(path, overrides)
    own = config.launch
    code = find_code(path, own.repo, need_pushed=own.repo is None)
    files = wanted_files(config)
    sources = [file.source for file in files]
    places = [*sources, *(place for place in (own.cache, own.upload) if place is not None)]
    variables = variables_for(own.secrets, places, environment) if target == "vast" else {}
    _check_pins(as_names(own.install), own.constraints)
    name = _name(config, path)
    shared = {one: getattr(own, one) for one in LaunchConfig.model_fields if one in StartScript.model_fields}
    shared |= {"repo": code.repo, "install": as_names(own.install), "secrets": tuple(variables)}
    if auto_shutdown is not None:
        shared["auto_shutdown"] = auto_shutdown
    try:
        script = StartScript(
            target=target,
            name=name,
            commit=code.commit,
            folder=code.folder,
            config=code.config,
            overrides=tuple(overrides),
            fetch=bool(files),
            cache_dir=config.training.latent_cache_dir,
            run_dir=str(Run(config).run_dir),
            api=api,
            **shared,
        )
    except ValidationError as error:
        wrong = wrong_fields(error.errors(), schema_of(StartScript))
        start = f"{path}: no script can be written with "
        problems = [one.within(f"{start}{_setting(name)}: ") for name, one in wrong]
        raise ConfigError.of_all(problems) from None
    onstart = script.render()
    if told := shown_in(onstart, environment, own.secrets):
        raise ConfigError(
            f"{path}: the start-up script would show the value of {', '.join(told)}",
            hint="Take it out of settings and addresses: the machine gets variables that launch.secrets "
            "names",
        )
    return LaunchPlan(
        name=name, target=target, config=config, code=code, onstart=onstart, variables=variables
    )


def _setting(field: str) -> str:
    """Return the setting that a field of the script was made of; else the field's own name.

    >>> _setting("workdir"), _setting("cache_dir"), _setting("commit")
    ('launch.workdir', 'training.latent_cache_dir', 'commit')
    """
    first = field.partition(".")[0]
    own = {"cache_dir": "training.latent_cache_dir", "run_dir": "training.run_dir"}.get(first)
    return own or (f"launch.{field}" if first in LaunchConfig.model_fields else field)


def label_of(config: Config, path: Path) -> str:
    """Return how the provider's lists name machines of a run."""
    return f"stoker:{_name(config, path)}"


def _check_pins(install: Sequence[str], constraints: str | None) -> None:
    """Refuse what another day would install in another version."""
    loose = [one for one in install if not re.search(r"==|@", one) and "/" not in one and one != "."]
    if loose and constraints is None:
        raise ConfigError(
            f"launch.install: {', '.join(loose)} names no version",
            hint="Give one (name==1.2.3), or a file of pins as launch.constraints",
        )


def _name(config: Config, path: Path) -> str:
    """Return a name of the run in letters that every place takes."""
    base = Path(config.training.run_dir).name if config.training.run_dir else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:60] or "run"


# ----------------------------------------------------------------------------------------------------------
# What `stoker validate` says of a configuration that is to run elsewhere: image, code, secrets, script.


IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:\.[a-z0-9-]+)*(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
"""Image names that a Docker registry takes: host and path in small letters, a tag, a digest."""


def launch_rows(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> list[CheckRow]:
    """Return a row for each thing that has to be right before a machine is paid for.

    Nothing where no setting of `launch` was given, or where the settings cannot be read (which another row
    says).

    Args:
        path, overrides: The settings.
        environment: Where secrets are.
    """
    try:
        config = load_config(path, overrides)
    except ConfigError:
        return []
    if not config.launch.model_fields_set:
        return []
    rows = [_image(config), _code(config, path), _secrets(config, environment)]
    if all(row.status != "fail" for row in rows[1:]):
        rows.append(_script(path, overrides, environment))
    return rows


def _image(config: Config) -> CheckRow:
    check, image = "launch image", config.launch.image
    found = IMAGE.fullmatch(image)
    if found is None:
        error = ConfigError(
            f"launch.image is {image!r}, which is not the name of an image",
            hint="Expected name:tag, as pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel",
        )
        return failed(check, error)
    if found["digest"] is None and found["tag"] in (None, "latest"):
        detail = f"{image} may be another image tomorrow. Name a tag other than latest, or a digest"
        return CheckRow(check=check, status="warn", detail=detail)
    return CheckRow(check=check, status="pass", detail=image)


def _code(config: Config, path: Path) -> CheckRow:
    check = "launch code"
    try:
        code = find_code(path, config.launch.repo, need_pushed=config.launch.repo is None)
        changed = changed_files(Path.cwd(), config.launch.command)
    except StokerError as error:
        return failed(check, error, ConfigError.exit_code)
    where = f"commit {code.commit[:12]} of {code.repo}"
    if changed:
        count = format_count(len(changed), "file")
        detail = f"{where}, which the machine runs. It lacks changes here of {count}, as {changed[0]}"
        return CheckRow(check=check, status="warn", detail=detail)
    return CheckRow(check=check, status="pass", detail=where)


def _secrets(config: Config, environment: Mapping[str, str]) -> CheckRow:
    """Return the row about secrets; it shows names, never values."""
    check, own = "launch secrets", config.launch
    try:
        places = [*(file.source for file in wanted_files(config)), *filter(None, (own.cache, own.upload))]
        found = variables_for(own.secrets, places, environment)
    except StokerError as error:
        return failed(check, error, ConfigError.exit_code)
    return CheckRow(check=check, status="pass", detail=", ".join(sorted(found)) or "none asked for")


def _script(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> CheckRow:
    try:
        plan = plan_launch(path, overrides, environment, target="vast")
    except StokerError as error:
        return failed("launch script", error, ConfigError.exit_code)
    return CheckRow(check="launch script", status="pass", detail=f"{len(plan.onstart):,} characters")
