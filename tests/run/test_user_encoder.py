"""An encoder of the user's own that a configuration names: encoded, trained on, told apart; clear errors."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.config import Config
from stoker.errors import ConfigError, EncoderError
from stoker.run.build import build_jobs
from stoker.run.caches import explain, locate
from stoker.run.context import Run
from stoker.run.precompute import precompute_config
from stoker.run.train import train_config
from stoker.store import Cache

MODULE = """
import torch
from torch import nn
GAIN = 1.0

def scaled(x):
    return GAIN * x

class Net(nn.Module):
    def __init__(self, width=8, decodes=True):
        super().__init__()
        self.net = nn.Conv1d(1, width, 4, stride=4)
        if decodes:
            self.decode = self.back
    def forward(self, data):
        return scaled(self.net(data[:, 0].transpose(1, 2)).transpose(1, 2))
    def back(self, latents):
        return latents[:, :, :4].reshape(len(latents), 1, -1, 1)

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.LazyLinear(8)
    def forward(self, data):
        return self.net(data.flatten(1))[:, None]

class Drawing(Net):
    def forward(self, data):
        return super().forward(data) + torch.randn(())

class Trajectory(nn.Module):
    def forward(self, data):
        return data.mean(dim=(3, 4)).cumsum(1)

def make(width):
    return Net(width=width)

def grid():
    import stoker
    return stoker.GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=8, dim=4)

def plain():
    return scaled

def number():
    return 3

def broken():
    return {}["here"]

ready = Net()
"""
Configure = Callable[..., Config]


@pytest.fixture
def named(tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Settings with an encoder of a module that was never imported: `named("Net", "key=value")`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"mynets_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(MODULE)

    def make(target: str, *overrides: str) -> Config:
        return configure(f"encoder.target={name}:{target}", *overrides)

    return make


def fingerprint(config: Config) -> str:
    return locate(Run(config).for_task("burgers1d"), "train").recipe.fingerprint


def filled(config: Config) -> list[Cache]:
    return [result.cache for result in precompute_config(Run(config)).caches]


def test_it_is_encoded_trained_on_and_judged_in_fields(named: Configure, tmp_path: Path) -> None:
    config = named("Net", "encoder.arguments={width: 6}")
    before = torch.get_rng_state()

    train, val = filled(config)
    result = train_config(Run(config))

    assert torch.equal(before, torch.get_rng_state())
    assert (train.schema["latent"].shape, train.schema["latent"].time, len(val)) == ((9, 8, 6), True, 4)
    assert result.cache_reused
    assert result.report.physical_nrmse is not None
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    differences = explain(train.path, tmp_path / "c.yaml", overrides=["encoder.seed=1"]).differences
    assert "encoder.weights" in {d.entry for d in differences}


def test_weights_follow_from_the_seed_and_code_from_the_file(named: Configure, tmp_path: Path) -> None:
    first = fingerprint(named("Net"))
    torch.rand(3)

    assert fingerprint(named("Net")) == fingerprint(named("make", "encoder.arguments={width: 8}")) == first
    assert fingerprint(named("Net", "encoder.seed=1")) != first
    (path,) = tmp_path.glob("mynets_*.py")
    sys.modules[path.stem].GAIN = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    assert fingerprint(named("Net")) != first
    own = named("Net", "encoder.version=1")
    assert fingerprint(own) not in (first, fingerprint(named("Net")))


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_checkpoint_decides_the_weights(suffix: str, named: Configure, tmp_path: Path) -> None:
    weights = {f"enc.net.{k}": torch.full(s, 0.5) for k, s in (("weight", (8, 1, 4)), ("bias", (8,)))}
    path = tmp_path / f"w.{suffix}"
    if suffix == "pt":
        torch.save({"epoch": 1, "model": weights}, path)
    else:
        save_file(weights, path)
    given = [f"encoder.checkpoint={path}", "encoder.checkpoint_prefix=enc."]
    given += ["encoder.checkpoint_key=model"] if suffix == "pt" else []

    (job,) = build_jobs(Run(named("Net", *given)).for_task("burgers1d"), ["train"])
    (again,) = build_jobs(Run(named("ready", *given, "encoder.seed=4")).for_task("burgers1d"), ["train"])

    assert job.encoder
    assert again.encoder
    assert float(job.encoder.weights()["net.bias"].min()) == 0.5
    assert job.encoder.identity() == again.encoder.identity()


def test_other_forms_of_encoders_are_taken(named: Configure) -> None:
    whole, _ = filled(named("Trajectory", "encoder.time=whole", "data.normalize=true"))
    grid, _ = filled(named("grid"))
    plain, _ = filled(named("plain", "encoder.output=scaled"))

    assert whole.schema["latent"].shape == (9, 1)
    assert grid.recipe.entries["encoder"]["class"] == "stoker.GridEncoder"
    assert plain.schema["scaled"].shape == (9, 1, 32, 1)


def test_processes_import_it(named: Configure) -> None:
    config = named("Net", "precompute.devices=[cpu, cpu]", "precompute.workers=1", "data.split=val")

    (val,) = filled(config)

    assert len(val) == 4


def test_the_cache_is_found_when_the_raw_data_is_gone(named: Configure, tmp_path: Path) -> None:
    config = named("Net")
    train, _ = filled(config)
    for path in (tmp_path / "raw").iterdir():
        path.unlink()

    assert filled(config)[0].fingerprint == train.fingerprint
    with pytest.raises(Exception, match="raw"):
        filled(named("Net", "encoder.seed=1"))


@pytest.mark.parametrize(
    ("target", "given", "error", "says"),
    [
        ("Nett", [], ConfigError, r"has no Nett. It has .*Net"),
        ("make", [], ConfigError, r"encoder\.target .*make: .*'width'.*encoder\.arguments gives nothing"),
        ("broken", [], EncoderError, r"KeyError at .*mynets_\w+\.py:\d+: 'here'"),
        ("number", [], ConfigError, r"number gives a int"),
        ("Lazy", [], EncoderError, r"'net\.weight'.* has no value"),
        ("ready", [], ConfigError, r"is a module already"),
        (
            "ready",
            ["encoder.checkpoint=w.pt", "encoder.arguments={a: 1}"],
            ConfigError,
            r"no encoder\.arguments",
        ),
        ("grid", ["encoder.output=z"], ConfigError, r"encoder\.output has no effect"),
        ("plain", ["encoder.checkpoint=w.pt"], ConfigError, r"without weights"),
        ("Net", ["encoder.checkpoint_prefix=a."], ConfigError, r"checkpoint_prefix is given without"),
        ("Net", ["encoder.checkpoint=w.ckpt"], EncoderError, r"w\.ckpt is not a \.safetensors, \.pt, \.pth"),
        ("Net", ["encoder.checkpoint=none.pt"], EncoderError, r"none\.pt"),
        (
            "Net",
            ["encoder.checkpoint=w.pt"],
            EncoderError,
            r"entries model.*encoder\.checkpoint_key|key='model'",
        ),
        (
            "Net",
            ["encoder.checkpoint=w.pt", "encoder.checkpoint_key=model"],
            EncoderError,
            r"1 missing \(net\.bias\), 1 unexpected \(other\), net\.weight is \(4, 1, 4\), .* \(8, 1, 4\)",
        ),
        ("Net", ["encoder.checkpoint=code.pt"], EncoderError, r"code\.pt holds more than tensors"),
        ("Net", ["encoder.field=u"], EncoderError, r"no field 'u'"),
    ],
)
def test_what_is_wrong_is_said(
    target: str, given: list[str], error: type[Exception], says: str, named: Configure
) -> None:
    torch.save({"model": {"net.weight": torch.zeros(4, 1, 4), "other": torch.zeros(1)}}, "w.pt")
    torch.save(Path("x"), "code.pt")

    with pytest.raises(error, match=says):
        fingerprint(named(target, *given))


def test_an_encoder_that_draws_numbers_is_refused(named: Configure) -> None:
    with pytest.raises(EncoderError, match="random"):
        filled(named("Drawing"))


def test_settings_that_are_for_modules_alone_are_refused_elsewhere(configure: Any) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.field is given, but encoder\.kind=grid"):
        configure("encoder.field=u")
    with pytest.raises(ConfigError, match=r"needs encoder\.target"):
        fingerprint(configure("encoder.kind=module"))
