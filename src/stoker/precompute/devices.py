"""Which devices encoders run on, from what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker.errors import ConfigError


def encode_on(wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Devices by name: one, several, or with `all` every GPU that this process sees.

    >>> encode_on("cpu"), encode_on(["cpu", "cpu"])
    (('cpu',), ('cpu', 'cpu'))

    Raises:
        ConfigError: There is no such device, or no GPU where all are asked for.
    """
    gpus = torch.cuda.device_count()
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    if names == ("all",):
        if not gpus:
            raise ConfigError("devices: all, and this process sees no GPU. Name them, as [cpu]")
        return tuple(f"cuda:{place}" for place in range(gpus))
    if not names:
        raise ConfigError("devices is empty. Name at least one, as [cuda:0, cuda:1], or say all")
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:  # whose text lists what only other builds of torch know
            device = None
        if device is None or (len(names) > 1 and device.type not in ("cpu", "cuda")):
            raise ConfigError(f"device {name!r} is none that encoders run on. Expected cpu, cuda or cuda:1")
        if len(names) > 1 and device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(f"device {name!r} is asked for, and this process sees {gpus} GPUs")
    return names
