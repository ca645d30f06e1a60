"""Reference training on latents: a small operator, the training loop, its checkpoints and its curves.

README.md has the map of this folder.
"""
