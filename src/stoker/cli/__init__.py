"""The command line: parse, one call into `stoker.pipeline` or `stoker.store`, print.

main.py      the commands, each with help and an example
flags.py     the parameters that commands share, and the flags of the earlier precompute script
edge.py      what happens at the process edge: one JSON object, one line per error, exit codes, signals
streams.py   standard streams that are closed, full or read by nobody
render.py    results as short tables and lines

Nothing here imports torch until a command runs, so that `stoker --help` answers at once.
"""
