"""What `stoker validate` says of a configuration that is to run elsewhere: image, code, secrets, script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.config import load_config
from stoker.config.models import Config
from stoker.errors import ConfigError, StokerError
from stoker.launch.plan import plan_launch
from stoker.launch.preflight import changed_files, find_code, variables_for
from stoker.pipeline.checks import Row, failed
from stoker.pipeline.fetch import wanted_files

IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:\.[a-z0-9-]+)*(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
"""What a Docker registry takes: host and path in small letters, a tag, a digest."""


def launch_rows(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
    """A row for each thing that has to be right before a machine is paid for.

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


def _image(config: Config) -> Row:
    check, image = "launch image", config.launch.image
    found = IMAGE.fullmatch(image)
    if found is None:
        error = ConfigError(
            f"launch.image is {image!r}, which no registry takes. Expected name:tag, as "
            "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel"
        )
        return failed(check, error)
    if found["digest"] is None and found["tag"] in (None, "latest"):
        detail = f"{image} may be another image tomorrow. Name a tag other than latest, or a digest"
        return Row(check=check, status="warn", detail=detail)
    return Row(check=check, status="pass", detail=image)


def _code(config: Config, path: Path) -> Row:
    check = "launch code"
    try:
        code = find_code(path, config.launch.repo, need_pushed=config.launch.repo is None)
        changed = changed_files(Path.cwd())
    except StokerError as error:
        return failed(check, error, ConfigError.exit_code)
    where = f"commit {code.commit[:12]} of {code.repo}"
    if changed:
        detail = f"{where}, which the machine runs; {len(changed)} files differ here, as {changed[0]}"
        return Row(check=check, status="warn", detail=detail)
    return Row(check=check, status="pass", detail=where)


def _secrets(config: Config, environment: Mapping[str, str]) -> Row:
    """Names alone: no value is ever shown."""
    check, own = "launch secrets", config.launch
    try:
        places = [*(file.source for file in wanted_files(config)), *filter(None, (own.cache, own.upload))]
        found = variables_for(own.secrets, places, environment)
    except StokerError as error:
        return failed(check, error, ConfigError.exit_code)
    return Row(check=check, status="pass", detail=", ".join(sorted(found)) or "none asked for")


def _script(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> Row:
    try:
        plan = plan_launch(path, overrides, environment, target="vast")
    except StokerError as error:
        return failed("launch script", error, ConfigError.exit_code)
    return Row(check="launch script", status="pass", detail=f"{len(plan.onstart):,} characters")
