"""The command that starts runs on other machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import CommandOutput, Debug, Json, command_output, one_config, tell_settings
from stoker.errors import ConfigError
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.extras.launch.plan import LaunchPlan, Target
    from stoker.extras.launch.vast import (
        LaunchPreview,
        MachineList,
        MachineLog,
        OfferList,
        Rental,
        RentedMachine,
        VastClient,
    )

VERBS = ("up", "search", "status", "logs", "down")
KEY_FILES = ("~/.config/vastai/vast_api_key", "~/.vast_api_key")
"""Where the provider's own command keeps the key."""


def launch(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    where: Annotated[
        str, typer.Argument(metavar="vast|script", help="A provider, or a script for any machine.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[up|search|status|logs|down] CONFIG [KEY=VALUE]",
            help="What to do (vast; default: up), the settings file, and what wins over it.",
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script and the request; nothing is sent.")
    ] = False,
    auto_shutdown: Annotated[
        bool | None,
        typer.Option(
            "--auto-shutdown/--no-auto-shutdown", help="Stop the machine at the end: launch.auto_shutdown."
        ),
    ] = None,
    offer: Annotated[int | None, typer.Option(help="up: rent this offer; default: the cheapest.")] = None,
    instance: Annotated[int | None, typer.Option(help="logs, down: this machine of the run alone.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="logs: how many lines from the end.")] = 200,
    destroy: Annotated[
        bool, typer.Option("--destroy", help="down: give the machine back, with all that is on its disk.")
    ] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="script: for sbatch.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", readable=False, help="script: write it here.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run on a rented machine, or on any other.

    From an empty disk: code, dependencies, files, validation, encoding, training, upload, and the machine is
    stopped, also on a failure in any step and on a stall. The configuration has to be committed and pushed.

    \b
    Example:
      stoker launch vast configs/train_burgers_32dim.yaml --dry-run
      stoker launch vast search configs/train_burgers_32dim.yaml launch.gpu=RTX_4090 launch.max_price=0.5
      stoker launch vast logs configs/train_burgers_32dim.yaml
      stoker launch vast down configs/train_burgers_32dim.yaml
      stoker launch script configs/train_burgers_32dim.yaml --slurm --out job.sh
    """
    with command_output(as_json=as_json, debug=debug) as out:
        if where not in ("vast", "script"):
            raise ConfigError(f"{where!r} is not a place to launch on", hint="Expected vast or script")
        verb = words[0] if where == "vast" and words[0] in VERBS else "up"
        files, overrides = tell_settings(words[1:] if words[0] == verb and where == "vast" else words)
        if where == "vast" and words[0] != verb and len(files) > 1 and not files[0].exists():
            raise ConfigError(
                f"{words[0]} is not something to do on vast", hint=f"Expected {', '.join(VERBS)}"
            )
        config = one_config(files)
        target: Target = "vast" if where == "vast" else "slurm" if slurm else "box"
        if where == "vast" and verb in ("status", "logs", "down"):
            _look_after(out, verb, config, overrides, (instance, lines, destroy))
            return
        plan = planned(out, config, overrides, target, auto_shutdown)
        if where == "script":
            _write(out, plan, out_file)
        elif verb == "search":
            from stoker.extras.launch import vast

            out.show(vast.search(vast_client(), plan), render_offers)
        else:
            rent(out, plan, offer, dry_run=dry_run)


def planned(
    out: CommandOutput,
    config: Path,
    overrides: list[str],
    target: Target,
    auto_shutdown: bool | None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Return what would run elsewhere, checked; what the machine will not have is said."""
    from stoker.extras.launch.plan import changed_files, plan_launch
    from stoker.extras.launch.script import API

    api = os.environ.get("VAST_API_URL", API)
    plan = plan_launch(config, overrides, environment, target=target, auto_shutdown=auto_shutdown, api=api)
    for note in plan.config.notes:
        out.note(note)
    changed = changed_files(Path.cwd(), plan.config.launch.command)
    if changed:
        out.note(
            f"the machine runs commit {plan.code.commit[:12]}, which lacks changes here of "
            f"{format_count(len(changed), 'file')}, as {changed[0]}"
        )
    return plan


def vast_client() -> VastClient:
    """Return the provider, with the key of the environment or of its own command.

    Raises:
        ConfigError: No key was found.
    """
    from stoker.extras.launch.script import API
    from stoker.extras.launch.vast import VastClient

    key = os.environ.get("VAST_API_KEY", "").strip()
    for name in KEY_FILES:
        path = Path(name).expanduser()
        if not key and path.is_file():
            key = path.read_text().strip()
    if not key or not key.isprintable():
        raise ConfigError(
            "no key of Vast.ai was found", hint=f"Set VAST_API_KEY, or put it into {KEY_FILES[0]}"
        )
    return VastClient(key, api=os.environ.get("VAST_API_URL", API))


def rent(out: CommandOutput, plan: LaunchPlan, offer: int | None, *, dry_run: bool) -> None:
    """Rent a machine and show it, or show what would be sent."""
    from stoker.extras.launch import vast

    if dry_run:
        out.show(vast.LaunchPreview(launch=plan), render_dry_run)
    else:
        out.show(vast.up(vast_client(), plan, offer), render_rented)


def _look_after(
    out: CommandOutput, verb: str, config: Path, overrides: list[str], wanted: tuple[int | None, int, bool]
) -> None:
    from stoker.config import load_config
    from stoker.extras.launch import vast
    from stoker.extras.launch.plan import label_of

    instance, lines, destroy = wanted
    label = label_of(load_config(config, overrides), config)
    client = vast_client()
    if verb == "status":
        out.show(vast.status(client, label), render_machines)
    elif verb == "logs":
        out.show(vast.logs(client, label, lines, instance), render_log)
    else:
        out.show(vast.down(client, label, instance, destroy=destroy), render_machines)


def _write(out: CommandOutput, plan: LaunchPlan, path: Path | None) -> None:
    from stoker.runtime.files import replace_atomically

    if path is not None:
        with replace_atomically(path) as temporary:
            temporary.write_text(plan.onstart)
            temporary.chmod(0o755)
        out.note(f"written to {path}")
    if out.as_json:
        out.write_json({"script": plan.onstart, "path": None if path is None else str(path)})
    elif path is None:
        out.write(plan.onstart)


def render_dry_run(result: LaunchPreview, console: Console) -> None:
    """Print the script as it is, then the request without values of variables."""
    import json

    console.print(result.launch.onstart, markup=False, highlight=False, soft_wrap=True)
    request = {**result.launch.request(shown=True), "onstart": "(the script above)"}
    console.print(json.dumps(request, indent=2), markup=False, highlight=False, soft_wrap=True)
    size = len(result.launch.onstart.encode())
    console.print(f"{format_count(size)} bytes, of 4,048; nothing was sent", soft_wrap=True)


def render_offers(result: OfferList, console: Console) -> None:
    """Print one line for each."""
    for one in result.offers:
        console.print(
            f"{one.id:>10}  {one.gpus} x {escape(one.gpu)} {one.gpu_memory_gib:.0f} GiB  "
            f"{one.price:.3f} $/h  {one.down_mbps:.0f} Mbit/s  {one.reliability:.3f}  {escape(one.region)}",
            soft_wrap=True,
        )
    if not result.offers:
        console.print("nothing fits. Ask for less: launch.gpu, gpus, disk, region, max_price", soft_wrap=True)


def render_rented(result: Rental, console: Console) -> None:
    """Print what was rented, and how to look after it."""
    one = result.offer
    console.print(
        f"instance {result.instance} rented: {one.gpus} x {escape(one.gpu)}, {one.price:.3f} $/h, "
        f"{escape(one.region)}; stoker launch vast logs | status | down CONFIG",
        soft_wrap=True,
    )


def render_machines(result: MachineList, console: Console) -> None:
    """Print one line for each."""
    for one in result.instances:
        console.print(_machine(one, result.done), soft_wrap=True)
    if not result.instances:
        console.print(f"{escape(result.label)} has no machine", soft_wrap=True)


def _machine(one: RentedMachine, done: str) -> str:
    said = f"  {escape(one.message)}" if one.message and not done else ""
    state = done or (one.status if one.wanted in ("", one.status) else f"{one.status}, to be {one.wanted}")
    return f"instance {one.id}: {state}  {one.gpus} x {escape(one.gpu)}  {one.price:.3f} $/h{said}"


def render_log(result: MachineLog, console: Console) -> None:
    """Print the lines as they are."""
    console.print(result.log, markup=False, highlight=False, soft_wrap=True)
