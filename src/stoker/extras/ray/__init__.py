"""Encode on a Ray cluster, and run jobs of the service on one."""
