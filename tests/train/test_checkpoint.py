from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stoker.errors import CorruptError
from stoker.train import checkpoint as module
from stoker.train.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint, save_checkpoint


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


def test_a_kill_while_writing_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, "last", make(1))

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_sync_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, "last", make(2))

    assert names(tmp_path) == ["last-000000001"]


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
