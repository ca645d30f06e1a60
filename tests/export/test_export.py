"""A cache as files of other libraries, read back by those libraries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import stoker
from stoker.errors import (
    ConfigError,
    CorruptError,
    IncompleteError,
    ReadOnlyError,
    RecordError,
    ResourceError,
    StalledError,
)
from stoker.export import ExportReport, ExportSettings, export_cache
from stoker.runtime.locks import lock_folder
from stoker.schema import Field
from stoker.store import Cache, make_recipe, open_cache, open_folder
from stoker.store.failures import Failure
from tests.store.fakes import RAGGED, FakeSource, fill, make_cache
from tests.test_cached_real import BurgersSet, Darcy

PACKED = {
    "latent": Field(shape=(3, 200), dtype="float32"),
    "steps": Field(shape=(-1, 130), dtype="float32", ragged=True),
}
MIXED = {
    "flag": Field(shape=(), dtype="bool"),
    "half": Field(shape=(5,), dtype="float16"),
    "brain": Field(shape=(2, 3), dtype="bfloat16"),
    "byte": Field(shape=(7,), dtype="uint8"),
    "long": Field(shape=(), dtype="int64"),
    "none": Field(shape=(0, 2), dtype="float32"),
}


def export(cache: Cache, out: Path, to: str = "safetensors", **settings: Any) -> ExportReport:
    return export_cache(cache, out, ExportSettings(to=to, **settings))  # type: ignore[arg-type]


def stacked(cache: Cache, name: str) -> Tensor:
    return torch.stack([cache[number][name] for number in cache.indices])


def mapped(folder: Path) -> dict[str, Tensor]:
    """What the documented files of the tensordict layout hold, without that library."""
    meta = json.loads((folder / "meta.json").read_text())
    found: dict[str, Tensor] = {}
    for name, entry in meta.items():
        if isinstance(entry, dict):
            dtype, shape = getattr(torch, entry["dtype"].removeprefix("torch.")), entry["shape"]
            data = (folder / f"{name}.memmap").read_bytes() if np.prod(shape) else b""
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
            found[name] = flat.reshape(shape)
            assert entry["is_nested"] is False
    sizes = {len(tensor) for tensor in found.values()}
    assert meta["shape"] == ([*sizes] if len(sizes) == 1 else [])
    return found


def read(folder: Path, to: str) -> dict[str, Tensor]:
    return load_file(folder / "records.safetensors") if to == "safetensors" else mapped(folder)


@pytest.mark.parametrize("to", ["safetensors", "tensordict"])
def test_every_dtype_comes_back_in_order_of_number(to: str, tmp_path: Path) -> None:
    source = FakeSource(MIXED, parts=[("a", 9), ("b", 4)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [12, 10, 11, 9, 7, 8, 0, 4, 3, 2, 1, 6, 5], group=1, shard_bytes=200)
    cache = folder.finish()

    report = export(cache, tmp_path / "out", to)

    found = read(tmp_path / "out", to)
    assert found.keys() == {"index", *MIXED}
    assert found["index"].tolist() == [*range(13)]
    for name in MIXED:
        expected = stacked(cache, name)
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    assert report.records == 13
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["fingerprint"] == cache.fingerprint
    for entry in manifest["files"]:
        data = (tmp_path / "out" / entry["file"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert (entry["records"], entry["first"], entry["last"]) == (13, 0, 12)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "x"], "nothing temporary is left"
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_several_files_have_an_index_in_the_usual_form(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, shard_bytes=2000)

    report = export(cache, tmp_path / "out", file_bytes=5000)

    index = json.loads((tmp_path / "out" / "records.safetensors.index.json").read_text())
    names = sorted({*index["weight_map"].values()})
    assert names == [f"records-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert all(index["weight_map"][key] == name for key in file.keys())  # noqa: SIM118
            own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert sum(t.nbytes for t in own.values()) <= 5000
        tensors |= own
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name in ("latent", "nu"):
        assert torch.equal(torch.cat([tensors[f"{name}.{i:05d}"] for i in range(1, 5)]), stacked(cache, name))
    assert [file.first for file in report.files] == [0, 4, 8, 12]


@pytest.mark.parametrize("to", ["safetensors", "tensordict"])
def test_records_of_varying_length_are_written_as_chosen(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path, FakeSource(RAGGED), shard_bytes=300)
    tokens = [cache[number]["tokens"] for number in cache.indices]
    lengths = [len(one) for one in tokens]
    with pytest.raises(ConfigError, match=r"ragged='nested' \(one after another.*ragged='pad' \(zeros up to"):
        export(cache, tmp_path / "out", to)

    monkeypatch.setattr("stoker.extras.export.run.PIECE_BYTES", 50)  # two records or three
    export(cache, tmp_path / "nested", to, ragged="nested")
    export(cache, tmp_path / "pad", to, ragged="pad")

    nested, padded = read(tmp_path / "nested", to), read(tmp_path / "pad", to)
    assert torch.equal(nested["tokens"], torch.cat(tokens))
    assert nested["tokens.offsets"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert torch.equal(padded["tokens"], torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True))
    assert padded["tokens.lengths"].tolist() == lengths
    assert 0 in lengths, "a record without steps is one of them"
    for found in (nested, padded):
        assert torch.equal(found["label"], stacked(cache, "label"))


def test_nested_records_in_several_files_have_offsets_of_their_own(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, FakeSource(RAGGED), shard_bytes=300)

    report = export(cache, tmp_path / "out", ragged="nested", file_bytes=400)

    tokens: list[Tensor] = []
    for i, file in enumerate(report.files, 1):
        found = load_file(tmp_path / "out" / file.file)
        tokens += found[f"tokens.{i:05d}"].tensor_split(found[f"tokens.offsets.{i:05d}"][1:-1])
        assert sum(t.nbytes for t in found.values()) <= 400
    assert len(report.files) > 2
    for number, own in zip(cache.indices, tokens, strict=True):
        assert torch.equal(own, cache[number]["tokens"])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_packed_fields_become_what_was_chosen(dtype: str, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, FakeSource(PACKED, parts=[("a", 5)]), dtype=dtype)
    assert all(field.quantized for field in cache.schema.values())

    export(cache, tmp_path / "full", ragged="pad")
    export(cache, tmp_path / "brain", ragged="nested", packed="bfloat16")

    full, brain = read(tmp_path / "full", "safetensors"), read(tmp_path / "brain", "safetensors")
    assert torch.equal(full["latent"], stacked(cache, "latent"))
    assert torch.equal(brain["latent"], stacked(cache, "latent").bfloat16())
    steps = [cache[number]["steps"] for number in cache.indices]
    assert torch.equal(brain["steps"], torch.cat(steps).bfloat16())
    assert torch.equal(full["steps"], torch.nn.utils.rnn.pad_sequence(steps, batch_first=True))
    with pytest.raises(ConfigError, match=rf"latent, steps of {dtype} with scales, which no other library"):
        export(cache, tmp_path / "out", packed="refuse", ragged="pad")


def test_a_packed_value_that_the_dtype_cannot_hold_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Huge(FakeSource):
        def record(self, number: int) -> dict[str, Tensor]:
            return {"x": torch.full((4,), 1e6 if number == 6 else 1.0)}

    source = Huge({"x": Field(shape=(4,), dtype="float32")}, parts=[("a", 9)])
    cache = make_cache(tmp_path, source, dtype={"x": "int8"})

    monkeypatch.setattr("stoker.extras.export.run.PIECE_BYTES", 8)
    with pytest.raises(RecordError, match=r"samples 6 to 7 holds 1e\+06 in 'x', which float16 cannot hold"):
        export(cache, tmp_path / "out", packed="float16")
    assert not (tmp_path / "out").exists()
    assert torch.equal(export_of(cache, tmp_path / "again")["x"], stacked(cache, "x"))


def export_of(cache: Cache, out: Path, **settings: Any) -> dict[str, Tensor]:
    export(cache, out, **settings)
    return read(out, "safetensors")


def quarantining(root: Path) -> Cache:
    source = FakeSource()
    folder = open_folder(root, "x", make_recipe(source, None))
    fill(folder, source, [n for n in range(16) if n not in (3, 11)], group=2, shard_bytes=3000)
    folder.quarantine_many(
        [Failure(number=n, stage="read", error=f"bad {n}", attempts=1, kind="sample") for n in (3, 11)]
    )
    return folder.finish()


def test_quarantined_samples_are_named_and_not_there(tmp_path: Path) -> None:
    cache = quarantining(tmp_path)

    found = export_of(cache, tmp_path / "out")

    assert found["index"].tolist() == [n for n in range(16) if n not in (3, 11)]
    assert torch.equal(found["latent"], stacked(cache, "latent"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["quarantined"] == [
        {"number": 3, "stage": "read", "error": "bad 3"},
        {"number": 11, "stage": "read", "error": "bad 11"},
    ]


def test_a_part_of_the_records_and_fields(tmp_path: Path) -> None:
    cache = quarantining(tmp_path)

    found = export_of(cache, tmp_path / "out", records=(2, 9), fields=["nu"])

    assert found.keys() == {"index", "nu"}
    assert found["index"].tolist() == [2, 4, 5, 6, 7, 8]
    assert torch.equal(found["nu"], torch.stack([cache[n]["nu"] for n in found["index"].tolist()]))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [entry["number"] for entry in manifest["quarantined"]] == [3]
    with pytest.raises(IncompleteError, match="no record of the samples 3 to 3"):
        export(cache, tmp_path / "none", records=(3, 4))
    with pytest.raises(ConfigError, match=r"wrong.*latent, nu"):
        export(cache, tmp_path / "none", fields=["nu", "wrong"])
    assert not (tmp_path / "none").exists()


def test_a_damaged_record_ends_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    path = cache.path / cache.index.shards[0].file
    data = bytearray(path.read_bytes())
    data[cache.shard(0).columns["latent"].offset + 5 * 9 * 4 * 8 * 4 + 3] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptError, match=r"field 'latent' of sample 5 does not match"):
        export(open_cache(cache.path), tmp_path / "out")

    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_export_left_is_cleared_away(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    left = tmp_path / ".out.export"
    left.mkdir()
    (left / "records.safetensors").write_bytes(b"half of it")
    (left / "records-00001-of-00007.safetensors").write_bytes(b"of another one")

    found = export_of(cache, tmp_path / "out")

    assert torch.equal(found["latent"], stacked(cache, "latent"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"records.safetensors", "manifest.json"}
    assert not left.exists()


def test_two_exports_to_one_folder_do_not_meet(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    (tmp_path / ".out.export").mkdir()

    with lock_folder(tmp_path / ".out.export", "export"):
        with pytest.raises(StalledError, match=r"process \d+ on \S+ is exporting to"):
            export(cache, tmp_path / "out")
        assert (tmp_path / ".out.export").exists()

    export(cache, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(cache, tmp_path / "out")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file:///{0}/out", "an address. Expected a folder of this machine"),
        ("s3://bucket/out", "an address"),
        ("{0}/file", "file is a file"),
        ("{0}/file/out", "file cannot be made: .* is not a folder"),
        ("{0}/x", "is a cache: its files are Stoker's own"),
        ("{0}/x/out", "is a cache"),
        ("{0}/x/out/deeper", "is a cache"),
        ("{1}/out", "is a cache"),
    ],
)
def test_a_place_that_is_no_folder_of_its_own_is_refused(tmp_path: Path, place: str, said: str) -> None:
    cache = make_cache(tmp_path, FakeSource())
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises((ConfigError, ReadOnlyError), match=said) as caught:
        export_cache(cache, place.format(tmp_path, cache.path), ExportSettings(to="safetensors"))

    assert caught.value.exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before


def test_there_is_no_beginning_where_there_is_no_room(tmp_path: Path, monkeypatch: Any) -> None:
    cache = make_cache(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks, f_files = 100, 4096, 1000, 0

    monkeypatch.setattr("os.statvfs", lambda _: Full)
    with pytest.raises(ResourceError, match=r" has 400 KiB free, the export needs 18\.2 KiB"):
        export(cache, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_incomplete_cache_is_refused(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, range(9))

    with pytest.raises(IncompleteError, match="holds 9 of 16 records"):
        export(folder.finish(), tmp_path / "out")


@pytest.mark.parametrize("name", ["index", "tokens.lengths", "shape", "a/b"])
def test_a_name_that_the_layout_needs_is_refused(name: str, tmp_path: Path) -> None:
    schema = {"tokens": RAGGED["tokens"], name: Field(shape=(), dtype="float32")}
    cache = make_cache(tmp_path, FakeSource(schema))

    with pytest.raises(ConfigError, match=rf"a field is called '{name}'"):
        export(cache, tmp_path / "out", "tensordict", ragged="pad")


@pytest.mark.parametrize("wrong", [{"to": "mds"}, {"ragged": "cut"}, {"records": (4, 4)}, {"file_bytes": 0}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="export: "):
        ExportSettings(**{"to": "safetensors", **wrong})


def test_progress_ends_with_all_of_it(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    cache = make_cache(tmp_path)

    report = export_cache(
        cache,
        tmp_path / "out",
        ExportSettings(to="safetensors"),
        progress=lambda done, total: told.append((done, total)),
    )

    assert told[-1] == (report.bytes, report.bytes)
    assert sorted(told) == told


@pytest.fixture(scope="module")
def real(shared_data: Path, tmp_path_factory: Any) -> dict[str, Cache]:
    """Caches of a set of bool and float images, and of trajectories rounded to bfloat16."""
    files = {"darcy": Darcy, "burgers": BurgersSet}
    found: dict[str, Cache] = {}
    for name, kind in files.items():
        path = shared_data / "pde_neuralop" / f"{name}_train_16.pt"
        folder = tmp_path_factory.mktemp(name)
        loader = stoker.cached(
            kind(path),
            cache_dir=folder,
            device="cpu",
            batch_size=100,
            precompute={"workers": 0},
            shuffle=True,
        )
        found[name] = loader.dataset
    return found


def all_of(cache: Cache) -> dict[str, Any]:
    (batch,) = stoker.Loader(cache, len(cache), shuffle=False, device="cpu")
    return dict(batch)


@pytest.mark.parametrize("name", ["darcy", "burgers"])
def test_real_data_come_back_through_safetensors(name: str, real: dict[str, Cache], tmp_path: Path) -> None:
    expected = all_of(real[name])

    found = export_of(real[name], tmp_path / "out")

    assert found.keys() == expected.keys()
    for field, values in expected.items():
        assert torch.equal(found[field], values), field


@pytest.mark.parametrize("name", ["darcy", "burgers"])
def test_real_data_lie_as_tensordict_documents_it(name: str, real: dict[str, Cache], tmp_path: Path) -> None:
    expected = all_of(real[name])

    export(real[name], tmp_path / "out", "tensordict")

    found = mapped(tmp_path / "out")
    assert found.keys() == expected.keys()
    for field, values in expected.items():
        assert torch.equal(found[field], values), field


@pytest.mark.parametrize("name", ["darcy", "burgers"])
def test_tensordict_itself_loads_real_data(name: str, real: dict[str, Cache], tmp_path: Path) -> None:
    tensordict = pytest.importorskip(
        "tensordict", reason="tensordict is in no extra; its layout is tested above"
    )
    expected = all_of(real[name])

    export(real[name], tmp_path / "out", "tensordict")

    found = tensordict.TensorDict.load_memmap(tmp_path / "out")
    assert found.batch_size == torch.Size([len(real[name])])
    assert set(found.keys()) == set(expected)
    for field, values in expected.items():
        assert torch.equal(found[field], values), field
    assert torch.equal(found[7:9]["index"], torch.tensor([7, 8]))


def test_tensordict_itself_loads_every_form(tmp_path: Path) -> None:
    tensordict = pytest.importorskip(
        "tensordict", reason="tensordict is in no extra; its layout is tested above"
    )
    mixed = make_cache(tmp_path / "a", FakeSource(MIXED))
    ragged = make_cache(tmp_path / "b", FakeSource(RAGGED))

    export(mixed, tmp_path / "mixed", "tensordict")
    for form in ("nested", "pad"):
        export(ragged, tmp_path / form, "tensordict", ragged=form)

    found = tensordict.TensorDict.load_memmap(tmp_path / "mixed")
    for name in MIXED:
        assert torch.equal(found[name], stacked(mixed, name)), name
    for form in ("nested", "pad"):
        found, plain = tensordict.TensorDict.load_memmap(tmp_path / form), mapped(tmp_path / form)
        assert set(found.keys()) == set(plain)
        for name, values in plain.items():
            assert torch.equal(found[name], values), (form, name)
