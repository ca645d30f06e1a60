"""What kind of storage a path lies on, from the text of `/proc/self/mountinfo`: arithmetic on names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs",
    "orangefs", "pvfs2", "panfs", "wekafs", "ncpfs", "coda", "davfs", "ocfs2", "gfs2", "vboxsf", "prl_fs",
    "fuse",
})  # fmt: skip
"""Types of file systems whose data is on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Where a path is mounted."""

    point: str
    kind: str
    """Type of the file system, as `nfs4` or `fuse.sshfs`."""
    source: str
    """What is mounted, as `server:/export`."""

    @property
    def network(self) -> bool:
        """Whether its data is on another machine: by type; programs that serve a file system count as such.

        >>> Mount(point="/", kind="fuse.sshfs", source="host:").network
        True
        """
        return self.kind in NETWORK or self.kind.startswith("fuse.")

    @property
    def in_memory(self) -> bool:
        """Whether what is written there takes memory."""
        return self.kind in ("tmpfs", "ramfs")


def mount_of(path: PurePosixPath, mountinfo: str) -> Mount | None:
    """The mount that an absolute path without links lies on; None where nothing is known.

    >>> text = "1 0 0:1 / / rw - ext4 /dev/sda rw\\n2 1 0:2 / /my\\\\040nfs rw shared:1 - nfs4 host:/x rw"
    >>> mount_of(PurePosixPath("/my nfs/a.h5"), text).kind, mount_of(PurePosixPath("/nfs/a"), text).kind
    ('nfs4', 'ext4')
    """
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = _plain(fields[4])
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point=point, kind=kind[0], source=_plain(kind[1]))
    return found


def _plain(text: str) -> str:
    """Mount points are written with octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
