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
        ("[{kind: flop}]", r'entry 0: kind: "flop" is given. .* \(did you mean flip\?\)'),
        (
            "[{kind: flip}, {kind: flip, axs: 1}]",
            r"entry 1: axs: no field has this name \(did you mean axis",
        ),
        ("[{kind: roll, zzz: 1}]", r"zzz: no field has this name \(there are: fields, kind, axes\)"),
        ("[{axis: -1}]", "entry 0: kind: it is missing. Expected crop, flip, noise, normalize or roll"),
        ("[flip]", 'entry 0: "flip" is given. Expected an object with a kind: crop, flip'),
        ("[{kind: flip, axis: 1}]", r"entry 0: axis: 1 is given. Expected a whole number at most -1"),
        ("[{kind: crop}]", r"entry 0: size: it is missing. Expected a whole number"),
        (
            "[{kind: crop, size: [4, 0]}]",
            r"entry 0: size.1: 0 is given. Expected a whole number of at least 1",
        ),
        ("[{kind: noise, std: []}]", r"entry 0: std: an empty list is given. Expected a number, or a list"),
        ("flip", 'transforms is "flip". Expected a list, each with a kind: crop, flip'),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, [f"training.transforms={given}"])
