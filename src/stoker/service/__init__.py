"""The training service: jobs over HTTP, durable and live, run by workers on one machine.

README.md has the map of this folder.
"""
