"""Samples that another process reads differently, or not at all, are refused before anything is encoded."""

import os
import random
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import stoker
from stoker.errors import SourceError, StalledError
from stoker.sources import torch_dataset
from stoker.sources.splits import Subset
from stoker.sources.torch_dataset import TorchSource
from tests.kit import forked as subprocess

HERE = os.getpid()


class Items:
    """Items from a function of the index."""

    def __init__(self, make, count: int = 20) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.make(index)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i, h=HERE: {"a": 1 / (os.getpid() == h or i != 8)}, r"sample 8 can be .*ZeroDivisionError"),
        (
            lambda i, h=HERE: 1 if os.getpid() == h else os._exit(3),
            r"read item 0 exited with code 3\. Workers",
        ),
    ],
    ids=["fails", "ends"],
)
def test_what_another_process_would_not_give_alike_is_refused(make, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        TorchSource(Items(make)).check_in_child()


def test_an_item_that_does_not_come_there_is_named() -> None:
    source = TorchSource(Items(lambda i, h=HERE: 1 if os.getpid() == h else time.sleep(3600)))
    source.probe_timeout_s = 0.5

    with pytest.raises(StalledError, match=r"in a second process, item 0 took more than 0\.5 s"):
        source.check_in_child()


def test_nothing_is_encoded_of_what_is_refused(tmp_path: Path) -> None:
    def slow(index: int) -> torch.Tensor:
        time.sleep(0.03)
        return torch.tensor([os.getpid()])

    with pytest.raises(SourceError, match="is another in a second process"):
        stoker.cached(Items(slow, 1000), cache_dir=tmp_path, device="cpu", shuffle=True)

    assert not list(tmp_path.rglob("shard-*"))


def test_the_process_that_fills_compares_what_it_reads_with_what_was_probed(tmp_path: Path) -> None:
    dataset = Items(lambda i: torch.tensor([os.getpid()]))

    with pytest.raises(SourceError, match="is another in a second process"):
        list(
            stoker.cached(
                dataset, cache_dir=tmp_path, device="cpu", wait=False, precompute={"workers": 1}, shuffle=True
            )
        )

    assert not list(tmp_path.rglob("shard-*"))


@pytest.mark.parametrize("workers", [None, 0])
def test_what_no_other_process_reads_may_differ_there(tmp_path: Path, workers: int | None) -> None:
    dataset = Items(lambda i: torch.tensor([os.getpid()]))
    loader = stoker.cached(
        dataset, cache_dir=tmp_path, device="cpu", precompute={"workers": workers}, shuffle=True
    )

    assert next(iter(loader)).unique().tolist() == [HERE]


def test_a_sample_that_fails_here_is_left_to_quarantine_and_the_others_are_compared() -> None:
    failing = TorchSource(Items(lambda i: 1 / (i - 19)))
    assert 19 not in failing.probed_indices()

    Subset(failing, 20).check_in_child()

    with pytest.raises(SourceError, match="is another in a second process"):
        Subset(TorchSource(Items(lambda i: torch.tensor([os.getpid() + 1 // (i - 19)]))), 20).check_in_child()


class Noisy:
    """Draws from every global generator, and in `own` from one of its own."""

    def __init__(self, count: int = 20) -> None:
        self.count, self.own = count, np.random.default_rng()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        drawn = [torch.rand(1).item(), np.random.random(), random.random()]
        return {"x": torch.ones(2) * index, "drawn": torch.tensor(drawn), "own": self.own.random()}


def test_frozen_draws_are_the_same_in_every_process_and_leave_the_callers_alone(
    tmp_path: Path, caplog
) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    torch.manual_seed(5)
    loaders = [
        stoker.cached(
            Noisy(), cache_dir=folder, device="cpu", shuffle=False, random="freeze",
            precompute={"workers": workers},
        )
        for folder, workers in zip(folders, (0, 1), strict=True)
    ]  # fmt: skip
    drawn = torch.rand(1)

    here, there = (next(iter(loader)) for loader in loaders)
    assert torch.equal(here["drawn"], there["drawn"])
    assert len(here["drawn"].unique()) == 60
    assert not torch.equal(here["own"], there["own"])
    assert loaders[0].dataset.fingerprint == loaders[1].dataset.fingerprint
    assert "one random draw is stored of drawn, own" in caplog.text
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_the_freeze_is_part_of_the_recipe(tmp_path: Path) -> None:
    dataset = Items(lambda i: torch.ones(2) * i)
    plain, frozen = (TorchSource(dataset, random=how).identity() for how in ("refuse", "freeze"))

    assert "random" not in plain.settings
    assert frozen.settings["random"] == "freeze"
    with pytest.raises(stoker.StokerError, match="random is 'yes'"):
        TorchSource(dataset, random="yes")


def test_random_output_is_refused_with_what_draws_it_and_the_cures(tmp_path: Path) -> None:
    class RandomCrop:
        def __call__(self, x):
            return x[..., random.randrange(9) :][..., :4]

    class Augmented(Items):
        transform = None

        def __getitem__(self, index: int):
            return self.transform(torch.arange(16.0) * index)

    dataset = Augmented(None)
    dataset.transform = RandomCrop()
    with pytest.raises(SourceError) as caught:
        stoker.cached(dataset, cache_dir=tmp_path, shuffle=True)

    said = str(caught.value)
    assert "(it holds dataset.transform, a" in said
    assert "RandomCrop" in said
    for cure in ("transforms=[...]", "seed it by the sample number", "random='freeze'"):
        assert cure in said
    assert not list(tmp_path.iterdir())


MAIN = """
import sys, torch, stoker
from torch.utils.data import Dataset
SCALE = 3.0
class Mine(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return {"x": torch.ones(3) * i * SCALE, "label": "odd" if i % 2 else "even"}
loader = stoker.cached(Mine(), cache_dir=sys.argv[1], device="cpu", batch_size=40, shuffle=False,
                       precompute={"workers": 1}, text={"label": ["even", "odd"]})
batch = next(iter(loader))
assert batch["x"][7].tolist() == [21.0] * 3 and batch["label"][:3].tolist() == [0, 1, 0], batch
"""


@pytest.mark.parametrize(
    "notebook", [pytest.param(False, id="script", marks=pytest.mark.slow), pytest.param(True, id="notebook")]
)
def test_a_dataset_of_a_script_or_notebook_is_read_by_workers(tmp_path: Path, notebook: bool) -> None:
    (tmp_path / "main.py").write_text(MAIN)
    words = [str(tmp_path / "main.py")]
    if notebook:  # as a notebook does: code without a file, in the namespace of __main__
        words = ["-c", f"exec(compile({MAIN!r}, '<cell 1>', 'exec'))"]
    words.append(str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr[-2000:]


CACHING = """
import functools, sys, torch
from stoker import TorchSource

@functools.lru_cache(maxsize=4)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Caching(torch.utils.data.Dataset):
    def __init__(self):
        self.bound = functools.lru_cache(2)(self.plain)

    def __len__(self):
        return 20

    def plain(self, index):
        return float(index)

    @functools.cache
    def method(self, index):
        return torch.ones(2) * index

    @staticmethod
    @functools.lru_cache
    def static(index):
        return index + 1

    def __getitem__(self, index):
        return self.method(index), self.bound(index), self.static(index), fibonacci(index)

if __name__ == "__main__":
    source = TorchSource(Caching())
    source.check_in_child()
    print({name: array.tolist() for name, array in source.read(3).items()})
"""


def test_functions_of_a_script_that_remember_travel_to_other_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CACHING)

    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "{'0': [3.0, 3.0], '1': 3.0, '2': 4, '3': 2}"


def test_storage_that_does_not_answer_ends_in_an_error_though_it_stops_all_threads(tmp_path: Path) -> None:
    """h5py keeps the interpreter's lock while it waits for a read."""
    script = tmp_path / "script.py"
    script.write_text("""
import ctypes, sys
import h5py
from stoker.errors import StalledError
from stoker.sources.torch_dataset import TorchSource

class Stored:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        assert h5py
        return {"u": ctypes.PyDLL(None).sleep(3600)}

source = TorchSource(Stored())
source.probe_timeout_s = 1.0
try:
    source.schema()
except StalledError as error:
    assert "item 0" in str(error), error
else:
    sys.exit("read")
""")
    subprocess.run([sys.executable, script], check=True, timeout=60)


def test_nothing_is_read_ahead_where_the_files_are_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process would have to import torch first, before a single sample is read."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["u"] = np.arange(12.0).reshape(6, 2)
    asked: list[str] = []
    monkeypatch.setattr(torch_dataset, "read_elsewhere", lambda *_, **__: asked.append("read") or {})

    class Held(Items):
        def __init__(self, path: Path) -> None:
            super().__init__(lambda i: h5py.File(path)["u"][i], count=6)
            self.path = path

    (read,) = TorchSource(Held(path)).read(3).values()
    assert read.tolist() == [6.0, 7.0]
    assert not asked
    monkeypatch.setattr(torch_dataset, "are_local", lambda _: False)
    TorchSource(Held(path)).schema()
    assert asked


@pytest.mark.slow
def test_what_was_read_ahead_in_another_process_is_not_read_there_again(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    source = TorchSource(Stored(counted))
    source.schema()
    source.check_in_child()

    assert len(counted.read_text()) == len(source.probed_indices())


class Stored(Items):
    """Items for which h5py is asked."""

    def __init__(self, counted: Path) -> None:
        super().__init__(lambda i: i)
        self.counted, self.home = counted, os.getpid()

    def __getitem__(self, index: int) -> int:
        assert not isinstance(index, h5py.File)
        if os.getpid() != self.home:
            with self.counted.open("a") as file:
                file.write(".")
        return index
