"""Train a sparse autoencoder on the hidden states of a language model.

    python examples/sparse_autoencoder.py MODEL TEXTS OUT

MODEL is a folder with a causal model and its tokenizer, TEXTS a text file with a sample a line. The states
are stored once in 8 bits; training then takes single tokens, shuffled over all texts.
"""

import hashlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker


class SparseAutoencoder(torch.nn.Module):
    """Reconstructs states from their `active` largest features."""

    def __init__(self, width: int, features: int, active: int) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(width, features), torch.nn.Linear(features, width)
        self.active = active

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.encoder(states))
        values, places = found.topk(self.active, dim=-1)
        return self.decoder(torch.zeros_like(found).scatter(-1, places, values))


def main(model: Path, texts: Path, out: Path, epochs: int = 4) -> list[float]:
    """Return the part of the variance that is not explained, for each epoch."""
    items = [{"caption": line} for line in texts.read_text().splitlines()]
    version = hashlib.sha256(texts.read_bytes()).hexdigest()
    source = stoker.TorchSource(items, text={"caption": "bytes"}, version=version)
    tokens = stoker.Tokenize(source, model, max_length=None, pad=False)
    encoder = stoker.HiddenStates(model, layers=[-2], output="hidden")
    cache = stoker.precompute(tokens, encoder, out, name="states", dtype="float8_e4m3fn")
    (field,) = cache.schema
    rows = stoker.Windows(horizon=0, field=field)  # every token is an example
    loader = stoker.Loader(cache, 64, windows=rows, shuffle=True, seed=0)
    torch.manual_seed(0)
    sae = SparseAutoencoder(cache.schema[field].shape[-1], features=64, active=8)
    optimizer, unexplained = torch.optim.Adam(sae.parameters(), lr=3e-3), list[float]()
    for _ in range(epochs):
        error = variance = 0.0
        for batch in loader:
            loss = F.mse_loss(sae(batch.z0), batch.z0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            error, variance = error + loss.item(), variance + batch.z0.var(dim=0).mean().item()
        unexplained.append(error / variance)
    return unexplained


if __name__ == "__main__":
    print("unexplained", *(f"{part:.3f}" for part in main(*map(Path, sys.argv[1:4]))))
