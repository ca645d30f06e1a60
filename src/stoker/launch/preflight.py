"""What has to be right before a machine is paid for: the code where it will look, the secrets here."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import ConfigError, StalledError

GIT_S = 30.0
_SSH = re.compile(r"^(?:ssh://)?git@([^:/]+)[:/](.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code that the machine will run."""

    repo: str
    commit: str
    folder: str
    """Of the repository, where the command was given."""
    config: str
    """The settings file, from there."""


def find_code(config: Path, repo: str | None, *, need_pushed: bool) -> Code:
    """The commit that is checked out, if it holds the configuration as it is here.

    Args:
        repo: In place of the remote `origin`.
        need_pushed: Whether the commit has to be known to be at a remote.

    Raises:
        ConfigError: No repository, a configuration that is not committed as it is, or a commit not pushed.
        StalledError: git does not answer.
    """
    if not config.is_file():
        raise ConfigError(f"{config} does not exist. Expected a YAML file with settings")
    where = Path.cwd()
    top = Path(_git(where, "rev-parse", "--show-toplevel").strip())
    place = config.resolve()
    if not place.is_relative_to(top):
        raise ConfigError(f"{config} is outside of the repository {top}, all that the machine gets. Move it")
    if not _git(where, "ls-files", "--", str(place)).strip():
        raise ConfigError(f"{config} is not committed. git add {config}, then commit and push")
    changed = _git(where, "status", "--porcelain", "--", str(place)).strip()
    if changed:
        raise ConfigError(f"{config} has changes that are not committed. Commit and push them")
    commit = _git(where, "rev-parse", "HEAD").strip()
    if need_pushed and not _git(where, "branch", "-r", "--contains", commit).strip():
        raise ConfigError(
            f"commit {commit[:12]} is not at any remote known here. Push it: the machine fetches it"
        )
    return Code(
        repo=_address(repo or _git(where, "remote", "get-url", "origin").strip()),
        commit=commit,
        folder=os.path.relpath(where.resolve(), top.resolve()),
        config=os.path.relpath(place, where.resolve()),
    )


def changed_files(where: Path) -> list[str]:
    """Files of the repository that differ from the commit; the machine will not have these changes."""
    lines = _git(where, "status", "--porcelain", "--untracked-files=no").splitlines()
    return [line[3:] for line in lines if line.strip()]


def is_checked_out(where: Path, branch: str) -> bool:
    """Return True if a branch, as git knows it here, is at the commit that is checked out.

    Raises:
        ConfigError: There is no such branch, or no repository.
        StalledError: git does not answer.
    """
    wanted = _git(where, "rev-parse", "--verify", "--end-of-options", f"{branch}^{{commit}}")
    return wanted == _git(where, "rev-parse", "HEAD")


def _address(url: str) -> str:
    """An address that a machine without our keys can use.

    >>> _address("git@github.com:me/project.git")
    'https://github.com/me/project.git'
    """
    if (found := _SSH.match(url)) is not None:
        return f"https://{found[1]}/{found[2]}"
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "the address of the repository carries a password. Take it out, and give the machine a token as "
            "GIT_TOKEN (launch.secrets)"
        )
    return url


def _git(where: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *words], capture_output=True, timeout=GIT_S, check=True, text=True
        )
    except FileNotFoundError:
        raise ConfigError("git is not installed. The machine gets the code by git: install it") from None
    except subprocess.TimeoutExpired:
        raise StalledError(f"git {words[0]} did not answer for {GIT_S:g} s in {where}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise ConfigError(
            f"git {words[0]} failed in {where}: {said[-1] if said else error.returncode}. A machine gets the "
            "code from a repository with a remote: make one, or name it as launch.repo"
        ) from None
    return done.stdout


def variables_for(
    names: Iterable[str], places: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the machine needs, with their values.

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
            "promises it to the machine. Set it, or take it out of launch.secrets"
        )
    found = {name: environment[name] for name in names}
    for remote in sorted({_remote(place) for place in places} - {""}):
        prefix = f"RCLONE_CONFIG_{remote.upper().replace('-', '_')}_"
        own = {name: value for name, value in environment.items() if name.startswith(prefix)}
        if f"{prefix}TYPE" not in own:
            raise ConfigError(
                f"the rclone remote {remote}: is not described by variables here ({prefix}TYPE and so on), "
                "which the machine gets. Set them; a file of rclone does not travel"
            )
        found |= own
    return found


def _remote(place: str) -> str:
    """The name of the rclone remote of an address; empty: it is none."""
    name, colon, rest = place.partition(":")
    return "" if not colon or "/" in name or rest.startswith("//") else name
