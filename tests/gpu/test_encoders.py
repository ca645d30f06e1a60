"""Encoders on a GPU: the records of the CPU within rounding, also of samples that vary in length or size."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stoker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"


class Attention(nn.Module):
    """Tokens that see each other, and no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, data: Tensor, *, mask: Tensor) -> Tensor:
        return self.inner(data, data, data, key_padding_mask=~mask, need_weights=False)[0]


def tokens() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(4, 40, (3 + 5 * n % 11,), generator=generator), "label": torch.tensor(n)}
        for n in range(12)
    ]


def pixels(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"image": torch.randint(0, 256, (3, *sizes[n % len(sizes)]), dtype=torch.uint8, generator=generator)}
        for n in range(6)
    ]


def text(folder: Path) -> Any:
    from tests.encoders.tiny_models import make_bert

    return stoker.TextEncoder(make_bert(folder))


def hidden(folder: Path) -> Any:
    from tests.encoders.tiny_models import make_llama

    return stoker.HiddenStates(make_llama(folder), layers=[1, 2])


def top(folder: Path) -> Any:
    from tests.encoders.tiny_models import make_gpt2

    return stoker.TopK(make_gpt2(folder), k=3)


def latents(folder: Path) -> Any:
    from tests.encoders.tiny_models import make_vae

    return stoker.VAEEncoder(make_vae(folder))


def features(folder: Path) -> Any:
    from tests.encoders.tiny_dinov2 import make_model

    return stoker.FeatureEncoder(make_model(folder), pooling="tokens")


ENCODERS: dict[str, tuple[str, Callable[[Path], Any], Callable[[], list[dict[str, Any]]]]] = {
    "attention over lengths": (
        "torch",
        lambda _: stoker.ModuleEncoder(
            Attention(), version="1", encode_batch=4, lengths=(8, 16), mask="mask"
        ),
        lambda: [{"data": torch.randn(1 + 5 * n % 13, 8)} for n in range(12)],
    ),
    "text": ("transformers", text, tokens),
    "hidden states": ("transformers", hidden, tokens),
    "top k": ("transformers", top, tokens),
    "latents": ("diffusers", latents, lambda: pixels((32, 48))),
    "latents of two sizes": ("diffusers", latents, lambda: pixels((32, 48), (48, 32))),
    "features": ("transformers", features, lambda: pixels((28, 42))),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_records_of_the_device_are_those_of_the_cpu_within_rounding(tmp_path: Path, name: str) -> None:
    package, make, samples = ENCODERS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    source = stoker.TorchSource(samples(), version=name)

    def encoded(device: str) -> stoker.Cache:
        encoder = make(tmp_path / "model") if device == "cpu" else again
        made = stoker.precompute(
            source, encoder, tmp_path / device, name="e", device=device, workers=0, progress=None
        )
        assert made.complete, made.quarantined
        return made

    again = make(tmp_path / "model again")
    here, there = encoded("cpu"), encoded(DEVICE)

    assert here.fingerprint == there.fingerprint
    for number in range(len(here)):
        one, other = here[number], there[number]
        assert one.keys() == other.keys()
        for field, values in one.items():
            if values.is_floating_point():
                torch.testing.assert_close(other[field], values, rtol=2e-3, atol=2e-3)
            elif name != "top k":  # whose order may be another where two are equal but for rounding
                assert torch.equal(other[field], values), field


def test_a_narrow_default_dtype_costs_no_device(tmp_path: Path) -> None:
    """A number that is no token ends in an assertion on the device, after which it is lost."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    torch.set_default_dtype(torch.bfloat16)
    try:
        encoder = hidden(tmp_path)
        encoder.to(torch.device(DEVICE))
        encoder.encode({"input_ids": torch.full((1, 5), 7, device=DEVICE)})
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(torch.ones(3, device=DEVICE).sum()) == 3
