"""The first epoch, while its cache is filled: killed at any time it continues, and no path changes a byte."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import stoker
from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.precompute import queue, run
from stoker.schema import Field
from tests.kit import forked as subprocess
from tests.precompute.fake_sources import FakeSource
from tests.precompute.first_epoch import digests, loader_of

ROOT = Path(__file__).parents[2]
SAMPLES = 120


def start(folder: Path, delay_s: float, said: Path, *ranks: int, samples: int = SAMPLES) -> Any:
    words = (folder, samples, delay_s, *ranks)
    command = [sys.executable, "-m", "tests.precompute.first_epoch", *map(str, words)]
    with said.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_first_epoch_killed_at_any_time_continues_with_the_same_batches(
    tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    filled, complete = (digests(loader_of(tmp_path / "whole", SAMPLES, 0.0)) for _ in range(2))
    assert filled != complete
    assert len(filled) == len(complete) == SAMPLES // 5
    capsys.readouterr()
    chance = random.Random(kills)
    folder, said, killed = tmp_path / "killed", tmp_path / "said.txt", []

    for turn in range(kills):
        process = start(folder, 0.02, said)
        lines = chance.randrange(2, SAMPLES // 5) if turn % 3 else 0
        while said.read_text().count("\n") < lines and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.2 if lines else 2.0))
        process.kill()
        _, err = process.communicate(timeout=60)
        found, *batches = said.read_text().split() or ["killed before the call was over"]
        expected = complete if found == "complete" else filled
        assert "Traceback" not in err, err
        assert batches == [*expected, "end"][: len(batches)], (turn, found)
        if found == "complete":
            folder = tmp_path / f"killed-{turn}"
        else:
            killed.append(len(batches))

    _, err = start(folder, 0.0, said).communicate(timeout=120)
    found, *batches = said.read_text().split()
    assert batches == [*(complete if found == "complete" else filled), "end"], err
    assert any(0 < count < SAMPLES // 5 for count in killed), f"no kill fell into an epoch: {killed}"


@pytest.mark.timeout(300)
def test_ranks_of_a_first_epoch_have_the_batches_of_one_rank(tmp_path: Path) -> None:
    """While another process fills, and where one of them has to wait for it. Then all is stored."""
    filled, complete = (
        [
            batch.split(":")[1].split("-")
            for batch in digests(loader_of(tmp_path / "alone", SAMPLES, 0.0, **one))
        ]
        for one in (
            {"batch_size": 10, "drop_last": True},
            {"batch_size": 10, "drop_last": True, "wait": True},
        )
    )
    for run_number, expected in enumerate((filled, complete)):
        (tmp_path / "ranks.meeting").unlink(missing_ok=True)
        said = [tmp_path / f"said-{rank}" for rank in range(2)]
        ranks = [start(tmp_path / "ranks", 0.06, said[rank], rank, 2) for rank in range(2)]
        for rank in ranks:
            _, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err
        words = [text.read_text().split() for text in said]
        assert [own[0] for own in words] == [("incomplete", "complete")[run_number]] * 2
        assert [own[-1] for own in words] == ["end", "end"]
        by_rank = [[batch.split(":")[1].split("-") for batch in own[1:-1]] for own in words]
        assert [a + b for a, b in zip(*by_rank, strict=True)] == expected


@pytest.mark.timeout(300)
def test_ranks_that_call_for_different_caches_are_told(tmp_path: Path) -> None:
    ranks = [
        start(tmp_path / "c", 0.0, tmp_path / f"said-{rank}", rank, 2, samples=20 + rank) for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=120)
        assert rank.returncode != 0
        assert "Call precompute with wait=False for the same caches in the same order on all ranks" in err


class Drawn(FakeSource):
    """Samples of one field of any dtype, drawn from their number."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__((count,), run=7)
        self.shape, self.dtype = shape, dtype

    def schema(self) -> Any:
        return {"data": Field(shape=self.shape, dtype=self.dtype)}

    def identity(self) -> Any:
        found = super().identity()
        return type(found)(
            kind="drawn/1", parts=found.parts, settings={"shape": list(self.shape), "dtype": self.dtype}
        )

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Any:
        generator = np.random.default_rng(number)
        if self.dtype == "float32":
            return {"data": generator.normal(size=self.shape).astype("f4")}
        return {"data": generator.integers(0, 200, self.shape).astype(self.dtype)}


class Doubled:
    """Twice the sample, in batches of any size."""

    independent_steps = False

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def schema(self, sample_schema: Any) -> Any:
        return sample_schema

    def encode_batch_size(self, sample_schema: Any) -> Any:
        return EncodeBatchSize(samples=self.samples)

    def encode(self, batch: Any) -> Any:
        return {"data": batch["data"] + batch["data"]}

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def to(self, device: Any) -> None: ...

    def identity(self) -> Any:
        return {"kind": "doubled", "samples": self.samples}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_no_byte_depends_on_the_way_that_a_record_took(examples: int) -> None:
    """Read and encoded in the calling process, in children, first here then there, and while it is served."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        count=st.integers(1, 90),
        shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "uint8", "int64"]),
        encoded=st.booleans(),
        batch=st.integers(1, 40),
        seed=st.integers(0, 3),
    )
    def check(count: int, shape: Any, dtype: str, encoded: bool, batch: int, seed: int) -> None:
        source = Drawn(count, shape, dtype)
        encoder: Encoder | None = Doubled(batch) if encoded else None
        times = 2 if encoded else 1
        expected = [(source.read(n)["data"] * times).astype(dtype).tobytes() for n in range(count)]
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            folder = Path(name)
            for workers in (0, 1):
                cache = stoker.precompute(source, encoder, folder / str(workers), name="c", workers=workers)
                assert [cache[n]["data"].numpy().tobytes() for n in range(count)] == expected, workers
            patch.setattr(run, "FEW_GROUPS", 0)  # else this process encodes few batches alone
            patch.setattr(queue, "FIRST_START_S", 0.0)  # children follow after the first moments
            patch.setattr(run, "_ESTIMATE_FROM_S", 0.0)
            patch.setattr(run.StageBuilder, "is_ready", lambda _: True)
            cache = stoker.precompute(source, encoder, folder / "head", name="c")
            assert [cache[n]["data"].numpy().tobytes() for n in range(count)] == expected
            loader = stoker.cached(
                source,
                encoder,
                cache_dir=folder / "served",
                batch_size=batch,
                seed=seed,
                wait=False,
                shuffle=True,
            )
            for epoch in range(2):
                found = {
                    int(number): value.numpy().tobytes()
                    for served in loader
                    for number, value in zip(served["index"], served["data"], strict=True)
                }
                assert [found[n] for n in range(count)] == expected, epoch

    check()
