"""Plugins that the core does not need: each folder is one, and each has a README.

The core reaches these through the entry points in `pyproject.toml`, as it reaches plugins of others.
"""
