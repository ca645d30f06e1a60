"""Files, locks, threads, processes, HTTP and signals: each general mechanism exists once, here.

README.md has the map of this folder.
"""
