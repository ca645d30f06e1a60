"""What kind of storage a path lies on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from stoker.runtime import mounts
from stoker.runtime.mounts import Mount, are_local

ELSEWHERE = Path("/dev/shm")


@pytest.mark.skipif(not ELSEWHERE.is_dir(), reason="no file system in memory")
def test_a_link_to_another_machine_is_not_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def storage_of(path: Path) -> Mount:
        far = Path(os.path.realpath(path)).is_relative_to(ELSEWHERE)
        return Mount(point="/", kind="nfs4" if far else "ext4", source="x")

    monkeypatch.setattr(mounts, "storage_of", storage_of)
    near, link = tmp_path / "near.h5", tmp_path / "link.h5"
    near.touch()
    with tempfile.NamedTemporaryFile(dir=ELSEWHERE) as far:
        link.symlink_to(far.name)
        if near.stat().st_dev == link.stat().st_dev:
            pytest.skip("both are on one device")
        assert are_local([near, tmp_path / "missing.h5"])
        assert not are_local([near, link])
        assert not are_local([link.parent, link])
