"""What opening and reading refuse, with the facts that callers need."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import h5py
import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.runtime.threads import RetryPolicy
from stoker.sources import hdf5_open
from stoker.sources.arrays import ArraySource
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
    with pytest.raises(SourceError, match=r"text\.h5 is not a readable HDF5 file, 5 bytes"):
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
    monkeypatch.setattr(hdf5_open, "fetch", fail)

    with pytest.raises(SourceError) as caught:
        source.read(0)

    assert errno.EIO in os_errors(caught.value)


def test_a_file_that_a_writer_holds(write, ramp, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.h5", {"tensor": ramp(4, 3, 5)})
    monkeypatch.setattr(hdf5_open, "_LOCKED", RetryPolicy(first_s=0.01, attempts=4))
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

    monkeypatch.setattr(hdf5_open, "fetch", fails)

    with pytest.raises(SourceError, match=r"a\.h5: row 2: .*'tensor'.*odd") as caught:
        source.read(2)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("source", [HDF5Source, ArraySource])
def test_all_damaged_files_of_a_folder_are_named_at_once(write, ramp, source) -> None:
    for number in range(5):
        path = write(f"a_{number}.h5", {"tensor": ramp(4, 3, 5)})
        if number in {0, 3}:
            path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(SourceError, match=r"a_0\.h5[\s\S]*a_3\.h5") as caught:
        len(source(path.parent))
    assert "a_1.h5" not in str(caught.value)
    assert "pattern" in str(caught.value)  # how to leave them out


def pipe_linked(file: h5py.File, pipe: str) -> None:
    file["tensor"] = h5py.ExternalLink(pipe, "x")


def pipe_linked_twice(file: h5py.File, pipe: str) -> None:
    with h5py.File(Path(pipe).with_name("inner.h5"), "w") as inner:
        inner["x"] = h5py.ExternalLink(pipe, "x")
    file["tensor"] = h5py.SoftLink("/other")
    file["other"] = h5py.ExternalLink("inner.h5", "x")


def pipe_beside(file: h5py.File, pipe: str) -> None:
    file["run/deep"] = h5py.ExternalLink(pipe, "x")
    file["tensor"] = np.zeros((4, 3, 5), "f4")


def pipe_as_growing_data(file: h5py.File, pipe: str) -> None:
    """Its shape is looked up in the other file."""
    layout = h5py.VirtualLayout((4, 3, 5), "f4", maxshape=(None, 3, 5))
    rows = slice(0, h5py.h5s.UNLIMITED)
    layout[rows] = h5py.VirtualSource(pipe, "x", shape=(4, 3, 5), maxshape=(None, 3, 5))[rows]
    file.create_virtual_dataset("tensor", layout)


@pytest.mark.parametrize("make", [pipe_linked, pipe_linked_twice, pipe_beside, pipe_as_growing_data])
def test_a_link_to_a_pipe_is_refused_and_not_opened(tmp_path: Path, make) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        make(file, str(tmp_path / "pipe.h5"))
    code = """
import sys
from stoker.errors import SourceError
from stoker.sources.arrays import ArraySource
from stoker.sources.hdf5 import HDF5Source
for source in (
    HDF5Source(sys.argv[1]), HDF5Source(sys.argv[1], fields={"tensor": "n t x"}), ArraySource(sys.argv[1])
):
    try:
        print("taken", len(source))
    except SourceError as error:
        print(error)
"""
    refusals = said(code, tmp_path / "a.h5")

    assert len(refusals) == 3
    assert all("a.h5" in line and "pipe.h5" in line for line in refusals), refusals


def said(code: str, path: Path) -> list[str]:
    """Return the lines that a program prints; where it hangs or is killed, the test fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def killed_while_writing(path: Path, **options: object) -> None:
    """A dataset of six samples that was made in advance; the fifth was begun, the sixth was not."""
    with h5py.File(path, "w") as file:
        data = file.create_dataset("tensor", (6, 4, 5), "f4", fillvalue=7, **options)
        data[:4] = np.arange(80).reshape(4, 4, 5)
        data[4, :2] = 1


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_what_was_never_written_is_an_error_of_its_samples(tmp_path: Path, compression: str | None) -> None:
    """HDF5 gives it as the fill value."""
    path = tmp_path / "a.h5"
    killed_while_writing(path, chunks=(1, 2, 5), compression=compression)
    for source in (HDF5Source(path), ArraySource(path)):
        assert source.read(3)[next(iter(source.schema()))].ravel().tolist() == list(range(60, 80))
        for number in (4, 5):
            with pytest.raises(SourceError, match=r"a\.h5: row \d.*'tensor'"):
                source.read(number)
    assert ArraySource(path, fill_missing=True).read(5)["tensor"].tolist() == [[7.0] * 5] * 4


def test_what_was_never_written_in_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("s0/u", data=np.ones((3, 5), "f4"))
        file.create_dataset("s1/u", (3, 5), "f4")  # contiguous, without its bytes
        file.create_dataset("s2/u", data=np.ones((3, 5), "f4"), chunks=(1, 5))
        file.create_dataset("s3/u", (3, 5), "f4", chunks=(3, 5))
        file.create_dataset("s4/u", data=np.ones((3, 5), "f4"), chunks=(2, 5), maxshape=(None, 5))
        for name in ("s0", "s1"):
            file[name].create_dataset("a", (), "f4")
    for source in (HDF5Source(path, fields={"u": "t x"}), ArraySource(path, fields={"u": "u"})):
        for number in (0, 2, 4):
            assert source.read(number)["u"].all()
        for number in (1, 3):
            with pytest.raises(SourceError, match=f"s{number}"):
                source.read(number)


def test_one_axis_of_chunks_per_sample_wherever_it_is(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("u", (4, 5, 6), "f4", chunks=(2, 2, 2))
        data[..., :4] = 1
        file.create_dataset("v", data=np.ones(6))
    source = HDF5Source(tmp_path / "a.h5", fields={"u": "t x n", "v": "n"})

    assert source.read(3)["u"].all()
    with pytest.raises(SourceError, match=r"row 4.*'u'"):
        source.read(4)


@pytest.mark.parametrize("chunks", [None, (1, 4, 8)])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("shape", [(10**9, 4, 8), (10**7, 4, 8), (4, 10**6, 10**5)])
def test_a_shape_without_data_is_refused_before_memory_is_asked_for(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...] | None, written: bool
) -> None:
    """A few kilobytes that state 10**9 samples got the process killed."""
    if chunks is None and written:
        pytest.skip("HDF5 writes all of it then")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("tensor", shape, "f4", chunks=chunks)
        if written:
            data[1, :4, :8] = 1
    code = """
import resource, sys
from stoker.errors import SourceError
from stoker.sources.arrays import ArraySource
from stoker.sources.hdf5 import HDF5Source
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for source in (HDF5Source(sys.argv[1], fields={"tensor": "n t x"}), ArraySource(sys.argv[1])):
    try:
        print("taken", len(source), source.read(0))
    except SourceError as error:
        print(error)
"""
    refusals = said(code, path)

    assert len(refusals) == 2
    assert all(line.startswith(str(path)) for line in refusals), refusals


def compressed_by_plugin(path: Path, code: int, *, skipped: bool = False) -> None:
    """A dataset with a filter that no HDF5 has built in, as hdf5plugin would write it."""
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1, 3, 5))
        plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((2, 3, 5))
        data = h5py.Dataset(h5py.h5d.create(file.id, b"tensor", h5py.h5t.IEEE_F32LE, space, plist))
        for row in range(2):
            data.id.write_direct_chunk((row, 0, 0), np.ones(15, "f4").tobytes(), filter_mask=int(skipped))


def test_a_filter_that_is_not_installed_is_named_before_anything_is_read(tmp_path: Path) -> None:
    compressed_by_plugin(tmp_path / "a.h5", 32015)

    for source in (HDF5Source(tmp_path / "a.h5"), ArraySource(tmp_path / "a.h5")):
        with pytest.raises(SourceError, match=r"a\.h5.*'tensor'.*32015.*pip install hdf5plugin"):
            len(source)


def test_chunks_that_a_missing_filter_was_left_out_of_are_read(tmp_path: Path) -> None:
    compressed_by_plugin(tmp_path / "a.h5", 32015, skipped=True)

    assert HDF5Source(tmp_path / "a.h5").read(1)["data"].all()


def test_a_process_that_reads_loads_the_plugins_itself(tmp_path: Path, monkeypatch, write, ramp) -> None:
    """A user's `import hdf5plugin` is one of the main process; workers said that the file was damaged."""
    source = HDF5Source(write("a.h5", {"tensor": ramp(4, 3, 5)}, gzip=True))
    len(source)
    there: list[bool] = []
    hdf5_open._import_plugins.cache_clear()
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: bool(there))
    monkeypatch.setattr(hdf5_open, "import_module", lambda name: there.append(name == "hdf5plugin"))

    assert cloudpickle.loads(cloudpickle.dumps(source)).read(0)["data"].shape == (3, 1, 5, 1)
    assert there == [True]
    hdf5_open._import_plugins.cache_clear()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_parameter_that_is_no_number_is_named_with_its_file(write, ramp, value: float) -> None:
    path = write("a.h5", {"tensor": ramp(4, 3, 5)}, Nu=value, Eta=1.0)

    with pytest.raises(SourceError, match=r"a\.h5.*Nu.*(nan|inf)"):
        HDF5Source(path).identity()
    assert HDF5Source(path, fields={"tensor": "n t x"}).identity().parts[0].values == {}


@pytest.mark.slow
def test_groups_in_one_another_are_described_in_a_time_that_grows_with_their_number(tmp_path: Path) -> None:
    """What looks each up by its path from the top takes minutes for 3,000."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        deepest = file
        for _ in range(3000):
            deepest = deepest.create_group("g")
        deepest["u"] = np.ones((3, 5), "f4")
        deepest["top"] = file["g"]
    code = "import sys\nfrom stoker.sources.arrays import ArraySource\nsource = ArraySource(sys.argv[1])"
    code += "\nprint(len(source), *map(len, source.schema()))"

    count, *depths = map(int, said(code, path)[0].split())

    assert count == 1
    assert depths == [len("g." * 2999 + "u")], "each dataset is there once, by its one path"


def test_files_that_link_each_other_are_looked_at_once(tmp_path: Path) -> None:
    """By names that grow with each step, as `../runs/b.h5` of one folder down."""
    (tmp_path / "runs").mkdir()
    for own, other in (("a", "b"), ("b", "a")):
        with h5py.File(tmp_path / "runs" / f"{own}.h5", "w") as file:
            file["tensor"] = np.ones((4, 3, 5), np.float32)
            file["next"] = h5py.ExternalLink(f"../runs/{other}.h5", "/")
            file["again"] = h5py.ExternalLink(f"../runs/{other}.h5", "/tensor")
    code = (
        "import sys; from stoker.sources.hdf5 import HDF5Source; "
        "print(len(HDF5Source(sys.argv[1], fields={'tensor': 'n t x'})))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "runs")], capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"8\n"
