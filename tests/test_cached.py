"""One line for any Dataset: what it passes on, and what it refuses before anything is encoded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset, TensorDataset

import stoker
from stoker.errors import ConfigError, IncompleteError, SourceError


class Rows(Dataset[Tensor]):
    """Item i is full of i; items listed in `broken` hold a NaN. Counts how often it was read."""

    def __init__(self, count: int = 20, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken, self.reads = count, broken, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.full((3,), float("nan") if index in self.broken else float(index))


def cached(folder: Path, dataset: Any = None, encoder: Any = None, **changes: Any) -> stoker.Loader:
    settings: dict[str, Any] = {"cache_dir": folder, "device": "cpu", "shuffle": False, **changes}
    return stoker.cached(Rows() if dataset is None else dataset, encoder, **settings)


def test_storage_dtype_and_workers_reach_precompute_and_dtype_the_loader(tmp_path: Path) -> None:
    loader = cached(tmp_path, precompute={"dtype": "float16", "workers": 0}, dtype="float32")

    assert loader.dataset.schema["data"].dtype == "float16"
    assert next(iter(loader)).dtype == torch.float32


def test_a_broken_sample_is_an_error_until_a_part_may_be_quarantined(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="39 of 40 samples stored, 1 quarantined") as raised:
        cached(tmp_path, Rows(40, broken=(17,)), precompute={"workers": 0})
    assert "cached: precompute={'nan': 'allow', 'retry_quarantined': True}" in str(raised.value)
    assert "cached: precompute={'max_quarantined': 0.05}" in str(raised.value)

    allowed = cached(tmp_path, Rows(40, broken=(17,)), precompute={"workers": 0, "max_quarantined": 0.1})

    assert torch.cat([*allowed])[:, 0].tolist() == [float(i) for i in range(40) if i != 17]

    stored = {"workers": 0, "nan": "allow", "retry_quarantined": True}
    assert len(cached(tmp_path, Rows(40, broken=(17,)), precompute=stored).dataset) == 40


def test_nan_is_stored_where_it_is_allowed(tmp_path: Path) -> None:
    loader = cached(tmp_path, Rows(40, broken=(17,)), precompute={"workers": 0, "nan": "allow"})

    values = torch.cat([*loader])

    assert len(values) == 40
    assert bool(values[17].isnan().all())


def test_the_name_is_the_class_unless_given(tmp_path: Path) -> None:
    assert cached(tmp_path).dataset.name == "rows"
    assert cached(tmp_path, name="mine").dataset.name == "mine"
    assert {entry.name for entry in tmp_path.iterdir() if entry.is_dir()} >= {"rows", "mine"}


def test_the_encoder_may_run_elsewhere_than_batches_go(tmp_path: Path) -> None:
    """Here both are the CPU; that the setting is heard shows in the error for a device that is none."""
    with pytest.raises(ConfigError, match="device 'tpu'"):
        cached(tmp_path, precompute={"device": "tpu"})
    assert len(cached(tmp_path, device=torch.device("cpu"), precompute={"device": "cpu"})) == 1
    assert len(cached(tmp_path / "own", precompute={"device": None})) == 1


@pytest.mark.parametrize(
    "encoder",
    [lambda x: x, nn.Identity, stoker.GridEncoder, "dinov2", 5],
    ids=["function", "module-class", "encoder-class", "text", "number"],
)
def test_what_is_no_encoder_is_told_what_one_is(tmp_path: Path, encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"Expected an nn\.Module, an Encoder .*ModuleEncoder\(function\)"):
        cached(tmp_path, encoder=encoder)


def test_a_bare_module_is_an_encoder(tmp_path: Path) -> None:
    loader = cached(tmp_path, encoder=nn.Linear(3, 2), precompute={"workers": 0})

    assert next(iter(loader)).shape == (20, 2)


def test_a_bare_module_takes_the_only_field_there_is(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(4, 3))
    module = nn.Linear(3, 2)

    loader = stoker.cached(data, module, cache_dir=tmp_path, precompute={"workers": 0}, shuffle=False)

    assert torch.allclose(next(iter(loader))[0], module(data.tensors[0]), atol=1e-6)


def test_of_several_fields_the_hint_names_one_and_works_as_it_is_written(tmp_path: Path) -> None:
    data = StackDataset(label=torch.arange(4), values=torch.ones(4, 3))
    module = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"'label', 'values'") as raised:
        stoker.cached(data, module, cache_dir=tmp_path, precompute={"workers": 0})

    hint = re.search(r"encoder=(stoker\.ModuleEncoder\(.*\))", str(raised.value))
    assert hint is not None
    encoder = eval(hint[1], {"stoker": stoker, "module": module})
    loader = stoker.cached(data, encoder, cache_dir=tmp_path, precompute={"workers": 0})
    assert next(iter(loader))["latent"].shape == (4, 2)


def test_of_a_tuple_a_bare_module_takes_the_first_array(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(4), torch.ones(4, 3))

    numbers, latents = next(iter(cached(tmp_path, data, nn.Linear(3, 2), precompute={"workers": 0})))

    assert numbers.tolist() == [0, 1, 2, 3]
    assert latents.shape == (4, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": "4"}, r"batch_size is '4'\. Expected a whole number"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5\. Expected a whole number"),
        ({"batch_size": None}, r"batch_size is None\. Expected a whole number"),
        ({"batch_size": 0}, r"batch_size is 0\. Expected at least 1"),
        ({"device": "tpu"}, r"device 'tpu' is not known"),
        ({"windows": 3}, r"windows is 3\. Expected stoker\.Windows"),
        ({"transforms": 3}, r"transforms is 3"),
        ({"shuffle": "random"}, r"shuffle is 'random'"),
        ({"collate_fn": list}, r"collate_fn= is DataLoader's"),
        ({"batchsize": 4}, r"argument 'batchsize'\. Did you mean batch_size\?"),
        ({"cache": "c"}, r"'cache'.*cache_dir"),
        ({"cachedir": "x"}, r"argument 'cachedir'\. Did you mean cache_dir\?"),
        ({"shufle": True}, r"argument 'shufle'\. Did you mean shuffle\?"),
        ({"zzz": True}, r"argument 'zzz'$"),
        ({"dtype": "float12"}, r"dtype 'float12' cannot be served"),
        ({"precompute": {"timeouts": {"reed": 4}}}, r"\{'reed': 4\}.*the stages are start, open, read"),
        ({"precompute": {"timeouts": {"read": "4"}}}, r"timeouts.read must be above 0 seconds, got '4'"),
        ({"precompute": {"timeouts": 4}}, r"timeouts is 4\. Expected seconds by stage"),
        ({"workers": 4, "precompute": {"workers": 2}}, r"workers is given twice"),
        ({"timeouts": {"reed": 4}}, r"\{'reed': 4\}.*the stages are start, open, read"),
        ({"precompute": {"worker": 4}}, r"'worker'.*Did you mean workers\?"),
        ({"precompute": {"speed": 4}}, r"'speed'.*Expected one of .*nan.*workers"),
        ({"precompute": {"name": "mine"}}, r"'name'.*not a setting"),
        ({"device": "all"}, r"device is 'all'.*precompute=\{'device': 'all'\}"),
        ({"precompute": 4}, r"precompute is 4\. Expected its settings by name"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_wrong_arguments_are_named_before_anything_is_read(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    dataset = Rows()

    with pytest.raises(ConfigError, match=says):
        cached(tmp_path, dataset, **{"shuffle": True, **changes})

    assert dataset.reads == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("encoder", [None, torch.nn.Identity()])
def test_a_field_named_index_is_refused_before_anything_is_encoded(tmp_path: Path, encoder: Any) -> None:
    class Named(Rows):
        def __getitem__(self, index: int) -> Any:
            return {"index": index, "data": super().__getitem__(index)}

    with pytest.raises(ConfigError, match="records have a field 'index'"):
        cached(tmp_path, Named(), encoder, precompute={"workers": 0})
    assert not list(tmp_path.iterdir())


def test_deadlines_by_name(tmp_path: Path) -> None:
    assert len(cached(tmp_path, precompute={"workers": 0, "timeouts": {"read": 4}})) == 1


def test_a_value_changed_in_place_is_encoded_again(tmp_path: Path) -> None:
    values = torch.zeros(2000, 4)
    dataset = torch.utils.data.TensorDataset(values)
    first = cached(tmp_path, dataset, precompute={"workers": 0}, batch_size=2000)
    assert cached(tmp_path, dataset).dataset.path == first.dataset.path

    values[777] = 5

    again = cached(tmp_path, dataset, precompute={"workers": 0}, batch_size=2000)
    assert next(iter(again))[0][777].tolist() == [5, 5, 5, 5]


def test_too_many_broken_samples_are_listed_once_with_the_cures(tmp_path: Path) -> None:
    class Sink:
        interval_s = 0.0

        def __init__(self) -> None:
            self.lines: list[str] = []

        def update(self, snapshot: object) -> None: ...

        def note(self, text: str) -> None:
            self.lines.append(text)

        def close(self) -> None: ...

    sink = Sink()
    settings = {"workers": 0, "progress": sink}
    with pytest.raises(IncompleteError) as caught:
        cached(tmp_path, Rows(40, broken=(17,)), precompute=settings)

    said = str(caught.value)
    assert "".join([*sink.lines, said]).count("sample 17") == 1
    assert "retry_quarantined=True" in said
    assert "max_quarantined=0.05" in said
    cached(tmp_path, Rows(40, broken=(17,)), precompute={**settings, "max_quarantined": 0.05})


def test_a_class_in_place_of_a_dataset_is_answered_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"Rows is a class, .* Give an object of it, as Rows\(\.\.\.\)"):
        stoker.cached(Rows, cache_dir=tmp_path, shuffle=True)
    with pytest.raises(SourceError, match=r"TorchSource is a class"):
        stoker.cached(stoker.TorchSource, cache_dir=tmp_path, shuffle=True)
