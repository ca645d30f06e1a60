"""Members that cannot go to worker processes are named before anything starts; what travels may go."""

import functools
import io
import queue
import socket
import sqlite3
import threading
import zipfile
from pathlib import Path

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from stoker.errors import SourceError
from stoker.sources.pickling import obstacles, pickle_for_process, random_members
from stoker.sources.torch_dataset import TorchSource


class Holds:
    """A Dataset with whatever it is given."""

    def __init__(self, **held) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        return np.ones(2) * index


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner) -> None:
        self.inner = inner


class Careful(Holds):
    """Leaves its handle out of its state."""

    def __getstate__(self):
        return {**self.__dict__, "handle": None}


def opened(kind: str, folder: Path):
    """A handle, and what it is called."""
    if kind == "text":
        (folder / "a.txt").write_text("a")
        return open(folder / "a.txt"), "an open file"
    if kind == "hdf5":
        file = h5py.File(folder / "a.h5", "w")
        file["u"] = [1.0]
        return file["u"], "an open HDF5 file"
    if kind == "database":
        return sqlite3.connect(":memory:", check_same_thread=False), "an open database"
    if kind == "socket":
        return socket.socket(), "an open socket"
    if kind == "archive":
        return zipfile.ZipFile(folder / "a.zip", "w"), "an open archive"
    makers = {"lock": threading.Lock, "event": threading.Event, "queue": queue.Queue}
    return makers[kind](), "a "


@pytest.mark.parametrize("kind", ["text", "hdf5", "database", "socket", "archive", "lock", "event", "queue"])
def test_a_handle_is_named_with_its_path(tmp_path: Path, kind: str) -> None:
    handle, called = opened(kind, tmp_path)
    dataset = Subset(Holds(files=[1, {"last": Slotted(handle)}]), [0, 1])

    with pytest.raises(SourceError) as caught:
        pickle_for_process(TorchSource(dataset))

    said = str(caught.value)
    assert f"dataset.dataset.files[1]['last'].inner is {called}" in said
    assert "first use" in said
    assert "precompute={'workers': 0}" in said
    if hasattr(handle, "close"):
        handle.close()
    elif kind == "hdf5":
        handle.file.close()


def test_several_are_named_together() -> None:
    held = {f"lock{i}": threading.Lock() for i in range(7)}

    with pytest.raises(SourceError, match=r"dataset\.lock0 .*dataset\.lock4 .*and 2 more") as caught:
        pickle_for_process(TorchSource(Holds(**held)))

    assert str(caught.value).count("leave it out of the state") == 1


def test_what_is_left_out_of_the_state_is_no_obstacle(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as handle:
        copied = cloudpickle.loads(pickle_for_process(TorchSource(Careful(handle=handle))))

    assert copied.read(2)["data"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "held",
    [
        io.BytesIO(b"a"),
        lambda x: x,
        functools.partial(max, 3),
        socket.AF_INET,
        torch.ones(3),
        np.random.default_rng(0),
        torch.nn.Linear(2, 2),
        Path("a"),
        [None] * 5,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_pickled_is_let_through(held) -> None:
    assert obstacles(Holds(held=held), "dataset") == []
    pickle_for_process(TorchSource(Holds(held=held)))


def test_a_tensor_elsewhere_than_on_the_cpu_is_an_obstacle() -> None:
    """`meta` stands for a tensor without memory; what stands here for a GPU is a tensor that says so."""

    class OnDevice(torch.Tensor):
        device = torch.device("cuda", 1)

    found = obstacles(
        Holds(table=torch.ones(2).as_subclass(OnDevice), shape=torch.ones(2, device="meta")), "d"
    )

    assert [str(one) for one in found] == ["d.table is a tensor on cuda:1"]
    assert "`.cpu()`" in found[0].cure


def test_an_object_that_refuses_to_be_pickled_is_named() -> None:
    class Refuses:
        def __reduce__(self):
            raise TypeError("no copies of me")

    with pytest.raises(
        SourceError, match=r"dataset\.deep\['it'\] \(Refuses\) cannot be sent .*no copies of me"
    ):
        pickle_for_process(TorchSource(Holds(deep={"it": Refuses(), "other": 1})))


class Lazy:
    """Opens its file as the hint says."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> np.ndarray:
        self.file = self.file or h5py.File(self.path)
        return self.file["u"][index]


def test_a_lazy_dataset_that_was_tried_out_is_told_to_be_made_again(tmp_path: Path) -> None:
    """To look at `dataset[0]` before all else is common, and opens the file."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["u"] = np.arange(6.0).reshape(3, 2)
    tried = Lazy(tmp_path / "a.h5")
    tried[0]

    with pytest.raises(SourceError, match=r"dataset\.file is an open HDF5 file.*new object"):
        pickle_for_process(TorchSource(tried))

    copied = cloudpickle.loads(pickle_for_process(TorchSource(Lazy(tmp_path / "a.h5"))))
    assert copied.read(2)["data"].tolist() == [4.0, 5.0]


def test_loops_end() -> None:
    dataset = Holds(other=[])
    dataset.other.append(dataset)

    assert obstacles(dataset, "dataset") == []


def test_what_draws_random_numbers_is_named() -> None:
    class RandomFlip:
        p = 0.5

    held = random_members(Holds(transform=[RandomFlip()], rng=np.random.default_rng()), "dataset")

    assert [text.partition(",")[0] for text in held] == ["dataset.rng", "dataset.transform[0]"]
