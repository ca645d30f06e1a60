"""The command line: parse, one call into `stoker.run` or `stoker.store`, print.

README.md has the map of this folder.
"""
