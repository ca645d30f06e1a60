"""The training service: jobs over HTTP, durable and live, run by workers on one machine or several.

states.py      the states of a job and the moves between them
schema.py      the tables; upgrade.py brings them up to date
database.py    transactions with deadlines, the clocks
jobs.py        what the API and the pages ask: create, list, cancel, pause, resume ...
outbox.py      events in the order in which they were committed
leases.py      what workers ask: claim, heartbeat, report, finish; the sweep of lost leases
folders.py     the state folder and the folder of a job
executor.py    the seam to processes; local.py runs them here
worker.py      one job after another; supervise.py keeps the workers running
"""
