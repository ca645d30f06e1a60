"""Tiny random models and a tokenizer in folders, as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "red", "blue", "cat", "dog", "runs", "sleeps", "two", "long", "word")
VOCABULARY = 50
"""Tokens of the language models; the tokenizer has fewer."""


@contextmanager
def quiet() -> Any:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def save(folder: Path, make: Callable[[], Any], seed: int = 0) -> Path:
    with quiet():
        torch.manual_seed(seed)
        make().eval().save_pretrained(folder)
    return folder


def sizes(**more: Any) -> dict[str, Any]:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return {**small, "vocab_size": VOCABULARY, "max_position_embeddings": 24, **more}


def make_clip(folder: Path, *, projection: int = 0, seed: int = 0) -> Path:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    ends = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
    if not projection:
        return save(folder, lambda: CLIPTextModel(CLIPTextConfig(**sizes(**ends))), seed)
    config = CLIPTextConfig(**sizes(**ends, projection_dim=projection))
    return save(folder, lambda: CLIPTextModelWithProjection(config), seed)


def make_t5(folder: Path) -> Path:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=3, num_heads=2, vocab_size=VOCABULARY)
    return save(folder, lambda: T5EncoderModel(config))


def make_bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    return save(folder, lambda: BertModel(BertConfig(**sizes())))


def make_llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes(max_position_embeddings=128, pad_token_id=0, **more))
    return save(folder, lambda: LlamaForCausalLM(config).to(dtype), seed)


def make_gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=VOCABULARY, **ends)
    return save(folder, lambda: GPT2LMHeadModel(config))


def make_vae(folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """An autoencoder that reduces by 8, in `folder`/vae."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    model = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=2,
        layers_per_block=1,
        **more,
    )
    model.save_pretrained(folder / "vae")
    return folder


def make_tokenizer(folder: Path, *, words: tuple[str, ...] = WORDS) -> Path:
    """Words as tokens, between `<s>` (1) and `</s>` (3); `<pad>` is 0 and `<unk>` 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(("<pad>", "<s>", "<unk>", "</s>", *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
