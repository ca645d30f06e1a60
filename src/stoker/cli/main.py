"""The commands of `stoker`: each parses, makes one library call and prints what came back.

Exit codes: 0 done, 1 failed, 2 usage, 3 bad configuration, 4 cache corrupt or incomplete, 5 stalled,
6 not enough resources, 130 interrupted.

docs/reference/cli.md shows every command with its output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stoker.cli.command import (
    INTERRUPTED,
    CommandOutput,
    ConfigArgument,
    ConfigFlag,
    Epochs,
    Manifest,
    Overrides,
    PrecomputeFlags,
    SeveralWords,
    Splits,
    Stage,
    Words,
    cli_command,
    command_output,
    config_and_overrides,
    joined,
    load_settings,
    run,
    run_training,
    split_words,
    spread_flags,
    stop_on_sigterm,
    tell_settings,
)
from stoker.errors import ConfigError, Interrupted
from stoker.plugins import PACKAGE, Plugin, load_extension, plugins_of
from stoker.runtime.signals import GUARD_VARIABLE, Lifeline, attach

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Start": ("demo", "init", "validate"),
    "Work": ("precompute", "train", "plan", "profile", "bench"),
    "Data and caches": ("cache", "data"),
    "Remote": ("launch", "serve", "job"),
    "": ("compat",),
}
"""How the help lists commands, whichever module they are from; others come last."""
GROUPS: Mapping[str, str] = {
    "cache": "List, check, clean up and share caches.",
    "data": "Fetch, stage and look at raw data.",
    "job": "Control the jobs of a running service.",
}
"""Commands that are groups of others, and their help."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "stoker.cli.start": ("init", "data.inspect"),
    "stoker.cli.training": ("demo", "bench", "profile"),
    "stoker.cli.caches": (
        *("cache.ls", "cache.show", "cache.get", "cache.why", "cache.verify", "cache.compact", "cache.gc"),
        *("cache.push", "cache.pull", "data.stage"),
    ),
    "stoker.cli.serving": (
        "serve",
        *("job.submit", "job.list", "job.show", "job.logs", "job.cancel", "job.pause", "job.resume"),
        *("job.continue", "job.clone", "job.tag", "job.files", "job.download", "job.delete", "job.login"),
        *("job.datasets", "job.register", "job.generate", "job.check", "job.forget"),
    ),
}
"""Commands of the core that are in other modules, each imported when one of its commands is used."""
RENAMED = {
    "inspect": "cache.show",
    **dict.fromkeys(("cache.list", "ls"), "cache.ls"),
    **dict.fromkeys(("cache.rm", "cache.remove", "cache.delete", "cache.prune", "cache.clean"), "cache.gc"),
    **dict.fromkeys(("cache.inspect", "cache.info"), "cache.show"),
    **dict.fromkeys(("cache.check", "cache.repair"), "cache.verify"),
    **dict.fromkeys(("job.rm", "job.remove"), "job.delete"),
    **dict.fromkeys(("job.stop", "job.kill"), "job.cancel"),
    "job.status": "job.show",
    "job.ls": "job.list",
    "job.start": "job.submit",
    "data.download": "data.fetch",
    "data.show": "data.inspect",
}
"""Earlier names of commands that are called otherwise now, and names that other programs have for them."""
_HELP = {"help_option_names": ["-h", "--help"]}


class CommandGroup(TyperGroup):
    """The commands of the core, then those of plugins, imported when they or the help are used.

    Commands of a group are named with a dot, `cache.ls`. A command of the core stays what it is whatever
    plugins are called.
    """

    prefix = ""
    """Of the names of its commands: `cache.`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, those of other packages last."""
        inside = (name.removeprefix(self.prefix) for name in _commands() if name.startswith(self.prefix))
        names = dict.fromkeys((*super().list_commands(ctx), *(name.partition(".")[0] for name in inside)))
        order = [name for names in SECTIONS.values() for name in names] if not self.prefix else [*names]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name; one that cannot be used says why when it is run."""
        if not self.prefix and cmd_name in GROUPS:
            return _group_of(cmd_name)
        plugin = _commands().get(self.prefix + cmd_name)
        if cmd_name in self.commands or plugin is None:
            return super().get_command(ctx, cmd_name)
        try:
            return _as_command(cmd_name, plugin.load())
        except ConfigError as error:
            return _refusal(plugin, error)
        except Exception as error:  # noqa: BLE001  typer has many errors for a function that it cannot read
            fact = f"{plugin.target} of the package {plugin.package} is not a command: {error}"
            return _refusal(plugin, ConfigError(fact, hint="Correct it"))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words name; of an unknown one say in which group it is."""
        name = args[0] if args else ""
        if name and self.get_command(ctx, name) is None:
            called = self.prefix + name
            meant = [RENAMED[called]] if called in RENAMED else []
            meant += [known for known in _commands() if not self.prefix and known.endswith(f".{name}")]
            meant += [self.prefix + one for one in get_close_matches(name, self.list_commands(ctx), n=1)]
            meant += [known for known in _commands() if known.endswith(f".{name}")]
            if meant:
                ctx.fail(f"No such command '{name}'. Did you mean 'stoker {meant[0].replace('.', ' ')}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in sections."""
        rows = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        lines = {name: one.get_short_help_str(70) for name, one in rows.items() if one and not one.hidden}
        known = {name for names in SECTIONS.values() for name in names}
        sections = {**SECTIONS, "Of other packages": tuple(n for n in lines if n not in known)}
        for title, names in ({"Commands": tuple(lines)} if self.prefix else sections).items():
            if found := [(name, lines[name]) for name in names if name in lines]:
                with formatter.section(title or "Earlier systems"):
                    formatter.write_dl(found)


def _commands() -> Mapping[str, Plugin]:
    """Return the commands that are imported on use, by name; those of the core win over those of plugins."""
    own = {
        name: Plugin("stoker.commands", name, f"{module}:{_function_of(name)}", PACKAGE)
        for module, names in MODULES.items()
        for name in names
    }
    return {**own, **{name: one for name, one in plugins_of("stoker.commands").items() if name not in own}}


def _function_of(name: str) -> str:
    """Return the function of a command: `job_list` of `job.list`, whose names would hide Python's own."""
    return name.replace(".", "_").replace("-", "_")


def _group_of(name: str) -> Any:
    """Return the group of commands whose names begin with `name` and a dot."""
    kind = type("CommandGroup", (CommandGroup,), {"prefix": f"{name}."})
    group = typer.Typer(name=name, cls=kind, help=GROUPS[name], no_args_is_help=True, rich_markup_mode=None)
    group.callback(help=GROUPS[name])(_nothing)
    return typer.main.get_group(group)


def _nothing() -> None:
    pass


def _as_command(name: str, made: Any, **settings: bool) -> Any:
    """Return what `app.command` or `app.add_typer` makes of a plugin's function or group."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(made, typer.Typer):
        app.add_typer(made, name=name)
    else:
        app.command(name, context_settings=settings)(made)
    return typer.main.get_group(app).commands[name]


def _refusal(plugin: Plugin, error: ConfigError) -> Any:
    """Return a command that does nothing but say why it cannot be run."""

    def refuse(ctx: typer.Context) -> None:
        with command_output(as_json="--json" in ctx.args, debug="--debug" in ctx.args):
            raise error

    refuse.__doc__ = f"Cannot be used (package {', '.join((plugin.package, *plugin.others))})."
    name = plugin.name.rpartition(".")[2]
    return _as_command(name, refuse, allow_extra_args=True, ignore_unknown_options=True)


app = typer.Typer(
    name="stoker",
    cls=CommandGroup,
    help="Encode once, keep it verified, and feed the GPU from the fastest place that fits.",
    no_args_is_help=True,
    context_settings=_HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command that the arguments name; the `stoker` script starts in `process.py`."""
    words = sys.argv[1:]
    try:
        stop_on_sigterm()
        lifeline = os.environ.pop(GUARD_VARIABLE, None)
        if lifeline:
            attach(Lifeline.from_text(lifeline))  # lets signals in that came while modules were imported
        if os.environ.get("STOKER_START_METHOD") == "spawn":
            from stoker.runtime.processes.child import set_start_method

            set_start_method("spawn")
        run(app, words)
    except KeyboardInterrupt:
        out = CommandOutput(as_json="--json" in words, debug=False)
        sys.exit(out.fail(INTERRUPTED, Interrupted.exit_code).exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        from stoker import __version__

        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Encode once, keep it verified, and feed the GPU from the fastest place that fits."""


@app.command(cls=SeveralWords)
@spread_flags
@cli_command
def precompute(
    out: CommandOutput,
    words: Words = None,
    *,
    config: ConfigFlag = None,
    splits: Splits = None,
    manifest: Manifest = None,
    flags: PrecomputeFlags,
) -> None:
    """Encode what is missing from the caches.

    Returns at once when nothing is; stopped at any moment, the same command resumes. Of several
    tasks one that fails leaves the others alone; the exit code is then that of its error.

    \b
    Example:
      stoker precompute configs/train_burgers_32dim.yaml
      stoker precompute configs/train_burgers_32dim.yaml latent.dim=64 --splits train val
      stoker precompute configs/train_burgers_32dim.yaml --engine ray --address auto
    """
    path, overrides = config_and_overrides(words or [], config)
    settings = load_settings(out, path, flags.settings(overrides))
    from stoker.cli import output
    from stoker.run.precompute import precompute_config

    with joined(settings) as run:
        result = precompute_config(run, splits=split_words(splits or []), manifest=manifest)
    out.show(result, output.precompute, exit_code=result.exit_code)


@app.command()
@cli_command
def plan(
    out: CommandOutput,
    words: Words = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Machines that are not here: nodes=8 gpus=8 ... [CONFIG].")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Of a simulation: tables as Markdown.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Of a simulation: draw it, as PNG or SVG.")] = None,
) -> None:
    """Show where records would be served from.

    With what that costs a batch, and why; nothing is moved or encoded. With --simulate: what a whole run
    would take on other machines, each way of doing it in time, bytes, memory and money
    (docs/how-to/scale.md).

    \b
    Example:
      stoker plan configs/train_burgers_512dim.yaml training.tier=host
      stoker plan --simulate records=1e6 record_bytes=100kB batch=64 step=20ms host_memory=64GB
    """
    if simulate:
        load_extension("plan.simulate").simulated(out, words or [], as_markdown=markdown, picture=picture)
        return
    if markdown or picture:
        raise ConfigError(
            "--markdown and --picture need --simulate", hint="Add --simulate, or leave them out"
        )
    _refuse_words(words or [])
    settings = load_settings(out, *config_and_overrides(words or []))
    from stoker.cli import output
    from stoker.run.context import Run
    from stoker.run.plan import plan_config, plan_tasks

    run = Run(settings)
    if len(run.tasks) > 1:
        out.show(plan_tasks(run), output.plan_of_tasks)
    else:
        out.show(plan_config(run), output.plan)


@app.command()
@cli_command
def train(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    words: Words = None,
    config: ConfigFlag = None,
    stage: Stage = None,
    epochs: Epochs = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="precompute.wait=false: begin at once, encode meanwhile.")
    ] = False,
    live: Annotated[
        bool | None,
        typer.Option("--live/--no-live", help="A screen that is kept up to date; default: on a terminal."),
    ] = None,
    max_stall: Annotated[
        str | None,
        typer.Option(metavar="2%", help="training.max_stall: waiting longer is exit code 5."),
    ] = None,
) -> None:
    """Encode what is missing, then train.

    Trains the latent operator; an interrupted run resumes when the command is given again. Exit code
    5 when more of the time was waited for data than --max-stall allows.

    \b
    Example:
      stoker train configs/train_burgers_32dim.yaml training.epochs=10
      stoker train configs/train_burgers_32dim.yaml --max-stall 2%
      stoker train configs/train_burgers_32dim.yaml --stage operator --epochs 5
      torchrun --nproc-per-node 2 -m stoker train configs/train_burgers_32dim.yaml
    """
    asked = ["precompute.wait=false"] if no_wait else []
    asked += [] if max_stall is None else [f"training.max_stall={max_stall}"]
    asked += [] if epochs is None else [f"training.epochs={epochs}"]
    path, overrides = config_and_overrides(words or [], config)
    settings = load_settings(out, path, [*overrides, *asked])
    from stoker.run.context import with_epochs

    settings = with_epochs(settings, stage, epochs)
    run_training(out, settings, live=live, stage=stage)


@app.command()
@cli_command
def validate(
    out: CommandOutput,
    config: ConfigArgument,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings in force as YAML, and check nothing.")
    ] = False,
) -> None:
    """Check everything before a long run.

    Configuration, data files, encoder, cache, trackers, GPU and driver, memory, disk and launch settings, a
    row each: pass, warn or fail. Exit code 3 when a setting or file is wrong, 6 when the machine does not do.

    \b
    Example:
      stoker validate configs/train_burgers_32dim.yaml
    """
    if print_config:
        settings = load_settings(out, config, overrides or [])
        if out.as_json:
            out.write_json(settings.to_dict())
        else:
            out.write(settings.to_yaml())
        return
    from stoker.cli import output
    from stoker.run.validate import failed, validate_config

    result = validate_config(config, overrides or [], environment=os.environ)
    try:
        rows = load_extension("validate.launch")(config, overrides or [], os.environ)
    except ConfigError as error:  # the settings may well do without it
        rows = [replace(failed("launch settings", error), status="warn")]
    result = result.and_these(rows)
    out.show(result, output.validate, exit_code=result.exit_code)


def _refuse_words(words: list[str]) -> None:
    """Refuse words of a simulation if `--simulate` is not given.

    Raises:
        ConfigError: There is one.
    """
    _, settings = tell_settings(words)
    plain = [word for word in settings if "." not in word.partition("=")[0]]
    if plain:
        stray = [word for word in plain if load_extension("plan.simulate").knows(word)]
        if stray:
            raise ConfigError(
                f"{stray[0]} belongs to --simulate, which is not given",
                hint="Add --simulate to plan for other machines. Settings are written with their section, "
                "as training.epochs=3",
            )


if __name__ == "__main__":
    main()
