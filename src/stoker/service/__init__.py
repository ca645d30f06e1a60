"""The training service: jobs over HTTP, durable and live, run by workers on one machine.

app.py         the web application: middleware, routers, earlier addresses;  server.py  uvicorn with limits
security.py    what every request passes first; which files, databases and encoders may be named
api.py         the routes of the API;  models.py  bodies of requests and answers, errors, examples
pages.py       the pages and their routes;  stream.py  live events and logs;  client.py  a client
services.py    everything that routes and pages work with, made once
figures.py, traffic.py   what the service finds out about itself;  background.py  what takes long or may hang
database.py    the tables, their versions, transactions with timeouts, states of a job, events
jobs.py        what the API asks of jobs; what workers ask (`JobQueue`); what a job's process says
folders.py     the state folder, the folder of a job, job.json and events.jsonl
supervisor.py  keeps the workers running: heartbeat, kill, jobs of dead workers; chores
worker.py      one job after another;  executor.py  the processes of jobs here;  ray.py  on a Ray cluster
child.py       the process of a job;  runs.py  what it does, by kind of data
training_config.py  what a job is asked for, and that in the terms of docs/config.md
datasets.py    the data sets that jobs name;  probes.py  looks at them in a process of its own
"""
