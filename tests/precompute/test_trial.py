"""What a trial says of the encoder."""

import pytest

from stoker.precompute.measure import Trial


@pytest.mark.parametrize(
    ("calls", "one_s"),
    [
        ([(8.0, 4), (8.0, 4), *[(4.0, 4)] * 6], 1.0),  # memory comes in during the first two calls
        ([(9.0, 1), (1.0, 1)], 1.0),
        ([(0.5, 2)], 0.25),
        ([(5.0, 1), (1.0, 0), (3.0, 2)], 2.0),  # a sample in blocks counts once, at its last
        ([], 0.0),
    ],
)
def test_the_first_calls_of_an_encoder_do_not_count(calls: list[tuple[float, int]], one_s: float) -> None:
    assert Trial(encodes_s=calls).encode_s == one_s
