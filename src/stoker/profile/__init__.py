"""Profiles of any training loop: where its time goes, and what serving from each tier would change.

README.md has the map of this folder.
"""
