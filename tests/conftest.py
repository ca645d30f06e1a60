"""Small real inputs that several packages' tests share."""

from __future__ import annotations

import base64
import io
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pytest

from tests.kit import amount, import_once
from tests.sources.sql.server import NoServerError, Server

PLAIN = "not slow"
"""The selection of tests in `pyproject.toml`."""


def pytest_configure(config: pytest.Config) -> None:
    """Set how many random examples are tried: more of them where slow tests are selected."""
    amount.set_plain(config.getoption("markexpr") == PLAIN)
    # No test asserts a time: hypothesis' limit of 200 ms for an example is missed on a busy machine.
    hypothesis.settings.register_profile("stoker", deadline=None, max_examples=amount.example_count(100))
    hypothesis.settings.load_profile("stoker")


SKETCHES = {
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    ),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>',
}
SHARED_DATA = Path(__file__).parent.parent.parent / "shared" / "data"


def write_burgers(
    path: Path, *, samples: int = 12, steps: int = 9, points: int = 32, nu: float = 0.01, seed: int = 0
) -> Path:
    """Smooth random trajectories in PDEBench's 1D layout: `tensor` (samples, steps, points) float32."""
    generator = np.random.default_rng(seed)
    x = np.linspace(0, 1, points, endpoint=False)
    t = np.linspace(0, 1, steps)
    phase = generator.uniform(0, 6.28, (samples, 1, 1))
    tensor = np.sin(2 * np.pi * (x + t[:, None]) + phase) * generator.uniform(0.5, 1.5, (samples, 1, 1))
    with h5py.File(path, "w") as file:
        file["tensor"] = tensor.astype(np.float32)
        file["x-coordinate"] = x.astype(np.float32)
        file["t-coordinate"] = np.append(t, 2.0).astype(np.float32)
        file.attrs["Nu"] = nu
    return path


@pytest.fixture(autouse=True, scope="session")
def default_signals() -> None:
    """SIGINT and SIGHUP end calls and commands, also where the tests run in the background or under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def modules_imported_once() -> Iterator[None]:
    """Preloaded processes of tests and of what they start do not each import torch."""
    if sys.platform != "linux":
        yield
        return
    with import_once.installed():
        yield


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_disks() -> Iterator[None]:
    """Files are flushed by the system when it pleases: no test cuts the power of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fsync)
        import_once.do_not_wait_for_disks()
        yield


@pytest.fixture(autouse=True, scope="session")
def sketches() -> Iterator[dict[str, bool]]:
    """Figures are saved without what they show: 0.3 s each. A training run does not make its four."""
    wanted = {"whole": False}
    if find_spec("matplotlib") is None:  # as on machines with a GPU that are borrowed
        yield wanted
        return
    from matplotlib.figure import Figure

    whole = Figure.savefig

    def savefig(figure: Any, file: Any, **named: Any) -> None:
        sketch = SKETCHES.get(named.get("format", ""))
        if wanted["whole"] or sketch is None:
            whole(figure, file, **named)
        elif isinstance(file, io.TextIOBase):
            file.write(sketch.decode())
        else:
            Path(file).write_bytes(sketch)

    from stoker.train import report

    draw, draw_for_page = report.draw_curves, report.curves_as_svg

    def draw_curves(rows: Any, path: Path) -> None:
        if wanted["whole"]:
            draw(rows, path)
        else:
            path.write_bytes(SKETCHES["png"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        patch.setattr(report, "draw_curves", draw_curves)
        patch.setattr(
            report,
            "curves_as_svg",
            lambda rows: draw_for_page(rows) if wanted["whole"] else [SKETCHES["svg"].decode()] * 3,
        )
        yield wanted


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest, sketches: dict[str, bool]) -> None:
    """Tests marked with `draws` get whole pictures."""
    sketches["whole"] = request.node.get_closest_marker("draws") is not None


@pytest.fixture(scope="session")
def way_caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Caches of every kind of field, which `tests/kit/ways.py` serves in every way."""
    from tests.kit.ways import write_caches  # imports torch, which most tests do not need here

    return write_caches(tmp_path_factory.mktemp("ways"))


@pytest.fixture
def burgers(tmp_path: Path) -> Path:
    """One small PDEBench file of 12 trajectories, 9 steps, 32 points."""
    return write_burgers(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server, or a skip that says why there is none."""
    try:
        started = Server()
    except NoServerError as error:
        pytest.skip(str(error))
    yield started
    started.close()
