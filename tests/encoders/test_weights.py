from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from stoker.encoders.module import ModuleEncoder
from stoker.encoders.weights import digest_weights, load_weights, on_device, weights_to_bytes
from stoker.errors import EncoderError

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({**WEIGHTS, "a": WEIGHTS["a"] + 1}, id="value"),
        pytest.param({**WEIGHTS, "a": WEIGHTS["a"].view(3, 2)}, id="shape"),
        pytest.param({**WEIGHTS, "b": torch.ones(2, dtype=torch.float64)}, id="dtype"),
        pytest.param({"a": WEIGHTS["a"], "c": WEIGHTS["b"]}, id="name"),
        pytest.param({"a": WEIGHTS["a"]}, id="one-less"),
    ],
)
def test_every_difference_gives_another_digest(other: dict[str, torch.Tensor]) -> None:
    assert digest_weights(other) != digest_weights(WEIGHTS)


def test_order_and_layout_in_memory_do_not_matter() -> None:
    strided = WEIGHTS["a"].t().contiguous().t()

    assert digest_weights({"b": WEIGHTS["b"], "a": strided}) == digest_weights(WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64])
def test_any_dtype_and_no_elements_can_be_digested(dtype: torch.dtype) -> None:
    assert digest_weights({"a": torch.ones(3).to(dtype)}) != digest_weights({"a": torch.zeros(3).to(dtype)})
    assert digest_weights({"a": torch.empty(0, dtype=dtype)}) == digest_weights(
        {"a": torch.empty(0, dtype=dtype)}
    )
    assert digest_weights({"a": torch.ones((), dtype=dtype)})


def test_saved_weights_come_back(tmp_path: Path) -> None:
    tied = {**WEIGHTS, "c": WEIGHTS["b"]}
    (tmp_path / "w.safetensors").write_bytes(weights_to_bytes(tied))

    loaded = load_weights(tmp_path / "w.safetensors", {"a": (2, 3), "b": (2,), "c": (2,)})

    assert digest_weights(loaded) == digest_weights(tied)


def test_a_pipe_in_place_of_weights_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    raised: list[Exception] = []

    def run() -> None:
        try:
            load_weights(tmp_path / "w.safetensors", {"a": (2, 3)})
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)

    assert [type(error) for error in raised] == [EncoderError]
    assert "w.safetensors" in str(raised[0])


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(weights_to_bytes(WEIGHTS))

    with pytest.raises(EncoderError, match="needs"):
        load_weights(tmp_path / "w.safetensors", {"a": (3, 2), "b": (2,)})


def test_an_encoder_that_does_not_fit_its_device_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, asked = ModuleEncoder(torch.nn.Linear(2, 2)), list[str]()

    def to(device: torch.device) -> None:
        asked.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError("half of it is there")

    monkeypatch.setattr(encoder, "to", to)
    with pytest.raises(torch.OutOfMemoryError), on_device(encoder, torch.device("cuda:0")):
        pass
    assert asked == ["cuda", "cpu"]
