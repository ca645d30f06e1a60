"""The start-up script with the real commands: a fresh machine, and the same one started again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stoker.launch.script import StartScript
from tests.conftest import write_burgers
from tests.launch.box import KEY, SECRET, a_box, a_repository

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed"),
]
CONFIG = """\
data: {files: [raw/a.hdf5], splits: {train: 0.8, val: 0.1, test: 0.1}}
latent: {dim: 4, tokens: 2}
model: {width: 8, depth: 1, heads: 1}
training: {batch_size: 4, epochs: 1, device: cpu, run_dir: runs/a}
"""


@pytest.mark.timeout(600)
def test_a_fresh_machine_a_second_start_and_another_machine_with_the_cache(tmp_path: Path) -> None:
    data = write_burgers(tmp_path / "far.hdf5", samples=20)
    fetch = (
        f"fetch: {{folder: raw, files: {{a.hdf5: {{from: 'far:{data}', bytes: {data.stat().st_size}}}}}}}\n"
    )
    commit = a_repository(tmp_path / "repo", {"c.yaml": CONFIG + fetch})
    outputs: list[str] = []
    encoded: list[int] = []
    for name, starts in (("one", 2), ("two", 1)):
        with a_box(tmp_path / name, real=True) as box:
            script = StartScript(
                target="vast", name="run", repo=str(tmp_path / "repo"), commit=commit, config="c.yaml",
                overrides=("training.epochs=1",), workdir=str(box.workdir), fetch=True,
                cache_dir="data/latent_cache", run_dir="runs/a", upload=f"far:{tmp_path}/up",
                cache=f"far:{tmp_path}/cache", secrets=("PLANTED",), api=box.url, stall_minutes=5.0,
            ).render()  # fmt: skip
            for _ in range(starts):
                code, output = box.run(script, timeout=280)
                assert code == 0, output
                outputs.append(output)
                encoded.append(output.count("encoded") and "nothing to encode" not in output)
            assert box.stopped()
            assert len(box.asked) == starts

    assert encoded == [True, False, False], "a cache that is there was encoded again"
    assert (tmp_path / "up/run/run.log").exists()
    assert (tmp_path / "up/run/run/metrics.jsonl").exists()
    texts = [path.read_bytes() for path in (tmp_path / "up").rglob("*") if path.is_file()]
    assert not [text for text in texts if SECRET.encode() in text or KEY.encode() in text]
    assert not [text for text in outputs if SECRET in text or KEY in text]
