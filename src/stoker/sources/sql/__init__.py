"""Rows of a database as samples: one ordered read, then arithmetic.

README.md has the map of this folder.
"""
