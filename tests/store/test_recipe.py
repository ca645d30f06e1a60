"""The key is right: it changes with what decides the bytes, and with nothing else."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import ConfigError, CorruptError, EncoderError, FormatError, RecordError, SourceError
from stoker.schema import Field, Json, Schema
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.store import Digests, Recipe, diff_recipes, load_recipe, make_recipe, open_folder
from tests.store.fakes import SCHEMA, FakeSource


@dataclass
class FileSource(FakeSource):
    """One part per file of a folder."""

    root: Path
    identity_settings: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        files = sorted(self.root.glob("*.bin"))
        super().__init__(SCHEMA, [(path.name, 4) for path in files], settings=self.identity_settings)

    def identity(self) -> SourceIdentity:
        parts = tuple(
            Part(name=name, count=count, files=(FileRef(name=name, path=self.root / name),))
            for name, count in self.parts
        )
        return SourceIdentity(kind="files/1", parts=parts, settings=self.settings)


@dataclass
class FakeEncoder:
    """Identity in all but name."""

    weights_digest: str = "a" * 64
    version: int = 1
    dim: int = 8
    independent_steps: bool = True

    def schema(self, sample_schema: Schema) -> Schema:
        return sample_schema

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        return EncodeBatchSize(samples=4)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        return batch

    def to(self, device: torch.device) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        return {"w": torch.arange(3.0)}

    def identity(self) -> dict[str, Json]:
        return {
            "class": "Fake",
            "config": {"dim": self.dim},
            "weights": self.weights_digest,
            "version": self.version,
        }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for name in ("a.bin", "b.bin"):
        (root / name).write_bytes(name.encode() * 1000)
    return root


def recipe_of(root: Path, encoder: Any = None, dtype: Any = None, **settings: Json) -> Recipe:
    return make_recipe(FileSource(root, settings), encoder or FakeEncoder(), dtype=dtype)


def test_same_key_same_folder(data: Path, tmp_path: Path) -> None:
    folders = [open_folder(tmp_path / "cache", "x", recipe_of(data)).path for _ in range(2)]

    assert folders[0] == folders[1]
    assert folders[0].name == recipe_of(data).fingerprint
    assert load_recipe(folders[0]) == recipe_of(data)
    assert load_recipe(folders[0]).parts == recipe_of(data).parts


def test_moved_root_same_fingerprint(data: Path, tmp_path: Path) -> None:
    before = recipe_of(data)

    moved = data.rename(tmp_path / "elsewhere")

    assert recipe_of(moved).fingerprint == before.fingerprint


def test_the_fingerprint_of_a_recipe_never_changes() -> None:
    """A golden value: caches made today must be found by every later version."""
    recipe = make_recipe(FakeSource(), FakeEncoder(), dtype="float16")

    assert recipe.fingerprint == "c82db6f4808fac70"
    assert recipe.parts[1].key == "f431029f07e625f4945a7e66c98b2520"


def flip_byte(root: Path) -> None:
    content = bytearray((root / "b.bin").read_bytes())
    content[1234] ^= 1
    (root / "b.bin").write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        pytest.param({"encoder": FakeEncoder(weights_digest="b" * 64)}, "encoder.weights", id="weights"),
        pytest.param({"encoder": FakeEncoder(version=2)}, "encoder.version", id="code-version"),
        pytest.param({"encoder": FakeEncoder(dim=9)}, "encoder.config.dim", id="encoder-setting"),
        pytest.param({"dtype": "float16"}, "dtype.latent", id="dtype"),
        pytest.param({"dtype": {"latent": "bfloat16"}}, "dtype.latent", id="dtype-of-one-field"),
        pytest.param({"split": "val"}, "source.settings.split", id="setting"),
    ],
)
def test_a_change_gives_another_fingerprint_and_is_named(
    data: Path, changes: dict[str, Any], entry: str
) -> None:
    before, after = recipe_of(data), recipe_of(data, **changes)

    assert after.fingerprint != before.fingerprint
    differences = diff_recipes(before, after)
    assert entry in [d.entry for d in differences]
    assert all(d.entry == entry or d.entry.startswith("dtype.") for d in differences), (
        "nothing else is blamed"
    )
    assert all(d.note for d in differences)
    assert all(a.key != b.key for a, b in zip(before.parts, after.parts, strict=True)), "no shard is shared"


def test_a_changed_source_byte_gives_another_fingerprint_and_is_named(data: Path) -> None:
    before = recipe_of(data)

    flip_byte(data)

    after = recipe_of(data)
    assert [d.entry for d in diff_recipes(before, after)] == ["source.parts[1].digest"]
    assert before.parts[0].key == after.parts[0].key
    assert before.parts[1].key != after.parts[1].key


def test_added_removed_renamed_and_reordered_parts_are_named(data: Path) -> None:
    before = recipe_of(data)
    (data / "aa.bin").write_bytes(b"new")
    added = recipe_of(data)
    (data / "b.bin").rename(data / "c.bin")
    renamed = recipe_of(data)

    assert [(d.entry, d.note) for d in diff_recipes(before, added)] == [
        ("source.parts[1]", "only in the second")
    ]
    assert [(d.entry, d.note) for d in diff_recipes(added, before)] == [
        ("source.parts[1]", "only in the first")
    ]
    assert [d.entry for d in diff_recipes(added, renamed)] == ["source.parts[2]", "source.parts[2]"]
    assert {part.key for part in before.parts} < {part.key for part in added.parts}
    swapped = make_recipe(FakeSource(parts=[("b", 6), ("a", 10)]), None)
    (order,) = diff_recipes(make_recipe(FakeSource(), None), swapped)
    assert (order.entry, order.a, order.b) == ("source.parts", ["a", "b"], ["b", "a"])


def test_equal_recipes_have_no_differences(data: Path) -> None:
    assert diff_recipes(recipe_of(data), recipe_of(data)) == []


def test_no_encoder_against_one_is_named(data: Path) -> None:
    entries = [d.entry for d in diff_recipes(make_recipe(FileSource(data), None), recipe_of(data))]

    assert "encoder" in entries


def test_numbers_map_to_parts_and_back() -> None:
    recipe = make_recipe(FakeSource(parts=[("a", 0), ("b", 3), ("c", 0), ("d", 2), ("e", 0)]), None)

    assert [recipe.part_of(number) for number in range(5)] == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)]
    for number in (-1, 5):
        with pytest.raises(RecordError, match="has 5"):
            recipe.part_of(number)


def test_dtypes_are_substituted_on_float_fields_alone() -> None:
    schema = {
        "wide": Field(shape=(2,), dtype="float64"),
        "z": Field(shape=(2,), dtype="float32"),
        "n": Field(shape=(), dtype="int64"),
        "nu": Field(shape=(), dtype="float32"),  # 1e-8 would be zero in float16, so scalars are spared
    }
    source = FakeSource(schema)

    def stored(dtype: Any) -> dict[str, str]:
        return {name: f.dtype for name, f in make_recipe(source, None, dtype=dtype).schema.items()}

    assert stored(None) == {"n": "int64", "nu": "float32", "wide": "float64", "z": "float32"}
    assert stored({"wide": "float32"})["wide"] == "float32"
    assert stored("float16") == {"n": "int64", "nu": "float32", "wide": "float16", "z": "float16"}
    assert stored({"z": "bfloat16", "nu": "float16"}) == {
        "n": "int64",
        "nu": "float16",
        "wide": "float64",
        "z": "bfloat16",
    }
    assert make_recipe(source, None).encoded["wide"].dtype == "float64"


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ({"nu": "int8"}, "'nu': it has one number a sample, and none to share a scale with"),
        ("half", "unknown"),
        ("float64", "unknown"),
        ({"missing": "float16"}, "'missing', which is not a float field"),
    ],
)
def test_dtypes_that_cannot_be_stored_are_refused(dtype: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_recipe(FakeSource(), None, dtype=dtype)


def test_one_packed_dtype_for_all_is_taken_where_it_saves_bytes() -> None:
    schema = {
        "z": Field(shape=(5, 3, 32), dtype="float32", time=True),
        "clock": Field(shape=(5,), dtype="float32", time=True),
        "bc": Field(shape=(4,), dtype="float32"),
        "tokens": Field(shape=(-1, 5), dtype="float32", ragged=True),
        "nu": Field(shape=(), dtype="float32"),
        "n": Field(shape=(9,), dtype="int8"),
    }

    recipe = make_recipe(FakeSource(schema), None, dtype="int8")

    assert {name: (f.dtype, f.quantized) for name, f in recipe.schema.items()} == {
        "z": ("int8", True),
        "clock": ("float32", False),
        "bc": ("float32", False),
        "tokens": ("int8", True),
        "nu": ("float32", False),
        "n": ("int8", False),
    }
    assert recipe.columns["z.scale"] == Field(shape=(5, 3, 1), dtype="float32", time=True)
    assert recipe.encoded["z"].dtype == "float32"
    assert recipe.entries["format"] == 2
    assert make_recipe(FakeSource({"n": schema["n"]}), None).entries["format"] == 1


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_packed_dtype_for_all_is_refused_where_scales_cost_more(channels: int, dtype: str) -> None:
    """It was stored as float32, four times what was asked for."""
    schema = {
        "data": Field(shape=(5, 8, 8, channels), dtype="float32", time=True),
        "z": Field(shape=(5, 32), dtype="float32", time=True),
    }

    with pytest.raises(ConfigError, match=r"'data'") as error:
        make_recipe(FakeSource(schema), None, dtype=dtype)

    (proposal,) = re.findall(r"dtype=(\{[^{}]*\})", str(error.value))
    stored = make_recipe(FakeSource(schema), None, dtype=ast.literal_eval(proposal)).schema
    assert {name: f.dtype for name, f in stored.items()} == {"data": "float16", "z": dtype}
    named = make_recipe(FakeSource(schema), None, dtype={"data": dtype}).schema["data"]
    assert (named.dtype, named.quantized) == (dtype, True)


def test_the_default_group_follows_from_the_schema() -> None:
    def group(**shape: Any) -> EncodeBatchSize:
        return make_recipe(FakeSource({"x": Field(dtype="float32", **shape)}), None).encode_batch

    assert group(shape=(1024, 1024)) == EncodeBatchSize(samples=1)
    assert group(shape=(1024, 100)) == EncodeBatchSize(samples=10)
    assert group(shape=()) == EncodeBatchSize(samples=256)
    assert group(shape=(-1, 3), ragged=True) == EncodeBatchSize(samples=1)


@pytest.mark.parametrize("name", ["__number__", "z.sums", "z.offsets", "z.scale", ""])
def test_field_names_of_the_store_are_refused(name: str) -> None:
    with pytest.raises(EncoderError, match=r"Rename it"):
        make_recipe(FakeSource({name: Field(shape=(), dtype="float32")}), None)


def test_a_source_that_contradicts_itself_is_refused(data: Path) -> None:
    class Liar(FakeSource):
        def __len__(self) -> int:
            return 17

    class Nameless(FakeSource):
        def identity(self) -> SourceIdentity:
            return SourceIdentity(kind="x", parts=(Part(name="a", count=16),))

    with pytest.raises(SourceError, match=r"hold 16 samples, len.source. is 17"):
        make_recipe(Liar(), None)
    with pytest.raises(SourceError, match="nothing tells when it changes"):
        make_recipe(Nameless(), None)
    with pytest.raises(SourceError, match="come twice: a"):
        make_recipe(FakeSource(parts=[("a", 3), ("a", 3)]), None)
    with pytest.raises(SourceError, match="as JSON"):
        make_recipe(FakeSource(settings={"x": float("nan")}), None)
    (data / "b.bin").unlink()
    source = FileSource(data)
    (data / "a.bin").unlink()
    with pytest.raises(SourceError, match=r"a\.bin"):
        make_recipe(source, None)


def test_weights_and_file_list_are_kept_beside_the_cache(data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    encoder = FakeEncoder()
    recipe = recipe_of(data, encoder)

    tied = encoder.weights()["w"]
    folder = open_folder(tmp_path / "cache", "x", recipe, weights={"w": tied, "tied": tied})

    kept = load_file(tmp_path / "cache" / "encoders" / f"{encoder.weights_digest}.safetensors")
    assert all(torch.equal(kept[name], torch.arange(3.0)) for name in ("w", "tied"))
    lines = (folder.path / "sources.jsonl").read_text().splitlines()
    assert [json.loads(line)["digest"] for line in lines] == [file.digest for file in recipe.files]
    assert [file.name for file in recipe.files] == ["a.bin", "b.bin"]


def test_a_recipe_in_another_folder_is_refused(data: Path, tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "cache", "x", recipe_of(data)).path
    moved = folder.rename(folder.with_name("0" * 16))

    with pytest.raises(CorruptError, match=r"expected 0000000000000000"):
        load_recipe(moved)
    with pytest.raises(FormatError, match=r"holds no recipe\.json"):
        load_recipe(tmp_path)


def test_digests_are_asked_once_for_all_files(data: Path, tmp_path: Path) -> None:
    digests = Digests(tmp_path / "cache")

    assert (
        make_recipe(FileSource(data), None, digests=digests).fingerprint
        == make_recipe(FileSource(data), None).fingerprint
    )
