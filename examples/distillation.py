"""Distill a language model offline, from the stored top-k of its teacher.

    python examples/distillation.py TEACHER STUDENT TEXTS OUT

TEACHER and STUDENT are folders with a causal model, TEACHER with the tokenizer of both; TEXTS is a text file
with a sample a line. The teacher runs once. Training packs complete texts to a budget of tokens.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

import stoker


def loss_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the divergence from the teacher: its top k, and all other tokens together."""
    log = logits.log_softmax(-1)
    top = log.gather(-1, batch["indices"].long())
    rest = torch.log1p(-top.exp().sum(-1).clamp(max=1 - 1e-6))
    values, other = batch["values"], batch["log_rest"]
    return ((values.exp() * (values - top)).sum(-1) + other.exp() * (other - rest)).mean()


def main(
    teacher: Path, student: Path, texts: Path, out: Path, epochs: int = 3, lr: float = 1e-2
) -> list[float]:
    """Return the mean loss of each epoch."""
    from transformers import AutoModelForCausalLM

    items = [{"caption": line} for line in texts.read_text().splitlines()]
    version = hashlib.sha256(texts.read_bytes()).hexdigest()
    source = stoker.TorchSource(items, text={"caption": "bytes"}, version=version)
    tokens = stoker.Tokenize(source, teacher, max_length=None, pad=False)
    cache = stoker.precompute(tokens, stoker.TopK(teacher, k=8), out, name="top", keep="input_ids")
    loader = stoker.Loader(cache, batch_tokens=64, shuffle=True, seed=0)
    model = AutoModelForCausalLM.from_pretrained(student, attn_implementation="eager")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr), list[float]()
    for _ in range(epochs):
        found: list[float] = []
        for batch in loader:
            ids, place = batch["input_ids"].long()[None], batch["position_ids"][None]
            text = torch.bucketize(torch.arange(ids.shape[1]), batch["cu_seqlens"][1:], right=True)
            seen = (text[:, None] == text) & (place[0, :, None] >= place[0])  # before it, in its own text
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
            logits = model(input_ids=ids, position_ids=place, attention_mask=mask).logits[0]
            loss = loss_of(logits, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(sum(found) / len(found))
    return losses


if __name__ == "__main__":
    print("loss", *(f"{loss:.4f}" for loss in main(*map(Path, sys.argv[1:5]))))
