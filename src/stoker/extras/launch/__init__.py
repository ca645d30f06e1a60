"""Rented machines: the script that one starts with, and the provider that rents them.

script.py      the start-up script, from a typed model
pieces.py      the text of its parts
ranks.py       what the script runs under torchrun, for its exit code
plan.py        that model, from a configuration and its repository
secrets.py     which variables are secrets, and texts without them
preflight.py   what has to be right before anything is paid for
client.py      the provider's REST interface
vast.py        search, up, status, logs, down
"""
