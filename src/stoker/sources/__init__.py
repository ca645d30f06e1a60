"""Raw samples, by number: simulations, images, trajectories, archives, tables, any map-style torch `Dataset`.

README.md has the map of this folder.
"""
