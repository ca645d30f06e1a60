"""What a job's process does, by the kind of its data.

journal.py    what it says about itself, a line each
settings.py   a job's configuration and data sets in the terms of docs/config.md
rows.py       radio rows: a place for each; images.py: a class for each image
operator.py   simulations: the operator on latents, by `stoker.train`
generate.py   data sets that the service makes
"""
