"""A transform treats a tensor by its role in the batch; a field or a condition may have any name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import Loader, RecordBatch, WindowBatch, Windows
from stoker.loader.order import example_keys
from stoker.transforms import Flip, Noise, Normalize, Views
from tests.loader.caches import write_cache

COUNT = 64
KEYS = example_keys(0, 0, torch.arange(COUNT))
NAMES = ("future", "z0", "z1", "z2", "cond", "mask", "task", "tasks", "index", "position")


def window(horizon: int, *names: str) -> WindowBatch:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(COUNT, horizon + 1, 4, 3, generator=generator)
    conditions = {name: torch.randn(COUNT, 3, generator=generator) for name in names}
    index = torch.zeros(COUNT, 2, dtype=torch.int64)
    return WindowBatch(z[:, 0], z[:, 1], z[:, 2:] if horizon > 1 else None, conditions, index, (0, COUNT))


def test_fields_of_records_called_like_states_get_noise_of_their_own() -> None:
    batch = RecordBatch({n: torch.zeros(COUNT, 3, 5) for n in ("z0", "z1", "future")}, index=KEYS)
    batch.position = (0, COUNT)

    made = Noise(1.0, fields=("z0", "z1", "future"))(batch, KEYS)

    drawn = torch.stack([made[name] for name in ("z0", "z1", "future")]).flatten(1)
    assert torch.corrcoef(drawn).sub(torch.eye(3)).abs().max() < 0.2
    assert not torch.equal(made["future"][:, 0], made["future"][:, 1])


@pytest.mark.parametrize("horizon", [1, 3])
def test_conditions_of_any_name_stay_conditions(horizon: int) -> None:
    batch, plain = window(horizon, *NAMES), window(horizon)

    for transform in (Noise(0.5), Normalize(mean=1.0, std=2.0), Flip(-1), Views(transforms=[Noise(0.5)])):
        made, expected = transform(batch, KEYS), transform(plain, KEYS)

        assert torch.equal(made.z0, expected.z0)
        assert torch.equal(made.z1, expected.z1)
        assert (made.future is None) == (horizon == 1)
        assert made.future is None or torch.equal(made.future, expected.future)
        assert set(made.cond) == set(NAMES)
        assert all(torch.equal(made.cond[name], batch.cond[name]) for name in NAMES)


@pytest.mark.parametrize("name", ["cond", "mask", "task", "position"])
def test_a_condition_is_changed_where_it_is_named(name: str) -> None:
    batch = window(2, *NAMES)

    made = Normalize(mean=1.0, std=2.0, fields=(name,))(batch, KEYS)

    assert torch.allclose(made.cond[name], (batch.cond[name] - 1) / 2)
    assert made.z0 is batch.z0
    assert all(made.cond[other] is batch.cond[other] for other in NAMES if other != name)


@pytest.mark.parametrize("name", ["z0", "z1", "future"])
def test_a_name_of_a_state_and_of_a_condition_is_refused_and_not_guessed(name: str) -> None:
    for horizon in (1, 2):
        with pytest.raises(ConfigError, match=repr(name)):
            Normalize(mean=1.0, std=2.0, fields=(name,))(window(horizon, name), KEYS)
        assert Normalize(mean=1.0, std=2.0, fields=(name,))(window(horizon, "nu"), KEYS) is not None


def test_a_loader_hands_out_a_condition_called_future_as_it_was_stored(tmp_path: Path) -> None:
    stored = torch.arange(2.0 * 6).view(6, 2)
    cache = write_cache(tmp_path, {"latent": torch.randn(6, 4, 3), "future": stored}, timed=("latent",))

    for horizon in (1, 2):
        loader = Loader(cache, 4, windows=Windows(horizon=horizon), transforms=[Noise(0.5)], shuffle=True)
        for batch in loader:
            assert (batch.future is None) == (horizon == 1)
            assert torch.equal(batch.cond["future"], stored[batch.index[:, 0]])
