"""Single samples encoded on demand have the bits that a whole run gives them."""

from __future__ import annotations

import pytest
import torch

from stoker.errors import StalledError
from stoker.precompute import EncodeFiller, PrecomputeSettings, Timeouts, run_precompute
from stoker.store import open_cache
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

SETTINGS = PrecomputeSettings(progress=None)


def test_only_the_groups_asked_for_are_encoded_and_bits_agree(tmp_path):
    whole = run_precompute(
        FakeSource((22,)), FakeEncoder(by_shape=True), tmp_path / "whole", name="c", settings=SETTINGS
    ).cache
    encoder = FakeEncoder(by_shape=True)
    filler = EncodeFiller(FakeSource((22,)), encoder, tmp_path / "c", name="c", settings=SETTINGS)

    filler.fill([5, 21], 30)
    filler.fill([5], 30)

    cache = open_cache(tmp_path / "c" / "c", require_complete=False)
    assert encoder.calls == [(4, 6, 5), (4, 6, 5)]
    assert {5, 21} <= set(cache.indices.tolist()) <= {4, 5, 6, 7, 20, 21}
    for number in cache.indices.tolist():
        assert torch.equal(cache[number]["latent"], whole[number]["latent"])


def test_a_deadline_is_kept_and_what_was_encoded_stays(tmp_path):
    encoder = FakeEncoder(sleep_s=0.3)
    settings = PrecomputeSettings(progress=None, workers=0)  # a reader's start is within the deadline too
    filler = EncodeFiller(FakeSource((40,)), encoder, tmp_path, name="c", settings=settings)

    with pytest.raises(StalledError, match="not encoded within"):
        filler.fill(range(40), 0.5)

    assert 0 < len(open_cache(tmp_path / "c", require_complete=False)) < 40


def test_an_encoder_past_its_deadline_is_an_error(tmp_path):
    settings = PrecomputeSettings(progress=None, timeouts=Timeouts(encode=0.2))
    encoder = FakeEncoder(sleep_s=1.5)
    filler = EncodeFiller(FakeSource((8,)), encoder, tmp_path, name="c", settings=settings)
    with pytest.raises(StalledError, match="samples 4-7"):
        filler.fill([5], 60)

    encoder.sleep_s = 0.0
    filler.fill([5], 60)
