"""What a run would take on machines that are not here: arithmetic, and queues where several wait.

scenario.py    what is asked: machines, storage, data, times, prices; what cannot be is refused in words
keys.py        the same as `key=value` words with units
pace.py        precompute: the slowest stage sets the pace
mirror.py      what a local copy with a size limit has of what is asked for
queues.py      batches through links, cores and steps, event by event, the same for the same seed
loads.py       what a batch asks of each of those, from the planner's arithmetic
ways.py        each way of doing it: times, bytes, memory, what limits it
result.py      what comes out, as dataclasses
report.py      the same in words, as a table, as Markdown
"""
