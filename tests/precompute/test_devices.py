"""Devices by name: `auto` is one that is there, and what is not there is refused before anything is done."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import stoker
from stoker.encoders.weights import weights_device
from stoker.errors import ConfigError, ResourceError
from stoker.plan import resources
from stoker.plan.resources import device_name, encode_on, resolve_device
from stoker.precompute import EncodeFiller, PrecomputeSettings, precompute, run_precompute
from stoker.precompute.measure import Trial, try_encoder, try_stages
from stoker.store import make_recipe
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("wanted", ["foo", ["cpu", "foo"], ["cpu", "xpu"], "meta", "cuda:", None, 0])
def test_a_device_that_is_none_is_refused_with_those_that_are(wanted: Any) -> None:
    with pytest.raises(ConfigError, match=r"auto, cpu, cuda or cuda:0"):
        encode_on(wanted)


def called(how: str, device: Any, folder: Path) -> object:
    data, module = TensorDataset(torch.ones(4, 3)), nn.Linear(3, 2).eval().requires_grad_(False)
    encoder = stoker.ModuleEncoder(module, field="0")
    options: dict[str, Any] = {"workers": 0, "progress": False}
    if how == "cached":
        return stoker.cached(data, encoder, cache_dir=folder, device=device, precompute=options, shuffle=True)
    if how == "cached, encoder alone":
        return stoker.cached(
            data, encoder, cache_dir=folder, precompute={**options, "device": device}, shuffle=True
        )
    if how == "Loader":
        cache = precompute(stoker.TorchSource(data), encoder, folder, name="c", **options)
        return stoker.Loader(cache, device=device, shuffle=True)
    return precompute(stoker.TorchSource(data), encoder, folder, name="c", device=device, **options)


WAYS = ["precompute", "cached", "cached, encoder alone", "Loader"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu")])
def test_auto_and_torch_devices_are_taken_everywhere(how: str, device: Any, tmp_path: Path) -> None:
    assert called(how, device, tmp_path) is not None


@without_gpu
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused_by_name_with_the_cure(
    how: str, device: Any, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=rf"\b{device} .*device='auto'"):
        called(how, device, tmp_path)


@without_gpu
def test_one_of_several_gpus_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cuda:0"):
        precompute(FakeSource((4,)), FakeEncoder(), tmp_path, name="c", device=["cuda:0", "cpu"])
    with pytest.raises(ResourceError, match="auto"):
        precompute(FakeSource((4,)), FakeEncoder(), tmp_path, name="c", device="all")


@without_gpu
def test_nothing_is_removed_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 0, "progress": False}
    before = precompute(FakeSource((4,)), FakeEncoder(), tmp_path, name="c", **settings)

    with pytest.raises(ResourceError):
        precompute(
            FakeSource((4,)), FakeEncoder(), tmp_path, name="c", overwrite=True, device="cuda", **settings
        )

    assert len(stoker.open_cache(before.path)) == 4


@without_gpu
def test_what_needs_no_gpu_is_done_without_one(tmp_path: Path) -> None:
    """Samples that are stored as they are."""
    settings = PrecomputeSettings(workers=0, progress=None, device="cuda")
    assert run_precompute(FakeSource((4,)), None, tmp_path, name="c", settings=settings).records == 4


@without_gpu
@pytest.mark.parametrize("wait", [True, False])
def test_a_gpu_that_is_not_there_is_refused_where_the_cache_is_complete(tmp_path: Path, wait: bool) -> None:
    source = FakeSource((4,))
    precompute(source, FakeEncoder(), tmp_path, name="c", workers=0)

    with pytest.raises(ResourceError, match="cuda:7"):
        precompute(source, FakeEncoder(), tmp_path, name="c", device="cuda:7", wait=wait)
    with pytest.raises(ResourceError, match="cuda:7"):
        stoker.cached(
            source,
            FakeEncoder(),
            cache_dir=tmp_path,
            name="c",
            device="cpu",
            precompute={"device": "cuda:7"},
            wait=wait,
            shuffle=True,
        )


def test_the_gpus_that_are_there_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert encode_on("all") == ("cuda:0", "cuda:1")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda")
    with pytest.raises(ResourceError, match=r"cuda:7 .* cuda:0, cuda:1\b"):
        resolve_device("cuda:7")


@pytest.mark.parametrize("first", ["precompute", "resolve_device"])
def test_the_device_that_auto_stands_for_is_said_once_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    first: str,
) -> None:
    monkeypatch.setattr(resources, "_said", set())
    with caplog.at_level(logging.INFO, "stoker"):
        if first == "resolve_device":
            resolve_device("auto")
        precompute(FakeSource((4,)), FakeEncoder(), tmp_path, name="c", device="auto", workers=0)
        found = resolve_device("auto")

    progress, logged = capfd.readouterr().err, caplog.text
    assert f"auto: {found} is used, since torch" in (progress if first == "precompute" else logged)
    assert (progress + logged).count("is used, since torch") == 1


def test_auto_is_resolved_where_single_records_are_encoded(tmp_path: Path) -> None:
    settings = PrecomputeSettings(workers=0, progress=None, device="auto")
    source, encoder = FakeSource((4,)), FakeEncoder()
    filler = EncodeFiller(source, encoder, tmp_path, name="c", settings=settings)

    filler.fill([1], 60.0)

    fingerprint = make_recipe(source, encoder).fingerprint
    assert list(tmp_path.glob(f"c/{fingerprint}/shard-*"))


def test_names_are_those_of_torch() -> None:
    assert [device_name(one) for one in ("auto", "cpu", "cuda:1", torch.device("cuda", 3))] == [
        "auto", "cpu", "cuda:1", "cuda:3",
    ]  # fmt: skip


GPU = torch.device("cuda:3")


class Claiming(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU, as long as its encoder does."""

    where: torch.device | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where or torch.device("cpu")


class OnGPU(FakeEncoder):
    """Its weights are on a GPU, as far as anybody can tell."""

    def __init__(self, where: torch.device = GPU) -> None:
        super().__init__()
        self.where, self.was = where, [where]

    def to(self, device: torch.device) -> None:
        self.where = device
        self.was.append(device)

    def weights(self) -> dict[str, torch.Tensor]:
        weight = self.weight.as_subclass(Claiming)
        weight.where = self.where
        return {"weight": weight}

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.where.type == "cpu", "these samples are on the CPU"
        return super().encode(batch)


@pytest.mark.parametrize("ways", [{"workers": 0}, {"device": ["cpu", "cpu"], "workers": 1}, {"wait": False}])
def test_an_encoder_is_put_back_where_it_was(tmp_path: Path, ways: dict[str, Any]) -> None:
    """It may be the caller's own model, on the GPU that it is used on."""
    encoder = OnGPU()

    cache = stoker.precompute(FakeSource((20,)), encoder, tmp_path, name="x", **{"device": "cpu", **ways})
    if not ways.get("wait", True):
        assert len(list(stoker.Loader(cache, 4, shuffle=True))) == 5

    assert weights_device(encoder) == GPU
    assert torch.device("cpu") in encoder.was


def test_trying_an_encoder_leaves_it_where_it_was() -> None:
    encoder = OnGPU()

    try_encoder(encoder, FakeSource().schema(), "cpu", 60)

    assert encoder.was == [GPU, torch.device("cpu"), GPU]


def test_a_trial_of_all_stages_leaves_the_encoder_where_it_was(tmp_path: Path) -> None:
    encoder, source, settings = OnGPU(), FakeSource((20,)), PrecomputeSettings(device="cpu")

    place = (tmp_path, "trial", make_recipe(source, encoder))
    cache = try_stages(source, encoder, place, settings, Trial())

    assert len(cache) > 0
    assert weights_device(encoder) == GPU


def test_an_encoder_runs_where_its_weights_are_unless_told(tmp_path: Path) -> None:
    """Here that is no device that there is, which is the refusal that is looked for."""
    encoder = OnGPU(torch.device("cuda:63"))

    with pytest.raises(Exception, match=r"(?i)cuda"):
        stoker.precompute(FakeSource((20,)), encoder, tmp_path, name="x", workers=0)
