"""What kind of storage a path lies on, from the text of `/proc/self/mountinfo`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs",
    "orangefs", "pvfs2", "panfs", "wekafs", "ncpfs", "coda", "davfs", "ocfs2", "gfs2", "vboxsf", "prl_fs",
    "fuse",
})  # fmt: skip
"""Types of file systems whose data is on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Mount point of a path."""

    point: str
    kind: str
    """Type of the file system, as `nfs4` or `fuse.sshfs`."""
    source: str
    """The mounted device, as `server:/export`."""

    @property
    def network(self) -> bool:
        """True if its data is on another machine: by type; programs that serve a file system count as such.

        >>> Mount(point="/", kind="fuse.sshfs", source="host:").network
        True
        """
        return self.kind in NETWORK or self.kind.startswith("fuse.")

    @property
    def in_memory(self) -> bool:
        """True if what is written there takes memory."""
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: PurePosixPath, mountinfo: str) -> Mount | None:
    """Return the mount that an absolute path without links lies on; None where nothing is known.

    >>> text = "1 0 0:1 / / rw - ext4 /dev/sda rw\\n2 1 0:2 / /my\\\\040nfs rw shared:1 - nfs4 host:/x rw"
    >>> mount_of(PurePosixPath("/my nfs/a.h5"), text).kind, mount_of(PurePosixPath("/nfs/a"), text).kind
    ('nfs4', 'ext4')
    """
    found: Mount | None = None
    for _, point, kind in mount_lines(mountinfo):
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point=point, kind=kind[0], source=_plain(kind[1]))
    return found


def storage_of(path: Path, proc: Path = Path("/proc")) -> Mount | None:
    """Return what a path lies on, or will once it is there; None where the system does not say."""
    real = PurePosixPath(os.path.realpath(path))
    try:
        text = (proc / "self/mountinfo").read_text()
    except OSError:
        return None
    return mount_of(real, text)


def are_local(paths: Iterable[Path]) -> bool:
    """Return True if no path leads to another machine, as far as is known; links are followed."""
    devices: dict[int, Path] = {}
    for path in paths:
        with suppress(OSError):
            devices.setdefault(path.stat().st_dev, path)
    mounts = map(storage_of, devices.values())
    return not any(mount.network for mount in mounts if mount is not None)


def mount_lines(mountinfo: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each mount: its root in what is mounted, its mount point, and type, source and options."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 2:
            yield _plain(fields[3]), _plain(fields[4]), kind


def _plain(path: str) -> str:
    r"""Undo mountinfo's octal escapes.

    >>> _plain("/a\\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
