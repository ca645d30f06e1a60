"""`stoker compat`: the scripts of the earlier latent cache, with their flags and the meaning that those had.

An earlier settings file is read as it was meant. `training.batch_size` counts trajectories, pairs begin a
stride apart, and `num_workers` reads in parallel. Sections of other programs are named once and left out.
Everything below the settings is what `stoker precompute`, `train` and `validate` do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.command import (
    CommandOutput,
    ConfigFlag,
    Debug,
    Epochs,
    Json,
    Manifest,
    SeveralWords,
    Splits,
    Stage,
    Words,
    command_output,
    config_and_overrides,
    joined,
    load_settings,
    run_training,
    settings_of,
    split_words,
    spread_flags,
)
from stoker.errors import ConfigError, EncoderError, SourceError, SplitError
from stoker.extras.compat.launch import fetch_datasets_b2, setup_vast_data, vast_launch
from stoker.sources.files import canonical_split

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.extras.compat.encoder import ConvertedEncoder
    from stoker.run.context import Run


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
class EarlierPrecomputeFlags:
    """Flags of the earlier script, as given; None where a flag is absent."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "tasks": "data.task", "root": "data.root", "limit": "data.limit",
        "latent_dim": "latent.dim", "latent_len": "latent.tokens",
        "cache_dir": "training.latent_cache_dir", "cache_dtype": "training.latent_cache_dtype",
        "device": "training.device", "batch_size": "precompute.encode_batch",
        "pin_memory": "training.pin_memory", "overwrite": "precompute.overwrite",
        "dataloader_timeout": "precompute.timeouts.start",
        "cache_write_timeout": "precompute.timeouts.write",
        "watchdog_timeout": "precompute.timeouts.encode",
    }  # fmt: skip
    """The setting of each flag that is one."""

    tasks: Annotated[list[str] | None, typer.Option(help="data.task: one or more names.")] = None
    root: Annotated[Path | None, typer.Option(help="data.root: folder of the raw files.")] = None
    cache_dir: Annotated[str | None, typer.Option(help="training.latent_cache_dir.")] = None
    cache_dtype: Annotated[str | None, typer.Option(help="training.latent_cache_dtype, as float16.")] = None
    latent_dim: Annotated[int | None, typer.Option(help="latent.dim.")] = None
    latent_len: Annotated[int | None, typer.Option(help="latent.tokens.")] = None
    device: Annotated[str | None, typer.Option(help="training.device: auto, cpu or cuda[:i].")] = None
    batch_size: Annotated[
        int | None, typer.Option(help="precompute.encode_batch: samples in one call of the encoder.")
    ] = None
    num_workers: Annotated[int | None, typer.Option(help="training.num_workers; 0 reads in process.")] = None
    parallel: Annotated[
        bool | None, typer.Option("--parallel/--no-parallel", help="--no-parallel reads in this process.")
    ] = None
    pin_memory: Annotated[bool | None, typer.Option("--pin-memory", help="training.pin_memory.")] = None
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Encode everything again into a clean folder.")
    ] = None
    limit: Annotated[int | None, typer.Option(help="data.limit: only the first samples of each split.")] = (
        None
    )
    hdf5_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds to open a file, and to read a sample of it.")
    ] = None
    dataloader_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds for a worker to start, open and read.")
    ] = None
    cache_write_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="precompute.timeouts.write.")
    ] = None
    watchdog_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="precompute.timeouts.encode, the first call included.")
    ] = None

    def settings(self, overrides: Sequence[str]) -> list[str]:
        """Return `overrides` with every given flag added as `key=value`.

        Raises:
            ConfigError: Two flags contradict each other.
        """
        workers = self.num_workers
        if self.parallel is not None and workers is not None and self.parallel == (workers == 0):
            raise ConfigError(
                f"--{'' if self.parallel else 'no-'}parallel and --num-workers {workers} contradict",
                hint="Give one of them",
            )
        # Files may be given a time of their own; else a worker that does not answer has it for all it does.
        file_s = self.dataloader_timeout if self.hdf5_timeout is None else self.hdf5_timeout
        given = {
            **{key: getattr(self, name) for name, key in self.KEYS.items()},
            "training.num_workers": 0 if self.parallel is False else workers,
            "precompute.timeouts.open": file_s,
            "precompute.timeouts.read": file_s,
        }
        return [*overrides, *settings_of(given)]


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
    """Return the number of workers: `--no-parallel` kept the encoder out of the loader, never the workers."""
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
        from stoker.run.context import with_epochs

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


def load_earlier(out: CommandOutput, path: Path, overrides: list[str]) -> Config:
    """Return the settings of an earlier file as they were meant; what has no effect is said."""
    from stoker.extras.compat.settings import on_available_device

    given = [*overrides, *_root_of_environment(out, overrides)]
    return on_available_device(load_settings(out, path, given, earlier=True))


def _root_of_environment(out: CommandOutput, overrides: list[str]) -> list[str]:
    """Return `data.root` as the environment says it, unless the command line does."""
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
    """Return the original module, with the weights."""
    from torch import nn

    from stoker.encoders.weights import load_checkpoint
    from stoker.run.user_code import UserCode

    code = UserCode(
        setting="--original", spec=spec, of="a function that makes the original", arguments="nothing",
        error=EncoderError,
    )  # fmt: skip
    module = code.call(code.find(), {})
    if not isinstance(module, nn.Module):
        raise ConfigError(f"--original {spec} makes a {type(module).__qualname__}", hint=code.form)
    load_checkpoint(module, old, key=key, prefix=prefix)
    return module.eval()


def _numbers(text: str, flag: str, count: int | None = None) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if (count is not None and len(found) != count) or (not found and text):
        numbers = f"{count} whole numbers, as 64,64" if count else "whole numbers, as 1,2"
        raise ConfigError(f"{flag} is {text}", hint=f"Expected {numbers}")
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


group.command(cls=SeveralWords)(precompute)
group.command(name="precompute_latent_cache", cls=SeveralWords, hidden=True)(precompute)
group.command()(train)
group.command()(validate)
group.command(name="validate_config", hidden=True)(validate)
group.command(name="vast_launch")(vast_launch)
group.command(name="fetch_datasets_b2")(fetch_datasets_b2)
group.command(name="setup_vast_data")(setup_vast_data)
group.command("convert-encoder")(convert_encoder)
