"""How many samples a call of the encoder has: fixed, given, or measured once and then kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.config import Config
from stoker.encoders.module import ModuleEncoder
from stoker.precompute.measure import EncodeBatch, measure_encode_batch
from stoker.run.caches import locate
from stoker.run.context import Run
from stoker.run.precompute import precompute_config
from stoker.schema import Field
from tests.cli.commands import run_json

Configure = Callable[..., Config]
SCHEMA = {"data": Field(shape=(16,), dtype="float32")}
AUTO = "precompute.encode_batch=auto"


def groups(config: Config) -> list[int]:
    return [result.cache.recipe.encode_batch.samples for result in precompute_config(Run(config)).caches]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that were measured on; each time another number comes out."""
    calls: list[str] = []

    def measure(_encoder: Any, _schema: Any, device: str, **_: Any) -> EncodeBatch:
        calls.append(device)
        return EncodeBatch(samples=2 + len(calls), device=device, trials=(), why="test")

    monkeypatch.setattr(sys.modules["stoker.precompute.measure"], "measure_encode_batch", measure)
    return calls


def test_what_is_measured_holds_for_all_later_runs(configure: Configure, measured: list[str]) -> None:
    assert groups(configure(AUTO, "data.split=train")) == [3, 3]
    assert groups(configure(AUTO)) == [3, 3]
    assert not locate(Run(configure(AUTO)).for_task("burgers1d"), "train").missing
    assert measured == ["cpu"]
    assert groups(configure(AUTO, "latent.dim=4")) == [4, 4]  # another encoder


def test_the_number_of_a_cache_that_is_there_is_kept(configure: Configure, measured: list[str]) -> None:
    by_rule = groups(configure("data.split=val"))
    assert groups(configure("precompute.encode_batch=5")) == [5, 5]

    again = precompute_config(Run(configure(AUTO)))

    assert [result.cache.recipe.encode_batch.samples for result in again.caches] == [5, 5]
    assert [result.encoded for result in again.caches] == [0, 0]
    assert (by_rule != [5], measured) == (True, [])


def test_nothing_is_measured_to_look(configure: Configure, measured: list[str], tmp_path: Path) -> None:
    assert locate(Run(configure(AUTO)).for_task("burgers1d"), "train").missing == 12
    assert measured == []


def test_the_setting_is_honored(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(configure("data.split=val").to_yaml())

    (cache,) = run_json("precompute", "c.yaml", "precompute.encode_batch=3")["caches"]

    recipe = json.loads((Path(cache["path"]) / "recipe.json").read_text())
    assert recipe["group"] == {"samples": 3, "steps": None}


def test_without_an_encoder_the_number_counts_as_well(configure: Configure) -> None:
    assert groups(configure("encoder.kind=identity", "precompute.encode_batch=2")) == [2, 2]
    assert len(groups(configure("encoder.kind=identity", AUTO))) == 2


class Costly(nn.Module):
    """Work that grows with the samples; more than `limit` of them have no memory."""

    def __init__(self, limit: int = 10**9) -> None:
        super().__init__()
        self.limit = limit
        self.weight = nn.Parameter(torch.ones(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise MemoryError
        y = x.repeat(1, 32)
        for _ in range(40):
            y = torch.stack([row @ self.weight for row in y])
        return y[:, :4]


def test_a_cheap_encoder_gets_more_samples_than_a_costly_one() -> None:
    cheap = measure_encode_batch(ModuleEncoder(nn.Linear(16, 4)), SCHEMA, budget_s=5)
    costly = measure_encode_batch(ModuleEncoder(Costly()), SCHEMA, budget_s=5)

    assert cheap.samples is not None
    assert costly.samples is not None
    assert cheap.samples > costly.samples
    assert [trial.samples for trial in cheap.trials][:3] == [1, 2, 4]


class Clock:
    """Time that passes in encoder calls alone: `call_s` says how long one takes, by its samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_s: Callable[[int], float]) -> None:
        self.now_s, self._call_s = 0.0, call_s
        self.sizes: list[int] = []
        """Samples of each call."""
        monkeypatch.setattr(sys.modules["stoker.precompute.measure"], "time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def encode(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.now_s += self._call_s(len(x))
        return x[..., :4]

    def measure(self, **settings: Any) -> EncodeBatch:
        encoder = ModuleEncoder(self.encode, version="1")
        encoder.schema(SCHEMA)
        self.now_s = 0.0
        self.sizes.clear()
        return measure_encode_batch(encoder, SCHEMA, **settings)


def test_the_advice_is_the_same_on_every_run_of_a_noisy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throughput ends at 16 samples. Now and then, all calls of a moment take three times as long."""
    found: list[int | None] = []
    for seed in range(20):
        slow = np.repeat(np.random.default_rng(seed).random(1000) < 0.15, 3)

        def call_s(samples: int, slow: Any = slow) -> float:
            return 0.004 * max(samples, 16) / 16 * (3.0 if slow[int(clock.now_s / 0.1)] else 1.0)

        clock = Clock(monkeypatch, call_s)
        found.append(clock.measure(most=128).samples)

    assert found == [16] * 20


def test_sizes_are_measured_in_turns_as_long_as_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda samples: 0.02 * samples)

    found = clock.measure()

    assert [(trial.samples, trial.rounds) for trial in found.trials] == [(1, 5), (2, 5), (4, 5)]
    assert clock.sizes[-6:] == [1, 1, 1, 2, 2, 4]  # the fifth round
    assert found.why == "throughput stopped rising"
    clock = Clock(monkeypatch, lambda samples: 2.0 + 0.02 * samples)
    some = clock.measure(budget_s=30.0)
    assert clock.now_s <= 30.0
    assert {trial.rounds for trial in some.trials} == {3}
    assert "too long" in some.why


def test_a_moment_of_load_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda _: 0.1 if 0.3 < clock.now_s < 1.5 else 0.01)

    assert clock.measure(most=128).samples == 128


def test_turns_that_differ_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    clock = Clock(monkeypatch, lambda samples: (0.2 + 0.05 * samples) * (1.0, 1.2, 1.4)[next(calls) % 3])

    found = clock.measure(most=16)

    assert 0.19 < max(trial.noise for trial in found.trials) < 0.41
    assert "%" in found.why
    assert "%" not in Clock(monkeypatch, lambda _: 0.2).measure(most=16).why


def test_the_search_ends_where_memory_or_samples_do() -> None:
    short = measure_encode_batch(ModuleEncoder(Costly(limit=1)), SCHEMA)
    few = measure_encode_batch(ModuleEncoder(nn.Linear(16, 4)), SCHEMA, most=3)

    assert (short.samples, "no memory for 2" in short.why) == (1, True)
    assert max(trial.samples for trial in few.trials) == 2


def test_samples_that_go_alone_are_left_to_the_fixed_rule() -> None:
    ragged = {"data": Field(shape=(-1, 16), dtype="float32", time=True, ragged=True)}
    long = {"data": Field(shape=(4096, 8192), dtype="float32", time=True)}

    for schema, time in ((ragged, "whole"), (long, "steps")):
        encoder = ModuleEncoder(lambda x: x[..., :4] + 1, time=time)  # pyright: ignore[reportArgumentType]
        assert measure_encode_batch(encoder, schema).samples is None


def test_bench_says_what_to_set(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(configure(AUTO).to_yaml())

    found = run_json("bench", "encode", "c.yaml")

    assert found["setting"] == f"precompute.encode_batch={found['samples']}"
    assert (found["in_force"], found["device"]) == (None, "cpu")
    assert not (tmp_path / "data").exists()


def test_it_is_measured_where_auto_runs(configure: Configure, measured: list[str]) -> None:
    assert groups(configure(AUTO, "data.split=train", "training.device=auto")) == [3, 3]

    assert measured[0] in {"cpu", "cuda:0"}
