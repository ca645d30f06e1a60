"""Where the time of any training loop goes, and what serving from each tier would make of it.

probe.py      hands a loop its own batches, then one at hand again and again, then made-up ones; times them
count.py      products and kernels of one step
stacks.py     what the code is doing while samples are read, by sampling; which line costs most
result.py     figures, tiers and verdict: arithmetic
elsewhere.py  what GPUs that are not here would do: arithmetic
page.py       the page, with the picture of flame.py
run.py        a loader and a step function, or a whole script; of a configuration: pipeline/profile.py
"""
