"""Encode on a Ray cluster, and run jobs of the service on one.

settings.py   which cluster, what a task takes
cluster.py    the connection, nodes and room
engine.py     `RayEngine`: sends slices out, takes back what is lost
task.py       what runs on a node
board.py      the actor that hears how far tasks are
jobs.py       jobs of the service on a cluster;  job_child.py what runs there for one
"""
