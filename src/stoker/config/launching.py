"""Settings of rented machines, and of the script that one starts with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.config.section import (
    CountInt,
    Flag,
    Fraction,
    Names,
    Place,
    PositiveFloat,
    PositiveInt,
    SettingsSection,
)


class LaunchConfig(SettingsSection):
    """Machines that `stoker launch` starts, and what they do (docs/launch.md)."""

    repo: str | None = None
    """Where the machine gets the code from; null: the remote `origin`, over https."""
    install: Names = "."
    """What pip installs there: `.` (the code itself), or requirements with versions, as `stoker==0.1.0`."""
    constraints: Place | None = None
    """A file of the repository with pinned versions, for pip's `-c`."""
    secrets: tuple[str, ...] = ()
    """Names of variables that the machine gets from here; values are in no script, command or log."""
    upload: str | None = None
    """A place of rclone, `remote:path`, for logs and checkpoints; a later machine goes on from there."""
    upload_minutes: PositiveFloat = 10.0
    """Minutes between two uploads while the run goes on; there is one more at its end."""
    cache: str | None = None
    """A place of rclone that caches are pulled from and pushed to; null: they stay on the machine's disk."""
    auto_shutdown: Flag = True
    """Stop the machine (never destroy it) on success, failure and stall."""
    stall_minutes: PositiveFloat = 30.0
    """Minutes without a line in the log after which the run counts as stalled."""
    grace: PositiveInt = 120
    """Seconds from a notice to the end: three quarters to seal and to save, the rest to upload."""
    workdir: str = "/workspace/stoker"
    """Folder of code, data and logs on the machine."""
    image: str = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel"
    """Docker image."""
    gpu: str | None = None
    """Name of the GPU, as `RTX_4090`; null: any."""
    gpus: PositiveInt = 1
    """GPUs of one machine; as many ranks encode and train, under torchrun."""
    gpu_memory: CountInt = 0
    """Least memory of one GPU, in GiB."""
    disk: PositiveInt = 64
    """Disk, in GiB."""
    region: Annotated[str, Field(pattern=r"^[A-Z]{2}$", examples=["DE", "US"])] | None = None
    """Country of the machine; null: any."""
    max_price: PositiveFloat | None = None
    """Most that an hour may cost, in dollars; null: any."""
    reliability: Fraction = 0.98
    """Least part of the time that the machine was up, as the provider counts."""
    scratch: Flag = True
    """Under Slurm, read data on network storage from copies on the node's own disk (docs/staging.md)."""
