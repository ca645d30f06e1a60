"""Parameters that commands share, and the flags of the earlier precompute script as settings.

`precompute` of the earlier system took `--splits train val`, `--latent-dim 64` and more. Each still works
and becomes a `key=value` setting. The same setting given both ways is then given twice, which
`load_config` refuses, since nobody could say which one was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stoker.errors import ConfigError

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, the rest on standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and log more.")]
# readable=False: the parser is not to look at paths; whoever opens one says what is wrong with it
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
# text, not a Path, which would make one slash of an address's two or three
CachePath = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A cache (its newest complete recipe), or one recipe's folder."),
]

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
class PrecomputeFlags:
    """Flags of `precompute` as given; None where a flag is absent."""

    tasks: list[str] | None = None
    root: Path | None = None
    cache_dir: str | None = None
    cache_dtype: str | None = None
    compression: str | None = None
    latent_dim: int | None = None
    latent_len: int | None = None
    device: str | None = None
    devices: str | None = None
    batch_size: int | None = None
    num_workers: int | None = None
    parallel: bool | None = None
    pin_memory: bool | None = None
    overwrite: bool | None = None
    retry_quarantined: bool = False
    limit: int | None = None
    hdf5_timeout: float | None = None
    dataloader_timeout: float | None = None
    cache_write_timeout: float | None = None
    watchdog_timeout: float | None = None
    engine: str | None = None
    address: str | None = None

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
        if self.parallel is False:
            workers = 0
        given = {
            "data.task": None if self.tasks is None else _list(self.tasks),
            "data.root": self.root,
            "data.limit": self.limit,
            "latent.dim": self.latent_dim,
            "latent.tokens": self.latent_len,
            "training.latent_cache_dir": self.cache_dir,
            "training.latent_cache_dtype": self.cache_dtype,
            "precompute.compression": self.compression,
            "training.device": self.device,
            "precompute.devices": None if self.devices is None else _list([self.devices]),
            "precompute.encode_batch": self.batch_size,
            "training.num_workers": workers,
            "training.pin_memory": self.pin_memory,
            "precompute.overwrite": self.overwrite,
            "precompute.engine": self.engine,
            "precompute.ray.address": self.address,
            "precompute.retry_quarantined": self.retry_quarantined or None,
        } | self._deadlines()
        return [*overrides, *(f"{key}={_text(value)}" for key, value in given.items() if value is not None)]

    def _deadlines(self) -> dict[str, float | None]:
        """A worker that does not answer in time, whatever it does; files may be given a time of their own."""
        file_s = self.dataloader_timeout if self.hdf5_timeout is None else self.hdf5_timeout
        return {
            "precompute.deadlines.start": self.dataloader_timeout,
            "precompute.deadlines.open": file_s,
            "precompute.deadlines.read": file_s,
            "precompute.deadlines.write": self.cache_write_timeout,
            "precompute.deadlines.encode": self.watchdog_timeout,
        }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(values: Sequence[str]) -> str:
    """Task names as one value: alone, or as a list; `a,b` counts as two."""
    names = split_words(values)
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def tell_settings(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Paths and settings among `words`: what has a `=` is a setting, unless there is such a file."""
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
