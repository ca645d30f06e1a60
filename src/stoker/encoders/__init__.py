"""Frozen encoders: what turns a raw sample into the record that training reads.

protocol.py   what an encoder promises, and the fixed group, from schemas alone
grid.py       fields on a regular grid to tokens, and back; as a function that gradients pass
mesh.py       fields on any points to tokens, and back
module.py     any frozen `nn.Module` or function, and what code it runs, for its identity
features.py   vision models from a local folder
wrappers.py   encoders made of encoders: raw fields kept, samples normalized, the pair of a steady problem
weights.py    weights by content: digest, save, load, refuse what has no value yet

No encoder (`None`) stores samples as they are; there is no class for it.
"""
