"""Several processes of one run, as `torchrun` starts them.

README.md has the map of this folder.
"""
