"""Devices by name: what is none is refused in words of ours."""

from __future__ import annotations

import pytest

from stoker.errors import ConfigError
from stoker.precompute.devices import encode_on


@pytest.mark.parametrize("wanted", ["foo", ["cpu", "foo"], ["cpu", "xpu"]])
def test_a_device_that_is_none_is_refused_with_those_that_are(wanted: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^device '\w+' is none .* Expected cpu, cuda or cuda:1$"):
        encode_on(wanted)
