"""`stoker fetch`: what a configuration, or a manifest alone, wants to have here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.config import load_config
from stoker.config.models import Config
from stoker.errors import ConfigError
from stoker.extras.fetch.run import FetchReport, FetchSettings, Listener, fetch_files
from stoker.extras.fetch.wanted import WantedFile, WantedFolder, parse_wanted, read_manifest


def fetch(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    redact: Callable[[str], str] = str,
    listen: Listener = lambda _: None,
) -> FetchReport:
    """Bring the files of a configuration, or of a JSON manifest, here.

    Args:
        path: The settings file; what ends in `.json` is a manifest, and the settings are the defaults.
        folder: In place of `fetch.folder`; a manifest's files go below the folder it lies in.

    Raises:
        ConfigError: Nothing is wanted, or what is wanted is not well said.
        ResourceError: No room, or another process fetches into the folder.
    """
    if path.suffix == ".json":
        config = load_config(None, [*overrides, f"fetch.manifest={path}"])
        folder = folder or Path(config.fetch.folder or path.parent)
    else:
        config = load_config(path, overrides)
    return fetch_config(config, folder=folder, redact=redact, listen=listen)


def fetch_config(
    config: Config,
    *,
    folder: Path | None = None,
    redact: Callable[[str], str] = str,
    listen: Listener = lambda _: None,
) -> FetchReport:
    """As `fetch`, of settings that were read already."""
    wanted = wanted_files(config)
    if not wanted:
        raise ConfigError(
            f"{config.where}: neither fetch.files nor fetch.manifest names a file. Give one of them "
            "(docs/fetch.md)"
        )
    own = config.fetch
    settings = FetchSettings(
        at_once=own.at_once, tries=own.tries, deadline_s=own.deadline, stall_s=own.stall, redact=redact
    )
    where = folder or Path(own.folder or config.data.root)
    return fetch_files(wanted, where, settings, listen=listen)


def wanted_files(config: Config) -> tuple[WantedFile | WantedFolder, ...]:
    """All files and folders that the settings want, those of the manifest after their own.

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
