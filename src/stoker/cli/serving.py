"""The commands of the training service: start it, and speak to one."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, Yes, cli_command, duration, size, spread_flags
from stoker.cli.output import bold, table
from stoker.errors import ConfigError, DegradedError, StalledError, StokerError
from stoker.plugins import load_extension
from stoker.runtime.threads import RetryPolicy, retry
from stoker.units import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from stoker.service.client import Client, JobRow
    from stoker.service.executor import RayTarget
    from stoker.service.server import ServiceInfo

STATE_DIR = Path(".stoker/service")
NEEDED = ("fastapi", "uvicorn", "jinja2", "sqlalchemy")
"""Packages of the extra `service`."""
DATABASE, SERVER, TOKEN = "STOKER_DATABASE", "STOKER_SERVER", "STOKER_TOKEN"
STATE, TOKEN_FILE = "STOKER_STATE_DIR", "STOKER_TOKEN_FILE"
"""Variables of the environment: a command line can be read by everybody on a machine."""
TEXTS = frozenset({"kind", "name", "path", "connection", "url", "set", "table"})
"""Settings of a data set that are text whatever they look like."""
TRIES = 4
"""How often a request with a key is sent when the service does not answer; the key makes it one request."""
Dir = Annotated[
    Path | None,
    # Not typer's own kind of path, which looks at it: its storage may not answer.
    typer.Option(
        parser=Path, metavar="PATH", help=f"The service's state folder; default: ${STATE}, else {STATE_DIR}."
    ),
]


@cli_command
def serve(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    state_dir: Dir = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; others may then try to log in.")
    ] = "127.0.0.1",
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help=f"postgresql://... ; default: ${DATABASE}, else SQLite in the state folder."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Jobs at a time; default: one for each GPU, or one.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(parser=Path, metavar="PATH", help="A folder whose data jobs may read; may be repeated."),
    ] = None,
    database_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="A PostgreSQL server that data sets may name (local: the default socket); may be repeated.",
        ),
    ] = None,
    connection: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A PostgreSQL database that data sets may name; the file (mode 600) has its URL with the "
            "password. May be repeated.",
        ),
    ] = None,
    allow_encoder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS", help="An encoder that jobs may name (encoder.target); may be repeated."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name by which browsers call it.")
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where browsers find it behind a TLS proxy: https://NAME."),
    ] = None,
    webhook: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="POST each change of a job's state to it; may be repeated."),
    ] = None,
    webhook_secret_file: Annotated[
        Path | None,
        typer.Option(parser=Path, metavar="PATH", help="A file with a secret that signs these requests."),
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|ray", help="Where jobs run: here, or on a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(metavar="URL", help="Its dashboard, as http://HOST:8265.")
    ] = None,
    ray_gpus: Annotated[float, typer.Option(min=0, help="GPUs of a job on the Ray cluster.")] = 0.0,
    job_memory: Annotated[
        int | None,
        typer.Option(parser=size, metavar="16GiB", help="What a job's processes may hold; more fails it."),
    ] = None,
    job_time: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="12h", help="How long an attempt at a job may take."),
    ] = None,
) -> None:
    """Start the training service.

    Jobs over HTTP, live events and pages, behind a token. Ctrl-C or SIGTERM stops running jobs at a
    checkpoint; the next start continues them.

    \b
    Example:
      stoker serve --root data/pdebench
      stoker serve --port 9000 --state-dir /srv/stoker --workers 2 --job-memory 16GiB --job-time 12h
      stoker serve --connection lab=/srv/stoker/lab.url
      stoker serve --executor ray --ray-address http://10.0.0.1:8265 --state-dir /shared/stoker
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"stoker serve needs {', '.join(missing)}, which is not installed",
            hint="Install it: pip install 'stoker[service]'",
        )
    from stoker.plan.resources import require_writable
    from stoker.service.server import ServeSettings
    from stoker.service.server import serve as run

    cluster = _cluster(executor, ray_address, ray_gpus)
    folder = _state_dir(state_dir)
    require_writable(folder, "--state-dir")
    settings = ServeSettings(
        state_dir=folder.absolute() if cluster else folder,
        host=host,
        port=port,
        database=database or os.environ.get(DATABASE),
        workers=workers,
        roots=tuple(root or ()),
        database_hosts=tuple(database_host or ()),
        connections=tuple(connection or ()),
        encoders=tuple(allow_encoder or ()),
        hosts=tuple(allow_host or ()),
        public_url=public_url,
        webhooks=tuple(webhook or ()),
        webhook_secret_file=webhook_secret_file,
        ray=cluster,
        job_memory_bytes=job_memory,
        job_s=job_time,
    )
    for name in (DATABASE, TOKEN):  # not for workers and jobs
        os.environ.pop(name, None)
    run(settings, os.environ, lambda started: out.show(started, render_started))
    out.note("the service has ended; jobs that ran continue at its next start")


def _cluster(executor: str, address: str | None, gpus: float) -> RayTarget | None:
    """Return the cluster that runs jobs; None: this machine does."""
    if executor not in ("local", "ray") or (executor == "ray") != (address is not None):
        raise ConfigError(
            f"--executor {executor} is given {f'with --ray-address {address}' if address else 'alone'}",
            hint="Give --executor ray with --ray-address http://HOST:8265, or neither",
        )
    if address is None:
        return None
    from stoker.service.executor import RayTarget

    load_extension("service.ray").check_cluster(address, os.environ)
    return RayTarget(address=address, python=sys.executable, gpus=gpus)


def render_started(started: ServiceInfo, console: Console) -> None:
    """Print the address of the service and how to log in."""
    workers = f"{started.workers} worker{'' if started.workers == 1 else 's'}"
    lines = [
        f"{started.address} · {workers} · {started.database}",
        f"log in, once, within ten minutes: {started.login}",
        f"token: {started.token_file}",
    ]
    if not started.local:
        lines.append(
            "it listens to other machines, and what they send is not encrypted: put a TLS proxy before it"
        )
    for line in lines:
        console.print(escape(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """Flags of every command that speaks to a service."""

    server: Annotated[
        str | None, typer.Option(metavar="URL", help=f"The service; default: ${SERVER}, else its folder's.")
    ] = None
    state_dir: Dir = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            parser=Path,
            metavar="PATH",
            help=f"With its token; default: ${TOKEN}, ${TOKEN_FILE}, else that of the folder.",
        ),
    ] = None

    def client(self) -> Client:
        """Return a client of the service."""
        from stoker.service.client import Client, read_address, read_token

        folder = _state_dir(self.state_dir)
        # A folder on the command line is one service: its address and token go together.
        known = {} if self.state_dir else os.environ
        address = self.server or known.get(SERVER) or read_address(folder)
        token = known.get(TOKEN) if self.token_file is None else None
        path = self.token_file or Path(known.get(TOKEN_FILE) or folder / "token")
        return Client(address, token or read_token(path))


def _state_dir(given: Path | None) -> Path:
    return given or Path(os.environ.get(STATE) or STATE_DIR)


DatasetWords = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE", help="kind=, name= and what the kind takes.")
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job: id, start of one, or name.")]


@cli_command
@spread_flags
def job_submit(
    out: CommandOutput,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY=VALUE]",
            help="JSON or YAML with its settings (-: standard input), and what wins.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    key: Annotated[str | None, typer.Option(help="The same key again is the same job.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show its log until it ends.")] = False,
    *,
    flags: ServiceFlags,
) -> None:
    """Submit a job.

    \b
    Example:
      stoker job submit dataset_ids=[burgers] --name night-run
      stoker job submit job.yaml batch_size=256 epochs=50 model.width=32 --follow
    """
    client = flags.client()
    made = _submit(client, list(words or []), name, key)
    out.show(made, _render_jobs)
    if follow:
        _follow(out, client, made["id"])


@cli_command
@spread_flags
def job_list(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    search: Annotated[
        str, typer.Option(metavar="TEXT", help="In the name, a tag, a data set or why a job failed.")
    ] = "",
    status: Annotated[
        list[str] | None, typer.Option(help="Only jobs that are this, as running; may be repeated.")
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="training|generation", help="Only such jobs.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only jobs with this data set, by name or id.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only jobs with this tag; may be repeated.")] = None,
    sort: Annotated[
        str, typer.Option(help="created, name, state, loss or duration; with -, the largest first.")
    ] = "-created",
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most so many.")] = 50,
    *,
    flags: ServiceFlags,
) -> None:
    """List jobs, the newest first.

    \b
    Example:
      stoker job list --status running --status queued
      stoker job list --search burgers --tag baseline --sort loss
    """
    client = flags.client()
    found = client.jobs(
        search=search, status=status or (), kind=kind, dataset=dataset, tag=tag or (), sort=sort, limit=limit
    )
    out.show(found, _render_jobs)


@cli_command
@spread_flags
def job_show(
    out: CommandOutput,
    id: JobId,
    *,
    flags: ServiceFlags,
) -> None:
    """Show a job and its last epochs.

    \b
    Example:
      stoker job show 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    client = flags.client()
    out.show(client.job(_find(client, id)), _render_job)


@cli_command
@spread_flags
def job_logs(
    out: CommandOutput,
    id: JobId,
    lines: Annotated[int, typer.Option(min=1, max=5000, help="How many, from the end.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
    *,
    flags: ServiceFlags,
) -> None:
    """Show the log of a job.

    \b
    Example:
      stoker job logs 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b --follow
    """
    client = flags.client()
    id = _find(client, id)
    out.show(client.log(id, tail=lines), _render_log)
    if follow:
        _follow(out, client, id)


@cli_command
@spread_flags
def job_cancel(
    out: CommandOutput,
    id: JobId,
    *,
    flags: ServiceFlags,
) -> None:
    """Cancel a job; what it has trained stays.

    \b
    Example:
      stoker job cancel 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    client = flags.client()
    out.show(client.act(_find(client, id), "cancel"), _render_jobs)


@cli_command
@spread_flags
def job_pause(
    out: CommandOutput,
    id: JobId,
    *,
    flags: ServiceFlags,
) -> None:
    """Pause a job at its next checkpoint.

    \b
    Example:
      stoker job pause 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    client = flags.client()
    out.show(client.act(_find(client, id), "pause"), _render_jobs)


@cli_command
@spread_flags
def job_resume(
    out: CommandOutput,
    id: JobId,
    *,
    flags: ServiceFlags,
) -> None:
    """Resume a job from its newest checkpoint.

    One that is paused, cancelled or failed.

    \b
    Example:
      stoker job resume 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    client = flags.client()
    out.show(client.act(_find(client, id), "resume"), _render_jobs)


@cli_command
@spread_flags
def job_continue(
    out: CommandOutput,
    id: JobId,
    epochs: Annotated[int, typer.Option(min=1, help="How many more.")],
    *,
    flags: ServiceFlags,
) -> None:
    """Train a completed job for more epochs.

    \b
    Example:
      stoker job continue 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b --epochs 10
    """
    client = flags.client()
    found = _find(client, id)
    out.show(_ask_once(lambda key: client.more(found, epochs, key=key)), _render_jobs)


@cli_command
@spread_flags
def job_clone(
    out: CommandOutput,
    id: JobId,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]", help="Settings that differ.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, max=5000, help="As epochs=.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name; default: that of the job.")] = None,
    *,
    flags: ServiceFlags,
) -> None:
    """Submit a job with the settings of another.

    It starts from the beginning.

    \b
    Example:
      stoker job clone 0b7a6c1e --epochs 20
      stoker job clone night-run learning_rate=0.01 --name "higher rate"
    """
    client = flags.client()
    body = _body_of(client.job(_find(client, id))["job"])
    given = _read_pairs(words or []) | ({} if epochs is None else {"epochs": epochs})
    body["config"] = _with_given(body["config"], given)
    if name is not None:
        body["job_name"] = name
    out.show(_ask_once(lambda key: client.submit(body, key=key)), _render_jobs)


@cli_command
@spread_flags
def job_tag(
    out: CommandOutput,
    id: JobId,
    add: Annotated[list[str] | None, typer.Argument(metavar="[TAG]", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A tag to remove; may be repeated.")] = None,
    *,
    flags: ServiceFlags,
) -> None:
    """Add tags to a job, and remove tags.

    \b
    Example:
      stoker job tag 0b7a6c1e baseline --remove draft
    """
    client = flags.client()
    changed = client.change(_find(client, id), add_tags=add or [], remove_tags=remove or [])
    out.show(changed, _render_jobs)


@cli_command
@spread_flags
def job_files(
    out: CommandOutput,
    id: JobId,
    *,
    flags: ServiceFlags,
) -> None:
    """List the files of a job.

    \b
    Example:
      stoker job files 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    client = flags.client()
    out.show({"files": client.files(_find(client, id))}, _render_files)


@cli_command
@spread_flags
def job_download(
    out: CommandOutput,
    id: JobId,
    name: Annotated[
        str, typer.Argument(metavar="FILE", help="As `stoker job files` names it, or metrics.csv.")
    ] = "model.safetensors",
    to: Annotated[
        Path | None, typer.Option(parser=Path, metavar="PATH", help="A file; default: its name, here.")
    ] = None,
    *,
    flags: ServiceFlags,
) -> None:
    """Download a file of a job.

    \b
    Example:
      stoker job download 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
      stoker job download 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b metrics.csv --to night.csv
    """
    path = to or Path(name.rpartition("/")[2])
    if path.is_dir():
        path /= name.rpartition("/")[2]
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written: {path.parent} is not a folder", hint="Make it, or give another --to"
        )
    client = flags.client()
    size_bytes = client.download(_find(client, id), name, path)
    out.show({"path": str(path), "bytes": size_bytes}, _render_values)


@cli_command
@spread_flags
def job_delete(
    out: CommandOutput,
    id: JobId,
    yes: Yes = False,
    *,
    flags: ServiceFlags,
) -> None:
    """Delete a job that has ended, with its checkpoints.

    \b
    Example:
      stoker job delete 0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b --yes
    """
    client = flags.client()
    id = _find(client, id)
    found = client.job(id)["job"]
    if not yes:
        out.confirm(f"Delete job {found['job_name']} ({id}) and its checkpoints?")
    client.delete(id)
    out.show({"deleted": id}, _render_values)


@cli_command
@spread_flags
def job_datasets(
    out: CommandOutput,
    *,
    flags: ServiceFlags,
) -> None:
    """List the data sets that jobs may name.

    \b
    Example:
      stoker job datasets
    """
    out.show(flags.client().datasets(limit=500), _render_datasets)


@cli_command
@spread_flags
def job_register(
    out: CommandOutput,
    words: DatasetWords,
    *,
    flags: ServiceFlags,
) -> None:
    """Register data that exists for jobs.

    Simulations (kind=hdf5), images in a folder for each class (kind=images), or radio rows of a database
    (kind=radio).

    \b
    Example:
      stoker job register kind=hdf5 name=waves path=waves/train.h5
      stoker job register kind=images name=cells path=cells
      stoker job register kind=radio name=lab connection=lab set=0b7a6c1e-3f2d-4a58-9c44-5d6e7f809a1b
    """
    made = flags.client().register(_settings(words))
    out.show(made, _render_datasets)


@cli_command
@spread_flags
def job_generate(
    out: CommandOutput,
    words: DatasetWords,
    *,
    flags: ServiceFlags,
) -> None:
    """Generate data for jobs: radio rows or simulations.

    \b
    Example:
      stoker job generate kind=radio name=radio rows=4030
      stoker job generate kind=hdf5 name=burgers trajectories=64
    """
    made = flags.client().generate(_settings(words))
    out.show(made, lambda found, console: _render_datasets(found["dataset"], console))


@cli_command
@spread_flags
def job_check(
    out: CommandOutput,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set, by name or id.")],
    all: Annotated[
        bool, typer.Option("--all", help="Read every sample; else some, spread over all.")
    ] = False,
    *,
    flags: ServiceFlags,
) -> None:
    """Check the samples of a data set.

    Says which cannot be read, and which values are not finite.

    \b
    Example:
      stoker job check waves
      stoker job check waves --all
    """
    out.show(flags.client().dataset(name, check="all" if all else "some"), _render_report)


@cli_command
@spread_flags
def job_forget(
    out: CommandOutput,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set, by name or id.")],
    yes: Yes = False,
    *,
    flags: ServiceFlags,
) -> None:
    """Remove a data set from the list.

    Registered files and rows stay, and caches. Data that the service generated is deleted.

    \b
    Example:
      stoker job forget waves --yes
    """
    client = flags.client()
    found = client.dataset(name)
    if not yes:
        if found["origin"] == "generated":
            out.confirm(
                f"Delete data set {found['name']} ({found['id']}) with its data, which was generated?"
            )
        else:
            out.confirm(f"Remove data set {found['name']} ({found['id']}) from the list?")
    client.forget(found["id"])
    out.show({"forgotten": found["id"]}, _render_values)


@cli_command
@spread_flags
def job_login(
    out: CommandOutput,
    *,
    flags: ServiceFlags,
) -> None:
    """Print a link that logs a browser in, once.

    \b
    Example:
      stoker job login
    """
    client = flags.client()
    out.show({"login": client.address + client.login_path()}, _render_values)


def _find(client: Client, text: str) -> str:
    from stoker.service.client import find_job

    return find_job(client, text)


def _submit(client: Client, words: list[str], name: str | None, key: str | None) -> JobRow:
    """Make the job."""
    body = _body(words)
    if name is not None:
        body["job_name"] = name
    return _ask_once(lambda once: client.submit(body, key=once), key)


def _body_of(job: JobRow) -> dict[str, Any]:
    """Return the body of a request for a job of the same name, settings and tags."""
    if job["job_type"] != "training":
        raise ConfigError(
            f"job {job['id']} generates a data set and cannot be cloned",
            hint="Generate another data set with `stoker job generate`",
        )
    return {"job_name": job["job_name"], "config": {**job["config"]}, "tags": job["tags"]}


def _ask_once(request: Callable[[str], JobRow], key: str | None = None) -> JobRow:
    """Return the answer to a request; a service that does not answer is asked again, with the same key."""
    once = key or secrets.token_hex(16)
    policy = RetryPolicy(first_s=1.0, attempts=TRIES)
    return retry(lambda: request(once), (DegradedError, StalledError), policy)


def _settings(words: list[str]) -> dict[str, Any]:
    """Return KEY=VALUE words by key; values are read as YAML, names stay text."""
    texts = dict(word.split("=", 1) for word in words if word.partition("=")[0] in TEXTS and "=" in word)
    return (
        _read_pairs([word for word in words if word.partition("=")[0] not in texts], "kind=radio name=lab")
        | texts
    )


_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")


def _read_pairs(words: list[str], example: str = "epochs=20") -> dict[str, Any]:
    """Return KEY=VALUE words by key; values are read as YAML, and `dataset_ids` is always a list."""
    import yaml

    if odd := [word for word in words if "=" not in word]:
        raise ConfigError(f"expected KEY=VALUE, found {odd[0]!r}", hint=f"As {example}")
    texts = dict(word.split("=", 1) for word in words)
    try:
        found: dict[str, Any] = {key: yaml.safe_load(text) for key, text in texts.items()}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"a setting cannot be read: {' '.join(str(error).split())}", hint="Expected KEY=VALUE"
        ) from None
    # YAML 1.1 takes a number for text where it has an exponent and no point.
    found |= {key: float(text) for key, text in texts.items() if _EXPONENT.fullmatch(text)}
    if isinstance(found.get("dataset_ids"), list):
        found["dataset_ids"] = [str(one) for one in found["dataset_ids"]]
    elif "dataset_ids" in found:  # names without brackets, which may look like numbers or dates
        found["dataset_ids"] = [name.strip() for name in texts["dataset_ids"].split(",")]
    return found


def _body(words: list[str]) -> dict[str, Any]:
    """Return the request from a file (`-`: standard input) and settings; a file may hold settings alone."""
    import yaml

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"expected one file of settings, found {', '.join(files)}", hint="Settings are written key=value"
        )
    try:
        found = yaml.safe_load(sys.stdin if files == ["-"] else Path(files[0]).read_text()) if files else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{files[0]} cannot be read: {why}", hint="Expected JSON or YAML") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{files[0]} holds no settings by name", hint="Expected an object with dataset_ids, epochs, ..."
        )
    body = cast("dict[str, Any]", found)
    if "config" not in body:
        body = {"config": body}
    if not isinstance(body["config"], dict):
        raise ConfigError(
            f"{files[0]}: config is {body['config']!r}",
            hint="Expected an object with dataset_ids, epochs, ...",
        )
    given = _read_pairs([word for word in words if "=" in word])
    return {**body, "config": _with_given(body["config"], given)}


def _with_given(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what was given; `model.width` and `settings.model.width` are in `settings`.

    >>> _with_given({"epochs": 1, "settings": {"model.depth": 2}}, {"epochs": 3, "model.width": 64})
    {'epochs': 3, 'settings': {'model.depth': 2, 'model.width': 64}}
    """
    changed = {**config, **{name: value for name, value in given.items() if "." not in name}}
    dotted = {name.removeprefix("settings."): value for name, value in given.items() if "." in name}
    if dotted:
        settings = changed.get("settings") or {}
        if not isinstance(settings, dict):
            raise ConfigError(
                f"settings is {settings!r}", hint='Expected settings by name, as {"model.width": 64}'
            )
        changed["settings"] = {**cast("dict[str, Any]", settings), **dotted}
    return changed


def _follow(out: CommandOutput, client: Client, id: str) -> None:
    """Show the log as it grows; the exit code is that of the job."""
    place = 0
    while True:
        try:
            for told in client.follow(f"/jobs/{id}/logs/stream", place):
                place = told.number
                for line in told.data.get("lines", ()):
                    out.note(line)
                if told.kind == "end":
                    _judge(client.job(id)["job"])
                    return
        except StalledError as error:
            out.note(f"{error}; following again")
        time.sleep(1.0)


def _judge(found: Mapping[str, Any]) -> None:
    if found["status"] == "failed":
        raise StokerError(f"job {found['id']} failed: {found['error_message']}")


def _render_jobs(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each job."""
    jobs = found.get("jobs", [found])
    if not jobs:
        console.print("no jobs found. `stoker job submit` submits one")
        return
    rows = [bold("id", "name", "status", "epoch", "val loss", "stall", "tags", "")]
    rows += [tuple(map(escape, _row(one))) for one in jobs]
    table(console, rows, fixed=7, right=range(3, 6), gap=2)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    loss, stall = one["val_loss"], one["stall"]
    return (
        one["id"],
        one["job_name"],
        one["status"],
        f"{one['current_epoch']}/{one['total_epochs']}",
        "-" if loss is None else f"{loss:.4g}",
        "-" if stall is None else format_percent(stall),
        ", ".join(one["tags"]) or "-",
        one["error_message"] or one["progress_message"],
    )


def _render_job(found: Mapping[str, Any], console: Console) -> None:
    """Print the job and its last epochs."""
    _render_jobs(found["job"], console)
    shown = ("epoch", "train_loss", "val_loss", "learning_rate", "stall")
    rows = [
        tuple("-" if row.get(k) is None else f"{row[k]:.4g}" for k in shown)
        for row in found["recent_metrics"]
    ]
    if rows:
        table(console, [bold(*shown), *rows], fixed=5, right=range(5), gap=2)


def _render_datasets(found: Mapping[str, Any], console: Console) -> None:
    rows = found.get("datasets", [found])
    if not rows:
        console.print("no data sets yet. `stoker job register` and `stoker job generate` make one")
        return
    shown = [bold("name", "kind", "samples", "health", "id", "where")]
    for one in rows:
        samples = one["facts"].get("samples")
        count = "-" if samples is None else format_count(samples)
        place = f"connection {one['spec']['connection']}" if "connection" in one["spec"] else ""
        place = place or one["spec"].get("path") or one["spec"].get("url", "")
        shown.append((escape(one["name"]), one["kind"], count, one["health"], one["id"], escape(place)))
    table(console, shown, fixed=5, right=range(2, 3), gap=2)


def _render_report(found: Mapping[str, Any], console: Console) -> None:
    """Print the health of a data set and a row for each check."""
    console.print(escape(f"{found['name']}: {found['health']}"))
    rows = [
        (row["status"], escape(row["check"].replace("_", " ")), escape(row["detail"]))
        for row in found["report"]
    ]
    table(console, rows, fixed=2, gap=2)


def _render_files(found: Mapping[str, Any], console: Console) -> None:
    if not found["files"]:
        console.print("no files yet. A checkpoint comes with the first epochs")
        return
    rows = [bold("file", "size")]
    rows += [(escape(one["name"]), format_bytes(one["bytes"])) for one in found["files"]]
    table(console, rows, fixed=2, right=range(1, 2), gap=2)


def _render_values(found: Mapping[str, Any], console: Console) -> None:
    for name, value in found.items():
        console.print(escape(f"{name}: {value}"))


def _render_log(found: Mapping[str, Any], console: Console) -> None:
    for line in found["lines"]:
        console.print(escape(line))
