"""Child processes: started in one way, forked from a process that has imported what they need.

child.py      `Child`: start, watch, stop and explain one child; `preload` starts the import ahead of need
preloaded.py  the owner's end of a preloaded process; starts it again when it is gone
server.py     the preloaded process: imports modules, then forks a child for each request
entry.py      the child's side: what every child does before and after its target
heartbeat.py  a page in shared memory: what a child is doing;  wire.py  frames over its socket
output.py     what a child prints, kept up to a bound;  oom.py  how often the kernel killed for memory

A child is forked in some 30 ms, where a Python that imports torch takes seconds. Design note 042.
"""
