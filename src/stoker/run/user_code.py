"""Find and call code of the user's own that a configuration names by its import path.

What a configuration names is imported and called: it is code, like the script that would otherwise hold it.
The folder that the command runs in is on the import path, here and in the processes that are started.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from stoker.config.models import DataConfig, EncoderConfig
from stoker.config.sections import OF_MODULE, as_names
from stoker.encoders.module import ModuleEncoder, Time, bound_module
from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import load_checkpoint
from stoker.errors import ConfigError, EncoderError, SourceError, SplitError, StokerError
from stoker.schema import Schema
from stoker.sources.protocol import Source
from stoker.sources.splits import SplitOf
from stoker.sources.torch_dataset import TorchSource
from stoker.used_code import describe_failure, place_of_error


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """A name in the user's own code, and the setting that gives it."""

    setting: str
    """As `data.dataset`."""
    spec: str
    """`module:name` or `path/file.py:name`."""
    of: str
    """The expected kind of thing, as `a Dataset or of what makes it`."""
    arguments: str
    """The setting with the arguments."""
    error: type[StokerError]
    """Raised where the user's code fails."""

    @property
    def form(self) -> str:
        """The form of the setting, for messages."""
        return f"Expected module:name, or path/file.py:name, of {self.of}"

    def find(self) -> Any:
        """Import the module and return what stands under the name.

        Raises:
            ConfigError: There is no such module or name.
            StokerError: Importing it failed; of the class `error`, with file and line.
        """
        place, _, name = self.spec.rpartition(":")
        if not place or not name:
            raise ConfigError(f"{self.setting} is {self.spec!r}", hint=self.form)
        module = self._file_module(Path(place)) if place.endswith(".py") else self._module(place)
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
                raise ConfigError(
                    f"{self.setting} {self.spec}: {getattr(module, '__file__', place)} has no {part}",
                    hint=f"It has {', '.join(sorted(own)) or 'nothing to call'}",
                )
            found = getattr(found, part)
        return found

    def call(self, make: Any, arguments: Mapping[str, Any]) -> Any:
        """Call what was found.

        Raises:
            ConfigError: It cannot be called, or not with these arguments.
            StokerError: It failed; of the class `error`, with file and line.
        """
        if not callable(make):
            raise ConfigError(
                f"{self.setting} {self.spec} is of type {type(make).__name__}, which cannot be called",
                hint=self.form,
            )
        try:
            return cast("Callable[..., Any]", make)(**arguments)
        except StokerError:
            raise
        except TypeError as error:
            if place_of_error(error) is None:  # the call itself
                raise ConfigError(
                    f"{self.setting} {self.spec}: {error}; {self.arguments} gives "
                    f"{', '.join(arguments) or 'nothing'}",
                    hint=f"It takes {inspect.signature(make)}. Give each as {self.arguments}.NAME=VALUE",
                ) from error
            raise self._failed(f"called with {_shown(arguments)}", error) from error
        except Exception as error:
            raise self._failed(f"called with {_shown(arguments)}", error) from error

    def _file_module(self, path: Path) -> ModuleType:
        if not path.is_file():
            raise ConfigError(f"{self.setting} {self.spec}: {path} is not a file", hint=self.form)
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # and there it stays: other processes import it by the same name
        module = self._module(path.stem)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise ConfigError(
                f"{self.setting} {self.spec}: the name {path.stem} belongs to {module.__file__} already",
                hint="Rename the file",
            )
        return module

    def _module(self, name: str) -> ModuleType:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise self._failed("cannot be imported", error) from error
            raise ConfigError(
                f"{self.setting} {self.spec}: there is no module {error.name}, neither installed nor in "
                f"{here}",
                hint=self.form,
            ) from error
        except Exception as error:
            raise self._failed("cannot be imported", error) from error

    def _failed(self, doing: str, error: Exception) -> StokerError:
        return self.error(
            f"{self.setting} {self.spec}, {doing}: {describe_failure(error)}", hint="Fix it there"
        )


def takes_argument(make: Any, name: str) -> bool:
    """Return True if a callable has a parameter of that name."""
    try:
        return callable(make) and name in inspect.signature(make).parameters
    except (TypeError, ValueError):  # compiled code without a signature
        return False


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "nothing"


# ----------------------------------------------------------------------------------------------------------
# A torch Dataset of the user's own, named in a configuration by its import path (`user_code.py`).


def torch_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the Dataset that `data.dataset` names, or the part of it that is `split`.

    What takes an argument `split` is called with it, and gives that split; all else is cut by `data.splits`.

    Raises:
        ConfigError: There is no such module or name.
        SplitError: It gives None for this split.
        SourceError: Making it failed; names file and line.
    """
    code = UserCode(
        setting="data.dataset",
        spec=data.dataset or "",
        of="a Dataset or of what makes it",
        arguments="data.torch.arguments",
        error=SourceError,
    )
    if data.dataset is None:
        raise ConfigError("data.kind=torch needs data.dataset, as data.dataset=mydata:Waves", hint=code.form)
    settings = data.torch
    make = code.find()
    arguments: dict[str, Any] = dict(settings.arguments or {})
    by_split = "split" not in arguments and takes_argument(make, "split")
    if by_split:
        arguments["split"] = split
    is_there = hasattr(make, "__getitem__") and not isinstance(make, type) and not arguments
    dataset: Any = make if is_there else code.call(make, arguments)
    if dataset is None:
        raise SplitError(f"data.dataset {data.dataset} gives None for split {split!r}: it has no such split")
    source: Source = (
        dataset
        if isinstance(dataset, Source)
        else TorchSource(
            dataset,
            version=settings.version,
            time=settings.time,
            text=cast("Any", settings.text),
            random=settings.random,
        )
    )
    return source if by_split else SplitOf(source, split, splits=data.splits, seed=data.seed)


# ----------------------------------------------------------------------------------------------------------
# An encoder of the user's own, named in a configuration by its import path (`user_code.py`).


def user_encoder(settings: EncoderConfig, schema: Schema) -> Encoder:
    """Return the encoder that `encoder.target` names, frozen, with the weights of `encoder.checkpoint`.

    Without a checkpoint its weights follow from `encoder.seed`. What the target makes may be an
    `nn.Module`, a function of tensors, or an `Encoder`, which is taken as it is.

    Args:
        settings: The section `encoder`.
        schema: Fields of the samples; they tell whether there is time to go through by steps.

    Raises:
        ConfigError: There is no such target, it cannot be called so, or settings contradict each other.
        EncoderError: The target fails (names file and line), the checkpoint does not fit, a weight has no
            value yet, or the code cannot be described.
    """
    made = _made(settings)
    if isinstance(made, Encoder) and not isinstance(made, nn.Module):
        own = {*OF_MODULE, "checkpoint"} - {"target", "arguments"}
        if given := sorted(settings.model_fields_set & own):
            raise ConfigError(
                f"encoder.target {settings.target} makes a {type(made).__qualname__}, an encoder with "
                f"settings of its own, so encoder.{given[0]} has no effect",
                hint="Leave it out",
            )
        return made
    owner = bound_module(made)
    if settings.checkpoint is not None:
        if owner is None:
            raise ConfigError(
                f"encoder.checkpoint is given, but encoder.target {settings.target} makes a "
                f"{type(made).__qualname__} without weights",
                hint="Leave the checkpoint out",
            )
        key, prefix = settings.checkpoint_key, settings.checkpoint_prefix
        load_checkpoint(owner, settings.checkpoint, key=key, prefix=prefix)
    elif given := [name for name in ("checkpoint_key", "checkpoint_prefix") if getattr(settings, name)]:
        raise ConfigError(
            f"encoder.{given[0]} is given without encoder.checkpoint", hint="Give both, or neither"
        )
    if owner is not None:  # ours alone, so freezing it is nothing to warn of
        owner.eval()
        for parameter in owner.parameters():
            parameter.requires_grad = False
    return ModuleEncoder(
        made,
        field=settings.field,
        output=settings.output,
        time=settings.time or _time(as_names(settings.field), schema),
        version=settings.version,
    )


def _made(settings: EncoderConfig) -> Any:
    """Return what the target makes of the arguments, with weights that follow from the seed."""
    code = UserCode(
        setting="encoder.target",
        spec=settings.target or "",
        of="an nn.Module class or of a function that makes a module",
        arguments="encoder.arguments",
        error=EncoderError,
    )
    if settings.target is None:
        example = "encoder.target=mypackage.models:Encoder"
        raise ConfigError(f"encoder.kind=module needs encoder.target, as {example}", hint=code.form)
    arguments: Mapping[str, Any] = settings.arguments or {}
    with seeded(settings.seed):
        target = code.find()
    if isinstance(target, nn.Module):
        return _ready(target, settings)
    with seeded(settings.seed):  # the first import of its file may have drawn numbers
        made = code.call(target, arguments)
    if not callable(made) and not isinstance(made, Encoder):
        raise ConfigError(
            f"encoder.target {settings.target} gives a {type(made).__qualname__}, which encodes nothing",
            hint=code.form,
        )
    return made


def _ready(module: nn.Module, settings: EncoderConfig) -> nn.Module:
    """A module that its file makes itself: what its weights are, only a checkpoint can tell."""
    if settings.arguments:
        raise ConfigError(
            f"encoder.target {settings.target} is a module already, and takes no encoder.arguments",
            hint="Leave them out, or name its class",
        )
    if settings.checkpoint is None and settings.version is None and [*module.parameters()]:
        raise ConfigError(
            f"encoder.target {settings.target} is a module already, so encoder.seed cannot decide its "
            "weights",
            hint="Name its class or a function that makes it, or give encoder.checkpoint",
        )
    return module


def _time(fields: tuple[str, ...], schema: Schema) -> Time:
    known = [schema[name].time for name in fields if name in schema]
    return "steps" if known and all(known) else "none"


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Make weights on the CPU that follow from `seed`; the caller's random states are put back afterwards."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
