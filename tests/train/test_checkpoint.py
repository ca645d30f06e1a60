from __future__ import annotations

import errno
import io
import itertools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import CorruptError, ResourceError
from stoker.train.state import (
    KEPT,
    Checkpoint,
    Kind,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def make(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        model={"w": torch.full((3, 2), float(step)), "half": torch.ones(5, dtype=torch.bfloat16)},
        optimizer={"adamw.0.step": torch.tensor(float(step)), "rng.cpu": torch.arange(8, dtype=torch.uint8)},
        state={"loader": {"position": step}, "loss": 0.1 + 0.2},
    )


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    back = load_checkpoint(save_checkpoint(tmp_path, "last", make(7)))

    assert back.step == 7
    assert back.state == make(7).state
    for kind in ("model", "optimizer"):
        expected, found = getattr(make(7), kind), getattr(back, kind)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_last_and_one_best_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, "last", make(step))
        save_checkpoint(tmp_path, "best", make(step))

    assert names(tmp_path) == ["best-000000003", "last-000000002", "last-000000003"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "last", make(4))
    save_checkpoint(tmp_path, "last", make(4))

    assert names(tmp_path) == ["last-000000004"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path: Path, name: str, damage: str) -> None:
    save_checkpoint(tmp_path, "last", make(1))
    path = save_checkpoint(tmp_path, "last", make(2)) / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes({"truncate": data[:-1], "empty": b""}.get(damage, bytes(data)))
    if damage == "remove":
        path.unlink()
    said: list[str] = []

    found = newest_checkpoint(tmp_path, said.append)

    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "last-000000002" in said[0]


class Killed(BaseException):
    """Stands for SIGKILL: after it no call reaches the file system, so nothing can be tidied up either."""


class MortalFileSystem:
    """Counts the calls that reach the file system; number `dies_at` and all after it fail."""

    CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open", "fsync")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self.dies_at, self.count = dies_at, 0
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        monkeypatch.setattr(io, "open", self.counted(io.open))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count >= self.dies_at:
                raise Killed
            return call(*arguments, **named)

        return counting


def state_of(root: Path) -> str | None:
    """Which of the saved checkpoints would be resumed; nothing may have to be passed over for it."""
    said: list[str] = []
    found = newest_checkpoint(root, said.append)
    assert said == []
    return None if found is None else str(found.state["loss"])


@pytest.mark.parametrize("before", [[4], [2, 4], [2, 3]], ids=["same-step", "same-step-again", "later-step"])
@pytest.mark.parametrize("kind", ["last", "best"])
def test_killed_at_every_call_the_old_or_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int], kind: Kind
) -> None:
    seen: set[str | None] = set()
    for dies_at in itertools.count(1):
        root = tmp_path / str(dies_at)
        for step in before:
            save_checkpoint(root, kind, named(step, "old"))
        with monkeypatch.context() as patches:
            disk = MortalFileSystem(patches, dies_at)
            with suppress(Killed):
                save_checkpoint(root, kind, named(4, "new"))

        seen.add(found := state_of(root))
        assert found in ("old", "new")
        for folder in root.glob(f"{kind}-*"):
            load_checkpoint(folder)  # none is half removed
        save_checkpoint(root, kind, named(5, "after"))
        save_checkpoint(root, kind, named(6, "after"))
        assert [name for name in names(root) if not name.endswith(".part")] == [
            f"{kind}-{step:09d}" for step in (5, 6)[-KEPT[kind] :]
        ]
        if disk.count < dies_at:
            break

    assert seen == {"old", "new"}
    assert dies_at > 15


def named(step: int, loss: str) -> Checkpoint:
    return replace(make(step), state={"loss": loss})


def test_a_checkpoint_that_cannot_be_written_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, "last", named(4, "old"))

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match="make room and run again"):
            save_checkpoint(tmp_path, "last", named(4, "new"))

    assert state_of(tmp_path) == "old"
    assert len(names(tmp_path)) == 1


def test_a_damaged_checkpoint_of_a_later_step_is_not_kept_in_place_of_a_whole_one(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, "best", make(9)) / "state.json").write_text("[]")

    save_checkpoint(tmp_path, "best", make(7))

    assert names(tmp_path) == ["best-000000007"]


def test_the_best_serves_when_no_last_is_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "best", make(1))
    (save_checkpoint(tmp_path, "last", make(2)) / "state.json").write_text("[]")

    found = newest_checkpoint(tmp_path, lambda why: None)

    assert found is not None
    assert found.step == 1


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none", lambda why: None) is None


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "last", make(1)) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))

    with pytest.raises(CorruptError, match="format 2"):
        load_checkpoint(path.parent)
