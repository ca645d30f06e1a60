"""Rows of a database with radio measurements, and a network that finds transmitters."""
