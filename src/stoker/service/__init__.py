"""The training service: jobs over HTTP, durable and live, run by workers on one machine.

README.md has the map of this folder. `stoker.service.Client` speaks to a running service.
"""

from stoker.service.client import Client

__all__ = ["Client"]
