"""One line on a Dataset you have: `python examples/one_line.py [FOLDER]`."""

import sys

import torch

import stoker

torch.manual_seed(0)  # other numbers would be other data, and another cache
dataset = torch.utils.data.TensorDataset(torch.randn(1_000, 16, 32), torch.arange(1_000))

loader = stoker.cached(
    dataset, cache_dir=sys.argv[1] if len(sys.argv) > 1 else ".stoker", batch_size=64, shuffle=True
)

for x, label in loader:
    assert len(x) == len(label)

print(loader)
