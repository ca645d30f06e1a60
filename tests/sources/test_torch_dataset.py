import logging
import platform
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import stoker
from stoker.errors import ConfigError, SourceError, StalledError
from stoker.schema import Field
from stoker.sources.splits import SplitOf
from stoker.sources.torch_dataset import TorchSource
from stoker.testing import check_source
from tests.kit import forked


class Items(Dataset):
    """Items from a function of the index."""

    def __init__(self, make, count: int = 20) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.make(index)


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def field(*shape: int, dtype: str = "float32", **meaning: bool) -> Field:
    return Field(shape=shape, dtype=dtype, **meaning)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda i: torch.full((2, 3), i), {"data": field(2, 3, dtype="int64")}, id="tensor"),
        pytest.param(lambda i: i / 2, {"data": field(dtype="float64")}, id="number"),
        pytest.param(lambda i: (torch.ones(3), i), {"0": field(3), "1": field(dtype="int64")}, id="tuple"),
        pytest.param(
            lambda i: [i > 3, 0.5], {"0": field(dtype="bool"), "1": field(dtype="float64")}, id="list"
        ),
        pytest.param(
            lambda i: Pair(torch.ones(3), i), {"x": field(3), "y": field(dtype="int64")}, id="named"
        ),
        pytest.param(
            lambda i: {"a": {"b": np.ones((2,), ">f8"), "c": [1, 2, i]}, "d": (np.float64(i),)},
            {"a.b": field(2), "a.c": field(3, dtype="int64"), "d": field(1, dtype="float64")},
            id="nested",
        ),
        pytest.param(lambda i: torch.ones(2, dtype=torch.complex128), {"data": field(2, 2)}, id="complex"),
        pytest.param(lambda i: i + 0.1j, {"data": field(2, dtype="float64")}, id="complex-number"),
        pytest.param(lambda i: np.ones(2, "u2") * i, {"data": field(2, dtype="int32")}, id="uint16"),
        pytest.param(lambda i: torch.ones(2, requires_grad=True) * i, {"data": field(2)}, id="needs-grad"),
        pytest.param(lambda i: torch.arange(6.0).view(2, 3).T, {"data": field(3, 2)}, id="not-contiguous"),
    ],
)
def test_items(make, expected: dict) -> None:
    source = TorchSource(Items(make))

    assert source.schema() == expected
    check_source(source)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(float, id="python"),
        pytest.param(np.float64, id="numpy"),
        pytest.param(np.asarray, id="array"),
        pytest.param(lambda value: torch.tensor(value, dtype=torch.float64), id="tensor"),
        pytest.param(lambda value: {"at": [value, 0.1]}, id="list"),
    ],
)
def test_numbers_keep_every_digit_on_their_way_to_a_batch(number, tmp_path: Path) -> None:
    times = [1_763_884_800.25 + i for i in range(40)]  # one value, as float32
    dataset = Items(lambda i: number(times[i]), 40)

    (batch,) = stoker.cached(
        dataset, cache_dir=tmp_path, batch_size=40, shuffle=False, precompute={"workers": 0}
    )

    served = batch if torch.is_tensor(batch) else batch["at"]
    assert served.reshape(40, -1)[:, 0].tolist() == times
    assert served.dtype == torch.float64


def test_bfloat16_travels_as_bits() -> None:
    values = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    source = TorchSource(TensorDataset(values))

    assert source.schema() == {"0": field(3, dtype="bfloat16")}
    bits = source.read(7)["0"]
    assert bits.dtype == np.uint16
    assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), values[7])
    check_source(source)


def test_images_are_height_width_channels() -> None:
    image = pytest.importorskip("PIL.Image")
    modes = {"RGB": (4, 6, 3), "L": (4, 6, 1), "P": (4, 6, 3), "1": (4, 6, 1)}

    for mode, shape in modes.items():
        source = TorchSource(Items(lambda i, mode=mode: (image.new(mode, (6, 4), i % 2), i)))
        assert source.schema()["0"] == field(*shape, dtype="uint8")
        check_source(source)


def test_time_is_cut_only_where_it_is_declared() -> None:
    dataset = Items(lambda i: {"u": torch.arange(40.0).view(10, 4) + i, "p": torch.ones(10)})
    source = TorchSource(dataset, time=("u",))

    assert source.schema() == {"u": field(10, 4, time=True), "p": field(10)}
    assert {name: a.shape for name, a in source.read(3, 2, 5).items()} == {"u": (3, 4), "p": (10,)}
    check_source(source)
    assert not TorchSource(dataset).schema()["u"].time


def test_pieces_of_one_sample_read_the_item_once() -> None:
    calls = []
    source = TorchSource(Items(lambda i: calls.append(i) or torch.ones(8, 2) * i), time=("data",))
    source.schema()
    calls.clear()
    for start in range(0, 8, 2):
        source.read(5, start, start + 2)

    assert calls == [5]


def test_lengths_that_vary_are_found_and_said(caplog) -> None:
    source = TorchSource(Items(lambda i: {"boxes": torch.ones(i % 4, 4), "x": torch.ones(2)}))
    with caplog.at_level(logging.INFO, logger="stoker"):
        assert source.schema() == {"boxes": field(-1, 4, ragged=True), "x": field(2)}

    assert "'boxes' varies along axis 0 and is kept ragged" in caplog.text
    check_source(source)


def test_a_length_that_varies_where_no_probe_looked() -> None:
    dataset = Items(lambda i: torch.ones(5 if i == 123 else 3), count=1000)

    with pytest.raises(
        SourceError,
        match=r"item 123 .*, field 'data' is float32 \(5,\).*TorchSource\(dataset, ragged=\('data',\)\)",
    ):
        TorchSource(dataset).read(123)
    assert TorchSource(dataset, ragged=("data",)).read(123)["data"].shape == (5,)
    other = Items(lambda i: torch.ones(3, dtype=torch.int32 if i == 123 else torch.float32), count=1000)
    with pytest.raises(SourceError, match=r"is int32 \(3,\), expected float32 "):
        TorchSource(other).read(123)


def endless(item):
    """An item that contains itself."""
    item.append(item) if isinstance(item, list) else item.update(again=item)
    return item


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: {"x": torch.ones(2), "label": "cat"}, r"item 0 .*, field 'label' is text \('cat'\)"),
        (lambda i: {"x": None}, "field 'x' is None"),
        (lambda i: {"x": object()}, "field 'x' is of type object"),
        (lambda i: torch.ones(2).to_sparse(), "of layout torch.sparse_coo"),
        (lambda i: np.array(["a"]), "has dtype <U1, which cannot be stored"),
        (
            lambda i: torch.ones([2] * (1 + i % 2)),
            r"\(2,\) in sample 0 and float32 \(2, 2\) in sample 1.*one number of axes",
        ),
        (lambda i: torch.ones(2).to(torch.float64 if i % 2 else torch.int32), "int32 .* and float32"),
        (lambda i: {"a": {"b": 1}, "a.b": 2}, r"field 'a\.b' occurs twice"),
        (lambda i: {1: i, "1": i}, "field '1' occurs twice"),
        (lambda i: {"x": 2**63}, "field 'x' is a whole number of 64 bits"),
        (lambda i: {"x": [1, 2**63]}, "field 'x' is a whole number of 64 bits"),
        (lambda i: {"x": [np.uint64(2**63), -1]}, "field 'x' is a whole number of 64 bits"),
        (lambda i: {"x": [[1, 2], []]}, r"item 0 .*, field 'x.1' is an empty list.*np.zeros\(\(0, 4\)"),
        (lambda i: endless({}), r"item 0 .*, field 'again.again.*nested more than 64 deep. Does it contain"),
        (lambda i: endless([]), r"item 0 .*, field '0.0.0.*nested more than 64 deep"),
        (lambda i: {"x": np.uint64(2**63)}, "field 'x' has dtype uint64, .*integers that fit int64"),
        (lambda i: {"x": np.ma.masked_array([1.0, 2.0], [False, True])}, "field 'x' is a masked array"),
        (lambda i: torch.ones(2, device="meta"), "field 'data' is a meta tensor"),
        (lambda i: {"x": 1} if i % 2 else {"y": 1}, r"sample 1 has fields \['x'\], sample 0 has \['y'\]"),
    ],
)
def test_items_that_cannot_be_stored_are_named(make, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        TorchSource(Items(make)).schema()


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"x": torch.ones(2), "noise": torch.randn(2)},
        lambda i: {"x": 1, "noise": np.random.random()},
        lambda i: {"x": 1, "noise": torch.ones(2).flip(0) * (1 if random.random() < 0.5 else 2)},
    ],
    ids=["torch", "numpy", "random-flip"],
)
def test_random_output_is_refused(make) -> None:
    with pytest.raises(SourceError, match=r"sample \d+, field 'noise' changes when it is read again"):
        TorchSource(Items(make)).schema()


def test_probing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(1).item(), random.random(), np.random.random())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)

    def seeded(i: int) -> torch.Tensor:
        torch.manual_seed(i)
        np.random.seed(i)
        random.seed(i)
        return torch.rand(2) + np.random.random() + random.random()

    TorchSource(Items(seeded)).schema()
    assert (torch.rand(1).item(), random.random(), np.random.random()) == expected


def test_a_sample_that_raises_does_not_stop_the_others() -> None:
    def make(i: int) -> torch.Tensor:
        if i == 0:
            raise OSError("unreadable image")
        return torch.ones(2) * i

    source = TorchSource(Items(make))

    assert source.schema() == {"data": field(2)}
    with pytest.raises(OSError, match="unreadable"):
        source.read(0)
    with pytest.raises(SourceError, match="OSError: always"):
        TorchSource(Items(lambda i: (_ for _ in ()).throw(OSError("always")))).schema()


def test_what_is_no_map_style_dataset() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.ones(1)

    for wrong in (Stream(), object()):
        with pytest.raises(SourceError, match="has no length and items by index"):
            TorchSource(wrong)
    with pytest.raises(SourceError, match="is empty"):
        TorchSource(Items(lambda i: i, count=0))
    with pytest.raises(SourceError, match=r"has no length: len\(dataset\) raised ValueError"):
        TorchSource(Items(lambda i: i, count=-1))
    with pytest.raises(ConfigError, match="3 keys for 20 samples"):
        TorchSource(Items(lambda i: i), keys=["a"] * 3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["a", None], r"keys\[1\], the key of sample 1, is None"),
        ([5, True], r"keys\[1\].* is True"),
        ([1.5, 2.5], r"keys\[0\].* is 1\.5"),
        (torch.arange(2), r"keys\[0\].* is tensor\(0\).*tolist"),
        ([b"a", b"b"], r"keys\[0\].* is b'a'"),
        ("ab", "'ab' for 2 samples"),
        (3, "3 for 2 samples"),
    ],
)
def test_a_key_that_is_neither_text_nor_a_number_is_refused_with_its_sample(keys, said):
    with pytest.raises(ConfigError, match=said):
        TorchSource([1.0, 2.0], keys=keys)


def test_samples_may_share_a_key_and_whole_numbers_are_keys():
    assert TorchSource([1.0, 2.0, 3.0], keys=["a", "b", "a"]).keys() == ["a", "b", "a"]
    assert TorchSource([1.0, 2.0], keys=np.array([7, 8])).keys() == ["7", "8"]
    with pytest.raises(ConfigError, match=r"name \['u'\]; the fields are data"):
        TorchSource(Items(lambda i: i), time=("u",)).schema()


def test_subset_and_concat() -> None:
    base = TensorDataset(torch.arange(60.0).view(20, 3))
    for dataset in (
        Subset(base, [3, 1, 7]),
        ConcatDataset([base, base]),
        Subset(ConcatDataset([base, base]), [30]),
    ):
        check_source(TorchSource(dataset))

    unprobed = [0, 1, 17, *range(3, 20)]  # of 20 items number 2 is not among the sixteen probes
    one, other = (TorchSource(Subset(base, indices)).identity() for indices in (list(range(20)), unprobed))
    assert one.parts[0].digest != other.parts[0].digest


def test_identity_sees_code_values_length_and_transforms() -> None:
    class Scaled(Items):
        pass

    def double(x):
        return x * 2

    datasets = [
        Items(lambda i: torch.ones(2) * i),
        Items(lambda i: torch.ones(2) * i * 1.5),
        Scaled(lambda i: torch.ones(2) * i),
        Items(lambda i: torch.ones(2) * i, count=21),
        Items(double),
        Items(lambda i: torch.ones(2) * i * 1),  # the first one's values from other code
    ]
    seen = [TorchSource(dataset).identity() for dataset in datasets]

    assert all(identity.sampled for identity in seen)
    assert len({repr(identity) for identity in seen}) == len(datasets)
    assert seen[0].kind == "torch/1"


def test_identity_of_held_files_is_free_of_their_place(tmp_path: Path) -> None:
    class Held(Dataset):
        def __init__(self, root: Path) -> None:
            self.root = root
            self.files = [str(root / name) for name in ("a.bin", "b.bin")]
            self.handle = None

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return np.fromfile(self.files[index], dtype="u1")

    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for name in ("a.bin", "b.bin"):
            (tmp_path / place / name).write_bytes(name.encode())
    one, two = (TorchSource(Held(tmp_path / place)) for place in ("one", "two"))

    assert one.identity().settings == two.identity().settings
    assert one.identity().parts[0].digest == two.identity().parts[0].digest
    assert [file.name for file in one.identity().parts[0].files] == ["a.bin", "b.bin"]
    check_source(one)
    (tmp_path / "two" / "c.bin").touch()
    assert one.identity().settings != TorchSource(Held(tmp_path / "two")).identity().settings


def test_a_given_identity_is_the_users_word() -> None:
    one, two = (TorchSource(Items(lambda i, k=k: torch.ones(2) * i * k), version="v1") for k in (1, 2))

    assert one.identity() == two.identity()
    assert not one.identity().sampled
    assert one.identity() != TorchSource(Items(lambda i: i), version="v2").identity()
    with pytest.raises(SourceError, match="changes when it is read again"):
        TorchSource(Items(lambda i: torch.rand(1)), version="v1").schema()


def test_handles_opened_while_probing_stay_behind(tmp_path: Path) -> None:
    """The usual lazy pattern; an open h5py file cannot be pickled."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["u"] = np.arange(40.0).reshape(20, 2)

    class Lazy(Dataset):
        file = None

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int):
            if self.file is None:
                self.file = h5py.File(path)
            return self.file["u"][index]

    source = TorchSource(Lazy())
    source.read(3)

    copied = cloudpickle.loads(cloudpickle.dumps(source))
    np.testing.assert_array_equal(copied.read(3)["data"], source.read(3)["data"])


def test_a_dataset_defined_in_a_script_reaches_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, cloudpickle, torch\n"
        "from torch.utils.data import Dataset\n"
        "from stoker.sources.torch_dataset import TorchSource\n"
        "class Mine(Dataset):\n"
        "    def __len__(self): return 5\n"
        "    def __getitem__(self, i): return {'x': torch.ones(3) * i}\n"
        "source = TorchSource(Mine())\n"
        "assert '__main__.Mine' in source.identity().settings['code']\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(source))\n"
    )
    packed = forked.run([sys.executable, script], capture_output=True, check=True, timeout=120).stdout

    copied = cloudpickle.loads(packed)
    assert copied.read(4)["x"].tolist() == [4.0, 4.0, 4.0]


def test_a_dataset_without_torch_does_not_import_it(tmp_path: Path) -> None:
    code = (
        "import sys\nimport numpy as np\nfrom stoker.sources.torch_dataset import TorchSource\n"
        "class Plain:\n    def __len__(self): return 3\n    def __getitem__(self, i): return np.ones(2) * i\n"
        "assert TorchSource(Plain()).read(2)['data'].sum() == 4\nTorchSource(Plain()).identity()\n"
        "assert 'torch' not in sys.modules"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr


def test_an_item_that_never_comes_is_named_while_probing() -> None:
    """It runs in the caller's process, where nobody else could end it."""
    never = threading.Event()
    source = TorchSource(Items(lambda i: never.wait() if i == 9 else torch.ones(2)))
    source.probe_timeout_s = 0.5

    with pytest.raises(StalledError, match=r"probing .*Items: item 9 did not arrive within 0\.5 s") as caught:
        source.schema()

    assert "threading.py" in str(caught.value)
    assert "test_torch_dataset.py" in str(caught.value)
    assert "source.probe_timeout_s = 300" in str(caught.value)
    never.set()


def test_slow_items_are_not_late() -> None:
    source = TorchSource(Items(lambda i: threading.Event().wait(0.03) or torch.ones(2)))
    source.probe_timeout_s = 0.5

    assert source.schema() == {"data": field(2)}


def test_a_hanging_item_does_not_hold_up_the_end_of_the_program() -> None:
    code = (
        "import time\nfrom stoker.sources.torch_dataset import TorchSource\n"
        "class Hangs:\n    def __len__(self): return 3\n    def __getitem__(self, i): time.sleep(3600)\n"
        "source = TorchSource(Hangs())\nsource.probe_timeout_s = 0.3\nsource.schema()\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "StalledError: probing __main__.Hangs: item 0 did not arrive" in done.stderr


@pytest.mark.parametrize("workers", [0, None])
def test_a_connection_opened_in_init_is_named_with_what_to_do(
    tmp_path: Path, workers: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Rows(Items):
        def __init__(self) -> None:
            super().__init__(lambda i: torch.tensor(self.db.execute("select ?", (i,)).fetchone()))
            self.db = sqlite3.connect(tmp_path / "a.db")

    rows = Rows()
    with pytest.raises(SourceError, match=r"dataset\.db is an open database.*first use in __getitem__"):
        stoker.cached(rows, cache_dir=tmp_path, precompute={"workers": workers}, shuffle=True)
    rows.db.close()
    assert len(caplog.records) <= 1


def test_a_dataset_that_always_fails_is_an_error_with_its_own() -> None:
    with pytest.raises(SourceError, match=r"ZeroDivisionError: division by zero") as caught:
        TorchSource(Items(lambda i: 1 / 0)).schema()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_connection_opened_on_first_use_stays_in_the_thread_that_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as made:
        made.execute("create table t as with recursive n(i) as (values (0) union all select i + 1 from n "
                     "where i < 19) select i from n")  # fmt: skip
    made.close()

    class Rows(Dataset):
        opened = None

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int):
            if self.opened is None:
                self.opened = sqlite3.connect(path)
            return torch.tensor(self.opened.execute("select i from t where i = ?", (index,)).fetchone())

    source = TorchSource(Rows())
    assert source.read(7)["data"].tolist() == [7]

    eager = Rows()
    eager.opened = sqlite3.connect(path)
    source = TorchSource(eager)
    source.probe_timeout_s = None
    assert source.read(7)["data"].tolist() == [7]
    eager.opened.close()


def test_the_module_of_a_dataset_says_nothing_about_splits() -> None:
    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((2,), float(index))

    Numbers.__module__, Numbers.__qualname__ = "train", "Numbers"
    sizes = [len(SplitOf(TorchSource(Numbers()), split)) for split in ("train", "val", "test")]

    assert sum(sizes) == 200
    assert all(sizes)


class Decoded(Dataset):
    """Items of 0.7 MB that take temporaries of 1.4 MB."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index):
        return (np.full((700, 1000), index, np.uint16) + 1).astype(np.uint8)


PAGES = """
import resource
import numpy as np
from stoker import TorchSource
from tests.sources.test_torch_dataset import Decoded

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

source = TorchSource(Decoded())
rows = {"data": np.zeros(source.schema()["data"].shape, np.uint8)}
for index in range(10):
    source.read_into(index, rows)
before = pages()
for index in range(10, 60):
    assert source.read_into(index, rows) is None
    assert (rows["data"] == index + 1).all()
print((pages() - before) / 50)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how another malloc keeps pages is not known")
def test_most_pages_of_an_item_are_used_for_the_next_one() -> None:
    """In a program of its own: what was freed before decides what malloc keeps."""
    done = subprocess.run(
        [sys.executable, "-c", PAGES], capture_output=True, text=True, timeout=120, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip

    assert float(done.stdout) < 600, "822 when each item is freed before the next is made"


def test_an_item_that_was_read_does_not_go_with_the_source() -> None:
    source = TorchSource(Decoded())
    source.schema()
    before = len(cloudpickle.dumps(source))
    source.read(3)

    assert len(cloudpickle.dumps(source)) < before + 1000


@pytest.mark.parametrize("wrong", ["nothing", "too much"])
def test_the_check_of_a_source_notices_rows_that_are_wrong(wrong: str) -> None:
    class Wrong(TorchSource):
        def read_into(self, index, rows):
            if wrong == "nothing":
                return None
            for name, values in self.read(index).items():
                around = rows[name].base
                around[:] = values
            return None

    dataset = Items(lambda index: torch.full((2, 3), float(index)))
    check_source(TorchSource(dataset))

    with pytest.raises(AssertionError, match="read_into"):
        check_source(Wrong(dataset))
