"""Whole runs: one function per command, each from settings to a frozen result with `to_json`.

folders.py      whether what settings name can be written
burgers.py      makes the demo's data: a pseudo-spectral solver of Burgers' equation
build.py        settings -> sources, encoder, cache names; kinds.py makes the sources, by kind
locate.py       what settings ask for and what is there; gone.py where the source is not there any more
precompute.py   fills the caches of a configuration, or finds the one whose source is gone
statistics.py   statistics of the train split, fitted once
plan.py         where records would be served from
train.py        caches -> loaders -> training loop; start-up, stall, GPU and cost of a run, by name, and its page
machine.py      this machine in one line
validate.py     rows of pass, warn and fail before a long run
inspect.py      what a cache holds
keep.py         repairs a cache, and encodes again what was damaged
fitting.py      a module on batches of complete records, by the same loop
physical.py     validation in physical space
import_pt.py    earlier caches of `.pt` files into shards (pt_reader.py)
why.py          how two recipes differ
demo.py         all of it on generated data
"""
