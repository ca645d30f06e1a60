"""Whole runs: one function per command, each from settings to a frozen result with `to_json`.

folders.py      whether what settings name can be written
burgers.py      makes the demo's data: a pseudo-spectral solver of Burgers' equation
build.py        settings -> sources, encoder, cache names
precompute.py   fills the caches of a configuration, or finds the one whose source is gone
plan.py         where records would be served from
train.py        caches -> loaders -> training loop
validate.py     rows of pass, warn and fail before a long run
inspect.py      what a cache holds
why.py          how two recipes differ
demo.py         all of it on generated data
"""
