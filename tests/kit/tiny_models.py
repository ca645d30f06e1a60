"""Models of a few kilobytes with random weights, saved as folders: the parts of a pipeline of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "cat", "dog", "red", "blue", "on", "the", "grass", "car", "house", "of", "small", "large")


def save_tokenizer(folder: Path, *, max_length: int = 8) -> None:
    """Save a tokenizer of whole words, with the tokens that text encoders need."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 3)]
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=max_length, **names).save_pretrained(
        folder
    )


def save_vae(folder: Path, *, seed: int = 0) -> None:
    """Save an autoencoder for images (3, 16, 16), whose latents are (4, 8, 8)."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.18,
    ).save_pretrained(folder)


def save_clip_text(folder: Path, *, seed: int = 0) -> None:
    """Save a CLIP text encoder of width 32."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    CLIPTextModel(config).save_pretrained(folder)


def save_t5(folder: Path, *, seed: int = 0) -> None:
    """Save a T5 encoder of width 32."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    T5EncoderModel(
        T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ).save_pretrained(folder)


def make_unet(*, width: int = 32, seed: int = 0) -> Any:
    """Return a conditional UNet for latents (4, 8, 8) and text of `width`."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width,
        attention_head_dim=4,
        norm_num_groups=4,
    )
