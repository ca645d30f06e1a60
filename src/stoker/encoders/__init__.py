"""Frozen encoders: what turns a raw sample into the record that training reads.

README.md has the map of this folder.
"""
