"""For tests of your own: conformance checks for sources and encoders, and faults to order.

The checks raise `AssertionError` with the promise that is broken.

    def test_my_source():
        check_source(MySource("data/"))

`FaultySource` makes a source hang, die, raise, dawdle or lie at the samples that you name. `write_dexycb`
writes a small made-up data set in that layout.
"""

from stoker.testing.conformance import check_encoder, check_source
from stoker.testing.dexycb import write_dexycb
from stoker.testing.faults import Fault, FaultySource

__all__ = ["Fault", "FaultySource", "check_encoder", "check_source", "write_dexycb"]
