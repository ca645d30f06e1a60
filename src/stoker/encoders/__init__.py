"""Frozen encoders: what turns a raw sample into the record that training reads.

protocol.py   what an encoder promises
grid.py       fields on a regular grid to tokens
keeping.py    fields of the raw sample, stored next to the encoder's output
module.py     any frozen `nn.Module` or function
features.py   vision models from a local folder, put together by vision_model.py
normalize.py  statistics of the training samples, applied before an encoder
decode.py     back from latents to fields
groups.py     the fixed group, from schemas alone
weights.py    weights by content: digest, save, load, refuse what has no value yet
describe.py   what code an encoder runs, for its identity

No encoder (`None`) stores samples as they are; there is no class for it.
"""
