"""Packages of others add what they name in entry points; a bad one harms nothing but its own name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import plugins
from stoker.errors import ConfigError
from stoker.plugins import find_plugin, plugins_of
from stoker.testing import check_source
from tests.kit import forked

ROOT = Path(__file__).parent.parent
CONFIG = """
data: {kind: csv, root: data, task: waves, options: {delimiter: ";"}, splits: {train: 0.7, val: 0.3}}
latent: {dim: 16, tokens: 4}
encoder: {kind: grid, patch_size: 8}
model: {width: 16, depth: 1, heads: 2}
precompute: {engine: timed, workers: 0}
training: {epochs: 1, batch_size: 4, trackers: [jsonl], device: cpu}
"""


def package(site: Path, name: str, points: str, code: str = "") -> None:
    """Install a distribution with one module, as `pip` would."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def stoker(
    *words: str, site: Path, folder: Path | None = None, exit_code: int = 0, run: Any = forked.run
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user with these packages would."""
    done = run(
        [sys.executable, "-m", "stoker", *words],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=folder or site,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == exit_code, done.stderr
    return done


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, installed with pip into a folder of its own."""
    for needed in ("pip", "setuptools"):  # not imported: setuptools refuses where distutils was loaded before
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # pip builds in the folder it is given
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    words = [*pip, "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    """A folder with trajectories and a configuration."""
    (tmp_path / "data").mkdir()
    values = np.random.default_rng(0).standard_normal((12, 6, 32))
    for number, table in enumerate(values):
        np.savetxt(tmp_path / "data" / f"wave{number:02}.csv", table, delimiter=";")
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.timeout(600)
def test_the_example_adds_a_source_an_engine_an_exporter_a_command_and_a_tracker(
    example: Path, waves: Path
) -> None:
    known = json.loads(
        stoker("csv-info", "data", "--delimiter", ";", "--json", site=example, folder=waves).stdout
    )
    assert known == {"folder": "data", "files": 12, "shape": [6, 1, 32, 1]}

    said = stoker("train", "c.yaml", site=example, folder=waves).stderr
    assert "records in" in said, "the engine did not encode"
    (figures,) = waves.glob("runs/*/figures.jsonl")
    assert json.loads(figures.read_text().splitlines()[-1]) == {"status": "finished"}

    cache = "data/latent_cache/waves_train"
    report = stoker("cache", "export", cache, "out", "--to", "npy", "--json", site=example, folder=waves)
    records = json.loads(report.stdout)["records"]
    exported = np.load(waves / "out" / "latent.npy")
    assert exported.shape[0] == records > 0
    assert exported.dtype == np.float16
    program = (
        "import numpy, stoker; cache = stoker.open_cache('data/latent_cache/waves_train'); "
        "numpy.save('read.npy', numpy.stack([cache[n]['latent'].numpy() for n in range(len(cache))]))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=waves, check=True, timeout=150)
    assert np.array_equal(np.load(waves / "read.npy"), exported)


def test_the_example_keeps_the_promises_of_a_source(
    example: Path, waves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(example))
    monkeypatch.chdir(waves)

    made = find_plugin("stoker.sources", "csv", "data.kind").load()
    from stoker.config import load_config

    source = made(load_config(waves / "c.yaml", []).data, "waves", "train")
    check_source(source)
    assert 0 < len(source) < 12
    with pytest.raises(ConfigError, match="Expected a delimiter"):
        made(load_config(waves / "c.yaml", ["data.options={separator: x}"]).data, "waves", "train")


def test_a_plugin_that_cannot_be_imported_is_an_error_of_its_name_alone(tmp_path: Path) -> None:
    points = "[stoker.commands]\nbad = bad:main\n[stoker.sources]\nbadsource = bad:main\n"
    package(tmp_path, "bad", points, "import a_module_that_is_not_there")

    listed = stoker("--help", site=tmp_path).stdout
    assert "train" in listed
    assert "Cannot be used (package bad)" in listed
    failed = stoker("bad", "one", "--two", "3", "--json", site=tmp_path, exit_code=3)
    error = json.loads(failed.stdout)
    assert "from the package bad" in error["error"]
    assert "a_module_that_is_not_there" in error["error"]
    assert error["exit_code"] == 3
    failed = stoker("validate", "--json", str(_config(tmp_path, "badsource")), site=tmp_path, exit_code=3)
    assert "from the package bad" in failed.stdout


def _config(folder: Path, kind: str) -> Path:
    (folder / "kind.yaml").write_text(f"data: {{kind: {kind}}}\n")
    return folder / "kind.yaml"


def test_a_module_of_a_plugin_is_imported_when_its_name_is_used(tmp_path: Path) -> None:
    code = "import pathlib; pathlib.Path('imported').touch()\ndef main(): print('hello')\n"
    points = "".join(f"[{group}]\nwhole = whole:main\n" for group in plugins.GROUPS)
    package(tmp_path, "whole", points, code)

    stoker("validate", str(_config(tmp_path, "hdf5")), site=tmp_path, exit_code=3, run=subprocess.run)
    assert not (tmp_path / "imported").exists()
    assert stoker("whole", site=tmp_path, run=subprocess.run).stdout == "hello\n"
    assert (tmp_path / "imported").exists()


def test_the_help_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from stoker.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pydantic', 'h5py', 'ray', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"
    assert "launch" in done.stdout


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_a_name_that_two_packages_give_is_refused_with_both(
    group: plugins.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = next(iter(plugins_of(group)))
    package(tmp_path, "one", f"[{group}]\nsame = one:main\n")
    package(tmp_path, "two", f"[{group}]\nsame = two:main\n{own} = two:main\nfine = two:__name__\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=r"'same' .* several packages: one, two\. Uninstall"):
        find_plugin(group, "same", "a setting")
    with pytest.raises(ConfigError, match=r"several packages: stoker, two\. Uninstall"):
        plugins_of(group)[own].load()
    assert find_plugin(group, "fine", "a setting").load() == "two"


def test_a_command_of_the_core_is_not_replaced(tmp_path: Path) -> None:
    package(tmp_path, "late", "[stoker.commands]\nwhy = late:main\n", "def main(): print('not this')\n")

    assert "two recipes" in stoker("cache", "why", "--help", site=tmp_path).stdout


def test_all_of_our_own_can_be_imported() -> None:
    for group in plugins.GROUPS:
        assert plugins_of(group)
        for plugin in plugins_of(group).values():
            if plugin.is_own:
                assert plugin.load() is not None


def test_names_that_nothing_is_registered_for_are_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.kind names 'hdf6', which is not a source.*hdf5, images"):
        find_plugin("stoker.sources", "hdf6", "data.kind")


def test_files_that_were_not_installed_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the folder `stoker` alone is copied somewhere."""
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "a" / "b" / "stoker" / "plugins.py"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    plugins._found.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"was not installed|were not installed"):
            find_plugin("stoker.sources", "hdf5", "data.kind")
    finally:
        plugins._found.cache_clear()


def test_a_checkout_is_described_by_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of an editable install are as old as that install."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    plugins._found.cache_clear()
    try:
        assert "hdf5" in plugins_of("stoker.sources")
    finally:
        plugins._found.cache_clear()
