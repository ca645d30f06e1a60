"""From a configuration and its repository to what a machine does, and to the request that rents one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from stoker.config import load_config
from stoker.config.launching import LaunchConfig
from stoker.config.models import Config
from stoker.config.section import as_names
from stoker.config.wrong_fields import schema_of, wrong_fields
from stoker.errors import ConfigError
from stoker.launch.preflight import Code, find_code, variables_for
from stoker.launch.script import API, StartScript
from stoker.launch.secrets import shown_in
from stoker.pipeline.diary import run_dir_of
from stoker.pipeline.fetch import wanted_files
from stoker.schema import Json

Target: TypeAlias = Literal["vast", "box", "slurm"]
HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that is needed to start a run elsewhere."""

    name: str
    target: Target
    config: Config
    code: Code
    onstart: str
    """The script."""
    variables: Mapping[str, str]
    """What the machine's environment gets; secrets, so shown by name alone."""

    @property
    def label(self) -> str:
        """How the provider's lists name machines of this run."""
        return _label(self.name)

    def request(self, *, shown: bool) -> dict[str, Json]:
        """The body of the call that rents a machine.

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
        """The filters of the search for offers."""
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
) -> Launch:
    """What a run elsewhere would be, after all that can be checked here was.

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
    try:
        script = StartScript(
            target=target,
            name=name,
            repo=code.repo,
            commit=code.commit,
            folder=code.folder,
            config=code.config,
            overrides=tuple(overrides),
            install=as_names(own.install),
            constraints=own.constraints,
            secrets=tuple(variables),
            workdir=own.workdir,
            gpus=own.gpus,
            fetch=bool(files),
            cache_dir=config.training.latent_cache_dir,
            run_dir=str(run_dir_of(config)),
            cache=own.cache,
            upload=own.upload,
            upload_minutes=own.upload_minutes,
            auto_shutdown=own.auto_shutdown if auto_shutdown is None else auto_shutdown,
            stall_minutes=own.stall_minutes,
            grace=own.grace,
            scratch=own.scratch,
            api=api,
        )
    except ValidationError as error:
        wrong = wrong_fields(error.errors(), schema_of(StartScript))
        lines = [f"{_setting(name)}: {fact}" for name, fact in wrong]
        raise ConfigError(f"{path}: no script can be written with " + "; ".join(lines)) from None
    onstart = script.render()
    if told := shown_in(onstart, environment, own.secrets):
        raise ConfigError(
            f"{path}: the start-up script would show the value of {', '.join(told)}. Take it out of settings "
            "and addresses: the machine gets variables that launch.secrets names"
        )
    return Launch(name=name, target=target, config=config, code=code, onstart=onstart, variables=variables)


def _setting(field: str) -> str:
    """Return the setting that a field of the script was made of; the field's own name where there is none.

    >>> _setting("workdir"), _setting("cache_dir"), _setting("commit")
    ('launch.workdir', 'training.latent_cache_dir', 'commit')
    """
    first = field.partition(".")[0]
    own = {"cache_dir": "training.latent_cache_dir", "run_dir": "training.run_dir"}.get(first)
    return own or (f"launch.{field}" if first in LaunchConfig.model_fields else field)


def label_of(config: Config, path: Path) -> str:
    """How the provider's lists name machines of a run."""
    return _label(_name(config, path))


def _label(name: str) -> str:
    return f"stoker:{name}"


def _check_pins(install: Sequence[str], constraints: str | None) -> None:
    """Refuse what another day would install in another version."""
    loose = [one for one in install if not re.search(r"==|@", one) and "/" not in one and one != "."]
    if loose and constraints is None:
        raise ConfigError(
            f"launch.install: {', '.join(loose)} names no version. Give one (name==1.2.3), or a file of pins "
            "as launch.constraints"
        )


def _name(config: Config, path: Path) -> str:
    """A name of the run in letters that every place takes."""
    base = Path(config.training.run_dir).name if config.training.run_dir else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:60] or "run"
