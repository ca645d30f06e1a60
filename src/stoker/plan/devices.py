"""Devices by name: what is asked for, what `auto` means here, and whether it is there."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from stoker.errors import ConfigError, ResourceError, arg

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stoker")
_said: set[str] = set()


def device_name(wanted: object) -> str:
    """Return the name of a device: `auto`, `cpu`, `cuda` or `cuda:1`; a `torch.device` has one too.

    >>> device_name("cuda:1")
    'cuda:1'

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device.
    """
    name = str(wanted)
    if name == "all":
        raise ConfigError(
            "device is 'all', and one device is expected: auto, cpu, cuda or cuda:0. To encode on all GPUs "
            "give stoker.precompute(device='all'), or stoker.cached(precompute={'device': 'all'})"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device {wanted!r} is not known. Expected auto, cpu, cuda or cuda:0")
    return name


def automatic_device() -> tuple[str, str]:
    """Return the device that `auto` stands for, and why it is that one.

    A GPU where torch sees one (the current one), else the CPU.
    """
    import torch

    if count := torch.cuda.device_count():
        return "cuda", f"torch sees {count} CUDA device{'s' * (count > 1)}"
    return "cpu", f"torch {torch.__version__} sees no CUDA device"


def resolve_device(wanted: object, say: Callable[[str], None] = log.info) -> torch.device:
    """Return the device to compute on; of `auto` a line says once in a process which it is and why.

    Args:
        wanted: `auto`, `cpu`, `cuda`, `cuda:1`, or a `torch.device`.
        say: Takes that line; the log by default.

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device.
        ResourceError: There is no such GPU, or torch was built without CUDA.
    """
    import torch

    name = device_name(wanted)
    if name == "auto":
        name, why = automatic_device()
        line = f"device is auto: {name} is used, since {why}"
        if line not in _said:
            _said.add(line)
            say(line)
    else:
        require_devices(name)
    if name == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # the current one may be another later
    return torch.device(name)


def require_devices(*names: str) -> None:
    """Check that devices named as by `device_name` are there; `auto` always is.

    Raises:
        ResourceError: There is no such GPU, or torch was built without CUDA.
    """
    gpus = {name: int(name.partition(":")[2] or 0) for name in names if name.startswith("cuda")}
    if not gpus:
        return
    import torch

    count = torch.cuda.device_count()
    for name, place in gpus.items():
        if place >= count:
            there = ", ".join(f"cuda:{one}" for one in range(count)) or "no CUDA device"
            raise ResourceError(
                f"device {name} is not there: torch {torch.__version__} sees {there}. Use "
                f"{arg('device', 'auto')}, which takes a GPU where there is one, or {arg('device', 'cpu')}; "
                "nvidia-smi shows whether the driver works"
            )


def encode_on(wanted: object) -> tuple[str, ...]:
    """Return devices by name: one, several, or with `all` every GPU that this process sees.

    One alone is returned as it is named, `auto` included: it is resolved where encoding begins, which may be
    on another machine.

    >>> encode_on("cpu"), encode_on(["cpu", "cpu"])
    (('cpu',), ('cpu', 'cpu'))

    Raises:
        ConfigError: A name is no device that encoders run on.
        ResourceError: Of several one is not there; or all are asked for, and there is no GPU.
    """
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    names = tuple(cast("Sequence[object]", wanted)) if several else (wanted,)
    if names == ("all",):
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise ResourceError(
                f"device is all, and torch {torch.__version__} sees no CUDA device. Use "
                f"{arg('device', 'auto')}, which takes a GPU where there is one, or {arg('device', 'cpu')}"
            )
        return tuple(f"cuda:{place}" for place in range(count))
    if not names:
        raise ConfigError("devices is empty. Name at least one, as [cuda:0, cuda:1], or say all")
    if len(names) == 1:
        return (device_name(names[0]),)
    return tuple(str(resolve_device(name)) for name in names)
