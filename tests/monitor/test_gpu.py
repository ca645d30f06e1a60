from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from stoker.monitor import GpuSample, MissingGpu, meter, open_gpu


def fail(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A library with one GPU, of uuid GPU-abc; counts how often it was opened and closed."""
    calls = {"init": 0, "shutdown": 0}

    def by_uuid(uuid: str) -> str:
        return uuid if uuid in ("GPU-abc", "MIG-part") else fail()

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: calls.update(init=calls["init"] + 1),
        "nvmlShutdown": lambda: calls.update(shutdown=calls["shutdown"] + 1),
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetName": lambda handle: "Made-up GPU",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=30, total=100),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40),
        "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(meter.pynvml, name, fake)
    return calls


def test_without_a_driver_the_absence_is_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter.pynvml, "nvmlInit", fail)

    found = open_gpu()

    assert isinstance(found, MissingGpu)
    assert "no NVIDIA driver" in found.reason
    assert found.to_json() == {"absent": found.reason}


@pytest.mark.parametrize("uuid", [None, "abc", "GPU-abc", "part", "MIG-part"])
def test_a_sample_has_fractions_bytes_and_watts(driver: dict[str, int], uuid: str | None) -> None:
    sampler = open_gpu(uuid)
    assert not isinstance(sampler, MissingGpu)

    sample = sampler.sample()
    sampler.close()

    assert sample == GpuSample(
        name="Made-up GPU", utilization=0.4, used_bytes=30, total_bytes=100, power_w=250.0
    )
    assert json.loads(json.dumps(sample.to_json()))["utilization"] == 0.4
    assert driver == {"init": 1, "shutdown": 1}


def test_what_a_gpu_does_not_report_is_none(driver: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter.pynvml, "nvmlDeviceGetUtilizationRates", fail)
    monkeypatch.setattr(meter.pynvml, "nvmlDeviceGetPowerUsage", fail)
    sampler = open_gpu()
    assert not isinstance(sampler, MissingGpu)

    sample = sampler.sample()

    assert isinstance(sample, GpuSample)
    assert (sample.utilization, sample.power_w) == (None, None)


def test_a_gpu_that_fell_off_is_absent(driver: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = open_gpu()
    assert not isinstance(sampler, MissingGpu)
    monkeypatch.setattr(meter.pynvml, "nvmlDeviceGetMemoryInfo", fail)

    assert isinstance(sampler.sample(), MissingGpu)


def test_an_unknown_gpu_is_absent_and_the_library_let_go(driver: dict[str, int]) -> None:
    assert isinstance(open_gpu("xyz"), MissingGpu)
    assert driver == {"init": 1, "shutdown": 1}
