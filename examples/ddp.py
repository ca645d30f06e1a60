"""Your own loop on several ranks: `torchrun --nproc-per-node 2 examples/ddp.py [FOLDER]`."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stoker

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)  # the same numbers on every rank: one data set, one cache
x = torch.randn(1_000, 32)
dataset = torch.utils.data.TensorDataset(x, x @ torch.randn(32, 1))

# All ranks encode, each its groups. Before the process group: nothing waits in a collective meanwhile.
source = stoker.TorchSource(dataset)
folder = sys.argv[1] if len(sys.argv) > 1 else ".stoker"
cache = stoker.precompute(source, None, folder, name="ddp", part=(rank, world_size))

dist.init_process_group("gloo")  # "nccl" on GPUs
model = DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = stoker.Loader(
    cache, batch_size=25, rank=rank, world_size=world_size, shuffle=True
)  # 25 examples of each global batch
for _ in range(5):
    for batch in loader:
        loss = (model(batch["0"]) - batch["1"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# In order, each rank has a piece of its own: every example once, so that sums over the ranks are exact.
sums = torch.zeros(2, dtype=torch.float64)
for batch in stoker.Loader(cache, batch_size=64, shuffle=False, rank=rank, world_size=world_size):
    with torch.no_grad():
        errors = (model.module(batch["0"]) - batch["1"]).square()
    sums += torch.tensor([errors.sum(), len(errors)], dtype=torch.float64)
dist.all_reduce(sums)
if rank == 0:
    print(f"{world_size} ranks, {sums[1]:.0f} examples evaluated, mean squared error {sums[0] / sums[1]:.2g}")
dist.destroy_process_group()
