from __future__ import annotations

import pytest

from stoker.config import load_config, make_config
from stoker.errors import ConfigError


def test_transforms_are_read_and_read_back() -> None:
    config = load_config(None, ["training.transforms=[{kind: noise, std: 0.1, fields: [z0]}, {kind: roll}]"])

    noise, roll = config.training.transforms
    assert (noise.kind, noise.std, noise.fields) == ("noise", 0.1, ("z0",))
    assert (roll.kind, roll.axes) == ("roll", (-2,))
    assert make_config(config.to_dict(), where="again").training == config.training


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("[{kind: flop}]", r"entry 0 is of kind 'flop', .* \(did you mean flip\?\)"),
        (
            "[{kind: flip}, {kind: flip, axs: 1}]",
            r"entry 1: axs is not a setting of flip \(did you mean axis",
        ),
        ("[{kind: roll, zzz: 1}]", r"zzz is not a setting of roll \(there are: fields, axes\)"),
        ("[{axis: -1}]", "entry 0 has no kind. Expected a mapping with kind: one of flip, roll"),
        ("[flip]", "entry 0 has no kind"),
        ("[{kind: flip, axis: 1}]", r"entry 0: flip\.axis: .* less than 0"),
        ("[{kind: crop}]", r"entry 0: crop\.size: Field required"),
        ("flip", 'transforms is "flip". Expected a list, each with a kind: crop, flip'),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, [f"training.transforms={given}"])
