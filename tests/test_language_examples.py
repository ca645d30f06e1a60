"""The examples on outputs of language models: tokens as examples, and packed texts with a teacher's top-k."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

import stoker
from tests.encoders import tiny_models

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.make_llama(folder)
    tiny_models.make_tokenizer(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    draw = random.Random(0)
    lines = [" ".join(draw.choices(tiny_models.WORDS, k=draw.randint(2, 30))) for _ in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return tmp_path / "texts.txt"


def test_a_sparse_autoencoder_learns_from_single_tokens(model: Path, texts: Path, tmp_path: Path) -> None:
    unexplained = example("sparse_autoencoder").main(model, texts, tmp_path / "caches")

    assert unexplained[-1] < 0.6 * unexplained[0]
    cache = stoker.open_cache(tmp_path / "caches" / "states")
    (field,) = cache.schema
    assert cache.schema[field].dtype == "float8_e4m3fn"
    assert cache.index.error[field]["max"] < 0.1


def test_each_token_is_an_example_once_an_epoch(model: Path, texts: Path, tmp_path: Path) -> None:
    example("sparse_autoencoder").main(model, texts, tmp_path / "caches", epochs=1)
    cache = stoker.open_cache(tmp_path / "caches" / "states")
    (field,) = cache.schema
    rows = stoker.Windows(horizon=0, field=field)

    seen = [
        tuple(place)
        for batch in stoker.Loader(cache, 64, windows=rows, shuffle=True)
        for place in batch.index.tolist()
    ]

    assert sorted(seen) == [(i, t) for i, n in enumerate(cache.lengths(field)) for t in range(n)]


def test_a_student_learns_from_a_stored_top_k(model: Path, texts: Path, tmp_path: Path) -> None:
    student = tiny_models.make_llama(tmp_path / "student", seed=3)

    losses = example("distillation").main(model, student, texts, tmp_path / "caches")

    assert losses[-1] < 0.7 * losses[0]


def test_packed_texts_do_not_see_one_another(model: Path, texts: Path, tmp_path: Path) -> None:
    """A student that is its teacher has no loss, packed with other texts or not."""
    losses = example("distillation").main(model, model, texts, tmp_path / "caches", epochs=1, lr=0.0)

    assert abs(losses[0]) < 1e-5
