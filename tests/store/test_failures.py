"""Failures are durable when `quarantine` returns, however many there are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stoker.errors import RecordError
from tests.store.fakes import FakeSource
from tests.store.test_folder import failure, open_x


def test_many_failures_are_kept_by_one_write_and_two_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_x(tmp_path, FakeSource())
    synced: list[bool] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)), sync(fd))[1]
    )

    folder.quarantine_many([failure(number) for number in range(10)])
    assert synced == [False, True]  # the file, then the folder that names it
    folder.quarantine_many([])
    folder.quarantine(failure(10))

    assert synced == [False, True, False]
    assert [*folder.failures()] == [*range(11)]
    with pytest.raises(RecordError):
        folder.quarantine_many([failure(11), failure(16)])
    assert 11 not in folder.failures()
