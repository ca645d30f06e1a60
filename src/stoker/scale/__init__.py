"""Several processes of one run, as `torchrun` starts them.

place.py    which rank of how many this process is, from the launcher's environment
ranks.py    what ranks do together, and `ALONE`, a single process that waits for no other
group.py    `RankGroup`: the same over torch.distributed, every wait with a deadline
pulse.py    who is alive, and who ended with which message

Precompute on a Ray cluster (`ray_engine.py`, `RayEngine`):

slices.py        cuts what is missing into whole groups, evenly among those that have nothing
ray_settings.py  which cluster, what a task takes
ray_cluster.py   the connection, nodes and room
ray_folder.py    where the cache folder is, as the driver says and as a node finds it
ray_round.py     sends slices out, takes back what is lost;  ray_out.py what is known of one that is out
ray_task.py      what runs on a node
ray_board.py     the actor that hears how far tasks are;  ray_view.py shows it
"""
