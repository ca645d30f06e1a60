"""What opening and reading refuse, with the facts that callers need."""

import errno
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.sources import hdf5_blocks, hdf5_open
from stoker.sources.hdf5 import HDF5Source


def os_errors(error: BaseException | None) -> list[int | None]:
    """Errnos along the chain of causes."""
    found: list[int | None] = []
    while error is not None:
        if isinstance(error, OSError):
            found.append(error.errno)
        error = error.__cause__
    return found


def test_not_hdf5_and_vanished(write, ramp) -> None:
    path = write("a.h5", {"tensor": ramp(4, 3, 5)})
    other = path.with_name("text.h5")
    other.write_text("hello")
    with pytest.raises(SourceError, match=r"text\.h5 is no readable HDF5 file, 5 bytes"):
        HDF5Source(other).schema()
    source = HDF5Source(path)
    len(source)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.h5 does not exist \(any more\)") as caught:
        source.read(0)
    assert errno.ENOENT in os_errors(caught.value)


def linked(file: h5py.File, inner: Path) -> None:
    file["tensor"] = h5py.ExternalLink(inner.name, "tensor")


def group_linked(file: h5py.File, inner: Path) -> None:
    for number, name in enumerate(("0000", "0001")):
        file[f"{name}/data"] = np.zeros((3, 5))
        if number:
            file[f"{name}/data"].file.move(name, "kept")
            file[name] = h5py.ExternalLink(inner.name, "group")


def virtual(file: h5py.File, inner: Path) -> None:
    layout = h5py.VirtualLayout(shape=(4, 3, 5), dtype="float32")
    layout[:] = h5py.VirtualSource(inner.name, "tensor", shape=(4, 3, 5))
    file.create_virtual_dataset("tensor", layout)


def stored_outside(file: h5py.File, inner: Path) -> None:
    raw = inner.with_suffix(".raw")
    file.create_dataset("tensor", data=np.zeros((4, 3, 5), "float32"), external=[(str(raw), 0, 240)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(linked, r"'tensor' is an external link into .*inner\.h5", id="link"),
        pytest.param(group_linked, r"'0001/data' is an external link into .*inner\.h5", id="group-link"),
        pytest.param(virtual, r"'tensor' is virtual, put together from \['inner\.h5'\]", id="virtual"),
        pytest.param(stored_outside, r"'tensor' is stored outside, in .*inner\.raw", id="storage"),
    ],
)
def test_data_outside_the_file_is_refused(write, ramp, make, said: str) -> None:
    """Its changes would go unseen, because a part names and digests the outer file alone."""
    inner = write("inner.h5", {"tensor": ramp(4, 3, 5), "group/data": ramp(3, 5)})
    outer = inner.with_name("outer.h5")
    with h5py.File(outer, "w") as file:
        make(file, inner)

    with pytest.raises(SourceError, match=rf"outer\.h5: dataset {said}.*h5repack.*inner file"):
        HDF5Source(outer).schema()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError("Can't read data (file read failed: errno = 5, error message = 'Input/output error')"),
        RuntimeError("Unspecified error in H5Dread (errno = 5)"),
    ],
)
@pytest.mark.parametrize("gzip", [False, True], ids=["sample", "block"])
def test_an_input_error_is_among_the_causes(write, ramp, monkeypatch, error: Exception, gzip: bool) -> None:
    """So that a failure that passes can be told from a damaged sample."""

    def fail(*_: object) -> None:
        raise error

    source = HDF5Source(write("a.h5", {"tensor": ramp(4, 3, 5)}, gzip=gzip))
    len(source)
    monkeypatch.setattr(hdf5_blocks, "fetch", fail)

    with pytest.raises(SourceError) as caught:
        source.read(0)

    assert errno.EIO in os_errors(caught.value)


def test_a_file_that_a_writer_holds(write, ramp, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.h5", {"tensor": ramp(4, 3, 5)})
    monkeypatch.setattr(hdf5_open, "_LOCK_WAIT_S", 0.01)
    code = f"import h5py,sys;f=h5py.File({str(path)!r},'a');print('held',flush=True);sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as writer:
        assert writer.stdout.readline() == b"held\n"
        with pytest.raises(SourceError, match=r"a\.h5 is locked.*HDF5_USE_FILE_LOCKING") as caught:
            len(HDF5Source(path))
        writer.stdin.close()
        writer.wait(timeout=30)
    assert errno.EAGAIN in os_errors(caught.value)


@pytest.mark.parametrize(
    "error",
    [OSError, RuntimeError, KeyError, IndexError, ValueError, TypeError, AttributeError, ZeroDivisionError,
     OverflowError, AssertionError, SystemError, EOFError, NotImplementedError, UnicodeDecodeError],
)  # fmt: skip
def test_whatever_h5py_raises_names_path_dataset_and_sample(
    write, ramp, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    source = HDF5Source(write("a.h5", {"tensor": ramp(4, 3, 5)}), preset="pdebench")
    source.schema()

    def fails(*_: object) -> None:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd") if error is UnicodeDecodeError else error("odd")

    monkeypatch.setattr(hdf5_blocks, "fetch", fails)

    with pytest.raises(SourceError, match=r"a\.h5: dataset 'tensor', sample 2 cannot .*odd") as caught:
        source.read(2)
    assert isinstance(caught.value.__cause__, error)
