"""Several processes of one run, as `torchrun` starts them.

place.py    which rank of how many this process is, from the launcher's environment
ranks.py    what ranks do together, and `ALONE`, a single process that waits for no other
group.py    `RankGroup`: the same over torch.distributed, every wait with a deadline
pulse.py    who is alive, and who ended with which message
slices.py   cuts what is missing into whole groups, evenly among those that have nothing
"""
