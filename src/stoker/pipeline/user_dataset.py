"""A torch Dataset of the user's own, named in a configuration by its import path (`user_code.py`)."""

from __future__ import annotations

from typing import Any, cast

from stoker.config.models import DataConfig
from stoker.errors import ConfigError, SourceError, SplitError
from stoker.pipeline.user_code import UserCode, takes_argument
from stoker.sources.protocol import Source
from stoker.sources.split_of import SplitOf
from stoker.sources.torch_dataset import TorchSource


def torch_source(data: DataConfig, task: str, split: str) -> Source:
    """The Dataset that `data.dataset` names, or the part of it that is `split`.

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
        raise ConfigError(f"data.kind=torch needs data.dataset, as data.dataset=mydata:Waves. {code.form}")
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
            identity=settings.identity,
            time=settings.time,
            text=cast("Any", settings.text),
            random=settings.random,
        )
    )
    return source if by_split else SplitOf(source, split, splits=data.splits, seed=data.seed)
