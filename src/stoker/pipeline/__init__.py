"""Whole runs: one function per command, from a `Run` to a frozen result that knows its JSON.

context.py      `Run`: settings, tasks, folders, device and ranks of a command; what its folder remembers
stages.py       the stages of a configuration, their losses and windows
folders.py      whether what settings name can be written
build.py        sources and encoder of a task, the jobs that make its caches, the size of an encode batch
user_code.py    code of the user's own that settings name
staging.py      copies of raw files on local storage
caches.py       which caches there are, also where the raw data is gone; what they hold; how two differ
precompute.py   fills the caches, and repairs one
loaders.py      caches -> loaders of the training loop
plan.py         where records would be served from
physical.py     fields for validation and for stages that train a decoder
train.py        caches -> loaders -> training loop -> report; start-up, stall, GPU and cost by name
fitting.py      a module on batches of complete records, by the same loop
validate.py     rows of pass, warn and fail before a long run
bench.py        limits of the machine and what tiers reach of them
profile.py      where the time of a training goes
demo.py         all of it on generated data

A module imports only from those above it, and `validate`, `profile` and `demo` from `train`.
"""
