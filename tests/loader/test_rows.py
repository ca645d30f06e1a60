"""Each row of a field as an example of its own: `Windows(horizon=0)`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError
from stoker.loader import Loader, Mixture, Windows
from stoker.store import Cache
from tests.loader.caches import folded, trajectories, write_cache
from tests.loader.test_partial import move

LENGTHS = [5, 1, 0, 9, 3, 7, 2, 8]
ROWS = [(number, row) for number, length in enumerate(LENGTHS) for row in range(length)]


def hidden(number: int) -> torch.Tensor:
    return torch.randn((LENGTHS[number], 4), generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Activations without time, tokens, and a label."""
    fields = {
        "hidden": [hidden(number) for number in range(len(LENGTHS))],
        "ids": [torch.arange(length) for length in LENGTHS],
        "label": torch.arange(len(LENGTHS)),
    }
    return write_cache(tmp_path_factory.mktemp("rows"), fields, shards=(3, 3))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    folder = tmp_path_factory.mktemp("timed")
    return write_cache(folder, trajectories(8, 5), timed=("latent", "time"), shards=(3,))


WINDOWS = Windows(horizon=0, field="hidden")


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("shuffle", [True, False, "block(2,8)"])
def test_each_row_comes_once_with_the_conditions_at_it(cache: Cache, tier: str, shuffle: Any) -> None:
    loader = Loader(cache, 6, windows=WINDOWS, tier=tier, shuffle=shuffle)
    found: list[tuple[int, ...]] = []
    for batch in loader:
        assert batch.z1 is None
        assert batch.future is None
        assert {*batch.cond} == {"ids", "label"}
        for place, (number, row) in enumerate(batch.index.tolist()):
            assert torch.equal(batch.z0[place], hidden(number)[row])
            assert batch.cond["ids"][place].tolist() == [row]
            assert batch.cond["label"][place].tolist() == [number]
            found.append((number, row))
    assert sorted(found) == ROWS
    assert len(loader) == -(-len(ROWS) // 6)
    assert (found == ROWS) == (shuffle is False)


def test_rows_of_trajectories_come_with_the_step_of_other_fields(timed: Cache) -> None:
    plain = list(Loader(timed, 5, windows=Windows(horizon=0, field="latent"), shuffle=True))
    assert sum(len(batch.z0) for batch in plain) == 8 * 5
    for batch in plain:
        for place, (number, step) in enumerate(batch.index.tolist()):
            record = timed[number]
            assert torch.equal(batch.z0[place], record["latent"][step])
            assert batch.cond["time"][place].item() == record["time"][step]
            assert batch.cond["nu"][place].item() == record["nu"]
            assert "dt" not in batch.cond
    several = next(iter(Loader(timed, 5, windows=Windows(horizon=0, field=("latent", "time")))))
    assert {*several.z0} == {"latent", "time"}
    assert several.z1 is None
    assert len(Loader(timed, 1, windows=Windows(horizon=0, field="latent", start_every=2))) == 8 * 3


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), world=st.sampled_from([1, 2]), stop=st.integers(0, 3))
def test_tiers_give_the_same_bytes_over_ranks_and_after_resuming(
    cache: Cache, seed: int, world: int, stop: int
) -> None:
    setting = {"windows": WINDOWS, "shuffle": True, "seed": seed, "world_size": world, "rank": world - 1}
    found = [list(Loader(cache, 4, tier=tier, **setting)) for tier in ("host", "disk", "device")]
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(one.z0, other.z0)
            assert torch.equal(one.index, other.index)
    again = Loader(cache, 4, **setting)
    stop = min(stop, len(found[0]) - 2)
    again.load_state_dict(again.state_dict(found[0][stop].position))
    assert all(torch.equal(a.z0, b.z0) for a, b in zip(again, found[0][stop + 1 :], strict=True))


def test_rows_from_several_tiers(cache: Cache) -> None:
    expected = list(Loader(cache, 4, windows=WINDOWS, tier="host", shuffle=True, dtype="float16"))
    for homes in (["device", "host", "disk"], ["disk", "device", "host"], ["host", "disk", "disk"]):
        mixed = Loader(cache, 4, windows=WINDOWS, shuffle=True, dtype="float16")
        move(mixed, homes)
        assert all(torch.equal(a.z0, b.z0) for a, b in zip(mixed, expected, strict=True))


def test_transforms_see_z0_alone(cache: Cache) -> None:
    noise = stoker.transforms.Noise(0.1)
    for batch in Loader(cache, 4, windows=WINDOWS, shuffle=True, transforms=noise):
        assert batch.z1 is None
        clean = torch.stack([hidden(n)[row] for n, row in batch.index.tolist()])
        assert not torch.equal(batch.z0, clean)
        assert torch.allclose(batch.z0, clean, atol=1.0)


def test_what_cannot_be_served_by_rows_says_so(cache: Cache, timed: Cache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has hidden, ids.*field='hidden'"):
        Loader(cache, 4, windows=Windows(horizon=0))
    with pytest.raises(ConfigError, match=r"'label' has neither time nor a varying length.*hidden, ids"):
        Loader(cache, 4, windows=Windows(horizon=0, field="label"))
    with pytest.raises(ConfigError, match=r"has none.*Windows\(horizon=0, field='hidden'\)"):
        Loader(cache, 4, windows=Windows())
    with pytest.raises(ConfigError, match=r"at horizon 0 no state follows z0.*start_every=2"):
        Windows(horizon=0, stride=2)
    with pytest.raises(ConfigError, match=r"windows\.horizon is -1"):
        Windows(horizon=-1)
    with pytest.raises(ConfigError, match=r"windows\.horizon is"):
        Windows(horizon=(0, 2))
    uneven = {"hidden": [torch.ones(2, 3), torch.ones(1, 3)], "text": [torch.ones(5), torch.ones(4)]}
    with pytest.raises(ConfigError, match="different lengths in 'hidden' and 'text'"):
        Loader(write_cache(tmp_path, uneven, name="uneven"), 1, windows=WINDOWS)
    rows = [Loader(timed, 4, windows=Windows(horizon=0, field="latent"), shuffle=True)]
    rows.append(Loader(cache, 4, windows=WINDOWS, shuffle=True))
    with pytest.raises(ConfigError, match="serves rows as examples"):
        Mixture(rows, names=["a", "b"])


def test_rows_are_not_served_while_a_cache_is_filled(tmp_path: Path) -> None:
    data = [{"hidden": torch.ones(1 + n % 3, 2)} for n in range(40)]
    with pytest.raises(ConfigError, match="rows are counted once all are stored"):
        stoker.cached(data, wait=False, cache_dir=tmp_path, windows=Windows(horizon=0), shuffle=True)


def test_images_of_any_size_have_no_rows(tmp_path: Path) -> None:
    images = folded("x", [torch.ones(2, 2), torch.ones(1, 3)], 2)
    made = write_cache(tmp_path, images, axes={"x": ("*", "*")}, name="images")
    with pytest.raises(ConfigError, match="'x' has neither time nor a varying length"):
        Loader(made, 1, windows=Windows(horizon=0, field="x"))
