"""Text of any source as tokens, by a tiny tokenizer made on the spot."""

from __future__ import annotations

import pickle
import shutil
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.errors import ConfigError, SourceError
from stoker.precompute.engine import run_precompute
from stoker.precompute.settings import PrecomputeSettings
from stoker.schema import Field
from stoker.sources.splits import SplitOf
from stoker.testing import check_source
from tests.encoders.tiny_models import WORDS, make_bert, make_tokenizer

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'stoker[features]'"
)

CAPTIONS = ["a red cat", "two dog sleeps", "", "a " * 300 + "cat", "ünknown wörds", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def data(captions: list[str] = CAPTIONS) -> list[dict[str, Any]]:
    return [{"caption": text, "label": n} for n, text in enumerate(captions)]


def tokens(folder: Path, text: str, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text, **settings)


def test_padded_tokens_and_mask_are_those_of_the_tokenizer(folder: Path) -> None:
    source = stoker.Tokenize(data(), folder, max_length=7)

    assert source.schema() == {
        "label": Field(shape=(), dtype="int64"),
        "input_ids": Field(shape=(7,), dtype="int32"),
        "attention_mask": Field(shape=(7,), dtype="bool"),
    }
    for n, text in enumerate(CAPTIONS):
        wanted = tokens(folder, text, padding="max_length", max_length=7, truncation=True)
        sample = source.read(n)
        assert sample["input_ids"].tolist() == wanted["input_ids"]
        assert sample["attention_mask"].tolist() == [bool(one) for one in wanted["attention_mask"]]
        assert sample["label"] == n
    assert source.read(0)["input_ids"].tolist() == [1, 4, 5, 7, 3, 0, 0]


def test_ragged_tokens_have_no_padding_and_no_end_unless_one_is_asked_for(folder: Path) -> None:
    free = stoker.Tokenize(data(), folder, max_length=None, pad=False)
    cut = stoker.Tokenize(data(), folder, max_length=5, pad=False, special_tokens=False)

    assert free.schema()["input_ids"] == Field(shape=(-1,), dtype="int32", ragged=True)
    assert "attention_mask" not in free.schema()
    assert [len(free.read(n)["input_ids"]) for n in range(6)] == [5, 5, 2, 303, 4, 3]
    assert [len(cut.read(n)["input_ids"]) for n in range(6)] == [3, 3, 0, 5, 2, 1]


def test_it_is_a_source(folder: Path) -> None:
    check_source(stoker.Tokenize(data(), folder, max_length=7))
    check_source(stoker.Tokenize(data(), folder, max_length=None, pad=False))
    check_source(SplitOf(stoker.Tokenize(data() * 10, folder), "train"))


def test_captions_that_happen_to_have_one_length_where_they_are_probed_are_no_obstacle(folder: Path) -> None:
    captions = ["a cat"] * 40
    captions[1] = "a red cat runs"  # sample 1 is not probed

    source = stoker.Tokenize(data(captions), folder, max_length=7)

    assert source.read(1)["attention_mask"].sum() == 6


def test_two_tokenizers_share_one_text(folder: Path, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path, words=tuple(reversed(WORDS)))
    first = stoker.Tokenize(data(), folder, max_length=7, keep_text=True)

    source = stoker.Tokenize(first, other, out="input_ids_2", attention_mask="mask_2", max_length=9)

    sample = source.read(0)
    assert sorted(sample) == ["attention_mask", "input_ids", "input_ids_2", "label", "mask_2"]
    assert sample["input_ids"][1:4].tolist() == [4, 5, 7]
    assert sample["input_ids_2"][1:4].tolist() == [13, 12, 10]
    assert source.identity() != first.identity()


def test_captions_of_renamed_pictures_stay_with_their_pictures(folder: Path, tmp_path: Path) -> None:
    """The same captions under other keys are the same cache, whose keys are those of now."""

    def texts(keys: list[str]) -> stoker.Cache:
        captions = [{"caption": "a red cat"}, {"caption": "two dog sleeps"}]
        text = stoker.TorchSource(captions, text={"caption": "bytes"}, keys=keys, version="1")
        return stoker.precompute(
            stoker.Tokenize(text, folder, max_length=7),
            None,
            tmp_path,
            name="texts",
            workers=0,
            progress=None,
        )

    first, second = texts(["a", "b"]), texts(["b", "c"])

    assert first.fingerprint == second.fingerprint
    pictures = stoker.TorchSource([{"x": torch.ones(1)}] * 2, keys=["c", "b"], version="1")
    cache = stoker.precompute(pictures, None, tmp_path, name="pictures", workers=0, progress=None)
    joined = stoker.zip(picture=cache, text=second)
    ids = next(iter(stoker.Loader(joined, 2, shuffle=False)))["text.input_ids"]
    assert [row[1:4].tolist() for row in ids] == [
        tokens(folder, text)["input_ids"][1:4] for text in ("two dog sleeps", "a red cat")
    ]


class Pairs(Dataset[Any]):
    def __init__(self, captions: list[str]) -> None:
        self.captions = captions

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> Any:
        return {"caption": self.captions[index], "x": torch.full((2,), float(index))}


def report(source: Any, tmp_path: Path, model: Path, **settings: Any) -> Any:
    given = PrecomputeSettings(device="cpu", devices=("cpu",), **settings)
    return run_precompute(source, stoker.TextEncoder(model), tmp_path / "caches", name="c", settings=given)


@pytest.mark.parametrize(("pad", "workers"), [(True, 0), (False, 2)])
def test_an_edited_caption_is_encoded_again_and_the_others_are_not(
    folder: Path, tmp_path: Path, pad: bool, workers: int
) -> None:
    model = make_bert(tmp_path / "bert")
    captions = [f"a {'red ' * n}cat" for n in range(12)]

    def run(texts: list[str]) -> Any:
        source = stoker.Tokenize(Pairs(texts), folder, max_length=20, pad=pad)
        return report(source, tmp_path, model, workers=workers)

    first = run(captions)
    edited = [*captions[:5], "two blue dog", *captions[6:], "a new cat"]
    second = run(edited)

    assert (first.encoded, first.adopted) == (12, 0)
    assert (second.encoded, second.adopted) == (2, 11)
    for n, text in enumerate(edited):
        alone = stoker.Tokenize(Pairs([text]), folder, max_length=20, pad=pad).read(0)
        batch = {name: torch.from_numpy(value)[None] for name, value in alone.items()}
        wanted = stoker.TextEncoder(model).encode(batch)["hidden"][0]
        assert torch.allclose(second.cache[n]["hidden"], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["parquet", "sqlite"])
def test_text_of_tables_reaches_it_at_any_length(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"caption": CAPTIONS, "label": list(range(6)), "url": ["u"] * 6})
        import_module("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
        source: Any = stoker.ParquetSource(
            tmp_path / "rows.parquet", columns=["caption", "label"], text={"caption": "bytes"}
        )
    else:
        with sqlite3.connect(tmp_path / "rows.db") as connection:
            connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, caption TEXT, label INTEGER)")
            connection.executemany(
                "INSERT INTO rows VALUES (?, ?, ?)", [(n, t, n) for n, t in enumerate(CAPTIONS)]
            )
        columns = {"caption": {"text": "bytes"}, "label": "int64"}
        source = stoker.SQLSource(
            f"sqlite:///{tmp_path / 'rows.db'}", table="rows", key="id", columns=columns
        )

    check_source(source)
    assert source.schema()["caption"] == Field(shape=(-1,), dtype="uint8", ragged=True)
    tokenized = stoker.Tokenize(source, folder, max_length=None, pad=False)
    check_source(tokenized)
    for n, text in enumerate(CAPTIONS):
        assert source.read(n)["caption"].tobytes().decode() == text
        assert tokenized.read(n)["input_ids"].tolist() == tokens(folder, text)["input_ids"]


def import_module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


def test_a_table_says_how_its_text_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import_module("pyarrow.parquet").write_table(
        arrow.table({"caption": ["a"], "x": [1]}), tmp_path / "a.parquet"
    )

    with pytest.raises(SourceError, match=r"text=\{'caption': 'bytes'\}"):
        stoker.ParquetSource(tmp_path / "a.parquet").schema()
    with pytest.raises(SourceError, match="'title'"):
        stoker.ParquetSource(tmp_path / "a.parquet", text={"title": "bytes"}).schema()
    with pytest.raises(ConfigError, match="words"):
        stoker.ParquetSource(tmp_path / "a.parquet", text={"caption": "words"})


# ----------------------------------------------------------------------------------------------------------
# Identity, processes, and what does not fit.


def test_the_identity_is_the_tokenizer_by_content_and_the_settings(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    first = stoker.Tokenize(data(), folder).identity()

    assert stoker.Tokenize(data(), moved).identity() == first
    others = [
        stoker.Tokenize(data(), make_tokenizer(tmp_path / "other", words=WORDS[:-1])),
        stoker.Tokenize(data(), folder, max_length=78),
        stoker.Tokenize(data(), folder, pad=False),
        stoker.Tokenize(data(), folder, special_tokens=False),
        stoker.Tokenize(data([*CAPTIONS[:-1], "dog"]), folder),
    ]
    assert all(other.identity() != first for other in others)


@pytest.mark.parametrize(
    ("name", "decides"),
    [("source.spm", True), ("added_tokens.json", True), ("merges.txt", True), ("chat_template.jinja", True),
     ("model.safetensors", False), ("model.safetensors.index.json", False), ("pytorch_model.bin", False),
     ("README.md", False), (".gitattributes", False), ("logs/a.txt", False)],
)  # fmt: skip
def test_any_file_of_a_tokenizer_makes_another_cache_but_weights_do_not(
    folder: Path, tmp_path: Path, name: str, decides: bool
) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    (own / name).parent.mkdir(exist_ok=True)
    found = [stoker.Tokenize(data(), own).identity()]

    for text in ("{}", "{} "):
        (own / name).write_text(text)
        found.append(stoker.Tokenize(data(), own).identity())

    assert len({repr(one) for one in found}) == (3 if decides else 1)


def test_a_tokenizer_that_changes_after_the_source_was_made_is_refused(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    source = stoker.Tokenize(data(), own)
    sent = pickle.dumps(source)
    make_tokenizer(own, words=WORDS[:-1])

    with pytest.raises(SourceError, match="changed"):
        pickle.loads(sent).read(0)


def test_it_goes_to_a_process_after_use(folder: Path) -> None:
    source = stoker.Tokenize(data(), folder)
    wanted = source.read(1)

    found = pickle.loads(pickle.dumps(source)).read(1)

    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_text_that_is_not_utf8_names_its_sample(folder: Path) -> None:
    source = stoker.Tokenize([{"caption": b"good"}, {"caption": b"\xff bad"}], folder)

    source.read(0)
    with pytest.raises(SourceError, match=r"item 1 .*byte 0"):
        source.read(1)


def test_what_does_not_fit_is_refused_with_what_would(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        stoker.Tokenize(data(), tmp_path)
    with pytest.raises(ConfigError, match="pad=False"):
        stoker.Tokenize(data(), folder, max_length=None)
    with pytest.raises(ConfigError, match="max_length"):
        stoker.Tokenize(data(), folder, max_length=0)
    with pytest.raises(SourceError, match="label"):
        stoker.Tokenize(stoker.TorchSource(data(), text={"caption": "drop"}), folder).schema()
    words = stoker.TorchSource([{"caption": "a"}], text={"caption": ["a", "b"]})
    with pytest.raises(SourceError, match=r"text=\{'caption': 'bytes'\}"):
        stoker.Tokenize(words, folder).schema()
    with pytest.raises(SourceError, match="'input_ids'"):
        stoker.Tokenize([{"caption": "a", "input_ids": 3}] * 3, folder).schema()


@pytest.mark.parametrize("value", [3, None, [97, 98], torch.ones(3)])
def test_a_caption_that_is_not_text_is_refused_with_its_value(folder: Path, value: Any) -> None:
    with pytest.raises(SourceError, match=r"item 0 .*'caption' is .*and text was expected") as caught:
        stoker.Tokenize([{"caption": value}], folder).schema()
    assert str(value)[:8] in caught.value.fact

    late = stoker.Tokenize([{"caption": "a"}] * 40, folder)
    late._source._dataset[1] = {"caption": value}  # sample 1 is not probed
    with pytest.raises(SourceError, match=r"item 1 .*'caption'"):
        late.read(1)


@pytest.mark.parametrize(("items", "meant"), [([{"n": 1, "caption": "a"}], "caption"), (["a cat"], "data")])
def test_a_misspelt_field_of_text_is_named_with_the_one_that_was_meant(
    folder: Path, items: list[Any], meant: str
) -> None:
    with pytest.raises(SourceError, match="'captoin'") as caught:
        stoker.Tokenize(items, folder, field="captoin").schema()

    assert repr(meant) in caught.value.hint
    assert "input_ids" in stoker.Tokenize(items, folder, field=meant).schema()


def test_of_a_source_the_field_of_text_is_proposed(folder: Path) -> None:
    source = stoker.TorchSource([{"n": 1, "title": "a"}], text={"title": "bytes"})

    with pytest.raises(SourceError, match="'caption'") as caught:
        stoker.Tokenize(source, folder).schema()

    assert "field='title'" in caught.value.hint


def test_from_plain_captions_each_error_leads_to_tokens(folder: Path, tmp_path: Path) -> None:
    """What a new user tries, one after the other: each hint is a call that works."""
    captions = [{"caption": "a red cat", "page": "x.org"}, {"caption": "two dog sleeps", "page": "y.org"}]
    encoder = stoker.TextEncoder(make_bert(tmp_path / "bert"))

    def encode(source: Any) -> stoker.Cache:
        return stoker.precompute(source, encoder, tmp_path, name="c", workers=0, progress=None)

    with pytest.raises(SourceError, match="'caption' is text") as first:
        encode(captions)
    assert "stoker.Tokenize(dataset, folder, field='caption')" in first.value.hint
    assert "'bytes'" in first.value.hint
    with pytest.raises(SourceError, match="'page' is text") as second:
        encode(stoker.Tokenize(captions, folder, field="caption"))
    assert "text={'caption': 'bytes', 'page': 'drop'}" in second.value.hint
    source = stoker.TorchSource(captions, text={"caption": "bytes", "page": "drop"})
    with pytest.raises(stoker.errors.EncoderError, match="'input_ids'") as third:
        encode(source)
    assert "stoker.Tokenize(" in third.value.hint
    assert len(encode(stoker.Tokenize(source, folder, max_length=7))) == 2


def test_a_tokenizer_without_a_token_to_pad_with_says_so(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="pad=False"):
        stoker.Tokenize(data(), tmp_path).read(0)
    assert stoker.Tokenize(data(), tmp_path, pad=False).read(0)["input_ids"].tolist() == [1, 4, 5, 7, 3]
