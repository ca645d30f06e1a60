"""For tests of your own: conformance checks for sources and encoders, and faults to order.

README.md has the map of this folder.
"""

from stoker.testing.conformance import check_encoder, check_source
from stoker.testing.dexycb import write_dexycb
from stoker.testing.faults import Fault, FaultySource

__all__ = ["Fault", "FaultySource", "check_encoder", "check_source", "write_dexycb"]
