from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import ConfigError, ReadOnlyError, ResourceError
from stoker.run.demo import BurgersSpec, initial_states, solve_burgers, write_burgers

NU = 0.01


def cole_hopf(x: np.ndarray, t: float, nu: float, amplitude: float) -> np.ndarray:
    """u = -2 nu phi_x / phi with phi_t = nu phi_xx: exact, periodic, steepening for amplitude near 1."""
    decay = amplitude * np.exp(-nu * (2 * np.pi) ** 2 * t)
    phi = 1 + decay * np.cos(2 * np.pi * x)
    return 2 * nu * (2 * np.pi) * decay * np.sin(2 * np.pi * x) / phi


@pytest.mark.parametrize(
    ("amplitude", "points", "bound"),
    [
        pytest.param(0.9, 128, 1e-8, id="smooth"),
        pytest.param(0.95, 256, 1e-7, id="steep"),
        pytest.param(0.99, 256, 1e-5, id="near-shock"),
    ],
)
def test_solution_follows_cole_hopf(amplitude: float, points: int, bound: float) -> None:
    x = np.arange(points) / points
    exact = np.stack([cole_hopf(x, 0.01 * step, NU, amplitude) for step in range(101)])

    found = solve_burgers(exact[:1], viscosity=NU, interval=0.01, steps=101)[0]

    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error < bound
    assert np.abs(exact[-1] - exact[0]).max() > 0.05 * np.abs(exact).max()  # else standing still would pass


def test_time_error_falls_with_the_fourth_power(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(64) / 64
    start, end = cole_hopf(x, 0.0, NU, 0.5)[None] * 20, None
    errors = []
    for courant in (0.01, 0.8, 0.4):
        monkeypatch.setattr("stoker.run.demo.COURANT", courant)
        last = solve_burgers(start, viscosity=NU * 5, interval=0.1, steps=2)[0, 1]
        end = last if end is None else end
        errors.append(np.abs(last - end).max())

    assert errors[1] / errors[2] > 10


def test_products_of_waves_do_not_alias() -> None:
    """Wave 20 squared is wave 40, which 64 points cannot tell from wave 24."""
    x = np.arange(64) / 64

    last = solve_burgers(np.sin(2 * np.pi * 20 * x)[None], viscosity=1e-4, interval=0.01, steps=4)[0, -1]

    assert np.abs(np.fft.rfft(last))[22:].max() < 1e-10


def test_mass_is_kept_and_energy_never_grows() -> None:
    states = solve_burgers(initial_states(4, 128, 3), viscosity=NU, interval=0.02, steps=30)

    mass, energy = states.mean(axis=2), (states**2).mean(axis=2)
    np.testing.assert_allclose(mass, mass[:, :1].repeat(30, axis=1), atol=1e-12)
    assert np.all(np.diff(energy, axis=1) < 1e-12)


def test_seed_decides_the_initial_states() -> None:
    assert np.array_equal(initial_states(3, 64, 5), initial_states(3, 64, 5))
    assert not np.array_equal(initial_states(3, 64, 5), initial_states(3, 64, 6))


def test_file_has_the_layout_of_pdebench(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "new" / "burgers.hdf5", BurgersSpec(trajectories=3, steps=7, points=32))

    with h5py.File(path) as file:
        assert file["tensor"].shape == (3, 7, 32)
        assert file["tensor"].dtype == np.float32
        assert file["x-coordinate"].shape == (32,)
        assert file["t-coordinate"].shape == (8,)
        assert file.attrs["Nu"] == 0.01
        assert np.isfinite(file["tensor"][:]).all()


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    """A second demo must find its cache, also when the data file had to be made again."""
    spec = BurgersSpec(trajectories=2, steps=3, points=16)

    first = write_burgers(tmp_path / "a.hdf5", spec).read_bytes()

    assert first == write_burgers(tmp_path / "b.hdf5", spec).read_bytes()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(h5py.Group, "create_dataset", full)

    with pytest.raises(ResourceError, match="No space left"):
        write_burgers(tmp_path / "a.hdf5", BurgersSpec(trajectories=1, steps=2, points=16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong", [{"trajectories": 0}, {"points": 7}, {"points": 33}, {"interval": 0.0}, {"viscosity": -1.0}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BurgersSpec(**wrong)


def test_a_folder_that_may_not_be_written_is_refused_as_such() -> None:
    path = Path("/sys/stoker/burgers.h5")  # the kernel lets nobody make a folder there, root neither

    with pytest.raises(ReadOnlyError, match="/sys/stoker") as caught:
        write_burgers(path, BurgersSpec(trajectories=1, points=16, steps=2))

    assert "space" not in str(caught.value).lower()
