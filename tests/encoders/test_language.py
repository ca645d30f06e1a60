"""Outputs of tiny random language models, made on the spot."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.encoders import language
from stoker.encoders.protocol import TOKEN_LENGTHS, EncodeBatchSize
from stoker.errors import EncoderError
from stoker.precompute.engine import run_precompute
from stoker.precompute.settings import PrecomputeSettings
from stoker.schema import Field, Schema
from stoker.testing import check_encoder
from tests.encoders.tiny_models import (
    VOCABULARY,
    make_bert,
    make_clip,
    make_gpt2,
    make_llama,
    make_t5,
    make_tokenizer,
    quiet,
)

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'stoker[features]'"
)

FIXED: Schema = {"input_ids": Field(shape=(12,), dtype="int64")}
MASKED: Schema = {**FIXED, "attention_mask": Field(shape=(12,), dtype="bool")}
RAGGED: Schema = {"input_ids": Field(shape=(-1,), dtype="int32", ragged=True)}
LENGTHS = (12, 5, 1, 9)
TEXT_MODELS: dict[str, Callable[[Path], Path]] = {
    "clip": make_clip,
    "clip-projection": lambda folder: make_clip(folder, projection=12),
    "t5": make_t5,
    "bert": make_bert,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    makers = {**TEXT_MODELS, "llama": make_llama, "gpt2": make_gpt2}
    return {name: make(root / name) for name, make in makers.items()}


def ids(count: int = 4, length: int = 12) -> torch.Tensor:
    found = torch.randint(4, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))
    found[:, 0], found[:, -1] = 1, 3
    return found


def mask(lengths: tuple[int, ...] = LENGTHS, length: int = 12) -> torch.Tensor:
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


def reference(folder: Path, kind: str, **inputs: Any) -> Any:
    """What the model gives when it is used by its own means."""
    import transformers

    with quiet(), torch.inference_mode():
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        return model(output_hidden_states=True, **inputs)


KINDS = {
    "clip": "CLIPTextModel", "clip-projection": "CLIPTextModelWithProjection", "t5": "T5EncoderModel",
    "bert": "BertModel", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# Text encoders.


@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("layer", [0, 1, -2, -1])
def test_states_and_pooled_output_are_those_of_the_model(
    folders: dict[str, Path], name: str, layer: int
) -> None:
    found = stoker.TextEncoder(folders[name], layer=layer).encode(
        {"input_ids": ids(), "label": torch.ones(4)}
    )

    wanted = reference(folders[name], KINDS[name], input_ids=ids())
    state = wanted.last_hidden_state if layer == -1 else wanted.hidden_states[layer]
    assert torch.allclose(found["hidden"], state, atol=1e-6)
    pooled = wanted.get("text_embeds", wanted.get("pooler_output"))
    assert ("pooled" in found) == (pooled is not None)
    assert pooled is None or torch.allclose(found["pooled"], pooled, atol=1e-6)
    assert "input_ids" not in found
    assert "label" in found
    assert {n: f.shape for n, f in stoker.TextEncoder(folders[name]).schema(FIXED).items()} == {
        n: tuple(v.shape[1:]) for n, v in found.items() if n != "label"
    }


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_real_tokens_do_not_see_padding_and_the_mask_is_stored(folders: dict[str, Path], name: str) -> None:
    real = mask()
    found = stoker.TextEncoder(folders[name]).encode({"input_ids": ids() * real, "attention_mask": real})

    wanted = reference(folders[name], KINDS[name], input_ids=ids() * real, attention_mask=real.long())
    assert torch.allclose(found["hidden"][real], wanted.last_hidden_state[real], atol=1e-6)
    assert torch.equal(found["mask"], real)
    assert "attention_mask" not in found
    for row, length in enumerate(LENGTHS):
        alone = stoker.TextEncoder(folders[name]).encode({"input_ids": ids()[row : row + 1, :length]})
        assert torch.allclose(found["hidden"][row, :length], alone["hidden"][0], atol=1e-5)


def test_attend_all_is_what_a_pipeline_without_a_mask_gives(folders: dict[str, Path]) -> None:
    batch = {"input_ids": ids() * mask(), "attention_mask": mask()}

    found = stoker.TextEncoder(folders["t5"], attend="all").encode(batch)

    wanted = reference(folders["t5"], "T5EncoderModel", input_ids=ids() * mask())
    assert torch.allclose(found["hidden"], wanted.last_hidden_state, atol=1e-6)
    assert torch.equal(found["mask"], mask())
    real = stoker.TextEncoder(folders["t5"]).encode(batch)
    assert not torch.allclose(found["hidden"], real["hidden"], atol=1e-3)


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_the_final_norm_of_an_earlier_layer_is_applied_when_asked(
    folders: dict[str, Path], name: str
) -> None:
    import transformers

    found = stoker.TextEncoder(folders[name], layer=-2, norm=True).encode({"input_ids": ids()})

    with quiet(), torch.inference_mode():
        model = getattr(transformers, KINDS[name]).from_pretrained(folders[name]).eval()
        state = model(input_ids=ids(), output_hidden_states=True).hidden_states[-2]
        norm = model.final_layer_norm if name == "clip" else model.encoder.final_layer_norm
        assert torch.allclose(found["hidden"], norm(state), atol=1e-6)


def test_without_the_norm_the_last_state_is_the_one_before_it(folders: dict[str, Path]) -> None:
    found = stoker.TextEncoder(folders["clip"], norm=False).encode({"input_ids": ids()})

    wanted = reference(folders["clip"], "CLIPTextModel", input_ids=ids())
    assert torch.allclose(found["hidden"], wanted.hidden_states[-1], atol=1e-6)
    assert not torch.allclose(found["hidden"], wanted.last_hidden_state, atol=1e-3)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_encoders_keep_the_promises_of_an_encoder(folders: dict[str, Path], name: str) -> None:
    check_encoder(stoker.TextEncoder(folders[name], encode_batch=3), FIXED)
    check_encoder(stoker.TextEncoder(folders[name]), RAGGED)


# ----------------------------------------------------------------------------------------------------------
# Ragged samples: alone, and padded to one length.


def encoders(folders: dict[str, Path]) -> dict[str, Any]:
    return {
        **{name: stoker.TextEncoder(folders[name]) for name in TEXT_MODELS},
        "llama": stoker.HiddenStates(folders["llama"], layers=[0, 2, -1]),
        "gpt2": stoker.HiddenStates(folders["gpt2"], layers=[1, -1], norm=False),
        "top": stoker.TopK(folders["llama"], k=4),
    }


@pytest.mark.parametrize("name", [*TEXT_MODELS, "llama", "gpt2", "top"])
def test_a_sample_has_the_same_record_alone_and_in_a_padded_batch(
    folders: dict[str, Path], name: str
) -> None:
    encoder = encoders(folders)[name]
    batch = {"input_ids": ids() * mask(), "input_ids.lengths": torch.tensor(LENGTHS), "x": torch.arange(4)}

    found = encoder.encode(batch)

    ragged = [field for field, spec in encoder.schema(RAGGED).items() if spec.ragged]
    assert ragged
    for field in ragged:
        assert found[field].shape[1] == 12
        assert found[field + ".lengths"].tolist() == list(LENGTHS)
    assert "input_ids" not in found
    assert "input_ids.lengths" not in found
    for row, length in enumerate(LENGTHS):
        alone = encoder.encode({"input_ids": ids()[row : row + 1, :length], "x": torch.zeros(1)})
        assert alone.keys() == encoder.schema({**RAGGED, "x": Field(shape=(), dtype="float32")}).keys()
        for field, value in alone.items():
            if field == "x":
                continue
            own = found[field][row, :length] if field in ragged else found[field][row]
            largest = value.abs().max().clamp(min=1e-6)
            assert ((own - value[0]).abs().max() / largest) <= 1e-4, field


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_the_bits_of_a_sample_do_not_depend_on_the_lengths_of_its_neighbors(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no neighbor is padded, and `transformers` would leave a mask out: another kernel may round
    otherwise, though it does not at the sizes here."""
    encoder = encoders(folders)[name]
    attention, masks = torch.nn.functional.scaled_dot_product_attention, list[bool]()

    def observed(*args: Any, attn_mask: Any = None, **more: Any) -> Any:
        masks.append(attn_mask is None)
        return attention(*args, attn_mask=attn_mask, **more)

    encoder.encode({"input_ids": ids()})  # which also finds out whether the model is causal
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", observed)
    full = {"input_ids": ids(), "input_ids.lengths": torch.tensor([12, 12, 12, 12])}
    short = {"input_ids": ids() * mask((12, 3, 1, 7)), "input_ids.lengths": torch.tensor([12, 3, 1, 7])}

    one, other = encoder.encode(full), encoder.encode(short)

    assert len(masks) == 6
    assert masks[:3] == masks[3:]
    for field in encoder.schema(RAGGED):
        assert torch.equal(one[field][0], other[field][0])


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_attend_all_does_not_let_a_sample_see_the_padding_of_its_batch(
    folders: dict[str, Path], name: str
) -> None:
    """Ragged tokens have no padding: what a batch adds to them must not be a part of the text."""
    encoder = stoker.TextEncoder(folders[name], attend="all")
    batch = {"input_ids": ids() * mask(), "input_ids.lengths": torch.tensor(LENGTHS)}

    found = encoder.encode(batch)["hidden"]

    for row, length in enumerate(LENGTHS):
        alone = encoder.encode({"input_ids": ids()[row : row + 1, :length]})["hidden"]
        assert torch.allclose(found[row, :length], alone[0], atol=1e-5)


@given(lengths=st.lists(st.integers(1, 12), min_size=4, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_behind_the_end_of_a_sample_never_reaches_it(
    folders: dict[str, Path], lengths: list[int], seed: int
) -> None:
    encoder = _loaded(folders)
    real = mask(tuple(lengths))
    junk = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids.lengths": torch.tensor(lengths)}

    zeros = encoder.encode({"input_ids": ids() * real, **batch})["hidden"]
    other = encoder.encode({"input_ids": torch.where(real, ids(), junk), **batch})["hidden"]

    assert torch.equal(zeros[real], other[real])


def _loaded(folders: dict[str, Path], kept: dict[Path, Any] = {}) -> Any:  # noqa: B006 - a model for all examples
    place = folders["bert"]
    if place not in kept:
        kept[place] = stoker.TextEncoder(place)
    return kept[place]


def test_padding_past_the_last_position_of_the_model_is_no_obstacle(folders: dict[str, Path]) -> None:
    """CLIP takes 24 tokens here; a sample of 20 may be padded to 32."""
    encoder = stoker.TextEncoder(folders["clip"])
    padded = torch.zeros((1, 32), dtype=torch.int64)
    padded[0, :20] = ids(1, 20)

    found = encoder.encode({"input_ids": padded, "input_ids.lengths": torch.tensor([20])})

    alone = encoder.encode({"input_ids": ids(1, 20)})
    assert found["hidden"].shape == (1, 32, 16)
    assert torch.allclose(found["hidden"][:, :20], alone["hidden"], atol=1e-5)
    with pytest.raises(ValueError, match=r"30 tokens.*24"):
        encoder.encode({"input_ids": padded, "input_ids.lengths": torch.tensor([30])})


def test_the_batch_size_of_ragged_samples_says_their_lengths(folders: dict[str, Path]) -> None:
    one = stoker.HiddenStates(folders["llama"], layers=[1], lengths=None)
    several = stoker.HiddenStates(folders["llama"], layers=[1], lengths=(64, 128), encode_batch=16)

    assert one.encode_batch_size(RAGGED) == EncodeBatchSize(samples=1)
    assert several.encode_batch_size(RAGGED) == EncodeBatchSize(samples=16, lengths=(64, 128))
    assert several.encode_batch_size(FIXED) == EncodeBatchSize(samples=16)
    with pytest.raises(EncoderError, match="rising"):
        stoker.HiddenStates(folders["llama"], layers=[1], lengths=(128, 64))


def test_the_logits_of_a_default_batch_fit_into_memory(folders: dict[str, Path]) -> None:
    """A vocabulary of 131,072 and texts of 512 tokens: 256 MiB of logits for each sample."""
    top = stoker.TopK(folders["llama"], k=4)
    assert top.encode_batch_size(RAGGED) == EncodeBatchSize(samples=8, lengths=TOKEN_LENGTHS)
    top._sizes = replace(top._sizes, vocabulary=1 << 17, positions=None)
    long = {"input_ids": Field(shape=(512,), dtype="int32")}

    assert top.encode_batch_size(long) == EncodeBatchSize(samples=4)
    assert top.encode_batch_size(RAGGED) == EncodeBatchSize(samples=4, lengths=TOKEN_LENGTHS)
    assert top.encode_batch_size({"input_ids": Field(shape=(1 << 14,), dtype="int32")}).samples == 1
    given = stoker.TopK(folders["llama"], k=4, encode_batch=32)
    given._sizes = top._sizes
    assert given.encode_batch_size(long) == EncodeBatchSize(samples=32)


# ----------------------------------------------------------------------------------------------------------
# Hidden states and top-k.


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_are_those_of_the_model(folders: dict[str, Path], name: str) -> None:
    found = stoker.HiddenStates(folders[name], layers=[0, 1, -2, -1]).encode({"input_ids": ids()})

    wanted = reference(folders[name], KINDS[name], input_ids=ids()).hidden_states
    assert list(found) == ["hidden_0", "hidden_1", "hidden_2", "hidden_3"]
    for layer in range(4):
        assert torch.allclose(found[f"hidden_{layer}"], wanted[layer], atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k_is_normalized_over_the_entire_vocabulary(folders: dict[str, Path], temperature: float) -> None:
    found = stoker.TopK(folders["llama"], k=5, temperature=temperature).encode({"input_ids": ids()})

    logits = reference(folders["llama"], "LlamaForCausalLM", input_ids=ids()).logits
    all_of_them = (logits.double() / temperature).log_softmax(-1)
    wanted = all_of_them.topk(5, -1)
    assert torch.allclose(found["values"].double(), wanted.values, atol=1e-5)
    assert torch.equal(found["indices"].long(), wanted.indices)
    assert found["indices"].dtype is torch.int32
    rest = all_of_them.scatter(-1, wanted.indices, -torch.inf).logsumexp(-1)
    assert torch.allclose(found["log_rest"].double(), rest, atol=1e-5)


def test_the_rest_is_exact_where_almost_all_is_in_the_top(folders: dict[str, Path]) -> None:
    """1 - sum(top) would be 0 in float32."""
    top = stoker.TopK(folders["llama"], k=2)
    logits = torch.full((1, VOCABULARY), -60.0)
    logits[0, :2] = 0.0

    _, _, rest = top._top(logits)

    assert rest.item() == pytest.approx(-60 + np.log(VOCABULARY - 2) - np.log(2), rel=1e-5)


def test_many_logits_are_taken_in_pieces(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stoker.TopK(folders["llama"], k=5).encode({"input_ids": ids()})
    monkeypatch.setattr("stoker.encoders.language._LOGIT_BYTES", 4 * VOCABULARY * 7)

    found = stoker.TopK(folders["llama"], k=5).encode({"input_ids": ids()})

    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_checkpoint_unless_another_is_given(tmp_path: Path, stored: str) -> None:
    folder = make_llama(tmp_path, dtype=getattr(torch, stored))

    encoder = stoker.HiddenStates(folder, layers=[1])

    assert encoder.schema(RAGGED)["hidden_1"].dtype == stored
    assert encoder.encode({"input_ids": ids(1)})["hidden_1"].dtype is getattr(torch, stored)
    assert (
        stoker.HiddenStates(folder, layers=[1], dtype="float32").schema(RAGGED)["hidden_1"].dtype == "float32"
    )


def test_a_cache_of_hidden_states_in_float8_says_its_error(folders: dict[str, Path], tmp_path: Path) -> None:
    samples = [
        {"input_ids": row[:length].int(), "number": n}
        for n, (row, length) in enumerate(zip(ids(), LENGTHS, strict=True))
    ]
    encoder = stoker.HiddenStates(folders["llama"], layers=[1, -1])

    exact = stoker.precompute(samples, encoder, tmp_path, name="exact", device="cpu")
    cache = stoker.precompute(
        samples, encoder, tmp_path, name="small", device="cpu", dtype="float8_e4m3fn", keep=("input_ids",)
    )

    assert cache.schema["hidden_1"].quantized
    assert cache.schema["hidden_1"].ragged
    for n, length in enumerate(LENGTHS):
        assert cache[n]["input_ids"].tolist() == ids()[n, :length].tolist()
        for field in ("hidden_1", "hidden_3"):
            state = exact[n][field]
            assert cache[n][field].shape == state.shape == (length, 16)
            far = (cache[n][field].float() - state).abs().max() / state.abs().max()
            assert 0 < far <= cache.index.error[field]["max"] * (1 + 1e-6) <= 0.07


def test_encoder_processes_load_the_model_from_its_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    source = stoker.TorchSource(
        [{"input_ids": row[:length].int()} for row, length in zip(ids(), LENGTHS, strict=True)], version="1"
    )
    settings = PrecomputeSettings(device="cpu", devices=("cpu",), always_in_child=True)
    encoder = stoker.TopK(folders["llama"], k=3)

    cache = run_precompute(source, encoder, tmp_path, name="c", settings=settings).cache

    for n, length in enumerate(LENGTHS):
        wanted = encoder.encode({"input_ids": ids()[n : n + 1, :length]})
        assert torch.allclose(cache[n]["values"], wanted["values"][0], atol=1e-5)
        assert torch.equal(cache[n]["indices"], wanted["indices"][0])


# ----------------------------------------------------------------------------------------------------------
# What does not fit.


def test_a_number_that_is_no_token_costs_its_sample_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """On a GPU the model itself would cost the device."""
    samples = [{"input_ids": row.int()} for row in ids(6)]
    samples[2]["input_ids"][4] = VOCABULARY

    cache = stoker.precompute(
        samples,
        stoker.TextEncoder(folders["bert"], encode_batch=3),
        tmp_path,
        name="captions",
        device="cpu",
        max_quarantined=0.5,
    )

    assert cache.indices.tolist() == [0, 1, 3, 4, 5]
    assert f"{VOCABULARY} is not a token" in cache.quarantined[2].error


def test_a_sample_without_tokens_has_no_states_and_no_pooled_output(folders: dict[str, Path]) -> None:
    empty = torch.zeros((1, 0), dtype=torch.int64)

    states = stoker.HiddenStates(folders["llama"], layers=[1]).encode({"input_ids": empty})
    text = stoker.TextEncoder(folders["bert"]).encode({"input_ids": empty})
    top = stoker.TopK(folders["llama"], k=3).encode({"input_ids": empty})

    assert states["hidden_1"].shape == (1, 0, 16)
    assert text["hidden"].shape == (1, 0, 16)
    assert text["pooled"].isnan().all()
    assert {name: value.shape[:2] for name, value in top.items()} == dict.fromkeys(top, (1, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_is_tried_with_its_own_tokens_whatever_the_default_dtype_is(dtype: torch.dtype) -> None:
    """Rounded to a narrow dtype, the last token is none. On a GPU that costs the device."""
    seen: list[torch.Tensor] = []

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        seen.append(input_ids)
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 2))

    torch.set_default_dtype(dtype)
    try:
        language._is_causal(model, 50_257, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)

    assert int(seen[0].max()) == 50_256


def test_padding_before_the_tokens_of_a_causal_model_is_refused(folders: dict[str, Path]) -> None:
    left = {"input_ids": ids(), "attention_mask": mask().flip(1)}

    with pytest.raises(ValueError, match="pad at the end"):
        stoker.TextEncoder(folders["clip"]).encode(left)


def test_a_model_that_sees_both_sides_has_no_hidden_states_of_a_teacher(folders: dict[str, Path]) -> None:
    """Padding of a fixed length would reach its tokens."""
    with pytest.raises(EncoderError, match="not causal"):
        stoker.HiddenStates(folders["bert"], layers=[1]).encode({"input_ids": ids()})


def test_tokens_that_share_an_embedding_do_not_make_a_model_causal(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(folders["bert"], tmp_path / "bert") / "model.safetensors"
    weights = load_file(place)
    weights["embeddings.word_embeddings.weight"][:10] = 0
    save_file(weights, place, metadata={"format": "pt"})
    real = mask()

    found = stoker.TextEncoder(place.parent).encode({"input_ids": ids() * real, "attention_mask": real})

    wanted = reference(place.parent, "BertModel", input_ids=ids() * real, attention_mask=real.long())
    assert torch.allclose(found["hidden"][real], wanted.last_hidden_state[real], atol=1e-6)


def test_fields_layers_and_sizes_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    encoder = stoker.TextEncoder(folders["clip"])
    with pytest.raises(EncoderError, match=r"'input_ids'.*caption"):
        encoder.schema({"caption": Field(shape=(-1,), dtype="uint8", ragged=True)})
    with pytest.raises(EncoderError, match="Tokenize"):
        encoder.schema({"input_ids": Field(shape=(-1,), dtype="uint8", ragged=True)})
    with pytest.raises(EncoderError, match=r"77 tokens.*24"):
        encoder.schema({"input_ids": Field(shape=(77,), dtype="int32")})
    with pytest.raises(EncoderError, match="'hidden'"):
        encoder.schema({**FIXED, "hidden": Field(shape=(2,), dtype="float32")})
    other = {"attention_mask": Field(shape=(2,), dtype="bool")}
    with pytest.raises(EncoderError, match=r"'attention_mask' is bool \(2,\)"):
        encoder.schema({**FIXED, **other})
    for layers in ([4], [-5], [1, 1], [3, -1], []):
        with pytest.raises(EncoderError, match="3 layers"):
            stoker.HiddenStates(folders["llama"], layers=layers)
    for wrong in ("2", 1, None, [1.5], ["1"]):
        with pytest.raises(EncoderError, match="layers is "):
            stoker.HiddenStates(folders["llama"], layers=wrong)
    for setting in ({"layer": "1"}, {"norm": "no"}, {"encode_batch": "8"}, {"lengths": 64}, {"output": 5}):
        with pytest.raises(EncoderError, match=f"{next(iter(setting))} is "):
            stoker.TextEncoder(folders["bert"], **setting)
    with pytest.raises(EncoderError, match="folder is 5"):
        stoker.TextEncoder(5)
    with pytest.raises(EncoderError, match="temperature is '1'"):
        stoker.TopK(folders["llama"], k=3, temperature="1")
    for k in (0, VOCABULARY):
        with pytest.raises(EncoderError, match=f"k is {k}"):
            stoker.TopK(folders["llama"], k=k)


def test_weights_that_are_missing_are_refused_not_random(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(folders["llama"], tmp_path / "cut") / "model.safetensors"
    weights = load_file(place)
    removed = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    del weights[removed]
    save_file(weights, place, metadata={"format": "pt"})

    with pytest.raises(EncoderError, match=r"mlp\.up_proj\.weight"):
        stoker.HiddenStates(place.parent, layers=[1]).encode({"input_ids": ids()})


# ----------------------------------------------------------------------------------------------------------
# Identity.


def test_the_identity_names_weights_and_settings_but_no_place(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    moved = shutil.copytree(folders["llama"], tmp_path / "moved")
    first = stoker.HiddenStates(folders["llama"], layers=[1, -1]).identity()

    assert stoker.HiddenStates(moved, layers=[1, 3]).identity() == first
    others = [
        stoker.HiddenStates(moved, layers=[1]).identity(),
        stoker.HiddenStates(moved, layers=[1, -1], norm=False).identity(),
        stoker.HiddenStates(moved, layers=[1, -1], dtype="bfloat16").identity(),
        stoker.HiddenStates(make_llama(tmp_path / "other", seed=1), layers=[1, -1]).identity(),
        stoker.TopK(moved, k=4).identity(),
        stoker.TopK(moved, k=4, temperature=2).identity(),
    ]
    texts = [json.dumps(one, sort_keys=True) for one in (first, *others)]
    assert len(set(texts)) == len(texts)
    assert str(tmp_path) not in "".join(texts)


def test_how_weights_are_divided_among_files_does_not_matter(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    with quiet():
        LlamaForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    encoder, whole = (stoker.HiddenStates(place, layers=[-1]) for place in (tmp_path, folders["llama"]))

    assert encoder.identity()["weights"] == whole.identity()["weights"]
    assert torch.equal(*(one.encode({"input_ids": ids()})["hidden_3"] for one in (encoder, whole)))


def test_an_encoder_is_sent_to_a_process_without_its_weights(folders: dict[str, Path]) -> None:
    encoder = stoker.HiddenStates(folders["llama"], layers=[-1])
    wanted = encoder.encode({"input_ids": ids()})["hidden_3"]

    sent = pickle.dumps(encoder)

    assert len(sent) < os.path.getsize(folders["llama"] / "model.safetensors") / 4
    assert torch.equal(pickle.loads(sent).encode({"input_ids": ids()})["hidden_3"], wanted)


def test_identity_and_schema_need_no_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Importing it takes seconds, and a start with a cache that is ready should take none."""
    make_tokenizer(tmp_path)
    program = (
        "import sys, stoker; from stoker.schema import Field\n"
        f"e = stoker.TextEncoder({str(folders['clip'])!r}); e.identity()\n"
        "e.schema({'input_ids': Field(shape=(12,), dtype='int32')})\n"
        f"source = stoker.Tokenize([{{'caption': 'a cat'}}] * 3, {str(tmp_path)!r})\n"
        "source.identity(), source.schema()\n"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
