import pytest

from stoker.errors import ConfigError
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.splits import Subset
from stoker.testing import check_source


def test_the_first_samples_of_several_parts(write, ramp) -> None:
    for i, rows in enumerate((3, 4, 5)):
        write(f"a_{i}.h5", {"tensor": ramp(rows, 2, 3) + i})
    source = HDF5Source(write("x.tmp", {}).parent)
    subset = Subset(source, 5)

    whole, cut = source.identity().parts, subset.identity().parts
    assert [part.count for part in cut] == [3, 2]
    assert cut[0] == whole[0]  # its shards are adopted once the limit is lifted
    assert cut[1].selection == "first 2 of all"
    assert list(subset.keys()) == list(source.keys())[:5]
    check_source(subset)


def test_a_limit_beyond_the_source_changes_nothing(write, ramp) -> None:
    source = HDF5Source(write("a.h5", {"tensor": ramp(3, 2, 3)}))

    assert Subset(source, 99).identity() == source.identity()
    with pytest.raises(IndexError, match="sample 1 does not exist"):
        Subset(source, 1).read(1)
    with pytest.raises(ConfigError, match="limit of 0"):
        Subset(source, 0)
