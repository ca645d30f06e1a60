"""Where the time of any training loop goes, and what serving from each tier would make of it.

README.md has the map of this folder.
"""
