"""Provide the mechanisms that everything else is built on; each exists once, and knows nothing of caches.

README.md has the map of this folder.
"""
