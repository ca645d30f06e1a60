"""Raw samples, by number: HDF5 simulations and any map-style torch `Dataset`.

protocol.py   what a source promises, and how it names itself for the recipe
"""
