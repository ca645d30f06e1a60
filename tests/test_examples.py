"""The examples run as they are, and come to what they promise."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, run: Any = subprocess.run) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_dataset_in_ten_lines_is_encoded_once_and_trained_on(tmp_path: Path) -> None:
    out = run("torch_dataset.py", str(tmp_path))

    found = re.search(r"NRMSE ([\d.]+) \(persistence ([\d.]+)\)", out)
    assert found
    assert float(found[1]) < float(found[2])


def test_one_line_serves_a_dataset(tmp_path: Path) -> None:
    assert "1,000 examples" in run("one_line.py", str(tmp_path))
    assert "1,000 examples" in run("one_line.py", str(tmp_path), run=forked.run)


@pytest.mark.slow
def test_two_tasks_come_in_one_stream_as_often_as_their_weights_say(tmp_path: Path) -> None:
    out = run("mixture.py", str(tmp_path))

    assert "conditions rate, speed" in out
    assert "steps {'fading': 8, 'plain': 24}" in out


@pytest.mark.slow
def test_rows_of_a_database_are_cached_and_trained_on(tmp_path: Path) -> None:
    out = run("radio_rows.py", str(tmp_path))
    counts = re.search(r"(\d+) \+ (\d+) rows", out)
    found = re.search(r"rows: ([\d,]+) m off, ([\d,]+) m before", out)

    assert counts
    assert int(counts[1]) + int(counts[2]) == 600
    assert abs(int(counts[1]) - 480) < 40
    assert found
    assert int(found[1].replace(",", "")) < 0.8 * int(found[2].replace(",", ""))


@pytest.mark.parametrize(
    ("name", "package", "says"),
    [
        ("lightning_trainer.py", "lightning", "100 steps, 5 epochs, Loader("),
        ("hf_trainer.py", "accelerate", "100 steps"),
        ("accelerate_loop.py", "accelerate", "epoch 2: Loader("),
    ],
)
def test_a_run_in_a_trainer_is_resumed(tmp_path: Path, name: str, package: str, says: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'stoker[trainers]'")

    assert says in run(name, str(tmp_path))


@pytest.mark.slow
def test_boxes_of_real_images_are_learned_and_the_second_start_decodes_nothing(
    tmp_path: Path, shared_data: Path
) -> None:
    """If boxes did not lie where their cells are, guessing would not be beaten by this much in 3 epochs."""
    root = str(shared_data / "images_bccd" / "BCCD")

    def shards() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}

    out = run("images_bccd.py", root, str(tmp_path), "3")
    written = shards()
    again = run("images_bccd.py", root, str(tmp_path), "1")

    assert "364 images" in out
    found = re.search(r"test loss ([\d.]+) \(guessing ([\d.]+)\)", out)
    assert found
    assert float(found[1]) < 0.75 * float(found[2])
    assert "364 images" in again
    assert written
    assert shards() == written


def test_an_example_that_needs_arguments_says_which(tmp_path: Path) -> None:
    for name in ("images_dinov2.py", "images_bccd.py"):
        command = [sys.executable, str(EXAMPLES / name)]
        done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode == 2
        assert "usage" in done.stderr
        assert "Traceback" not in done.stderr
        assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_linear_layer_on_features_of_images(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'stoker[features]'")

    found = re.search(
        r"(\d+) % of the test images are right", run("images_dinov2.py", "--out", str(tmp_path))
    )

    assert found
    assert int(found[1]) > 80
