"""A Dataset that a configuration names: encoded, planned, trained on; what is wrong has file and line."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from stoker.config import load_config
from stoker.errors import ConfigError, SourceError, SplitError
from stoker.run.build import build_source
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.precompute import precompute_config
from stoker.run.train import train_config

MODULE = """
import torch

class Waves(torch.utils.data.Dataset):
    def __init__(self, count=20, steps=5):
        self.count, self.steps = count, steps
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        x = torch.linspace(0, 6.2832, 17)[:16]
        data = torch.stack([torch.sin(x - 0.1 * t + i) for t in range(self.steps)])
        return {"data": data.view(self.steps, 1, 16, 1), "name": "wave"}

def by_split(split, count=6):
    return None if split == "test" else Waves(count if split == "train" else 2)

def broken(root):
    table = {}
    return table[root]

def same(count):
    return len(count)

ready = Waves(4)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, of a name that was never imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"mydata_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def config(module: str, name: str, *more: str, workers: int = 0) -> Any:
    settings = [
        "data.torch.text={name: drop}", "data.torch.time=[data]", f"precompute.workers={workers}",
        "training.device=cpu", "training.epochs=2", "training.batch_size=8", "model.width=16",
        "model.depth=1", "model.heads=2", "latent.dim=8", "latent.tokens=4",
    ]  # fmt: skip
    return load_config(None, [f"data.dataset={module}:{name}", *settings, *more])


def test_it_is_encoded_planned_and_trained_on(module: str) -> None:
    settings = config(module, "Waves", "data.torch.arguments={count: 30}", "encoder.kind=grid")

    filled = precompute_config(Run(settings))
    plan = plan_config(Run(settings))
    result = train_config(Run(settings))

    assert settings.data.kind == "torch"
    assert [cache.name for cache in filled.caches] == ["waves_train", "waves_val"]
    assert [len(cache.cache) for cache in filled.caches] == [24, 2]
    assert (plan.records, plan.missing) == (24, 0)
    assert result.cache_reused
    assert result.report.val_nrmse < 2
    changed = config(module, "Waves", "data.torch.arguments={count: 30, steps: 6}", "encoder.kind=grid")
    assert plan_config(Run(changed)).missing == 24


def test_what_takes_a_split_gives_it(module: str) -> None:
    settings = config(module, "by_split")

    assert [*Run(settings).tasks] == ["by_split"]
    assert [len(build_source(Run(settings).for_task("t"), split)) for split in ("train", "val")] == [6, 2]
    with pytest.raises(SplitError, match="gives None for split 'test'"):
        build_source(Run(settings).for_task("t"), "test")
    fixed = config(
        module, "by_split", "data.torch.arguments={split: val, count: 9}", "data.splits={train: 1}"
    )
    assert len(build_source(Run(fixed).for_task("t"), "train")) == 2
    assert (
        len(build_source(Run(config(module, "ready", "data.splits={train: 1}")).for_task("t"), "train")) == 4
    )


def test_workers_import_it_from_the_folder_of_the_command(module: str, tmp_path: Path) -> None:
    settings = config(str(tmp_path / f"{module}.py"), "Waves", "data.split=val", workers=1)

    (cache,) = precompute_config(Run(settings)).caches

    assert (cache.name, len(cache.cache), cache.encoded) == ("waves_val", 2, 2)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("NAME:Wave", ConfigError, r"NAME\.py has no Wave. It has Waves, broken, by_split, same"),
        ("nosuch:Waves", ConfigError, r"there is no module nosuch, neither installed nor in "),
        ("nosuch.py:Waves", ConfigError, r"nosuch\.py is not a file"),
        ("Waves", ConfigError, r"'Waves'\. Expected module:name"),
        ("NAME:MODULE", ConfigError, r"has no MODULE"),
        ("NAME:broken", SourceError, r"root='here': KeyError at .*NAME\.py:19: 'here'"),
        (
            "NAME:same",
            ConfigError,
            r"unexpected keyword argument 'root'.* gives root\. It takes \(count\)",
        ),
        ("NAME:by_split", ConfigError, r"unexpected keyword argument 'root'"),
    ],
)
def test_what_is_wrong_is_named(module: str, spec: str, error: type[Exception], says: str) -> None:
    spec = spec.replace("NAME", module)
    settings = load_config(None, [f"data.dataset={spec}", "data.torch.arguments={root: here}"])

    with pytest.raises(error, match=says.replace("NAME", module)):
        build_source(Run(settings).for_task("t"), "train")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\nx = (1\n", r"cannot be imported: SyntaxError at .*:2"),
        ("\n\n1 / 0\n", r"cannot be imported: ZeroDivisionError at .*bad_\w+\.py:3: division by zero"),
        ("import nosuchthing\n", r"cannot be imported: ModuleNotFoundError at .*:1: No module named"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(module: str, text: str, says: str) -> None:
    name = f"bad_{uuid.uuid4().hex[:8]}"
    Path(f"{name}.py").write_text(text)

    with pytest.raises(SourceError, match=says):
        build_source(Run(config(name, "Waves")).for_task("t"), "train")


def test_a_dataset_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.dataset is given, but data\.kind=hdf5 has no use for it"):
        load_config(None, ["data.dataset=a:b", "data.kind=hdf5"])
    with pytest.raises(ConfigError, match=r"data\.kind=torch needs data\.dataset"):
        build_source(Run(load_config(None, ["data.kind=torch"])).for_task("t"), "train")
