"""Commands given a device that is not there, or a folder without caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.errors import FormatError, ResourceError
from tests.cli.commands import run


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there is an eighth GPU")
@pytest.mark.parametrize("setting", ["training.device=cuda:7", "precompute.devices=[cuda:7]"])
def test_a_gpu_that_is_not_there_is_refused_where_the_caches_are_complete(
    project: Path, setting: str
) -> None:
    run("precompute", "c.yaml")
    for command in ("precompute", "plan", "train"):
        _, said = run(command, "c.yaml", setting, exit_code=ResourceError.exit_code)
        assert "cuda:7 is not there" in said


@pytest.mark.parametrize("command", ["gc", "verify", "compact", "show", "ls", "export", "why"])
@pytest.mark.parametrize("folder", ["empty", "other", "missing"])
def test_a_folder_without_caches_is_an_error_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, folder: str
) -> None:
    if (command, folder) == ("gc", "empty"):
        pytest.skip("all its caches may have been removed: the next test")
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("other/papers").mkdir(parents=True)
    Path("other/papers/a.txt").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    more = {"export": ["out", "--to", "safetensors"], "why": [folder], "gc": ["--yes"]}.get(command, [])

    _, said = run("cache", command, folder, *more, exit_code=FormatError.exit_code)

    assert folder in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_gc_has_emptied_is_no_error(project: Path) -> None:
    run("precompute", "c.yaml")
    for _ in range(2):
        run("cache", "gc", "--yes", "data/latent_cache", "--keep", "0", "--force")
        assert not [*Path("data/latent_cache").rglob("recipe.json")]
    Path("data/empty").mkdir()
    run("cache", "gc", "--yes", "data/empty")
