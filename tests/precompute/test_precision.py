"""Records do not depend on how a program has set torch's products of float32."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from stoker.errors import EncoderError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.precision import full_precision
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

SETTINGS = PrecomputeSettings(readers=0, progress=None)
NEW = hasattr(torch.backends.cudnn, "conv")


class Watching(FakeEncoder):
    """Notes what torch would do in its call; fails there when told to."""

    fails = False

    def encode(self, batch):
        self.seen = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        self.switches = switches()
        if self.fails:
            raise ValueError("no")
        return super().encode(batch)


@pytest.fixture(autouse=True)
def _as_before():
    """What a test sets is gone afterwards."""
    with full_precision():
        yield


def switches():
    """All of them as torch tells, for comparing."""
    asked = [torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32]
    if NEW:
        backends = torch.backends
        asked += [
            lambda s=s: s.fp32_precision
            for s in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        ]
    found = []
    for ask in asked:
        try:
            found.append(ask())
        except RuntimeError:
            found.append("mixed")
    return found


def loosen(how):
    if how == "old":
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "how",
    ["old", pytest.param("new", marks=pytest.mark.skipif(not NEW, reason="torch has no such switches"))],
)
def test_an_encoder_is_called_in_full_precision_and_everything_is_as_before_afterwards(tmp_path, how, fails):
    loosen(how)
    before = switches()
    encoder = Watching()
    encoder.fails = fails

    with pytest.raises(EncoderError) if fails else nullcontext():
        run_precompute(FakeSource((6,)), encoder, tmp_path, name="c", settings=SETTINGS)

    assert encoder.seen == ("highest", False)
    assert not {"tf32", "bf16"}.intersection(encoder.switches)
    assert switches() == before


def test_a_shard_says_how_its_records_were_made(tmp_path):
    cache = run_precompute(FakeSource((6,)), FakeEncoder(), tmp_path, name="c", settings=SETTINGS).cache

    assert cache.shard(0).described("environment")["float32"] == "highest"


def test_an_encoder_that_wants_less_says_so_in_its_call(tmp_path):
    """The switches are its own while it runs, and the program's afterwards."""

    class Loose(Watching):
        def encode(self, batch):
            torch.set_float32_matmul_precision("high")
            return super().encode(batch)

    encoder = Loose()
    run_precompute(FakeSource((6,)), encoder, tmp_path, name="c", settings=SETTINGS)

    assert encoder.seen[0] == "high"
    assert torch.get_float32_matmul_precision() == "highest"


class TorchSource(FakeSource):
    """Multiplies matrices in torch when it is read, as a Dataset may."""

    seen = ""

    def read(self, number, start=None, stop=None):
        self.seen = torch.get_float32_matmul_precision()
        return super().read(number, start, stop)


def test_what_is_read_in_this_process_is_read_as_in_a_reader(tmp_path):
    loosen("old")
    source = TorchSource((6,))

    run_precompute(source, FakeEncoder(), tmp_path, name="c", settings=SETTINGS)

    assert source.seen == "highest"
