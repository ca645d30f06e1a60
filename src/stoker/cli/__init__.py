"""The command line: parse, one call into `stoker.pipeline` or `stoker.store`, print.

guardian.py        the entry; starts what encodes in a child, and again when that crashes or hangs
main.py            the commands, each with help and an example; keeping.py those that look after caches
flags.py           the parameters that commands share, and the flags of the earlier precompute script
quantities.py      sizes, times and shares as people type them
edge.py            what happens at the process edge: one JSON object, one line per error, exit codes, signals
streams.py         standard streams that are closed, full or read by nobody
render.py          results as short tables and lines; render_keeping.py those of looking after caches

Nothing here imports torch until a command runs, so that `stoker --help` answers at once.
"""
