"""The page that maps the earlier systems names all of their words that are still understood."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import stoker.compat
from stoker.config.earlier import EARLIER, MEANT
from stoker.extras.compat.command import EarlierPrecomputeFlags
from tests.cli.commands import run
from tests.compat.test_earlier_units import write_samples
from tests.conftest import write_burgers

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


@pytest.mark.parametrize("name", stoker.compat.__all__)
def test_every_name_is_there_explained_and_mapped(name: str) -> None:
    assert getattr(stoker.compat, name).__doc__
    assert f"`{name}" in PAGE


@pytest.mark.parametrize("key", EARLIER)
def test_every_earlier_setting_is_mapped(key: str) -> None:
    assert f"`{key}`" in PAGE


def test_every_earlier_flag_is_mapped() -> None:
    flags = [field.name for field in fields(EarlierPrecomputeFlags)]

    assert [flag for flag in flags if f"`--{flag.replace('_', '-')}" not in PAGE] == []


@pytest.mark.parametrize("key", MEANT)
def test_what_names_meant_is_on_the_page(key: str) -> None:
    leaf = key.removeprefix("stages.operator.").removeprefix("optimizer.")

    assert f"`{key}`" in PAGE or f"optimizer.{leaf}`" in PAGE


@pytest.fixture
def as_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with raw data, files of the earlier cache and the page's own settings file."""
    monkeypatch.chdir(tmp_path)
    Path("data/pdebench").mkdir(parents=True)
    for split, count in (("train", 6), ("val", 3)):
        write_burgers(Path(f"data/pdebench/burgers1d_{split}.h5"), samples=count)
        write_samples(Path(f"old_cache/burgers1d_{split}"), count)
    ((settings,)) = re.findall(r"```yaml\n(.*?)```", _section("run it as it is"), re.DOTALL)
    Path("old.yaml").write_text(settings)


def _section(heading: str) -> str:
    return PAGE.split(f"## Latent cache: {heading}\n")[1].split("\n## ")[0]


def _commands(heading: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^\$ stoker (.*)$", _section(heading), re.MULTILINE)]


def _python(heading: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", _section(heading), re.DOTALL)


@pytest.mark.slow  # seven commands with the page's own workers
@pytest.mark.usefixtures("as_then")
def test_commands_of_the_page_run_as_they_are_printed() -> None:
    for words in _commands("run it as it is") + _commands("files of then"):
        _, said = run(*words)
        assert "cuda" not in words or "falling back to CPU" in said

    assert len(list(Path("data/latent_cache/burgers1d_train").iterdir())) == 2, "encoded and imported"
    assert Path("reports/precompute.json").is_file()


@pytest.mark.usefixtures("as_then")
def test_python_of_the_page_runs_as_it_is_printed() -> None:
    Path("old.yaml").write_text(Path("old.yaml").read_text().replace("num_workers: 8", "num_workers: 0"))
    known: dict[str, Any] = {}
    for code in _python("run it as it is") + _python("files of then"):
        exec(code.replace("num_workers=2", "num_workers=0"), known)

    assert known["z0"].shape == (6 * 8, 16, 32)  # 6 trajectories of 9 steps
    assert next(iter(known["loader"]))["future"].shape == (6 * 3, 1, 16, 32)
    assert (known["complete"], known["count"], known["batch"]["z1"].shape) == (True, 6, (18, 16, 32))


@pytest.mark.parametrize("name", stoker.compat.REMOVED)
def test_a_name_that_is_gone_names_the_new_way(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no {name}\. Instead: .*(precompute|loader)"):
        getattr(stoker.compat, name)
    assert f"`{name}" in PAGE


def test_another_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'GridLatentPairs'\. Names: GPUCac"):
        stoker.compat.GridLatentPairs  # noqa: B018
