"""Parameters that commands share, and the flags of the earlier precompute script as settings.

`precompute` of the earlier system took `--splits train val`, `--latent-dim 64` and more. Each still works
and becomes a `key=value` setting. The same setting given both ways is then given twice, which
`load_config` refuses, since it cannot know which one was meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_type_hints

import typer
from typer.core import TyperCommand

from stoker.errors import ConfigError
from stoker.units import TIMES, parse_bytes

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, the rest on standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and log more.")]
# readable=False: the parser does not look at paths; the code that opens one says what is wrong
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", readable=False, help="YAML file with the settings.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file, as training.epochs=3."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG | KEY=VALUE", help="The settings file, and what wins over it."),
]
# text, not a Path, which would make one slash of a URL's two or three
CachePath = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A cache (its newest complete recipe), or one recipe's folder."),
]

ConfigFlag = Annotated[
    Path | None, typer.Option("--config", readable=False, help="The settings file, as a flag.")
]
Splits = Annotated[
    list[str] | None, typer.Option(help="Splits to encode, as train val; default: what `train` needs.")
]
Manifest = Annotated[Path | None, typer.Option(help="Write a JSON report of the run here.")]
Stage = Annotated[
    str | None, typer.Option(help="One of the stages alone: operator, decoder, consistency; or all.")
]
Epochs = Annotated[int | None, typer.Option(help="training.epochs; with --stage the epochs of that stage.")]

SEVERAL = ("--tasks", "--splits")
"""Flags that take more than one value, each as its own word."""


class EarlierFlags(TyperCommand):
    """A command that reads `--splits train val` as the earlier script did: one flag, several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before each of its words, then parse as usual."""
        return super().parse_args(ctx, repeat_flags(args))


def repeat_flags(args: Sequence[str]) -> list[str]:
    """Put the flag before each of its words; a setting, a YAML file or another flag ends them.

    >>> repeat_flags(["--splits", "train", "val", "c.yaml", "latent.dim=8"])
    ['--splits', 'train', '--splits', 'val', 'c.yaml', 'latent.dim=8']
    """
    out: list[str] = []
    flag = ""
    for place, arg in enumerate(args):
        ends = arg.startswith("-") or "=" in arg or arg.endswith((".yaml", ".yml"))
        if flag and not ends and args[place - 1] != flag:
            out.append(flag)
        if ends:
            flag = arg if arg in SEVERAL else ""
        out.append(arg)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierPrecomputeFlags:
    """Flags of the earlier script that `precompute` still takes, as given; None where a flag is absent."""

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
        """`overrides` with every given flag added as `key=value`.

        Raises:
            ConfigError: Two flags contradict each other.
        """
        workers = self.num_workers
        if self.parallel is not None and workers is not None and self.parallel == (workers == 0):
            raise ConfigError(
                f"--{'' if self.parallel else 'no-'}parallel and --num-workers {workers} contradict. "
                "Give one of them"
            )
        # Files may be given a time of their own; else a worker that does not answer has it for all it does.
        file_s = self.dataloader_timeout if self.hdf5_timeout is None else self.hdf5_timeout
        given = {
            **{key: getattr(self, name) for name, key in self.KEYS.items()},
            "training.num_workers": 0 if self.parallel is False else workers,
            "precompute.timeouts.open": file_s,
            "precompute.timeouts.read": file_s,
        }
        return [*overrides, *(f"{key}={_text(value)}" for key, value in given.items() if value is not None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeFlags(EarlierPrecomputeFlags):
    """All flags of `precompute` that are settings."""

    compression: Annotated[
        str | None, typer.Option(metavar="none|zstd|lz4|auto", help="precompute.compression.")
    ] = None
    devices: Annotated[
        str | None, typer.Option(help="precompute.devices: an encoder on each, as cuda:0,cuda:1, or all.")
    ] = None
    retry_quarantined: Annotated[
        bool | None, typer.Option("--retry-quarantined", help="Try samples again that failed before.")
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(metavar="local|ray", help="precompute.engine: this machine, or a Ray cluster."),
    ] = None
    address: Annotated[
        str | None, typer.Option(metavar="auto|HOST:PORT", help="precompute.ray.address; default: one here.")
    ] = None

    KEYS: ClassVar[Mapping[str, str]] = {
        **EarlierPrecomputeFlags.KEYS,
        "compression": "precompute.compression", "named_devices": "precompute.devices",
        "retry_quarantined": "precompute.retry_quarantined", "engine": "precompute.engine",
        "address": "precompute.ray.address",
    }  # fmt: skip

    @property
    def named_devices(self) -> list[str] | None:
        """`devices`, which may be several in one word."""
        return None if self.devices is None else [self.devices]


def spread_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with every field of its parameter `flags`, a dataclass, as a parameter of its own.

    So a flag is stated once, with its name, type, default and help, and commands that share it agree.
    """
    kind = get_type_hints(command)["flags"]
    hints = get_type_hints(kind, include_extras=True)
    own = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(kind)
    ]

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        command(*args, flags=kind(**{one.name: given.pop(one.name) for one in own}), **given)

    return with_parameters(run, command, own, without="flags")


def with_parameters(
    run: Callable[..., None], command: Callable[..., None], own: Sequence[Parameter], *, without: str
) -> Callable[..., None]:
    """Return `run`, which the parser takes to have the parameters of `command`, one of them replaced."""
    shown = signature(command, eval_str=True)
    others = [one for one in shown.parameters.values() if one.name != without]
    by_kind = sorted([*others, *own], key=lambda one: one.kind)
    vars(run)["__signature__"] = shown.replace(parameters=by_kind)
    run.__annotations__ = {one.name: one.annotation for one in by_kind}
    return run


def _text(value: object) -> str:
    """Return a value as a setting has it; of several words a list."""
    if isinstance(value, list):
        return _list(cast("list[str]", value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(values: Sequence[str]) -> str:
    """Task names as one value: alone, or as a list; `a,b` counts as two."""
    names = split_words(values)
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def tell_settings(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return paths and settings among `words`: what has a `=` is a setting, unless there is such a file."""
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    return [Path(word) for word in words if word not in settings], settings


def config_and_overrides(words: Sequence[str], config: Path | None = None) -> tuple[Path, list[str]]:
    """Tell the settings file from the settings in what was typed.

    Raises:
        ConfigError: No file, or more than one.
    """
    files, overrides = tell_settings(words)
    files += [config] if config else []
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        raise ConfigError(f"expected one CONFIG file, found {found}. Settings are written key=value")
    return files[0], overrides


def split_words(values: Sequence[str]) -> list[str]:
    """Words of repeated or comma-separated values.

    >>> split_words(["train,val", "test"])
    ['train', 'val', 'test']
    """
    return [word for value in values for word in value.split(",") if word]


# ----------------------------------------------------------------------------------------------------------
# Sizes, times and shares as people type them.


def size(text: str) -> int:
    """Return bytes. A number without a unit is refused: who types 20 rarely means 20 bytes. 0 needs none.

    >>> size("20GB"), size("1.5 GiB"), size("4096B"), size("0")
    (20000000000, 1610612736, 4096, 0)
    """
    found = parse_bytes(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size. Write a number with a unit, as 20GB or 512MiB")
    if found and text.strip()[-1].isdigit():
        raise typer.BadParameter(
            f"{text!r} has no unit. Write {text.strip()}GB, or {text.strip()}B for bytes"
        )
    return found


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("30d"), duration("12 h")
    (2592000.0, 43200.0)
    """
    number, unit = _split(text)
    if unit not in TIMES:
        raise typer.BadParameter(f"{text!r} is not a time. Write a number with a unit, as 30d, 12h or 90min")
    return number * TIMES[unit]


def share(text: str) -> float:
    """Return a fraction above 0 and at most 1.

    >>> share("5%"), share("0.05"), share("1")
    (0.05, 0.05, 1.0)
    """
    number, unit = _split(text)
    fraction = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is not a share. Write 5% or 0.05, more than 0 and at most all")
    return fraction


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    return (float(match[1]), match[2].lower()) if match else (0.0, "?")
