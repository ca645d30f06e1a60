"""Whole runs: one function per command, from a `Run` to a frozen result that knows its JSON.

README.md has the map of this folder.
"""
