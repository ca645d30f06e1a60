"""A local folder that stands for caches at a URL. Design: docs/design/035-caches-on-object-stores.md.

README.md has the map of this folder.
"""
