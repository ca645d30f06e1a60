"""The training service: jobs over HTTP, durable and live, run by workers on one machine.

states.py      the states of a job and the moves between them
schema.py      the tables; upgrade.py brings them up to date
database.py    transactions with deadlines, the clocks
jobs.py        what the API and the pages ask: create, list, cancel, pause, resume ...
outbox.py      events in the order in which they were committed
leases.py      what workers ask: claim, heartbeat, report, finish; the sweep of lost leases
folders.py     the state folder and the folder of a job
job_file.py    what a job's process is told; lines.py what it says
executor.py    the seam to processes; local.py (and confine.py) runs them here
attempt.py     one attempt at a job; worker.py one after another; supervise.py keeps the workers running
training_config.py  what a job is asked for; child.py and runs/ what its process does
datasets.py    the data sets that jobs name (dataset_table.py, dataset_requests.py, radio_sets.py);
               look.py and looks.py look at them in a process of their own
"""
